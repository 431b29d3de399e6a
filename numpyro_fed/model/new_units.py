"""The arguments of new units: what a prediction must be given, and what may be left out."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.checks import unsaid
from numpyro_fed.data.inputs import leaves
from numpyro_fed.data.padding import Leaf
from numpyro_fed.data.silos import Silos
from numpyro_fed.model.forward import forward, unit_axes
from numpyro_fed.model.indices import check_call
from numpyro_fed.model.provenance import provenance
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import trace_silo

Array = jax.Array


def used_arguments(split: SplitModel) -> frozenset[str]:
    """Paths of the arguments on whose values a prediction depends: not those that are only observed."""
    kwargs = split.spec.kwargs(split.dummy())
    paths = [path for path, _ in leaves(kwargs)]
    flat, structure = jax.tree.flatten(kwargs)

    def run(**arrays: Any) -> dict[str, Array]:
        full = [leaf if isinstance(leaf, int) else arrays[path] for path, leaf in zip(paths, flat, strict=True)]
        values = split.unravel(jnp.zeros(split.dim))
        return forward(split, values, split.theta, jax.tree.unflatten(structure, full), jax.random.key(0))

    arrays = {path: leaf for path, leaf in zip(paths, flat, strict=True) if not isinstance(leaf, int)}
    found = provenance(run, arrays)
    return frozenset().union(*jax.tree.leaves(found, is_leaf=lambda node: isinstance(node, frozenset)))


def arguments(
    split: SplitModel, used: frozenset[str], data: Mapping[str, Any], own: dict[str, Any], where: str
) -> tuple[dict[str, Any], dict[str, int]]:
    """The model's arguments for new units, with what may be left out filled in, and the lengths of the own axes.

    Left out may be: arguments whose values do not matter (observations), shared ones, and those that are not about
    units when ``own`` has the silo's.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"data must be a dict of model arguments, got a {type(data).__name__}")
    spec = split.spec
    expected: dict[str, Any] = jax.tree.unflatten(spec.own_structure, spec.own)
    shared = spec.kwargs(split.dummy())
    shared = {name: value for name, value in shared.items() if name not in expected}
    specs = {name: jax.tree.leaves(tree, is_leaf=_is_leaf) for name, tree in expected.items()}
    units = unit_axes(split)
    with unsaid(UserWarning):  # numbers are converted to the silos' precision below
        given = Silos({where: {name: value for name, value in data.items() if value is not None}}).own(where)

    free = [name for name in expected if all(leaf.dtype and leaf.path not in used for leaf in specs[name])]
    own = {name: value for name, value in own.items() if not units & {leaf.axis for leaf in specs[name]}}
    unknown = [name for name in given if name not in expected and name not in shared]
    missing = [name for name in expected if name not in given and name not in free and name not in own]
    if unknown or missing:
        raise ValueError(
            "; ".join(
                [f"data lacks the arguments {', '.join(missing)}"] * bool(missing)
                + [f"the model has no arguments {', '.join(unknown)}"] * bool(unknown)
            )
            + f". Got {', '.join(given) or 'none'}; the model needs {', '.join(n for n in expected if n not in free)}"
            + (f" (of {', '.join(free)} the values do not matter)" if free else "")
        )

    filled: dict[str, Any] = {name: own[name] for name in expected if name not in given and name in own}
    for name in expected:
        if name in given:
            got, structure = jax.tree.flatten(given[name])
            if [path for path, _ in leaves({name: given[name]})] != [leaf.path for leaf in specs[name]]:
                raise ValueError(
                    f"argument {name!r} must be nested as in the silos: {', '.join(s.path for s in specs[name])}"
                )
            fitted = [_fitted(leaf, value) for leaf, value in zip(specs[name], got, strict=True)]
            filled[name] = jax.tree.unflatten(structure, fitted)
    lengths = _lengths(specs, filled)
    for name in free:
        if name not in filled:
            structure = jax.tree.structure(expected[name], is_leaf=_is_leaf)
            zeros = [np.zeros(_shape(leaf, lengths, specs), leaf.dtype) for leaf in specs[name]]
            filled[name] = jax.tree.unflatten(structure, zeros)
    kwargs = {name: filled[name] for name in expected} | {
        name: given.get(name, value) for name, value in shared.items()
    }
    trace_silo(split.model, where, kwargs)
    check_call(split, kwargs)
    return kwargs, _lengths(specs, kwargs)


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


def _fitted(leaf: Leaf, value: Any) -> Any:
    """A new argument in the silos' type; its rows may be any number."""
    if leaf.dtype is None or leaf.shape is None:
        if not isinstance(value, int):
            raise TypeError(f"argument {leaf.path!r} must be an int as in the silos, got an array")
        return value
    array = np.asarray(value)
    if array.ndim != len(leaf.shape) or array.shape[1:] != leaf.shape[1:]:
        rows = ", ".join(["rows", *map(str, leaf.shape[1:])]) if leaf.shape else ""
        raise ValueError(f"argument {leaf.path!r} has shape {array.shape}; the silos have ({rows})")
    if not np.can_cast(array.dtype, leaf.dtype, "same_kind"):
        raise TypeError(f"argument {leaf.path!r} is {array.dtype}; the silos have {leaf.dtype}: convert it")
    return array.astype(leaf.dtype)


def _lengths(specs: dict[str, list[Leaf]], filled: dict[str, Any]) -> dict[str, int]:
    found: dict[str, tuple[int, str]] = {}
    for name, tree in filled.items():
        for leaf, value in zip(specs.get(name, ()), jax.tree.leaves(tree), strict=False):
            if leaf.axis is None:
                continue
            rows = value if isinstance(value, int) else np.shape(value)[0]
            before = found.setdefault(leaf.axis, (rows, leaf.path))
            if before[0] != rows:
                raise ValueError(
                    f"{before[1]!r} has {before[0]} rows and {leaf.path!r} has {rows}: give both the same units"
                )
    return {axis: rows for axis, (rows, _) in found.items()}


def _shape(leaf: Leaf, lengths: dict[str, int], specs: dict[str, list[Leaf]]) -> tuple[int, ...]:
    shape = leaf.shape or ()
    if leaf.axis is None:
        return shape
    if leaf.axis not in lengths:
        along = [name for name, found in specs.items() if leaf.axis in {other.axis for other in found}]
        raise ValueError(
            f"how many units? Nothing in data has a row for each: give {' or '.join(along)} (of observations only "
            "their number matters)"
        )
    return (lengths[leaf.axis], *shape[1:])
