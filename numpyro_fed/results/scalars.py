"""Scalars of sites, by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def scalars(draws: Mapping[str, Any], batch: int = 1) -> dict[str, np.ndarray]:
    """The scalars of ``{site: draws}``, named ``beta[0]``, ``L[0, 1]``; the first ``batch`` axes are draws.

    >>> list(scalars({"mu": np.zeros(5), "L": np.zeros((5, 1, 2))}))
    ['mu', 'L[0, 0]', 'L[0, 1]']
    """
    out = {}
    for name, value in draws.items():
        value = np.asarray(value)
        for index in np.ndindex(*value.shape[batch:]):
            label = f"{name}[{', '.join(map(str, index))}]" if index else name
            out[label] = value[(slice(None),) * batch + index]
    return out


def mean_loss(losses: Any) -> float:
    """Of rounds, without those in which nothing moved; NaN where there are no others.

    >>> mean_loss([1.0, float("nan"), 2.0])
    1.5
    """
    known = np.asarray(losses, np.float64)
    known = known[~np.isnan(known)]
    return float(np.mean(known)) if known.size else float("nan")
