"""A silo's parameters as one flat vector, and the steps of an optimiser on it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from numpyro_fed.data.padding import SiloData
from numpyro_fed.local import minibatch
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.curvature import curvature
from numpyro_fed.precision import UNOPTIMISED

Array = Any


class Flat(NamedTuple):
    """The parameters as one vector, and the densities as functions of it."""

    split: SplitModel
    start: Array  # theta's
    unravel: Any  # of theta

    @property
    def size(self) -> int:
        return self.split.dim + self.start.shape[0]

    def parts(self, w: Array) -> tuple[Array, dict[str, Any]]:
        z, theta = jax.lax.split(w, (self.split.dim, self.start.shape[0]))
        return z, self.unravel(theta)

    def joined(self, server: Any) -> Array:
        return jnp.concatenate([server.z, ravel_pytree(server.theta)[0].astype(server.z.dtype)])

    def log_prior(self, w: Array) -> Array:
        return self.split.log_prior(*self.parts(w))

    def prior_precision(self, w: Array) -> np.ndarray:
        """Minus the Hessian of the log prior, (d, d)."""
        hessian = jax.jit(jax.hessian(self.log_prior), compiler_options=UNOPTIMISED)
        return -np.asarray(hessian(w), np.float64)

    def prior_curvature(self, w: Array) -> np.ndarray:
        """Its diagonal; exact where there is nothing else."""
        at = lambda w: curvature(jax.random.key(0), lambda away: self.log_prior(w + away), w.shape)
        return np.asarray(jax.jit(at, compiler_options=UNOPTIMISED)(w), np.float64)

    def log_likelihood(self, w: Array, data: SiloData) -> Array:
        """Of a silo."""
        z, theta = self.parts(w)
        return self.split.log_silo(z, {}, theta, data)

    def estimate(self, batching: minibatch.Batching, w: Array, data: SiloData, key: Array) -> Array:
        """The same from a minibatch."""
        taken = minibatch.with_replacement(self.split, batching, key, data)
        z, theta = self.parts(w)
        return minibatch.log_silo(self.split, z, theta, taken)


def flat(split: SplitModel) -> Flat:
    begin, unravel = ravel_pytree(split.theta)
    return Flat(split, jnp.asarray(begin, jnp.zeros(()).dtype), unravel)


class Steps(NamedTuple):
    """Where the default optimiser last was, and the gradient and loss there."""

    x: Array
    gradient: Array
    total: Array
    rate: Array


class Walk(NamedTuple):
    """Steps of a silo's optimiser: ``step(x, state, key) -> (x, state, loss before it)``."""

    step: Any
    state: Any
    curvature: Array  # the largest of the silo's loss at the start, where steps depend on it

    def go(self, carry: tuple, key: Array, num: int) -> tuple[tuple, Array]:
        """So many steps from (x, state): where they end, and the loss before the first."""

        def one(carry: tuple, key: Array) -> tuple[tuple, Array]:
            x, state, value = self.step(*carry, key)
            return (x, state), value

        carry, values = jax.lax.scan(one, carry, jax.random.split(key, num))
        return carry, values[0]
