"""Is the posterior right, and if it is not, does the fit say so?

Small models on which federated methods have been wrong, with the exact posterior of each: in closed form, on a grid, or
by integration in NumPy's float64. Every method is run with its defaults, as a new user would. A fit is **right** where
every global scalar's mean is within .1 sd of the exact one and its sd within 10 %, **near** within .3 sd and 40 %;
beyond that it is wrong, and **silently wrong** where its verdict is ok. (``fit.verdict`` trusts .2 sd and 25 %, with an
error of up to half of that.)

Run it with

.. code-block:: text

    python -m benchmarks.trust --models a b c --methods EP PVI SFVI SFVIAvg FedPA --seeds 10

A line a fit::

    model method seed seconds rounds | shift (of which scalar) | sd ratios from .. to .. | right|near|WRONG | verdict

and at the end a markdown table with, for each model and method, how many fits were right, near, wrong with a verdict
that is not ok, and silently wrong. ``--verbose`` adds each scalar's mean and sd, exact and found; ``--correct`` the
same after ``fit.correct``; ``--x64`` runs in float64.
"""

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf
from benchmarks.common import table
from benchmarks.exact import Exact, gridded, regression_unknown_sd, row_integrals, weighted

RIGHT, NEAR = (0.1, 1.1), (0.3, 1.4)  # sds that a mean may be off, factors that an sd may


class Problem(NamedTuple):
    """A model, its silos, and the exact posterior of its globals."""

    model: Callable
    silos: Callable[[], nf.Silos]
    exact: Callable[[], Exact]  # {scalar as in fit.summary(): (mean, sd)}


# --- a: rare events in ten trials, a row each -----------------------------------------------------------------------


def trials(r, n):
    mu, tau = numpyro.sample("mu", dist.Normal(-4, 2)), numpyro.sample("tau", dist.HalfNormal(2))
    with numpyro.plate("trial", r.shape[0]):
        x = numpyro.sample("x", dist.Normal(mu, tau))
        numpyro.sample("r", dist.Binomial(n, logits=x), obs=r)


def trials_data():
    rng = np.random.default_rng(0)
    effect, n = rng.normal(-5, 1, 10), np.full(10, 10_000)
    return rng.binomial(n, 1 / (1 + np.exp(-effect))), n


def trials_silos():
    r, n = trials_data()
    return nf.Silos({f"t{i}": dict(r=r[i : i + 1], n=n[i : i + 1]) for i in range(10)})


def binomial(r, n, x):
    """Log likelihood of logits without its constant, its slope and its curvature."""
    p = 1 / (1 + np.exp(-x))
    return r * x - n * np.logaddexp(0, x), r - n * p, n * p * (1 - p)


def trials_exact():
    r, n = trials_data()

    def log_density(z):
        mu, tau = z[:, 0], np.exp(z[:, 1])
        rows = row_integrals(lambda x: binomial(r, n, x), mu[:, None], tau[:, None], len(r))
        return rows - (mu + 4) ** 2 / 8 - tau**2 / 8 + z[:, 1]

    return weighted(log_density, [-5.0, 0.0], lambda z: {"mu": z[:, 0], "tau": np.exp(z[:, 1])})


# --- b: a trend over calendar years, not centred --------------------------------------------------------------------


def years(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1000).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(2))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * x, s), obs=y)


def years_data():
    rng = np.random.default_rng(0)
    x = rng.integers(1990, 2021, 600)
    y = 3 + 0.05 * (x - 2005) + rng.normal(size=600)
    return rng.integers(0, 5, 600), x.astype("f"), y.astype("f")


def years_silos():
    silo, x, y = years_data()
    return nf.split(silo, x=x, y=y)


def years_exact():
    _, x, y = years_data()
    design = np.stack([np.ones(len(x)), x.astype(float)], axis=1)
    found = regression_unknown_sd(design, y, np.full(2, 1000.0), prior_sd=2.0)
    return {"w[0]": found[0], "w[1]": found[1], "s": found[2]}


# --- c: a cubic trend of overdispersed counts -----------------------------------------------------------------------


