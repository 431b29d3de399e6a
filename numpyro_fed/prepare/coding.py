"""The same codes in all silos, from the names of levels that enough rows have."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from numpyro_fed.checks import check_count, format_names
from numpyro_fed.data.inputs import named_arguments
from numpyro_fed.data.silos import Silos, at_silo
from numpyro_fed.prepare.asking import (
    THRESHOLD,
    Arguments,
    Preparation,
    ask,
    check_new,
    checked_names,
    column,
    told,
    where,
)

OTHER = "other"  # the level of rows whose own was not named
HIDDEN = -1  # in place of a count that does not leave


class Raw:
    """Silos as a dict of dicts, strings among them: what can be asked before it can be an ``nf.Silos``."""

    def __init__(self, data: Any) -> None:
        self._data = named_arguments(data)
        self.names, self.shared = tuple(self._data), dict[str, Any]()

    def own(self, name: str) -> Arguments:
        return dict(self._data[name])

    def changed(self, change: Any) -> Silos:
        def made(name: str) -> Arguments:
            with at_silo(name):
                return change(self.own(name))

        return Silos({name: made(name) for name in self.names})


def factors(args: Arguments, name: str) -> tuple[np.ndarray, list[Any], str]:
    """A column as positions in a list of its levels, and whether these are of kind str, int or bool.

    >>> factors(dict(drug=["b", "a", "b"]), "drug")
    (array([0, 1, 0]), ['b', 'a'], 'str')
    """
    value = column(args, name)
    array = np.asarray(value, object if isinstance(value, list | tuple) else None)  # no number becomes a string
    if array.ndim != 1:
        raise ValueError(f"{where(name)} has the shape {list(array.shape)}: give one level per row")
    missing = pd.isna(array)
    if np.any(missing):
        row = int(np.argmax(missing))
        raise ValueError(
            f"{where(name)} has no level in row {row} ({array[row]}): drop the row, or name a level for it"
        )
    at, found = pd.factorize(array)
    found = [level.item() if isinstance(level, np.generic) else level for level in found.tolist()]
    kinds = sorted({type(level).__name__ for level in found})
    if len(kinds) > 1 or kinds[0] not in ("str", "int", "bool"):
        cure = f"{name}.astype(str)" if "float" not in kinds else f"{name}.astype(int), if these are codes"
        raise TypeError(f"{where(name)} holds {' and '.join(kinds)}: levels are strings or ints, pass {cure}")
    return at, found, kinds[0]


def hide_small(counts: np.ndarray, threshold: int) -> np.ndarray:
    """Counts of which none of 1 to ``threshold - 1`` can be read or worked out from the sum; hidden ones are -1.

    Where the hidden ones together are fewer than ``threshold``, the next smallest is hidden with them.

    >>> hide_small(np.array([40, 2, 0, 9]), 5)
    array([40, -1,  0, -1])
    """
    hidden = (counts > 0) & (counts < threshold)
    while 0 < np.sum(counts[hidden]) < threshold and np.any(~hidden & (counts > 0)):
        hidden[np.argmin(np.where(hidden | (counts == 0), np.iinfo(counts.dtype).max, counts))] = True
    return np.where(hidden, HIDDEN, counts)


def _coded(args: Arguments, name: str, levels: list[Any]) -> np.ndarray:
    """Codes of a column's rows; rows of no level get that of "other", the one after the last where none is so called.

    int64 (rows).
    """
    at, found, _ = factors(args, name)
    codes = {level: code for code, level in enumerate(levels)}
    rest = codes.get(OTHER, len(levels))
    return np.array([codes.get(level, rest) for level in found], np.int64)[at]


def _written(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def _read(message: np.ndarray) -> Any:
    return json.loads(bytes(message))


@dataclass(frozen=True, repr=False, eq=False)
class Levels(Preparation):
    """Levels in the order of their codes; :meth:`apply` codes new data, :meth:`undo` gives the levels' names back."""

    labels: dict[str, tuple[Any, ...]]  # {argument: levels in the order of their codes, perhaps "other" as the last}
    counts: dict[str, np.ndarray]  # int64 (silos, codes): rows of each; -1 where a silo hides a small count
    count_arguments: dict[str, str]  # {argument: the shared argument that says how many levels there are}
    bytes_up: int
    bytes_down: int

    def num_levels(self, name: str) -> int:
        """How many codes there are, "other" included where there is one."""
        return len(self.labels[name])

    def _applied(self, args: Arguments) -> Arguments:
        sizes = {count: self.num_levels(name) for name, count in self.count_arguments.items()}
        return args | self._codes(args) | sizes

    def _codes(self, args: Arguments) -> Arguments:
        present = [name for name in self.labels if name in args]
        if not present:
            raise ValueError(f"none of {', '.join(self.labels)} is given, got {', '.join(args) or 'nothing'}")
        coded = {}
        for name in present:
            labels = list(self.labels[name])
            codes = _coded(args, name, labels)
            if np.max(codes) == len(labels):  # no silo has rows of other levels
                row = int(np.argmax(codes))
                level = np.asarray(args[name], object)[row]
                raise ValueError(
                    f"{where(name)} has {level!r} in row {row}, which is none of the levels ({format_names(labels)}), "
                    f"and no rows were pooled as {OTHER!r}: drop the row, or give it one of these levels"
                )
            coded[name] = codes.astype(np.int32)
        return coded

    def undo(self, args: Mapping[str, Any]) -> Arguments:
        """Codes as the names of their levels.

        >>> _, levels = nf.prepare.levels({"leeds": dict(sex=list("mffmf"))}, "sex", threshold=2)
        >>> levels.undo(dict(sex=np.array([1, 0])))["sex"].tolist()
        ['m', 'f']
        """
        named = lambda name: np.array(self.labels[name], object)[np.asarray(args[name])]
        return dict(args) | {name: named(name) for name in self.labels if name in args}

    @property
    def table(self) -> pd.DataFrame:
        """A row for each level: rows that silos told of, and how many silos hide how many they have."""
        parts = [
            pd.DataFrame(
                dict(
                    argument=name,
                    code=np.arange(len(labels)),
                    level=np.array(labels, object),
                    rows=np.sum(np.maximum(self.counts[name], 0), axis=0),
                    hidden_in=np.sum(self.counts[name] == HIDDEN, axis=0),
                )
            )
            for name, labels in self.labels.items()
        ]
        return pd.concat(parts).set_index(["argument", "code"])

    def _title(self) -> str:
        return f"levels of {', '.join(self.labels)} in {len(next(iter(self.counts.values())))} silos"


