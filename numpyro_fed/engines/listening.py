"""The server's half of a round that bears what a network does: replies that are late, lost, or cannot be used."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Cohort, FederatedAlgorithm
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines import wire
from numpyro_fed.engines.base import one_state, sent_to
from numpyro_fed.engines.hearing import Gone, Hearing, inner
from numpyro_fed.engines.inbox import Reply, opened
from numpyro_fed.engines.steps import broadcast_of
from numpyro_fed.keys import SERVER
from numpyro_fed.pieces import jit
from numpyro_fed.precision import engine_in_x64, finite, stacked


class Question(NamedTuple):
    """What silos are asked in a round."""

    algorithm: FederatedAlgorithm
    key: Any  # the run's, or the phase's
    at: int  # the round
    attempt: int
    stack: Stack
    silos: tuple  # their states
    server: Any  # the algorithm's own state
    sent: dict[int, bytes]  # what each is sent, by its place
    received: Any  # the same of one of them, as a tree: for its structure
    effort: str


class Answer(NamedTuple):
    """Of one silo."""

    replies: list[Reply]  # all that arrived
    like: Any  # the structure of its message
    state: Any  # its own, if the message is used
    why: str = ""  # where there is no reply: why
    refuses: bool = False  # and to ask again is of no use


@dataclass
class Log:
    """Of one round: who was asked how often, who was heard, and what was refused."""

    names: Any
    up: int = 0
    down: int = 0
    asked: dict[str, int] = field(default_factory=dict)  # times
    heard: set[str] = field(default_factory=set)
    sizes: dict[str, int] = field(default_factory=dict)  # bytes of their messages
    refused: list[tuple[str, str, int]] = field(default_factory=list)  # whose, why, bytes
    refuse: set[str] = field(default_factory=set)  # who do not answer this, however often they are asked

    def why(self, silo: str) -> str:
        """The last reason against a silo's replies."""
        return next((why for name, why, _ in reversed(self.refused) if name == silo), "it did not reply")

    def take_back(self, silo: str, why: str) -> None:
        """A message that had been let in."""
        self.heard.discard(silo)
        self.refused.append((silo, why, self.sizes[silo]))

    def told(self) -> dict[str, Any]:
        """As columns of the history; what begins with _ is for the books alone."""
        lost = {name: self.why(name) for name in self.asked if name not in self.heard}
        for name, why, _ in self.refused:
            lost.setdefault(name, why)
        return {
            "bytes_up": self.up,
            "bytes_down": self.down,
            "took_part": np.array([name in self.heard for name in self.names]),
            "refused": np.array([lost.get(name, "") for name in self.names], dtype=str),
            "_asked": np.array([self.asked.get(name, 0) for name in self.names]),
            "_refused_bytes": np.array([sum(n for who, _, n in self.refused if who == name) for name in self.names]),
        }


