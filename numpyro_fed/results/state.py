"""Everything that a run can go on from, and how a fit runs again."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import PyTree
from numpyro_fed.checks import format_names
from numpyro_fed.data.stack import Stack
from numpyro_fed.model.split_model import SplitModel


class State(NamedTuple):
    """Everything a run can go on from. The silos' part is private to them: it is in here as they are simulated here."""

    method: str  # its name; a corrected fit has that of the method before
    names: tuple[str, ...]  # of a store: its lazy LazyNames, and there are no buckets and no silos' states
    buckets: tuple[tuple[str, ...], ...]
    server: PyTree
    silos: tuple[PyTree, ...]  # over buckets, stacked over the bucket's silos
    round: int
    hearing: Any = None  # of a run that goes on without a silo: how the others were heard

    @property
    def corrected(self) -> bool:
        """Whether it is of a corrected fit, whose server holds points and the state before."""
        return hasattr(self.server, "inner")

    def silo(self, name: str) -> tuple[PyTree, int]:
        """One silo's state, and its bucket."""
        if getattr(self.names, "lazy", False) and name in self.names:
            return (), 0
        for b, bucket in enumerate(self.buckets):
            if name in bucket:
                position = bucket.index(name)
                return jax.tree.map(lambda leaf, position=position: leaf[position], self.silos[b]), b
        raise KeyError(f"no silo is named {name!r}; the silos are {format_names(self.names)}")

    def only(self, rest: tuple[str, ...], server: PyTree) -> "State":
        """The state in which the other silos never were; ``server`` is that without them."""
        buckets, states = [], []
        for names, state in zip(self.buckets, self.silos, strict=True):
            kept = np.array([i for i, name in enumerate(names) if name in rest], int)
            if kept.size:
                buckets.append(tuple(names[i] for i in kept))
                with jax.enable_x64(True):
                    states.append(jax.tree.map(lambda leaf, kept=kept: leaf[kept], state))
        return self._replace(names=rest, buckets=tuple(buckets), server=server, silos=tuple(states))

    def arranged(self, stack: Stack) -> tuple[PyTree, ...]:
        """The silos' states in another stack's buckets and order."""
        out = []
        for bucket in stack.buckets:
            states = [self.silo(name)[0] for name in bucket.names]
            out.append(jax.tree.map(_stacked, *states))
        return tuple(out)


def _stacked(*leaves: Any) -> Any:
    """States that are elsewhere have names on the host, which stay there."""
    return (np if all(isinstance(leaf, np.ndarray) for leaf in leaves) else jnp).stack(leaves)


class Fresh(NamedTuple):
    """A run on other silos, before its first round."""

    split: SplitModel
    state: State
    padded: tuple[dict[str, int], ...]  # as of a fit


class Again(NamedTuple):
    """How a fit runs again, with its method and on its engine. Given by whoever made the fit, who knows both."""

    prepare: Callable[..., Fresh]  # (rng_key, silos)
    run: Callable[..., Any]  # (rng_key, silos, num_rounds, *, schedule=None, init_state=None) -> Fit
    correct: Callable[..., Any]  # (fit, rng_key, num_points, engine=...) -> Fit; by default on the fit's engine
