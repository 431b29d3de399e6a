"""Does anything grow? A hundred thousand rounds, a thousand runs and a thousand silos, all in one process.

A study runs for days and a service for months: what leaks a little, or compiles once more for every run, ends them.
Three parts, each in legs of equal work, and after each leg what the process holds: its memory, JAX's live arrays, open
files, threads, and programs compiled since the leg before.

- ``rounds``: 100,000 rounds of SFVI, one run going on where the one before stopped.
- ``runs``: 1,000 runs of EP with a check at the end, a new method object and new silos each time, the shapes alike.
- ``silos``: EP with 1,000 silos of 5 to 12 rows, over and over.

The first legs warm up: programs are compiled, and the allocator takes what it needs. Data sets come again, since what
only some of them need (another search for a start, more points for a check) is compiled when it is first met. A part is
flat when, from the second leg to the last, nothing is compiled, no array, file or thread is left, and memory grows by
at most ``ALLOWED``. (glibc keeps what it was given back in pieces, so RSS moves by a few MB with no object left
behind; live arrays are the sharper count.)

Run it with ``make soak``, or ``python -m benchmarks.soak --scale 0.1``; ``--log docs/soak.md`` appends a dated table.
"""

import argparse
import gc
import os
import platform
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf
from benchmarks.common import table

ALLOWED = 16.0  # MB
LEGS = 10
DIFFERENT = 10  # data sets of the runs: all are met in the first leg, and with them what only some of them need
COMPILED = "/jax/core/compile/backend_compile_duration"
COLUMNS = ["part", "leg", "done", "MB", "live arrays", "files", "threads", "compiled", "seconds"]


class Held(NamedTuple):
    """What the process holds after a leg."""

    part: str
    leg: int
    done: int
    megabytes: float
    arrays: int
    files: int
    threads: int
    compiled: int
    seconds: float


def model(x, y):
    """A logistic regression with an intercept of each row."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    omega = numpyro.sample("omega", dist.HalfNormal(1.0))
    with numpyro.plate("rows", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, omega))
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta + b), obs=y)


def silos_of(sizes: list[int], seed: int) -> nf.Silos:
    draws = np.random.default_rng(seed)
    made = {}
    for j, n in enumerate(sizes):
        x = draws.normal(size=(n, 2)).astype("f")
        chance = 1 / (1 + np.exp(-x @ np.array([1.0, -0.5]) - draws.normal(size=n)))
        made[f"s{j}"] = dict(x=x, y=(draws.random(n) < chance).astype(np.int32))
    return nf.Silos(made)


# --- the parts ------------------------------------------------------------------------------------------------------


def rounds(total: int) -> Iterator[int]:
    """One run of SFVI, in legs; each goes on with the state of the one before."""
    silos, method, each = silos_of([20, 30], 0), nf.SFVI(model), total // LEGS
    fit = None
    for leg in range(LEGS):
        start = None if fit is None else fit.state
        fit = method.run(jax.random.key(0), silos, num_rounds=each, init_state=start, check=False, progress_bar=False)
        assert np.isfinite(fit.history["loss"][-1])
        yield (leg + 1) * each


def runs(total: int) -> Iterator[int]:
    """Runs of EP, each with its own method object and silos."""
    each = max(1, total // LEGS)
    for leg in range(LEGS):
        for run in range(leg * each, (leg + 1) * each):
            fit = nf.EP(model).run(
                jax.random.key(run % DIFFERENT), silos_of([20, 30], run % DIFFERENT), progress_bar=False
            )
            assert fit.verdict.status != "not checked"
        yield (leg + 1) * each


def many(total: int) -> Iterator[int]:
    """EP over many silos in memory, two data sets in turns."""
    sizes = [5 + j % 8 for j in range(total)]
    for leg in range(LEGS):
        silos = silos_of(sizes, leg % 2)
        nf.EP(model).run(jax.random.key(leg % 2), silos, num_rounds=3, check=False, progress_bar=False)
        yield total


PARTS: dict[str, tuple[Callable[[int], Iterator[int]], int]] = {
    "rounds": (rounds, 100_000),
    "runs": (runs, 1_000),
    "silos": (many, 1_000),
}


# --- what is held ---------------------------------------------------------------------------------------------------


def megabytes() -> float:
    """The resident set of this process, now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextmanager
def compilations() -> Iterator[list[int]]:
    """A count of programs compiled since it was entered."""
    count = [0]

    def listen(event: str, duration: float, **_: object) -> None:
        count[0] += event == COMPILED

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def soaked(name: str, scale: float) -> list[Held]:
    """A part in legs; after each, what the process holds."""
    part, total = PARTS[name]
    found = []
    with compilations() as count:
        before, start = 0, time.perf_counter()
        for leg, done in enumerate(part(max(LEGS, int(total * scale)))):
            gc.collect()
            now = time.perf_counter()
            files = len(os.listdir("/proc/self/fd"))
            held = Held(
                name,
                leg + 1,
                done,
                round(megabytes(), 1),
                len(jax.live_arrays()),
                files,
                threading.active_count(),
                count[0] - before,
                round(now - start, 1),
            )
            print(held, flush=True)
            found.append(held)
            before, start = count[0], now
    return found


def growing(found: list[Held]) -> list[str]:
    """What is not flat from the second leg on; nothing, where all is well."""
    warm, last = found[1], found[-1]
    out = []
    if last.megabytes - warm.megabytes > ALLOWED:
        out.append(f"memory, from {warm.megabytes} to {last.megabytes} MB")
    for field in ("arrays", "files", "threads"):
        if getattr(last, field) > getattr(warm, field):
            out.append(f"{field}, from {getattr(warm, field)} to {getattr(last, field)}")
    compiled = sum(held.compiled for held in found[2:])
    return out + ([f"programs, {compiled} more"] if compiled else [])


def report(found: dict[str, list[Held]], scale: float) -> str:
    lines = [
        f"## {datetime.now(UTC):%Y-%m-%d}, {scale:g} of the full length",
        f"Python {platform.python_version()}, JAX {jax.__version__}, {os.cpu_count()} cores.",
        table(COLUMNS, [held for part in found.values() for held in (part[0], part[1], part[-1])]),
    ]
    for name, part in found.items():
        grown = growing(part)
        lines.append(f"{name}: {'grows: ' + '; '.join(grown) if grown else 'flat'}.")
    return "\n\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}; all, by default")
    parser.add_argument("--scale", type=float, default=1.0, help="of the rounds, runs and silos")
    parser.add_argument("--log", type=Path, help="append the report to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore", nf.VerdictWarning)
    found = {name: soaked(name, options.scale) for name in options.parts}
    text = report(found, options.scale)
    print(text)
    if options.log:
        with options.log.open("a") as log:
            log.write("\n" + text)
    sys.exit(any(growing(part) for part in found.values()))


if __name__ == "__main__":
    main()
