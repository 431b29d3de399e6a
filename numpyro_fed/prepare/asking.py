"""A question to all silos, what they are told in the end, and what becomes of both.

A question is a pure function ``(a silo's own arguments, what it was sent) -> message``, evaluated in the silo's room.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import numpy as np
import pandas as pd

from numpyro_fed.data.inputs import describe
from numpyro_fed.data.silos import at_silo, inside
from numpyro_fed.engines import wire
from numpyro_fed.engines.base import Traffic

Arguments = dict[str, Any]
THRESHOLD = 5  # rows that a count or a sum has at least before it leaves; a usual number in official statistics


class Source(Protocol):
    """What is asked of silos here; :class:`~numpyro_fed.Silos` and :class:`~numpyro_fed.SiloStore` have it."""

    @property
    def names(self) -> Any: ...
    @property
    def shared(self) -> Arguments: ...
    def own(self, name: str) -> Arguments: ...
    def changed(self, change: Callable[[Arguments], Arguments]) -> Any: ...


def ask(silos: Source, question: Callable[[Arguments, Any], Any], sent: Any) -> tuple[list[Any], Traffic]:
    """Every silo's answer, in the order of the silos, and the bytes of questions and answers.

    >>> ask(silos, lambda own, sent: {"above": np.sum(np.asarray(own["x"]) > sent)}, np.float64(0))
    ([{'above': array(9)}, {'above': array(17)}], Traffic(up=52, down=52))
    """
    answers, traffic = [], Traffic()
    for name in silos.names:
        with at_silo(name):
            received, down = _through_wire(sent)
            answer, up = _through_wire(question(silos.own(name), received))
        answers.append(answer)
        traffic += Traffic(up, down)
    return answers, traffic


def told(silos: Source, values: Any) -> Traffic:
    """The bytes of telling all silos the same."""
    return len(silos.names) * Traffic(0, wire.num_bytes(values))


def _through_wire(tree: Any) -> tuple[Any, int]:
    encoded = wire.encode(tree)
    return wire.decode(encoded, tree), len(encoded)


class Preparation(ABC):
    """What was found, how it is applied to new data, and what it cost. The three kinds of it derive from this."""

    bytes_up: int  # of all silos together
    bytes_down: int

    def apply(self, new: Any) -> Any:
        """New data prepared as the silos were.

        Args:
            new: arguments of the model, ``{argument: array}``; those that were not prepared are passed on, and those
                that were may be left out. Or an ``nf.Silos`` or ``nf.SiloStore``: each silo in its own room.
        """
        if hasattr(new, "changed"):
            return new.changed(self.apply)
        if not isinstance(new, Mapping):
            raise TypeError(f"expected a dict of model arguments or an nf.Silos, got a {type(new).__name__}")
        return self._applied(dict(new))

    @property
    @abstractmethod
    def table(self) -> pd.DataFrame:
        """A row for each column, level or quantile."""

    @abstractmethod
    def _applied(self, args: Arguments) -> Arguments:
        """Arguments of one silo, or new ones, prepared."""

    @abstractmethod
    def _title(self) -> str:
        """What was done with how many."""

    def __repr__(self) -> str:
        return f"{self._title()}; {self.bytes_up} bytes up, {self.bytes_down} down\n{self.table.to_string()}"


def checked_names(silos: Source, names: Any) -> tuple[str, ...]:
    """Arguments that the silos have, or an error that lists them."""
    if not hasattr(silos, "own"):
        raise TypeError(f"silos must be an nf.Silos, got a {type(silos).__name__}: pass nf.Silos(...) of it")
    listed = (names,) if isinstance(names, str) else tuple(names)
    with at_silo(silos.names[0]):
        own = sorted(silos.own(silos.names[0]))
    if not listed or len(set(listed)) < len(listed):
        raise ValueError(f"names must name each argument once, got {list(listed)}; the silos have {', '.join(own)}")
    for name in listed:
        if name in silos.shared:
            raise ValueError(f"{name!r} is shared, the same in all silos: prepare it yourself and pass it in shared=")
        if name not in own:
            raise ValueError(f"there is no argument {name!r}; the silos have {', '.join(own)}")
    return listed


def check_new(silos: Source, name: str, keyword: str) -> str:
    """A name for a shared argument that the silos do not have yet."""
    with at_silo(silos.names[0]):
        taken = set(silos.own(silos.names[0])) | set(silos.shared)
    if not isinstance(name, str) or not name.isidentifier() or name in taken:
        why = "which the silos have already" if name in taken else "which is no name"
        raise ValueError(f"{keyword} names the argument that the model gets, got {name!r}, {why}: choose another name")
    return name


def where(name: str) -> str:
    """An argument's name for an error: of a silo, or of new data."""
    return f"argument {name!r} of " + ("the new data" if inside() is None else f"silo {inside()!r}")


def column(args: Arguments, name: str) -> Any:
    """An argument that has rows, as it was given."""
    if name not in args:
        raise ValueError(f"{where(name)} is missing; it has {', '.join(sorted(args))}")
    value = args[name]
    if isinstance(value, Mapping | bool | int | float | str) or value is None:
        raise TypeError(f"{where(name)} is a {type(value).__name__}: only arrays with rows are prepared")
    if hasattr(value, "ndim") and value.ndim == 0:
        raise TypeError(f"{where(name)} is a single number: only arrays with rows are prepared")
    return value


def numbers(args: Arguments, name: str) -> np.ndarray:
    """An argument's values in float64, if they are finite numbers."""
    array = np.asarray(column(args, name))
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{where(name)} is {describe(array)}: expected numbers (for categories: nf.prepare.levels(silos, {name!r}))"
        )
    array = array.astype(np.float64)
    if not np.all(np.isfinite(array)):
        row = int(np.argwhere(~np.isfinite(array))[0][0])
        raise ValueError(f"{where(name)} has NaN or Inf, first in row {row}: drop these rows")
    return array


def in_precision(array: np.ndarray, like: Any = np.float64) -> np.ndarray:
    """As the program computes: ``like``'s own floating type, doubles and ints in JAX's default."""
    kept = np.dtype(like) if np.dtype(like).kind == "f" else np.dtype(np.float64)
    return array.astype(jax.dtypes.canonicalize_dtype(np.result_type(kept, np.float32)))