def counts(t, y):
    a = numpyro.sample("a", dist.Uniform(-20, 20))
    w = numpyro.sample("w", dist.Uniform(-10, 10).expand([3]).to_event(1))
    s = numpyro.sample("s", dist.Uniform(0, 5))
    with numpyro.plate("years", t.shape[0]):
        e = numpyro.sample("e", dist.Normal(0, 1))
        rate = jnp.exp(a + w[0] * t + w[1] * t**2 + w[2] * t**3 + s * e)
        numpyro.sample("y", dist.Poisson(rate), obs=y)


def counts_data():
    rng = np.random.default_rng(3)
    t = np.linspace(-1.9, 1.9, 48).astype("f")
    mean = np.exp(3.8 + 0.9 * t + 0.2 * t**2 - 0.25 * t**3 + 0.1 * rng.normal(size=48))
    return t, rng.poisson(mean).astype("i4")


def counts_silos():
    t, y = counts_data()
    return nf.split(np.repeat(["60s", "70s", "80s", "90s"], [8, 16, 10, 14]), t=t, y=y)


def counts_exact():
    t, y = counts_data()
    t = t.astype(float)
    powers = np.stack([t**k for k in range(4)])

    def poisson(x):
        rate = np.exp(np.minimum(x, 50.0))
        return y * x - rate, y - rate, rate

    def log_density(z):
        s = 5 / (1 + np.exp(-z[:, 4]))
        rows = row_integrals(poisson, z[:, :4] @ powers, s[:, None], len(y))
        within = (np.abs(z[:, 0]) < 20) & np.all(np.abs(z[:, 1:4]) < 10, axis=1)
        return np.where(within, rows + np.log(s * (5 - s)), -np.inf)

    def scalars(z):
        names = ["a", "w[0]", "w[1]", "w[2]"]
        return {name: z[:, i] for i, name in enumerate(names)} | {"s": 5 / (1 + np.exp(-z[:, 4]))}

    return weighted(log_density, [3.8, 0.9, 0.2, -0.25, -3.0], scalars)


# --- no events in one arm -------------------------------------------------------------------------------------------


def arms(y, n, treat):
    a, b = numpyro.sample("a", dist.Normal(0, 5)), numpyro.sample("b", dist.Normal(0, 5))
    with numpyro.plate("arms", y.shape[0]):
        numpyro.sample("y", dist.Binomial(n, logits=a + b * treat), obs=y)


ARM_EVENTS = np.array([[3, 0], [1, 0], [2, 0], [4, 0], [1, 0]])  # in five hospitals, untreated and treated
ARM_SIZE = 20


def arms_silos():
    silo = lambda events: dict(y=events, n=np.full(2, ARM_SIZE), treat=np.array([0.0, 1.0], "f"))
    return nf.Silos({f"h{i}": silo(events) for i, events in enumerate(ARM_EVENTS)})


def arms_exact():
    events, size = ARM_EVENTS.sum(axis=0), ARM_SIZE * len(ARM_EVENTS)

    def log_density(z):
        logits = np.stack([z[:, 0], z[:, 0] + z[:, 1]], axis=1)
        return np.sum(binomial(events, size, logits)[0], axis=1) - np.sum(z**2, axis=1) / 50

    grids = np.linspace(-6, 3, 400), np.linspace(-20, 6, 800)
    return gridded(log_density, grids, lambda z: {"a": z[:, 0], "b": z[:, 1]})


# --- four sites -----------------------------------------------------------------------------------------------------


def four_sites(y, n):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfNormal(1))
    b = numpyro.sample("b", dist.Normal(0, 5))
    with numpyro.plate("site", y.shape[0]):
        alpha = numpyro.sample("alpha", dist.Normal(mu, tau))
        logits = alpha[:, None] + b * jnp.arange(2.0)
        numpyro.sample("y", dist.Binomial(n, logits=logits).to_event(1), obs=y)


SITE_EVENTS = np.array([[12, 6], [21, 14], [7, 5], [16, 11]])  # untreated and treated
SITE_SIZE = 40


def four_sites_silos():
    silo = lambda events: dict(y=events[None], n=np.full((1, 2), SITE_SIZE))
    return nf.Silos({f"s{i}": silo(events) for i, events in enumerate(SITE_EVENTS)})


