r"""Integrals of rows that are normal given the globals, from a few values of their log density.

Where the log density of a row is quadratic in its k locals, its values at 1 + 2k + k (k - 1) / 2 places tell all of it,
and no derivative has to be taken. With locals :math:`\epsilon` that were standardised
(:class:`~numpyro_fed.local.conditional.LocalLaplace`),

.. math:: \varphi(\epsilon) = \log \frac{p(y, z_L(\epsilon) \mid z_G)}{N(z_L(\epsilon))} - \tfrac12 |\epsilon|^2
    = \varphi_0 + g^\top \epsilon - \tfrac12 \epsilon^\top A \epsilon, \qquad
    \log \int p(y, z_L \mid z_G)\, dz_L = \varphi_0 + \tfrac12 g^\top A^{-1} g - \tfrac12 \log |A|

exactly, however far z_G is from where the locals were standardised.

>>> def at(eps):  # of a row with slope (1, 2) and curvatures 2 and 3
...     return jnp.array([1.0, 2.0]) @ eps - 0.5 * jnp.array([2.0, 3.0]) @ eps**2 + 0.5 * eps @ eps
>>> found = in_closed_form(jax.vmap(at)(jnp.asarray(normal_nodes(2)[0]))[:, None])
>>> bool(jnp.isclose(found.log_integral()[0], 1 / 4 + 4 / 6 - jnp.log(6.0) / 2))
True
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from numpyro_fed.normal.matrices import diagonal

Array = jax.Array
AWAY = 3.0  # sds between two nodes: the further, the less do rounded values matter


class Quadratic(NamedTuple):
    """log densities of rows, as polynomials of their standardised locals."""

    value: Float[Array, " rows"]
    slope: Float[Array, "rows k"]
    precision: Float[Array, "rows k k"]

    def log_integral(self) -> Float[Array, " rows"]:
        """Of the density; NaN where it has none."""
        if self.slope.shape[-1] == 1:  # many fewer operations
            slope, precision = self.slope[:, 0], self.precision[:, 0, 0]
            return self.value + 0.5 * (slope**2 / precision - jnp.log(precision))
        root = jnp.linalg.cholesky(self.precision)
        along = jax.lax.linalg.triangular_solve(root, self.slope[..., None], left_side=True, lower=True)[..., 0]
        return self.value + 0.5 * jnp.sum(along**2, axis=-1) - jnp.sum(jnp.log(diagonal(root)), axis=-1)

    def mean(self) -> Float[Array, "rows k"]:
        return jnp.einsum("rij,rj->ri", self.covariance(), self.slope)

    def covariance(self) -> Float[Array, "rows k k"]:
        eye = jnp.broadcast_to(jnp.eye(self.slope.shape[-1], dtype=self.slope.dtype), self.precision.shape)
        root = jnp.linalg.cholesky(self.precision)
        inverse = jax.lax.linalg.triangular_solve(root, eye, left_side=True, lower=True)
        return jnp.swapaxes(inverse, -1, -2) @ inverse


def normal_nodes(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Places at which a quadratic function of k numbers is known: 0, both ways along each, and along every two of them.

    >>> normal_nodes(2)[0].tolist()
    [[0.0, 0.0], [3.0, 0.0], [0.0, 3.0], [-3.0, 0.0], [0.0, -3.0], [3.0, 3.0]]
    """
    eye = np.eye(k)
    both = [eye[i] + eye[j] for i in range(k) for j in range(i)]
    grid = AWAY * np.stack([np.zeros(k), *eye, *(0 - eye), *both])
    return grid, np.zeros(len(grid))


def in_closed_form(log_terms: Float[Array, "nodes rows"]) -> Quadratic:
    """From log p / N at :func:`normal_nodes`; N is the standard normal of the standardised locals."""
    k = next(k for k in range(1, len(log_terms)) if 1 + 2 * k + k * (k - 1) // 2 == len(log_terms))
    grid = normal_nodes(k)[0]
    values = log_terms - jnp.asarray(0.5 * np.sum(grid**2, axis=1), log_terms.dtype)[:, None]
    first, up, down, both = values[0], values[1 : k + 1], values[k + 1 : 2 * k + 1], values[2 * k + 1 :]
    slope = (up - down).T / (2 * AWAY)
    own = (2 * first - up - down).T / AWAY**2
    columns = [[own[:, i] if i == j else own[:, 0] for j in range(k)] for i in range(k)]
    pairs = [(i, j) for i in range(k) for j in range(i)]
    for (i, j), value in zip(pairs, both, strict=True):
        columns[i][j] = columns[j][i] = (up[i] + up[j] - first - value) / AWAY**2
    return Quadratic(first, slope, jnp.stack([jnp.stack(row, axis=-1) for row in columns], axis=-2))
