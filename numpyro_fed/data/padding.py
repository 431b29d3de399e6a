"""Ragged silos, stacked.

Every own axis is padded by repeating its last valid row (zeros can make infinite log densities, whose masked gradients
are NaN) and carries a mask. Very unequal silos go into a few buckets, so that padding never more than doubles the rows.

A silo's data in a compiled program are a :class:`SiloData`; the ints among the model's arguments are read off its
shapes, so a program serves every silo of its bucket.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.data.axis import Axis
from numpyro_fed.data.inputs import leaves
from numpyro_fed.data.silos import Silos
from numpyro_fed.host import put


class SiloData(NamedTuple):
    """One silo's arguments, padded: what the silo's functions are called with."""

    args: tuple[Any, ...]  # the silo's own arrays, in the order of CallSpec.own
    mask: dict[str, Any]  # {axis: which rows are real}
    shared: tuple[Any, ...]  # arrays that are the same everywhere


class Leaf(NamedTuple):
    """One leaf of the model's arguments: an int (its value, or the axis it counts) or an array (dtype and shape)."""

    path: str
    value: int | None
    axis: str | None
    dtype: str | None
    shape: tuple[int, ...] | None


class CallSpec(NamedTuple):
    """How to call the model from a SiloData: the arguments' structure, and which of them are sizes."""

    own: tuple[Leaf, ...]
    own_structure: Any
    shared: tuple[Leaf, ...]
    shared_structure: Any
    example: dict[str, int]  # the smallest silo's axis lengths: shapes for tracing without data

    def kwargs(self, data: SiloData) -> dict[str, Any]:
        """The model's arguments as this silo calls it."""
        args, shared = iter(data.args), iter(data.shared)
        own = [
            next(args) if leaf.dtype is not None else leaf.value if leaf.axis is None else data.mask[leaf.axis].shape[0]
            for leaf in self.own
        ]
        common = [next(shared) if leaf.dtype is not None else leaf.value for leaf in self.shared]
        return jax.tree.unflatten(self.own_structure, own) | jax.tree.unflatten(self.shared_structure, common)

    def dummy(self) -> SiloData:
        """Data of the right shapes and no content, for terms that do not depend on data.

        Real numbers are ones: NumPyro's ``handlers.scale`` refuses weights of zero.
        """
        lengths = self.example
        args = tuple(
            _nothing((lengths[leaf.axis], *leaf.shape[1:]) if leaf.axis else leaf.shape, leaf.dtype)
            for leaf in self.own
            if leaf.dtype is not None and leaf.shape is not None
        )
        return SiloData(args, {axis: jnp.ones(n, bool) for axis, n in lengths.items()}, ())


def _nothing(shape: tuple[int, ...], dtype: str) -> Any:
    return (jnp.ones if jnp.issubdtype(dtype, jnp.floating) else jnp.zeros)(shape, dtype)


def call_spec(silos: Silos, axes: tuple[Axis, ...]) -> CallSpec:
    """How to call the model on any of these silos, from shapes, types and ints alone."""
    axis_of = {path: axis.name for axis in axes for path in axis.arguments}
    smallest = min(silos.names, key=lambda name: sum(axis.lengths[name] for axis in axes))

    def spec(path: str, leaf: Any, axis: str | None) -> Leaf:
        if isinstance(leaf, int):
            return Leaf(path, leaf, axis, None, None)
        return Leaf(path, None, axis, str(jax.dtypes.canonicalize_dtype(leaf.dtype)), tuple(leaf.shape))

    own, shared = silos.own(smallest), silos.shared
    return CallSpec(
        tuple(spec(path, leaf, axis_of.get(path)) for path, leaf in leaves(own)),
        jax.tree.structure(own),
        tuple(spec(path, leaf, None) for path, leaf in leaves(shared)),
        jax.tree.structure(shared),
        {axis.name: axis.lengths[smallest] for axis in axes},
    )