def four_sites_exact():
    def log_density(z):
        tau = np.exp(z[:, 1])

        def both(x):
            arms = [binomial(SITE_EVENTS[:, k], SITE_SIZE, x + k * z[:, 2:3]) for k in range(2)]
            return tuple(left + right for left, right in zip(*arms, strict=True))

        rows = row_integrals(both, z[:, :1], tau[:, None], len(SITE_EVENTS))
        return rows - z[:, 0] ** 2 / 50 - z[:, 2] ** 2 / 50 - tau**2 / 2 + z[:, 1]

    scalars = lambda z: {"mu": z[:, 0], "tau": np.exp(z[:, 1]), "b": z[:, 2]}
    return weighted(log_density, [-0.5, -0.5, -0.5], scalars)


# --- mirror modes, and classes without an order ---------------------------------------------------------------------


def mirror(y):
    a = numpyro.sample("a", dist.Normal(0, 5))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(a**2, 1), obs=y)


def mirror_data():
    return (4 + np.random.default_rng(0).normal(size=60)).astype("f")


def mirror_silos():
    return nf.split(np.repeat(list("abc"), 20), y=mirror_data())


def mirror_exact():
    y = mirror_data().astype(float)
    log_density = lambda z: -0.5 * np.sum((y - z**2) ** 2, axis=1) - z[:, 0] ** 2 / 50
    return gridded(log_density, (np.linspace(-5, 5, 20_000),), lambda z: {"a": z[:, 0]})


def classes(y):
    m = numpyro.sample("m", dist.Normal(0, 5).expand([2]).to_event(1))
    with numpyro.plate("n", y.shape[0]):
        kind = numpyro.sample("kind", dist.Bernoulli(0.5))
        numpyro.sample("y", dist.Normal(m[kind], 1), obs=y)


def classes_data():
    rng = np.random.default_rng(0)
    kind = rng.uniform(size=90) < 0.5
    return (np.where(kind, 1.5, -1.5) + rng.normal(size=90)).astype("f")


def classes_silos():
    return nf.split(np.repeat(list("abc"), 30), y=classes_data())


def classes_exact():
    y = classes_data().astype(float)
    parts = lambda m: -0.5 * (y - m[:, None]) ** 2

    def log_density(z):
        each = np.logaddexp(parts(z[:, 0]), parts(z[:, 1]))
        return np.sum(each, axis=1) - np.sum(z**2, axis=1) / 50

    grid = np.linspace(-4, 4, 400)
    return gridded(log_density, (grid, grid), lambda z: {"m[0]": z[:, 0], "m[1]": z[:, 1]})


# --- regressions ----------------------------------------------------------------------------------------------------


def line(x, y):
    w = numpyro.sample("w", dist.Normal(0, 10).expand([2]).to_event(1))
    s = numpyro.sample("s", dist.HalfNormal(2))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(w[0] + w[1] * x, s), obs=y)


def disjoint_data():
    """Silos that have seen three ranges of the covariate, none of them twice."""
    rng = np.random.default_rng(0)
    x = rng.uniform(size=120) + np.repeat([0.0, 5.0, 10.0], 40)
    return x.astype("f"), (1 + 0.5 * x + rng.normal(size=120)).astype("f")


def disjoint_silos():
    x, y = disjoint_data()
    return nf.split(np.repeat(list("abc"), 40), x=x, y=y)


def disjoint_exact():
    x, y = disjoint_data()
    design = np.stack([np.ones(len(x)), x.astype(float)], axis=1)
    found = regression_unknown_sd(design, y, np.full(2, 10.0), prior_sd=2.0)
    return {"w[0]": found[0], "w[1]": found[1], "s": found[2]}


def units(y):
    mu, s = numpyro.sample("mu", dist.Normal(200, 100)), numpyro.sample("s", dist.HalfNormal(20))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, s), obs=y)


def units_data():
    return (242 + 5 * np.random.default_rng(0).normal(size=100)).astype("f")


def units_silos():
    return nf.split(np.repeat(list("abcd"), 25), y=units_data())


def units_exact():
    y = units_data()
    found = regression_unknown_sd(np.ones((len(y), 1)), y - 200.0, np.full(1, 100.0), prior_sd=20.0)
    return {"mu": (found[0][0] + 200, found[0][1]), "s": found[1]}