def levels(
    silos: Any, names: str | Sequence[str] | Mapping[str, str], *, threshold: int = THRESHOLD
) -> tuple[Any, Levels]:
    """Categories as ints 0, 1, ..., the same in all silos.

    In two rounds. First each silo tells the names of the levels that at least ``threshold`` of its rows have. Their
    union, sorted, are the levels, and the code of a row is its level's place there, also in a silo where that level is
    rare. Rows of levels that no silo has told are pooled: they get one more code, the last, "other" (or that of the
    level which is called so). Then each silo tells how many rows of each code it has. A count of 1 to
    ``threshold - 1`` does not leave, and where it could be worked out from the number of rows the next smallest does
    not either; so ``table`` has the rows that were told of, and in how many silos there are more.

    Args:
        silos: ``{silo: {argument: array}}``, the arguments of silos with strings among them, for an ``nf.Silos`` takes
            numbers only. Or an ``nf.Silos`` or ``nf.SiloStore`` where levels are ints.
        names: of arguments, one or several: strings, ints or bools, one per row. Or ``dict(drug="num_drugs")``: the
            number of drugs becomes the shared argument ``num_drugs``.
        threshold: rows that a level must have in a silo for its name to leave, and rows that a count must have.

    Returns:
        an ``nf.Silos`` with int32 codes, all else as it was (checked as ``nf.Silos`` does); and a :class:`Levels` with
        ``apply`` for new data, ``undo``, ``labels`` and ``table``. In new data a level that is not known is "other",
        where there is that code, else an error.

    >>> drugs = {"leeds": dict(drug=["statin"] * 6 + ["none"] * 8), "york": dict(drug=["none"] * 9 + ["novel"])}
    >>> silos, levels = nf.prepare.levels(drugs, dict(drug="num_drugs"))
    >>> levels
    levels of drug in 2 silos; 196 bytes up, 212 down
                    level  rows  hidden_in
    argument code
    drug     0       none     8          1
             1     statin     6          0
             2      other     0          1
    >>> silos["york"]["drug"].tolist(), silos["york"]["num_drugs"]
    ([0, 0, 0, 0, 0, 0, 0, 0, 0, 2], 3)
    >>> levels.apply(dict(drug=["statin", "unheard of"]))
    {'drug': array([1, 2], dtype=int32), 'num_drugs': 3}
    """
    source = silos if hasattr(silos, "own") else Raw(silos)
    sizes = dict(names) if isinstance(names, Mapping) else {}
    names = checked_names(source, tuple(sizes) or names)
    for name, count in sizes.items():
        check_new(source, count, f"names[{name!r}]")
    least = np.int64(check_count("threshold", threshold))

    def told_levels(own: Arguments, sent: np.ndarray) -> dict[str, np.ndarray]:
        message = {}
        for name in names:
            at, found, kind = factors(own, name)
            enough = np.bincount(at, minlength=len(found)) >= int(sent)
            message[name] = _written([kind, sorted(level for level, said in zip(found, enough, strict=True) if said)])
        return message

    answers, sent = ask(source, told_levels, least)
    union = {name: _union(source.names, name, [_read(answer[name]) for answer in answers], threshold) for name in names}

    def told_counts(own: Arguments, sent: tuple[np.ndarray, dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        smallest, known = int(sent[0]), {name: _read(written) for name, written in sent[1].items()}
        count = lambda name: np.bincount(_coded(own, name, known[name]), minlength=len(known[name]) + 1)
        return {name: hide_small(count(name), smallest) for name in names}

    answers, more = ask(source, told_counts, (least, {name: _written(union[name]) for name in names}))
    counts = {name: np.stack([answer[name] for answer in answers]) for name in names}
    labels = {name: (*union[name], OTHER) if np.any(counts[name][:, -1]) else tuple(union[name]) for name in names}
    counts = {name: counts[name][:, : len(labels[name])] for name in names}
    sent += more + told(source, {name: np.int32(len(labels[name])) for name in names})

    found = Levels(labels, counts, sizes, sent.up, sent.down)
    coded = source.changed(lambda own: own | found._codes(own))
    shared = {count: found.num_levels(name) for name, count in sizes.items()}
    return coded.sharing(**shared) if shared else coded, found


def _union(silos: Any, name: str, said: list[Any], threshold: int) -> list[Any]:
    """The levels of all silos, sorted."""
    kinds = [kind for kind, _ in said]
    if len(set(kinds)) > 1:
        other = next(j for j, kind in enumerate(kinds) if kind != kinds[0])
        raise TypeError(
            f"argument {name!r} holds {kinds[0]} in silo {silos[0]!r} and {kinds[other]} in silo {silos[other]!r}: "
            "convert one of them"
        )
    union = sorted({level for _, found in said for level in found})
    if not union:
        raise ValueError(
            f"no level of {name!r} has {threshold} rows in any silo: pass threshold=1 if names of levels may leave "
            "that a single row has"
        )
    return union
