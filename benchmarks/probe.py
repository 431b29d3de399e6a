"""One fit in a process of its own: what a first run costs, and what it finds. A line of JSON.

``python -m benchmarks.probe EP six_cities`` prints the seconds of the run (imports apart), processor seconds, the
programs that were asked of the compiler and those that it made (the others came from a cache on disk), the largest
memory of the process, rounds, and the means and sds of the globals. The method is one of the library's, ``nuts`` (2
chains of 500 + 1,000 draws), or ``SVI`` (NumPyro's, with the structured family as a guide; six cities only). A study
can have a size: ``logistic:50`` has 50 coefficients. ``benchmarks.bench`` makes a table of such lines.
"""

import argparse
import json
import os
import resource
import time
import warnings

BEGAN = time.perf_counter()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import numpyro  # noqa: E402
import numpyro.distributions as dist  # noqa: E402
import optax  # noqa: E402
import pandas as pd  # noqa: E402
from numpyro.infer import SVI, Trace_ELBO  # noqa: E402

import numpyro_fed as nf  # noqa: E402
from benchmarks import adult, conjugate, speed  # noqa: E402
from benchmarks.common import find  # noqa: E402
from examples import six_cities  # noqa: E402
from numpyro_fed.results.scalars import scalars  # noqa: E402

STEPS = 3000  # of SVI and SFVI
DRAWS = 20_000  # of a fit: means within .02 sd, sds within 1.5 %, the largest of 200


def exam(lrt, score=None):
    """65 schools, each with its own level and slope."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1).expand([2]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    u = numpyro.sample("u", dist.Normal(0, 1).expand([2]).to_event(1))
    own = beta + tau * u
    with numpyro.plate("pupils", lrt.shape[0]):
        numpyro.sample("score", dist.Normal(own[0] + own[1] * lrt, sigma), obs=score)


def exam_silos():
    frame = pd.read_csv(find("multisite/mlmRev_Exam.csv.gz", "Exam of the R package mlmRev"))
    columns = {"lrt": "standLRT", "score": "normexam"}
    return nf.split(frame["school"].to_numpy(), **{to: frame[name].to_numpy("f") for to, name in columns.items()})


def horseshoe(x, y=None):
    """Thirteen coefficients, three of them not zero: 28 globals."""
    tau = numpyro.sample("tau", dist.HalfCauchy(0.3))
    width = numpyro.sample("lambda", dist.HalfCauchy(1).expand([x.shape[1]]).to_event(1))
    raw = numpyro.sample("raw", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ (tau * width * raw), sigma), obs=y)


def horseshoe_silos():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 13))
    y = x @ np.r_[2.0, -1.5, 1.0, np.zeros(10)] + rng.normal(size=500)
    return nf.split(np.arange(500) % 5, x=x.astype("f"), y=y.astype("f"))


def logistic_silos(d):
    """As many rows as :mod:`benchmarks.conjugate` has: 10 silos of 300."""
    rng, num = np.random.default_rng(0), conjugate.NUM_SILOS * conjugate.ROWS
    x = rng.normal(size=(num, d))
    y = rng.uniform(size=num) < 1 / (1 + np.exp(-x @ rng.normal(size=d) * 1.5 / np.sqrt(d)))
    return nf.split(np.repeat(np.arange(conjugate.NUM_SILOS), conjugate.ROWS), x=x.astype("f"), y=y.astype(np.int32))


def adult_silos(skewed):
    (x, y), _ = adult.load(5000)
    return nf.split(adult.labels(y, 10, skewed), x=x, y=y)


def children(num_silos):
    """Silos of five children each."""
    rows = {name: value[: 5 * num_silos] for name, value in speed.rows(-(-5 * num_silos // 537)).items()}
    return nf.split(np.arange(5 * num_silos) % num_silos, shared=dict(age=speed.DATA.age), **rows)


# {study: (model, its size -> silos, options of a run)}
STUDIES = {
    "six_cities": (six_cities.model, lambda _: six_cities.six_cities_silos(), {}),
    "schools": (exam, lambda _: exam_silos(), dict(local=["u"])),
    "horseshoe": (horseshoe, lambda _: horseshoe_silos(), {}),
    "normal": (conjugate.regression, lambda d: conjugate.simulated(d)[0], {}),
    "logistic": (adult.model, logistic_silos, {}),
    "adult": (adult.model, lambda _: adult_silos(False), {}),
    "adult_skewed": (adult.model, lambda _: adult_silos(True), {}),
    "children": (six_cities.model, children, {}),
}


class Counter:
    """Programs asked of the compiler, and those found on disk."""

    def __init__(self):
        self.asked = self.found = 0
        jax.monitoring.register_event_duration_secs_listener(self._duration)
        jax.monitoring.register_event_listener(self._event)

    def _duration(self, name, seconds, **_):
        self.asked += name.endswith("backend_compile_duration")

    def _event(self, name, **_):
        self.found += name.endswith("compilation_cache/cache_hits")


def svi(silos, num_steps):
    """NumPyro's, on the pooled children."""
    assert set(silos.names) == set(six_cities.six_cities_silos().names), "SVI's guide is that of six cities"
    data = dict(smoke=speed.DATA.smoke, wheeze=speed.DATA.wheeze, age=speed.DATA.age)
    run = SVI(six_cities.model, speed.structured_guide, optax.adam(1e-2), Trace_ELBO()).run
    result = run(jax.random.PRNGKey(0), num_steps, progress_bar=False, **{k: jnp.asarray(v) for k, v in data.items()})
    return jax.block_until_ready(result)


