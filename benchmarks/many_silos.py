"""Does a round take longer when there are more silos? StackOverflow's 342,477 against 1,000, with the same cohort.

Tag prediction in small: multi-label logistic regression from 500 words to 50 tags, silos of 1 to 64 rows, made by a
seeded function of the silo's index (so nothing is downloaded and every silo is different). FedAvg's rounds are timed
warm, in one process, the stores in turns; the median of the turns counts, and the ratio of two of them.

Without reading ahead, too, a cohort is read while the device works on the one before, since rounds are dispatched
asynchronously: where the device is the host's own CPU, a thread that reads ahead gains little or nothing. Where silos
have to be waited for, several readers can wait at once: some of the stores wait a millisecond for each silo, as for a
disk.

Run it with ``python -m benchmarks.many_silos``, or ``--quick``.
"""

import argparse
import resource
import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

import numpyro_fed as nf
from benchmarks.common import table
from numpyro_fed.algorithm import Plan

MANY, FEW = 342_477, 1_000  # StackOverflow's silos, and a number that can be held in memory
FEATURES, TAGS, ROWS, WORDS = 500, 50, 64, 20
WAIT = 1e-3  # seconds for a silo of a slow source
CASES = (  # silos, whether they are waited for, rounds read ahead, readers
    (FEW, False, 2, 1),
    (MANY, False, 2, 1),
    (MANY, False, 0, 1),
    (MANY, True, 0, 1),
    (MANY, True, 2, 1),
    (MANY, True, 4, 4),
)
COLUMNS = ["silos", "source", "prefetch", "readers", "ms a round", "ms to draw", "ms to gather", "MB a cohort"]
WEIGHTS = np.random.default_rng(0).normal(scale=0.3, size=(FEATURES, TAGS)).astype("f")


def model(x, y=None):
    """Which tags a question has, from the words in it."""
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1], TAGS]).to_event(2))
    with numpyro.plate("questions", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ w).to_event(1), obs=y)


def silo(index):
    """A silo's questions: a sparse bag of words and its tags."""
    draws = np.random.default_rng(index)
    rows = int(draws.integers(1, ROWS + 1))
    words = draws.integers(0, FEATURES, (rows, WORDS))
    x = np.zeros((rows, FEATURES), "f")
    x[np.arange(rows)[:, None], words] = 1
    logits = WEIGHTS[words].sum(axis=1) - 2  # no matrix product: its threads would take the device's time
    y = draws.random((rows, TAGS), "f") < 1 / (1 + np.exp(-logits))
    return {"x": x, "y": y.astype("f")}


def slow_silo(index):
    time.sleep(WAIT)
    return silo(index)


def peak_megabytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # kB on Linux


class Run:
    """Rounds of one store, to be continued turn by turn."""

    def __init__(self, num_silos, wait, prefetch, readers, cohort, local_steps):
        self.store = nf.SiloStore.from_function(slow_silo if wait else silo, num_silos)
        method = nf.FedAvg(model, optim=optax.sgd(0.5), local_steps=local_steps)
        split, survey, self.stack, _ = method.prepare(self.store)
        (phase,) = method.compile(split, survey, Plan(names=self.store.names)).phases
        self.algorithm, self.schedule = phase.algorithm, nf.schedules.sampled(cohort)
        self.engine, self.key = nf.engines.Streamed(prefetch, readers), jax.random.key(0)
        self.server, _ = self.engine.start(self.algorithm, self.key, self.stack)
        self.done, self.seconds, self.loss = 0, [], []

    def turn(self, count):
        """As ``method.run`` does between two looks of the host: cohorts are drawn, and the rounds run."""
        began = time.perf_counter()
        cohorts = self.schedule.cohorts(self.key, self.store.names, self.done, count)
        self.server, _, info = self.engine.rounds(
            self.algorithm, self.key, self.stack, self.server, (), self.done, cohorts, count
        )
        jax.block_until_ready(self.server)
        self.seconds.append((time.perf_counter() - began) / count)
        self.loss.extend(info["loss"])
        self.done += count

    def gathering(self, times):
        """Milliseconds to draw and to gather a cohort on the host, and its bytes on the device."""
        drawn, took = [], []
        for i in range(times):
            began = time.perf_counter()
            index = self.schedule.cohorts(self.key, self.store.names, i, 1)[0]
            drawn.append(time.perf_counter() - began)
            began = time.perf_counter()
            arrays = self.stack.cohort(index)
            took.append(time.perf_counter() - began)
        return 1e3 * np.median(drawn), 1e3 * np.median(took), sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def main(args):
    cohort, rounds, turns = (10, 4, 2) if args.quick else (args.cohort, args.rounds, args.turns)
    print(f"JAX {jax.__version__}, {jax.devices()[0].platform}; cohort {cohort}, {args.local_steps} local steps")
    before, runs = peak_megabytes(), {}
    for case in CASES if args.silos is None else ((args.silos, False, 2, 1),):
        runs[case] = Run(*case, cohort, args.local_steps)
        runs[case].turn(2)  # compiles
        runs[case].seconds.clear()
    for _ in range(turns):  # in turns: what else the machine does then falls on all alike
        for run in runs.values():
            run.turn(rounds)
    lines = []
    for (num_silos, wait, prefetch, readers), run in runs.items():
        drawn, took, size = run.gathering(5 if args.quick else 20)
        median, least, most = (1e3 * f(run.seconds) for f in (np.median, np.min, np.max))
        spread = f"{median:.1f} ({least:.1f}-{most:.1f})"
        host = [f"{drawn:.2f}", f"{took:.1f}", f"{size / 1e6:.1f}"]
        lines.append([f"{num_silos:,}", "waits" if wait else "", prefetch, readers, spread, *host])
    print(table(COLUMNS, lines))
    print(f"\npeak memory of the process: {before:.0f} MB after the imports, {peak_megabytes():.0f} MB at the end")
    if args.silos is not None:
        return None
    medians = [np.median(run.seconds) for run in runs.values()]
    print(f"{MANY:,} silos against {FEW:,}: {medians[1] / medians[0]:.2f} times the time of a round")
    print(f"without reading ahead: {medians[2] / medians[1]:.2f} times")
    print(f"a source that waits, without reading ahead: {medians[3] / medians[5]:.2f} times that with four readers")
    return medians[1] / medians[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--silos", type=int, help="one store of this size alone: to compare memory between processes")
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10, help="in a turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--local-steps", type=int, default=4)
    main(parser.parse_args())
