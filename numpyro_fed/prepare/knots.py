r"""Quantiles of all silos' rows, from counts of rows below cuts.

Chebyshev's one-sided inequality says where to look: the :math:`p` quantile of rows with mean :math:`m` and sd :math:`s`
is between :math:`m - s \sqrt{(1-p)/p}` and :math:`m + s \sqrt{p/(1-p)}`, so that nobody is asked for the smallest or
largest row. The interval is divided into 32; silos count their rows below each cut; the part in which the count passes
:math:`p n` is divided again, until it holds few rows.
"""

import hashlib
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
    check_new,
    checked_names,
    in_precision,
    numbers,
    told,
)
from numpyro_fed.prepare.scaling import Moments, asked_moments

PARTS = 32  # of an interval in a round
ROUNDS = 6  # at most: an interval is then 1e-9 of the first, and what it still holds are ties
FEW = 1e-3  # share of all rows: an interval that holds no more is not divided
HARRELL = (
    0.05,
    0.275,
    0.5,
    0.725,
    0.95,
)  # places of five knots that Harrell (Regression Modeling Strategies) recommends


class Intervals(NamedTuple):
    """Where the quantiles are, and how many rows lie below."""

    low: np.ndarray  # float64 (quantiles)
    high: np.ndarray
    below: np.ndarray  # float64 (quantiles): rows up to low
    upto: np.ndarray  # rows up to high


def rounded_counts(x: np.ndarray, cuts: np.ndarray, threshold: int) -> np.ndarray:
    r"""How many of ``x`` are at most each cut, in equal steps of at least ``threshold`` rows.

    .. math:: \hat c = s \lfloor c / s + u \rfloor, \qquad s = n / \lfloor n / threshold \rfloor

    with :math:`u` uniform on [0, 1), so that :math:`E \hat c = c`. It is made from the rows themselves: the same in
    every round, so that nothing is learnt by asking again, and known to nobody who does not have them. (Statistical
    offices round tables in this way.) The count of all rows is right, and it never falls from a cut to a larger one.

    float64, the shape of ``cuts``; all 0 where there are fewer rows than ``threshold``.

    >>> rounded_counts(np.arange(24.0), np.array([-1.0, 2.0, 9.0, 20.0, 23.0]), 5)  # 24 rows: steps of 6
    array([ 0.,  0.,  6., 18., 24.])
    """
    steps = len(x) // threshold
    if not steps:
        return np.zeros(cuts.shape)
    x = np.sort(x)
    u = int.from_bytes(hashlib.blake2b(x.tobytes(), digest_size=4).digest(), "little") / 2**32
    counts = np.searchsorted(x, cuts, side="right")
    return np.floor(counts * steps / len(x) + u) * len(x) / steps


def first_intervals(moments: Moments, probs: np.ndarray) -> Intervals:
    """Chebyshev's, a little wider: a quantile may lie on its bound."""
    sd, odds = np.sqrt(moments.scatter / moments.rows), np.sqrt(probs / (1 - probs))
    wider = 1 + 1e-6
    zero = np.zeros_like(probs)
    return Intervals(
        moments.mean - wider * sd / odds, moments.mean + wider * sd * odds, zero, zero + float(moments.rows)
    )


def narrowed(at: Intervals, cuts: np.ndarray, counts: np.ndarray, target: np.ndarray) -> Intervals:
    """The parts in which the counts pass their targets; ``cuts`` and ``counts`` are (quantiles, PARTS - 1)."""
    places = np.column_stack([at.low, cuts, at.high])
    rows = np.column_stack([at.below, counts, at.upto])
    k = np.argmax(rows >= target[:, None], axis=1)  # at least 1: fewer rows than the target are below the interval
    one = np.arange(len(k))
    return Intervals(places[one, k - 1], places[one, k], rows[one, k - 1], rows[one, k])


