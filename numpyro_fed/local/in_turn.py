"""Work that is done silo by silo, also where an engine vectorises over silos."""

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose vmap is a loop on CPUs: there, products of many small matrices at once take several times
    as long as one after another, and compile no faster. Elsewhere it is vectorised as any other.

    >>> import jax.numpy as jnp
    >>> jax.vmap(in_turn(lambda x, y: x + y), (0, None))(jnp.arange(3), 1).tolist()
    [1, 2, 3]
    """
    if jax.default_backend() != "cpu":
        return function
    x64 = jax.config.read("jax_enable_x64")

    def own(*args: Any) -> Any:
        with jax.enable_x64(x64):  # an engine works in float64, the model in the user's precision
            return function(*args)

    guarded = custom_vmap(own)

    @guarded.def_vmap
    def _(axis_size: int, batched: Any, *args: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(args)
        along = jax.tree.leaves(tuple(batched))

        def of_one(moving: list) -> Any:
            rest = iter(moving)
            values = [next(rest) if moves else leaf for leaf, moves in zip(leaves, along, strict=True)]
            return guarded(*jax.tree.unflatten(tree, values))

        moving = [leaf for leaf, moves in zip(leaves, along, strict=True) if moves]
        out = jax.lax.map(of_one, moving)
        return out, jax.tree.map(lambda _: True, out)

    return guarded
