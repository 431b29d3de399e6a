"""What engines share: what the loop asks of them, and the size of what crosses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from numpyro_fed.algorithm import Broadcast, FederatedAlgorithm, PyTree
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines import wire
from numpyro_fed.host import key_of, shapes_of
from numpyro_fed.precision import in_user_precision


@dataclass(frozen=True)
class Traffic:
    """Bytes that go up and down."""

    up: int = 0
    down: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.up + other.up, self.down + other.down)

    def __rmul__(self, times: int) -> "Traffic":
        return Traffic(times * self.up, times * self.down)


@runtime_checkable
class Engine(Protocol):
    """Runs a FederatedAlgorithm. Silo states are a tuple over buckets, stacked; they leave the engine only in a Fit.

    An engine of your own has three facts and three functions; :class:`~numpyro_fed.engines.Loopback` is the plain one.
    """

    @property
    def chunk(self) -> int:
        """Rounds between two looks of the host, for progress, stopping and interruption."""
        ...

    @property
    def holds_states(self) -> bool:
        """Silos keep a state between rounds; else they begin afresh each time."""
        ...

    @property
    def reads_store(self) -> bool:
        """Silos are read from an :class:`~numpyro_fed.SiloStore`; else all of them are in memory, or elsewhere."""
        ...

    def start(self, algorithm: FederatedAlgorithm, key: Any, stack: Stack) -> tuple[PyTree, tuple]:
        """Fresh states of the server and of all silos."""
        ...

    def rounds(
        self,
        algorithm: FederatedAlgorithm,
        key: Any,
        stack: Stack,
        server: PyTree,
        silos: tuple,
        first: int,
        cohorts: np.ndarray | None,
        count: int,
        effort: str = "most",
    ) -> tuple[PyTree, tuple, dict[str, np.ndarray]]:
        """Rounds first, first + 1, ...: the states after ``count`` of them, and the rounds' infos, stacked."""
        ...

    def in_silos(self, function: Callable[..., Any], given: PyTree, stack: Stack, *states: tuple | None) -> tuple:
        """``function(given, *states of one silo)`` in every silo, stacked as states are; a state may be None."""
        ...


@runtime_checkable
class TellsSilos(Engine, Protocol):
    """An engine whose silos are elsewhere: they are told which run this is, what it is made of, and how it ended."""

    run: str  # what it is called there

    def bound(self, method: Any, silos: Any, run: str) -> "TellsSilos":
        """The engine of one run; ``run``: that which it goes on with, or ""."""
        ...

    def agree(self, survey: Any, plan: Any, program: Any) -> None:
        """What all silos said, and how long the run will be."""
        ...

    def doubted(self, why: str) -> "TellsSilos":
        """The same for a run whose fit is not that of all silos: they are told why."""
        ...

    def finished(self, fit: Any) -> None:
        """The fit, for what is made of it where the data are."""
        ...


def tells_silos(engine: Any) -> TellsSilos | None:
    """The engine, if its silos are elsewhere."""
    return engine if isinstance(engine, TellsSilos) else None


def sent_to(broadcast: Broadcast, j: Any) -> Broadcast:
    """What silo j receives: the common part and its own slice."""
    return Broadcast(broadcast.common, jax.tree.map(lambda leaf: leaf[j], broadcast.each))


def received_by_one(algorithm: FederatedAlgorithm, key: Any, server: PyTree) -> Broadcast:
    """The shapes of what a silo receives from a server of that state or those shapes."""
    return jax.eval_shape(lambda state: sent_to(algorithm.broadcast(key, state), 0), server)


def one_state(engine: Any, algorithm: FederatedAlgorithm, server: PyTree, states: tuple, data: SiloData) -> PyTree:
    """What a silo's state looks like between rounds; an engine whose states are elsewhere knows it by itself."""
    known = getattr(engine, "one_state", None)
    if known is not None:
        return known(algorithm, server, data)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), states[0])


class Sent(NamedTuple):
    """What one silo and the server send each other in a round, leaf by leaf."""

    up: tuple[wire.Field, ...] = ()
    down: tuple[wire.Field, ...] = ()

    @property
    def traffic(self) -> Traffic:
        return Traffic(sum(one.bytes for one in self.up), sum(one.bytes for one in self.down))


def sent(algorithm: FederatedAlgorithm, server: PyTree, silo: PyTree | None, data: SiloData) -> Sent:
    """One silo's message and broadcast with their exact lengths, from shapes alone.

    Without ``silo``, a fresh one's.
    """
    key, own = key_of(0), in_user_precision(algorithm, jax.config.read("jax_enable_x64"))
    with jax.enable_x64(True):  # elsewhere a shape of float64 is cut to float32
        broadcast = received_by_one(own, key, server)
        if silo is None:
            silo = shapes_of(own.init_silo, key, broadcast, data)
        message, _ = shapes_of(own.silo_step, key, broadcast, silo, data)
    return Sent(wire.fields(message), wire.fields(broadcast))
