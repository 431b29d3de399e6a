"""Posteriors of averaging: a point, and a normal around it from the silos' precisions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Key, PyTree
from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.start import WarmStart
from numpyro_fed.local.walk import Flat
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
    """A normal around the server's point; a point alone where no closing round has looked for it."""

    def sample(self, key: Key, server: Any) -> Array:
        normal = self.normal(server)
        return server.z if normal is None else normal.sample(key)

    def sample_with_log_prob(self, key: Key, server: Any) -> tuple[Array, Array]:
        normal = self.normal(server)
        if normal is None:
            raise ValueError("this fit has a mode and no posterior around it, so it has no evidence bound")
        z = normal.sample(key)
        return z, normal.log_prob(z)

    def silo_elbo(self, key: Key, z: Array, server: Any, silo: PyTree, data: SiloData) -> Array:
        return self.split.log_silo(z, {}, server.theta, data)

    def normal(self, server: Any) -> Normal | None:
        if not isinstance(server.posterior, AroundMode):
            return None
        sds, factor = (leaf[..., : self.split.dim] for leaf in server.posterior)  # theta stays at the mode
        return Normal(server.z, sds, factor)

    def to_warm_start(self, server: Any) -> WarmStart:
        normal = self.normal(server)
        start = super().to_warm_start(server)
        if normal is None:
            return start
        like = lambda value: jnp.asarray(value, server.z.dtype)
        chol = like(np.linalg.cholesky(normal.covariance)) if self.split.dim <= DENSE else None
        return start._replace(chol=chol, sd=like(normal.sds))


class AroundMode(NamedTuple):
    """The normal around the mode, its covariance diag(sds^2) + F'F."""

    sds: Any  # (d,)
    factor: Any  # (r, d)


def dense(
    own: Flat, w: Array, diagonal: np.ndarray, weights: np.ndarray, directions: np.ndarray, prior: bool
) -> tuple[AroundMode, tuple[str, ...]]:
    """In few dimensions: every direction."""
    precision = np.diag(diagonal) + directions.T @ (weights[:, None] * directions)
    if prior:
        precision += own.prior_precision(w)
    precision = 0.5 * (precision + precision.T)
    with jax.enable_x64(True):
        smallest = jnp.linalg.eigvalsh(unit_diagonal(jnp.asarray(precision))[0])[0]
        root = np.asarray(floored_inverse_root(jnp.asarray(precision), FLAT))
    doubt: tuple[str, ...] = ()
    if float(smallest) <= FLAT:
        doubt = (
            "the silos' precisions and the prior's add up to a posterior that is flat, or not at a mode, in some "
            "direction: run more rounds, pass num_samples= (more), or give the parameters a prior that is narrower",
        )
    return AroundMode(np.zeros(own.size), root.T), doubt


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
    return AroundMode(1 / np.sqrt(diagonal), (vectors / np.sqrt(1 - values)).T @ scaled), ()
