r"""A silo's parameters as one flat vector, the steps of an optimiser on it, and samples from its iterates.

**Iterate-averaged stochastic gradients.** Steps with noise do not stop at the mode but wander around it; how far says
how wide the posterior is. A sample is an average of successive iterates, of one of two kinds:

- Langevin's steps, :math:`x' = x + h \nabla \log p + \sqrt{2 h}\, \xi`: the average of *two* iterates. Where the
  density is normal, it undoes what the finite step did to the iterates' variance, exactly and for every h.
- Minibatch steps, whose noise has no known size: the average of all K iterates since the last sample (Mandt, Hoffman
  and Blei 2017), which has the covariance of the posterior of as many observations as the K steps looked at.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from numpyro_fed.data.padding import SiloData
from numpyro_fed.local import minibatch
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.curvature import curvature
from numpyro_fed.pieces import jit
from numpyro_fed.precision import unoptimised

Array = jax.Array
Carry = tuple[Array, Any]  # x, and the optimiser's state
StepFn = Callable[[Array, Any, Array], tuple[Array, Any, Array]]  # (x, state, key) -> (x, state, the loss before it)


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

    def pieces(self, w: Array) -> tuple[Array, ...]:
        """The same numbers, those of each site and param in a vector of their own."""
        sizes = [int(np.prod(shape)) for shape in self.split.global_shapes.values()]
        sizes += [int(np.size(leaf)) for leaf in jax.tree.leaves(self.split.theta)]
        return tuple(jax.lax.split(w, sizes))

    def log_prior(self, w: Array) -> Array:
        return self.split.log_prior(*self.parts(w))

    def prior_precision(self, w: Array) -> np.ndarray:
        """Minus the Hessian of the log prior, (d, d)."""
        hessian = jit(jax.hessian(self.log_prior), compiler_options=unoptimised())
        return -np.asarray(hessian(w), np.float64)

    def prior_curvature(self, w: Array) -> np.ndarray:
        """Its diagonal; exact where there is nothing else."""
        at = lambda w: curvature(jax.random.key(0), lambda away: self.log_prior(w + away), w.shape)
        return np.asarray(jit(at, compiler_options=unoptimised())(w), np.float64)

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


def langevin(uphill: Callable[[Array], Array], step_size: Array) -> StepFn:
    """Langevin's steps, from the gradient of a log density. They keep no state, and tell no loss."""

    def step(x: Array, state: tuple, key: Array) -> tuple[Array, tuple, Array]:
        new = x + step_size * uphill(x) + jnp.sqrt(2 * step_size) * jax.random.normal(key, x.shape)
        return new, state, jnp.zeros(())

    return step


def iterate_average(step: StepFn, carry: Carry, key: Array, num: int, pairs: bool) -> tuple[Carry, tuple[Array, Array]]:
    """One sample: ``num`` steps from (x, state), and the average of all iterates or, with ``pairs``, of the last two.

    Also returned: the loss before the first step.
    """

    def one(carry: tuple, key: Array) -> tuple[tuple, Array]:
        x, state, average = carry
        new, state, value = step(x, state, key)
        average = 0.5 * (x + new) if pairs else average + new / num
        return (new, state, average), value

    begin = (*carry, jnp.zeros_like(carry[0]))
    (x, state, average), values = jax.lax.scan(one, begin, jax.random.split(key, num))
    return (x, state), (average, values[0])


class Walk(NamedTuple):
    """Steps of a silo's optimiser."""

    step: StepFn
    state: Any
    curvature: Array  # the largest of the silo's loss at the start, where steps depend on it
    apart: Callable[[Array], tuple[Array, ...]] | None = None  # steps are on these pieces of x, and take no samples

    def go(self, carry: Carry, key: Array, num: int) -> tuple[Carry, Array]:
        """So many steps from (x, state): where they end, and the loss before the first."""

        def one(carry: tuple[Any, Any], key: Array) -> tuple[tuple[Any, Any], Array]:
            x, state, value = self.step(carry[0], carry[1], key)
            return (x, state), value

        x, state = carry
        begin: tuple[Any, Any] = (x if self.apart is None else self.apart(x), state)
        (x, state), values = jax.lax.scan(one, begin, jax.random.split(key, num))
        return (x if self.apart is None else jnp.concatenate(x), state), values[0]

    def samples(
        self, x: Array, keys: tuple[Array, Array], num_warmup: int, num_samples: int, thinning: int, pairs: bool
    ) -> tuple[Array, Array]:
        """Samples (num_samples, d) by :func:`iterate_average`, and the loss at x, where the walk begins.

        Args:
            keys: of the warm-up, and of what follows.
            num_warmup: steps before the first sample.
            thinning: steps for each sample.
        """
        carry, first = (x, self.state), None
        if num_warmup:
            carry, first = self.go(carry, keys[0], num_warmup)
        sample = lambda carry, key: iterate_average(self.step, carry, key, thinning, pairs)
        _, (draws, values) = jax.lax.scan(sample, carry, jax.random.split(keys[1], num_samples))
        return draws, values[0] if first is None else first
