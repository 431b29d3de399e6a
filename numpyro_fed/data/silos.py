"""Silos in memory: the model's arguments, each silo's own and those that all share.

A :class:`Silos` holds, under each silo's name, the arguments with which the model would be called there:
``model(**silos["york"])``. Nothing is stacked or padded yet; :mod:`numpyro_fed.data.padding` does that once the
partition has told which axes belong to the silos.

>>> import numpy as np
>>> silos = Silos({"leeds": dict(y=np.ones(3, "f")), "york": dict(y=np.ones(2, "f"))})
>>> silos.names, silos.num_silos, silos["york"]["y"].shape
(('leeds', 'york'), 2, (2,))
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from typing import Any, ClassVar

import jax
import numpy as np

from numpyro_fed.checks import agreeing, warn_user
from numpyro_fed.data.inputs import check_alike, checked_arguments, describe, leaves, named_arguments, told_once

SHOWN = 10  # silos that are listed
LARGE = 1e8  # float32 keeps 7 digits: above this, differences of order one are lost

_inside: ContextVar[str | None] = ContextVar("silo", default=None)


@contextmanager
def at_silo(name: str | None) -> Iterator[None]:
    """The room of a silo (None: of the server): what is done in here is done where its data are.

    Arrays of a silo are read nowhere else. Whoever opens a room says so: an engine, for the functions of an algorithm,
    and what is made of a fit for one silo.

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
        _check_apart(self._data, self.shared)
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
        return self._with({name: self.own(name) for name in names}, self.shared)

    def changed(self, change: Callable[[dict[str, Any]], dict[str, Any]]) -> "Silos":
        """The same silos with other arguments: ``change(own arguments)`` of each, made in its own room.

        Args:
            change: from a silo's own arguments to arrays and ints; shared arguments stay as they are.
        """

        def made(name: str) -> dict[str, Any]:
            with at_silo(name):
                return change(self.own(name))

        return self._with({name: made(name) for name in self.names}, self.shared)

    def sharing(self, **arguments: Any) -> "Silos":
        """The same silos with these shared arguments beside, or in place of, those that there are.

        >>> silos.sharing(knots=np.array([-1.0, 0.0, 1.0], "f"))
        Silos: 2
          leeds: x float32[20], y int32[20]
          york: x float32[30], y int32[30]
          shared: knots float32[3]
        """
        _check_apart(self._data, arguments)
        return self._with(self._data, self.shared | checked_arguments(None, arguments))

    def _with(self, data: dict[str, dict[str, Any]], shared: dict[str, Any]) -> "Silos":
        """Silos of arguments that have been checked."""
        silos = object.__new__(Silos)
        silos.shared, silos.own_counts, silos._data = shared, self.own_counts, data
        silos.renumbered = self.renumbered
        return silos

    def joined(self, others: "Silos") -> "Silos":
        """These silos and others, who come last. Both have been checked; that they are alike is checked by shapes."""
        check_alike({**self._data, **others._data})
        everyone = object.__new__(Silos)
        everyone.shared, everyone.own_counts = self.shared, self.own_counts | others.own_counts
        everyone.renumbered = self.renumbered | others.renumbered
        everyone._data = {**self._data, **others._data}
        return everyone

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.own(name) | self.shared

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        lines = [f"Silos: {self.num_silos}"]
        lines += [f"  {name}: {_described(args)}" for name, args in list(self._data.items())[:SHOWN]]
        if self.num_silos > SHOWN:
            lines.append(f"  ... and {self.num_silos - SHOWN} more")
        if self.shared:
            lines.append(f"  shared: {_described(self.shared)}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """A row a silo, a column an argument: types and shapes, no values."""
        columns = [path for path, _ in leaves(self.own(self.names[0]))]
        line = lambda cells, tag: "".join(f"<{tag} style='text-align:left'>{escape(cell)}</{tag}>" for cell in cells)
        rows = [[name, *(describe(leaf) for _, leaf in leaves(self.own(name)))] for name in self.names[:SHOWN]]
        body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
        more = f"<p>... and {self.num_silos - SHOWN} more</p>" if self.num_silos > SHOWN else ""
        shared = f"<p>shared: {escape(_described(self.shared))}</p>" if self.shared else ""
        head = f"<table><thead><tr>{line(['silo', *columns], 'th')}</tr></thead>"
        return f"<p><b>Silos</b>: {self.num_silos}</p>{head}<tbody>{body}</tbody></table>{more}{shared}"


def _described(args: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} {describe(leaf)}" for path, leaf in leaves(args))


def _check_apart(data: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Any]) -> None:
    for name, args in data.items():
        both = sorted(set(args) & set(shared))
        if both:
            raise ValueError(f"argument {both[0]!r} is given by silo {name!r} and in shared=: keep one of the two")


def _warn_once_about_numbers(silos: Silos) -> None:
    doubles, large = set(), set()
    for args in [*(silos.own(name) for name in silos.names), silos.shared]:
        for path, leaf in leaves(args):
            if isinstance(leaf, int) or leaf.dtype.kind != "f":
                continue
            if leaf.dtype == np.float64:
                doubles.add(path)
            if leaf.size and np.max(np.abs(told_once(leaf))) > LARGE:
                large.add(path)
    if doubles and not jax.config.read("jax_enable_x64"):
        warn_user(
            f"{agreeing(doubles, 'is', 'are')} float64 and will be computed in float32: call numpyro.enable_x64() "
            "first, or pass float32",
        )
    if large:
        warn_user(
            f"{agreeing(large, 'has', 'have')} values above {LARGE:.0e}, where float32 loses differences of order one: "
            f"standardise {'it' if len(large) == 1 else 'them'} (nf.prepare.standardize)",
        )
