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

from numpyro_fed.host import concrete, put
from numpyro_fed.normal import lapack
from numpyro_fed.normal.matrices import diagonal, diagonal_matrix, lower_half, symmetric
from numpyro_fed.precision import in_x64, to_user_dtype

Array = jax.Array
LOG_2PI = float(np.log(2 * np.pi))
SINGULAR = 1e-13  # squared pivots of a precision scaled to a unit diagonal; below this it counts as singular


class Natural(NamedTuple):
    """A factor of a normal family: ``precision`` is (d, d), (d,) or (), ``shift`` is P times the mean, (d,)."""

    precision: Float[Array, "..."]
    shift: Float[Array, "*silos d"]


class Known(NamedTuple):
    """A factor with its moments, which many things are made of: they are found once. Of no use where not proper."""

    factor: Natural
    mean: Float[Array, " d"]
    root: Float[Array, "d d"] | Float[Array, " d"]  # of the covariance, lower triangular; or sds
    proper: Bool[Array, ""]

    @property
    def sds(self) -> Float[Array, " d"]:
        with jax.enable_x64(True):
            return jnp.sqrt(jnp.sum(self.root**2, axis=-1)) if self.root.ndim == 2 else self.root

    @property
    def log_normaliser(self) -> Float[Array, ""]:
        r""":math:`\log \int \exp(h^\top z - \tfrac12 z^\top P z) dz`."""
        with jax.enable_x64(True):
            sds = diagonal(self.root) if self.root.ndim == 2 else self.root
            log_det = jnp.sum(jnp.log(jnp.abs(sds)))
            return 0.5 * self.mean.shape[0] * LOG_2PI + log_det + 0.5 * self.factor.shift @ self.mean


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
            return Natural(lower_half(factor.precision), factor.shift)

    def unpack(self, packed: Natural) -> Natural:
        if self.kind != "full":
            return packed
        with jax.enable_x64(True):
            return Natural(symmetric(packed.precision.astype(jnp.float64), packed.shift.shape[-1]), packed.shift)

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

    def known(self, factor: Natural) -> Known:
        """All of it at once."""
        return _known(self.kind, factor)

    def log_normaliser(self, factor: Natural) -> Float[Array, ""]:
        r""":math:`\log \int \exp(h^\top z - \tfrac12 z^\top P z) dz`."""
        return self.known(factor).log_normaliser

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
    return diagonal_matrix(jnp.broadcast_to(precision, (d,)))


def _project(kind: str, mean: ArrayLike, covariance: ArrayLike) -> Natural:
    @in_x64
    def run(mean: Array, covariance: Array) -> Natural:
        if kind == "full":
            precision = inverse(covariance if covariance.ndim == 2 else diagonal_matrix(covariance))
            return Natural(precision, precision @ mean)
        variances = covariance if covariance.ndim == 1 else diagonal(covariance)
        precision = 1 / (variances if kind == "diagonal" else jnp.mean(variances))
        return Natural(precision, precision * mean)

    if not concrete((mean, covariance)):
        return run(mean, covariance)
    with jax.enable_x64(True), np.errstate(all="ignore"):
        return put(_project_on_host(kind, np.asarray(mean, np.float64), np.asarray(covariance, np.float64)))


def _project_on_host(kind: str, mean: np.ndarray, covariance: np.ndarray) -> Natural:
    """The same of values that are known."""
    variances = covariance if covariance.ndim == 1 else np.diagonal(covariance)
    found: Any
    if kind != "full":
        found = 1 / (variances if kind == "diagonal" else np.mean(variances))
        return Natural(found, found * mean)
    scale = np.sqrt(np.maximum(variances, 1e-300))
    scaled = (np.diag(covariance) if covariance.ndim == 1 else covariance) / scale[None, :] / scale[:, None]
    try:
        half = scipy.linalg.solve_triangular(np.linalg.cholesky(scaled), np.diag(1 / scale), lower=True)
        found = half.T @ half
    except (np.linalg.LinAlgError, ValueError):  # it has no root, or is not finite
        found = np.full_like(scaled, np.nan)
    return Natural(found, found @ mean)


def _scaled(precision: Array) -> tuple[Array, Array]:
    """A matrix with a unit diagonal, and the scale by which it was divided."""
    scale = jnp.sqrt(jnp.maximum(diagonal(precision), 1e-300))
    return precision / scale[None, :] / scale[:, None], scale


@in_x64
def inverse(matrix: Float[Array, "d d"]) -> Float[Array, "d d"]:
    """The inverse of a positive definite matrix, by way of its Cholesky factor; symmetric. NaN if it has none."""
    scaled, scale = _scaled(matrix)
    half = lapack.solve_lower(lapack.cholesky(scaled), diagonal_matrix(1 / scale))
    return half.T @ half


class _Roots(NamedTuple):
    """A precision is s U U' s with U upper triangular, and inv(s U)' is a lower triangular root of the covariance."""

    upper: Array
    scale: Array
    proper: Array  # bool


def _roots(precision: Array) -> _Roots:
    scaled, scale = _scaled(precision)
    upper = lapack.cholesky(scaled[::-1, ::-1])[::-1, ::-1]
    # NaN compares as False; a number that is not finite makes some pivot NaN
    return _Roots(upper, scale, jnp.all(diagonal(precision) > 0) & jnp.all(diagonal(upper) ** 2 > SINGULAR))


def _known(kind: str, factor: Natural) -> Known:
    @in_x64
    def run(precision: Array, shift: Array) -> Known:
        finite = jnp.all(jnp.isfinite(precision)) & jnp.all(jnp.isfinite(shift))
        if kind != "full":
            variance = jnp.broadcast_to(1 / precision, shift.shape)
            proper = finite & jnp.all(precision > 0)
            return Known(Natural(precision, shift), variance * shift, jnp.sqrt(variance), proper)
        found = _roots(precision)
        root = lapack.solve_upper(found.upper, diagonal_matrix(1 / found.scale)).T
        return Known(Natural(precision, shift), root @ (root.T @ shift), root, finite & found.proper)

    return run(factor.precision, factor.shift)


def _moments(kind: str, factor: Natural) -> tuple[Array, Array]:
    if not concrete(factor):
        found = _known(kind, factor)
        return found.mean, found.root
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
        return finite & _roots(precision).proper

    return run(factor.precision, factor.shift)


def _kl(kind: str, a: Natural, b: Natural) -> Array:
    @in_x64
    def run(mean: Array, root: Array, precision: Array, mean_b: Array, root_b: Array) -> Array:
        d, shift = mean.shape[0], mean_b - mean
        if kind == "full":
            trace = jnp.sum((precision @ root) * root)
            logs = jnp.sum(jnp.log(jnp.abs(diagonal(root_b))) - jnp.log(jnp.abs(diagonal(root))))
            return 0.5 * (trace + shift @ precision @ shift - d) + logs
        return jnp.sum(0.5 * precision * (root**2 + shift**2) - 0.5 + jnp.log(root_b) - jnp.log(root))

    return run(*_moments(kind, a), b.precision, *_moments(kind, b))
