"""A silo's own table, read as arguments of the model.

A study says how arguments come from columns; a silo whose columns have other names says which are meant. Forms:

    "smoke"                                           one column: an array with a number for each row
    ["wheeze7", "wheeze8"]                            several: (rows, columns)
    {"column": "dose", "as": "float"}                 of this type, also where a silo's file holds whole numbers only
    {"column": "sex", "levels": ["female", "male"]}   words as codes 0, 1, ..., the same in every silo
    {"groups": "school", "count": "num_schools"}      numbered from 0 within the silo; how many, too, is an argument
    {"column": "funds", "per": "school"}              one row for each group of the argument school

Numbers are float32 and int32, or 64 bits wide when NumPyro's are.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from numpyro_fed.checks import format_names

KEYS = ("column", "groups", "count", "per", "levels", "as")
KINDS: dict[str, type] = {"float": np.float64, "int": np.int64, "bool": bool}
SEPARATORS = (",", ";", "\t")


class Column(NamedTuple):
    """How one argument comes from a table."""

    argument: str
    names: tuple[str, ...]  # of the table's columns
    matrix: bool = False  # (rows, columns), not (rows,)
    kind: str | None = None  # of KINDS; None: as the file has it
    levels: tuple[Any, ...] = ()  # words for the codes 0, 1, ...
    groups: bool = False  # numbered from 0 within the silo
    number: str | None = None  # the argument that is the number of these groups
    per: str | None = None  # the argument whose groups have a row each


Columns = tuple[Column, ...]


def plan(columns: Mapping[str, Any], where: str = "columns") -> Columns:
    """The forms above, checked.

    >>> plan({"y": "wheeze", "child": {"groups": "id", "count": "num_children"}})[1].number
    'num_children'
    """
    if not isinstance(columns, Mapping):
        raise TypeError(f'{where} must be a dict such as {{"y": "wheeze"}}, got a {type(columns).__name__}')
    found = tuple(_column(str(argument), form, f"{where}[{argument!r}]") for argument, form in columns.items())
    groups = {column.argument for column in found if column.groups}
    for column in found:
        if column.per is not None and column.per not in groups:
            raise ValueError(
                f"{where}[{column.argument!r}] has a row per group of {column.per!r}, which has no groups: write "
                f'{column.per} = {{"groups": "its column"}}'
            )
        if column.number in columns:
            raise ValueError(f"{where}: the count {column.number!r} has a column of its own: keep one of the two")
    return found


def _column(argument: str, form: Any, where: str) -> Column:
    if isinstance(form, str | list | tuple):
        form = {"column": form}
    if not isinstance(form, Mapping):
        raise TypeError(
            f"{where} must be a column's name, a list of names or a table of {', '.join(KEYS)}; got {form!r}"
        )
    for key in form:
        check_known(key, KEYS, where)
    if ("column" in form) == ("groups" in form):
        raise ValueError(f"{where} needs one of column and groups, got {', '.join(form) or 'neither'}")
    names = form.get("column", form.get("groups"))
    matrix = not isinstance(names, str)
    names = (names,) if isinstance(names, str) else tuple(names)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{where} must name columns, got {list(names)!r}")
    groups, levels = "groups" in form, tuple(form.get("levels", ()))
    if groups and (matrix or levels or form.keys() & {"as", "per"}):
        raise ValueError(f"{where} numbers the groups of one column: besides groups it may have a count only")
    if "count" in form and not groups:
        raise ValueError(f"{where} has a count, which is a number of groups: write groups in place of column")
    if "as" in form and (form["as"] not in KINDS or levels):
        raise ValueError(f"{where}: as must be one of {', '.join(KINDS)}, without levels; got {form['as']!r}")
    if len(set(levels)) < len(levels):
        raise ValueError(f"{where}: a level stands twice in {list(levels)}")
    return Column(argument, names, matrix, form.get("as"), levels, groups, form.get("count"), form.get("per"))


def renamed(columns: Columns, names: Mapping[str, Any], where: str = "columns") -> Columns:
    """A silo's own names of columns in place of the study's: what becomes of them stays the study's.

    >>> renamed(plan({"y": "wheeze"}), {"y": "Pfeifen"})[0].names
    ('Pfeifen',)
    """
    arguments = [column.argument for column in columns]
    for argument, given in names.items():
        check_known(argument, arguments, where)
        matrix = columns[arguments.index(argument)].matrix
        if not isinstance(given, list | tuple if matrix else str):
            expected = "a list of names of columns, as in the study" if matrix else "the name of a column"
            raise TypeError(f"{where}: {argument} must be {expected}, got {given!r}")
    own = {argument: (given,) if isinstance(given, str) else tuple(given) for argument, given in names.items()}
    return tuple(column._replace(names=own.get(column.argument, column.names)) for column in columns)


def read(path: str | Path, columns: Columns | Mapping[str, Any]) -> dict[str, Any]:
    """The model's arguments from a file: .csv, .parquet (with pyarrow) or .npz. Only named columns are read."""
    path, chosen = Path(path), columns if isinstance(columns, tuple) else plan(columns)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there: name the silo's table (.csv, .parquet or .npz)")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"{path} must be one of {', '.join(READERS)}, got {path.suffix or 'no suffix'}")
    arrays = reader(path, [name for column in chosen for name in column.names])
    for name, array in arrays.items():
        check_complete(array, f"column {name!r} of {path}")
    if not any(array.size for array in arrays.values()):
        raise ValueError(f"{path} has no rows")
    return arguments(arrays, chosen, str(path))


