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

Array = jax.Array


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


def whitened_moments(
    draws: Float[Array, "l d"], gradients: Float[Array, "l d"]
) -> tuple[Float[Array, " d"], Float[Array, "d d"]]:
    r"""Mean and covariance, of a density that is about standard normal but for its place:

    .. math:: \mu = \bar x - \bar g, \qquad V = S + I - \mathrm{sym}(C)

    >>> x = jax.random.normal(jax.random.key(0), (5, 2)) + 3.0
    >>> mean, cov = whitened_moments(x, x - 3.0)  # few draws, but exact
    >>> bool(jnp.allclose(mean, 3.0, atol=1e-5) and jnp.allclose(cov, jnp.eye(2), atol=1e-5))
    True
    """
    cross = slope(draws, gradients)
    spread = slope(draws, draws)
    mean = jnp.mean(draws - gradients, axis=0)
    return mean, spread + jnp.eye(draws.shape[1]) - 0.5 * (cross + cross.T)
