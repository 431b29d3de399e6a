"""Pytrees as JSON, and their arrays beside it. Nothing is pickled, so reading runs no code."""

import sys
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def encode(tree: Any, leaf: Callable[[Any], dict[str, Any]]) -> Any:
    """A pytree's structure as JSON. Python numbers stand in it, ``leaf`` says what stands for an array."""
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, np.generic):  # of which float64 is a float, too
        return leaf(tree)
    if isinstance(tree, float):
        return {"float": repr(tree)}
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"cannot save a dict with keys other than strings: {list(tree)}")
        return {"dict": {key: encode(value, leaf) for key, value in tree.items()}}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        kind = f"{type(tree).__module__}:{type(tree).__qualname__}"
        return {"named": kind, "fields": list(tree._fields), "items": [encode(item, leaf) for item in tree]}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [encode(item, leaf) for item in tree]}
    if isinstance(tree, jax.Array | np.ndarray):
        return leaf(tree)
    raise TypeError(f"cannot save a {type(tree).__name__}: states are dicts, lists, (named) tuples, arrays and numbers")


def decode(node: Any, leaf: Callable[[dict[str, Any]], Any]) -> Any:
    """The inverse of `encode`."""
    if not isinstance(node, dict):
        return node
    if "dict" in node:
        return {key: decode(value, leaf) for key, value in node["dict"].items()}
    if "float" in node:
        return float(node["float"])
    if "named" in node:
        items = [decode(item, leaf) for item in node["items"]]
        return tuple.__new__(_named(node["named"], node["fields"]), items)
    for kind in (list, tuple):
        if kind.__name__ in node:
            return kind(decode(item, leaf) for item in node[kind.__name__])
    return leaf(node)


def _named(kind: str, fields: list[str]) -> Any:
    """The NamedTuple of that name among the modules already imported; one like it, where an upgrade has moved it.

    Looked up and not listed: the states of an optimiser are its author's types, and a run that goes on needs these.
    """
    module, _, name = kind.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, tuple) and list(getattr(found, "_fields", ())) == fields:
        return found
    return namedtuple(name.split(".")[-1], fields)


def keep_in(arrays: dict[str, np.ndarray]) -> Callable[[Any], dict[str, Any]]:
    """Puts a leaf into ``arrays`` and tells where."""

    def keep(leaf: Any) -> dict[str, Any]:
        note: dict[str, Any] = {"array": str(len(arrays))}
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            note["key"] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        note["dtype"], note["host"] = str(leaf.dtype), not isinstance(leaf, jax.Array)
        arrays[note["array"]] = np.asarray(leaf)
        return note

    return keep


def read_from(arrays: dict[str, np.ndarray]) -> Callable[[dict[str, Any]], Any]:
    def read(note: dict[str, Any]) -> Any:
        array = arrays[note["array"]]
        if str(array.dtype) != note["dtype"]:  # bfloat16 and its like are bytes to NumPy
            array = array.view(jnp.dtype(note["dtype"]))
        if note["host"]:
            return array
        with jax.enable_x64(True):  # natural parameters are float64 in any program
            leaf = jnp.asarray(array)
        return jax.random.wrap_key_data(leaf, impl=note["key"]) if "key" in note else leaf

    return read
