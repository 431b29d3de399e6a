"""The verdict on fits that are right, on real data; and what it costs beside the run.

Six cities (537 children), radon (919 houses in 85 counties) and eight schools (whose posterior no normal fits: it is
corrected first), several seeds each, with EP and SFVI. All of these fits agree with NUTS (:mod:`benchmarks.accuracy`,
:mod:`benchmarks.hierarchical`), so every verdict should be ok. Seconds are of a second run in the same process, with
and without the check; bytes are those of all silos.

Run it with ``python -m benchmarks.verdict_real``.
"""

import argparse
import warnings
from collections import Counter

import jax

import numpyro_fed as nf
from benchmarks.common import table
from benchmarks.hierarchical import radon, radon_silos, school_silos, schools
from examples.six_cities import model, six_cities_silos

LOOKS = ("check", "locals", "modes", "theta")
CASES = {
    "six cities": (model, six_cities_silos),
    "radon": (radon, radon_silos),
    "eight schools": (schools, school_silos),
}


def traffic(fit: nf.Fit) -> tuple[int, int]:
    """Bytes of the check's phases, and of all others."""
    of = lambda looks: sum(r.bytes_up + r.bytes_down for r in fit.records if (r.phase in LOOKS) == looks)
    return of(True), of(False)


def main(args: argparse.Namespace) -> None:
    rows = []
    for name in args.only:
        function, silos = CASES[name][0], CASES[name][1]()
        for method in args.methods:
            one, statuses = getattr(nf, method)(function), Counter[str]()
            for seed in range(args.seeds):
                fit = one.run(jax.random.key(seed), silos, progress_bar=False)
                found = fit.correct(jax.random.key(100 + seed)) if name == "eight schools" else fit
                statuses[found.verdict.status] += 1
                if not found.verdict.ok:
                    print(name, method, seed, found.verdict, flush=True)
            with_check = one.run(jax.random.key(0), silos, progress_bar=False)
            one.run(jax.random.key(0), silos, progress_bar=False, check=False)
            without = one.run(jax.random.key(0), silos, progress_bar=False, check=False)
            check, rest = traffic(with_check)
            told = ", ".join(f"{status} {number}" for status, number in statuses.items())
            rows.append(
                [name, method, told, f"{check:,}", f"{rest:,}", f"{with_check.seconds:.2f}", f"{without.seconds:.2f}"]
            )
            print(" | ".join(rows[-1]), flush=True)
    columns = ["data", "method", f"verdicts of {args.seeds}", "check's bytes", "run's bytes"]
    print("\n" + table([*columns, "seconds", "without the check"], rows))


if __name__ == "__main__":
    warnings.simplefilter("ignore", nf.VerdictWarning)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(CASES))
    parser.add_argument("--methods", nargs="+", default=["EP", "SFVI"])
    parser.add_argument("--seeds", type=int, default=5)
    main(parser.parse_args())
