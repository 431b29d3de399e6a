r"""Normal families in natural parameters, over the unconstrained globals.

A factor is :math:`\exp(h^\top z - \tfrac12 z^\top P z)`: products, quotients and powers of factors are sums,
differences and multiples of :math:`(P, h)`. A factor need not be proper: P may be indefinite, or zero.

Natural parameters are float64 wherever they are kept or sent, whatever the precision of the user's program: in float32
a posterior whose precision has a condition of 1e8 is wrong by many sds while its Cholesky factor still exists. Only
this algebra is traced in float64; a model traced in it would turn float64, too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.typing import ArrayLike
from jaxtyping import Bool, Float
from numpyro.distributions.util import matrix_to_tril_vec, vec_to_tril_matrix

from numpyro_fed.host import concrete, put
from numpyro_fed.normal import lapack
from numpyro_fed.precision import in_x64, to_user_dtype

Array = jax.Array
LOG_2PI = float(np.log(2 * np.pi))
SINGULAR = 1e-13  # squared pivots of a precision scaled to a unit diagonal; below this it counts as singular


class Natural(NamedTuple):
    """A factor of a normal family: ``precision`` is (d, d), (d,) or (), ``shift`` is P times the mean, (d,)."""

    precision: Float[Array, "..."]
    shift: Float[Array, "*silos d"]


def product(*factors: Natural) -> Natural:
    """The product of factors.

    >>> product(Natural(jnp.ones(2), jnp.ones(2)), Natural(jnp.ones(2), jnp.zeros(2))).precision
    Array([2., 2.], dtype=float64)
    """
    return _leafwise(lambda *leaves: sum(leaves[1:], leaves[0]), *factors)


def quotient(a: Natural, b: Natural) -> Natural:
    """a / b."""
    return _leafwise(lambda x, y: x - y, a, b)


@in_x64
def power(a: Natural, exponent: Float[Array, ""] | float) -> Natural:
    """a to a power."""
    return jax.tree.map(lambda leaf: exponent * leaf, a)


def summed(stacked: Natural) -> Natural:
    """The product of factors that are stacked on the first axis."""
    return _leafwise(lambda leaf: leaf.sum(axis=0), stacked)


def _leafwise(function: Callable, *factors: Natural) -> Natural:
    """In float64; by the host where factors are known: it compiles nothing."""
    if not concrete(factors):
        return in_x64(lambda *factors: jax.tree.map(function, *factors))(*factors)
    with jax.enable_x64(True), np.errstate(all="ignore"):
        own = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), factors)
        return put(jax.tree.map(function, *own))


@dataclass(frozen=True)
class Family:
    """What the families share; ``kind`` is ``"full"``, ``"diagonal"`` or ``"identity"`` (a multiple of it)."""

    kind: str = "full"

    # --- layout -----------------------------------------------------------------------------------------------------

    def flat(self, d: int) -> Natural:
        """The factor 1."""
        with jax.enable_x64(True):
            shape = {"full": (d, d), "diagonal": (d,), "identity": ()}[self.kind]
            return Natural(jnp.zeros(shape, jnp.float64), jnp.zeros(d, jnp.float64))

    def pack(self, factor: Natural) -> Natural:
        """Without the half of a symmetric matrix that is known from the other: what is sent."""
        if self.kind != "full":
            return factor
        with jax.enable_x64(True):
            return Natural(matrix_to_tril_vec(factor.precision), factor.shift)

    def unpack(self, packed: Natural) -> Natural:
        if self.kind != "full":
            return packed
        with jax.enable_x64(True):
            lower = vec_to_tril_matrix(packed.precision.astype(jnp.float64))
            return Natural(lower + jnp.tril(lower, -1).mT, packed.shift)

    # --- conversions ------------------------------------------------------------------------------------------------

    def dense(self, factor: Natural) -> Natural:
        """The same factor with a precision matrix."""
        return Natural(_dense(factor.precision, factor.shift), factor.shift)

    def project(
        self, mean: Float[ArrayLike, " d"], covariance: Float[ArrayLike, "d d"] | Float[ArrayLike, " d"]
    ) -> Natural:
        """The member of the family with this mean and, of the covariance (d, d) or (d,), what the family can keep."""
        return _project(self.kind, mean, covariance)

    def moments(self, factor: Natural) -> tuple[Float[Array, " d"], Float[Array, "d d"] | Float[Array, " d"]]:
        """Mean and a root of the covariance: lower triangular (d, d), or sds (d,). NaN where it is not proper."""
        return _moments(self.kind, factor)

    def mean(self, factor: Natural) -> Float[Array, " d"]:
        return self.moments(factor)[0]

    def covariance(self, factor: Natural) -> Float[Array, "d d"] | Float[Array, " d"]:
        """(d, d), or (d,) for families without correlations."""
        root = self.moments(factor)[1]
        with jax.enable_x64(True):
            return root @ root.T if self.kind == "full" else root**2

    def sds(self, factor: Natural) -> Float[Array, " d"]:
        root = self.moments(factor)[1]
        with jax.enable_x64(True):
            return jnp.sqrt(jnp.sum(root**2, axis=-1)) if self.kind == "full" else root

    # --- properties -------------------------------------------------------------------------------------------------

    def proper(self, factor: Natural) -> Bool[Array, ""]:
        """Whether it is a distribution: finite, and its precision positive definite by a margin over rounding."""
        return _proper(self.kind, factor)

    def log_normaliser(self, factor: Natural) -> Float[Array, ""]:
        r""":math:`\log \int \exp(h^\top z - \tfrac12 z^\top P z) dz`."""
        return _log_normaliser(self.kind, factor)

    def kl(self, a: Natural, b: Natural) -> Float[Array, ""]:
        """KL(a || b).

        >>> family = Family("diagonal")
        >>> a, b = family.project(jnp.zeros(1), jnp.ones(1)), family.project(jnp.ones(1), jnp.ones(1))
        >>> float(family.kl(a, b))
        0.5
        """
        return _kl(self.kind, a, b)

    def sample(self, key: Array, factor: Natural) -> Float[Array, " d"]:
        """One draw, in the precision of the user's program."""
        mean, root = to_user_dtype(self.moments(factor))
        eps = jax.random.normal(key, mean.shape)
        return mean + (root @ eps if self.kind == "full" else root * eps)


