"""Data that stay apart.

A :class:`Silos` holds, under each silo's name, the arguments with which the model would be called there:
``model(**silos["york"])``. Nothing is stacked or padded yet; :mod:`numpyro_fed.padding` does that once the
partition has told which axes belong to the silos.

>>> import numpy as np
>>> silos = Silos({"leeds": dict(y=np.ones(3, "f")), "york": dict(y=np.ones(2, "f"))})
>>> silos.names, silos.num_silos, silos["york"]["y"].shape
(('leeds', 'york'), 2, (2,))
"""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

LARGE = 1e8  # float32 keeps 7 digits: above this, differences of order one are lost


class Silos(Mapping[str, dict[str, Any]]):
    """Named silos, each with its own arguments of the model.

    Args:
        data: ``{name: {argument: value}}``, or a list of such dicts (named "0", "1", ...). A value is any pytree of
            arrays and ints; an int is a size (a number of groups), an array's leading axis holds its rows.
        shared: arguments that are the same everywhere (knots, a number of items).

    Silos may have different numbers of rows. The leading axes are compared between silos to find out which plates
    are the silo's own (see :func:`numpyro_fed.partition`).
    """

    def __init__(self, data: Any, shared: Mapping[str, Any] | None = None) -> None:
        named = _named(data)
        self.shared: dict[str, Any] = _checked(None, dict(shared or {}))
        self._data = {name: _checked(name, args) for name, args in named.items()}
        self.own_counts: frozenset[str] = frozenset()  # int arguments known to count a silo's own groups (see `split`)
        for name, args in self._data.items():
            both = sorted(set(args) & set(self.shared))
            if both:
                raise ValueError(f"argument {both[0]!r} is given by silo {name!r} and in shared=: keep one of the two")
        _check_alike(self._data)
        _warn_once_about_numbers(self)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._data)

    @property
    def num_silos(self) -> int:
        return len(self._data)

    def own(self, name: str) -> dict[str, Any]:
        """The silo's own arguments, without the shared ones."""
        if name not in self._data:
            raise KeyError(f"no silo is named {name!r}; the silos are {', '.join(map(repr, self.names))}")
        return dict(self._data[name])

    def only(self, *names: str) -> "Silos":
        """Some of the silos, by name."""
        some = object.__new__(Silos)  # the arguments have been checked
        some.shared, some.own_counts = self.shared, self.own_counts
        some._data = {name: self.own(name) for name in names}
        return some

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.own(name) | self.shared

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        lines = [f"Silos: {self.num_silos}"]
        shown = list(self._data.items())
        for name, args in shown[:10]:
            lines.append(f"  {name}: " + ", ".join(f"{path} {_describe(leaf)}" for path, leaf in leaves(args)))
        if len(shown) > 10:
            lines.append(f"  ... and {len(shown) - 10} more")
        if self.shared:
            lines.append("  shared: " + ", ".join(f"{path} {_describe(leaf)}" for path, leaf in leaves(self.shared)))
        return "\n".join(lines)


