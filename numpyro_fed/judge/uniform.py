r"""Are ranks uniform? The empirical distribution function of ranks, with bands for all of it at once.

Of S ranks, each one of 0, ..., L, the number below j is binomial with probability :math:`p_j = j / (L + 1)`. The
statistic is the least two-sided tail probability among these numbers,

.. math:: \gamma = 2 \min_j \min\{P(X_j \le x_j),\; P(X_j \ge x_j)\},

and its distribution under uniformity is found by simulation. A band that leaves out tails of :math:`\gamma_\alpha / 2`
at each point, :math:`\gamma_\alpha` its quantile, holds the whole function with probability :math:`1 - \alpha`.

Reference: T. Säilynoja, P.-C. Bürkner and A. Vehtari, Graphical test for discrete uniformity and its applications in
goodness-of-fit evaluation and multiple sample comparison, Statistics and Computing 32 (2022).
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.stats import binom

POINTS = 100  # at which the function is looked at
SETS = 10_000  # of uniform ranks: p-values from 1e-4


class Band(NamedTuple):
    """Where the share of ranks below each point lies, all points together."""

    points: np.ndarray  # (K,): shares of the range, between 0 and 1
    low: np.ndarray  # (K,)
    high: np.ndarray  # (K,)


def points(num_ranks: int, num_sets: int) -> np.ndarray:
    """The ranks at which the distribution function is looked at, of 0, ..., num_ranks - 1.

    >>> points(4, 200).tolist()
    [1, 2, 3]
    """
    num = min(POINTS, num_ranks, max(num_sets, 2))
    return np.unique(np.round(np.linspace(0, num_ranks, num + 1)).astype(int))[1:-1]


def below(ranks: np.ndarray, at: np.ndarray) -> np.ndarray:
    """How many of the ranks (..., S) are below each point, (..., K)."""
    ordered = np.sort(ranks, axis=-1)
    flat = ordered.reshape(-1, ordered.shape[-1])
    found = np.array([np.searchsorted(row, at) for row in flat])
    return found.reshape(*ordered.shape[:-1], len(at))


def p_value(ranks: np.ndarray, num_ranks: int) -> float:
    """Of uniformity: the share of sets of uniform ranks that are at least as odd.

    >>> p_value(np.arange(200) % 100, 100) > 0.5, p_value(np.arange(200) % 50, 100) < 0.001
    (True, True)
    """
    at = points(num_ranks, len(ranks))
    found = _oddest(below(ranks, at), _tails(len(ranks), num_ranks))
    return float((1 + np.sum(_null(len(ranks), num_ranks) <= found * (1 + 1e-9))) / (1 + SETS))


def band(num_sets: int, num_ranks: int, alpha: float = 0.05) -> Band:
    """Which holds the distribution function of uniform ranks with probability 1 - alpha."""
    share = points(num_ranks, num_sets) / num_ranks
    gamma = np.quantile(_null(num_sets, num_ranks), alpha, method="lower")
    low, high = binom.ppf(gamma / 2, num_sets, share), binom.ppf(1 - gamma / 2, num_sets, share)
    return Band(share, low / num_sets, high / num_sets)


@lru_cache(maxsize=8)
def _tails(num_sets: int, num_ranks: int) -> np.ndarray:
    """The two-sided tail probability of each number at each point, (K, S + 1)."""
    share, numbers = points(num_ranks, num_sets)[:, None] / num_ranks, np.arange(num_sets + 1)
    return 2 * np.minimum(binom.cdf(numbers, num_sets, share), binom.sf(numbers - 1, num_sets, share))


def _oddest(numbers: np.ndarray, tails: np.ndarray) -> np.ndarray:
    return np.min(tails[np.arange(len(tails)), numbers], axis=-1)


@lru_cache(maxsize=8)
def _null(num_sets: int, num_ranks: int) -> np.ndarray:
    """The statistic of sets of uniform ranks, (SETS,); the same ones each time."""
    draws, at, tails = np.random.default_rng(0), points(num_ranks, num_sets), _tails(num_sets, num_ranks)
    chances = np.diff(np.concatenate([[0], at, [num_ranks]])) / num_ranks
    numbers = np.cumsum(draws.multinomial(num_sets, chances, SETS), axis=1)[:, :-1]
    return _oddest(numbers, tails)
