"""What the server remembers of a run whose silos are elsewhere."""

from typing import Any

import jax
import numpy as np

from numpyro_fed.algorithm import FederatedAlgorithm
from numpyro_fed.data.stack import Stack
from numpyro_fed.remote.states import Elsewhere, as_name


class Memory:
    """What a run's engine remembers: all else is a function of what it is given."""

    def __init__(self, names: tuple[str, ...], doubts: tuple[str, ...] = ()) -> None:
        self.names, self.doubts = names, doubts
        self.x64 = bool(jax.config.read("jax_enable_x64"))
        self.padded = True
        self.rounds: FederatedAlgorithm | None = None  # of the method
        self.last: dict[tuple, dict[str, str]] = {}  # {recipe: states after the last round, by silo}
        self.begun: dict[tuple, dict[str, str]] = {}  # {recipe: states before the chunk of rounds that goes on}
        self.pinned: list[dict[str, str]] = []
        self.structures: dict[tuple, str] = {}  # of what is sent, as each silo knows
        self._key: Any = None
        self._words: dict[str, Any] = {}
        self.started: set[tuple] = set()  # recipes of phases that began with fresh states
        self.messages: dict[tuple, Any] = {}  # {recipe: what a message looks like}

    def words_of(self, key: Any) -> dict[str, Any]:
        """A key, as JSON."""
        if key is not self._key:
            self._key = key
            self._words = {"key": np.asarray(jax.random.key_data(key)).tolist(), "impl": str(jax.random.key_impl(key))}
        return self._words

    def keep(self, silo: str) -> list[str]:
        """States that a silo is to keep."""
        every = (*self.last.values(), *self.begun.values(), *self.pinned)
        return sorted({names[silo] for names in every if silo in names})


def names_of(states: tuple, stack: Stack) -> dict[str, str]:
    """Names of states, by silo; none where silos have no state."""
    return {
        silo: as_name(row)
        for bucket, state in zip(stack.buckets, states, strict=False)
        if isinstance(state, Elsewhere)
        for silo, row in zip(bucket.names, np.asarray(state.name), strict=True)
    }
