"""All measurements of speed in one table: each line against what a user would pick instead, in one run.

==========  ==========================================================================================================
step        a warm step of SFVI against NumPyro's SVI with the same family, and with AutoNormal; time to compile
cold        first runs in fresh processes: EP, PVI and SFVI against pooled NUTS and SVI, programs and memory beside
cache       a second process of the same study, with a folder for compiled programs
models      first runs on larger models: 65 schools with random slopes, a horseshoe
rows        SFVI against SVI as rows grow
silos       SFVI as silos become many: against SVI, time to compile, memory
dimension   EP with 5 to 200 globals, against the closed form, or NUTS
adult       EP on Adult (109 coefficients), against NUTS
rounds      time of a round in long runs against short ones
devices     SFVI's rounds with 64 silos on two devices, against one
fedjax      FedAvg against FedJAX's, five interleaved repeats
==========  ==========================================================================================================

A line has what was measured, ours, theirs, the ratio, and the bar that it should not exceed. Times on a busy machine
are noise; ratios less so, and with ``--cpu`` fresh processes are measured by processor seconds.

Run it with ``make bench``, or ``python -m benchmarks.bench --quick --only step cold --out table.md``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from numpyro.infer.autoguide import AutoNormal

import numpyro_fed as nf
from benchmarks import against_fedjax, amortised, sharded, speed
from examples.six_cities import model, six_cities_silos

ROOT = Path(__file__).parent.parent
COLUMNS = ("what", "ours", "theirs", "ratio", "unit", "bar", "met")
WIDTHS = (76, 9, 9, 8, 8, 14, 3)
FEDJAX = "fedjax-env/bin/python"  # benchmarks/fedjax_peer.py says how to make it


class Line(NamedTuple):
    """One line of the table. Less is better, everywhere."""

    what: str
    ours: float
    theirs: float = float("nan")  # nan: there is nobody beside us
    unit: str = "s"
    bar: float | None = None
    of: str = "ratio"  # what the bar is for: "ratio", or "ours"

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        """None: there is no bar."""
        return None if self.bar is None else bool((self.ratio if self.of == "ratio" else self.ours) <= self.bar)

    def cells(self) -> tuple[str, ...]:
        bar = "" if self.bar is None else f"{self.of} <= {self.bar:g}"
        met = {None: "", True: "yes", False: "no"}[self.met]
        return (self.what, number(self.ours), number(self.theirs), number(self.ratio), self.unit, bar, met)


def number(value: float) -> str:
    """Three digits; nothing where there is none."""
    if np.isnan(value):
        return ""
    return "not done" if np.isinf(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def padded(cells: tuple[str, ...]) -> str:
    """A line of a Markdown table that is one without Markdown, too."""
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)) + " |"


HEAD = (padded(COLUMNS), padded(tuple("-" * width for width in WIDTHS)))


# --- fresh processes --------------------------------------------------------------------------------------------------


class Process(NamedTuple):
    """What :mod:`benchmarks.probe` said; all inf and nan if it was not done in time."""

    seconds: float = float("inf")
    memory: float = float("nan")  # MB, the most at any time
    programs: float = float("nan")  # that were needed
    made: float = float("nan")  # of them by the compiler; others came from a cache
    mean: tuple = ()
    sd: tuple = ()
    n_eff: tuple = ()  # of NUTS


def measured(method: str, study: str, timeout: int, cpu: bool, repeats: int = 1, *options: str) -> Process:
    """A fit in a process of its own, the fastest of some repeats."""
    command = [sys.executable, "-m", "benchmarks.probe", method, study, *options]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    found = []
    for _ in range(repeats):
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=timeout, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return Process()
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[1:])} failed:\n{done.stderr[-2000:]}")
        told = json.loads(done.stdout.strip().splitlines()[-1])
        arrays = {name: tuple(told.get(name, ())) for name in ("mean", "sd", "n_eff")}
        costs = {name: told[name] for name in ("memory", "programs", "made")}
        found.append(Process(told["cpu" if cpu else "seconds"], **costs, **arrays))
    return min(found, key=lambda process: process.seconds)


fresh = lru_cache(maxsize=None)(measured)  # groups share what they measure


def apart(ours: Process, exact: Process) -> tuple[float, float]:
    """The largest shift of a mean, in sds, and of an sd, relative, beyond two of NUTS's Monte Carlo errors."""
    if not ours.mean or not exact.mean:
        return float("inf"), float("inf")
    error = 2 / np.sqrt(exact.n_eff) if exact.n_eff else np.zeros(len(exact.mean))
    shift = np.abs(np.subtract(ours.mean, exact.mean)) / exact.sd - error
    spread = np.abs(np.divide(ours.sd, exact.sd) - 1) - error / np.sqrt(2)
    return max(0.0, float(np.max(shift))), max(0.0, float(np.max(spread)))


