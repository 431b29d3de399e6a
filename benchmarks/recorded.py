"""Fits of every method, written down, so that a change of the code can be told from a change of its answers.

A refactoring should leave every draw as it was, bit for bit. Where the compiler fuses other operations than before,
draws move by rounding; where they move by more, something else has changed. Fits are small and short: whether they
have converged does not matter, only whether they are the same.

Run it with ``python -m benchmarks.recorded record before.npz``, change the code, and then
``python -m benchmarks.recorded compare before.npz``. A line a case says ``equal``, ``fuses`` (draws within 1e-6
posterior sds), ``close`` (means and sds within 1e-3) or ``DIFFERS``; the exit code is 1 if any is worse than
``--allow``. In float32 one rounding of a mean can be more than 1e-6 sds: ``--x64`` tells rounding from change. Only the
public interface is used. The radon data are read from the directory that NUMPYRO_FED_DATA names.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

# Before anything compiles, which takes nearly all of the time: optimised, programs of this size are not worth it, and
# they fuse more. XLA_FLAGS="" in the environment compiles as for a user.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true",
)

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

Record = dict[str, np.ndarray]  # "draws/beta", "state/3", ...: the kind comes first

SEEDS = (0, 1)
DRAWS, MANY_DRAWS = 64, 2000  # kept, and for means and sds
STEPS = 40  # rounds of methods that take one gradient step in each
SWEEPS = 3  # times that every silo is asked by the others
FUSES, CLOSE = 1e-6, 1e-3
NO_SPREAD = 1e-9  # of its mean: a point's sd is rounding
VERDICTS = ("equal", "fuses", "close", "DIFFERS")
# --- models and data --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """A model and its silos, which are made in the precision of the moment."""

    model: Callable[..., Any]
    silos: Callable[[], Any]
    has_locals: bool = False
    batch_size: int = 8


def real(values: Any) -> np.ndarray:
    return np.asarray(values, jnp.result_type(float))


def wheezing(smoke: Any, age: Any, wheeze: Any = None) -> None:
    """A random intercept for each child."""
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([4]).to_event(1))
    omega = numpyro.sample("omega", dist.Normal(0, 1))
    with numpyro.plate("children", smoke.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, jnp.exp(-omega)))
        smoke = smoke[:, None]
        logits = beta[0] + beta[1] * smoke + beta[2] * age + beta[3] * smoke * age + b[:, None]
        numpyro.sample("wheeze", dist.Bernoulli(logits=logits).to_event(1), obs=wheeze)


@cache
def children() -> nf.Silos:
    """120 of the 537 children, in two silos of 80 and 40."""
    data, some = nf.datasets.six_cities(), slice(120)
    label = np.where(np.arange(120) % 3 < 2, "A", "B")
    return nf.split(label, shared=dict(age=real(data.age)), smoke=real(data.smoke[some]), wheeze=data.wheeze[some])


def houses(floor: Any, county: Any, num_counties: int, log_radon: Any = None) -> None:
    """Long format: a house knows the number of its county."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    beta = numpyro.sample("beta", dist.Normal(0, 5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("counties", num_counties):
        a = numpyro.sample("a", dist.Normal(0, 1))
    alpha = numpyro.deterministic("alpha", mu + tau * a)
    with numpyro.plate("houses", floor.shape[0]):
        numpyro.sample("log_radon", dist.Normal(alpha[county] + beta * floor, sigma), obs=log_radon)


@cache
def counties() -> nf.Silos:
    """The first 18 of the 85 counties, in three silos of 9, 6 and 3."""
    data, number = nf.datasets.radon(), 18
    some = data.county < number
    county = data.county[some]
    label = np.repeat(["north", "middle", "south"], [9, 6, 3])[county]
    columns = dict(floor=real(data.floor[some]), log_radon=real(data.log_radon[some]))
    return nf.split(label, groups=dict(county="num_counties"), county=county, num_counties=number, **columns)


def logistic(x: Any, y: Any = None) -> None:
    """Regression: no locals."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + x @ beta), obs=y)


def rows(*sizes: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The silo of every row, and the rows."""
    draws, number = np.random.default_rng(7), sum(sizes)
    x = draws.normal(size=(number, 3))
    y = draws.random(number) < 1 / (1 + np.exp(-(0.5 + x @ np.array([1.0, -0.5, 0.2]))))
    return np.repeat(np.arange(len(sizes)), sizes), dict(x=real(x), y=y.astype(np.int32))


@cache
def unequal() -> nf.Silos:
    label, columns = rows(40, 16, 4)
    return nf.split(np.array(["big", "middling", "small"])[label], **columns)


