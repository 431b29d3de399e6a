"""EP and SFVI on random programs: a run ends with a verdict, and nothing it gives is NaN."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

import numpyro_fed as nf

from .description import Program
from .judging import Outcome
from .writing import write

METHODS: dict[str, tuple[Callable[..., Any], int | None]] = {"EP": (nf.EP, 4), "SFVI": (nf.SFVI, 200)}
STATUSES = ("trusted", "correct it", "still moving", "not to be trusted")


def conclude(program: Program, method: str) -> Outcome:
    """The verdict's status, "refused" with the reason, or "wrong"."""
    written = write(replace(program, param=program.param and method != "EP"))  # which has no way to learn params
    make, num_rounds = METHODS[method]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", nf.VerdictWarning)
        try:
            run = make(written.model, **written.options).run
            fit = run(
                jax.random.key(program.seed), written.silos(), num_rounds=num_rounds, check=True, progress_bar=False
            )
        except (nf.PartitionError, ValueError) as error:
            return Outcome("refused", f"{type(error).__name__}: {error}", written)
    draws = fit.sample(jax.random.key(1), 20) | fit.sample_local(jax.random.key(2), 20, silo="s0")
    bad = [name for name, values in draws.items() if not np.all(np.isfinite(np.asarray(values, float)))]
    if bad or fit.verdict.status not in STATUSES:
        return Outcome("wrong", f"{fit.verdict.status}; draws that are not finite: {bad}", written)
    return Outcome(fit.verdict.status, "; ".join(fit.verdict.reasons), written)
