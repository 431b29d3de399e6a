"""The arguments that users hand over, read as arrays and ints, or an error that says what to type."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pandas as pd
from jax.tree_util import keystr, tree_flatten_with_path


def leaves(args: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The arguments' leaves, each with a readable path: ``x``, ``x['a']``."""
    return [(_path(path), leaf) for path, leaf in tree_flatten_with_path(dict(args))[0]]


def shared_digest(shared: Mapping[str, Any]) -> str:
    """Of arguments that are the same everywhere: silos tell it, so that the server need not compare their values.

    >>> shared_digest(dict(knots=np.zeros(3))) == shared_digest(dict(knots=np.ones(3)))
    False
    """
    found = hashlib.blake2b(digest_size=16)
    for path, leaf in leaves(shared):
        array = np.asarray(leaf)
        found.update(f"{path} {array.dtype} {array.shape};".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _path(path: tuple) -> str:
    return path[0].key + keystr(path[1:])


def describe(leaf: Any) -> str:
    return str(leaf) if isinstance(leaf, int) else f"{leaf.dtype}{list(leaf.shape)}"


def named_arguments(data: Any) -> dict[str, Mapping[str, Any]]:
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


def checked_arguments(silo: str | None, args: Mapping[str, Any]) -> dict[str, Any]:
    """The silo's arguments (of the shared ones: silo None) as arrays and ints."""
    where = f"silo {silo!r}, argument" if silo is not None else "shared argument"
    for argument in args:
        if not isinstance(argument, str):
            raise TypeError(f"{where} {argument!r}: arguments are named by strings")
    check_indices_agree(args, "" if silo is None else f"silo {silo!r}: ")
    plain = {key: listed(value, f"{where} {key!r}") for key, value in args.items()}
    checked = jax.tree_util.tree_map_with_path(lambda path, leaf: _checked_leaf(where, _path(path), leaf), plain)
    _check_integers_fit(where, checked)
    if silo is not None:
        _check_rows(silo, {path: leaf.shape[0] for path, leaf in leaves(checked) if np.ndim(leaf)})
    return checked


def _check_rows(silo: str, rows: dict[str, int]) -> None:
    """NumPyro has no plate of size 0, and padding no row to repeat."""
    for path, number in rows.items():
        if number:
            continue
        where = f"silo {silo!r}, argument {path!r} has 0 rows"
        filled = next((other for other, n in rows.items() if n), None)
        if filled is None:
            raise ValueError(f"{where}: remove silo {silo!r}, or give it rows")
        raise ValueError(
            f"{where}, where {filled!r} has {rows[filled]}: remove silo {silo!r}, or give it rows. If {path!r} lists "
            "what is missing, and here nothing is: pass a bool for each row in its place, and write "
            "numpyro.sample(..., obs=y, obs_mask=present), or draw a value for every row and take "
            "jnp.where(present, x, drawn)"
        )


def told_once(array: Any) -> Any:
    """An array without repetitions that take no memory: of silos elsewhere, shapes are known and nothing else.

    >>> told_once(np.broadcast_to(np.zeros(()), (10**12, 3))).shape
    (1, 1)
    """
    strides = getattr(array, "strides", None)
    return array if strides is None else array[tuple(slice(None, None if step else 1) for step in strides)]


def _check_integers_fit(where: str, args: Mapping[str, Any]) -> None:
    """Without x64 JAX computes in 32 bits: larger integers would become others, in silence."""
    wide = {}
    for path, leaf in leaves(args):
        if isinstance(leaf, int) or leaf.dtype.kind not in "iu" or not leaf.size:
            continue
        limits = np.iinfo(jax.dtypes.canonicalize_dtype(leaf.dtype))
        once = told_once(leaf)
        far = [int(number) for number in (np.min(once), np.max(once)) if not limits.min <= number <= limits.max]
        if far:
            wide[path] = far[0]
    if wide:
        told = ", ".join(f"{path!r} has {number}" for path, number in wide.items())
        raise ValueError(
            f"{where} {told}: beyond 32 bits, so that JAX would take another number. Call numpyro.enable_x64() first, "
            "or renumber (codes of categories: np.unique(..., return_inverse=True)[1])"
        )


def check_indices_agree(args: Mapping[str, Any], where: str = "") -> None:
    """Rows of pandas objects are taken by position: where their indices differ, rows of different units would meet."""
    first: dict[int, tuple[str, Any]] = {}
    for path, leaf in leaves(args):
        if not isinstance(leaf, pd.Series | pd.DataFrame):
            continue
        before, other = first.setdefault(len(leaf), (path, leaf))
        if not leaf.index.equals(other.index):
            row = int(np.argmax([a != b for a, b in zip(other.index, leaf.index, strict=True)]))
            raise ValueError(
                f"{where}{before!r} and {path!r} are pandas objects of {len(leaf)} rows whose indices differ, first in "
                f"row {row} ({other.index[row]} and {leaf.index[row]}): which rows belong together? By index: "
                f"{path} = {path}.loc[{before}.index]. By position: pass {path}.to_numpy()"
            )


def listed(value: Any, where: str = "argument") -> Any:
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
        raise TypeError(
            f"{where} holds {kind}: encode it as numbers first (for categories: integer codes, the same in all silos; "
            f"nf.prepare.levels({{silo: arguments}}, {path!r}) makes them)"
        )
    if array.dtype.kind == "f" and not np.all(np.isfinite(told_once(array))):
        what = "NaN" if np.isnan(array).any() else "Inf"
        if not array.ndim:
            raise ValueError(f"{where} is {what}: give a finite number")
        bad = np.isnan(array) if what == "NaN" else np.isinf(array)
        raise ValueError(
            f"{where} has {what}, first in row {int(np.argwhere(bad)[0][0])}: drop these rows, or fill them with any "
            "valid number and mask them with numpyro.sample(..., obs_mask=)"
        )
    return array


def check_alike(data: dict[str, dict[str, Any]]) -> None:
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
