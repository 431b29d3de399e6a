"""What users hand over to every function, checked, and how silos are named in messages."""

import sys
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PACKAGE = __name__.partition(".")[0]


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


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """A warning that points at the user's line: the nearest one outside of this package."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


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
