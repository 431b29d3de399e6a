"""The server's end of a run whose silos are elsewhere: an engine that asks.

The same loop, phases and server steps as in one process (:mod:`numpyro_fed.run.runner`); what a silo does is asked for
in words (``Phase.recipe``), and of its state the server holds the name (:mod:`numpyro_fed.remote.states`).
"""

import hashlib
import secrets
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np

from numpyro_fed.algorithm import FederatedAlgorithm, Phase, Plan, _begin_silo
from numpyro_fed.checks import warn_user
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines import wire
from numpyro_fed.engines.base import Sent, received_by_one, sent_to
from numpyro_fed.engines.hearing import Gone
from numpyro_fed.engines.inbox import Reply
from numpyro_fed.engines.listening import Answer, Listening, Question
from numpyro_fed.engines.steps import broadcast_of, init_server
from numpyro_fed.host import folded, key_of, shapes_of
from numpyro_fed.keys import SERVER, START
from numpyro_fed.model.build import unpadded
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.precision import engine_in_x64, in_user_precision
from numpyro_fed.remote.memory import Memory, names_of
from numpyro_fed.remote.opening import reads_broadcast, to_json
from numpyro_fed.remote.own import saved_for
from numpyro_fed.remote.post import Post
from numpyro_fed.remote.states import Elsewhere, as_row, name_of, structure_of
from numpyro_fed.remote.transport import Failure
from numpyro_fed.run.lost import SiloLostError

Request = tuple[str, dict[str, Any], bytes]


AWAY = ("timeout", "lost")
FINAL = ("refused", "mismatch")  # kinds of failure that asking again does not mend
TIDY = 8  # rounds after which silos let go of states that nobody will ask for


class RemoteError(SiloLostError):
    """A silo elsewhere that cannot take part, before a run has begun; the text says which and what to do."""


