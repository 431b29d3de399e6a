"""A damped Newton step."""

from typing import Any

import jax
import jax.numpy as jnp

Array = Any


def newton_step(gradient: Array, precision: Array, damping: Array) -> Array:
    """A damped step uphill: curvatures enter by their absolute values, scaled to a unit diagonal first."""
    scale = jax.lax.rsqrt(jnp.maximum(jnp.abs(jnp.diagonal(precision)), 1e-10))
    values, vectors = jnp.linalg.eigh(precision * scale[:, None] * scale)
    curvature = jnp.maximum(jnp.abs(values), 1e-4) + damping
    return scale * (vectors @ ((vectors.T @ (scale * gradient)) / curvature))
