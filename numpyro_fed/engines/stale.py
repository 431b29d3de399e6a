"""Any algorithm on stale broadcasts: silos that work at their own pace."""

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm, Key, PyTree
from numpyro_fed.engines.hearing import inner


class StaleState(NamedTuple):
    """The server of a :func:`stale` algorithm: the algorithm's own, and what each silo last received from it."""

    server: PyTree
    broadcast: Broadcast  # every leaf (J, ...): also the common part, for silos hold it from different rounds


NEXT = 0x6E657874  # folded into a round's key for the broadcast that ends it: server_step has used the key itself


def held(algorithm: FederatedAlgorithm, server: PyTree, key: Key, num_silos: int) -> StaleState:
    """The server of the :func:`stale` algorithm, when everyone has just received ``broadcast(key, server)``.

    To start or go on from a server state, whatever schedule it comes from; :func:`current` is the way back.
    """
    common, each = _arrays(algorithm.broadcast(key, server))
    with jax.enable_x64(True):
        return StaleState(server, Broadcast(_repeated(common, num_silos), each))


def current(server: PyTree) -> PyTree:
    """The algorithm's own server state, whether or not it is run on stale broadcasts, or messages can be lost."""
    server = inner(server)
    return server.server if isinstance(server, StaleState) else server


@lru_cache(maxsize=32)  # engines take algorithms as static arguments: the same one must give the same one
def stale(algorithm: FederatedAlgorithm, num_silos: int) -> FederatedAlgorithm:
    r"""The same algorithm, run on stale broadcasts.

    With :math:`c_r` the cohort of round r and :math:`h_j` what silo j holds,

    .. code-block:: text

        message_j, silo_j  = u(h_j, silo_j, data_j)          j in c_r
        server             = s(server, {message_j})
        h_j                = b(server)                       j in c_r; the others keep theirs

    Laws: with everyone in every round it equals the algorithm itself, if ``broadcast`` draws nothing. A silo that takes
    part twice in a row works from the newest broadcast the second time. As many bytes go down as without it: a silo
    receives what it holds, which is sent once, when it finishes.

    An algorithm whose ``server_step`` draws again what its ``broadcast`` drew, from the round's key (SFVI's draw of
    z_G), cannot be run so: the messages belong to draws of earlier rounds.

    Args:
        algorithm: any algorithm whose messages make sense to a server that has moved on.
        num_silos: J. The state holds J broadcasts.

    Returns:
        An algorithm with a :class:`StaleState` for server state; always the same object for the same arguments.
    """

    def init(key: Key) -> StaleState:
        return held(algorithm, algorithm.init(key), key, num_silos)

    def init_silo(key: Key, received: Broadcast, data: PyTree) -> PyTree:
        return algorithm.init_silo(key, received.each, data)

    def broadcast(key: Key, server: StaleState) -> Broadcast:
        return Broadcast(common=(), each=server.broadcast)

    def silo_step(key: Key, received: Broadcast, silo: PyTree, data: PyTree) -> tuple[PyTree, PyTree]:
        return algorithm.silo_step(key, received.each, silo, data)

    def aggregate(messages: PyTree, cohort: Cohort) -> tuple[PyTree, Any]:
        return algorithm.aggregate(messages, cohort), cohort.index

    def server_step(key: Key, state: StaleState, aggregate: tuple[PyTree, Any]) -> tuple[StaleState, dict[str, Any]]:
        inner, index = aggregate
        server, info = algorithm.server_step(key, state.server, inner)
        common, each = _arrays(algorithm.broadcast(jax.random.fold_in(key, NEXT), server))
        with jax.enable_x64(True):
            new = Broadcast(_repeated(common, len(index)), jax.tree.map(lambda leaf: leaf[index], each))
            holds = jax.tree.map(lambda old, rows: old.at[index].set(rows), state.broadcast, new)
        return StaleState(server, holds), info

    return FederatedAlgorithm(init, init_silo, broadcast, silo_step, aggregate, server_step)


def _arrays(broadcast: Broadcast) -> Broadcast:
    """Numbers take the dtype of the user's program; arrays keep theirs, which may be float64 where that is float32."""
    numbers = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), broadcast)
    with jax.enable_x64(True):
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), numbers)


def _repeated(tree: PyTree, times: int) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (times, *leaf.shape)), tree)
