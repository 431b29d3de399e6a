"""The plain engine: one silo at a time, everything that crosses goes through bytes.

Slow and simple: the reference for :class:`~numpyro_fed.engines.Vmap`, and the place to set a breakpoint (under
``jax.disable_jit()``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Cohort, FederatedAlgorithm, Phase
from numpyro_fed.data.silos import at_silo
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines.base import sent_to
from numpyro_fed.engines.faults import Faults
from numpyro_fed.engines.listening import Listening
from numpyro_fed.engines.lossy import Lossy
from numpyro_fed.engines.steps import broadcast_of, from_bytes, init_server, silo_step
from numpyro_fed.engines.wire import encode
from numpyro_fed.keys import SERVER, START, fold_in_name, identity
from numpyro_fed.pieces import jit
from numpyro_fed.precision import engine_in_x64, stacked


@dataclass(frozen=True)
class Loopback:
    """Silos in a Python loop, every message and broadcast encoded and decoded as over a network.

    Args:
        faults: what goes wrong on the way (:class:`~numpyro_fed.engines.Faults`); by default nothing. With faults, also
            with none in them, the server bears what a network does: a message that cannot be used is refused, and the
            rounds go on; ``fit.history["took_part"]`` and ``["refused"]`` have who was heard and why not.
    """

    faults: Faults | None = None
    chunk: ClassVar[int] = 16
    holds_states: ClassVar[bool] = True
    reads_store: ClassVar[bool] = False

    def during(self, phase: Phase) -> Any:
        """What runs the rounds of this phase."""
        if self.faults is None:
            return self
        ask = Lossy(self.faults, "survey" if phase.name == "survey" else phase.role)
        return Listening(self, ask, phase.watched, self.faults.patience)

    @engine_in_x64
    def start(self, algorithm: FederatedAlgorithm, key: Any, stack: Stack) -> tuple[Any, tuple]:
        key = jax.random.fold_in(key, START)
        server_key = jax.random.fold_in(key, SERVER)
        server = init_server(algorithm, server_key)
        broadcast = broadcast_of(algorithm, server_key, server)
        states, number = [], {name: j for j, name in enumerate(stack.names)}
        for bucket in stack.buckets:
            found = []
            for name in bucket.names:
                received, _ = _through_wire(sent_to(broadcast, number[name]))
                with at_silo(name):
                    state = _init_silo(algorithm, fold_in_name(key, identity(name)), received, stack.data(name))
                found.append(state)
            states.append(stacked(found))
        return server, tuple(states)

    @engine_in_x64
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
        effort: str = "most",
    ) -> tuple[Any, tuple, dict[str, np.ndarray]]:
        rows = []
        data: dict[str, Any] = {}  # each in its silo
        for i in range(count):
            round_key = jax.random.fold_in(key, first + i)
            server_key = jax.random.fold_in(round_key, SERVER)
            broadcast = broadcast_of(algorithm, server_key, server)
            cohort = np.arange(len(stack.names)) if cohorts is None else np.asarray(cohorts[i])
            messages, up, down = [], 0, 0
            for j in cohort.tolist():
                name = stack.names[j]
                b, at = stack.place(name)
                received, size = _through_wire(sent_to(broadcast, j))
                down += size
                state = jax.tree.map(lambda leaf, at=at: leaf[at], silos[b])
                key_j = fold_in_name(round_key, identity(name))
                with at_silo(name):
                    if name not in data:
                        data[name] = stack.data(name)
                    message, state = silo_step(algorithm, key_j, received, state, data[name])
                message, size = _through_wire(message)
                up += size
                messages.append(message)
                moved = jax.tree.map(lambda leaf, new, at=at: leaf.at[at].set(new), silos[b], state)
                silos = (*silos[:b], moved, *silos[b + 1 :])
            server, info = _server_step(
                algorithm, server_key, server, stacked(messages), jnp.asarray(cohort, jnp.int32), len(stack.names)
            )
            rows.append({**info, "bytes_up": up, "bytes_down": down})
        return (
            server,
            silos,
            {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]} if rows else {},
        )

    def in_silos(self, function: Callable[..., Any], given: Any, stack: Stack, *states: tuple | None) -> tuple:
        out = []
        for b, bucket in enumerate(stack.buckets):
            each = []
            for at, name in enumerate(bucket.names):
                own = [None if s is None else jax.tree.map(lambda leaf, at=at: leaf[at], s[b]) for s in states]
                received, _ = _through_wire(given)
                with at_silo(name):
                    each.append(function(received, *own))
            out.append(stacked(each))
        return tuple(out)


def _through_wire(tree: Any) -> tuple[Any, int]:
    encoded = encode(tree)
    return from_bytes(encoded, tree), len(encoded)


@partial(jit, static_argnums=0)
def _init_silo(algorithm: FederatedAlgorithm, key: Any, broadcast: Any, data: Any) -> Any:
    return algorithm.init_silo(key, broadcast, data)


@partial(jit, static_argnums=(0, 5))
def _server_step(
    algorithm: FederatedAlgorithm, key: Any, server: Any, messages: Any, index: Any, num_silos: int
) -> Any:
    return algorithm.server_step(key, server, algorithm.aggregate(messages, Cohort(index, num_silos)))