@dataclass(frozen=True)
class Listening:
    """The rounds of one phase over an engine whose silos may not be heard.

    The method's own rounds go on without a message that cannot be used. Before the first of them and after the last
    everyone is needed, and so is everyone's first message where contributions are held: there the server asks again.

    Args:
        engine: which starts phases, and does what is done in silos between rounds.
        ask: how silos are asked. Those that do not reply are left out, or have no replies.
        watched: messages must be finite.
        patience: a silo of which no reply could be used so many times one after the other is lost.
    """

    engine: Any
    ask: Callable[[Question], dict[int, Answer]]
    watched: bool
    patience: int
    chunk: ClassVar[int] = 16

    def start(self, *args: Any) -> tuple[Any, tuple]:
        return self.engine.start(*args)

    def in_silos(self, *args: Any) -> tuple:
        return self.engine.in_silos(*args)

    @property
    def one_state(self) -> Any:
        return getattr(self.engine, "one_state", None)

    @engine_in_x64
    def listening(
        self, algorithm: FederatedAlgorithm, server: Any, silos: tuple, stack: Stack, before: Hearing | None = None
    ) -> Hearing:
        """The server's state with nobody heard yet, and room for what is held; or as they were heard ``before``."""
        num, key = len(stack.names), jax.random.key(0)
        silo = one_state(self, algorithm, server, silos, stack.shapes(0))

        def one_round(server: Any, silo: Any, data: Any) -> tuple[Any, Any]:
            received = sent_to(algorithm.broadcast(key, server), 0)
            message = jax.tree.map(lambda leaf: leaf[None], algorithm.silo_step(key, received, silo, data)[0])
            held = _absorbed(algorithm, key, server, message) if algorithm.lost.hold else ()
            together = held if algorithm.lost.hold else message
            return held, _stepped(algorithm, key, server, together, jnp.zeros(1, jnp.int32), num)[1]

        held, info = jax.eval_shape(one_round, server, silo, stack.shapes(0))
        last = jax.tree.map(lambda leaf: jnp.zeros((num, *leaf.shape[1:]), leaf.dtype), held)
        row = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), info)
        if before is not None and wire.fields(before.last) == wire.fields(last):
            return before._replace(server=server, info=row)
        return Hearing(server, np.zeros(num, bool), np.zeros(num, np.int32), last, row)

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
        rows: list[dict[str, Any]] = []
        if hasattr(self.engine, "entered"):
            self.engine.entered(silos, stack)
        for i in range(count):
            server = _still_valid(algorithm, server)
            server_key = _server_key(key, np.uint32(first + i))
            broadcast = jax.device_get(broadcast_of(algorithm, server_key, inner(server)))
            cohort = np.arange(len(stack.names)) if cohorts is None else np.asarray(cohorts[i])
            log = Log(stack.names)
            sent = {j: wire.encode(sent_to(broadcast, j)) for j in cohort.tolist()}
            received = sent_to(broadcast, int(cohort[0]))
            question = Question(algorithm, key, first + i, 0, stack, silos, inner(server), sent, received, effort)
            messages, moved = self._heard(question, server, log)
            for j in cohort.tolist():
                name = stack.names[j]
                if name in log.refuse or (j not in messages and self._waits(algorithm, server, j)):
                    ended = server, silos, _together(rows), len(rows)
                    raise Gone(name, log.why(name), *ended, refuses=name in log.refuse)
            silos = moved
            server, info = self._moved(algorithm, server_key, server, messages, cohort, cohorts is None, log)
            rows.append({**info, **log.told()})
            if isinstance(server, Hearing) and np.any(server.missed >= self.patience):
                name = stack.names[int(np.argmax(server.missed))]
                raise Gone(name, log.why(name), server, silos, _together(rows), len(rows))
        return server, silos, _together(rows)

    # --- what is asked, and what comes back ---------------------------------------------------------------------------

    def _heard(self, question: Question, server: Any, log: "Log") -> tuple[dict[int, Any], tuple]:
        """The messages that can be used, by place; and all states, those of their silos moved on."""
        stack, silos, messages = question.stack, question.silos, {}
        for attempt in range(self.patience):
            answers = self.ask(question._replace(attempt=attempt))
            again = {}
            for j, sent in question.sent.items():
                name, answer = stack.names[j], answers.get(j, Answer([], None, None))
                log.down, log.asked[name] = log.down + len(sent), log.asked.get(name, 0) + 1
                marks = question.at, zlib.crc32(sent)
                found, refused = opened(answer.replies, name, *marks, answer.like, self.watched)
                log.up += sum(len(one.data) for one in answer.replies)
                log.refused += [(name, one.why, one.bytes) for one in refused]
                if found is not None:
                    log.heard.add(name)
                    log.sizes[name] = len(answer.replies[-1].data)
                    messages[j], silos = found, _placed(silos, stack.place(name), answer.state)
                    continue
                if answer.why:
                    log.refused.append((name, answer.why, 0))
                if answer.refuses:
                    log.refuse.add(name)
                elif self._waits(question.algorithm, server, j):
                    again[j] = sent
            if not again:
                break
            question = question._replace(sent=again)
        return messages, silos

    def _waits(self, algorithm: FederatedAlgorithm, server: Any, j: int) -> bool:
        """Whether the round cannot go on without this silo."""
        if not isinstance(server, Hearing):
            return True
        return bool(algorithm.lost.hold and not server.heard[j])

    # --- at the server ------------------------------------------------------------------------------------------------

    def _moved(
        self,
        algorithm: FederatedAlgorithm,
        key: Any,
        server: Any,
        messages: dict[int, Any],
        cohort: np.ndarray,
        everyone: bool,
        log: Log,
    ) -> tuple[Any, dict]:
        """The server's step on what was heard, and on what is held of the others."""
        num = len(log.names)
        step = lambda server, used: _step(algorithm, key, server, used, cohort, everyone, num)
        found, info, finite = step(server, messages)
        if isinstance(server, Hearing) and self.watched and not finite:  # what is finite can still be too much
            good = lambda j: step(server, {i: m for i, m in messages.items() if i != j})[2]
            bad = [j for j in messages if good(j)] or list(messages)
            for j in bad:
                log.take_back(log.names[j], "the server's state would not be finite with it")
            found, info, _ = step(server, {i: m for i, m in messages.items() if i not in bad})
        return found, info


