r"""Integrals of rows that are normal given the globals, from a few values of their log density.

Where the log density of a row is quadratic in its k locals, its values at 1 + 2k + k (k - 1) / 2 places tell all of it,
and no derivative has to be taken. With locals :math:`\epsilon` that were standardised
(:class:`~numpyro_fed.local.conditional.LocalLaplace`),

.. math:: \varphi(\epsilon) = \log \frac{p(y, z_L(\epsilon) \mid z_G)}{N(z_L(\epsilon))} - \tfrac12 |\epsilon|^2
    = \varphi_0 + g^\top \epsilon - \tfrac12 \epsilon^\top A \epsilon, \qquad
    \log \int p(y, z_L \mid z_G)\, dz_L = \varphi(A^{-1} g) - \tfrac12 \log |A|

exactly, however far z_G is from where the locals were standardised. The value at the mode :math:`A^{-1} g` is asked
for: :math:`\varphi_0 + \tfrac12 g^\top A^{-1} g` is the same, but far away a difference of numbers so large that what
is left of it in float32 is rounding, and that may be hundreds of nats too many.

>>> def at(eps):  # of a row with slope (1, 2) and curvatures 2 and 3
...     return jnp.array([1.0, 2.0]) @ eps - 0.5 * jnp.array([2.0, 3.0]) @ eps**2 + 0.5 * eps @ eps
>>> found = in_closed_form(jax.vmap(at)(jnp.asarray(normal_nodes(2)[0]))[:, None])
>>> mode = found.mean()[0]
>>> bool(jnp.allclose(mode, jnp.array([1 / 2, 2 / 3])))
True
>>> bool(jnp.isclose(found.log_integral(at(mode) - mode @ mode / 2)[0], 1 / 4 + 4 / 6 - jnp.log(6.0) / 2))
True
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from numpyro_fed.host import shapes_of
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.degree import degree
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.matrices import diagonal

Array = jax.Array
MOST_NORMAL = 6  # dimensions of a row that is integrated in closed form
AWAY = 3.0  # sds between two nodes: the further, the less do rounded values matter


class Quadratic(NamedTuple):
    """log densities of rows, as polynomials of their standardised locals."""

    slope: Float[Array, "rows k"]
    precision: Float[Array, "rows k k"]

    def log_integral(self, at_mode: Float[Array, " rows"]) -> Float[Array, " rows"]:
        """Of the density, whose logarithm at the mode is given; NaN where it has none."""
        if self.slope.shape[-1] == 1:  # many fewer operations
            precision = self.precision[:, 0, 0]
            return at_mode - 0.5 * jnp.log(jnp.where(precision > 0, precision, jnp.nan))
        return at_mode - jnp.sum(jnp.log(diagonal(jnp.linalg.cholesky(self.precision))), axis=-1)

    def mean(self) -> Float[Array, "rows k"]:
        """And mode."""
        return jnp.einsum("rij,rj->ri", self.covariance(), self.slope)

    def covariance(self) -> Float[Array, "rows k k"]:
        if self.slope.shape[-1] == 1:
            return 1 / self.precision
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
    """From log p / N at :func:`normal_nodes`; N is the standard normal of the standardised locals.

    Its own curvature is added at the end: of terms of no row, and of padded ones, nothing else is left.
    """
    k = next(k for k in range(1, len(log_terms)) if 1 + 2 * k + k * (k - 1) // 2 == len(log_terms))
    first, up, down, both = log_terms[0], log_terms[1 : k + 1], log_terms[k + 1 : 2 * k + 1], log_terms[2 * k + 1 :]
    entries = {(i, i): 1 + (first - up[i] + first - down[i]) / AWAY**2 for i in range(k)}
    pairs = [(i, j) for i in range(k) for j in range(i)]
    for (a, b), value in zip(pairs, both, strict=True):
        entries[a, b] = entries[b, a] = (up[a] - first + up[b] - value) / AWAY**2
    rows = [jnp.stack([entries[i, j] for j in range(k)], axis=-1) for i in range(k)]
    return Quadratic((up - down).T / (2 * AWAY), jnp.stack(rows, axis=-2))


def normal_rows(split: SplitModel) -> bool:
    """Whether locals are normal given the globals: the log density of all terms is quadratic in them."""

    def found() -> bool:
        terms = lambda own, z: split.evaluate(z, own, split.theta, split.dummy()).terms
        return degree(terms, *latent_shapes(split)) <= 2

    if not 0 < max((group.size for group in split.groups), default=0) <= MOST_NORMAL:
        return False
    return remembered(found, "normal rows", ByIdentity(split))


def latent_shapes(split: SplitModel) -> tuple[dict[str, Any], Any]:
    """Of locals and globals."""
    return shapes_of(lambda: (split.zeros_local(split.dummy().mask), jnp.zeros(split.dim)))
