"""A server that may not hear from everyone: who was heard, who not for how long, and what is held of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any


class Hearing(NamedTuple):
    """A server's state, and what it keeps because messages can be lost."""

    server: PyTree
    heard: np.ndarray  # bool (J,): a message of theirs was used
    missed: np.ndarray  # int (J,): times since, one after the other
    last: PyTree  # (J, ...): what each contributed last, where that is held
    info: dict[str, Any]  # the last round's, for one in which nobody is heard

    def of(self, places: list[int]) -> "Hearing":
        """What is known of some of the silos."""
        at = np.array(places, int)
        last = jax.tree.map(lambda leaf: leaf[at], self.last)
        return self._replace(heard=np.asarray(self.heard)[at], missed=np.asarray(self.missed)[at], last=last)


class Gone(Exception):
    """A silo that is lost for good, or refuses, and the last good state."""

    def __init__(
        self, silo: str, why: str, server: PyTree, states: tuple, info: dict, done: int, refuses: bool = False
    ) -> None:
        super().__init__(f"silo {silo!r} {'refuses' if refuses else 'is lost'}: {why}")
        self.silo, self.why, self.states, self.info, self.done = silo, why, states, info, done
        self.server, self.hearing = inner(server), server if isinstance(server, Hearing) else None
        self.role = ""  # of the phase
        self.round = 0


def inner(server: PyTree) -> PyTree:
    """The algorithm's server state."""
    return server.server if isinstance(server, Hearing) else server


def within(function: Callable[[PyTree], PyTree], server: PyTree) -> PyTree:
    """``function`` of the algorithm's server state, the rest as it is."""
    return server._replace(server=function(server.server)) if isinstance(server, Hearing) else function(server)