@cache
def store() -> nf.SiloStore:
    label, columns = rows(*(4 + i % 5 for i in range(12)))
    return nf.SiloStore.from_arrays(label, **columns)


def classes(y: Any = None) -> None:
    """The kind of each row is discrete, and summed out."""
    weight = numpyro.sample("weight", dist.Beta(2, 2))
    means = numpyro.sample("means", dist.Normal(jnp.array([-2.0, 2.0]), 1).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        kind = numpyro.sample("kind", dist.Bernoulli(weight), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(means[kind], 1), obs=y)


@cache
def two_kinds() -> nf.Silos:
    draws = np.random.default_rng(8)
    kind = draws.random(45) < 0.4
    y = draws.normal(np.where(kind, 1.5, -1.5))
    return nf.split(np.repeat(["long", "short"], [30, 15]), y=real(y))


PROBLEMS = {
    "six cities": Problem(wheezing, children, has_locals=True),
    "radon": Problem(houses, counties, has_locals=True, batch_size=2),
    "regression": Problem(logistic, unequal),
    "classes": Problem(classes, two_kinds, has_locals=True),
    "store": Problem(logistic, store),
}


# --- fits -------------------------------------------------------------------------------------------------------------


def run(method: Any, seed: int, problem: Problem, num_rounds: int, **options: Any) -> Any:
    return method.run(jax.random.key(seed), problem.silos(), num_rounds, progress_bar=False, check=False, **options)


def sfvi(problem: Problem, seed: int, **options: Any) -> nf.Fit:
    return run(nf.SFVI(problem.model), seed, problem, STEPS, **options)


def sfvi_in_batches(problem: Problem, seed: int) -> nf.Fit:
    return run(nf.SFVI(problem.model, batch_size=problem.batch_size), seed, problem, STEPS)


def sfvi_sampled(problem: Problem, seed: int) -> nf.Fit:
    return sfvi(problem, seed, schedule=nf.schedules.sampled(2))


def sfvi_avg(problem: Problem, seed: int) -> nf.Fit:
    return run(nf.SFVIAvg(problem.model, local_steps=10), seed, problem, SWEEPS)


def ep(problem: Problem, seed: int, **options: Any) -> nf.Fit:
    return run(nf.EP(problem.model), seed, problem, SWEEPS, **options)


def ep_hmc(problem: Problem, seed: int) -> nf.Fit:
    solver = nf.solvers.HMC(num_chains=8, num_samples=6, num_warmup=2)
    return run(nf.EP(problem.model, solver=solver), seed, problem, SWEEPS)


def ep_corrected(problem: Problem, seed: int) -> nf.Fit:
    return ep(problem, seed).correct(jax.random.key(seed + 100), num_points=256)


def sep(problem: Problem, seed: int) -> nf.Fit:
    return run(nf.SEP(problem.model), seed, problem, SWEEPS)


def pvi_sequential(problem: Problem, seed: int) -> nf.Fit:
    num_rounds = SWEEPS * problem.silos().num_silos
    return run(nf.PVI(problem.model), seed, problem, num_rounds, schedule="sequential")


def pvi_asynchronous(problem: Problem, seed: int) -> nf.Fit:
    num_rounds = SWEEPS * problem.silos().num_silos
    return run(nf.PVI(problem.model), seed, problem, num_rounds, schedule="asynchronous")


def fedpa(problem: Problem, seed: int, **options: Any) -> nf.Fit:
    return run(nf.FedPA(problem.model, averaging_rounds=2), seed, problem, 2 + SWEEPS, **options)


def fedavg(problem: Problem, seed: int, **options: Any) -> nf.Fit:
    return run(nf.FedAvg(problem.model), seed, problem, 2 + SWEEPS, **options)


def independent(problem: Problem, seed: int) -> nf.Fits:
    return run(nf.Independent(problem.model), seed, problem, STEPS)


def sfvi_from_ep(problem: Problem, seed: int) -> nf.Fit:
    return sfvi(problem, seed + 100, init_state=ep(problem, seed))


def ep_from_sfvi(problem: Problem, seed: int) -> nf.Fit:
    return ep(problem, seed + 100, init_state=sfvi(problem, seed))


def sfvi_resumed(problem: Problem, seed: int) -> nf.Fit:
    return sfvi(problem, seed, init_state=sfvi(problem, seed).state)


def ep_resumed(problem: Problem, seed: int) -> nf.Fit:
    return ep(problem, seed, init_state=ep(problem, seed).state)


def sep_of_store(problem: Problem, seed: int) -> nf.Fit:
    return run(nf.SEP(problem.model), seed, problem, 9, schedule=nf.schedules.sampled(4))


def fedpa_of_store(problem: Problem, seed: int) -> nf.Fit:
    return fedpa(problem, seed, schedule=nf.schedules.sampled(4))


def fedavg_of_store(problem: Problem, seed: int) -> nf.Fit:
    return fedavg(problem, seed, schedule=nf.schedules.sampled(4))


EVERYWHERE: dict[str, Callable[[Problem, int], Any]] = {
    "SFVI": sfvi,
    "SFVI, minibatches": sfvi_in_batches,
    "SFVIAvg": sfvi_avg,
    "EP": ep,
    "EP, hmc": ep_hmc,
    "SEP": sep,
    "PVI, sequential": pvi_sequential,
    "PVI, asynchronous": pvi_asynchronous,
    "Independent": independent,
}
WITHOUT_LOCALS = {"FedPA": fedpa, "FedAvg": fedavg}  # locals that are summed out are none to them
FIT_TO_FIT = {"EP, corrected": ep_corrected, "SFVI from EP": sfvi_from_ep, "EP from SFVI": ep_from_sfvi}
METHODS: dict[str, dict[str, Callable[[Problem, int], Any]]] = {
    "six cities": EVERYWHERE | FIT_TO_FIT | {"SFVI, resumed": sfvi_resumed},
    "radon": EVERYWHERE | {"SFVI, sampled": sfvi_sampled},
    "regression": EVERYWHERE | WITHOUT_LOCALS | {"EP, resumed": ep_resumed},
    "classes": EVERYWHERE | WITHOUT_LOCALS,
    "store": {"SEP": sep_of_store, "FedPA": fedpa_of_store, "FedAvg": fedavg_of_store},
}
CASES: dict[str, tuple[Problem, Callable[[int], Any]]] = {
    f"{data}: {method}": (PROBLEMS[data], partial(function, PROBLEMS[data]))
    for data, methods in METHODS.items()
    for method, function in methods.items()
}
QUICK = (  # every method and every kind of data, most methods where they compile fastest
    *(f"six cities: {method}" for method in ("SFVI", "EP", *FIT_TO_FIT, "SFVI, resumed")),
    *(f"radon: {method}" for method in ("SFVI, minibatches", "PVI, sequential")),
    *(f"regression: {method}" for method in METHODS["regression"] if method not in ("SFVI", "SFVI, minibatches")),
    *(f"classes: {method}" for method in ("SFVI", "FedAvg")),
    *(f"store: {method}" for method in METHODS["store"]),
)


# --- what is written down of a fit ------------------------------------------------------------------------------------


def plain(leaf: Any) -> np.ndarray:
    """An array that a file can hold; keys are their words."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def flat(draws: Any) -> np.ndarray:
    """(number, scalars)"""
    return np.asarray(draws).reshape(len(draws), -1)


def globals_of(fit: nf.Fit, under: str = "") -> Record:
    """History, state and draws of the globals. A Fit compiles anew, so few draws are the first of many."""
    found = {f"loss/{under}history": np.asarray(fit.history["loss"])}
    found |= {f"state/{under}{i}": plain(leaf) for i, leaf in enumerate(jax.tree.leaves(fit.state.server))}
    for site, draws in fit.sample(jax.random.key(1000), MANY_DRAWS).items():
        values = flat(draws)
        found[f"draws/{under}{site}"] = values[:DRAWS]
        found[f"mean/{under}{site}"] = np.mean(values, axis=0, dtype=np.float64)
        found[f"sd/{under}{site}"] = np.std(values, axis=0, dtype=np.float64)
    return found


def locals_of(fit: nf.Fit, silo: str, found: Record) -> Record:
    draws = fit.sample_local(jax.random.key(1000), DRAWS, silo=silo)
    shared = {key.split("/")[-1] for key in found if key.startswith("draws/")}
    return {f"local/{site}": flat(values) for site, values in draws.items() if site not in shared}


def recorded(problem: Problem, case: Callable[[int], Any], seed: int) -> Record:
    """A case's fit with one seed, as arrays."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nf.VerdictWarning)  # runs are too short
        fit = case(seed)
    first = problem.silos().names[0]
    if isinstance(fit, Mapping):  # a fit for each silo
        found: Record = {}
        for name, own in fit.items():
            found |= globals_of(own, f"{name}/")
        fit = fit[first]
    else:
        found = globals_of(fit)
    return found | (locals_of(fit, first, found) if problem.has_locals else {})


def settings() -> dict[str, str]:
    """What may change how programs are compiled."""
    return {
        "jax": jax.__version__,
        "numpyro": numpyro.__version__,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "precision": str(jnp.result_type(float)),
    }


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """How far two records of a case are apart; nan where they cannot be compared."""

    same: bool = True  # bit for bit
    sites: bool = True  # the same ones, of the same shapes
    draws: float = 0.0  # in sds, as all that follow but the state and the loss
    local: float = 0.0
    means: float = 0.0
    sds: float = 0.0
    local_moments: float = 0.0
    leaves: tuple[int, int] = (0, 0)  # of the server's state, before and now
    state: float = 0.0  # relative to the largest number of a leaf; nan if a shape has changed
    loss: float = 0.0  # relative to the largest; nan if there are other rounds

    def __or__(self, other: "Difference") -> "Difference":
        """The worse of each."""
        numbers = ("draws", "local", "means", "sds", "local_moments", "state", "loss")
        return Difference(
            same=self.same and other.same,
            sites=self.sites and other.sites,
            leaves=(self.leaves[0] + other.leaves[0], self.leaves[1] + other.leaves[1]),
            **{name: float(np.maximum(getattr(self, name), getattr(other, name))) for name in numbers},
        )

    def verdict(self, means: bool) -> str:
        if not self.sites:
            return "DIFFERS"
        moved = max_of(self.means, self.sds)
        if means:
            return "equal" if moved == 0 else "fuses" if moved <= FUSES else "close" if moved <= CLOSE else "DIFFERS"
        if self.same:
            return "equal"
        if not self.loss <= CLOSE:
            return "DIFFERS"
        if max_of(self.draws, self.local) <= FUSES:
            return "fuses"
        return "close" if max_of(moved, self.local_moments) <= CLOSE else "DIFFERS"

    def words(self, means: bool) -> str:
        if not self.sites:
            return "other sites, or of other shapes"
        moved = f"means {self.means:.1e} sd, sds {self.sds:.1e}"
        if means:
            return moved
        before, now = self.leaves
        apart = "other shapes" if np.isnan(self.state) else f"{self.state:.1e}"
        state = f"{now} leaves, {apart}" if before == now else f"{before} leaves, now {now}"
        draws = f"draws {self.draws:.1e} sd, local {self.local:.1e} sd"
        return f"{draws}; {moved}; state: {state}; loss {self.loss:.1e}"


def max_of(*values: float) -> float:
    """nan if any is, unlike Python's."""
    return float(np.max(values))


def bits(was: np.ndarray, now: np.ndarray) -> bool:
    return was.dtype == now.dtype and was.shape == now.shape and was.tobytes() == now.tobytes()


def away(was: np.ndarray, now: np.ndarray, scale: Any) -> float:
    """The largest difference in units of ``scale``; nan if shapes differ, nothing where both are nan or infinite."""
    if was.shape != now.shape:
        return float("nan")
    a, b = np.asarray(was, np.float64), np.asarray(now, np.float64)
    with np.errstate(invalid="ignore"):
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b) / scale)
    return float(np.max(difference, initial=0.0))