def split(
    labels: Any,
    groups: Mapping[str, str | None] | None = None,
    shared: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Silos:
    """Silos from pooled arrays: the rows with the same label form a silo.

    Args:
        labels: one label per row; a silo is named by its label.
        groups: ``{index argument: count argument}``. Each named index (``county_idx``) is renumbered from 0 within
            its silo; its count (``num_counties``) becomes the silo's own number of groups, and arrays with one row per
            group follow (``dict(county_idx="uranium")``: one of these may stand for the count). Every group must lie in
            one silo. The count may be None when the model takes none.
        shared: arguments that are the same in every silo.
        arguments: arrays with one row per label are cut; ints and scalars that are not counts are shared.

    >>> import numpy as np
    >>> y, county = np.ones(3, "f"), np.array([0, 2, 1])
    >>> silos = split(["a", "a", "b"], groups=dict(county="num"), y=y, county=county, num=3)
    >>> silos["a"]["county"].tolist(), silos["a"]["num"], silos["b"]["num"]
    ([0, 1], 2, 1)
    """
    members = _rows_by_label(labels)
    names = list(members)
    groups = dict(groups or {})
    num_rows = sum(len(rows) for rows in members.values())
    arguments = {argument: _listed(value) for argument, value in arguments.items()}
    common = dict(shared or {})
    own: dict[str, dict[str, Any]] = {name: {} for name in names}

    for index, count in groups.items():
        for argument in (index,) if count is None else (index, count):
            if argument not in arguments:
                raise ValueError(f"groups= names {argument!r}, but the arguments are {', '.join(sorted(arguments))}")
    counts = {count: index for index, count in groups.items() if count is not None}
    kept: dict[str, dict[str, np.ndarray]] = {}
    sizes: dict[str, int] = {}
    for index in groups:
        idx = np.asarray(arguments[index])
        if idx.shape != (num_rows,) or not np.issubdtype(idx.dtype, np.integer):
            raise ValueError(f"{index!r} must hold one int per row ({num_rows}), got {idx.dtype} of shape {idx.shape}")
        kept[index] = {name: np.unique(idx[rows]) for name, rows in members.items()}
        owners = Counter(int(group) for found in kept[index].values() for group in found)
        straddling = [group for group, times in owners.items() if times > 1]
        if straddling:
            where = [name for name in names if straddling[0] in kept[index][name]]
            raise ValueError(
                f"group {straddling[0]} of {index!r} has rows in silos {where[0]!r} and {where[1]!r} "
                f"(and {len(straddling) - 1} more): its latents would be sampled once in each. Split by whole groups, "
                f"or leave {index!r} out of groups= to keep its latents global."
            )
        count = groups[index]
        given = None if count is None else arguments[count]
        sizes[index] = int(given) if isinstance(given, int | np.integer) else int(np.max(idx)) + 1
        if given is not None and not isinstance(given, int | np.integer):
            sizes[index] = np.shape(given)[0]
        if np.min(idx) < 0 or np.max(idx) >= sizes[index]:
            raise ValueError(f"{index!r} must lie in 0..{sizes[index] - 1}, got {np.min(idx)}..{np.max(idx)}")
        empty = sizes[index] - len(owners)
        if empty:
            warnings.warn(f"{empty} of {sizes[index]} groups of {index!r} have no rows and are left out", stacklevel=2)

    for argument, value in arguments.items():
        if argument in groups:
            for name, rows in members.items():
                own[name][argument] = np.searchsorted(kept[argument][name], np.asarray(value)[rows]).astype(np.int32)
            continue
        if argument in counts and isinstance(value, int | np.integer):
            for name in names:
                own[name][argument] = len(kept[counts[argument]][name])
            continue
        lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(value)}
        if lengths <= {()}:  # numbers
            common[argument] = value
            continue
        cut = _cut_for(argument, lengths, members, kept, sizes, counts)
        for name in names:
            own[name][argument] = jax.tree.map(lambda leaf, rows=cut[name]: np.asarray(leaf)[rows], value)

    silos = Silos(own, shared=common)
    silos.own_counts = frozenset(counts)
    return silos


def _cut_for(
    argument: str,
    lengths: set[tuple[int, ...]],
    members: dict[str, np.ndarray],
    kept: dict[str, dict[str, np.ndarray]],
    sizes: dict[str, int],
    counts: dict[str, str],
) -> dict[str, np.ndarray]:
    """Which rows of an argument each silo gets: its rows, or its groups' when there is one row per group."""
    num_rows = sum(len(rows) for rows in members.values())
    if argument in counts:
        return kept[counts[argument]]
    if lengths == {(num_rows,)}:
        return members
    level = [index for index in kept if lengths == {(sizes[index],)}]
    if not level:
        got = " and ".join(str(length[0]) if length else "no" for length in sorted(lengths))
        raise ValueError(
            f"argument {argument!r} has {got} rows where the labels have {num_rows}: give one row per label, or pass "
            f"it as shared=dict({argument}=...) when it is the same in every silo"
        )
    for other in level[1:]:
        if any(not np.array_equal(kept[level[0]][name], kept[other][name]) for name in members):
            raise ValueError(
                f"argument {argument!r} has {sizes[other]} rows, as many as there are groups of {level[0]!r} and of "
                f"{other!r}: which does it follow? Say it in groups=dict({other}={argument!r}), or give it by rows "
                f"({argument}[{other}])."
            )
    return kept[level[0]]


def _rows_by_label(labels: Any) -> dict[str, np.ndarray]:
    """{silo name: positions of its rows}, silos in the order in which their labels appear."""
    array = np.asarray(labels)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"labels must hold one label per row, got an array of shape {array.shape}")
    found: dict[str, list[int]] = {}
    kinds: dict[str, Any] = {}
    for row, label in enumerate(array.tolist()):
        if label is None or label != label:
            raise ValueError(f"row {row} has no label ({label}): drop the row, or name a silo for it")
        name = str(label)
        if kinds.setdefault(name, label) != label:
            raise ValueError(f"two labels are written {name!r} ({kinds[name]!r} and {label!r}): give each its own name")
        found.setdefault(name, []).append(row)
    return {name: np.array(rows) for name, rows in found.items()}


