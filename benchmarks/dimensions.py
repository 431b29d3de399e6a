r"""Which solver in how many dimensions? EP's and PVI's, beside NUTS, from 5 to 200 dimensions.

Ten silos. Models: a logistic regression with correlated covariates and d coefficients (20 d rows); a horseshoe (d = 2 p
+ 2: a logistic regression whose p coefficients shrink, three of them not zero); a small network (a hidden layer of tanh
units, whose posterior has many equal modes: no normal can be right); random intercepts and slopes of schools, whose
variances are among the globals. Printed for each solver: the largest shift of a mean in NUTS's sds, the range of sd
ratios, rounds, the verdict, CPU seconds of a first run and of a second one in the same process (check included), and
those of a first run of NUTS (two chains of 500 + 1,000).

Run it with ``python -m benchmarks.dimensions``; ``--quick`` takes the smallest of each.
"""

import argparse
import resource
import subprocess
import sys
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size

import numpyro_fed as nf
from benchmarks.common import table

SILOS = 10
SOLVERS = {
    "default": lambda model: nf.EP(model),
    "importance": lambda model: nf.EP(model, solver="importance"),
    "stein": lambda model: nf.EP(model, solver="stein"),
    "laplace": lambda model: nf.EP(model, solver="laplace"),
    "hmc": lambda model: nf.EP(model, solver="hmc"),
    "PVI": lambda model: nf.PVI(model),
}
CASES = {
    "logistic": (5, 10, 20, 50, 100, 200),
    "horseshoe": (8, 28),
    "network": (21, 81),
    "schools": (5,),
}


def logistic(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def horseshoe(x, y=None):
    tau = numpyro.sample("tau", dist.HalfCauchy(0.3))
    with numpyro.plate("columns", x.shape[1]):
        local = numpyro.sample("lambda", dist.HalfCauchy(1.0))
        z = numpyro.sample("z", dist.Normal(0, 1))
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + x @ (tau * local * z)), obs=y)


def network(width):
    def model(x, y=None):
        k = x.shape[1]
        w = numpyro.sample("w", dist.Normal(0, 1).expand([k, width]).to_event(2))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([width]).to_event(1))
        v = numpyro.sample("v", dist.Normal(0, 1).expand([width]).to_event(1))
        c = numpyro.sample("c", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.tanh(x @ w + b) @ v + c, 0.3), obs=y)

    return model


