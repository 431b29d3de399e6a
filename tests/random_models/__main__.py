"""Counts of random programs: ``python -m random_models 1000``, or ``python -m random_models 100 --verdicts``."""

import argparse
import time
from collections import Counter
from collections.abc import Callable

import jax

from .description import Program
from .drawing import drawn
from .judging import Outcome, judge
from .verdicts import METHODS, conclude
from .writing import write

EVERY = 50  # programs: then their number is told, and compiled programs are forgotten


def look(name: str, program: Program, law: Callable[[Program], Outcome]) -> Outcome:
    """What becomes of a program; errors that nobody expected are wrong, and the program is shown."""
    try:
        found = law(program)
    except Exception as error:
        found = Outcome("wrong", f"{type(error).__name__}: {error}")
    if found.kind == "wrong" or found.why.startswith("unexpected") or (name in METHODS and found.kind == "refused"):
        print(f"--- {name} {found.kind}: {found.why}\n{program}\n{write(program)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, nargs="?", default=1000, help="of different programs")
    parser.add_argument("--first", type=int, default=1, help="the first of them to look at: a long run in parts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--certificate", action="store_true", help="with the library's own checks")
    parser.add_argument("--verdicts", action="store_true", help="run EP and SFVI on them, in float32")
    options = parser.parse_args()
    laws: dict[str, Callable[[Program], Outcome]] = {"split": lambda program: judge(program, options.certificate)}
    if options.verdicts:
        laws = {name: lambda program, name=name: conclude(program, name) for name in METHODS}
    counts: Counter[tuple[str, str]] = Counter()
    reasons: Counter[str] = Counter()
    start = time.process_time()
    for number, program in enumerate(drawn(options.number, options.seed, flawed=not options.verdicts), 1):
        if number < options.first:
            continue
        for name, law in laws.items():
            with jax.enable_x64(not options.verdicts):
                found = look(name, program, law)
            counts[name, found.kind] += 1
            if found.kind in ("refused", "wrong"):
                reasons[found.why] += 1
        if number % EVERY == 0 or options.verdicts:
            jax.clear_caches()
            print(number, dict(counts), f"{time.process_time() - start:.0f} s of CPU", flush=True)
    print(dict(counts), f"{time.process_time() - start:.0f} s of CPU")
    for why, count in reasons.most_common():
        print(f"  {count:4d} {why[:200]}")


if __name__ == "__main__":
    main()
