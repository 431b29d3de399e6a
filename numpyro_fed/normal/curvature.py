"""Curvatures of a log density from products with its Hessian: time and memory linear in d."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array
PROBES = 16  # random vectors for the diagonal of a Hessian
POWERS = 10  # of a Hessian, for its largest eigenvalue
LEAST = 1e-6  # curvature that counts as none


def curvature(key: Array, density: Callable, shape: tuple[int, ...], probes: int = PROBES) -> Array:
    """The diagonal of minus a Hessian at zero, by Hutchinson's estimator (Bekas, Kokiopoulou and Saad 2007).

    The mean of v times Hv over random signs v: unbiased, and exact where H is diagonal.
    """
    return -jnp.mean(_probed(key, density, shape, probes, lambda v, hv: v * hv), axis=0)


def row_norms(key: Array, density: Callable, shape: tuple[int, ...]) -> Array:
    """Of a Hessian at zero. Near its diagonal, never far below it, and so a safe scale for steps."""
    return jnp.sqrt(jnp.mean(_probed(key, density, shape, PROBES, lambda v, hv: hv**2), axis=0))


def _probed(key: Array, density: Callable, shape: tuple[int, ...], probes: int, what: Callable) -> Array:
    signs = jax.random.rademacher(key, (probes, *shape)).astype(jnp.zeros(()).dtype)
    return jax.lax.map(lambda v: what(v, _times_hessian(jax.grad(density), v)), signs)


def _times_hessian(gradient: Callable, v: Array) -> Array:
    return jax.jvp(gradient, (jnp.zeros_like(v),), (v,))[1]


def largest_curvature(key: Array, gradient: Callable, shape: tuple[int, ...]) -> Array:
    """The largest curvature at zero, by power iteration."""

    def times(v: Array, _: None) -> tuple[Array, Array]:
        new = _times_hessian(gradient, v)
        size = jnp.linalg.norm(new)
        return new / jnp.maximum(size, LEAST), size

    v = jax.random.normal(key, shape)
    _, sizes = jax.lax.scan(times, v / jnp.linalg.norm(v), None, POWERS)
    return jnp.maximum(sizes[-1], LEAST)