def run(method, study, num_rounds=None):
    """The fit, NUTS's draws, or what SVI returns."""
    name, _, size = study.partition(":")
    model, silos_of, options = STUDIES[name]
    silos, key = silos_of(int(size or 0)), jax.random.key(0)
    counter, began, cpu = Counter(), time.perf_counter(), time.process_time()
    if method == "nuts":
        sizes = (
            dict(num_warmup=500, num_samples=1000, num_chains=2)
            if num_rounds is None
            else dict(num_warmup=num_rounds, num_samples=num_rounds, num_chains=1)
        )
        found = nf.nuts(model, silos, rng_key=key, progress_bar=False, **sizes, **options)
    elif method == "SVI":
        found = svi(silos, num_rounds or STEPS)
    else:
        rounds = STEPS if method.startswith("SFVI") and num_rounds is None else num_rounds
        found = getattr(nf, method)(model, **options).run(key, silos, rounds, progress_bar=False)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cost = dict(seconds=seconds, cpu=cpu, imports=began - BEGAN, programs=counter.asked, memory=memory)
    return found, cost | dict(made=counter.asked - counter.found)


def told(method, found):
    """Rounds, means and sds."""
    if method == "SVI":
        return {}
    if method == "nuts":
        frame = found.diagnostics()
        return {column: frame[column].tolist() for column in ("mean", "sd", "n_eff")}
    draws = scalars(found.sample(jax.random.key(1), DRAWS), batch=1)
    moments = {name: [float(reduce(x, dtype=np.float64)) for x in draws.values()] for name, reduce in MOMENTS.items()}
    return moments | dict(rounds=found.num_rounds, verdict=found.verdict.status)


MOMENTS = {"mean": np.mean, "sd": np.std}


def main(args):
    warnings.simplefilter("ignore")
    if args.x64:
        numpyro.enable_x64()
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", os.path.abspath(args.cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    found, cost = run(args.method, args.study, args.rounds)
    print(json.dumps(cost | told(args.method, found)))


def parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("method", help="EP, PVI, SFVI, ...; nuts; SVI")
    parser.add_argument("study", help=f"{', '.join(STUDIES)}; with a size where it has one, as in logistic:50")
    parser.add_argument("--rounds", type=int, help="of nuts: draws, of one chain")
    parser.add_argument("--x64", action="store_true", help="in float64")
    parser.add_argument("--cache", help="a folder for compiled programs")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
