"""How often ``fit.conflict`` cries wolf, and how often it sees one.

Data sets of five silos that agree, and of five of which the first is shifted by one sd of its residuals, are fitted
with ``nf.EP``. A data set is flagged where some silo's ``family_wise`` p-value is below 5 %: with all silos and
parameters counted, that should happen to at most 5 in 100 data sets that agree. Beside it stand the chi-square over all
directions (``normal_factors=True``), times the number of silos as well, and the sds of the z of each parameter, which
should be one.

Run it with ``python -m benchmarks.conflict``; ``--num 30`` takes a tenth of the time.
"""

import argparse
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf
from benchmarks.common import table

NUM_SILOS, LEVEL = 5, 0.05
LOGISTIC_SD = math.pi / math.sqrt(3)  # of a logistic residual


def known(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def unknown(y):
    mu, sd = numpyro.sample("mu", dist.Normal(0, 10)), numpyro.sample("sd", dist.HalfNormal(5))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sd), obs=y)


def intercepts(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    tau, sd = numpyro.sample("tau", dist.HalfNormal(5)), numpyro.sample("sd", dist.HalfNormal(5))
    with numpyro.plate("groups", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(b[:, None], sd).expand(y.shape).to_event(1), obs=y)


def logistic(x, y):
    a, b = numpyro.sample("a", dist.Normal(0, 3)), numpyro.sample("b", dist.Normal(0, 3))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)


def normal_rows(n):
    return lambda rng, shift: dict(y=(shift + rng.normal(size=n)).astype("f"))


def groups(n):
    return lambda rng, shift: dict(y=(shift + rng.normal(size=(n, 1)) + rng.normal(size=(n, 4))).astype("f"))


def successes(n):
    def draw(rng, shift):
        x = rng.normal(size=n)
        y = rng.uniform(size=n) < 1 / (1 + np.exp(-(0.5 + x + LOGISTIC_SD * shift)))
        return dict(x=x.astype("f"), y=y.astype("i4"))

    return draw


class Case(NamedTuple):
    model: Callable
    draw: Callable  # (rng, shift in residual sds) -> a silo's arguments


CASES = {
    "normal, sd known, 5 of 12": Case(known, normal_rows(12)),
    "normal, sd unknown, 5 of 8": Case(unknown, normal_rows(8)),
    "normal, sd unknown, 5 of 40": Case(unknown, normal_rows(40)),
    "random intercepts, 5 of 20 groups of 4": Case(intercepts, groups(20)),
    "logistic, 5 of 20": Case(logistic, successes(20)),
}


class Found(NamedTuple):
    """Of one data set."""

    family_wise: np.ndarray  # (silos,)
    chi_square: np.ndarray  # (silos,), times the number of silos
    z: np.ndarray  # (silos, parameters)
    doubted: bool


def judge(method: Any, silos: nf.Silos, seed: int) -> Found:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nf.VerdictWarning)
        fit = method.run(jax.random.key(seed), silos, progress_bar=False)
    by_z, by_distance = fit.conflict(), fit.conflict(normal_factors=True)
    z = by_z.by_parameter["z"].to_numpy().reshape(len(silos.names), -1)
    return Found(*(c.table["family_wise"].to_numpy() for c in (by_z, by_distance)), z, bool(fit.reasons))


def measure(case: Case, num: int, shift: float, seed: int = 0) -> list[Found]:
    """``num`` data sets of the same shapes: one program serves them all."""
    rng, method = np.random.default_rng(seed), nf.EP(case.model)
    draw = lambda j: case.draw(rng, shift if j == 0 else 0.0)
    return [judge(method, nf.Silos({f"s{j}": draw(j) for j in range(NUM_SILOS)}), i) for i in range(num)]


def flagged(found: list[Found], column: str = "family_wise") -> float:
    """The share of data sets in which some silo is flagged."""
    return float(np.mean([np.nanmin(getattr(one, column)) < LEVEL for one in found]))


def first_flagged(found: list[Found], column: str = "family_wise") -> float:
    """The share of data sets in which the first silo is, and no other more."""
    each = np.array([getattr(one, column) for one in found])
    return float(np.mean((each[:, 0] < LEVEL) & (np.nanargmin(each, axis=1) == 0)))


def line(name: str, agree: list[Found], shifted: list[Found]) -> list[str]:
    sds = np.nanstd(np.concatenate([one.z for one in agree]), axis=0)
    percent = lambda share: f"{100 * share:.0f} %"
    return [
        name,
        percent(flagged(agree)),
        percent(flagged(agree, "chi_square")),
        percent(first_flagged(shifted)),
        percent(first_flagged(shifted, "chi_square")),
        ", ".join(f"{sd:.2f}" for sd in sds),
        percent(np.mean([one.doubted for one in agree])),
    ]


COLUMNS = ["", "flagged, max z", "chi-square", "shifted silo found, max z", "chi-square", "sds of z", "doubted"]


def main(args):
    rows = []
    for name, case in CASES.items():
        if args.only not in name:
            continue
        rows.append(line(name, measure(case, args.num, 0.0), measure(case, args.num_shifted or args.num, 1.0, seed=1)))
        print(rows[-1], flush=True)
    print(table(COLUMNS, rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num", type=int, default=300, help="data sets of silos that agree")
    parser.add_argument("--num-shifted", type=int, default=None, help="with a shifted silo; by default as many")
    parser.add_argument("--only", default="", help="of the cases, those whose names hold this: 'logistic'")
    main(parser.parse_args())