@dataclass(frozen=True)
class Remote:
    """Silos that are asked over a transport; made by :func:`numpyro_fed.remote.connect`.

    Args:
        post: how they are asked.
        timeout: seconds that a reply is waited for. A silo whose process is started again within them goes on where it
            was, and the run does not notice.
        quorum: silos without which a run stops; by default one that is lost for good leaves with its term, down to the
            last.
        patience: times, one after the other, that a silo is not heard before it is lost for good. Until then its site
            stays, or its last contribution is held.
    """

    post: Post
    timeout: float = 600.0
    quorum: int = 1
    patience: int = 3
    method: str = ""  # the study's name of it
    run: str = ""  # hex: what this run is called in the silos
    seed: str = ""  # of what runs are called, where a sequence of processes must call them the same; "": at random
    doubts: tuple[str, ...] = ()  # why the next run's fit is not that of all silos
    memory: Memory | None = None

    chunk: ClassVar[int] = 16
    holds_states: ClassVar[bool] = True
    identity: ClassVar[str] = "elsewhere"  # a run may go on over another transport, and with more patience
    reads_store: ClassVar[bool] = False

    # --- a run is opened ----------------------------------------------------------------------------------------------

    def bound(self, method: Any, silos: Any, run: str = "") -> "Remote":
        """The engine of one run; ``run``: of one that goes on."""
        run = run or self._called(silos.name_of(method), silos.names)
        post = Post(self.post.transport, self.post.study, run)
        post.traffic = self.post.traffic  # one account
        memory = Memory(silos.names, self.doubts)
        return replace(self, post=post, method=silos.name_of(method), run=run, doubts=(), memory=memory)

    def _called(self, method: str, names: tuple[str, ...]) -> str:
        if not self.seed:
            return secrets.token_hex(8)
        return hashlib.sha256("\0".join((self.seed, method, *names)).encode()).hexdigest()[:16]

    def certified(self, split: SplitModel, silos: Any) -> tuple[SplitModel, PartitionError | None]:
        """Every silo divides the model as the server does, and looks whether that is right on its own data."""
        body = {"run": self.run, "method": self.method, "silos": silos.described, "told": silos.told}
        said = self._everyone("open", body, silos.names)
        failed = [(name, why) for name, why in said.items() if isinstance(why, Failure)]
        for name, why in failed:
            if why.told == PartitionError.__name__:
                raise PartitionError(
                    f"silo {name!r} finds that the split's log density is not NumPyro's on its data, or that they do "
                    "not fit the model: its own log says why, and `numpyro-fed check` there shows it"
                )
            raise _absent(name, why)
        fine = all(body["padded"] is True for body, _ in said.values())
        self._memory.padded = fine
        return (split if fine else unpadded(split)), None

    def agree(self, survey: Survey, plan: Plan, program: Any) -> None:
        """Tell the silos what all of them said, and how long the run will be."""
        memory = self._memory
        body = {"run": self.run, "survey": to_json(survey), "plan": to_json(plan), "padded": memory.padded}
        memory.rounds = next(phase for phase in program.phases if phase.role == "rounds").algorithm
        for name, why in self._everyone("agree", body, memory.names).items():
            if isinstance(why, Failure):
                raise _absent(name, why)

    def doubted(self, why: str) -> "Remote":
        return replace(self, doubts=(*self._memory.doubts, why))

    def finished(self, fit: Any) -> None:
        """Give the silos the fit, for draws of their own latents there; of the others they are told no more."""
        fit = replace(fit, reasons=(*fit.reasons, *self._memory.doubts))
        said = self.told("end", {name: ({"run": self.run}, saved_for(fit, name)) for name in self._memory.names})
        for name, why in said.items():
            if isinstance(why, Failure):
                warn_user(f"silo {name!r} was not brought the fit ({why.told}): it draws no latents of its own from it")

    def _everyone(self, type: str, body: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Replies of all silos; one that is away is asked again."""
        said, left = dict[str, Any](), list(names)
        for _ in range(self.patience):
            said |= self.told(type, {name: (body, b"") for name in left})
            left = [name for name in left if isinstance(said[name], Failure) and said[name].kind in AWAY]
            if not left:
                break
        return said

    def told(self, type: str, requests: dict[str, tuple[dict[str, Any], bytes]]) -> dict[str, Any]:
        """Replies by silo: (body, payload), or a Failure."""
        asked: dict[str, Request] = {name: (type, *request) for name, request in requests.items()}
        return self.post.ask(asked, self.timeout)

    @property
    def _memory(self) -> Memory:
        if self.memory is None:
            raise RemoteError("silos elsewhere are asked in a run: method.run(key, silos)")
        return self.memory

    # --- phases -------------------------------------------------------------------------------------------------------

    def during(self, phase: Phase) -> Listening:
        if not phase.recipe:
            raise NotImplementedError(f"silos elsewhere do not know the phase {phase.name!r}")
        ends = RemotePhase(self, phase, self._memory)
        return Listening(ends, ends.ask, phase.watched, self.patience)

    def pin(self, kept: list[dict[str, str]]) -> None:
        """States that a checkpoint names, by silo: they are kept."""
        self._memory.pinned = kept

    def names_of(self, states: tuple, stack: Stack) -> dict[str, str]:
        return names_of(states, stack)

    def start(self, *args: Any) -> Any:
        raise NotImplementedError("silos elsewhere are asked for phases that they know: this look is not one of them")

    rounds = in_silos = start


def _absent(silo: str, why: Failure) -> Exception:
    """One that is away is lost, and a run may go on without it; one that cannot take part is somebody's to mend."""
    if why.kind in AWAY:
        return Gone(silo, why.told, None, (), {}, 0)
    return RemoteError(f"silo {silo!r} cannot take part: {why.told}")


@dataclass(frozen=True)
class RemotePhase:
    """One phase of a run, as silos elsewhere are asked for it."""

    engine: Remote
    phase: Phase
    memory: Memory

    @engine_in_x64
    def start(self, algorithm: FederatedAlgorithm, key: Any, stack: Stack) -> tuple[Any, tuple]:
        self.memory.started.add(self.phase.recipe)
        server_key = folded(folded(key, START), SERVER)
        server = init_server(algorithm, server_key)
        broadcast = jax.device_get(broadcast_of(algorithm, server_key, server))
        used = reads_broadcast(algorithm, sent_to(broadcast, 0), stack.shapes(0))
        bodies = {}
        for j, name in enumerate(stack.names):
            received = sent_to(broadcast, j)
            body = self._body("start", structure_of(received), [], name, key)
            bodies[name] = body, wire.encode(received) if used else b""
        return server, self._made(bodies, stack, server)

    def sent_at_start(self, algorithm: FederatedAlgorithm, server: Any, data: SiloData) -> Sent:
        """What silos are sent for their first states, where they look at it."""
        algorithm = in_user_precision(algorithm, self.memory.x64)
        with jax.enable_x64(True):
            received = received_by_one(algorithm, key_of(0), server)
            return Sent(down=wire.fields(received)) if reads_broadcast(algorithm, received, data) else Sent()

    def in_silos(self, function: Callable[..., Any], given: Any, stack: Stack, *states: tuple | None) -> tuple:
        if function is _begin_silo:  # which does nothing
            return states[0] or ()
        phase = self.phase
        known = {"begin_silo": phase.begin_silo, "leave_silo": phase.leave_silo, "shorten": phase.shorten}
        do = next(do for do, own in known.items() if own == function)
        given = jax.device_get(given)
        structure, payload = structure_of(given), wire.encode(given)
        found = [None if one is None else names_of(one, stack) for one in states]
        bodies = {}
        for name in stack.names:
            begins = [None if one is None else one.get(name) for one in found]
            bodies[name] = self._body(do, structure, begins, name), payload
        return self._made(bodies, stack, None)

    def one_state(self, algorithm: FederatedAlgorithm, server: Any, data: SiloData) -> Any:
        """What a state of a silo looks like: a fresh one, or that which the method's rounds left."""
        key = key_of(0)

        def fresh(algorithm: FederatedAlgorithm, server: Any) -> Any:
            algorithm = in_user_precision(algorithm, self.memory.x64)
            with jax.enable_x64(True):
                server = shapes_of(algorithm.init, key) if server is None else server
                received = received_by_one(algorithm, key, server)
                return shapes_of(algorithm.init_silo, key, received, data)

        rounds = self.memory.rounds
        if self.phase.role != "check" or rounds is None or self.phase.recipe in self.memory.started:
            return fresh(algorithm, server)
        return fresh(rounds, None)

    def entered(self, silos: tuple, stack: Stack) -> None:
        """Before a few rounds: they may have to be done again from here."""
        self.memory.begun[self.phase.recipe] = names_of(silos, stack)

    def ask(self, question: Question) -> dict[int, Answer]:
        """A round."""
        stack, names = question.stack, question.stack.names
        before = names_of(question.silos, stack)
        structure = structure_of(question.received)
        bodies = {}
        for j, sent in question.sent.items():
            begins = [before[names[j]]] if before else []
            body = self._body("step", structure, begins, names[j], question.key, question.at, question.effort)
            bodies[names[j]] = body, sent
        said = self.engine.told("work", bodies)
        like = self._message(question)
        found, last = {}, dict(before)
        for j, sent in question.sent.items():
            body, _ = bodies[names[j]]
            reply = said[names[j]]
            if isinstance(reply, Failure):
                found[j] = Answer([], None, None, reply.told, reply.kind in FINAL)
                continue
            self._heard(names[j], body)
            after: Any = ()
            if before:
                made = name_of(body, sent)
                last[names[j]], after = made, Elsewhere(as_row(made))
            mail = Reply(names[j], question.at, zlib.crc32(sent), reply[1])
            found[j] = Answer([mail], like, after)
        if before:
            self.memory.last[self.phase.recipe] = last
        return found

    # --- words --------------------------------------------------------------------------------------------------------

    def _body(
        self,
        do: str,
        structure: str,
        begins: Sequence[str | None],
        silo: str,
        key: Any = None,
        at: int = 0,
        effort: str = "least",
    ) -> dict[str, Any]:
        words: dict[str, Any] = {"key": None, "impl": None}
        if key is not None:
            words = self.memory.words_of(key)
        body = {
            "run": self.engine.run,
            "do": do,
            "phase": list(self.phase.recipe),
            "round": at,
            "effort": effort,
            "from": list(begins),
            **words,
        }
        place = (silo, do, *self.phase.recipe)
        if self.memory.structures.get(place) != structure:  # told until it is heard
            body["like"] = structure
        if do != "step" or at % TIDY == 0:
            body["keep"] = self.memory.keep(silo)
        return body

    def _made(self, bodies: dict[str, tuple[dict[str, Any], bytes]], stack: Stack, server: Any) -> tuple:
        """States that these requests make; everyone is needed."""
        left = dict(bodies)
        for _ in range(self.engine.patience):
            said = self.engine.told("work", left)
            failed = {name: why for name, why in said.items() if isinstance(why, Failure)}
            for name in left.keys() - failed.keys():
                self._heard(name, left[name][0])
            left = {name: bodies[name] for name in failed}
            if not left or any(why.kind in FINAL for why in failed.values()):
                break
        for name in sorted(left, key=lambda name: failed[name].kind not in FINAL):
            raise Gone(name, failed[name].told, server, (), {}, 0, refuses=failed[name].kind in FINAL)
        made = {name: name_of(*request) for name, request in bodies.items()}
        self.memory.last[(*self.phase.recipe, next(iter(bodies.values()))[0]["do"])] = made
        return tuple(Elsewhere(np.stack([as_row(made[name]) for name in bucket.names])) for bucket in stack.buckets)

    def _heard(self, silo: str, body: dict[str, Any]) -> None:
        """It has answered, so it knows the structure of what it was sent."""
        if "like" in body:
            self.memory.structures[silo, body["do"], *self.phase.recipe] = body["like"]

    def _message(self, question: Question) -> Any:
        """What a silo's message looks like."""
        recipe, algorithm, data = self.phase.recipe, question.algorithm, question.stack.shapes(0)
        if recipe not in self.memory.messages:
            silo = self.one_state(algorithm, question.server, data) if names_of(question.silos, question.stack) else ()
            shapes, _ = shapes_of(algorithm.silo_step, key_of(0), question.received, silo, data)
            self.memory.messages[recipe] = shapes
        return self.memory.messages[recipe]
