r"""Moments by importance sampling on fixed points and by the gradients there: EP's default from 21 to 500 dimensions.

With weights W and :math:`g = -\nabla \log` of the tilted density at the points, both in coordinates x of the proposal,
the gradients are regressed on the points,

.. math:: P = \mathrm{sym}\, C_W(g, x)\, C_W(x, x)^{-1}, \qquad \tilde m = \bar x - P^{-1} \bar g

where means and covariances are weighted. By Stein's identity :math:`C(g, x) = I` and :math:`E g = 0` under the tilted
distribution itself, so these are its precision and its mean; and where that is normal both are exact, whatever points
and weights are. So what the points must average out is only how far the tilted distribution is from a normal, which for
one silo of many is little: a few points a dimension are enough, where importance sampling alone would need d squared.

Weights are :math:`w^\beta`. With :math:`\beta = 1` the moments are those of EP; with :math:`\beta = 0` the formulas
above are a natural-gradient step on KL(q || tilted), which needs no weights. Where few points would be effective,
:math:`\beta` is made as small as it must be.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from numpyro_fed.normal import lapack, stein
from numpyro_fed.normal.matrices import diagonal
from numpyro_fed.precision import in_x64
from numpyro_fed.solvers.weighted import Found, Seen, Weighted

Array = jax.Array
FEWEST, EACH = 256, 4  # points, in all and for each dimension
NEEDED, NEEDED_EACH = 0.2, 1.5  # effective: a share of the points, and so many for each dimension
HALVINGS = 12  # of the interval in which beta lies
MOST = 50.0  # variances of the tilted distribution in those of the proposal
MIXED = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)  # shares of the proposal's precision
FAR = 3.0  # sds by which its mean is moved at once


@dataclass(frozen=True)
class Stein(Weighted):
    """Importance sampling with gradients on ``num_points`` fixed points, by default at least four a dimension."""

    name = "stein"
    gradients = True
    enough = (0.2, 0.0)  # what is not in the weights is in the power to which they are taken
    most_dims = 500

    def points(self, d: int, correlations: bool) -> int:
        if self.num_points is not None:
            return self.num_points
        num = FEWEST
        while num < EACH * d:
            num *= 2
        return num

    def moments(self, eps: Array, seen: Seen) -> Found:
        num, d = eps.shape
        log_w = seen.log_w - jnp.max(seen.log_w)
        weight = jax.nn.softmax(_power(log_w, max(NEEDED * num, NEEDED_EACH * d)) * log_w)
        mean, root = _within(*stein.regressed(eps, seen.downhill, weight))
        fine = jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(root))
        return Found(mean, root, effective(jax.nn.softmax(log_w)), fine)


@in_x64
def _within(centre: Array, slope: Array, precision: Array) -> tuple[Array, Array]:
    """Mean and a lower triangular root of the covariance, not too far from the proposal's.

    Where the tilted distribution is not convex its regressed precision need not be positive: it is then mixed with the
    proposal's, which is I, as much as makes it so, and what is left is done in the rounds that follow.
    """
    d = len(slope)
    mixed = jnp.stack([(1 - share) * precision + share * jnp.eye(d) for share in MIXED])
    roots = jax.vmap(lapack.cholesky)(mixed[:, ::-1, ::-1])  # P = U U' with U upper triangular, when turned back
    fine = jnp.min(diagonal(roots), axis=1) ** 2 > 1 / MOST  # NaN compares as False
    upper = roots[jnp.argmax(fine)][::-1, ::-1]
    root = lapack.solve_upper(upper, jnp.eye(d)).T
    along = root.T @ slope
    far = jnp.sqrt(jnp.mean(along**2))  # in the found normal's own sds, a coordinate
    return centre - root @ along * jnp.minimum(1.0, FAR / jnp.maximum(far, FAR)), root


def effective(weight: Array) -> Array:
    return 1 / jnp.sum(weight**2)


def _power(log_w: Array, needed: float) -> Array:
    """The largest beta in [0, 1] with so many effective points, to a 4,000th."""

    def halve(_: int, between: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = between
        middle = 0.5 * (low + high)
        fine = effective(jax.nn.softmax(middle * log_w)) >= needed
        return jnp.where(fine, middle, low), jnp.where(fine, high, middle)

    zero, one = jnp.zeros((), log_w.dtype), jnp.ones((), log_w.dtype)
    low, _ = jax.lax.fori_loop(0, HALVINGS, halve, (zero, one))
    return jnp.where(effective(jax.nn.softmax(log_w)) >= needed, one, low)