# --- the groups -------------------------------------------------------------------------------------------------------

Lines = Iterator[Line]


def step(args: argparse.Namespace) -> Lines:
    repeats = 3 if args.quick else 30
    peers = {"SVI, same family": speed.structured_guide, "SVI, AutoNormal": AutoNormal(model)}
    made = {name: speed.pooled(guide) for name, guide in peers.items()}
    made["ours"] = speed.federated(2, labels=speed.DATA.silo)
    steps = speed.fastest({name: run for name, (run, _) in made.items()}, repeats)
    for name in peers:
        bar = 1.15 if "same" in name else None
        yield Line(f"SFVI's step, 537 rows, 2 silos, against {name}", steps["ours"], steps[name], "ms", bar)
    ours = speed.total_compile(lambda: speed.federated(2, labels=speed.DATA.silo))
    theirs = speed.total_compile(lambda: speed.pooled(speed.structured_guide))
    yield Line("compiling SFVI's step, against SVI's", ours, theirs, "s", 1.5)


def cold(args: argparse.Namespace) -> Lines:
    process = lambda method: fresh(method, "six_cities", args.timeout, args.cpu, 1 if args.quick else args.repeats)
    judge = process("nuts")
    for method, bar in (("EP", 1.0),) if args.quick else (("EP", 1.0), ("PVI", None), ("SFVI", None)):
        ours, programs = process(method), 20 if method == "EP" else None
        yield Line(
            f"first run, six cities: {method}, check included, against NUTS", ours.seconds, judge.seconds, "s", bar
        )
        yield Line(f"programs of {method}, against NUTS", ours.programs, judge.programs, "programs", programs, "ours")
        yield Line(f"memory of {method}, against NUTS", ours.memory, judge.memory, "MB")
    if not args.quick:
        svi = process("SVI")
        text = "first run, six cities: SFVI, start included, against SVI"
        yield Line(text, process("SFVI").seconds, svi.seconds, "s", 2.0)
        yield Line("memory of SFVI, against SVI", process("SFVI").memory, svi.memory, "MB")


def cache(args: argparse.Namespace) -> Lines:
    for method, bar in (("EP", 5.0),) if args.quick else (("EP", 5.0), ("SFVI", None)):
        with tempfile.TemporaryDirectory() as folder:
            command = (method, "six_cities", args.timeout, args.cpu, 1, "--cache", folder)
            first, second = measured(*command), measured(*command)
        text = f"a second process with a cache: {method}, against the first"
        yield Line(text, second.seconds, first.seconds, "s", bar, "ours")
        text = f"programs that the second process compiles: {method}"
        yield Line(text, second.made, first.made, "programs", 0, "ours")


def models(args: argparse.Namespace) -> Lines:
    studies = {"schools": ("65 schools, random slopes", 1.5), "horseshoe": ("horseshoe, 28 globals", 2.0)}
    for study, (text, bar) in studies.items():
        ours, judge = (fresh(method, study, args.timeout, args.cpu) for method in ("EP", "nuts"))
        yield Line(f"first run, {text}: EP against NUTS", ours.seconds, judge.seconds, "s", bar)
        shift, spread = apart(ours, judge)
        yield Line(f"largest shift of a mean, {text}, beyond NUTS's error", shift, unit="sds")
        yield Line(f"largest error of an sd, {text}, beyond NUTS's error", spread, unit="relative")


