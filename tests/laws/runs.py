"""One method's runs, each made when a law first asks for it, and kept: they share most programs."""

from functools import cached_property
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from programs import compiled
from sealed import sealed
from table import LONG, METHODS, SLOW, silos_for

import numpyro_fed as nf
from numpyro_fed.algorithm import FederatedAlgorithm, Phase
from numpyro_fed.data import stack
from numpyro_fed.engines.vmap import Vmap

KEY = jax.random.key(0)
HALF = 2  # rounds
COHORT = nf.schedules.fixed([["york"]])


def every_method(*slow: str, mark: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """Values of the fixture ``runs``; ``slow`` are methods for which a law is a slow test (or what ``mark`` says)."""
    of = lambda name: [pytest.mark.slow] * (name in SLOW) + [mark] * (name in slow)
    marks = lambda name: [pytest.mark.xdist_group(name), *of(name)]
    return [pytest.param(name, marks=marks(name)) for name in METHODS]


# A law that needs another program: slow tests of methods whose programs are long.
another_program = pytest.mark.parametrize("runs", every_method(*LONG), indirect=True, scope="session")
# The same where each method has parts of its own that may break.
before_a_merge = pytest.mark.parametrize(
    "runs", every_method(*LONG, mark=pytest.mark.merge), indirect=True, scope="session"
)


class Impatient(Vmap):
    """A user who stops an algorithm after the first half of its rounds."""

    chunk = HALF

    def __init__(self, phase: Phase) -> None:
        heard = SimpleNamespace(started=np.ones((), bool), visits=np.ones(1))  # of methods that have two, by the server
        own = phase.algorithm, phase.algorithm if phase.suited is None else phase.variant(phase.suited(heard)).algorithm
        object.__setattr__(self, "algorithms", own)

    def rounds(self, algorithm: FederatedAlgorithm, *args: Any, **options: Any) -> Any:
        first = args[4]
        if any(algorithm is own for own in self.algorithms) and first >= HALF:
            raise KeyboardInterrupt
        return super().rounds(algorithm, *args, **options)


class Runs:
    """Of one method of the table, in float64: what the laws claim is exactness."""

    def __init__(self, name: str) -> None:
        self.method = METHODS[name]

    def run(self, silos: nf.Silos, num_rounds: int = 2 * HALF, **options: Any) -> nf.Fit:
        return self.method.run(KEY, silos, num_rounds, progress_bar=False, **options)

    @cached_property
    def silos(self) -> nf.Silos:
        return silos_for(self.method.model)

    @cached_property
    def whole(self) -> nf.Fit:
        return self.run(self.silos)

    @cached_property
    def first(self) -> nf.Fit:
        return self.run(self.silos, HALF)

    @cached_property
    def second(self) -> nf.Fit:
        return self.run(self.silos, HALF, init_state=self.first.state)

    @cached_property
    def interrupted(self) -> nf.Fit:
        return self.run(self.silos, engine=Impatient(compiled(self.method, self.silos).phase))

    @cached_property
    def plain(self) -> nf.Fit:
        """One silo at a time, through bytes, and from arrays that only their silo can read."""
        return self.run(sealed(self.silos), engine=nf.engines.Loopback())

    @cached_property
    def turned(self) -> nf.Fit:
        """The silos in another order."""
        return self.run(silos_for(self.method.model, *reversed(self.silos.names)))

    @cached_property
    def padded(self) -> nf.Fit:
        """All silos longer than the longest."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stack, "PADDING", 100.0)
            patch.setattr(stack, "round_up", lambda length: length + 3)
            return self.run(self.silos, engine=nf.engines.Loopback())

    @cached_property
    def cohort(self) -> nf.Fit:
        """One more round, of one silo."""
        return self.run(self.silos, 1, schedule=COHORT, init_state=self.whole.state, engine=nf.engines.Loopback())

    @cached_property
    def fast_cohort(self) -> nf.Fit:
        return self.run(self.silos, 1, schedule=COHORT, init_state=self.whole.state)


def close(a: Any, b: Any, rtol: float = 1e-8, atol: float = 1e-9) -> None:
    """The same structure, and numbers up to rounding."""
    assert jax.tree.structure(a) == jax.tree.structure(b)  # type: ignore[operator]
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=atol)


def same(a: Any, b: Any) -> None:
    """Bit by bit."""
    close(a, b, 0, 0)