def arguments(arrays: Mapping[str, np.ndarray], columns: Columns, where: str) -> dict[str, Any]:
    """The model's arguments from a table's columns.

    >>> table = {"school": np.array(["b", "a", "b"]), "score": np.array([1.5, 2.0, 3.0])}
    >>> found = arguments(table, plan({"i": {"groups": "school", "count": "num"}, "y": "score"}), "scores.csv")
    >>> found["i"], found["num"], found["y"].dtype
    (array([1, 0, 1], dtype=int32), 2, dtype('float32'))
    """
    numbered = {
        column.argument: np.unique(arrays[column.names[0]], return_index=True, return_inverse=True)
        for column in columns
        if column.groups
    }
    found: dict[str, Any] = {}
    for column in columns:
        place = f"{where}, argument {column.argument!r}"
        if column.groups:
            values, _, codes = numbered[column.argument]
            found[column.argument] = codes.reshape(-1).astype(_whole())
            if column.number is not None:
                found[column.number] = len(values)
            continue
        parts = [_numbers(arrays[name], column, f"{where}, column {name!r}") for name in column.names]
        value = np.stack(parts, axis=1) if column.matrix else parts[0]
        if column.per is not None:
            _, first, codes = numbered[column.per]
            rows = value[first]
            if not np.array_equal(rows[codes.reshape(-1)], value):
                raise ValueError(f"{place} has a row per group of {column.per!r}, but differs within a group")
            value = rows
        found[column.argument] = _narrowed(value, place)
    return found


def _numbers(array: np.ndarray, column: Column, where: str) -> np.ndarray:
    if column.levels:
        codes = {str(level): code for code, level in enumerate(column.levels)}
        unknown = [str(value) for value in np.unique(array) if str(value) not in codes]
        if unknown:
            raise ValueError(
                f"{where} has {format_names(unknown, 5)}, and the study's levels are {list(column.levels)}"
            )
        return np.array([codes[str(value)] for value in array.tolist()], _whole())
    if array.dtype.kind not in "bifu":
        raise TypeError(
            f"{where} holds text or dates where numbers are expected (a decimal comma?): name its levels in the study, "
            '{"column": ..., "levels": [...]}, or write numbers'
        )
    if column.kind == "int" and array.dtype.kind == "f" and not np.array_equal(array, np.round(array)):
        raise ValueError(f'{where} has fractions, and the study has it "as": "int"')
    if column.kind == "bool" and not np.isin(array, (0, 1)).all():
        raise ValueError(f'{where} has numbers beside 0 and 1, and the study has it "as": "bool"')
    return array if column.kind is None else array.astype(KINDS[column.kind])


