"""Everything that a run can go on from."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.checks import told
from numpyro_fed.data.names import Names
from numpyro_fed.data.stack import Stack

CORRECTED = ", corrected"  # after the method's name in the state of a corrected fit


class State(NamedTuple):
    """Everything a run can go on from. The silos' part is private to them: it is in here as they are simulated here."""

    method: str
    names: tuple[str, ...]  # of a store: its lazy Names, and there are no buckets and no silos' states
    buckets: tuple[tuple[str, ...], ...]
    server: Any
    silos: tuple  # over buckets, stacked over the bucket's silos
    round: int

    def silo(self, name: str) -> tuple[Any, int]:
        """One silo's state, and its bucket."""
        if isinstance(self.names, Names) and name in self.names:
            return (), 0
        for b, bucket in enumerate(self.buckets):
            if name in bucket:
                position = bucket.index(name)
                return jax.tree.map(lambda leaf, position=position: leaf[position], self.silos[b]), b
        raise KeyError(f"no silo is named {name!r}; the silos are {told(self.names)}")

    def arranged(self, stack: Stack) -> tuple:
        """The silos' states in another stack's buckets and order."""
        out = []
        for bucket in stack.buckets:
            found = [self.silo(name)[0] for name in bucket.names]
            out.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *found))
        return tuple(out)


class ById(NamedTuple):
    """A value that is the same program's when it is the same object."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.value is other.value