def unit(mean: np.ndarray, sd: np.ndarray) -> np.ndarray:
    """A scalar's sd; of a point, which has none, its size."""
    return np.where(sd > NO_SPREAD * np.abs(mean), sd, np.maximum(np.abs(mean), 1.0))


def size(values: np.ndarray) -> float:
    """The largest finite number of an array."""
    finite = np.abs(np.asarray(values, np.float64))
    return float(np.max(finite[np.isfinite(finite)], initial=0.0)) or 1.0


def kind(record: Record, name: str) -> Record:
    """Its entries without the kind's name."""
    return {key.removeprefix(f"{name}/"): value for key, value in record.items() if key.startswith(f"{name}/")}


def difference(was: Record, now: Record) -> Difference:
    """Of two records of one fit."""
    pairs = {name: (kind(was, name), kind(now, name)) for name in ("draws", "mean", "sd", "local", "state", "loss")}
    same = was.keys() == now.keys() and all(bits(was[key], now[key]) for key in was)
    for name in ("draws", "local"):
        before, after = ({site: values.shape for site, values in half.items()} for half in pairs[name])
        if before != after:
            return Difference(same=False, sites=False)

    def worst(name: str, scale: Callable[[str, np.ndarray], Any]) -> float:
        before, after = pairs[name]
        return max_of(0.0, *(away(before[key], after[key], scale(key, before[key])) for key in before if key in after))

    moments = lambda values: (np.mean(values, axis=0, dtype=np.float64), np.std(values, axis=0, dtype=np.float64))
    in_sds = lambda site, _: unit(was[f"mean/{site}"], was[f"sd/{site}"])
    own_sds = lambda _, values: unit(*moments(values))
    relative = lambda _, values: size(values)
    local_moments = 0.0
    for site, values in pairs["local"][0].items():
        scale, after = own_sds(site, values), moments(pairs["local"][1][site])
        local_moments = max_of(local_moments, *(away(a, b, scale) for a, b in zip(moments(values), after, strict=True)))
    return Difference(
        same=same,
        draws=worst("draws", in_sds),
        local=worst("local", own_sds),
        means=worst("mean", in_sds),
        sds=worst("sd", in_sds),
        local_moments=local_moments,
        leaves=(len(pairs["state"][0]), len(pairs["state"][1])),
        state=worst("state", relative),
        loss=worst("loss", relative),
    )


