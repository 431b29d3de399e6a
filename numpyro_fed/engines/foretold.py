"""What is known of a round before it is compiled: shapes, and who draws random numbers."""

from functools import partial
from typing import Any, NamedTuple

import jax

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData


class Looked(NamedTuple):
    """What tracing one silo of each bucket tells, none of which is vectorised for this."""

    info: dict[str, Any]  # shapes of a row of the history
    silos_draw: bool  # random numbers, in some bucket; else nobody needs keys, hundreds of operations to compile
    server_draws: bool


def look(
    algorithm: FederatedAlgorithm,
    key: Any,
    num_silos: int,
    buckets: tuple,
    shared: Any,
    server: Any,
    silos: tuple,
    index: Any,
) -> Looked:
    """Of silos that are stacked in their buckets; ``index`` are the places of a cohort."""
    of_one = partial(jax.tree.map, lambda leaf: _like(leaf, *leaf.shape[1:]))
    sent, telling = _traced(algorithm.broadcast, key, server)
    received = Broadcast(sent.common, of_one(sent.each))
    message, drawing = None, []
    for own, arrays in zip(silos, buckets, strict=True):
        args, mask = of_one(arrays)
        (message, _), draws = _traced(algorithm.silo_step, key, received, of_one(own), SiloData(args, mask, shared))
        drawing.append(draws)
    stacked = jax.tree.map(lambda leaf: _like(leaf, len(index), *leaf.shape), message)
    aggregate = jax.eval_shape(lambda messages: algorithm.aggregate(messages, Cohort(index, num_silos)), stacked)
    (_, info), server_draws = _traced(algorithm.server_step, key, server, aggregate)
    return Looked(info, any(drawing), server_draws or telling)


def _like(leaf: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def _traced(function: Any, *args: Any) -> tuple[Any, bool]:
    """Shapes of what a jitted function returns, and whether it looks at its first argument, a key."""
    traced = (function if hasattr(function, "trace") else jax.jit(function)).trace(*args)
    inner = traced.jaxpr.jaxpr
    used = {id(var) for eqn in inner.eqns for var in eqn.invars} | {id(var) for var in inner.outvars}
    return jax.tree.map(lambda leaf: _like(leaf, *leaf.shape), traced.out_info), id(inner.invars[0]) in used