def leaves(args: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arguments' leaves, each with a readable path: ``x``, ``x['a']``."""
    return [(_path(path), leaf) for path, leaf in tree_flatten_with_path(dict(args))[0]]


def _path(path: tuple) -> str:
    return path[0].key + keystr(path[1:])


def _describe(leaf: Any) -> str:
    return str(leaf) if isinstance(leaf, int) else f"{leaf.dtype}{list(leaf.shape)}"


def _named(data: Any) -> dict[str, Mapping[str, Any]]:
    """Read the user's ``data`` as {silo name: arguments}, or say what was expected."""
    if isinstance(data, Mapping):
        arrays = [key for key, value in data.items() if not isinstance(value, Mapping)]
        if arrays:
            raise TypeError(
                f"expected one dict of model arguments per silo, got {_kind(data[arrays[0]])} for each of "
                f"{', '.join(map(str, arrays))}; did you mean nf.Silos([data])?"
            )
        pairs = list(data.items())
    elif isinstance(data, Sequence) and not isinstance(data, str | bytes):
        if all(isinstance(item, tuple) and len(item) == 2 for item in data):
            pairs = list(data)
        else:
            pairs = [(str(i), args) for i, args in enumerate(data)]
    else:
        raise TypeError(
            f"silos must be re-readable, got {_kind(data)}: give a dict {{name: arguments}} or a list of dicts of "
            "arguments (to cut pooled arrays by a column of labels: nf.split(labels, x=x, y=y))"
        )
    if not pairs:
        raise ValueError("silos is empty: give at least one")
    names = [str(name) for name, _ in pairs]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ValueError(f"two silos are named {twice[0]!r}: give each its own name")
    for name, args in zip(names, (args for _, args in pairs), strict=True):
        if not isinstance(args, Mapping):
            raise TypeError(f"silo {name!r}: expected a dict of model arguments, got {_kind(args)}")
    return dict(zip(names, (args for _, args in pairs), strict=True))


def _kind(value: Any) -> str:
    kind = type(value).__name__
    return "an array" if kind in ("ndarray", "ArrayImpl") else f"a {kind}"


def _checked(silo: str | None, args: Mapping[str, Any]) -> dict[str, Any]:
    """The silo's arguments (of the shared ones: silo None) as arrays and ints."""
    where = f"silo {silo!r}, argument" if silo is not None else "shared argument"
    for argument in args:
        if not isinstance(argument, str):
            raise TypeError(f"{where} {argument!r}: arguments are named by strings")
    plain = {key: _listed(value, f"{where} {key!r}") for key, value in args.items()}
    checked = jax.tree_util.tree_map_with_path(lambda path, leaf: _checked_leaf(where, _path(path), leaf), plain)
    if silo is not None:
        for path, leaf in leaves(checked):
            if not isinstance(leaf, int) and leaf.ndim and leaf.shape[0] == 0:
                raise ValueError(f"{where} {path!r} has 0 rows: remove silo {silo!r}, or give it rows")
    return checked


def _listed(value: Any, where: str = "argument") -> Any:
    """A list (of lists) of numbers is one array, not a pytree of scalars."""
    found = jax.tree.leaves(value) if isinstance(value, list | tuple) else []
    if not found or not all(isinstance(leaf, bool | int | float | np.number) for leaf in found):
        return value
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{where} is a list of lists of different lengths: give a rectangular array") from None
    return array.astype(np.float32) if array.dtype == np.float64 and not jax.config.read("jax_enable_x64") else array


def _checked_leaf(where: str, path: str, leaf: Any) -> Any:
    where = f"{where} {path!r}"
    if isinstance(leaf, bool | int):
        return leaf
    if isinstance(leaf, np.integer):
        return int(leaf)
    if isinstance(leaf, str) or callable(leaf):
        value = repr(leaf) if isinstance(leaf, str) else "..."
        raise TypeError(
            f"{where} is {_kind(leaf)}: arguments are arrays and numbers. Fix an option beforehand: "
            f"functools.partial(model, {path}={value})"
        )
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"{where} is a masked array: pass {path}.filled(0) and its mask as an argument of its own, for "
            "numpyro.sample(..., obs_mask=)"
        )
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and not isinstance(dtype, np.dtype) and not isinstance(leaf, jax.Array):
        codes = ".cat.codes.to_numpy()" if str(dtype) == "category" else ".to_numpy(dtype='float32')"
        raise TypeError(f"{where} has the pandas type {dtype}: pass {path}{codes}")
    if isinstance(leaf, float):
        leaf = np.asarray(leaf, dtype=None if jax.config.read("jax_enable_x64") else np.float32)
    array = np.asarray(leaf)
    if array.dtype.kind not in "bifu":
        kind = {"O": "objects", "U": "strings", "S": "strings", "M": "dates"}.get(array.dtype.kind, str(array.dtype))
        raise TypeError(f"{where} holds {kind}: encode it as numbers first (for categories: integer codes)")
    if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
        what = "NaN" if np.isnan(array).any() else "Inf"
        if not array.ndim:
            raise ValueError(f"{where} is {what}: give a finite number")
        bad = np.isnan(array) if what == "NaN" else np.isinf(array)
        raise ValueError(
            f"{where} has {what}, first in row {int(np.argwhere(bad)[0][0])}: drop these rows, or fill them with any "
            "valid number and mask them with numpyro.sample(..., obs_mask=)"
        )
    return array


