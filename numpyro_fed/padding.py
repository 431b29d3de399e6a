"""Ragged silos, stacked.

Every own axis is padded by repeating its last valid row (zeros can make infinite log densities, whose masked gradients
are NaN) and carries a mask. Very unequal silos go into a few buckets, so that padding never more than doubles the rows.

A silo's data in a compiled program are a :class:`SiloData`; the ints among the model's arguments are read off its
shapes, so a program serves every silo of its bucket.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.partition import Axis, Partition
from numpyro_fed.silos import Silos, leaves

PADDING = 2.0  # rows after padding, at most this many times the rows before


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
        """Data of the right shapes and no content, for terms that do not depend on data."""
        lengths = self.example
        args = tuple(
            jnp.zeros((lengths[leaf.axis], *leaf.shape[1:]) if leaf.axis else leaf.shape, leaf.dtype)
            for leaf in self.own
            if leaf.dtype is not None and leaf.shape is not None
        )
        return SiloData(args, {axis: jnp.ones(n, bool) for axis, n in lengths.items()}, ())


def call_spec(silos: Silos, partition: Partition) -> CallSpec:
    axis_of = {path: axis.name for axis in partition.axes for path in axis.arguments}
    smallest = min(silos.names, key=lambda name: sum(axis.lengths[name] for axis in partition.axes))

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
        {axis.name: axis.lengths[smallest] for axis in partition.axes},
    )


def shared_arrays(silos: Silos) -> tuple[Any, ...]:
    return tuple(jnp.asarray(leaf) for _, leaf in leaves(silos.shared) if not isinstance(leaf, int))


def silo_data(
    silos: Silos, name: str, spec: CallSpec, axes: tuple[Axis, ...], lengths: dict[str, int] | None = None
) -> SiloData:
    """One silo's data, padded to ``lengths`` (its own lengths when not given)."""
    return _on_device(_padded(silos, name, spec, axes, lengths))._replace(shared=shared_arrays(silos))


def from_arguments(kwargs: dict[str, Any], spec: CallSpec, lengths: dict[str, int]) -> SiloData:
    """The model's arguments (of new units) as a silo's data."""
    own = jax.tree.leaves({name: kwargs[name] for name in jax.tree.unflatten(spec.own_structure, spec.own)})
    args = tuple(jnp.asarray(value) for leaf, value in zip(spec.own, own, strict=True) if leaf.dtype is not None)
    common = jax.tree.leaves({name: kwargs[name] for name in jax.tree.unflatten(spec.shared_structure, spec.shared)})
    shared = tuple(
        jnp.asarray(value) for leaf, value in zip(spec.shared, common, strict=True) if leaf.dtype is not None
    )
    return SiloData(args, {axis: jnp.ones(n, bool) for axis, n in lengths.items()}, shared)


def without_padding(data: SiloData, spec: CallSpec, lengths: dict[str, int]) -> SiloData:
    """A padded silo's data cut back to its own ``lengths``."""
    arrays = [leaf for leaf in spec.own if leaf.dtype is not None]
    args = tuple(
        array if leaf.axis is None else array[: lengths[leaf.axis]]
        for leaf, array in zip(arrays, data.args, strict=True)
    )
    return SiloData(args, {axis: mask[: lengths[axis]] for axis, mask in data.mask.items()}, data.shared)


def _padded(
    silos: Silos, name: str, spec: CallSpec, axes: tuple[Axis, ...], lengths: dict[str, int] | None
) -> SiloData:
    own = {axis.name: axis.lengths[name] for axis in axes}
    lengths = own if lengths is None else lengths
    arrays = [leaf for _, leaf in leaves(silos.own(name))]
    args = tuple(
        array if leaf.axis is None else _repeat_last(array, lengths[leaf.axis])
        for leaf, array in zip(spec.own, arrays, strict=True)
        if leaf.dtype is not None
    )
    return SiloData(args, {axis: np.arange(n) < own[axis] for axis, n in lengths.items()}, ())


