"""The plain engine where replies go wrong: silos in a loop, and a network that cannot be relied on."""

import zlib
from dataclasses import dataclass

import jax
import numpy as np

from numpyro_fed.data.silos import at_silo
from numpyro_fed.engines import wire
from numpyro_fed.engines.faults import Faults
from numpyro_fed.engines.inbox import Reply, not_finite
from numpyro_fed.engines.listening import Answer, Question
from numpyro_fed.engines.steps import from_bytes, silo_step
from numpyro_fed.keys import fold_in_name, identity


@dataclass(frozen=True)
class Lossy:
    """How the silos of :class:`~numpyro_fed.engines.Loopback` are asked where faults happen."""

    faults: Faults
    role: str

    def __call__(self, question: Question) -> dict[int, Answer]:
        return {j: self._one(question, j, sent) for j, sent in question.sent.items()}

    def _one(self, question: Question, j: int, sent: bytes) -> Answer:
        algorithm, stack, at = question.algorithm, question.stack, question.at
        name = stack.names[j]
        b, place = stack.place(name)
        state = jax.tree.map(lambda leaf: leaf[place], question.silos[b])
        with at_silo(name):
            received = from_bytes(sent, question.received)
            key = fold_in_name(jax.random.fold_in(question.key, at), identity(name))
            message, new = silo_step(algorithm, key, received, state, stack.data(name))
        reply = Reply(name, at, zlib.crc32(sent), wire.encode(message))
        arrived = self.faults.delivered(reply, jax.tree.map(np.asarray, message), self.role, at, question.attempt)
        # where its state would not be finite, it begins again where it was
        return Answer(arrived, message, state if not_finite(new) else new)
