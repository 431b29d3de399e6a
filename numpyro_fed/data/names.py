"""The names of very many silos, without a loop over them."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from numpyro_fed.checks import format_names


class LazyNames(Sequence[str]):
    """The names of very many silos: "0", "1", ..., or those in an array. To compare two costs the same for any number.

    >>> names = LazyNames(342_477)
    >>> len(names), names[-1], names.index("12"), "x" in names, names == LazyNames(342_477)
    (342477, '342476', 12, False, True)
    """

    lazy = True  # whoever asks must not loop over them

    def __init__(self, count: int, labels: np.ndarray | None = None) -> None:
        self.labels = labels  # ints or strings, no two of them alike; None: "0", "1", ...
        self._count = count
        content = b"" if labels is None else hashlib.sha256(str(labels.dtype).encode() + labels.tobytes()).digest()
        self._identity = (count, content)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return tuple(self[j] for j in range(*i.indices(self._count)))
        if not -self._count <= i < self._count:
            raise IndexError(f"silo {i} of {self._count}")
        i = int(i) % self._count
        return str(i if self.labels is None else self.labels[i])

    def index(self, name: Any, start: int = 0, stop: int | None = None) -> int:
        """The silo's position. (The whole range is searched: names are different.)"""
        found = self._find(name)
        if found is None:
            raise ValueError(f"no silo is named {name!r}; the silos are {format_names(self)}")
        return found

    def __contains__(self, name: object) -> bool:
        return self._find(name) is not None

    def _find(self, name: Any) -> int | None:
        if not isinstance(name, str):
            return None
        if self.labels is None:
            guess = int(name) if name.isdecimal() else -1
        else:
            numbers = self.labels.dtype.kind in "iu"
            if numbers and not name.removeprefix("-").isdecimal():
                return None
            at = np.searchsorted(self.labels, int(name) if numbers else name, sorter=self._order)
            guess = int(self._order[at]) if at < self._count else -1
        return guess if 0 <= guess < self._count and self[guess] == name else None

    @cached_property
    def _order(self) -> np.ndarray:
        assert self.labels is not None
        return np.argsort(self.labels, kind="stable")

    def __hash__(self) -> int:
        return hash(self._identity)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyNames) and self._identity == other._identity

    def __repr__(self) -> str:
        return f"LazyNames({format_names(self)})"