def rows(args: argparse.Namespace) -> Lines:
    for times in (1, 4) if args.quick else (1, 4, 16, 64):
        made = {"ours": speed.federated(2, times), "theirs": speed.pooled(speed.structured_guide, times)}
        repeats = max(3, (6 if args.quick else 40) // times)
        found = speed.fastest({name: run for name, (run, _) in made.items()}, repeats)
        yield Line(
            f"SFVI's step, {537 * times:,} rows, 2 silos, against SVI", found["ours"], found["theirs"], "ms", 1.15
        )


def silos(args: argparse.Namespace) -> Lines:
    many = {2: 1, 10: 1, 100: 1, 1000: 10} | ({10_000: 100} if args.all else {})
    compiled, warm = {}, {}
    for num, times in list(many.items())[: 2 if args.quick else None]:
        jax.clear_caches()
        ours = speed.federated(num, times)
        theirs = speed.pooled(speed.structured_guide, times)
        found = speed.fastest({"ours": ours[0], "theirs": theirs[0]}, 3 if args.quick or times > 1 else 10)
        compiled[num], warm[num] = ours[1], found["ours"] / times
        text = f"SFVI's step, {num:,} silos, {537 * times:,} rows, against SVI"
        bar = {2: 1.15, 10: 1.15, 100: 1.25}.get(num)
        yield Line(text, found["ours"], found["theirs"], "ms", bar)
        if num > 100:
            yield Line(f"compiling the step, {num:,} silos against 100", compiled[num], compiled[100], "s", 1.5)
            yield Line(f"a row's part of a step, {num:,} silos against 100", warm[num], warm[100], "ms/537", 2.0)
    if not args.quick:
        few, lot = (
            fresh("SFVI", f"children:{num}", args.timeout, args.cpu, 1, "--rounds", "100") for num in (10, 1000)
        )
        yield Line("memory of SFVI, 1,000 silos of 5 rows against 10", lot.memory, few.memory, "MB")


def dimension(args: argparse.Namespace) -> Lines:
    from benchmarks import conjugate

    for d in (5,) if args.quick else (5, 20, 50, 100, 200):
        ours = fresh("EP", f"normal:{d}", args.timeout, args.cpu)
        _, mean, sd = conjugate.simulated(d)
        shift, spread = apart(ours, Process(mean=tuple(mean), sd=tuple(sd)))
        text = f"EP, normal regression, {d} globals"
        yield Line(f"{text}: largest shift of a mean", shift, unit="sds", bar=0.05, of="ours")
        yield Line(f"{text}: largest error of an sd", spread, unit="relative", bar=0.03, of="ours")
        if args.quick:
            yield Line(f"{text}: first run", ours.seconds)
            continue
        yield Line(
            f"{text}: first run, against NUTS",
            ours.seconds,
            fresh("nuts", f"normal:{d}", args.timeout, args.cpu).seconds,
        )
        yield from against_nuts(f"EP, logistic regression, {d} globals", f"logistic:{d}", args, None)


def adult(args: argparse.Namespace) -> Lines:
    for study in ("adult",) if args.quick else ("adult", "adult_skewed"):
        yield from against_nuts(f"EP, {study.replace('_', ', ')}, 109 coefficients", study, args, 1.0)


def against_nuts(text: str, study: str, args: argparse.Namespace, bar: float | None) -> Lines:
    ours, judge = (fresh(method, study, args.timeout, args.cpu) for method in ("EP", "nuts"))
    shift, spread = apart(ours, judge)
    yield Line(f"{text}: first run, against NUTS", ours.seconds, judge.seconds, "s", bar)
    yield Line(f"{text}: largest shift beyond NUTS's error", shift, unit="sds", bar=0.1, of="ours")
    yield Line(f"{text}: largest error of an sd beyond NUTS's", spread, unit="relative", bar=0.07, of="ours")


def rounds(args: argparse.Namespace) -> Lines:
    few, many = (512, 1024) if args.quick else (1024, 16 * 1024)
    method, data = nf.SFVI(model, importance_samples=1, start_rounds=0), six_cities_silos()

    def seconds_of(num: int) -> float:
        run = lambda: method.run(jax.random.key(0), data, num, progress_bar=False, check=False).state.server
        return min(speed.timed(run) for _ in range(3))  # the first compiles

    seconds = {num: seconds_of(num) for num in (few, many)}
    each = {num: 1e3 * found / num for num, found in seconds.items()}
    yield Line(f"a round of SFVI in a run of {many:,}, against {few:,}", each[many], each[few], "ms", 1.0)


def devices(args: argparse.Namespace) -> Lines:
    best = sharded.measured(sharded.parser().parse_args(["--turns", "2", "--rounds", "16"] if args.quick else []))
    which = 1 if args.cpu else 0
    ours, theirs = (best[name][which] for name in ("Sharded, two devices", "Vmap, one thread"))
    bar = 1.25 if args.cpu else 1 / sharded.BAR  # two devices at work at once; by processors, the cost of dividing
    yield Line("SFVI's round, 64 silos of 200 rows, two devices, against one", ours, theirs, "ms", bar)


def prodlda(args: argparse.Namespace) -> Lines:
    documents, words, topics, hidden = (300, 200, 5, 20) if args.quick else (3000, 2000, 21, 100)
    counts, steps = amortised.corpus(documents, words), 8 if args.quick else 32
    sizes = (counts, topics, hidden, steps)
    made = {"ours": amortised.federated(*sizes), "theirs": amortised.plain(*sizes)}
    found = speed.fastest({name: run for name, (run, _) in made.items()}, 3 if args.quick else 8, steps)
    text = "SFVI's step, ProdLDA with an encoder, against plain JAX"
    yield Line(text, found["ours"], found["theirs"], "ms", 1.25)


def fedjax(args: argparse.Namespace) -> Lines:
    if not Path(args.fedjax).is_file():
        print(f"FedJAX was not run: {args.fedjax} is not there. benchmarks/fedjax_peer.py says how to make it")
        return
    for name, few, more in (("a", 20, 60),) if args.quick else (("a", 20, 100), ("b", 5, 15)):
        sizes = ["--python", args.fedjax, "--rounds", str(few), "--more", str(more), "--repeats", "1"]
        options = against_fedjax.parser().parse_args(sizes)
        task, hidden = against_fedjax.make_task(**against_fedjax.TASKS[name]), against_fedjax.HIDDEN[name]
        turns: dict[str, list] = {"ours": [], "theirs": []}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "task.npz"
            np.savez(path, **task)
            for _ in range(1 if args.quick else 5):
                turns["theirs"].append(1e3 / against_fedjax.theirs(path, hidden, options)["rounds_per_second"])
                turns["ours"].append(1e3 / against_fedjax.ours(task, hidden, options, stored=False)[0])
        found = {side: statistics.median(values) for side, values in turns.items()}
        text = {"a": "logistic regression", "b": "MLP"}[name]
        yield Line(f"a round of FedAvg, {text}, against FedJAX", found["ours"], found["theirs"], "ms", 1.0)


GROUPS: dict[str, Callable[[argparse.Namespace], Lines]] = {
    function.__name__: function
    for function in (step, cold, cache, models, rows, silos, dimension, adult, rounds, devices, prodlda, fedjax)
}
QUICK = ("step", "cold", "rows", "dimension", "rounds")


# --- the command ------------------------------------------------------------------------------------------------------


def main(args: argparse.Namespace) -> list[Line]:
    names = args.only or (QUICK if args.quick else tuple(GROUPS))
    print(*HEAD, sep="\n", flush=True)
    lines = []
    for name in names:
        for line in GROUPS[name](args):
            lines.append(line)
            print(padded(line.cells()), flush=True)
    missed = [line for line in lines if line.met is False]
    print(f"\n{len(lines)} lines; {sum(line.met is True for line in lines)} bars met, {len(missed)} not")
    if args.out:
        text = "\n".join([*HEAD, *(padded(line.cells()) for line in lines)])
        Path(args.out).write_text(text + "\n")
    return lines


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer groups, sizes and repeats")
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), metavar="NAME", help=", ".join(GROUPS))
    parser.add_argument("--all", action="store_true", help="10,000 silos, too")
    parser.add_argument("--cpu", action="store_true", help="processor seconds of fresh processes: for a busy machine")
    parser.add_argument("--repeats", type=int, default=2, help="of first runs: the fastest counts")
    parser.add_argument("--timeout", type=int, default=900, help="seconds, of a fresh process")
    parser.add_argument("--fedjax", default=FEDJAX, help="Python of FedJAX's environment")
    parser.add_argument("--out", help="a file for the table, in Markdown")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
