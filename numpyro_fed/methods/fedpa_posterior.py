"""A normal posterior from the silos' precisions, in few dimensions and in many."""

from typing import Any, NamedTuple

import numpy as np

from numpyro_fed.local.walk import Flat

Array = Any
DENSE = 200  # dimensions up to which the posterior keeps every direction, else so many at most


class Posterior(NamedTuple):
    """The normal around the mode, its covariance diag(sds^2) + F'F."""

    sds: Array  # (d,)
    factor: Array  # (r, d)


def dense(
    own: Flat, w: Array, diagonal: np.ndarray, weights: np.ndarray, directions: np.ndarray, prior: bool
) -> tuple[Posterior, tuple[str, ...]]:
    """In few dimensions: every direction."""
    precision = np.diag(diagonal) + directions.T @ (weights[:, None] * directions)
    if prior:
        precision += own.prior_precision(w)
    values, vectors = np.linalg.eigh(0.5 * (precision + precision.T))
    doubt: tuple[str, ...] = ()
    if values[0] <= 1e-8 * values[-1]:
        doubt = (
            "the silos' precisions and the prior's add up to a posterior that is flat, or not at a mode, in some "
            "direction: run more rounds, pass num_samples= (more), or give the parameters a prior that is narrower",
        )
    values = np.maximum(values, 1e-8 * values[-1])
    return Posterior(np.zeros(own.size), (vectors / np.sqrt(values)).T), doubt


def low_rank(
    own: Flat, w: Array, diagonal: np.ndarray, weights: np.ndarray, directions: np.ndarray, prior: bool
) -> tuple[Posterior, tuple[str, ...]]:
    r"""In many: with D diagonal, :math:`(D - W'W)^{-1} = D^{-1} + D^{-1} W' (I - W D^{-1} W')^{-1} W D^{-1}`."""
    if prior:
        diagonal = diagonal + np.maximum(own.prior_curvature(w), 0.0)
    factor = np.sqrt(np.maximum(-weights, 0.0))[:, None] * directions
    scaled = factor / diagonal
    values, vectors = np.linalg.eigh(scaled @ factor.T)
    values, vectors = values[::-1][:DENSE], vectors[:, ::-1][:, :DENSE]  # those left out would add variance
    values = np.clip(values, 0.0, 1 - 1e-8)
    return Posterior(1 / np.sqrt(diagonal), (vectors / np.sqrt(1 - values)).T @ scaled), ()
