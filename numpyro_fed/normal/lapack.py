"""Decompositions of matrices that are vectorised over silos: large ones are done one after another.

jaxlib's LAPACK calls cut a batch of 200,000 or more operations into tasks for the very threads of which one waits for
them. As many of such calls at once as there are threads (two cholesky factors, on two cores) wait for ever.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.scipy.linalg
from jax.custom_batching import custom_vmap

Array = jax.Array
ALONE = 200_000  # operations from which jaxlib cuts a batch
EACH = 30  # operations by which d^3 is multiplied: no decomposition has more


def one_by_one(function: Callable) -> Callable:
    """The function of matrices (the first argument's last axis says how large), in a loop where a batch is large.

    >>> jax.vmap(cholesky)(jnp.full((3, 1, 1), 4.0)).ravel().tolist()
    [2.0, 2.0, 2.0]
    """
    guarded = custom_vmap(function)

    @guarded.def_vmap
    def _(axis_size: int, batched: list, *args: Array) -> tuple:
        if axis_size * EACH * args[0].shape[-1] ** 3 < ALONE:
            out = jax.vmap(function, [0 if along else None for along in batched], axis_size=axis_size)(*args)
        else:
            moving = [arg for arg, along in zip(args, batched, strict=True) if along]

            def of_one(moving: list) -> Array:
                rest = iter(moving)
                return guarded(*(next(rest) if along else arg for arg, along in zip(args, batched, strict=True)))

            out = jax.lax.map(of_one, moving)
        return out, jax.tree.map(lambda _: True, out)

    return guarded


# of a matrix that is symmetric but for rounding: its lower half is read. (``jnp.linalg``'s takes the mean of both.)
cholesky = one_by_one(lambda a: jax.lax.linalg.cholesky(a, symmetrize_input=False))
eigh = one_by_one(lambda a: tuple(jnp.linalg.eigh(a)))
eigvalsh = one_by_one(lambda a: jnp.linalg.eigvalsh(a))
solve = one_by_one(lambda a, b: jnp.linalg.solve(a, b))
upper_factor = one_by_one(lambda a: jnp.linalg.qr(a, mode="r"))  # R of Q R
solve_lower = one_by_one(lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True))
solve_lower_transposed = one_by_one(lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=True, trans=1))
solve_upper = one_by_one(lambda a, b: jax.scipy.linalg.solve_triangular(a, b, lower=False))
