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

import jax
import jax.numpy as jnp

from numpyro_fed.normal.matrices import diagonal
from numpyro_fed.normal.newton import derivatives, find_mode, floored_inverse_root
from numpyro_fed.solvers.hmc import NUTS
from numpyro_fed.solvers.newton import NEWTON_STEPS

Array = jax.Array
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
    x, _, _ = sampler.draw(key, lambda x: log_density(mode + root @ x), begin, STEP, 0)
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
    """The mode, and R with R R' the inverse of minus the Hessian there."""
    mode = find_mode(lambda x, _: derivatives(log_density, x), start, limit=NEWTON_STEPS)
    precision = derivatives(log_density, mode.x)[2]
    return mode.x, floored_inverse_root(precision, FLAT, jnp.max(jnp.abs(diagonal(precision))) + 1e-20)
