"""Who takes part in a round.

A schedule is a value with one method: the cohorts of a stretch of rounds, as indices into the silos. ``None`` or
``"synchronous"`` is everyone every round, ``"sequential"`` one silo after another, :func:`sampled` a random cohort.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from numpyro_fed.tracing import digest


class Schedule(Protocol):
    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> np.ndarray | None:
        """Indices of the silos that take part in rounds first, first + 1, ...: (count, K). None: all of them."""
        ...


@dataclass(frozen=True)
class Synchronous:
    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> None:
        return None


@dataclass(frozen=True)
class Sequential:
    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> np.ndarray:
        return ((first + np.arange(count)) % len(names))[:, None].astype(np.int32)


@dataclass(frozen=True)
class Sampled:
    cohort_size: int

    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> np.ndarray | None:
        if self.cohort_size > len(names):
            raise ValueError(f"cohort_size is {self.cohort_size}, but there are {len(names)} silos")
        if self.cohort_size == len(names):
            return None
        return np.asarray(
            _lottery(key, np.array([digest(n) for n in names], np.uint32), first + np.arange(count), self.cohort_size)
        )


def _lottery(key: Any, identities: np.ndarray, rounds: np.ndarray, size: int) -> Any:
    """Every silo draws a number by its name; the smallest take part. The order of the silos does not matter."""

    def one(r: Any) -> Any:
        draws = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, r), i)))(identities)
        return jax.numpy.sort(jax.numpy.argsort(draws)[:size])

    return jax.jit(jax.vmap(one))(rounds)


@dataclass(frozen=True)
class Fixed:
    names: tuple[tuple[str, ...], ...]

    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> np.ndarray:
        for cohort in self.names:
            for name in cohort:
                if name not in names:
                    raise ValueError(f"the schedule names {name!r}; the silos are {', '.join(map(repr, names))}")
        table = np.array([[names.index(name) for name in cohort] for cohort in self.names], np.int32)
        return table[(first + np.arange(count)) % len(table)]


def sampled(cohort_size: int) -> Sampled:
    """A random cohort each round, drawn without replacement.

    >>> sampled(2)
    Sampled(cohort_size=2)
    """
    if not isinstance(cohort_size, int | np.integer) or cohort_size < 1:
        raise ValueError(f"cohort_size must be an int of at least 1, got {cohort_size!r}")
    return Sampled(int(cohort_size))


def fixed(cohorts: Sequence[Sequence[str]]) -> Fixed:
    """Named cohorts, one a round, over and over: ``fixed([["leeds"], ["york"]])``. All of one size."""
    sizes = {len(cohort) for cohort in cohorts}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"give cohorts of one size, at least one silo each, got sizes {sorted(sizes)}")
    return Fixed(tuple(tuple(cohort) for cohort in cohorts))


def as_schedule(schedule: Any) -> Schedule:
    known: dict[str | None, Schedule] = {None: Synchronous(), "synchronous": Synchronous(), "sequential": Sequential()}
    if schedule is None or isinstance(schedule, str):
        if schedule not in known:
            raise ValueError(
                f"schedule is {schedule!r}; use 'synchronous', 'sequential' or nf.schedules.sampled(cohort_size)"
            )
        return known[schedule]
    if not hasattr(schedule, "cohorts"):
        raise TypeError(
            f"schedule is a {type(schedule).__name__}; use 'synchronous', 'sequential' or "
            "nf.schedules.sampled(cohort_size)"
        )
    return schedule