def _step(
    algorithm: FederatedAlgorithm,
    key: Any,
    server: Any,
    messages: dict[int, Any],
    cohort: np.ndarray,
    everyone: bool,
    num: int,
) -> tuple[Any, dict, bool]:
    """The server's state, a row of the history, and whether the state is finite."""
    fresh: np.ndarray = np.array(sorted(messages), np.int32)
    together = _on_host([messages[j] for j in fresh.tolist()]) if fresh.size else None
    if not isinstance(server, Hearing):
        found, info, _ = _server_step(algorithm, key, server, together, fresh, num)
        return found, info, True
    heard, missed = np.array(server.heard), np.array(server.missed)
    missed[cohort] += 1
    heard[fresh], missed[fresh] = True, 0
    server = server._replace(heard=heard, missed=missed)
    if together is None:  # nothing moves
        return server, dict(server.info), True
    if algorithm.lost.hold:
        server = server._replace(last=_kept(algorithm, key, server.server, together, server.last, fresh))
        fresh = np.flatnonzero(heard) if everyone else cohort[heard[cohort]]
        whole = np.array_equal(fresh, np.arange(num))
        together = server.last if whole else jax.tree.map(lambda leaf: leaf[fresh], server.last)
    found, info, finite = _server_step(algorithm, key, server.server, together, np.asarray(fresh, np.int32), num)
    info = jax.tree.map(np.asarray, info)
    return server._replace(server=found, info=info), info, bool(finite)


def _on_host(trees: list[Any]) -> Any:
    """Messages, stacked; typed keys and the like are JAX's."""
    if all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(trees)):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
    return stacked(trees)


def _still_valid(algorithm: FederatedAlgorithm, server: Any) -> Any:
    """Without what is held, where what comes now is of another kind: everyone is waited for."""
    void = algorithm.lost.void
    if not isinstance(server, Hearing) or void is None or not bool(void(server.server)):
        return server
    return server._replace(heard=np.zeros_like(np.asarray(server.heard)))


def _absorbed(algorithm: FederatedAlgorithm, key: Any, server: Any, messages: Any) -> Any:
    """What is held of each message."""
    absorb = algorithm.lost.absorb
    return messages if absorb is None else jax.vmap(lambda message: absorb(key, server, message))(messages)


def _stepped(algorithm: FederatedAlgorithm, key: Any, server: Any, together: Any, index: Any, num: int) -> Any:
    step = algorithm.lost.server_step if algorithm.lost.hold else None
    return (step or algorithm.server_step)(key, server, algorithm.aggregate(together, Cohort(index, num)))


@jax.jit
def _server_key(key: Any, at: Any) -> Any:
    return jax.random.fold_in(jax.random.fold_in(key, at), SERVER)


@partial(jit, static_argnums=0)
def _kept(algorithm: FederatedAlgorithm, key: Any, server: Any, messages: Any, last: Any, index: Any) -> Any:
    new = _absorbed(algorithm, key, server, messages)
    return jax.tree.map(lambda old, rows: old.at[index].set(rows), last, new)


@partial(jit, static_argnums=(0, 5))
def _server_step(algorithm: FederatedAlgorithm, key: Any, server: Any, together: Any, index: Any, num: int) -> Any:
    found, info = _stepped(algorithm, key, server, together, index, num)
    return found, info, finite(found)


def _together(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]} if rows else {}


def _placed(silos: tuple, place: tuple[int, int], new: Any) -> tuple:
    """All states, one of them another."""
    b, at = place
    return (*silos[:b], jax.tree.map(lambda leaf, own: _put(leaf, at, own), silos[b], new), *silos[b + 1 :])


def _put(leaf: Any, at: int, own: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf.at[at].set(own)
    changed = leaf.copy()
    changed[at] = own
    return changed