def gathered(
    members: list[tuple[str, dict[str, Any]]], spec: CallSpec, axes: tuple[Axis, ...], rounded: bool = True
) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """A cohort's ``args`` and ``mask``, padded to a common length and stacked, on the host.

    A free axis is padded to a power of two, so that cohorts of about the same sizes share a program.

    Args:
        members: names and own arguments, as a :class:`~numpyro_fed.store.SiloStore` reads them.
        spec, axes: of the model, which was split on an example of the silos.
        rounded: to a power of two; else to the longest alone.
    """
    arrays = [jax.tree.leaves(args) for _, args in members]
    own = [_lengths_of(name, found, spec, axes) for (name, _), found in zip(members, arrays, strict=True)]
    longest = {axis.name: max(lengths[axis.name] for lengths in own) for axis in axes}
    free = {axis.name for axis in axes if axis.free and rounded}
    padded = {axis: 1 << (n - 1).bit_length() if axis in free else n for axis, n in longest.items()}
    args = []
    for position, leaf in enumerate(spec.own):
        if leaf.dtype is None or leaf.shape is None:
            continue
        shape = leaf.shape if leaf.axis is None else (padded[leaf.axis], *leaf.shape[1:])
        out = np.empty((len(members), *shape), leaf.dtype)
        for row, found in zip(out, arrays, strict=True):
            if leaf.axis is None:
                row[...] = found[position]
            else:
                row[: len(found[position])] = found[position]
                row[len(found[position]) :] = found[position][-1]
        args.append(out)
    mask = {axis: np.arange(n) < np.array([lengths[axis] for lengths in own])[:, None] for axis, n in padded.items()}
    return tuple(args), mask


def _lengths_of(name: str, found: list[Any], spec: CallSpec, axes: tuple[Axis, ...]) -> dict[str, int]:
    """The lengths of a silo's axes, when it can be called as the example's silos are."""
    lengths: dict[str, int] = {}
    more = "Silos of the example were not like that; give the store's first silo that shape, if it is right."
    for leaf, value in zip(spec.own, found, strict=True):
        size = value if isinstance(value, int) else np.shape(value)
        if leaf.axis is None:
            expected = leaf.shape if leaf.value is None else leaf.value
            if size != expected:
                raise ValueError(
                    f"silo {name!r}: argument {leaf.path!r} is {size}, expected {expected}: it does not lie along a "
                    f"plate of the silo's own. {more}"
                )
            continue
        size = size if isinstance(size, int) else size[0]
        if lengths.setdefault(leaf.axis, size) != size:
            raise ValueError(
                f"silo {name!r}: argument {leaf.path!r} has {size} rows where others of axis {leaf.axis!r} have "
                f"{lengths[leaf.axis]}. {more}"
            )
    for axis in axes:
        known = set(axis.lengths.values())
        if not axis.free and len(known) == 1 and lengths[axis.name] not in known:
            raise ValueError(
                f"silo {name!r} has {lengths[axis.name]} rows along {axis.name!r}, and the model takes {known.pop()}: "
                f"its rows are not independent, so they cannot be padded. {more}"
            )
    return lengths


def _repeat_last(array: np.ndarray, length: int) -> np.ndarray:
    extra = length - array.shape[0]
    return array if extra == 0 else np.concatenate([array, np.repeat(array[-1:], extra, axis=0)])


def _on_device(data: SiloData) -> SiloData:
    return jax.tree.map(jnp.asarray, data)


class Bucket(NamedTuple):
    """Silos of similar size, padded alike and stacked on a leading axis."""

    names: tuple[str, ...]
    args: tuple[Any, ...]
    mask: dict[str, Any]


def stack(silos: Silos, spec: CallSpec, axes: tuple[Axis, ...]) -> list[Bucket]:
    """All silos in as few buckets as keep padding below ``PADDING`` times the rows."""
    buckets = bucket_names(silos.names, axes)
    lengths = [{axis.name: max(axis.lengths[name] for name in names) for axis in axes} for names in buckets]
    rounded = [
        {axis.name: round_up(own[axis.name]) if axis.free else own[axis.name] for axis in axes} for own in lengths
    ]
    rows = sum(axis.lengths[name] for axis in axes for name in silos.names)
    if sum(len(names) * sum(own.values()) for names, own in zip(buckets, rounded, strict=True)) <= PADDING * rows:
        lengths = rounded
    stacked = []
    for names, own in zip(buckets, lengths, strict=True):
        members = [_padded(silos, name, spec, axes, own) for name in names]
        data = jax.tree.map(lambda *rows: jnp.asarray(np.stack(rows)), *members)
        stacked.append(Bucket(tuple(names), data.args, data.mask))
    return stacked


