"""What can go wrong between a silo and the server, made to happen.

A :class:`Fault` says what becomes of a silo's replies, and when. The server knows nothing of faults: it looks at what
arrives (:mod:`numpyro_fed.engines.inbox`) and uses a message or refuses it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import numpy as np

from numpyro_fed.engines import wire
from numpyro_fed.engines.inbox import Reply

Kind = Literal["drop", "late", "twice", "stale", "nan", "shape", "dtype", "damage", "poison", "stranger"]
PHASES = ("rounds", "start", "check")


@dataclass(frozen=True)
class Fault:
    """What happens to a silo's replies.

    ================  ==============================================================================================
    kind              what arrives
    ================  ==============================================================================================
    ``"drop"``        nothing
    ``"late"``        the reply, in the next round
    ``"twice"``       the reply, and the same once more
    ``"stale"``       a reply to an earlier broadcast
    ``"nan"``         a message with a number that is none
    ``"shape"``       a message with an array that is too long
    ``"dtype"``       a message in another precision
    ``"damage"``      a message with a bit turned over
    ``"poison"``      a message whose numbers are ``factor`` times what they should be
    ``"stranger"``    the reply, and one from a silo that nobody asked
    ================  ==============================================================================================

    Args:
        silo: its name.
        kind: of the fault.
        rounds: in which it happens, 0 being the first of the phase; None: in all. A silo that leaves drops its replies
            from some round on, ``range(12, 10**9)``; one that joins later drops them until then, ``range(12)``, with a
            ``patience`` above 12, and where the server holds factors (EP, PVI, SEP, GIPVI): others wait for everyone's
            first message.
        times: so often in a round, where the server asks again; None: always.
        phase: ``"rounds"``, ``"start"`` or ``"check"``.
        factor: of a poison.
    """

    silo: str
    kind: Kind
    rounds: Iterable[int] | None = None
    times: int | None = None
    phase: str = "rounds"
    factor: float = -1e3

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {self.phase!r}")
        if self.rounds is not None and not isinstance(self.rounds, range):
            object.__setattr__(self, "rounds", tuple(self.rounds))

    def strikes(self, silo: str, role: str, at: int, attempt: int) -> bool:
        """Whether it happens now."""
        return (
            (self.silo, self.phase) == (silo, role)
            and (self.rounds is None or at in self.rounds)
            and (self.times is None or attempt < self.times)
        )

    def delivered(self, reply: Reply, message: Any) -> list[Reply]:
        """What arrives in the place of a reply."""
        changed = lambda tree: [reply._replace(data=wire.encode(tree))]
        if self.kind in ("drop", "late"):
            return []
        if self.kind == "twice":
            return [reply, reply]
        if self.kind == "stale":
            return [reply._replace(answers=reply.answers ^ 1)]
        if self.kind == "nan":
            return changed(jax.tree.map(lambda leaf: leaf * np.nan if _real(leaf) else leaf, message))
        if self.kind == "shape":
            return changed(jax.tree.map(lambda leaf: np.append(leaf, leaf.ravel()[:1]), message))
        if self.kind == "dtype":
            return changed(jax.tree.map(lambda leaf: leaf.astype(np.float16) if _real(leaf) else leaf, message))
        if self.kind == "damage":
            turned = bytes([reply.data[-1] ^ 1])
            return [reply._replace(data=reply.data[:-1] + turned)]
        if self.kind == "poison":
            return changed(
                jax.tree.map(lambda leaf: (self.factor * leaf).astype(leaf.dtype) if _real(leaf) else leaf, message)
            )
        return [reply, reply._replace(silo=f"{reply.silo}?")]

    def overdue(self, reply: Reply, role: str, at: int) -> list[Reply]:
        """What of the round before arrives now."""
        if self.kind != "late" or not self.strikes(reply.silo, role, at - 1, 0):
            return []
        return [reply._replace(round=reply.round - 1)]


def _real(leaf: Any) -> bool:
    return np.issubdtype(np.asarray(leaf).dtype, np.floating)


@dataclass(frozen=True)
class Faults:
    """All that goes wrong in a run, and how long the server bears it.

    Args:
        events: the faults.
        patience: a silo of which no reply could be used so many times one after the other is lost for good: its term
            leaves the posterior, and the verdict says so.

    Example:
        >>> faults = Faults([Fault("york", "nan", rounds=[3]), Fault("leeds", "drop", rounds=range(5, 9))])
        >>> engine = nf.engines.Loopback(faults=faults)
    """

    events: Iterable[Fault] = ()
    patience: int = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(self.events))
        for event in self.events:
            if not isinstance(event, Fault):
                raise TypeError(f"events must be nf.engines.Fault values, got a {type(event).__name__}")

    def delivered(self, reply: Reply, message: Any, role: str, at: int, attempt: int) -> list[Reply]:
        """What arrives when a silo has sent a reply."""
        arriving = [late for event in self.events for late in event.overdue(reply, role, at)]
        for event in self.events:
            if event.strikes(reply.silo, role, at, attempt):
                return [*arriving, *event.delivered(reply, message)]
        return [*arriving, reply]
