"""Is it the same run? Settings, model, key and data as short digests, to be kept in a file and compared.

A digest is of what a value is made of: the code of a function with all that it closes over, the numbers of an array,
the fields of a dataclass. So it is the same in another process, and another where a learning rate is.
"""

import hashlib
import platform
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib import metadata
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.data.silos import at_silo
from numpyro_fed.host import real_dtype

LETTERS = 16
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), np.dtype)


def digest_of(value: Any) -> str:
    """Sixteen letters that tell values apart.

    >>> rate = lambda size: lambda x: x - size * x
    >>> digest_of(rate(0.1)) == digest_of(rate(0.1)), digest_of(rate(0.1)) == digest_of(rate(0.2))
    (True, False)
    """
    found = hashlib.sha256()
    _walk(value, found.update, {})
    return found.hexdigest()[:LETTERS]


def _walk(value: Any, tell: Any, met: dict[int, Any]) -> None:
    """Everything that a value is made of, each part once."""
    tell(type(value).__qualname__.encode())
    if isinstance(value, PLAIN):
        tell(repr(value).encode())
        return
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        tell(f"{array.dtype}{array.shape}".encode())
        tell(np.ascontiguousarray(array).tobytes() if array.dtype != object else repr(array.tolist()).encode())
        return
    if id(value) in met:
        return
    met[id(value)] = value  # held, so that nothing else gets its number
    for part in _parts(value):
        _walk(part, tell, met)


def _parts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=repr) for part in (key, value[key])]
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, CodeType):
        return (value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_freevars)
    if isinstance(value, FunctionType):
        closed = [_contents(cell) for cell in value.__closure__ or ()]
        return (value.__code__, value.__defaults__, value.__kwdefaults__, closed, _looked_up(value))
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, partial):
        return (value.func, value.args, value.keywords)
    if isinstance(value, type | ModuleType):
        return (value.__module__ if isinstance(value, type) else "", getattr(value, "__qualname__", value.__name__))
    if hasattr(value, "__wrapped__"):  # of jax.jit, functools.wraps
        return (value.__wrapped__,)
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    own = getattr(value, "__dict__", None)
    return (own,) if own else (ADDRESS.sub("", repr(value)),)


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _looked_up(function: FunctionType) -> dict[str, Any]:
    """What it reads of its own module: numbers, arrays and functions beside it."""
    found = {}
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        beside = isinstance(value, FunctionType) and value.__module__ == function.__module__
        if beside or (value is not None and isinstance(value, (*PLAIN, np.ndarray, jax.Array))):
            found[name] = value
    return found


def identity(method: Any, key: Any, silos: Any, asked: dict[str, Any], init_state: Any) -> dict[str, dict[str, str]]:
    """What makes a run this one: ``{what: {name: digest, or a word}}``."""
    settings = {field.name: digest_of(getattr(method, field.name)) for field in fields(method)}
    given = {name: digest_of(value) for name, value in asked.items()}
    # a state's structure is another's business: its numbers are its identity
    start = init_state if init_state is None else jax.tree.leaves(getattr(init_state, "state", init_state))
    some, own = silos.example() if silos.lazy else silos, {}
    for name in some.names:
        with at_silo(name):
            own[name] = digest_of(dict(some.own(name)))
    return {
        "method": {type(method).__name__: str(real_dtype())},
        "settings": settings,
        "arguments": {"rng_key": digest_of(key), **given, "init_state": digest_of(start)},
        "silos": own,
        "data": {"shared": digest_of(dict(silos.shared)), "number of silos": str(len(silos.names))},
    }


def versions() -> dict[str, str]:
    """Of what numbers depend on to the last bit."""
    found = {name: metadata.version(name) for name in ("numpyro_fed", "jax", "jaxlib", "numpyro", "optax")}
    return {**found, "Python": platform.python_version()}


def difference(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> str | None:
    """What a run is asked for that another was not, in words; None: they are the same."""
    if before["method"] != now["method"]:
        tell = lambda one: " in ".join(next(iter(one["method"].items())))
        return f"it is of {tell(before)}, and this is {tell(now)}"
    if set(before["silos"]) != set(now["silos"]):
        gone, new = (sorted(set(a["silos"]) - set(b["silos"])) for a, b in ((before, now), (now, before)))
        told = [f"missing now: {', '.join(gone)}"] * bool(gone) + [f"not in the file: {', '.join(new)}"] * bool(new)
        return f"it has other silos ({'; '.join(told)})"
    for name, found in before["silos"].items():
        if now["silos"][name] != found:
            return f"the data of silo {name!r} are others now"
    for name, found in before["settings"].items():
        if now["settings"].get(name) != found:
            return "the model is another" if name == "model" else f"the setting {name} is another"
    for group in ("arguments", "data"):
        for name, found in before[group].items():
            if now[group].get(name) != found:
                return f"{name} is another"
    return None
