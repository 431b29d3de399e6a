r"""Moments by importance sampling on fixed points: EP's default in few dimensions.

With points :math:`e_s` (:mod:`numpyro_fed.normal.points`) placed by the proposal, :math:`z_s = m + R e_s`,

.. math::

    \log w_s = \log t_{\setminus j}(z_s) + \log f_j(z_s) - \log N(z_s; m, R R^\top), \qquad
    \tilde m = \sum_s W_s z_s, \quad \tilde C = \sum_s W_s (z_s - \tilde m)(z_s - \tilde m)^\top

The proposal is the posterior as broadcast, whose distance from the tilted distribution is what is sought. As long as
not every silo has been heard the posterior says little, and the proposal is the Laplace approximation of the tilted
distribution. A proposal with few effective points is replaced by what it found, a few times.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal import affine, lapack
from numpyro_fed.normal.families import Family, Natural
from numpyro_fed.normal.points import enough_points, normal_points, stable_step
from numpyro_fed.precision import in_x64, to_user_dtype, tree_where
from numpyro_fed.solvers import newton
from numpyro_fed.solvers.base import BaseSolver, Projection, Tilted

Array = jax.Array
TRIES = 5
ENOUGH = 0.5  # of the points effective
BARELY = 0.1  # enough once settled: to change the proposal then would make the map jump
INFLATION = 1.3  # of the covariance of a proposal that follows a bad one
FEWEST = 512


@dataclass(frozen=True)
class Importance(BaseSolver):
    """Importance sampling on ``num_points`` fixed points (by default as many as a full step needs to be stable)."""

    num_points: int | None = None
    name = "importance"
    most_dims = 20

    def points(self, d: int, correlations: bool) -> int:
        least = FEWEST if d > 1 else FEWEST // 4
        return max(least, enough_points(d, correlations)) if self.num_points is None else self.num_points

    def step(self, d: int, family: Family) -> float:
        full = family.kind == "full"
        return stable_step(d, self.points(d, full), full)

    def solve(self, key: Array, tilted: Tilted, factor: Factor, frame: Any, solver_state: Any) -> Projection:
        family, d = tilted.family, tilted.q.shift.shape[0]
        full = family.kind == "full"
        eps = jnp.asarray(normal_points(d, self.points(d, full)), jnp.zeros(()).dtype)
        cavity = family.dense(tilted.cavity)
        nodes = factor.nodes(None)
        # a family that cannot keep the tilted's correlations leaves that to the silo
        known = None if full else tree_where(tilted.warming_up, affine.coordinates(family, tilted.q), solver_state)
        begin, frame = newton.begin(tilted, factor, frame, known)
        least = 1 if full and tilted.q_is_close else 3  # where q is not what it should be, the proposal has to be found

        enough = jnp.where(tilted.warming_up, ENOUGH, BARELY)

        def unfinished(carry: _Try) -> Array:
            return (carry.tries < TRIES) & ((carry.tries < least) | (carry.ess < enough))

        def attempt(carry: _Try) -> _Try:
            again = (carry.tries > 0) & (carry.ess < enough)
            at = affine.compose(carry.at, jnp.zeros(d), jnp.where(again, INFLATION**0.5, 1.0) * jnp.eye(d))
            frame = factor.refit(to_user_dtype(at.mean), carry.frame, newton.LOCAL_STEPS)
            quadratic = affine.pull_back(at, cavity)
            places = affine.to_z(at, eps)
            log_f = jax.lax.map(lambda z: factor.log_f(z, frame, nodes), places, batch_size=factor.batch_of(len(eps)))
            log_w = jax.vmap(lambda x: quadratic(x))(eps) + log_f + 0.5 * jnp.sum(eps**2, axis=1)
            log_w = jnp.where(jnp.isfinite(log_w), log_w, -jnp.inf)
            weight = jax.nn.softmax(log_w)
            ess = 1 / jnp.sum(weight**2)
            mean = weight @ eps
            centred = eps - mean
            cov = (weight[:, None] * centred).T @ centred
            # few effective points make a covariance that is too small in most directions
            few = jnp.clip(1 - ess / (4.0 * d), 0.0, 1.0)
            cov = (1 - few) * cov + few * jnp.eye(d)
            found = affine.with_lower_root(affine.compose(at, mean, _root(cov)))
            value = affine.log_evidence(tilted.family, tilted.q, at, cavity, logsumexp(log_w) - np.log(len(eps)))
            return _Try(found, frame, ess / len(eps), value, carry.tries + 1)

        first = _Try(begin, frame, jnp.zeros(()), jnp.zeros(()), jnp.zeros((), int))
        last = jax.lax.while_loop(unfinished, attempt, first)
        ok = last.ess * len(eps) >= 2 * d
        natural = affine.to_family(family, last.at)
        # what failed is not where to begin next time
        again = tree_where(ok, last.at, affine.coordinates(family, tilted.q))
        return Projection(natural, last.value, last.ess, ok, last.frame, solver_state=() if full else again)

    def init_state(self, family: Family, q: Natural) -> Any:
        """Coordinates of the tilted distribution, where the family cannot keep them."""
        return () if family.kind == "full" else affine.coordinates(family, q)


class _Try(NamedTuple):
    at: Any
    frame: Any
    ess: Array
    value: Array
    tries: Array


@in_x64
def _root(cov: Array) -> Array:
    return lapack.cholesky(0.5 * (cov + cov.T))
