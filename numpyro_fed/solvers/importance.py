r"""Moments by importance sampling on fixed points: EP's default in few dimensions.

With the weights :math:`W_s` of :mod:`numpyro_fed.solvers.weighted`, scaled to add up to one,

.. math:: \tilde m = \sum_s W_s z_s, \quad \tilde C = \sum_s W_s (z_s - \tilde m)(z_s - \tilde m)^\top
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from numpyro_fed.normal import affine
from numpyro_fed.normal.families import Family
from numpyro_fed.normal.points import enough_points, stable_step
from numpyro_fed.solvers.weighted import Found, Seen, Weighted

Array = jax.Array
FEWEST = 512


@dataclass(frozen=True)
class Importance(Weighted):
    """Importance sampling on ``num_points`` fixed points (by default as many as a full step needs to be stable)."""

    name = "importance"
    most_dims = 20

    def points(self, d: int, correlations: bool) -> int:
        least = FEWEST if d > 1 else FEWEST // 4
        return max(least, enough_points(d, correlations)) if self.num_points is None else self.num_points

    def step(self, d: int, family: Family) -> float:
        full = family.kind == "full"
        return stable_step(d, self.points(d, full), full)

    def moments(self, eps: Array, seen: Seen) -> Found:
        d = eps.shape[1]
        weight = jax.nn.softmax(seen.log_w)
        ess = 1 / jnp.sum(weight**2)
        mean = weight @ eps
        centred = eps - mean
        cov = (weight[:, None] * centred).T @ centred
        # few effective points make a covariance that is too small in most directions
        few = jnp.clip(1 - ess / (4.0 * d), 0.0, 1.0)
        cov = (1 - few) * cov + few * jnp.eye(d)
        return Found(mean, affine.root_of(cov), ess, ess >= 2 * d)
