"""Who takes part in a round.

A schedule is a value that says who takes part in a stretch of rounds (:class:`Schedule`), and may say more of it.

``None`` or ``"synchronous"`` is everyone every round, ``"sequential"`` one silo after another, ``"asynchronous"`` each
silo at its own pace (:func:`asynchronous` to give speeds), :func:`sampled` a random cohort, :func:`fixed` a table.

A schedule of your own needs only ``cohorts``: :func:`stale`, :func:`sweep` and :func:`random` answer for one that says
no more.
"""

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import numpy as np

from numpyro_fed.checks import check_count, format_names, is_number
from numpyro_fed.keys import identities, identity, silo_keys

BLOCK = 16  # durations of a silo that are drawn at once
HORIZON = 256  # finishes that are worked out at least; then twice as many, whenever a run gets further
WIDEST = 5.0  # sd of a log duration; every third pair then differs by a factor of over 1000
USE = (
    "use 'synchronous', 'sequential', 'asynchronous', nf.schedules.sampled(cohort_size), "
    "nf.schedules.asynchronous(speeds={name: speed}) or nf.schedules.fixed([[name], ...])"
)


@runtime_checkable
class Schedule(Protocol):
    """Who takes part in a round. Any object with ``cohorts`` is a schedule.

    What it may say beside that, and what holds where it does not:

    - ``stale`` (bool; False): a silo works from what it received when it last took part, not from the newest broadcast;
    - ``random`` (bool; False): cohorts are drawn by chance, so those who are asked stand for all;
    - ``sweep(num_silos)`` (int; from the first cohort's size): rounds until every silo is expected to have taken part.
    """

    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> np.ndarray | None:
        """Indices of the silos that take part in rounds first, first + 1, ...: (count, K). None: all of them."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """Everyone, every round."""

    stale: ClassVar[bool] = False

    def sweep(self, num_silos: int) -> int:
        return 1

    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> None:
        return None


@dataclass(frozen=True)
class Sequential:
    """One silo after another, in their order."""

    stale: ClassVar[bool] = False

    def sweep(self, num_silos: int) -> int:
        return num_silos

    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> np.ndarray:
        return ((first + np.arange(count)) % len(names))[:, None].astype(np.int32)


@dataclass(frozen=True)
class Sampled:
    """A random cohort each round; see :func:`sampled`."""

    cohort_size: int
    stale: ClassVar[bool] = False
    random: ClassVar[bool] = True  # those who are asked stand for all

    def among(self, names: tuple[str, ...]) -> "Sampled":
        """The same for the silos that are left."""
        return Sampled(min(self.cohort_size, len(names)))

    def sweep(self, num_silos: int) -> int:
        return math.ceil(num_silos / self.cohort_size)

    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> np.ndarray | None:
        if self.cohort_size > len(names):
            raise ValueError(f"cohort_size is {self.cohort_size}, but there are {len(names)} silos")
        if self.cohort_size == len(names):
            return None
        if getattr(names, "lazy", False):
            return _drawn(key, len(names), first, count, self.cohort_size)
        return np.asarray(_lottery(key, identities(names), first + np.arange(count), self.cohort_size))


def _drawn(key: Any, num_silos: int, first: int, count: int, size: int) -> np.ndarray:
    """Cohorts by index, without looking at every silo: the time it takes does not grow with their number."""
    words = np.asarray(jax.random.key_data(key)).ravel().tolist()
    rows = []
    for r in range(first, first + count):
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((*words, r))))
        rows.append(np.sort(generator.choice(num_silos, size, replace=False, shuffle=False)))
    return np.array(rows, np.int32)


@partial(jax.jit, static_argnames="size")
def _lottery(key: Any, words: np.ndarray, rounds: np.ndarray, size: int) -> Any:
    """Every silo draws a number by its name; the smallest take part. The order of the silos does not matter."""

    def one(r: Any) -> Any:
        draws = jax.vmap(jax.random.uniform)(silo_keys(jax.random.fold_in(key, r), words))
        return jax.numpy.sort(jax.numpy.argsort(draws)[:size])

    return jax.vmap(one)(rounds)


@dataclass(frozen=True)
class Fixed:
    """Cohorts from a table, row by row; see :func:`fixed`."""

    names: tuple[tuple[str, ...], ...]
    stale: ClassVar[bool] = False

    def among(self, names: tuple[str, ...]) -> "Fixed | Sequential":
        """The same for the silos that are left: the largest of what remains of its cohorts, if everyone is in one."""
        rows = [tuple(name for name in cohort if name in names) for cohort in self.names]
        rows = [row for row in rows if len(row) == max(map(len, rows))]
        return Fixed(tuple(rows)) if {name for row in rows for name in row} >= set(names) else Sequential()

    def sweep(self, num_silos: int) -> int:
        """Until all have taken part that ever do: a silo the table does not name is not waited for."""
        members = {name for cohort in self.names for name in cohort}
        return 1 + max(next(r for r, cohort in enumerate(self.names) if name in cohort) for name in members)

    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> np.ndarray:
        for cohort in self.names:
            _check_names(cohort, names)
        table = np.array([[names.index(name) for name in cohort] for cohort in self.names], np.int32)
        return table[(first + np.arange(count)) % len(table)]


@dataclass(frozen=True)
class Asynchronous:
    """Silos at their own pace; see :func:`asynchronous`."""

    speeds: tuple[tuple[str, float], ...] = ()  # (name, relative speed), sorted by name; who is missing has speed 1
    spread: float = 0.5
    stale: ClassVar[bool] = True

    def among(self, names: tuple[str, ...]) -> "Asynchronous":
        """The same for the silos that are left."""
        return replace(self, speeds=tuple(pair for pair in self.speeds if pair[0] in names))

    def sweep(self, num_silos: int) -> int:
        return num_silos

    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> np.ndarray:
        _check_names([name for name, _ in self.speeds], names)
        words = tuple(np.asarray(jax.random.key_data(key)).ravel().tolist())
        horizon = max(HORIZON, 1 << (first + count - 1).bit_length())
        return _finishers(self, words, names, horizon)[first : first + count, None].copy()


@lru_cache(maxsize=8)  # a run asks chunk by chunk
def _finishers(schedule: Asynchronous, words: tuple[int, ...], names: tuple[str, ...], count: int) -> np.ndarray:
    """The silos that finish first, second, ...: (count,). Ties go to the name that comes first."""
    speeds = dict(schedule.speeds)
    silos = [_finishes(schedule.spread, speeds.get(n, 1.0), words, n, j) for j, n in enumerate(names)]
    return np.array([j for *_, j in islice(heapq.merge(*silos), count)], np.int32)


def _finishes(
    spread: float, speed: float, words: tuple[int, ...], name: str, j: int
) -> Iterator[tuple[float, str, int]]:
    """When a silo finishes, for ever: (time, name, j). The times follow from the run's key and the name."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((*words, *identity(name).tolist()))))
    time = 0.0
    while True:
        for duration in np.exp(spread * generator.standard_normal(BLOCK)).tolist():
            time += duration / speed
            yield time, name, j


