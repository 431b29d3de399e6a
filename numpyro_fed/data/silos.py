"""Data that stay apart.

A :class:`Silos` holds, under each silo's name, the arguments with which the model would be called there:
``model(**silos["york"])``. Nothing is stacked or padded yet; :mod:`numpyro_fed.data.padding` does that once the
partition has told which axes belong to the silos.

>>> import numpy as np
>>> silos = Silos({"leeds": dict(y=np.ones(3, "f")), "york": dict(y=np.ones(2, "f"))})
>>> silos.names, silos.num_silos, silos["york"]["y"].shape
(('leeds', 'york'), 2, (2,))
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

import jax
import numpy as np

from numpyro_fed.checks import users_line
from numpyro_fed.data.inputs import check_alike, checked_arguments, describe, leaves, named_arguments

LARGE = 1e8  # float32 keeps 7 digits: above this, differences of order one are lost

_inside: ContextVar[str | None] = ContextVar("silo", default=None)


@contextmanager
def at_silo(name: str) -> Iterator[None]:
    """The room of a silo: what is done in here is done where its data are. Arrays of a silo are read nowhere else.

    >>> with at_silo("york"):
    ...     inside()
    'york'
    """
    token = _inside.set(name)
    try:
        yield
    finally:
        _inside.reset(token)


def inside() -> str | None:
    """Whose room this is; None: the server's."""
    return _inside.get()


class Silos(Mapping[str, dict[str, Any]]):
    """Named silos, each with its own arguments of the model.

    Args:
        data: ``{name: {argument: value}}``, or a list of such dicts (named "0", "1", ...). A value is any pytree of
            arrays and ints; an int is a size (a number of groups), an array's leading axis holds its rows.
        shared: arguments that are the same everywhere (knots, a number of items).

    Silos may have different numbers of rows. The leading axes are compared between silos to find out which plates
    are the silo's own (see :func:`numpyro_fed.partition`).
    """

    lazy: ClassVar[bool] = False  # all silos are in memory

    def __init__(self, data: Any, shared: Mapping[str, Any] | None = None) -> None:
        named = named_arguments(data)
        self.shared: dict[str, Any] = checked_arguments(None, dict(shared or {}))
        self._data = {name: checked_arguments(name, args) for name, args in named.items()}
        self.own_counts: frozenset[str] = frozenset()  # int arguments known to count a silo's own groups (see `split`)
        self.renumbered: frozenset[str] = frozenset()  # indices that count a silo's own groups from 0 (see `split`)
        for name, args in self._data.items():
            both = sorted(set(args) & set(self.shared))
            if both:
                raise ValueError(f"argument {both[0]!r} is given by silo {name!r} and in shared=: keep one of the two")
        check_alike(self._data)
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
        some.shared, some.own_counts, some.renumbered = self.shared, self.own_counts, self.renumbered
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
            lines.append(f"  {name}: " + ", ".join(f"{path} {describe(leaf)}" for path, leaf in leaves(args)))
        if len(shown) > 10:
            lines.append(f"  ... and {len(shown) - 10} more")
        if self.shared:
            lines.append("  shared: " + ", ".join(f"{path} {describe(leaf)}" for path, leaf in leaves(self.shared)))
        return "\n".join(lines)


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
            stacklevel=users_line(),
        )
    if large:
        warnings.warn(
            f"{', '.join(sorted(large))} have values above {LARGE:.0e}, where float32 loses differences of order one: "
            "standardise them",
            stacklevel=users_line(),
        )
