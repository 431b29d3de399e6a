"""Parts of small matrices in few operations: what compiles such programs looks at each operation, however small.

``jnp.diagonal`` and a pair of index arrays are thirty and twenty operations of StableHLO, a slice and a gather two and
five; rounds of EP have dozens of them.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

Array = jax.Array


def diagonal(matrix: Float[Array, "*rows d d"]) -> Float[Array, "*rows d"]:
    """Of square matrices.

    >>> diagonal(jnp.arange(9.0).reshape(3, 3)).tolist()
    [0.0, 4.0, 8.0]
    """
    d = matrix.shape[-1]
    flat = matrix.reshape(*matrix.shape[:-2], d * d)
    return jax.lax.slice_in_dim(flat, 0, d * d, d + 1, axis=flat.ndim - 1)


def diagonal_matrix(vector: Float[Array, " d"]) -> Float[Array, "d d"]:
    """
    >>> diagonal_matrix(jnp.array([2.0, 3.0])).tolist()
    [[2.0, 0.0], [0.0, 3.0]]
    """
    return jnp.where(np.eye(vector.shape[0], dtype=bool), vector, jnp.zeros((), vector.dtype))


def lower_half(matrix: Float[Array, "*rows d d"]) -> Float[Array, "*rows k"]:
    """The lower triangle, row by row: all of a symmetric matrix.

    >>> lower_half(jnp.arange(9.0).reshape(3, 3)).tolist()
    [0.0, 3.0, 4.0, 6.0, 7.0, 8.0]
    """
    d = matrix.shape[-1]
    return jnp.take(matrix.reshape(*matrix.shape[:-2], d * d), _places(d)[0], axis=-1, mode="clip")


def symmetric(half: Float[Array, "*rows k"], d: int) -> Float[Array, "*rows d d"]:
    """The symmetric matrix with this lower triangle.

    >>> symmetric(jnp.arange(6.0), 3).tolist()
    [[0.0, 1.0, 3.0], [1.0, 2.0, 4.0], [3.0, 4.0, 5.0]]
    """
    return jnp.take(half, _places(d)[1], axis=-1, mode="clip")


@lru_cache(maxsize=64)
def _places(d: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the half in the flat matrix, (k,), and of each element of the matrix in the half, (d, d)."""
    rows, columns = np.tril_indices(d)
    inside = np.zeros((d, d), np.int32)
    inside[rows, columns] = inside[columns, rows] = np.arange(len(rows))
    return (rows * d + columns).astype(np.int32), inside