def as_family(family: Any) -> Family:
    """A family from its name, or an error that says what to type."""
    if isinstance(family, Family):
        return family
    if family not in ("full", "diagonal", "identity"):
        raise ValueError(f"family must be 'full', 'diagonal' or 'identity', got {family!r}")
    return Family(family)


@in_x64
def _dense(precision: Array, shift: Array) -> Array:
    d = shift.shape[-1]
    if jnp.ndim(precision) == 2:
        return precision
    return jnp.diag(jnp.broadcast_to(precision, (d,)))


def _project(kind: str, mean: ArrayLike, covariance: ArrayLike) -> Natural:
    @in_x64
    def run(mean: Array, covariance: Array) -> Natural:
        diagonal = covariance if covariance.ndim == 1 else jnp.diagonal(covariance)
        if kind == "full":
            full = covariance if covariance.ndim == 2 else jnp.diag(covariance)
            precision = inverse(full)
            return Natural(precision, precision @ mean)
        precision = 1 / (diagonal if kind == "diagonal" else jnp.mean(diagonal))
        return Natural(precision, precision * mean)

    return run(mean, covariance)


def _scaled(precision: Array) -> tuple[Array, Array]:
    """A matrix with a unit diagonal, and the scale by which it was divided."""
    scale = jnp.sqrt(jnp.maximum(jnp.diagonal(precision), 1e-300))
    return precision / scale[None, :] / scale[:, None], scale


@in_x64
def inverse(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """The inverse of a positive definite matrix, by way of its Cholesky factor; symmetric. NaN if it has none."""
    scaled, scale = _scaled(matrix)
    half = lapack.solve_lower(lapack.cholesky(scaled), jnp.diag(1 / scale))
    return half.T @ half


def _moments(kind: str, factor: Natural) -> tuple[Array, Array]:
    @in_x64
    def run(precision: Array, shift: Array) -> tuple[Array, Array]:
        if kind != "full":
            variance = jnp.broadcast_to(1 / precision, shift.shape)
            return variance * shift, jnp.sqrt(variance)
        # P = U U' with U upper triangular, so inv(U)' is a lower triangular root of the covariance
        scaled, scale = _scaled(precision)
        upper = lapack.cholesky(scaled[::-1, ::-1])[::-1, ::-1]
        root = lapack.solve_upper(upper, jnp.diag(1 / scale)).T
        return root @ (root.T @ shift), root

    if not concrete(factor):
        return run(factor.precision, factor.shift)
    known = (np.asarray(leaf, np.float64) for leaf in factor)
    with jax.enable_x64(True), np.errstate(all="ignore"):
        return put(_moments_on_host(kind, *known))


def _moments_on_host(kind: str, precision: np.ndarray, shift: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same of values that are known."""
    if kind != "full":
        variance = np.broadcast_to(1 / precision, shift.shape)
        return variance * shift, np.sqrt(variance)
    scale = np.sqrt(np.maximum(np.diagonal(precision), 1e-300))
    scaled = precision / scale[None, :] / scale[:, None]
    try:
        upper = np.linalg.cholesky((scaled + scaled.T)[::-1, ::-1] / 2)[::-1, ::-1]
        root = scipy.linalg.solve_triangular(upper, np.diag(1 / scale), check_finite=False).T
    except np.linalg.LinAlgError:
        root = np.full_like(precision, np.nan)
    return root @ (root.T @ shift), root


def _proper(kind: str, factor: Natural) -> Array:
    @in_x64
    def run(precision: Array, shift: Array) -> Array:
        finite = jnp.all(jnp.isfinite(precision)) & jnp.all(jnp.isfinite(shift))
        if kind != "full":
            return finite & jnp.all(precision > 0)
        scaled, _ = _scaled(precision)
        pivots = jnp.diagonal(lapack.cholesky(scaled)) ** 2
        return finite & jnp.all(jnp.diagonal(precision) > 0) & jnp.all(pivots > SINGULAR)  # NaN compares as False

    return run(factor.precision, factor.shift)


def _log_normaliser(kind: str, factor: Natural) -> Array:
    @in_x64
    def run(mean: Array, root: Array, shift: Array) -> Array:
        diagonal = jnp.diagonal(root) if kind == "full" else root
        return 0.5 * mean.shape[0] * LOG_2PI + jnp.sum(jnp.log(jnp.abs(diagonal))) + 0.5 * shift @ mean

    return run(*_moments(kind, factor), factor.shift)


def _kl(kind: str, a: Natural, b: Natural) -> Array:
    @in_x64
    def run(mean: Array, root: Array, precision: Array, mean_b: Array, root_b: Array) -> Array:
        d, shift = mean.shape[0], mean_b - mean
        if kind == "full":
            trace = jnp.sum((precision @ root) * root)
            logs = jnp.sum(jnp.log(jnp.abs(jnp.diagonal(root_b))) - jnp.log(jnp.abs(jnp.diagonal(root))))
            return 0.5 * (trace + shift @ precision @ shift - d) + logs
        return jnp.sum(0.5 * precision * (root**2 + shift**2) - 0.5 + jnp.log(root_b) - jnp.log(root))

    return run(*_moments(kind, a), b.precision, *_moments(kind, b))
