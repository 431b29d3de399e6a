"""What users hand over to every function, checked, and how silos are named in messages."""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_key(rng_key: Any) -> Any:
    """A typed key from what the user gave (typed or legacy), or an error that says what to type."""
    if isinstance(rng_key, jax.Array) and jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) and rng_key.shape == ():
        return rng_key
    if hasattr(rng_key, "dtype") and rng_key.dtype == jnp.uint32 and rng_key.shape == (2,):
        return jax.random.wrap_key_data(jnp.asarray(rng_key))
    got = "nothing" if rng_key is None else f"a {type(rng_key).__name__}"
    raise TypeError(f"rng_key must be a JAX key, got {got}: pass jax.random.key(0)")


def users_line() -> int:
    """The ``stacklevel`` with which the caller's warning is shown where the user called the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    return level


class VerdictWarning(UserWarning):
    """The fit itself doubts its posterior; the message says why and what to type."""


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


def format_names(names: Sequence[str], most: int = 10) -> str:
    """Names for a message: all of them if they are few.

    >>> format_names(("a", "b")), format_names([str(n) for n in range(1000)])
    ("'a', 'b'", "'0', '1', ..., '999'")
    """
    return ", ".join(map(repr, names)) if len(names) <= most else f"{names[0]!r}, {names[1]!r}, ..., {names[-1]!r}"
