"""How often is a right posterior doubted, and how often is a wrong one noticed?

Data sets are simulated, and the verdict's check (:mod:`numpyro_fed.run.check`) is asked of normals that are known to be
right (the exact posterior of a conjugate regression; of a mixed logistic model, EP's fit), and of the same normals
spoiled in one direction: the mean moved by .4 sd, the sd times .65, the sd times 1.5. Nothing else is run, so that a
line is about the check alone.

Run it with ``python -m benchmarks.verdict``; ``--num`` data sets each.
"""

import argparse
import time
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.results.verdict import Verdict, globals_at, judged
from numpyro_fed.run.check import checked
from numpyro_fed.run.runner import Runner
from numpyro_fed.schedules import as_schedule

SIZES = (30, 50, 40)
SPOILED = {"right": (0.0, 1.0), "mean + .4 sd": (0.4, 1.0), "sd x .65": (0.0, 0.65), "sd x 1.5": (0.0, 1.5)}


class Given:
    """A normal posterior that is its own state."""

    def sample(self, key: Any, server: nf.Normal) -> Any:
        return server.sample(key)

    def sample_local(self, key: Any, z: Any, server: Any, silo: Any, data: Any) -> dict:
        return {}

    def theta(self, server: Any) -> dict:
        return {}

    def normal(self, server: nf.Normal) -> nf.Normal:
        return server


def asked(model: Any, silos: nf.Silos, normal: nf.Normal, key: Any) -> Verdict:
    """The verdict on a normal over the globals, whoever found it."""
    split, survey, stack, _ = nf.EP(model).prepare(silos)
    runner = Runner(Vmap(), key, stack, split, as_schedule(None), False, "Given")
    evidence = checked(runner, Given(), survey, normal, False)
    draws = {} if isinstance(evidence, str) else globals_at(split, {}, evidence.points)
    return judged(evidence, normal, draws, (), False)


def along(mean: np.ndarray, covariance: np.ndarray, shift: float, factor: float, rng: Any) -> nf.Normal:
    """The normal with one coordinate moved by so many of its sds and its sd rescaled, correlations kept."""
    j = int(rng.integers(len(mean)))
    scale = np.ones(len(mean))
    scale[j] = factor
    move = np.zeros(len(mean))
    move[j] = shift * np.sqrt(covariance[j, j])
    return nf.Normal(mean + move, np.linalg.cholesky(scale[:, None] * covariance * scale))


def regression(x: Any, y: Any = None) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def regression_data(d: int, rng: Any) -> tuple[nf.Silos, np.ndarray, np.ndarray]:
    """Silos, and the posterior's mean and covariance in closed form."""
    number = sum(SIZES) * max(1, d // 10)
    x = rng.normal(size=(number, d)).astype(np.float32)
    y = (x @ rng.normal(size=d) + rng.normal(size=number)).astype(np.float32)
    label = np.repeat(np.arange(len(SIZES)), np.array(SIZES) * max(1, d // 10))
    precision = x.T.astype(float) @ x.astype(float) + np.eye(d) / 4
    covariance = np.linalg.inv(precision)
    return nf.split(label, x=x, y=y), covariance @ (x.T.astype(float) @ y.astype(float)), covariance


def intercepts(group: Any, num_groups: int, x: Any, y: Any = None) -> None:
    """A random intercept for each group of eight rows."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    log_tau = numpyro.sample("log_tau", dist.Normal(0, 0.5))
    with numpyro.plate("groups", num_groups):
        a = numpyro.sample("a", dist.Normal(0, jnp.exp(log_tau)))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=beta[0] + beta[1] * x + a[group]), obs=y)


def intercepts_data(rng: Any) -> nf.Silos:
    silos = {}
    for name, num in dict(a=20, b=18, c=22).items():
        group = np.repeat(np.arange(num), 8).astype(np.int32)
        x = rng.normal(size=len(group)).astype(np.float32)
        logits = 0.3 + 0.7 * x + rng.normal(size=num)[group]
        y = (rng.logistic(size=len(group)) < logits).astype(np.int32)
        silos[name] = dict(group=group, num_groups=num, x=x, y=y)
    return nf.Silos(silos)


def told(name: str, counts: dict[str, Counter], num: int, seconds: float) -> None:
    for kind, found in counts.items():
        doubted = 1 - found["trusted"] / num
        rest = ", ".join(f"{status} {count}" for status, count in found.most_common())
        print(f"{name:16} {kind:14} not ok {doubted:6.1%}   {rest}", flush=True)
    print(f"{name:16} {seconds / num / len(counts):.2f} s a check, warm and cold together", flush=True)


def main(args: argparse.Namespace) -> None:
    for d in args.dims:
        counts = {kind: Counter[str]() for kind in SPOILED}
        began = time.perf_counter()
        for i in range(args.num):
            rng = np.random.default_rng(i)
            silos, mean, covariance = regression_data(d, rng)
            for kind, (shift, factor) in SPOILED.items():
                normal = along(mean, covariance, shift, factor, rng)
                counts[kind][asked(regression, silos, normal, jax.random.key(i)).status] += 1
        told(f"conjugate d={d}", counts, args.num, time.perf_counter() - began)
    counts = {kind: Counter[str]() for kind in SPOILED}
    began = time.perf_counter()
    for i in range(args.num if args.mixed else 0):
        rng = np.random.default_rng(i)
        silos = intercepts_data(rng)
        fit = nf.EP(intercepts).run(jax.random.key(i), silos, progress_bar=False, check=False)
        for kind, (shift, factor) in SPOILED.items():
            normal = along(fit.normal().mean, fit.normal().covariance, shift, factor, rng)
            counts[kind][asked(intercepts, silos, normal, jax.random.key(i)).status] += 1
    if args.mixed:
        told("mixed logistic", counts, args.num, time.perf_counter() - began)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--dims", type=int, nargs="*", default=[2, 10, 50])
    parser.add_argument("--no-mixed", dest="mixed", action="store_false")
    main(parser.parse_args())
