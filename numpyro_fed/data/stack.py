"""All silos, stacked in a few buckets, or gathered from a store cohort by cohort.

Silos of similar size share a bucket and are padded alike, so that padding never more than doubles the rows.
"""

import itertools
import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_fed.data.axis import Axis
from numpyro_fed.data.inputs import leaves, shared_digest
from numpyro_fed.data.padding import CallSpec, SiloData, padded_data, shared_arrays
from numpyro_fed.data.silos import Silos, at_silo
from numpyro_fed.host import put
from numpyro_fed.keys import identities

Array = jax.Array
PADDING = 2.0  # rows after padding, at most this many times the rows before
MORE_PADDING, LITTLE_ROWS = 4.0, 2**14  # or so many times, where that is no more than so many rows in all silos


def pad_and_stack(
    members: list[tuple[str, dict[str, Any]]], spec: CallSpec, axes: tuple[Axis, ...], rounded: bool = True
) -> tuple[tuple[np.ndarray, ...], dict[str, np.ndarray]]:
    """A cohort's ``args`` and ``mask``, padded to a common length and stacked, on the host.

    A free axis is padded to a power of two, so that cohorts of about the same sizes share a program.

    Args:
        members: names and own arguments, as a :class:`~numpyro_fed.data.store.SiloStore` reads them.
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


def round_up(length: int) -> int:
    """The next power of two up to 8, then the next multiple of 8: loops over such lengths are vectorised.

    On a CPU a loop over 537 rows takes five times as long as one over 540; it also lets sizes change a little without a
    new program.

    >>> [round_up(n) for n in (1, 3, 5, 9, 537)]
    [1, 4, 8, 16, 544]
    """
    return 1 << (length - 1).bit_length() if length <= 8 else -(-length // 8) * 8


def most_rows(rows: int) -> float:
    """Rows after padding, at most. Where they are few, compiling for one more size takes longer than some padding."""
    return max(PADDING * rows, min(MORE_PADDING * rows, LITTLE_ROWS))


def bucket_names(names: tuple[str, ...], axes: tuple[Axis, ...]) -> list[list[str]]:
    """Silos sorted by size and cut into the fewest runs whose rows, padded, are no more than :func:`most_rows`.

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
    most = most_rows(sum(map(sum, table.values())))
    classes = _classes(table, most)
    runs = _cut(order, np.array([table[name] for name in order]), len(classes), most) or classes
    position = {name: i for i, name in enumerate(names)}
    return [sorted(run, key=position.__getitem__) for run in runs]


