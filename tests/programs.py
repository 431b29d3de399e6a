"""What a method compiles to on some silos, for tests that look inside."""

from typing import Any, NamedTuple

import numpyro_fed as nf
from numpyro_fed.algorithm import FederatedAlgorithm, Phase, Plan, Posterior
from numpyro_fed.data.stack import Stack
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey


class Compiled(NamedTuple):
    split: SplitModel
    survey: Survey
    stack: Stack
    phase: Phase  # the method's own rounds
    posterior: Posterior

    @property
    def algorithm(self) -> FederatedAlgorithm:
        return self.phase.algorithm


def compiled(method: Any, silos: nf.Silos, **plan: Any) -> Compiled:
    split, survey, stack, _ = method.prepare(silos)
    program = method.compile(split, survey, Plan(names=silos.names, **plan))
    phase = next(phase for phase in program.phases if phase.role == "rounds")
    return Compiled(split, survey, stack, phase, program.posterior)