def shared_arrays(silos: Silos) -> tuple[Any, ...]:
    """The arrays among the shared arguments, on the device, in the order of ``CallSpec.shared``."""
    return tuple(put(leaf) for _, leaf in leaves(silos.shared) if not isinstance(leaf, int))


def silo_data(
    silos: Silos, name: str, spec: CallSpec, axes: tuple[Axis, ...], lengths: dict[str, int] | None = None
) -> SiloData:
    """One silo's data, padded to ``lengths`` (its own lengths when not given). Call it in the silo's room."""
    own = padded_data(silos, name, spec, axes, lengths)
    return put(own)._replace(shared=shared_arrays(silos))


def from_arguments(kwargs: dict[str, Any], spec: CallSpec, lengths: dict[str, int]) -> SiloData:
    """The model's arguments (of new units) as a silo's data."""
    own = jax.tree.leaves({name: kwargs[name] for name in jax.tree.unflatten(spec.own_structure, spec.own)})
    args = tuple(jnp.asarray(value) for leaf, value in zip(spec.own, own, strict=True) if leaf.dtype is not None)
    common = jax.tree.leaves({name: kwargs[name] for name in jax.tree.unflatten(spec.shared_structure, spec.shared)})
    shared = tuple(
        jnp.asarray(value) for leaf, value in zip(spec.shared, common, strict=True) if leaf.dtype is not None
    )
    return SiloData(args, {axis: jnp.ones(n, bool) for axis, n in lengths.items()}, shared)


def cut(value: Any, along: Iterable[tuple[str, int]], lengths: Mapping[str, int], padded: Mapping[str, int]) -> Any:
    """A value without its padded rows.

    Args:
        value: an array; leading axes (draws) are allowed.
        along: the silo's axes that it lies along, each with its dim counted from the right.
        lengths, padded: of the axes, without and with padding. An axis of n elements may have any share of n rows.

    >>> cut(np.arange(8), [("rows", -1)], {"rows": 3}, {"rows": 4})
    array([0, 1, 2, 3, 4, 5])
    """
    for axis, dim in along:
        keep = value.shape[dim] * lengths[axis] // padded[axis]
        value = value[(..., slice(keep), *(slice(None),) * (-dim - 1))]
    return value


def axis_lengths(data: SiloData) -> dict[str, int]:
    """Of the silo's axes, padding included."""
    return {axis: rows.shape[-1] for axis, rows in data.mask.items()}


def without_padding(data: SiloData, spec: CallSpec, lengths: dict[str, int]) -> SiloData:
    """A padded silo's data cut back to its own ``lengths``."""
    arrays, padded = [leaf for leaf in spec.own if leaf.dtype is not None], axis_lengths(data)
    args = tuple(
        array if leaf.axis is None else cut(array, [(leaf.axis, -array.ndim)], lengths, padded)
        for leaf, array in zip(arrays, data.args, strict=True)
    )
    mask = {axis: cut(rows, [(axis, -1)], lengths, padded) for axis, rows in data.mask.items()}
    return SiloData(args, mask, data.shared)


def padded_data(
    silos: Silos, name: str, spec: CallSpec, axes: tuple[Axis, ...], lengths: dict[str, int] | None
) -> SiloData:
    """One silo's arguments on the host, in the program's types. Reads them: call it in the silo's room."""
    own = {axis.name: axis.lengths[name] for axis in axes}
    lengths = own if lengths is None else lengths
    arrays = [leaf for _, leaf in leaves(silos.own(name))]
    args = tuple(
        np.asarray(array if leaf.axis is None else _repeat_last(array, lengths[leaf.axis]), leaf.dtype)
        for leaf, array in zip(spec.own, arrays, strict=True)
        if leaf.dtype is not None
    )
    return SiloData(args, {axis: np.arange(n) < own[axis] for axis, n in lengths.items()}, ())


def _repeat_last(array: np.ndarray, length: int) -> np.ndarray:
    extra = length - array.shape[0]
    return array if extra == 0 else np.concatenate([array, np.repeat(array[-1:], extra, axis=0)])
