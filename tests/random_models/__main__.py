"""Counts of random programs: ``python -m random_models 1000``."""

import argparse
import time
from collections import Counter

import jax

from .drawing import drawn
from .judging import Outcome, judge
from .writing import write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("number", type=int, nargs="?", default=1000, help="of different programs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--certificate", action="store_true", help="with the library's own checks")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    start = time.process_time()
    for program in drawn(options.number, options.seed):
        with jax.enable_x64(True):
            try:
                found = judge(program, options.certificate)
            except Exception as error:
                found = Outcome("wrong", f"{type(error).__name__}: {error}")
        counts[found.kind] += 1
        if found.why:
            reasons[found.why] += 1
        if found.kind == "wrong" or found.why.startswith(("unexpected", "by the cert")):
            print(f"--- {found.kind}: {found.why}\n{program}\n{write(program)}", flush=True)
        if sum(counts.values()) % 50 == 0:
            jax.clear_caches()
            print(dict(counts), f"{time.process_time() - start:.0f} s of CPU", flush=True)
    print(dict(counts), f"{time.process_time() - start:.0f} s of CPU")
    for why, count in reasons.most_common():
        print(f"  {count:4d} {why[:200]}")


if __name__ == "__main__":
    main()