def _check_names(given: Sequence[str], names: tuple[str, ...]) -> None:
    for name in given:
        if name not in names:
            raise ValueError(f"the schedule names {name!r}; the silos are {format_names(names)}")


def sampled(cohort_size: int) -> Sampled:
    """A random cohort each round, drawn without replacement.

    From silos in memory, every silo draws a number by its name and the smallest take part, so their order does not
    matter; from a :class:`~numpyro_fed.SiloStore`, cohorts are drawn by index.

    >>> sampled(2)
    Sampled(cohort_size=2)
    """
    return Sampled(check_count("cohort_size", cohort_size))


def fixed(cohorts: Sequence[Sequence[str]]) -> Fixed:
    """Named cohorts, one a round, over and over: ``fixed([["leeds"], ["york"]])``. All of one size."""
    sizes = {len(cohort) for cohort in cohorts}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"give cohorts of one size, at least one silo each, got sizes {sorted(sizes)}")
    return Fixed(tuple(tuple(cohort) for cohort in cohorts))


def asynchronous(speeds: Mapping[str, float] | None = None, spread: float = 0.5) -> Asynchronous:
    """Silos work at their own pace: a round is one silo finishing, with what it made of the broadcast it last received.

    How long a silo takes is random, log d ~ N(-log speed, spread^2), drawn anew each time from the run's key and the
    silo's name; so a run can be repeated, and neither the order of the silos nor the clock of the machine matters.

    Args:
        speeds: {name: relative speed}; a silo of speed 3 finishes about three times as often as one of speed 1, which
            is the speed of all that are not named.
        spread: sd of the logarithm of a duration. At 0 silos of one speed finish in turns.

    >>> asynchronous({"leeds": 3}, spread=0.1).cohorts(jax.random.key(0), ("leeds", "york"), 0, 8)[:, 0].tolist()
    [0, 0, 0, 1, 0, 0, 1, 0]
    """
    if speeds is not None and not isinstance(speeds, Mapping):
        raise TypeError(f"speeds is a {type(speeds).__name__}; give a dict of names: speeds={{'leeds': 3.0}}")
    for name, speed in (speeds or {}).items():
        if not isinstance(name, str):
            raise TypeError(f"speeds names a silo {name!r}; names are strings: speeds={{'{name}': {speed!r}}}")
        if not is_number(speed) or not 0 < speed < math.inf:
            raise ValueError(
                f"the speed of {name!r} must be a positive number, got {speed!r}: speeds={{{name!r}: 1.0}}"
            )
    if not is_number(spread) or not 0 <= spread <= WIDEST:
        raise ValueError(f"spread must be a number from 0 to {WIDEST:g}, got {spread!r}: spread=0.5")
    return Asynchronous(tuple(sorted((name, float(speed)) for name, speed in (speeds or {}).items())), float(spread))


def stale(schedule: Schedule) -> bool:
    """Whether silos work from stale broadcasts; not, if the schedule does not say."""
    return bool(getattr(schedule, "stale", False))


def random(schedule: Schedule) -> bool:
    """Whether cohorts are drawn by chance; not, if the schedule does not say."""
    return bool(getattr(schedule, "random", False))


def sweep(schedule: Schedule, names: tuple[str, ...]) -> int:
    """The number of rounds in which every silo is expected to have taken part once.

    If the schedule does not say: as many rounds as its first cohort's size needs to cover all silos.

    >>> sweep(sampled(2), ("leeds", "york", "hull"))
    2
    """
    if hasattr(schedule, "sweep"):
        return int(schedule.sweep(len(names)))
    cohorts = schedule.cohorts(jax.random.key(0), names, 0, 1)
    return 1 if cohorts is None else math.ceil(len(names) / cohorts.shape[1])


def as_schedule(schedule: Any) -> Schedule:
    """The schedule that the user named or gave, or an error that lists them."""
    known: dict[str | None, Schedule] = {
        None: Synchronous(),
        "synchronous": Synchronous(),
        "sequential": Sequential(),
        "asynchronous": Asynchronous(),
    }
    if schedule is None or isinstance(schedule, str):
        if schedule not in known:
            raise ValueError(f"schedule is {schedule!r}; {USE}")
        return known[schedule]
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule is a {type(schedule).__name__}; {USE}")
    return schedule
