r"""Wasserstein barycenters of normal distributions, with which SFVI-Avg averages what the silos found.

The barycenter of :math:`N(\mu_k, \Sigma_k)` with weights :math:`w_k` is normal with mean :math:`\sum_k w_k \mu_k` and a
covariance that solves (eq. 15 of the SFVI paper)

.. math:: \Sigma = \sum_k w_k (\Sigma^{1/2} \Sigma_k \Sigma^{1/2})^{1/2}.

With any roots :math:`\Sigma = A A^\top`, :math:`\Sigma_k = B_k B_k^\top`, the fixed point iteration of Alvarez-Esteban
et al. (2016), :math:`\Sigma \leftarrow \Sigma^{-1/2} (\sum_k w_k (\Sigma^{1/2} \Sigma_k \Sigma^{1/2})^{1/2})^2
\Sigma^{-1/2}`, reads

.. math:: A \leftarrow \sum_k w_k B_k U_k, \qquad U_k \text{ the orthogonal factor of } B_k^\top A = U_k P_k:

turn every root towards :math:`A`, then average. Nothing is squared or inverted, so singular covariances need no special
case and the smallest sds keep their digits. That is why neither eq. 15 as it stands nor ott (``Bures.barycenter``) is
used here: with five covariances of 50 coordinates whose sds range from 1e-3 to 1e2, sds are wrong by 4e-7 in float32
here, by a factor of 8 with eq. 15 (45 in float64), and ott gives NaN (.8 in float64). At condition number 1e3 all
agree; with d = 200 in float32 this takes 1.5 s, eq. 15 0.4 s and ott 3.6 s on two cores.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax.linalg import SvdAlgorithm, svd
from jaxtyping import Float

Array = jax.Array
MAX_ITERATIONS = 200  # covariances of full rank take 10 to 60; singular ones can be slow
ROUNDING = 32  # times the spacing of floats: a few times the size at which changes stop shrinking
TOLERANCE = 1e-10  # of an sd: in float64 nobody needs more


class Barycenter(NamedTuple):
    """The barycenter of normals with full covariances."""

    mean: Array  # (d,)
    covariance: Array  # (d, d)
    residual: Array  # ||S - sum_k w_k (S^1/2 S_k S^1/2)^1/2|| / ||S||, Frobenius norms, of S = covariance


class DiagonalBarycenter(NamedTuple):
    """The barycenter of normals with diagonal covariances: exact."""

    mean: Array  # (d,)
    sds: Array  # (d,)
    residual: Array  # 0


def barycenter(
    means: Float[Array, "J d"], covariances: Float[Array, "J d d"], weights: Float[Array, " J"] | None = None
) -> Barycenter:
    """The W2 barycenter of J normals.

    Args:
        means: (J, d).
        covariances: (J, d, d), positive semi-definite; singular ones are fine.
        weights: (J,), not negative; by default equal. They are normalised here.

    Returns:
        The barycenter. Check its ``residual``: about 1e-6 in float32 when the iteration has converged. Where all
        covariances are singular there may be several barycenters; this is one of them.

    Example:
        >>> import jax.numpy as jnp
        >>> found = barycenter(jnp.array([[0.0], [2.0]]), jnp.array([[[1.0]], [[9.0]]]))
        >>> found.mean.tolist(), found.covariance.tolist()  # sds are averaged: 1 and 3 to 2
        ([1.0], [[4.0]])
    """
    weights = _normalised(weights, means)
    average = jnp.einsum("k,kij->ij", weights, covariances)
    # From large variances to small: triangular roots are then graded, and the svd keeps the digits of small sds.
    order = jnp.argsort(-jnp.diagonal(average))
    back = jnp.argsort(order)
    roots = _root(covariances[:, order][:, :, order])

    def step(state: tuple) -> tuple:
        _, _, root, _, i = state
        moved = jnp.einsum("k,kij,kjl->il", weights, roots, _turns(roots, root))
        difference = moved - root
        residual = jnp.linalg.norm(difference.T @ root) / _nonzero(jnp.linalg.norm(root.T @ root))
        # The residual does not see small sds, so convergence is judged coordinate by coordinate.
        change = jnp.linalg.norm(difference, axis=1) / _nonzero(jnp.linalg.norm(root, axis=1))
        return root, residual, _triangular(moved), jnp.max(change, initial=0), i + 1

    def moving(state: tuple) -> Array:
        _, _, root, change, i = state
        return (change > max(TOLERANCE, ROUNDING * jnp.finfo(root.dtype).eps)) & (i < MAX_ITERATIONS)

    first = _root(average[order][:, order])
    infinite = jnp.full((), jnp.inf, first.dtype)
    root, residual, *_ = jax.lax.while_loop(moving, step, (first, infinite, first, infinite, jnp.zeros((), jnp.int32)))
    root = root[back]
    return Barycenter(weights @ means, root @ root.T, residual)


def diagonal_barycenter(
    means: Float[Array, "J d"], sds: Float[Array, "J d"], weights: Float[Array, " J"] | None = None
) -> DiagonalBarycenter:
    """The W2 barycenter of J normals with independent coordinates: means and sds, both (J, d), are averaged.

    Example:
        >>> import jax.numpy as jnp
        >>> diagonal_barycenter(jnp.zeros((2, 1)), jnp.array([[1.0], [3.0]]), jnp.array([3.0, 1.0])).sds.tolist()
        [1.5]
    """
    weights = _normalised(weights, means)
    sds = weights @ sds
    return DiagonalBarycenter(weights @ means, sds, jnp.zeros((), sds.dtype))


def w2(mean_a: Array, covariance_a: Array, mean_b: Array, covariance_b: Array) -> Array:
    r"""The W2 distance of two normals, :math:`(|\mu_a - \mu_b|^2 + \min_U |A - B U|^2)^{1/2}`.

    The textbook form, the trace of :math:`\Sigma_a + \Sigma_b - 2 (\Sigma_a^{1/2} \Sigma_b \Sigma_a^{1/2})^{1/2}`,
    subtracts numbers that nearly agree; this one does not.

    Example:
        >>> import jax.numpy as jnp
        >>> w2(jnp.array([0.0]), jnp.array([[1.0]]), jnp.array([3.0]), jnp.array([[25.0]])).item()  # 3^2 + 4^2 = 5^2
        5.0
    """
    order = jnp.argsort(-jnp.diagonal(covariance_a + covariance_b))
    a, b = (_root(covariance[order][:, order]) for covariance in (covariance_a, covariance_b))
    return jnp.sqrt(jnp.sum((mean_a - mean_b) ** 2) + jnp.sum((a - b @ _turns(b, a)) ** 2))


def w2_diagonal(mean_a: Array, sds_a: Array, mean_b: Array, sds_b: Array) -> Array:
    """The W2 distance of two normals with independent coordinates."""
    return jnp.sqrt(jnp.sum((mean_a - mean_b) ** 2) + jnp.sum((sds_a - sds_b) ** 2))


def _normalised(weights: Array | None, means: Array) -> Array:
    weights = jnp.ones(means.shape[0], means.dtype) if weights is None else jnp.asarray(weights, means.dtype)
    return weights / jnp.sum(weights)


def _nonzero(value: Array) -> Array:
    return jnp.where(value == 0, 1, value)


def _root(covariance: Array) -> Array:
    """A lower triangular B with B B' = covariance. By the correlations, so that small sds keep their digits."""
    sds = jnp.sqrt(jnp.maximum(jnp.diagonal(covariance, axis1=-2, axis2=-1), 0))
    inverse = jnp.where(sds > 0, 1 / _nonzero(sds), 0)
    values, vectors = jnp.linalg.eigh(inverse[..., :, None] * covariance * inverse[..., None, :])
    return _triangular(sds[..., :, None] * vectors * jnp.sqrt(jnp.maximum(values, 0))[..., None, :])


def _triangular(root: Array) -> Array:
    """Another root of the same covariance, lower triangular."""
    return jnp.linalg.qr(root.mT, mode="r").mT


def _turns(roots: Array, root: Array) -> Array:
    """The orthogonal factors U of B' A = U P, for one B or several.

    By QR iteration, which keeps small singular values of a graded matrix; the faster divide and conquer does not. TPUs
    have neither, only an algorithm of their own.
    """

    def turn(product: Array, algorithm: SvdAlgorithm = SvdAlgorithm.QR) -> Array:
        left, _, right = svd(product, full_matrices=False, algorithm=algorithm)
        return left @ right

    tpu = partial(turn, algorithm=SvdAlgorithm.DEFAULT)
    return jax.lax.platform_dependent(roots.mT @ root, tpu=tpu, default=turn)