def search(
    silos: Source, name: str, moments: Moments, probs: np.ndarray, threshold: int
) -> tuple[Intervals, np.ndarray, int, Traffic]:
    """Intervals that hold few rows, which of them still hold many (ties), rounds, and what they cost."""

    def question(own: Arguments, sent: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        return rounded_counts(numbers(own, name), sent[1], int(sent[0]))

    at, target = first_intervals(moments, probs), probs * float(moments.rows)
    few = max(2 * threshold - 1, FEW * float(moments.rows))
    done, traffic, wide = 0, Traffic(), np.ones(len(probs), bool)
    while done < ROUNDS and np.any(wide):
        some = Intervals(*(part[wide] for part in at))
        cuts = some.low[:, None] + (some.high - some.low)[:, None] * (np.arange(1, PARTS) / PARTS)
        answers, sent = ask(silos, question, (np.int64(threshold), cuts))
        found = narrowed(some, cuts, np.sum(answers, axis=0), target[wide])
        for part, new in zip(at, found, strict=True):
            part[wide] = new
        done, traffic, wide = done + 1, traffic + sent, at.upto - at.below > few
    return at, wide, done, traffic


def shortest(low: float, high: float) -> float:
    """The number above ``low`` and up to ``high`` with the fewest decimals: a value that many rows have is mostly such.

    >>> shortest(20.9999999, 21.0000001), shortest(-0.003, 1e-9), shortest(0.2499, 0.2504)
    (21.0, 0.0, 0.25)
    """
    near = (round(high, decimals) for decimals in range(16))
    return next((value for value in near if low < value <= high), high)


def values_of(at: Intervals, tied: np.ndarray, target: np.ndarray) -> np.ndarray:
    """A value in each interval, by the rows on both sides; one value where quantiles share ties. They never fall."""
    values = at.low + (at.high - at.low) * (target - at.below) / (at.upto - at.below)
    values = np.where(tied, [shortest(low, high) for low, high in zip(at.low, at.high, strict=True)], values)
    for i in range(1, len(values)):
        same = tied[i] and tied[i - 1] and at.low[i] < at.high[i - 1] and at.low[i - 1] < at.high[i]
        values[i] = values[i - 1] if same else max(values[i], values[i - 1])
    return values


@dataclass(frozen=True, repr=False, eq=False)
class Quantiles(Preparation):
    """Quantiles of all silos' rows; :meth:`apply` gives them to new data as the argument the model takes."""

    name: str
    argument: str
    probs: np.ndarray  # float64 (quantiles)
    values: np.ndarray  # float64 (quantiles)
    intervals: Intervals
    num_rows: int
    num_rounds: int
    left_out: tuple[str, ...]  # silos with fewer rows than the threshold
    bytes_up: int
    bytes_down: int

    def _applied(self, args: Arguments) -> Arguments:
        return args | {self.argument: in_precision(self.values)}

    @property
    def table(self) -> pd.DataFrame:
        """A row for each quantile: its value, the last interval that was looked at, and about how many rows it has."""
        at = self.intervals
        rows = (at.upto - at.below).astype(int)
        columns = dict(value=self.values, low=at.low, high=at.high, rows_between=rows)
        return pd.DataFrame(columns, index=pd.Index(self.probs, name=self.name))

    def _title(self) -> str:
        without = f", without {format_names(self.left_out)} (too few)" if self.left_out else ""
        return f"quantiles of {self.num_rows} rows{without}, in {self.num_rounds} rounds"


def quantiles(
    silos: Any,
    name: str,
    probs: Sequence[float] = HARRELL,
    *,
    argument: str = "knots",
    threshold: int = THRESHOLD,
) -> tuple[Any, Quantiles]:
    r"""Quantiles of a column over the rows of all silos, as a shared argument: the knots of a spline.

    The :math:`p` quantile is where the number of rows below passes :math:`p n`. The first round asks for moments
    (:func:`~numpyro_fed.prepare.standardize`), which bound it; then two or three, at most six, for counts at 31 cuts of
    the interval in which it lies. An interval that holds fewer than twice ``threshold`` rows, or one in a thousand,
    is not divided further, and rows are taken to lie evenly in it; only a value that more rows have is found itself.

    What leaves a silo: its number of rows, mean and sum of squares; and how many of its rows are below each cut,
    rounded at random to steps of at least ``threshold`` rows and fewer than twice as many (:func:`rounded_counts
    <numpyro_fed.prepare.knots.rounded_counts>`). So nobody learns whether one row or ``threshold`` lie between two
    cuts; but the last intervals, which are in ``table``, show about where a few rows are. A silo with fewer rows than
    ``threshold`` tells nothing and is not counted. The answer is the quantile of some :math:`p'` near :math:`p`:
    rounding has no bias and an sd of half a step at most in each silo, so with J silos :math:`|p' - p| n` is about
    :math:`\sqrt J / 2` steps or less, and the rows of the last interval. ``threshold=1`` rounds nothing.

    Args:
        silos: an ``nf.Silos``, or an ``nf.SiloStore``, all of whose silos are then read in every round.
        name: of an argument with one number per row.
        probs: rising, between 0 and 1, at least ``threshold`` rows away from either end: the smallest and the largest
            rows do not leave. By default Harrell's places of five knots.
        argument: under which the model gets them.
        threshold: rows that a silo must have, and the least step to which its counts are rounded.

    Returns:
        the silos with the shared argument; and a :class:`Quantiles` with ``values``, ``table`` and ``apply``, which
        adds the argument to new data.

    >>> some = np.random.default_rng(0).normal(50, 10, 3000).astype("f")
    >>> silos = nf.split(np.repeat(["leeds", "york"], [1000, 2000]), age=some)
    >>> silos, knots = nf.prepare.quantiles(silos, "age", [0.1, 0.5, 0.9])
    >>> knots.values.round(2).tolist(), np.quantile(some, [0.1, 0.5, 0.9]).round(2).tolist()
    ([37.15, 49.39, 62.75], [37.18, 49.44, 62.79])
    >>> silos["york"]["knots"].round()
    array([37., 49., 63.], dtype=float32)
    """
    (name,) = checked_names(silos, name)
    check_new(silos, argument, "argument")
    levels = _checked_probs(probs)
    found, left_out, sent = asked_moments(silos, (name,), check_count("threshold", threshold))
    moments = found[name]
    if np.ndim(moments.mean):
        raise ValueError(
            f"argument {name!r} has columns: give one of them as an argument of its own, one number per row"
        )
    rows = int(moments.rows)
    least = threshold / rows
    if levels[0] < least or levels[-1] > 1 - least:
        bad = levels[0] if levels[0] < least else levels[-1]
        raise ValueError(
            f"the {bad:g} quantile of {rows} rows is among the {threshold} smallest or largest, which do not leave: "
            f"choose probs between {least:.3g} and {1 - least:.3g}, or a smaller threshold"
        )
    at, tied, done, more = search(silos, name, moments, levels, threshold)
    values = values_of(at, tied, levels * rows)
    sent += more + told(silos, values)
    knots = Quantiles(name, argument, levels, values, at, rows, 1 + done, left_out, sent.up, sent.down)
    return silos.sharing(**{argument: in_precision(values)}), knots


def _checked_probs(probs: Any) -> np.ndarray:
    array = np.atleast_1d(np.asarray(probs, np.float64))
    if array.ndim != 1 or not array.size or np.any(np.diff(array) <= 0) or not np.all((array > 0) & (array < 1)):
        raise ValueError(f"probs must rise and lie between 0 and 1, got {probs!r}: for example [0.1, 0.5, 0.9]")
    return array
