r"""Standardised columns, from counts, means and sums of squares.

A silo with :math:`n_j` rows sends :math:`n_j`, its mean :math:`m_j` and :math:`s_j = \sum_i (x_i - m_j)^2`; the server
merges them (Chan, Golub and LeVeque 1983),

.. math:: m = \sum_j n_j m_j / n, \qquad s = \sum_j s_j + \sum_j n_j (m_j - m)^2,

and the silos take :math:`(x - m) / \sqrt{s / n}`. No sum of raw squares is formed, and all is float64: a column around
242,000 with an sd of 5 keeps its digits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from numpyro_fed.checks import check_count, format_names
from numpyro_fed.engines.base import Traffic
from numpyro_fed.prepare.asking import (
    THRESHOLD,
    Arguments,
    Preparation,
    Source,
    ask,
    checked_names,
    column,
    in_precision,
    numbers,
    told,
    where,
)


class Moments(NamedTuple):
    """What a silo tells of a column. All zero where it has fewer rows than the threshold."""

    rows: Any  # int64 ()
    mean: Any  # float64 (columns)
    scatter: Any  # float64 (columns): sum of squares around the mean


def moments_of(x: np.ndarray, threshold: int = 1) -> Moments:
    """One silo's, of (rows, columns). Measured from the first row, so that a constant column has no scatter at all.

    >>> [float(number) for number in moments_of(np.array([0.1, 0.1, 0.1]))]
    [3.0, 0.1, 0.0]
    """
    if len(x) < threshold:
        return Moments(np.int64(0), np.zeros(x.shape[1:]), np.zeros(x.shape[1:]))
    apart = x - x[0]
    mean = np.mean(apart, axis=0)
    return Moments(np.int64(len(x)), x[0] + mean, np.sum((apart - mean) ** 2, axis=0))


def merged(parts: list[Moments]) -> Moments:
    """All rows', from the silos'.

    >>> [float(number) for number in merged([moments_of(np.array([1.0, 3.0])), moments_of(np.array([8.0]))])]
    [3.0, 4.0, 26.0]
    """
    rows, mean, scatter = (np.stack(part) for part in zip(*parts, strict=True))
    weight = rows.reshape(-1, *(1,) * (mean.ndim - 1)) / np.sum(rows)
    pivot = mean[np.argmax(rows)]  # equal means then have a mean that is equal to them, to the last digit
    centre = pivot + np.sum(weight * (mean - pivot), axis=0)
    between = np.sum(rows) * np.sum(weight * (mean - centre) ** 2, axis=0)
    return Moments(np.sum(rows), centre, np.sum(scatter, axis=0) + between)


def asked_moments(
    silos: Source, names: tuple[str, ...], threshold: int
) -> tuple[dict[str, Moments], tuple[str, ...], Traffic]:
    """Moments of all rows by argument, the silos that have too few rows to tell theirs, and what it cost."""

    def question(own: Arguments, sent: np.ndarray) -> dict[str, Moments]:
        return {name: moments_of(numbers(own, name), int(sent)) for name in names}

    answers, sent = ask(silos, question, np.int64(threshold))
    found = {}
    for name in names:
        parts = [answer[name] for answer in answers]
        if not any(part.rows for part in parts):
            raise ValueError(
                f"every silo has fewer than {threshold} rows of {name!r}, and sums of so few would tell what they are: "
                "pass threshold=1 if they may leave"
            )
        found[name] = merged(parts)
        _check_varies(name, found[name])
    silent = (j for j, answer in enumerate(answers) if not all(part.rows for part in answer.values()))
    return found, tuple(silos.names[j] for j in silent), sent


def _check_varies(name: str, moments: Moments) -> None:
    constant = np.argwhere(moments.scatter == 0)
    if not len(constant):
        return
    at = tuple(constant[0].tolist())
    what = f"{name!r}" if not at else f"{name!r}, column {', '.join(map(str, at))},"
    cure = "leave it out of names" if not at else "give the other columns as an argument of their own"
    raise ValueError(f"argument {what} is {moments.mean[at]:g} in all {moments.rows} rows, it has no scale: {cure}")


@dataclass(frozen=True, repr=False, eq=False)
class Scaling(Preparation):
    """Means and sds of all silos' rows; :meth:`apply` standardises new data by them, :meth:`undo` goes back."""

    mean: dict[str, np.ndarray]  # float64 (columns) each
    sd: dict[str, np.ndarray]
    num_rows: dict[str, int]
    num_silos: int
    left_out: tuple[str, ...]  # silos with fewer rows than the threshold: scaled, but not counted
    bytes_up: int
    bytes_down: int

    def _applied(self, args: Arguments) -> Arguments:
        return args | {name: self._scaled(args, name) for name in self._present(args)}

    def _scaled(self, args: Arguments, name: str) -> np.ndarray:
        x = numbers(args, name)
        if x.shape[1:] != self.mean[name].shape:
            got, expected = (list(shape) for shape in (x.shape, ("rows", *self.mean[name].shape)))
            raise ValueError(f"{where(name)} has the shape {got}, expected {expected}".replace("'rows'", "rows"))
        return in_precision((x - self.mean[name]) / self.sd[name], getattr(column(args, name), "dtype", float))

    def undo(self, args: Arguments) -> Arguments:
        """Standardised values in their own units again, in float64; arrays may have draws in front of their rows.

        >>> silos, scaling = nf.prepare.standardize(silos, "x")
        >>> back = scaling.undo(scaling.apply(dict(x=x)))
        >>> np.allclose(back["x"], x)
        True
        """
        back = lambda name: np.asarray(args[name], np.float64) * self.sd[name] + self.mean[name]
        return dict(args) | {name: back(name) for name in self._present(args)}

    def _present(self, args: Arguments) -> list[str]:
        present = [name for name in self.mean if name in args]
        if not present:
            raise ValueError(f"none of {', '.join(self.mean)} is given, got {', '.join(args) or 'nothing'}")
        return present

    @property
    def table(self) -> pd.DataFrame:
        rows = {
            name + "".join(f"[{i}]" for i in at): (self.mean[name][at], self.sd[name][at], self.num_rows[name])
            for name in self.mean
            for at in np.ndindex(self.mean[name].shape)
        }
        return pd.DataFrame.from_dict(rows, orient="index", columns=["mean", "sd", "rows"])

    def _title(self) -> str:
        without = f", without {format_names(self.left_out)} (too few)" if self.left_out else ""
        return f"standardised with {max(self.num_rows.values())} rows of {self.num_silos} silos{without}"


