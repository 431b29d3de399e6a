"""Expectation propagation where everything is normal, and it must be exact, in many dimensions.

A linear regression with d coefficients and a known sd, 10 silos of 300 rows; the posterior has a closed form. From
21 globals on EP's default solver regresses gradients on fixed points, which has no error here, by Stein's identity,
whatever the number of dimensions (:mod:`numpyro_fed.solvers.stein`). Printed are the largest distance of a mean, in
sds, the ratios of sds, rounds (after the start), seconds and the verdict.

Run it with ``python -m benchmarks.conjugate``, and ``--x64`` for float64.
"""

import argparse
import time
import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf
from benchmarks.common import table

NUM_SILOS, ROWS = 10, 300


def regression(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def simulated(d, seed=0):
    """Silos, and the posterior's mean and sds."""
    rng, num = np.random.default_rng(seed), NUM_SILOS * ROWS
    x = rng.normal(size=(num, d)) @ np.linalg.cholesky(0.5 * np.eye(d) + 0.5).T  # all correlated to one half
    x = x.astype(np.float32)
    y = (x @ rng.normal(size=d) + rng.normal(size=num)).astype(np.float32)
    wide = x.astype(float)
    covariance = np.linalg.inv(wide.T @ wide + np.eye(d) / 4)
    silos = nf.split(np.repeat(np.arange(NUM_SILOS), ROWS), x=x, y=y)
    return silos, covariance @ (wide.T @ y.astype(float)), np.sqrt(np.diagonal(covariance))


def measured(d, seed, check):
    silos, mean, sds = simulated(d)
    began = time.perf_counter()
    fit = nf.EP(regression).run(jax.random.key(seed), silos, progress_bar=False, check=check)
    seconds = time.perf_counter() - began
    found = fit.normal()
    shift = np.max(np.abs(np.asarray(found.mean, float) - mean) / sds)
    ratios = np.sqrt(np.diagonal(np.asarray(found.covariance, float))) / sds
    spread = f"{ratios.min():.3f} to {ratios.max():.3f}"
    return [d, seed, f"{shift:.3f}", spread, fit.state.round, f"{seconds:.0f}", fit.verdict.status]


def main(args):
    jax.config.update("jax_enable_x64", args.x64)
    warnings.simplefilter("ignore", nf.VerdictWarning)
    precision, lines = "float64" if args.x64 else "float32", []
    for d in args.dims:
        for seed in range(args.seeds):
            lines.append([precision, *measured(d, seed, args.check)])
            print(lines[-1], flush=True)
    print(table(["precision", "d", "seed", "largest shift, sds", "sd ratios", "rounds", "seconds", "verdict"], lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dims", type=int, nargs="+", default=[20, 50, 100, 150, 200])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--x64", action="store_true")
    parser.add_argument("--no-check", dest="check", action="store_false")
    main(parser.parse_args())