def _narrowed(array: np.ndarray, where: str) -> Any:
    """As wide as NumPyro's numbers; a single whole number is an int, a size."""
    if array.ndim == 0 and array.dtype.kind in "iu":
        return int(array)
    if array.dtype.kind == "f":
        return array.astype(np.float64 if jax.config.read("jax_enable_x64") else np.float32)
    if array.dtype.kind in "iu":
        limits = np.iinfo(_whole())
        if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
            raise ValueError(
                f'{where} has whole numbers beyond 32 bits: number its groups ({{"groups": ...}}), or call '
                "numpyro.enable_x64() in the study"
            )
        return array.astype(_whole())
    return array


def _whole() -> type:
    return np.int64 if jax.config.read("jax_enable_x64") else np.int32


def check_complete(array: np.ndarray, where: str) -> None:
    missing = np.asarray(pd.isna(array)) if array.dtype.kind in "fOUSMm" else np.zeros((), bool)
    if missing.any():
        first = int(np.argwhere(missing)[0][0]) if missing.ndim else 0
        rows = int(missing.reshape(len(missing), -1).any(axis=1).sum()) if missing.ndim else 1
        raise ValueError(
            f"{where} has {rows} missing {'value' if rows == 1 else 'values'} of {array.size}, first in row {first} "
            "(counted from 0): drop these rows, or fill them with any valid number and give a column that says which "
            "are known, for numpyro.sample(..., obs_mask=)"
        )


def check_known(key: str, known: Iterable[str], where: str) -> None:
    """An unknown name is an error that names the nearest.

    >>> check_known("polcy", ("name", "policy"), "site.toml")
    Traceback (most recent call last):
    ...
    ValueError: site.toml has no 'polcy': did you mean 'policy'? There are name, policy
    """
    known = list(known)
    if key not in known:
        near = difflib.get_close_matches(str(key), known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{where} has no {key!r}: {hint}There are {', '.join(known) or 'none'}")


def _csv(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        head = file.readline()
    separator = max(SEPARATORS, key=head.count)  # the first of them, where there is none
    settings: dict[str, Any] = dict(sep=separator, encoding="utf-8-sig", skipinitialspace=True)
    header = pd.read_csv(path, nrows=0, **settings).columns
    _check_columns(path, names, header)
    settings |= dict(low_memory=False)  # a column's type is that of all of it: no warning that parts differ
    return _arrays(pd.read_csv(path, usecols=list(dict.fromkeys(names)), **settings))


def _parquet(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ImportError(f"{path}: parquet files are read by pyarrow: pip install pyarrow, or save as .csv") from None
    _check_columns(path, names, parquet.read_schema(path).names)
    return _arrays(pd.read_parquet(path, columns=list(dict.fromkeys(names))))


def _arrays(table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Each column as NumPy has it; pandas' own types with gaps become float or objects, whose gaps are then found."""
    found = {}
    for name in table.columns:
        column = table[name]
        whole = not isinstance(column.dtype, np.dtype) and pd.api.types.is_numeric_dtype(column.dtype)
        found[str(name)] = (
            column.to_numpy(dtype=float, na_value=np.nan) if whole and column.hasnans else column.to_numpy()
        )
    return found


def _npz(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        _check_columns(path, names, file.files)
        return {name: file[name] for name in dict.fromkeys(names)}


def _check_columns(path: Path, names: Sequence[str], known: Iterable[str]) -> None:
    for name in names:
        check_known(name, [str(one) for one in known], f"{path}: the table")


READERS: dict[str, Callable[[Path, Sequence[str]], dict[str, np.ndarray]]] = {
    ".csv": _csv,
    ".parquet": _parquet,
    ".npz": _npz,
}
