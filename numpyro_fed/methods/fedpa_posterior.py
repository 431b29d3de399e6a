"""Posteriors of averaging: a point, and a normal around it from the silos' precisions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Key, PyTree
from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.start import WarmStart
from numpyro_fed.local.walk import Flat, flat
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.normal.newton import floored_inverse_root, unit_diagonal

Array = jax.Array
FLAT = 1e-8  # the least curvature, in a precision with a unit diagonal
DENSE = 200  # dimensions up to which the posterior keeps every direction, else so many at most
NEAR_ZERO = 0.1  # sd of a start from a point, which has none of its own


class PointPosterior:
    """All of it at the server's point (z, theta). Its silos have no locals."""

    def __init__(self, split: SplitModel) -> None:
        self.split = split

    def sample(self, key: Key, server: Any) -> Array:
        """A point estimate has one value, whatever the key."""
        return server.z

    def sample_local(self, key: Key, z: Array, server: Any, silo: PyTree, data: SiloData) -> dict[str, Array]:
        return {}

    def theta(self, server: Any) -> dict[str, Any]:
        return server.theta

    def normal(self, server: Any) -> Normal | None:
        return None

    def reordered(self, server: Any, order: list[int]) -> Any:
        return server._replace(posterior=())  # a run that goes on looks for it anew

    def to_warm_start(self, server: Any) -> WarmStart:
        units = jax.tree.map(jnp.ones_like, server.theta)
        return WarmStart(server.z, None, jnp.full(server.z.shape, NEAR_ZERO), server.theta, units)


class PrecisionsPosterior(PointPosterior):
    """A normal around the mode that closing rounds found; the server's point alone where there were none."""

    def sample(self, key: Key, server: Any) -> Array:
        normal = self.normal(server)
        return server.z if normal is None else normal.sample(key)

    def theta(self, server: Any) -> dict[str, Any]:
        if not isinstance(server.posterior, AroundMode):
            return server.theta
        return flat(self.split).parts(server.posterior.mode)[1]

    def sample_with_log_prob(self, key: Key, server: Any) -> tuple[Array, Array]:
        normal = self.normal(server)
        if normal is None:
            raise ValueError("this fit has a mode and no posterior around it, so it has no evidence bound")
        z = normal.sample(key)
        return z, normal.log_prob(z)

    def silo_elbo(self, key: Key, z: Array, server: Any, silo: PyTree, data: SiloData) -> Array:
        return self.split.log_silo(z, {}, self.theta(server), data)

    def normal(self, server: Any) -> Normal | None:
        if not isinstance(server.posterior, AroundMode):
            return None
        # theta stays at the mode
        return Normal(*(leaf[..., : self.split.dim] for leaf in server.posterior))

    def to_warm_start(self, server: Any) -> WarmStart:
        normal = self.normal(server)
        start = super().to_warm_start(server)
        if normal is None:
            return start
        like = lambda value: jnp.asarray(value, server.z.dtype)
        start = start._replace(loc=like(normal.mean), theta=self.theta(server))
        chol = like(np.linalg.cholesky(normal.covariance)) if self.split.dim <= DENSE else None
        return start._replace(chol=chol, sd=like(normal.sds))


class AroundMode(NamedTuple):
    """A normal over (z, theta), its covariance diag(sds^2) + F'F."""

    mode: Any  # (d,)
    sds: Any  # (d,)
    factor: Any  # (r, d)

    def size(self, gradient: np.ndarray) -> float:
        """How many sds a Newton step along this gradient is."""
        moved = [self.sds * gradient, self.factor @ gradient]
        return float(np.sqrt(sum(np.sum(np.asarray(part, np.float64) ** 2) for part in moved)))


NOT_A_MODE = (
    "the silos' precisions and the prior's add up to a posterior that is flat, or not at a mode, in some direction: "
    "run more rounds, pass init_loc_fn=init_to_sample (another start), or give the parameters a prior that is narrower"
)


def around(mode: Any, precision: np.ndarray, least: float = FLAT) -> tuple[AroundMode, tuple[str, ...]]:
    """The normal with a precision, (d, d), float64; and a doubt where that has no inverse.

    Args:
        least: the smallest curvature that is no rounding, in a precision with a unit diagonal.
    """
    precision = 0.5 * (precision + precision.T)
    with jax.enable_x64(True):
        smallest = jnp.linalg.eigvalsh(unit_diagonal(jnp.asarray(precision))[0])[0]
        root = np.asarray(floored_inverse_root(jnp.asarray(precision), FLAT))
    return AroundMode(mode, np.zeros(len(precision)), root.T), (NOT_A_MODE,) * bool(float(smallest) <= least)


def dense(
    own: Flat, w: Array, diagonal: np.ndarray, weights: np.ndarray, directions: np.ndarray, prior: bool
) -> tuple[AroundMode, tuple[str, ...]]:
    """In few dimensions: every direction."""
    precision = np.diag(diagonal) + directions.T @ (weights[:, None] * directions)
    return around(w, precision + own.prior_precision(w) if prior else precision)


def low_rank(
    own: Flat, w: Array, diagonal: np.ndarray, weights: np.ndarray, directions: np.ndarray, prior: bool
) -> tuple[AroundMode, tuple[str, ...]]:
    r"""In many: with D diagonal, :math:`(D - W'W)^{-1} = D^{-1} + D^{-1} W' (I - W D^{-1} W')^{-1} W D^{-1}`."""
    if prior:
        diagonal = diagonal + np.maximum(own.prior_curvature(w), 0.0)
    factor = np.sqrt(np.maximum(-weights, 0.0))[:, None] * directions
    scaled = factor / diagonal
    values, vectors = np.linalg.eigh(scaled @ factor.T)
    values, vectors = values[::-1][:DENSE], vectors[:, ::-1][:, :DENSE]  # those left out would add variance
    values = np.clip(values, 0.0, 1 - 1e-8)
    return AroundMode(w, 1 / np.sqrt(diagonal), (vectors / np.sqrt(1 - values)).T @ scaled), ()
