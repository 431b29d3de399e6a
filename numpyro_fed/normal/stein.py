r"""Stein's identity: moments from draws, without most of their Monte Carlo error.

For draws x of a density p with mean :math:`\mu`, and :math:`g = -\nabla \log p(x)`,

.. math:: E\, g = 0, \qquad E\, g (x - \mu)^\top = I.

So the mean :math:`\bar g` over draws and :math:`C - I`, where C is their covariance of g and x, are nothing but Monte
Carlo error; and where p is normal with precision P they are that of the draws' own moments, for then
:math:`\bar g = P (\bar x - \mu)` and :math:`C = P S`. Adding them takes it away: exactly there, mostly elsewhere.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from numpyro_fed.normal import lapack
from numpyro_fed.normal.matrices import diagonal
from numpyro_fed.precision import in_x64

Array = jax.Array
TINY = 1e-14  # float64's rounding, with room


def slope(draws: Float[Array, "l d"], gradients: Float[Array, "l d"], along: Float[Array, " d"] | None = None) -> Array:
    """C, the covariance of gradients and draws, (d, d), which tends to I; or C times a vector, in O(l d)."""
    away = draws - jnp.mean(draws, axis=0, keepdims=True)
    steep = gradients - jnp.mean(gradients, axis=0, keepdims=True)
    return steep.T @ (away if along is None else away @ along) / (draws.shape[0] - 1)


def corrected(
    estimate: Array, draws: Float[Array, "l d"], gradients: Float[Array, "l d"], share: Float[Array, ""] | float = 1.0
) -> Array:
    """A precision times something, [share C + (1 - share) I] times what the draws alone say of it.

    Args:
        estimate: a vector or a matrix, :math:`S^{-1} a`; then :math:`C S^{-1} a = P a` where p is normal.
        share: of the draws' covariance in the one that was inverted; the rest was known, and has no error.
    """
    turned = slope(draws, gradients, estimate) if estimate.ndim == 1 else slope(draws, gradients) @ estimate
    return share * turned + (1 - share) * estimate


def moments(
    draws: Float[Array, "l d"], gradients: Float[Array, "l d"]
) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
    r"""Mean and covariance, what gradients explain of the draws taken out. Float64.

    With :math:`B = C^\top G^{-1}`, G the covariance of the gradients, which regresses draws on gradients,

    .. math:: \mu = \bar x - B \bar g, \qquad V = \mathrm{sym}\, B + \tfrac{l - 1}{l - 1 - d} (S - B C).

    Both tend to the draws' own moments, as C tends to I; B makes their error least. Where p is normal with precision P,
    :math:`B = P^{-1}` and the rest, the covariance of what B leaves of the draws, is 0: so from more than d draws both
    are exact, wherever these lie and however they are correlated. Gradients with heavy tails explain little: B is then
    small, and the draws count. An affine map of x maps the moments.

    >>> x = jax.random.normal(jax.random.key(0), (5, 2))
    >>> mean, cov = moments(x, 4.0 * (x - 3.0))  # few draws, far off, but exact
    >>> [round(float(number), 3) for number in (*mean, cov[0, 0], cov[1, 1])]
    [3.0, 3.0, 0.25, 0.25]
    """
    num, d = draws.shape
    if num < d + 2:
        raise ValueError(f"{num} draws do not determine moments in {d} dimensions: draw at least {d + 2}")

    @in_x64
    def run(draws: Array, gradients: Array) -> tuple[Array, Array]:
        cross, steep = slope(draws, gradients), slope(gradients, gradients)
        scale = jax.lax.rsqrt(jnp.maximum(diagonal(steep), TINY))
        unit = scale[:, None] * steep * scale[None] + TINY * jnp.eye(d)  # gradients of a flat direction are all equal
        regression = (scale[:, None] * jnp.linalg.solve(unit, scale[:, None] * cross)).T
        left = slope(draws, draws) - regression @ cross
        cov = 0.5 * (regression + regression.T) + (num - 1) / (num - 1 - d) * left
        return jnp.mean(draws, axis=0) - regression @ jnp.mean(gradients, axis=0), 0.5 * (cov + cov.T)

    return run(draws, gradients)


def regressed(
    points: Float[Array, "l d"], gradients: Float[Array, "l d"], weight: Float[Array, " l"]
) -> tuple[Float[Array, " d"], Float[Array, " d"], Float[Array, "d d"]]:
    r"""Centre, slope there and precision of p, from points that are weighted to stand for draws of p. Float64.

    Gradients are regressed on points, :math:`P = \mathrm{sym}\, C_W(g, x) C_W(x, x)^{-1}`, and p's mean is where they
    are zero, :math:`\bar x - P^{-1} \bar g`. Where p is normal that and P are exact, whatever the weights.

    Args:
        weight: not negative, adding up to one.

    >>> x = jax.random.normal(jax.random.key(0), (8, 2))
    >>> centre, slope, precision = jax.device_get(regressed(x, 4.0 * (x - 3.0), jnp.full(8, 1 / 8)))
    >>> [round(float(number), 3) for number in (*(centre - slope / 4), precision[0, 0], precision[1, 1])]
    [3.0, 3.0, 4.0, 4.0]
    """

    @in_x64
    def run(points: Array, gradients: Array, weight: Array) -> tuple[Array, Array, Array]:
        weight = weight / jnp.sum(weight)
        centre, level = weight @ points, weight @ gradients
        away = points - centre
        spread = (weight[:, None] * away).T @ away + TINY * jnp.eye(points.shape[1])
        cross = (weight[:, None] * away).T @ (gradients - level)
        root = lapack.cholesky(spread)
        found = lapack.solve_lower_transposed(root, lapack.solve_lower(root, cross))
        return centre, level, 0.5 * (found + found.T)

    return run(points, gradients, weight)