def round_up(length: int) -> int:
    """The next power of two up to 8, then the next multiple of 8: loops over such lengths are vectorised.

    On a CPU a loop over 537 rows takes five times as long as one over 540; it also lets sizes change a little without a
    new program.

    >>> [round_up(n) for n in (1, 3, 5, 9, 537)]
    [1, 4, 8, 16, 544]
    """
    return 1 << (length - 1).bit_length() if length <= 8 else -(-length // 8) * 8


def bucket_names(names: tuple[str, ...], axes: tuple[Axis, ...]) -> list[list[str]]:
    """Silos sorted by size and cut into the fewest runs whose rows, padded, are at most ``PADDING`` times the rows.

    >>> lengths = {"a": 100, "b": 30, "c": 20, "d": 90}
    >>> bucket_names(tuple(lengths), (Axis("rows", ("y",), ("rows",), lengths),))
    [['a', 'b', 'c', 'd']]
    >>> lengths = {str(i): 2 for i in range(100)} | {"big": 1000}
    >>> [len(names) for names in bucket_names(tuple(lengths), (Axis("rows", ("y",), ("rows",), lengths),))]
    [100, 1]
    """
    ragged = [axis for axis in axes if len(set(axis.lengths.values())) > 1]
    if not ragged:
        return [list(names)]
    table = {name: [axis.lengths[name] for axis in ragged] for name in names}
    order = sorted(names, key=lambda name: (sum(table[name]), name))
    classes = _classes(table)
    runs = _cut(order, np.array([table[name] for name in order]), len(classes)) or classes
    position = {name: i for i, name in enumerate(names)}
    return [sorted(run, key=position.__getitem__) for run in runs]


def _classes(table: dict[str, list[int]]) -> list[list[str]]:
    """Silos whose sizes lie within the same octaves on every axis, the octaves as wide as ``PADDING`` allows."""
    rows = sum(map(sum, table.values()))
    for width in range(max(map(max, table.values())).bit_length(), 0, -1):
        found: dict[tuple[int, ...], list[str]] = {}
        for name, sizes in table.items():
            found.setdefault(tuple((size.bit_length() - 1) // width for size in sizes), []).append(name)
        longest = [np.max([table[name] for name in names], axis=0).sum() for names in found.values()]
        if sum(len(names) * n for names, n in zip(found.values(), longest, strict=True)) <= PADDING * rows:
            return list(found.values())
    raise AssertionError("unreachable: one octave is less than a factor of two")


def _cut(order: list[str], sizes: np.ndarray, most: int) -> list[list[str]] | None:
    """Cut the sorted silos, sizes (silos, axes), into the fewest runs within ``PADDING``; None if it takes ``most``."""
    total = sizes.sum(axis=1)
    grid = np.flatnonzero(np.diff(total, prepend=0, append=total[-1] + 1))  # where a run may start or end
    if len(grid) > 200:
        grid = np.unique([0, *np.searchsorted(total, np.geomspace(total[0], total[-1], 200)), len(total)])
    longest = np.maximum.reduceat(sizes, grid[:-1], axis=0)
    cost = np.full((len(grid), len(grid)), np.inf)  # rows of a run from one point of the grid to another
    for i in range(len(grid) - 1):
        rows = np.maximum.accumulate(longest[i:], axis=0).sum(axis=1)
        cost[i, i + 1 :] = (grid[i + 1 :] - grid[i]) * rows
    best = cost[0]  # of reaching each point in the runs so far
    back: list[np.ndarray] = []
    for _ in range(most - 1):
        if best[-1] <= PADDING * sizes.sum():
            ends = [len(grid) - 1]
            for previous in reversed(back):
                ends.append(int(previous[ends[-1]]))
            cuts = grid[[0, *reversed(ends)]]
            return [order[start:end] for start, end in itertools.pairwise(cuts)]
        options = best[:, None] + cost
        back.append(np.argmin(options, axis=0))
        best = np.min(options, axis=0)
    return None
