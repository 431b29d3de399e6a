"""What users hand over to every function, checked, and how silos are named in messages."""

import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BETWEEN = (__name__.partition(".")[0], "jax", "numpyro", "contextlib", "functools")  # not the user's own lines


def check_key(rng_key: Any) -> Any:
    """A typed key from what the user gave (typed or legacy), or an error that says what to type."""
    if isinstance(rng_key, jax.Array) and jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) and rng_key.shape == ():
        return rng_key
    if hasattr(rng_key, "dtype") and rng_key.dtype == jnp.uint32 and rng_key.shape == (2,):
        return jax.random.wrap_key_data(jnp.asarray(rng_key))
    got = "nothing" if rng_key is None else f"a {type(rng_key).__name__}"
    raise TypeError(f"rng_key must be a JAX key, got {got}: pass jax.random.key(0)")


class VerdictWarning(UserWarning):
    """The fit itself doubts its posterior; the message says why and what to type."""


_unsaid: ContextVar[tuple[type[Warning], ...]] = ContextVar("unsaid", default=())


@contextmanager
def unsaid(*categories: type[Warning]) -> Iterator[None]:
    """Without the library's own warnings of these kinds, in this thread.

    Python's filters are the whole process's: ``warnings.catch_warnings`` here would silence a run in another thread.

    >>> with unsaid(VerdictWarning):
    ...     warn_user("still moving", VerdictWarning)
    """
    token = _unsaid.set((*_unsaid.get(), *categories))
    try:
        yield
    finally:
        _unsaid.reset(token)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning that points at the user's line: the nearest that is not of this package, nor of those it calls through.

    Frames are counted when the warning is raised, so that it may move from function to function.
    """
    if issubclass(category, _unsaid.get()):
        return
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def agreeing(names: Iterable[str], one: str, many: str) -> str:
    """Names, in order, with the verb that goes with their number.

    >>> agreeing({"y", "x"}, "is", "are"), agreeing(["y"], "is", "are")
    ('x, y are', 'y is')
    """
    found = sorted(names)
    return f"{', '.join(found)} {one if len(found) == 1 else many}"


def silos_named(names: Sequence[str], most: int = 5) -> str:
    """Silos in a sentence.

    >>> silos_named(["york"]), silos_named(["leeds", "york"])
    ("silo 'york'", "silos 'leeds', 'york'")
    """
    return f"{'silo' if len(names) == 1 else 'silos'} {format_names(names, most)}"


def sentences(reasons: Iterable[str]) -> str:
    """Several reasons in one line, each with a capital and a full stop.

    >>> sentences(["two silos disagree", "the rest moves: run more rounds."])
    'Two silos disagree. The rest moves: run more rounds.'
    """
    return " ".join(f"{reason[:1].upper()}{reason[1:].removesuffix('.')}." for reason in reasons)


def check_cohorts(cohorts: Any, names: Sequence[str]) -> Any:
    """Who takes part, as a schedule says it: rows of indices of silos, or None for all of them.

    An index that is no silo's would be somebody else's in a compiled program, in silence.

    >>> check_cohorts(np.array([[0], [2]]), ("leeds", "york"))
    Traceback (most recent call last):
    ...
    ValueError: the schedule asks silo number 2, and there are 2: 0 'leeds', 1 'york'. Give rows of indices below 2, ...
    """
    if cohorts is None:
        return None
    found, number = np.asarray(cohorts), len(names)
    if found.ndim != 2 or not found.shape[1] or found.dtype.kind not in "iu":
        raise ValueError(
            f"cohorts of a schedule are ints of shape (rounds, silos of a round), got {found.dtype}{list(found.shape)}"
        )
    unknown = found[(found < 0) | (found >= number)]
    if len(unknown):
        known = ", ".join(f"{j} {names[j]!r}" for j in range(min(number, 5))) + (", ..." if number > 5 else "")
        raise ValueError(
            f"the schedule asks silo number {unknown[0]}, and there are {number}: {known}. Give rows of indices below "
            f"{number}, or nf.schedules.fixed([[name], ...])"
        )
    twice = np.flatnonzero(np.any(np.diff(np.sort(found, axis=1), axis=1) == 0, axis=1))
    if len(twice):
        raise ValueError(f"the schedule asks a silo twice in a round, {found[twice[0]].tolist()}: name each once")
    return cohorts


def check_count(name: str, value: Any, least: int = 1, optional: bool = False) -> Any:
    """An int of at least ``least`` (or None, where it may be left out), or an error that says so.

    >>> check_count("num_rounds", 8)
    8
    >>> check_count("num_rounds", 0)
    Traceback (most recent call last):
    ...
    ValueError: num_rounds must be an int of at least 1, got 0
    """
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
    return int(value)


def is_number(value: Any) -> bool:
    """Whether it is a real number; True and False are none.

    >>> is_number(2), is_number(0.5), is_number(True), is_number("2")
    (True, True, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_)


def format_names(names: Sequence[str], most: int = 10) -> str:
    """Names for a message: all of them if they are few.

    >>> format_names(("a", "b")), format_names([str(n) for n in range(1000)])
    ("'a', 'b'", "'0', '1', ..., '999'")
    """
    return ", ".join(map(repr, names)) if len(names) <= most else f"{names[0]!r}, {names[1]!r}, ..., {names[-1]!r}"
