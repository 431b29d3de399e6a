"""Where a run may start: what mode finding, or another fit, found."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.run.mode import ServerState, SiloState

Array = Any


class Source(NamedTuple):
    """A fit's own parameters: a run with the same guide goes on from q itself."""

    family: Any
    params: Any
    base: Any
    aid: Any
    local: tuple  # (params, base) by bucket, stacked


class Found(NamedTuple):
    """Where a run may start: a normal over the globals, theta, and each silo's locals (by bucket, stacked)."""

    loc: Array  # (d,)
    chol: Array | None  # (d, d), of the covariance; None when only sds are known
    sd: Array  # (d,): conditional, as a guide with independent coordinates would have them
    theta: dict[str, Array]  # unconstrained
    theta_sd: dict[str, Array]
    local: tuple[SiloState, ...]
    source: Source | None = None


def found(split: SplitModel, server: ServerState, silos: tuple[SiloState, ...]) -> Found:
    """The end of mode finding as a start: its point, and the inverse of its curvature given theta."""
    precision, d = np.asarray(server.precision, np.float64), split.dim
    scale = 1 / np.sqrt(np.maximum(np.abs(np.diagonal(precision)), 1e-10))
    values, vectors = np.linalg.eigh((precision * scale[:, None] * scale)[:d, :d])
    values = np.maximum(np.abs(values), 1e-3)
    covariance = scale[:d, None] * ((vectors / values) @ vectors.T) * scale[:d]
    unravel = ravel_pytree(split.theta)[1]
    x, chol, sd = (jnp.asarray(value, server.x.dtype) for value in (server.x, np.linalg.cholesky(covariance), scale))
    return Found(x[:d], chol, sd[:d], unravel(x[d:]), unravel(sd[d:]), silos)
