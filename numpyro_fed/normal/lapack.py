"""Decompositions of one matrix, and solutions with triangular ones, by the names they have in this room.

Vectorised over many silos they are calls that jaxlib may cut: :mod:`numpyro_fed.pieces`.
"""

import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

Array = jax.Array


def cholesky(a: Array) -> Array:
    """Of a matrix that is symmetric but for rounding: its lower half is read (``jnp.linalg`` takes the mean of both).

    >>> cholesky(jnp.array([[4.0, 7.0], [2.0, 2.0]])).tolist()
    [[2.0, 0.0], [1.0, 1.0]]
    """
    return jax.lax.linalg.cholesky(a, symmetrize_input=False)


def upper_factor(a: Array) -> Array:
    """R of Q R."""
    return jnp.linalg.qr(a, mode="r")


def solve_lower(a: Array, b: Array) -> Array:
    """x with a x = b, for a lower triangular matrix."""
    return solve_triangular(a, b, lower=True)


def solve_lower_transposed(a: Array, b: Array) -> Array:
    """x with a' x = b, for a lower triangular matrix."""
    return solve_triangular(a, b, lower=True, trans=1)


def solve_upper(a: Array, b: Array) -> Array:
    """x with a x = b, for an upper triangular matrix."""
    return solve_triangular(a, b, lower=False)
