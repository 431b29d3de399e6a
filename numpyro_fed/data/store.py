"""Very many silos, read when they take part.

A :class:`~numpyro_fed.Silos` holds every silo's arguments; a :class:`SiloStore` only knows how to read them. Cohorts
are gathered from it on the host (:class:`numpyro_fed.engines.Streamed`), so neither memory nor the time of a round
grows with the number of silos. It is for methods whose silos keep nothing between rounds.

>>> import numpy as np
>>> def read(index):
...     rows = np.random.default_rng(index).normal(size=1 + index % 3)
...     return dict(y=rows.astype("f"))
>>> store = SiloStore.from_function(read, num_silos=342_477)
>>> store
SiloStore: 342477 silos, '0', '1', ..., '342476'
>>> store["7"]["y"].shape, store.example(3).num_silos
((2,), 3)
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from numpyro_fed.checks import format_names
from numpyro_fed.data.inputs import checked_arguments, leaves
from numpyro_fed.data.names import LazyNames
from numpyro_fed.data.silos import Silos, at_silo

EXAMPLE = 8  # silos from which the model's partition is made


class SiloStore:
    """Silos that are read when they take part in a round. Made by one of its three constructors.

    Runs of stateless methods take it in place of :class:`~numpyro_fed.Silos`::

        store = nf.SiloStore.from_directory("stackoverflow/train")
        fit = nf.FedAvg(model).run(jax.random.key(0), store, 1000, schedule=nf.schedules.sampled(50))

    The model is split on an :meth:`example` of a few silos. Every silo's arguments are checked when it is read: they
    have the names, types and trailing shapes of the example's, and finite numbers. Whether observations lie in their
    distribution's support is checked on the example alone.
    """

    lazy: ClassVar[bool] = True  # silos are read when they take part

    def __init__(
        self, read: Callable[[int], Mapping[str, Any]], names: LazyNames, shared: Mapping[str, Any] | None
    ) -> None:
        if not len(names):
            raise ValueError("the store is empty: give at least one silo")
        self._read = read
        self.names = names
        self.shared: dict[str, Any] = checked_arguments(None, dict(shared or {}))
        self.own_counts: frozenset[str] = frozenset()

    @classmethod
    def from_arrays(
        cls, labels: Any = None, /, *, offsets: Any = None, shared: Mapping[str, Any] | None = None, **arguments: Any
    ) -> "SiloStore":
        """Pooled arrays, sorted by silo. They are cut when a silo is read, so they may be memory-mapped.

        Args:
            labels: one per row, the same for neighbouring rows of a silo, which is named by it.
            offsets: in place of labels, where each silo begins, and the end: silo "0" has the rows
                ``offsets[0]:offsets[1]``.
            shared: arguments that are the same in every silo.
            arguments: (pytrees of) arrays with one row per label; numbers are shared.

        >>> store = SiloStore.from_arrays(["york", "york", "leeds"], y=np.array([1.0, 2.0, 3.0], "f"))
        >>> store["york"]["y"].tolist()
        [1.0, 2.0]
        >>> SiloStore.from_arrays(offsets=[0, 1, 3], y=np.array([1.0, 2.0, 3.0], "f"))["1"]["y"].tolist()
        [2.0, 3.0]
        """
        if (labels is None) == (offsets is None):
            raise TypeError("from_arrays needs one label per row, from_arrays(labels, x=x, y=y), or offsets=")
        if labels is not None:
            starts, names = _runs(np.asarray(labels))
        else:
            starts = np.asarray(offsets)
            if starts.ndim != 1 or len(starts) < 2 or starts.dtype.kind not in "iu" or starts[0] != 0:
                raise ValueError(
                    "offsets must be ints, 0 first, the number of rows last: offsets=[0, 3, 5] for 2 silos"
                )
            if np.any(np.diff(starts) < 1):
                i = int(np.argmax(np.diff(starts) < 1))
                raise ValueError(f"offsets must rise, got {starts[i]} and then {starts[i + 1]}: leave empty silos out")
            names = LazyNames(len(starts) - 1)
        common, own = dict(shared or {}), {}
        for argument, value in arguments.items():
            rows = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(value)}
            if rows <= {()}:
                common[argument] = value
            elif rows != {(int(starts[-1]),)}:
                raise ValueError(
                    f"argument {argument!r} has {sorted(rows)[-1][0]} rows where the silos have {starts[-1]}: give one "
                    f"row each, or pass it as shared=dict({argument}=...) when it is the same in every silo"
                )
            else:
                own[argument] = jax.tree.map(np.asarray, value)  # copies nothing of a NumPy array
        return cls(lambda i: jax.tree.map(lambda leaf: leaf[starts[i] : starts[i + 1]], own), names, common)

    @classmethod
    def from_directory(cls, path: str | Path, shared: Mapping[str, Any] | None = None) -> "SiloStore":
        """A directory of files, one a silo: ``york.npz`` with the arguments' arrays (``np.savez(path, x=x, y=y)``).

        The directory is listed once, a file is opened whenever its silo takes part. A single int in it is an int.

        Args:
            path: the directory; other files in it are left alone.
            shared: arguments that are the same in every silo.
        """
        path = Path(path)
        with os.scandir(path) as entries:
            stems = sorted(one.name[:-4] for one in entries if one.name.endswith(".npz") and one.name[0] != ".")
        if not stems:
            raise ValueError(
                f"{path} has no .npz files: write one for each silo, np.savez('{path}/york.npz', x=x, y=y)"
            )
        names = LazyNames(len(stems), np.array(stems))

        def read(i: int) -> dict[str, Any]:
            with np.load(path / f"{names[i]}.npz", allow_pickle=False) as file:
                found = {argument: file[argument] for argument in file.files}
            return {a: int(v) if v.ndim == 0 and v.dtype.kind in "iu" else v for a, v in found.items()}

        return cls(read, names, shared)

    @classmethod
    def from_function(
        cls,
        function: Callable[[int], Mapping[str, Any]],
        num_silos: int,
        names: Sequence[str] | None = None,
        shared: Mapping[str, Any] | None = None,
    ) -> "SiloStore":
        """A function from a silo's index to its arguments.

        Args:
            function: ``0 <= index < num_silos`` to a dict of the model's arguments, the same whenever it is called. It
                runs in a thread of its own, one call at a time (unless ``Streamed(readers=)`` says otherwise).
            num_silos: how many there are.
            names: of the silos; by default "0", "1", ...
            shared: arguments that are the same in every silo.
        """
        if not callable(function):
            raise TypeError(f"function must take a silo's index and return its arguments, got {function!r}")
        if isinstance(num_silos, bool) or not isinstance(num_silos, int | np.integer) or num_silos < 1:
            raise ValueError(f"num_silos must be an int of at least 1, got {num_silos!r}")
        if names is not None and len(names) != num_silos:
            raise ValueError(f"names has {len(names)} names for {num_silos} silos: give each its own")
        listed = None if names is None else _distinct(np.asarray([str(name) for name in names]))
        return cls(function, LazyNames(int(num_silos), listed), shared)

    @property
    def num_silos(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """The silo's name."""
        return self.names[index]

    def own(self, name: str) -> dict[str, Any]:
        """The silo's own arguments, without the shared ones; read and checked."""
        if name not in self.names:
            raise KeyError(f"no silo is named {name!r}; the silos are {format_names(self.names)}")
        return self.read(self.names.index(name))

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.own(name) | self.shared

    def __len__(self) -> int:
        return self.num_silos

    def only(self, *names: str) -> Silos:
        """Some of the silos, by name, in memory."""
        found = {}
        for name in names:
            with at_silo(name):
                found[name] = self._raw(self.names.index(name))
        return Silos(found, shared=self.shared)

    def changed(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> "SiloStore":
        """The same silos with other arguments: ``change(own arguments)`` whenever one is read."""
        return SiloStore(lambda index: change(self.read(index)), self.names, self.shared)

    def sharing(self, **arguments: Any) -> "SiloStore":
        """The same silos with these shared arguments beside, or in place of, those that there are."""
        return SiloStore(self._read, self.names, self.shared | arguments)

    def example(self, num_silos: int = EXAMPLE) -> Silos:
        """The first silo, the last, and some in between that are always the same ones.

        What a model's partition is made from: :func:`numpyro_fed.partition` of it shows which site lives where.
        """
        inside, some = range(1, self.num_silos - 1), max(0, num_silos - 2)
        if len(inside) > some:
            chosen = np.random.default_rng(0).choice(len(inside), some, replace=False) + 1
            inside = sorted(chosen.tolist())  # type: ignore[assignment]
        members = dict.fromkeys([0, *inside, self.num_silos - 1])
        return self.only(*(self.names[i] for i in members))

    def read(self, index: int) -> dict[str, Any]:
        """A silo's own arguments by its index, checked against the example's."""
        name = self.names[index]
        with at_silo(name):
            return self._checked(name, self._raw(index))

    def _checked(self, name: str, args: dict[str, Any]) -> dict[str, Any]:
        found, structure = jax.tree.flatten(args)
        paths, expected, like = self._expected
        if structure == expected and all(map(_fits, found, like)):
            return args
        args = checked_arguments(name, args)  # lists become arrays; what is wrong by itself says so
        found, structure = jax.tree.flatten(args)
        if structure != expected:
            raise ValueError(
                f"silo {name!r} has the arguments {', '.join(path for path, _ in leaves(args))}; the others "
                f"{', '.join(paths)}: give every silo the same ones"
            )
        for path, leaf, one in zip(paths, found, like, strict=True):
            if not _fits(leaf, one):
                raise ValueError(
                    f"argument {path!r} is {_kind(leaf)} in silo {name!r} and {_kind(one)} in the others: silos may "
                    "differ in their rows (the first axis) only"
                )
        return args

    def _raw(self, index: int) -> dict[str, Any]:
        """As the source has it."""
        try:
            args = self._read(int(index))
        except Exception as error:
            raise RuntimeError(
                f"silo {self.names[index]!r} could not be read: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(args, Mapping):
            raise TypeError(
                f"silo {self.names[index]!r}: expected a dict of model arguments, got a {type(args).__name__}"
            )
        both = sorted(set(args) & set(self.shared))
        if both:
            raise ValueError(
                f"argument {both[0]!r} is given by silo {self.names[index]!r} and in shared=: keep one of the two"
            )
        return dict(args)

    @cached_property
    def _expected(self) -> tuple[tuple[str, ...], Any, list[Any]]:
        """Paths, structure and leaves of the example's first silo, which every other must match."""
        example = self.example()
        args = example.own(example.names[0])
        return tuple(path for path, _ in leaves(args)), jax.tree.structure(args), jax.tree.leaves(args)

    def __repr__(self) -> str:
        return f"SiloStore: {self.num_silos} silos, {format_names(self.names)}"


def _fits(leaf: Any, like: Any) -> bool:
    """Whether it has the type and trailing shape, at least one row, and finite numbers."""
    if isinstance(like, int) or not isinstance(leaf, np.ndarray):
        return type(leaf) is type(like)
    if leaf.dtype != like.dtype or leaf.ndim != like.ndim or leaf.shape[1:] != like.shape[1:]:
        return False
    return (not leaf.ndim or leaf.shape[0] > 0) and (leaf.dtype.kind != "f" or bool(np.isfinite(leaf).all()))


def _kind(leaf: Any) -> str:
    if isinstance(leaf, int):
        return f"the {type(leaf).__name__} {leaf}"
    return f"{leaf.dtype}{['rows', *leaf.shape[1:]]}".replace("'", "") if leaf.ndim else f"a single {leaf.dtype}"


def _runs(labels: np.ndarray) -> tuple[np.ndarray, LazyNames]:
    """Where each run of equal labels begins (and the last one ends), and the silos' names."""
    if labels.ndim != 1 or labels.size == 0:
        raise ValueError(f"labels must hold one label per row, got an array of shape {labels.shape}")
    starts = np.concatenate([[0], np.flatnonzero(labels[1:] != labels[:-1]) + 1, [len(labels)]])
    first = labels[starts[:-1]]
    first = np.array(first) if first.dtype.kind in "iuU" else np.array([str(label) for label in first.tolist()])
    if len(np.unique(first)) < len(first):
        raise ValueError(
            "rows of a silo must stand together: sort the arrays first, order = np.argsort(labels, kind='stable'), and "
            "pass labels[order], x=x[order], ..."
        )
    return starts, LazyNames(len(first), first)


def _distinct(names: np.ndarray) -> np.ndarray:
    found, times = np.unique(names, return_counts=True)
    if len(found) < len(names):
        raise ValueError(f"two silos are named {str(found[np.argmax(times)])!r}: give each its own name")
    return names