def _classes(table: dict[str, list[int]], most: float) -> list[list[str]]:
    """Silos whose sizes lie within the same octaves on every axis, the octaves as wide as padding allows."""
    for width in range(max(map(max, table.values())).bit_length(), 0, -1):
        found: dict[tuple[int, ...], list[str]] = {}
        for name, sizes in table.items():
            found.setdefault(tuple((size.bit_length() - 1) // width for size in sizes), []).append(name)
        longest = [np.max([table[name] for name in names], axis=0).sum() for names in found.values()]
        if sum(len(names) * n for names, n in zip(found.values(), longest, strict=True)) <= most:
            return list(found.values())
    raise AssertionError("unreachable: one octave is less than a factor of two")


def _cut(order: list[str], sizes: np.ndarray, runs: int, most: float) -> list[list[str]] | None:
    """Cut the sorted silos, sizes (silos, axes), into the fewest runs of ``most`` rows; None if it takes ``runs``."""
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
    for _ in range(runs - 1):
        if best[-1] <= most:
            ends = [len(grid) - 1]
            for previous in reversed(back):
                ends.append(int(previous[ends[-1]]))
            cuts = grid[[0, *reversed(ends)]]
            return [order[start:end] for start, end in itertools.pairwise(cuts)]
        options = best[:, None] + cost
        back.append(np.argmin(options, axis=0))
        best = np.min(options, axis=0)
    return None


class Bucket(NamedTuple):
    """Silos of similar size, padded to the same lengths."""

    names: tuple[str, ...]
    lengths: dict[str, int]  # {axis: rows after padding}


class Stack:
    """All silos, in buckets, as engines take them. Nothing is read before an engine asks, and then in its silo's room.

    Of a store ``names`` are all silos', and the buckets hold an example of a few of them.
    """

    def __init__(
        self, names: Any, buckets: tuple[Bucket, ...], spec: CallSpec, axes: tuple[Axis, ...], silos: Any, store: Any
    ) -> None:
        self.names, self.buckets, self.spec, self.axes = names, buckets, spec, axes
        self.silos, self.store = silos, store
        self.shared = shared_arrays(silos)
        self._place = {name: (b, i) for b, bucket in enumerate(buckets) for i, name in enumerate(bucket.names)}

    @property
    def known(self) -> bool:
        """Whether all silos are in the buckets."""
        return self.store is None

    @property
    def example(self) -> "Stack":
        """The silos that are in the buckets: everyone, or a few of a store."""
        if self.known:
            return self
        return Stack(self.silos.names, self.buckets, self.spec, self.axes, self.silos, None)

    def place(self, name: str) -> tuple[int, int]:
        """Bucket and position of a silo."""
        return self._place[name]

    def index(self, name: str) -> int:
        return self.names.index(name)

    def data(self, name: str) -> SiloData:
        """One silo's data on the device, padded as in its bucket. Call it in the silo's room."""
        if self.known:
            lengths = self.buckets[self.place(name)[0]].lengths
            own = padded_data(self.silos, name, self.spec, self.axes, lengths)
            return put(own)._replace(shared=self.shared)
        _, args, mask = self.cohort([self.index(name)])
        args, mask = put(jax.tree.map(lambda leaf: leaf[0], (args, mask)))
        return SiloData(args, mask, self.shared)

    @cached_property
    def arrays(self) -> tuple[tuple[tuple[Array, ...], dict[str, Array]], ...]:
        """Each bucket's arguments and masks, stacked over its silos: for engines in which all silos live."""
        out = []
        for bucket in self.buckets:
            members = []
            for name in bucket.names:
                with at_silo(name):
                    members.append(padded_data(self.silos, name, self.spec, self.axes, bucket.lengths))
            data = jax.tree.map(lambda *rows: jax.device_put(np.stack(rows)), *members)
            out.append((data.args, data.mask))
        return tuple(out)

    @property
    def elements(self) -> int:
        """Numbers in the largest argument, of all silos in the buckets: what a look at the data takes."""
        each = (jax.tree.leaves(self.shapes(b).args) for b in range(len(self.buckets)))
        largest = [max((int(np.prod(leaf.shape)) for leaf in found), default=1) for found in each]
        return sum(len(bucket.names) * size for bucket, size in zip(self.buckets, largest, strict=True))

    def shapes(self, b: int) -> SiloData:
        """What a silo's data in a bucket look like; nothing is read."""
        lengths = self.buckets[b].lengths
        args = tuple(
            jax.ShapeDtypeStruct((lengths[leaf.axis], *leaf.shape[1:]) if leaf.axis else leaf.shape, leaf.dtype)
            for leaf in self.spec.own
            if leaf.dtype is not None and leaf.shape is not None
        )
        mask = {axis: jax.ShapeDtypeStruct((n,), bool) for axis, n in lengths.items()}
        return SiloData(args, mask, tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.shared))

    def cohort(self, index: Any) -> tuple[np.ndarray, tuple, dict]:
        """Of a store: identities, arguments and masks of a cohort, stacked, on the host."""
        places = np.asarray(index).tolist()
        names = [self.store.name(j) for j in places]
        members = [(name, self.store.read(j)) for name, j in zip(names, places, strict=True)]
        return (identities(names), *pad_and_stack(members, self.spec, self.axes))

    @property
    def description_bytes(self) -> list[int]:
        """Of what each silo told of its arguments: names, types, shapes and ints."""
        shared = shared_digest(self.silos.shared)
        return [len(described(self.silos.own(name), shared)) for name in self.silos.names]


def described(args: Mapping[str, Any], shared: str) -> bytes:
    """What a silo tells of its arguments before anything else: no value of an array, and of shared ones a digest.

    >>> described(dict(y=np.zeros((3, 2), "f"), num_counties=2), "4f3a")
    b'{"own": {"num_counties": 2, "y": ["float32", 3, 2]}, "shared": "4f3a"}'
    """
    own = {path: leaf if isinstance(leaf, int) else [str(leaf.dtype), *leaf.shape] for path, leaf in leaves(args)}
    return json.dumps({"own": own, "shared": shared}).encode()


def stack_of(silos: Any, some: Silos, spec: CallSpec, axes: tuple[Axis, ...]) -> Stack:
    """All silos in as few buckets as :func:`most_rows` allows; ``some`` are a store's example."""
    groups = bucket_names(some.names, axes)
    lengths = [{axis.name: max(axis.lengths[name] for name in names) for axis in axes} for names in groups]
    rounded = [
        {axis.name: round_up(own[axis.name]) if axis.free else own[axis.name] for axis in axes} for own in lengths
    ]
    rows = sum(axis.lengths[name] for axis in axes for name in some.names)
    if sum(len(names) * sum(own.values()) for names, own in zip(groups, rounded, strict=True)) <= most_rows(rows):
        lengths = rounded
    buckets = tuple(Bucket(tuple(names), own) for names, own in zip(groups, lengths, strict=True))
    return Stack(silos.names, buckets, spec, axes, some, silos if silos.lazy else None)
