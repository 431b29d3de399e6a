r"""Draws from a silo's own posterior, for posterior averaging in few dimensions.

A sampler is any function

.. code-block:: text

    sampler(rng_key, start, log_density, num_samples) -> draws (num_samples, d)

of the silo's log density (its likelihood, as a function of a flat vector), written in JAX: it is compiled with the
round, for all silos at once. :func:`laplace` and :func:`nuts` are two. In very many dimensions
:class:`~numpyro_fed.FedPA` averages the iterates of stochastic gradient steps instead.

Both look for the mode of the silo's likelihood, which must have one: a silo with fewer observations than parameters
has not. What is flat there is given a thousandth of the largest curvature.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_fed.solvers.hmc import NUTS

Array = Any
NEWTON_STEPS = 30
HALVINGS = 8
NEAR = 1e-2  # a log density's last hundredth: a tenth of an sd
FLAT = 1e-3  # of the largest curvature, the least
CHAINS, WARMUP, STEP = 4, 50, 0.7


def laplace(rng_key: Array, start: Array, log_density: Callable, num_samples: int) -> Array:
    """Draws from the normal at the silo's mode, with the Hessian there for precision.

    With more draws than dimensions their mean and covariance are those of the normal exactly: a sample's would add
    noise and nothing else.
    """
    mode, root = _coordinates(start, log_density)
    x = jax.random.normal(rng_key, (num_samples, *start.shape))
    return mode + _exact(x) @ root.T


def nuts(rng_key: Array, start: Array, log_density: Callable, num_samples: int) -> Array:
    """NumPyro's No-U-Turn sampler, four chains, in coordinates in which the normal at the mode is standard."""
    mode, root = _coordinates(start, log_density)
    chains = min(CHAINS, num_samples)
    sampler = NUTS(num_chains=chains, num_samples=-(-num_samples // chains), num_warmup=WARMUP)
    begin_key, key = jax.random.split(rng_key)
    begin = jax.random.normal(begin_key, (chains, *start.shape))
    x, _ = sampler.draw(key, lambda x: log_density(mode + root @ x), begin, STEP)
    return mode + x.reshape(-1, *start.shape)[:num_samples] @ root.T


SAMPLERS = {"laplace": laplace, "nuts": nuts}


def _exact(x: Array) -> Array:
    """Standard normal draws, moved and stretched until mean and covariance are exactly standard."""
    num, d = x.shape
    x = x - jnp.mean(x, axis=0)
    if num <= d:
        return x
    root = jnp.linalg.cholesky(x.T @ x / (num - 1))
    return jax.scipy.linalg.solve_triangular(root, x.T, lower=True).T


def _coordinates(start: Array, log_density: Callable) -> tuple[Array, Array]:
    """The mode, by damped Newton steps, and R with R R' the inverse of minus the Hessian there."""
    gradient, hessian = jax.grad(log_density), jax.hessian(log_density)

    def inverse_root(x: Array) -> Array:
        values, vectors = jnp.linalg.eigh(-hessian(x))
        largest = jnp.max(jnp.abs(values))
        return vectors * jax.lax.rsqrt(jnp.maximum(values, FLAT * largest + 1e-20))

    def step(x: Array, _: None) -> tuple[Array, None]:
        root, uphill = inverse_root(x), gradient(x)
        move = root @ (root.T @ uphill)
        sizes = 0.5 ** jnp.arange(HALVINGS)
        values = jax.lax.map(lambda size: log_density(x + size * move), sizes)
        values = jnp.where(jnp.isfinite(values), values, -jnp.inf)
        best = jnp.argmax(values)
        taken = jnp.where(values[best] > log_density(x), sizes[best], 0.0)
        # so near the mode gains are lost in the rounding of a sum over observations
        return x + jnp.where(0.5 * uphill @ move < NEAR, 1.0, taken) * move, None

    mode, _ = jax.lax.scan(step, start, None, NEWTON_STEPS)
    return mode, inverse_root(mode)
