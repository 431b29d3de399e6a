"""What engines share: the silos' stacked data, keys from names, and the size of what crosses."""

from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from numpyro_fed.algorithm import Broadcast, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines import wire


class Traffic(NamedTuple):
    """Bytes that one silo sends and receives in one round."""

    up: int
    down: int


class Engine(Protocol):
    """Runs a FederatedAlgorithm. Silo states are a tuple over buckets, stacked; they leave the engine only in a Fit."""

    def start(self, algorithm: FederatedAlgorithm, key: Any, stack: Stack) -> tuple[Any, tuple]: ...

    def rounds(
        self,
        algorithm: FederatedAlgorithm,
        key: Any,
        stack: Stack,
        server: Any,
        silos: tuple,
        first: int,
        cohorts: Any,
        count: int,
        effort: str = "most",  # of the compiler: "most" for thousands of rounds, "some" for tens, "least" for a few
    ) -> tuple[Any, tuple, dict[str, np.ndarray]]: ...


def sent_to(broadcast: Broadcast, j: Any) -> Broadcast:
    """What silo j receives: the common part and its own slice."""
    return Broadcast(broadcast.common, jax.tree.map(lambda leaf: leaf[j], broadcast.each))


def traffic(algorithm: FederatedAlgorithm, server: Any, silo: Any, data: SiloData) -> Traffic:
    """The exact length of one silo's encoded message and broadcast, from shapes alone."""
    key = jax.random.key(0)
    broadcast = jax.eval_shape(lambda s: sent_to(algorithm.broadcast(key, s), 0), server)
    message, _ = jax.eval_shape(algorithm.silo_step, key, broadcast, silo, data)
    return Traffic(wire.num_bytes(message), wire.num_bytes(broadcast))