# --- the command ------------------------------------------------------------------------------------------------------


def chosen(args: argparse.Namespace, names: Iterable[str]) -> list[str]:
    few = set(QUICK) if args.quick else set(names)
    return [name for name in names if name in few and args.only.lower() in name.lower()]


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def record(args: argparse.Namespace) -> int:
    arrays: Record = {f"settings/{name}": np.array(value) for name, value in settings().items()}
    failed, began = 0, time.perf_counter()
    for name in chosen(args, CASES):
        start = time.process_time()
        try:
            for seed in SEEDS:
                found = recorded(*CASES[name], seed)
                arrays |= {f"{name}/{seed}/{key}": value for key, value in found.items()}
            print(f"{name:<32} {time.process_time() - start:5.1f} s", flush=True)
        except Exception as error:  # the other cases can still be recorded
            failed += 1
            print(f"{name:<32} {told(error)}", flush=True)
    np.savez_compressed(args.path, allow_pickle=False, **arrays)
    print(f"{time.process_time():.0f} s of CPU time, {time.perf_counter() - began:.0f} s by the clock")
    return int(failed > 0)


def compare(args: argparse.Namespace) -> int:
    with np.load(args.path, allow_pickle=False) as file:
        before = {key: file[key] for key in file.files}
    then = {name: str(value) for name, value in kind(before, "settings").items()}
    now = settings()
    if then["precision"] != now["precision"]:
        print(
            f"recorded in {then['precision']}, and this is {now['precision']}: compare with --x64 what was recorded so"
        )
        return 1
    changed = [f"{name} {then.get(name)!r}, now {value!r}" for name, value in now.items() if then.get(name) != value]
    if changed:
        print(f"recorded with {'; '.join(changed)}", flush=True)
    compared, worse = 0, 0
    names = dict.fromkeys(key.split("/")[0] for key in before if not key.startswith("settings/"))
    for name in chosen(args, names):
        if name not in CASES:
            print(f"{name:<32} is no case any more", flush=True)
            worse += 1
            continue
        try:
            found = Difference()
            for seed in SEEDS:
                found |= difference(kind(before, f"{name}/{seed}"), recorded(*CASES[name], seed))
        except Exception as error:  # the other cases can still be compared
            print(f"{name:<32} {told(error)}", flush=True)
            worse += 1
            continue
        verdict = found.verdict(args.means)
        print(f"{name:<32} {verdict:<8} {'' if verdict == 'equal' else found.words(args.means)}".rstrip(), flush=True)
        worse += VERDICTS.index(verdict) > VERDICTS.index(args.allow)
        compared += 1
    missing = [name for name in chosen(args, CASES) if not any(key.startswith(f"{name}/") for key in before)]
    if missing:
        print(f"not recorded: {'; '.join(missing)}")
    if not compared:
        print("nothing was compared")
    return int(worse > 0 or not compared)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("path", metavar="PATH.npz")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="cases whose name has this in it")
    parser.add_argument("--quick", action="store_true", help="half of the cases, in a third of the time")
    parser.add_argument("--x64", action="store_true", help="in float64")
    parser.add_argument("--allow", choices=VERDICTS[:3], default="fuses", help="the worst that is still well")
    parser.add_argument("--means", action="store_true", help="compare the globals' means and sds, and nothing else")
    args = parser.parse_args()
    numpyro.enable_x64(args.x64)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # what is compared is made by the compiler at hand
        jax.config.update("jax_enable_compilation_cache", False)
    return record(args) if args.action == "record" else compare(args)


if __name__ == "__main__":
    sys.exit(main())