PROBLEMS = {
    "a": Problem(trials, trials_silos, trials_exact),
    "b": Problem(years, years_silos, years_exact),
    "c": Problem(counts, counts_silos, counts_exact),
    "arms": Problem(arms, arms_silos, arms_exact),
    "sites": Problem(four_sites, four_sites_silos, four_sites_exact),
    "mirror": Problem(mirror, mirror_silos, mirror_exact),
    "classes": Problem(classes, classes_silos, classes_exact),
    "disjoint": Problem(line, disjoint_silos, disjoint_exact),
    "units": Problem(units, units_silos, units_exact),
}


# --- the judgement --------------------------------------------------------------------------------------------------


class Off(NamedTuple):
    """How far a fit is from the exact posterior."""

    shift: float  # the largest of a mean, in exact sds, signed
    where: str
    low: float  # the least and the largest ratio of sds
    high: float

    def within(self, limits: tuple[float, float]) -> bool:
        return abs(self.shift) <= limits[0] and 1 / limits[1] <= self.low and self.high <= limits[1]

    @property
    def grade(self) -> str:
        return "right" if self.within(RIGHT) else "near" if self.within(NEAR) else "WRONG"


def off(found: Exact, exact: Exact) -> Off:
    shifts = {name: (found[name][0] - mean) / sd for name, (mean, sd) in exact.items()}
    ratios = [found[name][1] / sd for name, (_, sd) in exact.items()]
    where = max(shifts, key=lambda name: abs(shifts[name]) if np.isfinite(shifts[name]) else np.inf)
    return Off(shifts[where], where, min(ratios), max(ratios))


def found_in(fit: Any, names: Any) -> Exact:
    summary = fit.summary(num_samples=20_000)
    return {name: (float(summary["mean"][name]), float(summary["sd"][name])) for name in names}


def report(name: str, fit: Any, exact: Exact, verbose: bool) -> str:
    found = found_in(fit, exact)
    away, verdict = off(found, exact), fit.verdict
    print(
        f"{name} | {away.shift:+.3f} ({away.where}) | {away.low:.3f} .. {away.high:.3f} | {away.grade} | "
        f"{verdict.status}: {'; '.join(verdict.reasons)[:160]}",
        flush=True,
    )
    if verbose:
        for scalar, (mean, sd) in exact.items():
            print(
                f"    {scalar:6} exact {mean:.5g} +- {sd:.4g}, found {found[scalar][0]:.5g} +- {found[scalar][1]:.4g}"
            )
    if away.grade == "WRONG":
        return "wrong, silently" if verdict.ok else "wrong, said"
    return away.grade if verdict.ok else f"{away.grade}, doubted"


def main(args: argparse.Namespace) -> None:
    jax.config.update("jax_enable_x64", args.x64)
    warnings.simplefilter("ignore")
    grades = ["right", "right, doubted", "near", "near, doubted", "wrong, said", "wrong, silently", "raised"]
    lines = []
    for name in args.models:
        problem = PROBLEMS[name]
        silos, exact = problem.silos(), problem.exact()
        print(name, "exact:", {k: (round(m, 4), round(s, 4)) for k, (m, s) in exact.items()}, flush=True)
        for method in args.methods:
            counted: Counter[str] = Counter()
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                began, label = time.perf_counter(), f"{name} {method} {seed}"
                try:
                    fit = getattr(nf, method)(problem.model).run(jax.random.key(seed), silos, progress_bar=False)
                    label += f" {time.perf_counter() - began:.1f}s {fit.state.round}"
                    counted[report(label, fit, exact, args.verbose)] += 1
                    if args.correct:
                        report(f"{label} corrected", fit.correct(jax.random.key(seed + 1)), exact, args.verbose)
                except (nf.NonFiniteError, ValueError) as error:
                    counted["raised"] += 1
                    print(f"{label} | {type(error).__name__}: {str(error)[:200]}", flush=True)
            lines.append([name, method, *(counted[grade] or "" for grade in grades)])
    print(table(["model", "method", *grades], lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", default=["EP", "PVI", "SFVI", "SFVIAvg", "FedPA"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--correct", action="store_true", help="judge fit.correct(key), too")
    parser.add_argument("--x64", action="store_true")
    main(parser.parse_args())
