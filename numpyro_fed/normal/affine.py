r"""Coordinates in which a tilted distribution is about standard normal.

.. math:: z = m + R x

Natural parameters are float64 and may be badly conditioned; in these coordinates all numbers are of order one, so the
model is evaluated in the user's own precision and only the change of coordinates is done in float64.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from numpyro_fed.model.layout import GOLDEN, NEAR_ZERO
from numpyro_fed.normal import lapack
from numpyro_fed.normal.families import LOG_2PI, Family, Known, Natural
from numpyro_fed.normal.matrices import diagonal, diagonal_matrix
from numpyro_fed.precision import in_x64, to_user_dtype

Array = jax.Array


class Coordinates(NamedTuple):
    """The map x -> m + R x, float64, and so the normal that it makes of a standard one."""

    mean: Float[Array, " d"]
    # a matrix, lower triangular but between two steps of a search; or, in very many dimensions, sds
    root: Float[Array, "d d"] | Float[Array, " d"]


class Quadratic(NamedTuple):
    """A normal factor in coordinates x, but for a constant: b'x - x'Ax / 2, in the user's precision."""

    precision: Array  # A, (d, d) or its diagonal (d,)
    shift: Array  # b

    def __call__(self, x: Array) -> Array:
        if self.precision.ndim == 1:
            return self.shift @ x - 0.5 * self.precision @ x**2
        return self.shift @ x - 0.5 * x @ self.precision @ x


def coordinates(family: Family, q: Natural | Known, dense: bool = True) -> Coordinates:
    """Those of q; where q is improper the model's own. With a matrix, unless ``dense`` is False."""
    known = _known(family, q)
    proper = known.proper

    @in_x64
    def run(mean: Array, root: Array) -> Coordinates:
        if not dense and root.ndim == 1:
            return Coordinates(jnp.where(proper, mean, 0.0), jnp.where(proper, root, 1.0))
        full = root if root.ndim == 2 else diagonal_matrix(root)
        return Coordinates(jnp.where(proper, mean, 0.0), jnp.where(proper, full, jnp.eye(mean.shape[0])))

    return run(known.mean, known.root)


def _known(family: Family, q: Natural | Known) -> Known:
    return q if isinstance(q, Known) else family.known(q)


def pull_back(at: Coordinates, factor: Natural) -> Quadratic:
    """A normal factor in coordinates x. It has a precision matrix, but where the root is diagonal none."""

    @in_x64
    def run(at: Coordinates, factor: Natural) -> Quadratic:
        if at.root.ndim == 1:
            return Quadratic(at.root**2 * factor.precision, at.root * (factor.shift - factor.precision * at.mean))
        slope = factor.shift - factor.precision @ at.mean
        return Quadratic(at.root.T @ factor.precision @ at.root, at.root.T @ slope)

    return to_user_dtype(run(at, factor))


def log_evidence(family: Family, q: Natural | Known, at: Coordinates, cavity: Natural, log_mean: Array) -> Array:
    """log E_q[f / site], where ``log_mean`` is the log of the mean of cavity x f over a standard normal in x.

    The logarithm of a model's evidence is the posterior's log normaliser and these, summed over the factors.
    """
    known = _known(family, q)
    proper, normaliser = known.proper, known.log_normaliser

    @in_x64
    def run(at: Coordinates, cavity: Natural, log_mean: Array) -> Array:
        times = cavity.precision @ at.mean if cavity.precision.ndim == 2 else cavity.precision * at.mean
        const = cavity.shift @ at.mean - 0.5 * at.mean @ times
        log_det = jnp.sum(jnp.log(jnp.abs(diagonal(at.root) if at.root.ndim == 2 else at.root)))
        volume = log_det + 0.5 * at.mean.shape[0] * LOG_2PI
        return const + volume + log_mean - jnp.where(proper, normaliser, 0.0)

    return to_user_dtype(run(at, cavity, log_mean))


def to_z(at: Coordinates, x: Array) -> Array:
    """z = m + R x, for points (..., d), in the user's precision: the model's derivatives are taken through it."""
    here = to_user_dtype(at)
    moved = here.root * x if here.root.ndim == 1 else x @ here.root.T
    return jnp.expand_dims(here.mean, tuple(range(x.ndim - 1))) + moved


@in_x64
def compose(at: Coordinates, mean: Array, root: Array) -> Coordinates:
    """Coordinates of a normal that has this mean and root in the old ones."""
    if at.root.ndim == 1:
        return Coordinates(at.mean + at.root * mean, at.root * root)
    return Coordinates(at.mean + at.root @ mean, at.root @ root)


@in_x64
def natural(at: Coordinates) -> Natural:
    """The normal whose coordinates these are."""
    half = lapack.solve_lower(at.root, jnp.eye(at.root.shape[0]))
    precision = half.T @ half
    return Natural(precision, precision @ at.mean)


def to_family(family: Family, at: Coordinates) -> Natural:
    """The member of the family with this normal's moments, as far as the family keeps them."""
    if family.kind == "full":
        return natural(at)
    with jax.enable_x64(True):
        return family.project(at.mean, at.root**2 if at.root.ndim == 1 else jnp.sum(at.root**2, axis=1))


@in_x64
def factor_from(at: Coordinates, precision: Array, shift: Array) -> Natural:
    """The factor exp(b'x - x'Ax / 2) in z. The root must be lower triangular."""
    half = lapack.solve_lower_transposed(at.root, precision)
    precision = lapack.solve_lower_transposed(at.root, half.T)
    precision = 0.5 * (precision + precision.T)
    return Natural(precision, lapack.solve_lower_transposed(at.root, shift) + precision @ at.mean)


def with_lower_root(at: Coordinates) -> Coordinates:
    """The same normal with a lower triangular root."""
    with jax.enable_x64(True):
        upper = lapack.upper_factor(at.root.T)
        signs = jnp.where(diagonal(upper) < 0, -1.0, 1.0)
        return at._replace(root=(signs[:, None] * upper).T)


def near_zero(d: int) -> Array:
    """Where a search in coordinates x begins: hardly away from the origin, and nowhere zero."""
    return jnp.asarray(NEAR_ZERO * (0.5 + (np.arange(1, d + 1) * GOLDEN) % 1.0), jnp.zeros(()).dtype)


@in_x64
def sds(at: Coordinates) -> Array:
    """Conditional sds: what a family without correlations would learn from its free energy."""
    return jax.lax.rsqrt(diagonal(natural(at).precision))


@in_x64
def root_of(covariance: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """Its lower triangular root, float64; of one that is symmetric but for rounding."""
    return lapack.cholesky(covariance)
