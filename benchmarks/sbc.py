"""Are EP's and SFVI's posteriors calibrated, on three designs of 200 simulations each?

Six cities: 537 children of two silos, a logistic mixed model; its own priors, N(0, 10), send most simulated children to
all zeros or all ones, so these here say what one would believe before seeing any child. Counts: eight silos of 10 to 17
rows, each with its own level. Regression: five silos of 20 rows, three coefficients and an unknown scale.

A method is calibrated here when, of every global, the bias is at most .15 posterior sds and the variance of ranks lies
within [.85, 1.15] of that of uniform ones; the table has the largest of each, with 95 per cent intervals.

Two wrong methods are run beside them, on a normal mean whose posterior is known: a prior that is counted twice, and a
silo that is left out.

Run it with ``python -m benchmarks.sbc``; ``--only "six cities EP"`` runs one line, and goes on where it was stopped.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf
from benchmarks.common import table
from examples.six_cities import six_cities_silos

BIAS, SPREAD = 0.15, (0.85, 1.15)


def six_cities(smoke, age, wheeze):
    beta = numpyro.sample("beta", dist.Normal(jnp.array([-1.5, 0, 0, 0]), jnp.array([1.0, 1.0, 0.3, 0.3])).to_event(1))
    omega = numpyro.sample("omega", dist.Normal(-0.5, 0.5))
    with numpyro.plate("children", smoke.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, jnp.exp(-omega)))
        smoke = smoke[:, None]
        logits = beta[0] + beta[1] * smoke + beta[2] * age + beta[3] * smoke * age + b[:, None]
        numpyro.sample("wheeze", dist.Bernoulli(logits=logits).to_event(1), obs=wheeze)


def counts(x, y):
    mu, slope = numpyro.sample("mu", dist.Normal(1, 1)), numpyro.sample("slope", dist.Normal(0, 0.5))
    tau = numpyro.sample("tau", dist.LogNormal(-0.5, 0.5))
    level = numpyro.sample("level", dist.Normal(mu, tau))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + slope * x)), obs=y)


def regression(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def counts_silos():
    draws = np.random.default_rng(0)
    sizes = {f"silo {j}": 10 + j for j in range(8)}
    return nf.Silos({name: dict(x=draws.normal(size=n).astype("f"), y=np.zeros(n, "i4")) for name, n in sizes.items()})


def regression_silos():
    draws = np.random.default_rng(1)
    return nf.Silos([dict(x=draws.normal(size=(20, 3)).astype("f"), y=np.zeros(20, "f")) for _ in range(5)])


DESIGNS = {
    "six cities": (six_cities, six_cities_silos, {}),
    "counts": (counts, counts_silos, {"local": ["level"]}),
    "regression": (regression, regression_silos, {}),
}
METHODS = {"EP": nf.EP, "SFVI": nf.SFVI}
ROUNDS = {("six cities", "SFVI"): {"num_rounds": 2000}}  # of a run; else the method's own number


def calibrated(found):
    rows = found.table[found.table["kind"] == "global"]
    return bool((rows["bias"].abs() <= BIAS).all() and rows["spread"].between(*SPREAD).all())


def line(design, label, found, seconds):
    """Of the globals: the largest bias and the spread furthest from one, each with its interval."""
    rows = found.table[found.table["kind"] == "global"].set_index("parameter")
    off, odd = rows.loc[rows["bias"].abs().idxmax()], rows.loc[(rows["spread"] - 1).abs().idxmax()]
    return [
        design,
        label,
        found.num_done,
        f"{off['bias']:.2f} [{off['bias_low']:.2f}, {off['bias_high']:.2f}] ({off.name})",
        f"{odd['spread']:.2f} [{odd['spread_low']:.2f}, {odd['spread_high']:.2f}] ({odd.name})",
        f"{found.table['family_wise'].min():.2g}",
        "yes" if calibrated(found) else "no",
        f"{seconds:.0f}",
    ]


# --- methods that are wrong -------------------------------------------------------------------------------------------


def normal_mean(num_silos, num_rows, prior_sd, ratio):
    """A normal mean whose prior sd is ``ratio`` posterior sds: its model, silos and a posterior with two mistakes."""
    noise = np.sqrt(num_silos * num_rows * prior_sd**2 / (ratio**2 - 1))

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, prior_sd))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, noise), obs=y)

    def posterior(key, silos, priors=1, left_out=()):
        heard = [silos[name]["y"] for name in silos.names if name not in left_out]
        precision = priors / prior_sd**2 + sum(len(y) for y in heard) / noise**2
        mean = sum(np.sum(y, dtype=float) for y in heard) / noise**2 / precision
        return {"mu": mean + np.asarray(jax.random.normal(key, (255,))) / np.sqrt(precision)}

    return model, nf.Silos([dict(y=np.zeros(num_rows, "f")) for _ in range(num_silos)]), posterior


def wrong(num, seeds):
    """How often each mistake is found, and how often one that was not made."""
    rows = []
    for ratio in (1.25, 1.5, 2.0):
        model, silos, posterior = normal_mean(3, 4, 2.0, ratio)
        mistakes = {"none": {}, "prior twice": {"priors": 2}, "a silo left out": {"left_out": ("1",)}}
        for mistake, options in mistakes.items():
            method = partial(posterior, **options)
            keys = [jax.random.key(100 + seed) for seed in range(seeds)]
            found = [nf.sbc(method, silos, num, model=model, rng_key=key, progress_bar=False) for key in keys]
            rows.append([ratio, mistake, f"{sum(not one.ok for one in found)} of {seeds}"])
    return table(["prior's sd in posterior sds", "mistake", "found"], rows)


def main(args):
    rows = []
    for design, (model, silos, options) in DESIGNS.items():
        for label, method in METHODS.items():
            if args.only and args.only != f"{design} {label}":
                continue
            path = Path(args.out) / f"{design} {label}".replace(" ", "_")
            path.parent.mkdir(parents=True, exist_ok=True)
            began, cpu = time.perf_counter(), time.process_time()
            rounds = ROUNDS.get((design, label), {})
            found = nf.sbc(method(model, **options), silos(), args.num_simulations, checkpoint=path, **rounds)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            print(found, f"wall {seconds:.0f} s, CPU {cpu:.0f} s", sep="\n", end="\n\n", flush=True)
            found.plot()[0].figure.savefig(f"{path}.png", dpi=120)
            rows.append(line(design, label, found, cpu))
    if rows:
        columns = ["design", "method", "simulations", "largest bias", "oddest spread", "p", "calibrated", "CPU seconds"]
        print(table(columns, rows), end="\n\n")
    if not args.only or args.only == "wrong":
        print(wrong(args.num_simulations, args.seeds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-simulations", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=4, help="calibrations of each wrong method")
    parser.add_argument("--only", help='such as "counts EP", or "wrong"')
    parser.add_argument("--out", default="sbc", help="where simulations are kept and figures drawn")
    main(parser.parse_args())
