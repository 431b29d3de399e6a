"""A fit as a value: what a run leaves behind. :class:`~numpyro_fed.Fit` is this, and what can be done with it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from numpyro_fed.algorithm import Posterior
from numpyro_fed.data.silos import Silos
from numpyro_fed.model.mixing import meant
from numpyro_fed.model.partition_table import Partition
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.results.correction import Correction, HasCorrection
from numpyro_fed.results.ledger import Entry
from numpyro_fed.results.looks import Looks
from numpyro_fed.results.programs import Programs
from numpyro_fed.results.state import Again, State
from numpyro_fed.results.verdict import Evidence, Verdict, corrected_verdict, globals_at, judged

NOT_ASKED = Survey(0)
UNASKED = "nobody asked for a check: run(..., check=True)"


@dataclass(frozen=True, repr=False, eq=False)
class Fitted:
    """A posterior, the states it is read off, and how they came about."""

    posterior: Posterior
    split: SplitModel
    state: State
    history: dict[str, np.ndarray]  # one row a round, those of the start included
    seconds: float  # wall time of the run, compilation included
    padded: tuple[dict[str, int], ...]  # each bucket's padded axis lengths
    silos: Any = None  # a Silos or a SiloStore; None after nf.load without silos
    shapes: Silos | None = None  # after nf.load: zeros in the shapes of the silos' arguments
    survey: Survey = NOT_ASKED  # what the silos told before the first round
    records: tuple[Any, ...] = ()  # what each phase of the run cost
    sent: tuple[Entry, ...] = ()  # all that was sent; silos by their place among those of the state, and then `left`
    left: tuple[str, ...] = ()  # silos that were lost on the way
    reasons: tuple[str, ...] = ()  # why it is to be doubted, as the rounds show
    moving: bool = False  # one of these is that it had not come to rest
    evidence: Evidence | str = UNASKED  # of the check phase, or why there is none
    again: Again | None = None  # how to run again
    hints: tuple[str, ...] = ()  # what the rounds showed that would explain a posterior which is wrong

    @property
    def partition(self) -> Partition:
        """Which site lives where, with notes on what might not be meant; prints as a table."""
        part = self.split.partition
        return replace(part, notes=(*part.notes, *map(meant, self.survey.around)))

    @property
    def num_rounds(self) -> int:
        """Rounds of communication, the start's included."""
        return len(next(iter(self.history.values()))) if self.history else self.state.round

    @property
    def params(self) -> dict[str, np.ndarray]:
        """The model's numpyro.param values (theta), constrained."""
        return jax.tree.map(np.asarray, self.split.constrain_theta(self.posterior.theta(self.state.server)))

    @cached_property
    def programs(self) -> Programs:
        """What draws are made with, compiled."""
        return Programs(self.posterior, self.split)

    @cached_property
    def correction(self) -> Correction | None:
        """Effective sample size, Pareto k-hat, points and weights of a corrected fit; None for any other."""
        posterior = self.posterior
        return posterior.correction(self.state.server) if isinstance(posterior, HasCorrection) else None

    @cached_property
    def verdict(self) -> Verdict:
        """Whether the fit is to be trusted, why not, and what to type then; it prints."""
        if self.correction is not None:
            looks = Looks() if isinstance(self.evidence, str) else self.evidence.looks
            return corrected_verdict(self.correction, self._globals_at(self.correction.points), looks)
        normal, draws = None, {}
        if not isinstance(self.evidence, str):
            normal, draws = self.posterior.normal(self.state.server), self._globals_at(self.evidence.points)
        found = judged(self.evidence, normal, draws, self.reasons, self.moving)
        return found if found.ok else replace(found, reasons=(*found.reasons, *self.hints))

    def _globals_at(self, points: np.ndarray) -> dict[str, np.ndarray]:
        return globals_at(self.split, self.posterior.theta(self.state.server), points)

    @property
    def reads_data(self) -> bool:
        """Whether local latents are read off the data, by an encoder or a guide function."""
        return getattr(self.posterior, "reads_data", False)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The arguments that the posterior's encoder reads; () when it has none."""
        return getattr(self.posterior, "inputs", ())

    @property
    def from_store(self) -> bool:
        """Whether it was fitted to an :class:`~numpyro_fed.SiloStore`."""
        return bool(getattr(self.state.names, "lazy", False))

    @property
    def any_silos(self) -> Any:
        """The silos, or (after nf.load without them) zeros of their shapes, which is enough for latents."""
        found = self.silos or self.shapes
        assert found is not None, "a fit has silos or their shapes"
        return found

    def need_silos(self, what: str) -> None:
        """Raises when there are no data."""
        if self.silos is None:
            raise ValueError(f"{what} need the silos' data, and this fit was loaded without: pass silos= to nf.load")

    def need_again(self) -> Again:
        """How to run again; raises where nobody said."""
        if self.again is None:
            raise ValueError(
                "this fit does not know its method, so nothing can be run again: make it with run or nf.load"
            )
        return self.again
