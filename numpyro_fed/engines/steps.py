"""An algorithm's functions one by one, compiled, and what crosses as bytes: for engines that go silo by silo."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_fed.algorithm import FederatedAlgorithm
from numpyro_fed.engines import wire
from numpyro_fed.pieces import jit


def from_bytes(data: bytes, like: Any) -> Any:
    """What was encoded, as JAX's arrays: float64 stays so in a float32 program."""
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), like)
    with jax.enable_x64(True):
        return jax.tree.map(jnp.asarray, wire.decode(data, like))


@partial(jit, static_argnums=0)
def init_server(algorithm: FederatedAlgorithm, key: Any) -> Any:
    return algorithm.init(key)


@partial(jit, static_argnums=0)
def broadcast_of(algorithm: FederatedAlgorithm, key: Any, server: Any) -> Any:
    return algorithm.broadcast(key, server)


@partial(jit, static_argnums=0)
def silo_step(algorithm: FederatedAlgorithm, key: Any, broadcast: Any, state: Any, data: Any) -> Any:
    return algorithm.silo_step(key, broadcast, state, data)