def schools(x, school, num_schools, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(2).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("schools", num_schools):
        u = numpyro.sample("u", dist.Normal(mu, tau).to_event(1))
    with numpyro.plate("pupils", x.shape[0]):
        numpyro.sample("y", dist.Normal(u[school, 0] + u[school, 1] * x, sigma), obs=y)


def problem(kind, d):
    """The model and its silos."""
    rng = np.random.default_rng(d)
    if kind == "schools":
        num, each = 60, 12
        school, x = np.repeat(np.arange(num), each), rng.normal(size=num * each)
        u = np.array([1.0, 0.5]) + rng.normal(size=(num, 2)) * np.array([1.0, 0.4])
        y = u[school, 0] + u[school, 1] * x + rng.normal(size=len(x))
        silos = nf.split(
            (school % SILOS).astype(str),
            groups=dict(school="num_schools"),
            x=x.astype("f"),
            y=y.astype("f"),
            school=school,
            num_schools=num,
        )
        return schools, silos
    width = (d - 1) // 5 if kind == "network" else 0
    columns = {"logistic": d, "horseshoe": (d - 2) // 2, "network": 3}[kind]
    rows = {"logistic": 20 * d, "horseshoe": 400, "network": 300}[kind]
    x = rng.normal(size=(rows, columns)) + 0.7 * rng.normal(size=(rows, 1))
    truth = np.where(np.arange(columns) < 3, 1.0, 0.0) if kind == "horseshoe" else rng.normal(size=columns) / 2
    if kind == "network":
        y = (np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] / 2 + 0.3 * rng.normal(size=rows)).astype("f")
    else:
        y = (rng.uniform(size=rows) < 1 / (1 + np.exp(-x @ truth))).astype(np.int32)
    model = {"logistic": logistic, "horseshoe": horseshoe}.get(kind) or network(width)
    return model, nf.split((np.arange(rows) % SILOS).astype(str), x=x.astype("f"), y=y)


def clock():
    return resource.getrusage(resource.RUSAGE_SELF)


def cpu():
    used = clock()
    return used.ru_utime + used.ru_stime


def draws_of(sites):
    """{site: (draws, ...)} as one matrix."""
    return np.concatenate([np.reshape(value, (len(value), -1)) for _, value in sorted(sites.items())], axis=1)


def reference(kind, d, path):
    """NUTS's moments, into a file."""
    model, silos = problem(kind, d)
    began = cpu()
    found = nf.nuts(
        model, silos, rng_key=jax.random.key(1), num_warmup=500, num_samples=1000, num_chains=2, progress_bar=False
    )
    seconds = cpu() - began
    latent = [name for name in found.get_samples() if name != "u"]
    draws = draws_of({name: np.asarray(found.get_samples()[name]) for name in latent})
    grouped = found.get_samples(group_by_chain=True)
    error = max(
        1 / np.sqrt(np.min(effective_sample_size(np.asarray(grouped[name]).reshape(2, 1000, -1)))) for name in latent
    )
    np.savez(path, mean=draws.mean(axis=0), sd=draws.std(axis=0), seconds=seconds, error=error, names=latent)


def one(kind, d, solver, path):
    """A line of the table."""
    warnings.simplefilter("ignore")
    model, silos = problem(kind, d)
    known = np.load(path)
    method, seconds = SOLVERS[solver](model), []
    for _ in range(2):
        began = cpu()
        fit = method.run(jax.random.key(0), silos, progress_bar=False)
        seconds.append(cpu() - began)
    sites = fit.sample(jax.random.key(2), 20_000)
    draws = draws_of({name: np.asarray(sites[name]) for name in known["names"].tolist()})
    shift = np.max(np.abs(draws.mean(axis=0) - known["mean"]) / known["sd"])
    ratio = draws.std(axis=0) / known["sd"]
    rounds = int(np.sum(~fit.history["start"]))
    cells = [f"{kind}, {d}", solver, f"{shift:.2f}", f"{ratio.min():.2f} to {ratio.max():.2f}", f"{rounds}"]
    print(" | ".join([*cells, fit.verdict.status, f"{seconds[0]:.1f}", f"{seconds[1]:.1f}"]), flush=True)


def main(args):
    rows = []
    for kind in args.case or CASES:
        for d in args.dim or (CASES[kind][:1] if args.quick else CASES[kind]):
            path = f"{args.folder}/{kind}_{d}.npz"
            call = lambda *options: subprocess.run(
                [sys.executable, "-m", "benchmarks.dimensions", *map(str, options)],
                capture_output=True,
                text=True,
                timeout=args.limit,
                check=True,
            )
            call("--reference", kind, d, path)
            known = np.load(path)
            print(
                f"{kind}, {d}: NUTS {float(known['seconds']):.1f} CPU s, error {float(known['error']):.3f}", flush=True
            )
            for solver in args.solver or SOLVERS:
                if solver == "importance" and d > 30:
                    continue
                began = time.perf_counter()
                try:
                    cells = call("--one", kind, d, solver, path).stdout.strip().splitlines()[-1].split(" | ")
                except subprocess.TimeoutExpired:
                    cells = [f"{kind}, {d}", solver, "", "", "", f"stopped after {args.limit} s", "", ""]
                except subprocess.CalledProcessError as error:
                    cells = [f"{kind}, {d}", solver, "", "", "", error.stderr.strip().splitlines()[-1][:60], "", ""]
                rows.append([*cells, f"{float(known['seconds']):.1f}", f"{float(known['error']):.2f}"])
                print(" | ".join(rows[-1]), f"({time.perf_counter() - began:.0f} s)", flush=True)
    columns = ["model, dimensions", "solver", "largest shift", "sd ratios", "rounds", "verdict", "first", "second"]
    print("\n" + table([*columns, "NUTS", "its error"], rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--case", nargs="+", choices=list(CASES))
    parser.add_argument("--dim", nargs="+", type=int)
    parser.add_argument("--solver", nargs="+", choices=list(SOLVERS))
    parser.add_argument("--limit", type=int, default=600, help="seconds that a run may take")
    parser.add_argument("--folder", default="/tmp", help="for NUTS's moments")
    parser.add_argument("--reference", nargs=3)
    parser.add_argument("--one", nargs=4)
    options = parser.parse_args()
    if options.reference:
        reference(options.reference[0], int(options.reference[1]), options.reference[2])
    elif options.one:
        one(options.one[0], int(options.one[1]), *options.one[2:])
    else:
        main(options)