def standardize(silos: Any, names: str | Sequence[str], *, threshold: int = THRESHOLD) -> tuple[Any, Scaling]:
    r"""Columns with mean 0 and sd 1 over the rows of all silos, which stay where they are.

    .. math:: x' = (x - m) / \sqrt{s / n}

    with :math:`m` and :math:`s / n` the mean and variance (``np.std``'s, divided by :math:`n`) of all silos' rows: the
    numbers that ``x.mean()`` and ``x.std()`` give in a pooled analysis.

    What leaves a silo, for each argument named: its number of rows, means, and sums of squares around them. A silo with
    fewer than ``threshold`` rows tells nothing (of one row the mean is the row); it is not counted, and is scaled as
    all others are. Any scale will do for a model, so long as it is everywhere the same. Of a column of zeros and ones
    the mean tells how many ones there are, however few.

    Args:
        silos: an ``nf.Silos``, or an ``nf.SiloStore``, all of whose silos are then read once.
        names: of arguments, one or several. An array's columns are scaled one by one; ints become floats. Rows are the
            argument's own: one with a row per county is scaled over counties. Values that were filled in count like
            others.
        threshold: rows that a silo must have to tell its sums.

    Returns:
        the silos, all else as it was; and a :class:`Scaling` with ``apply`` for new data, ``undo`` for what comes back,
        ``mean``, ``sd`` and ``table``.

    >>> silos, scaling = nf.prepare.standardize(silos, "x")
    >>> pooled = np.concatenate([silos[name]["x"] for name in silos.names])
    >>> bool(abs(pooled.mean()) < 1e-6), round(float(pooled.std()), 5)
    (True, 1.0)
    """
    moments, left_out, sent = asked_moments(silos, checked_names(silos, names), check_count("threshold", threshold))
    mean = {name: np.asarray(found.mean) for name, found in moments.items()}
    sd = {name: np.asarray(np.sqrt(found.scatter / found.rows)) for name, found in moments.items()}
    sent += told(silos, (mean, sd))
    num_rows = {name: int(found.rows) for name, found in moments.items()}
    scaling = Scaling(mean, sd, num_rows, len(silos.names) - len(left_out), left_out, sent.up, sent.down)
    return silos.changed(scaling.apply), scaling
