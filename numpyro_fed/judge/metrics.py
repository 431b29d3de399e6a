"""Measures of predicted classes, from probabilities and labels, whatever these come from.

>>> probs, labels = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]), np.array([0, 1, 1])
>>> round(accuracy(probs, labels), 3), round(log_likelihood(probs, labels), 3), round(ece(probs, labels), 3)
(0.667, -0.415, 0.3)
"""

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from numpyro_fed.checks import check_count


def accuracy(probs: ArrayLike, labels: ArrayLike) -> float:
    """The share of labels that are the most probable class.

    Args:
        probs: class probabilities, (..., K); or of labels 0 and 1 the probability of 1, (...).
        labels: ints from 0 to K - 1, (...).

    >>> accuracy([0.9, 0.2, 0.6], [1, 0, 0])
    0.6666666666666666
    """
    probs, labels = checked(probs, labels)
    return float(np.mean(np.argmax(probs, axis=1) == labels))


def log_likelihood(probs: ArrayLike, labels: ArrayLike) -> float:
    """The mean logarithm of the labels' probabilities; arguments as for :func:`accuracy`.

    >>> round(log_likelihood([[0.5, 0.25, 0.25]], [1]), 4)  # log 0.25
    -1.3863
    """
    probs, labels = checked(probs, labels)
    with np.errstate(divide="ignore"):  # a label of probability zero: minus infinity
        return float(np.mean(np.log(np.take_along_axis(probs, labels[:, None], axis=1))))


def ece(probs: ArrayLike, labels: ArrayLike, num_bins: int = 15) -> float:
    r"""Expected calibration error: how far confidence is from accuracy.

    .. math::

        \mathrm{ECE} = \sum_b \frac{n_b}{n} \left| \mathrm{accuracy}_b - \mathrm{confidence}_b \right|

    Confidence is the largest class probability; bins are :func:`reliability`'s. Arguments as for :func:`accuracy`.

    >>> round(ece([0.9, 0.8, 0.7, 0.6], [1, 1, 1, 0], num_bins=2), 3)  # 3 of 4 right, with a confidence of 0.75
    0.0

    Reference:
        Guo, Pleiss, Sun and Weinberger (2017), On calibration of modern neural networks.
    """
    bins = reliability(probs, labels, num_bins)
    gap = (bins["accuracy"] - bins["confidence"]).abs()
    return float((bins["count"] * gap).sum() / bins["count"].sum())


def reliability(probs: ArrayLike, labels: ArrayLike, num_bins: int = 15) -> pd.DataFrame:
    """The reliability diagram as a table: accuracy against confidence, bin by bin.

    Bins have equal width and contain their upper ends. Arguments as for :func:`accuracy`.

    Returns:
        A DataFrame, one row a bin: its ends ``lower`` and ``upper``, ``confidence`` and ``accuracy`` (means of its
        observations, NaN where there are none) and their ``count``.

    Example:
        >>> reliability([0.9, 0.8, 0.3], [1, 0, 0], num_bins=4)
           lower  upper  confidence  accuracy  count
        0   0.00   0.25         NaN       NaN      0
        1   0.25   0.50         NaN       NaN      0
        2   0.50   0.75        0.70       1.0      1
        3   0.75   1.00        0.85       0.5      2
        >>> axes = reliability([0.9, 0.8, 0.3], [1, 0, 0]).plot("confidence", "accuracy", marker="o")
    """
    check_count("num_bins", num_bins)
    probs, labels = checked(probs, labels)
    edges = np.linspace(0, 1, num_bins + 1)
    confidence, right = np.max(probs, axis=1), np.argmax(probs, axis=1) == labels
    of = np.searchsorted(edges[1:-1], confidence, side="left")
    count = np.bincount(of, minlength=num_bins)
    with np.errstate(invalid="ignore"):  # empty bins
        means = {
            name: np.bincount(of, weights=values, minlength=num_bins) / count
            for name, values in (("confidence", confidence), ("accuracy", right))
        }
    return pd.DataFrame({"lower": edges[:-1], "upper": edges[1:], **means, "count": count})


def checked(probs: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (n, K) and int labels (n,)."""
    probs, given = np.asarray(probs, np.float64), np.asarray(labels)
    if probs.shape == given.shape:
        probs = np.stack([1 - probs, probs], axis=-1)
    elif probs.shape[:-1] != given.shape or not probs.ndim:
        raise ValueError(
            f"probs has shape {probs.shape} and labels {given.shape}: give probs one more axis, of the classes, or for "
            "labels 0 and 1 the same shape"
        )
    if not given.size:
        raise ValueError("there are no labels: give at least one")
    if not np.all(probs >= 0) or not np.all(np.abs(probs.sum(axis=-1) - 1) < 1e-3):  # as close as float32 comes
        raise ValueError("probs must be at least 0 and add up to 1; of logits, pass jax.nn.softmax(logits)")
    with np.errstate(invalid="ignore"):  # NaN is no int
        found = given.astype(np.int64)
    wrong = (found != given) | (found < 0) | (found >= probs.shape[-1])
    if np.any(wrong):
        most = probs.shape[-1] - 1
        raise ValueError(f"labels must be ints from 0 to {most}, one for each class, got {given[wrong].flat[0]}")
    return probs.reshape(-1, probs.shape[-1]), found.reshape(-1)