def _check_alike(data: dict[str, dict[str, Any]]) -> None:
    """Every silo has the same arguments, ranks, dtypes and trailing axes as most of the others."""
    first = next(iter(data))
    usual = _most_common({name: tuple(sorted(args)) for name, args in data.items()})
    for name, args in data.items():
        if tuple(sorted(args)) != usual:
            raise ValueError(
                f"silo {name!r} has the arguments {', '.join(sorted(args))}; the others {', '.join(usual)}: give every "
                "silo the same ones"
            )
    structures = {name: tuple(path for path, _ in leaves(args)) for name, args in data.items()}
    structure = _most_common(structures)
    for name, paths in structures.items():
        if paths != structure:
            raise ValueError(
                f"silo {name!r} nests its arguments as {', '.join(paths)}; the others as {', '.join(structure)}: give "
                "every silo the same ones"
            )
    for position, (path, _) in enumerate(leaves(data[first])):
        column = {name: jax.tree.leaves(args)[position] for name, args in data.items()}
        kinds = {name: _dtype(leaf) for name, leaf in column.items()}
        kind = _most_common(kinds)
        for name, got in kinds.items():
            if got != kind:
                raise TypeError(
                    f"argument {path!r} is {got} in silo {name!r} and {kind} in the others: convert one of them"
                )
        if isinstance(column[first], bool) and len(set(column.values())) > 1:
            differ = next(name for name, leaf in column.items() if leaf != column[first])
            raise ValueError(
                f"option {path!r} is {column[first]} in silo {first!r} and {column[differ]} in silo {differ!r}: they "
                "would have different models. Give all the same, or pass it as data: "
                f"{path}=np.asarray({column[first]})"
            )
        if isinstance(column[first], int):
            continue
        trailing = {name: leaf.shape[1:] if leaf.ndim else None for name, leaf in column.items()}
        shape = _most_common(trailing)
        for name in trailing:
            if trailing[name] != shape:
                raise ValueError(
                    f"argument {path!r}: silo {name!r} has {_columns(trailing[name])}, the others {_columns(shape)}. "
                    "Silos may differ in their rows (the first axis) only."
                )


def _dtype(leaf: Any) -> str:
    return type(leaf).__name__ if isinstance(leaf, int) else str(leaf.dtype)


def _columns(trailing: tuple[int, ...] | None) -> str:
    if trailing is None:
        return "a single number"
    return "no columns" if trailing == () else f"{' x '.join(map(str, trailing))} columns"


def _most_common(values: dict[str, Any]) -> Any:
    return Counter(values.values()).most_common(1)[0][0]


def _warn_once_about_numbers(silos: Silos) -> None:
    doubles, large = set(), set()
    for args in [*(silos.own(name) for name in silos.names), silos.shared]:
        for path, leaf in leaves(args):
            if isinstance(leaf, int) or leaf.dtype.kind != "f":
                continue
            if leaf.dtype == np.float64:
                doubles.add(path)
            if leaf.size and np.max(np.abs(leaf)) > LARGE:
                large.add(path)
    if doubles and not jax.config.read("jax_enable_x64"):
        warnings.warn(
            f"{', '.join(sorted(doubles))} are float64 and will be computed in float32: call numpyro.enable_x64() "
            "first, or pass float32",
            stacklevel=3,
        )
    if large:
        warnings.warn(
            f"{', '.join(sorted(large))} have values above {LARGE:.0e}, where float32 loses differences of order one: "
            "standardise them",
            stacklevel=3,
        )
