"""Digests of values: of what they are made of, the same in another process.

Of a function that is its code, what it closes over, and what it and functions within it read of their module; of a
class of the user's its methods; of an object its class and what it holds. Libraries are told by names: their versions
are compared apart (:func:`numpyro_fed.run.identity.versions`). Parts come in as digests, all of one length, so where
one ends is never in doubt.
"""

import hashlib
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LETTERS = 16
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), np.dtype)
SKIPPED = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__name__", "__qualname__", "__wrapped__", "__hash__"),
    *("__annotations__", "__annotate__", "__annotate_func__", "__abstractmethods__", "_abc_impl"),
    *("__dataclass_fields__", "__dataclass_params__", "__firstlineno__", "__static_attributes__"),
}
FOLDERS = [sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")]
LIBRARIES = tuple({*FOLDERS, *(str(Path(folder).resolve()) for folder in FOLDERS)})


def digest_of(value: Any) -> str:
    """Sixteen letters that tell values apart.

    >>> rate = lambda size: lambda x: x - size * x
    >>> digest_of(rate(0.1)) == digest_of(rate(0.1)), digest_of(rate(0.1)) == digest_of(rate(0.2))
    (True, False)
    >>> digest_of(((1,), 2)) == digest_of(((1, 2),))
    False
    """
    return _digest(value, {}, {}).hex()[:LETTERS]


def _digest(value: Any, met: dict[int, tuple[bytes, Any]], inside: dict[int, int]) -> bytes:
    found = hashlib.sha256(type(value).__qualname__.encode() + b"\0")
    if isinstance(value, PLAIN):
        found.update(repr(value).encode())
        return found.digest()
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            found.update(str(jax.random.key_impl(value)).encode())
            value = jax.random.key_data(value)
        array = np.asarray(value)
        if array.dtype != object:
            found.update(f"{array.dtype}{array.shape}".encode())
            found.update(np.ascontiguousarray(array).tobytes())
            return found.digest()
        value = (array.shape, array.ravel().tolist())
    if id(value) in met:
        return met[id(value)][0]
    if id(value) in inside:  # it is a part of itself
        return hashlib.sha256(b"%d" % (len(inside) - inside[id(value)])).digest()
    inside[id(value)] = len(inside)
    for part in _parts(value):
        found.update(_digest(part, met, inside))
    del inside[id(value)]
    met[id(value)] = found.digest(), value  # held, so that nothing else gets its number
    return found.digest()


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=repr) for part in (key, value[key])]
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, FunctionType | CodeType | MethodType | staticmethod | classmethod | property | partial):
        return _code(value)
    if isinstance(value, ModuleType):
        return (value.__name__,)
    if isinstance(value, type):
        known = (value.__module__, value.__qualname__)
        return known if _installed(value.__module__) else (value.__qualname__, value.__bases__, _named(vars(value)))
    if hasattr(value, "to_numpy") and hasattr(value, "index"):  # of pandas
        return (value.to_numpy(), list(value.index), list(getattr(value, "columns", ())))
    kind = type(value)
    if hasattr(value, "__wrapped__"):  # of jax.jit and functools.wraps; of a handler with what it does
        return (kind, value.__wrapped__, _named(getattr(value, "__dict__", {})))
    if is_dataclass(value):
        return [kind, *((field.name, getattr(value, field.name)) for field in fields(value))]
    own = dict(getattr(value, "__dict__", {}))
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names = (slots,) if isinstance(slots, str) else slots
        own |= {name: getattr(value, name) for name in names if name not in SKIPPED and hasattr(value, name)}
    if own:
        return (kind, getattr(value, "__name__", ""), _named(own))
    return (kind, ADDRESS.sub("", repr(value)))


def _code(value: Any) -> Iterable[Any]:
    """Of what can be called, or is a part of it."""
    if isinstance(value, CodeType):
        return (value.co_code, value.co_consts, value.co_names, value.co_varnames, value.co_freevars)
    if isinstance(value, FunctionType):
        closed = [_contents(cell) for cell in value.__closure__ or ()]
        read = {} if _installed(value.__module__ or "") else _looked_up(value)
        return (value.__code__, value.__defaults__, value.__kwdefaults__, closed, read)
    if isinstance(value, MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, property):
        return (value.fget,)
    if isinstance(value, partial):
        return (value.func, value.args, value.keywords)
    return (value.__func__,)


def _named(mapping: Mapping[str, Any]) -> list[Any]:
    return [part for key in sorted(mapping, key=repr) if key not in SKIPPED for part in (key, mapping[key])]


def _installed(module: str) -> bool:
    """Whether it is a library's: of these versions are compared, not code."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module != "__main__"
    return str(file).startswith(LIBRARIES) or module.partition(".")[0] == __name__.partition(".")[0]


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not yet filled
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _looked_up(function: FunctionType) -> dict[str, Any]:
    """What a user's function, and those within it, read of their module."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, value in found.items():
        if isinstance(value, ModuleType):
            own = {at: getattr(value, at) for at in names if hasattr(value, at)}
            found[name] = value.__name__ if _installed(value.__name__) else own
        elif isinstance(value, FunctionType) and _installed(value.__module__ or ""):
            found[name] = (value.__module__, value.__qualname__)
    return found
