r"""The round, explained once.

Every method in this library repeats one round:

.. code-block:: text

    broadcast          = b(server)                         at the server
    message_j, silo_j  = u(broadcast, silo_j, data_j)      at silo j, where the data live
    server             = s(server, {message_j})            at the server

A :class:`FederatedAlgorithm` is these functions and nothing else; an engine (:mod:`numpyro_fed.engines`) runs them,
all silos at once in one compiled program or one by one through bytes, without knowing the method.

What an algorithm may rely on, and must obey:

- Nothing leaves a silo but its message; nothing enters it but the broadcast.
- Messages arrive stacked on a leading axis, with a :class:`Cohort` that says who replied. A round is one server update.
- ``broadcast`` and ``server_step`` of a round get the same key; a silo's key is the round's key folded with its name,
  so every engine, cohort and silo order draws the same numbers.
- A silo that does not take part in a round does not move.

A whole algorithm, the mean of numbers that stay apart:

>>> import jax, jax.numpy as jnp
>>> mean = FederatedAlgorithm(
...     init=lambda key: jnp.zeros(()),
...     init_silo=lambda key, broadcast, data: (),
...     broadcast=lambda key, server: Broadcast(common=server, each=()),
...     silo_step=lambda key, broadcast, silo, data: ((jnp.sum(data - broadcast.common), data.size), silo),
...     aggregate=lambda messages, cohort: jax.tree.map(lambda m: jnp.sum(m, axis=0), messages),
...     server_step=lambda key, server, aggregate: (server + aggregate[0] / aggregate[1], {}),
... )
>>> server = mean.init(None)
>>> replies = [mean.silo_step(None, mean.broadcast(None, server), (), jnp.array(x))[0] for x in ([1.0, 2.0], [6.0])]
>>> stacked = jax.tree.map(lambda *m: jnp.stack(m), *replies)
>>> server, info = mean.server_step(None, server, mean.aggregate(stacked, Cohort(jnp.arange(2), 2)))
>>> float(server)
3.0

In an asynchronous run a silo works from the broadcast it received when it last took part, while the server has gone on.
:func:`~numpyro_fed.engines.stale.stale` makes of any algorithm one that does this: who holds what is part of its
server's state, so engines run it as any other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

PyTree = Any
Key = Any


class Broadcast(NamedTuple):
    """What the server sends: ``common`` to everyone, to silo j its own slice of ``each`` (stacked over all silos)."""

    common: PyTree
    each: PyTree = ()


class Cohort(NamedTuple):
    """Who replied: indices into the silos, in the order of the stacked messages, and how many silos there are."""

    index: Any  # int (K,)
    num_silos: int


# (rng_key) -> server_state. At the server, before anything is sent.
InitFn = Callable[[Key], PyTree]
# (rng_key, broadcast, silo_data) -> silo_state. In the silo; the state stays there.
InitSiloFn = Callable[[Key, Broadcast, PyTree], PyTree]
# (rng_key, server_state) -> Broadcast. What goes down.
BroadcastFn = Callable[[Key, PyTree], Broadcast]
# (rng_key, broadcast, silo_state, silo_data) -> (message, silo_state). The message is all that goes up.
SiloStepFn = Callable[[Key, Broadcast, PyTree, PyTree], tuple[PyTree, PyTree]]
# (messages stacked on axis 0, cohort) -> aggregate. At the server; could be a secure sum.
AggregateFn = Callable[[PyTree, Cohort], PyTree]
# (rng_key, server_state, aggregate) -> (server_state, info). `info` is a dict of arrays: a row of the history.
ServerStepFn = Callable[[Key, PyTree, PyTree], tuple[PyTree, dict[str, Any]]]


class FederatedAlgorithm(NamedTuple):
    """A federated method, as pure functions on pytrees. See the module's docstring for the rules."""

    init: InitFn
    init_silo: InitSiloFn
    broadcast: BroadcastFn
    silo_step: SiloStepFn
    aggregate: AggregateFn
    server_step: ServerStepFn

    def traced_once(self) -> "FederatedAlgorithm":
        """The same algorithm, its functions traced once per shapes, however many programs and engines use them."""
        once = lambda function: jax.jit(function, inline=True)
        return self._replace(
            init_silo=once(self.init_silo),
            broadcast=once(self.broadcast),
            silo_step=once(self.silo_step),
            server_step=once(self.server_step),
        )
