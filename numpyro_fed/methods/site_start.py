"""EP's rounds as a start for other methods, where a search for a mode failed.

Moments are found where a mode is no summary: on a ridge, or where the density has several tops that are one posterior.
"""

from functools import partial
from typing import Any

from numpyro_fed.algorithm import Begun, Left, Phase, Plan, PyTree
from numpyro_fed.local.integrate import integrable
from numpyro_fed.methods.ep import EP
from numpyro_fed.methods.factorised_posterior import SitesPosterior
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.solvers import Importance


def site_start(split: SplitModel, survey: Survey, names: Any) -> tuple[Phase, ...]:
    """One phase, compiled when it is needed; or none, where EP would have to draw samples."""
    if split.theta or not 0 < split.dim <= Importance.most_dims or (split.groups and not integrable(split, survey)):
        return ()
    return (Phase("sites", None, role="start", made=partial(_made, split, survey, names)),)


def _made(split: SplitModel, survey: Survey, names: Any) -> Phase:
    program = EP(split.model).compile(split, survey, Plan(names=names))
    rounds = next(phase for phase in program.phases if phase.role == "rounds")  # from the prior: a mode was not found
    posterior = program.posterior
    assert isinstance(posterior, SitesPosterior)

    def begin(left: Left, fresh: PyTree) -> Begun | None:
        return rounds.begin(Left(), fresh)

    def finish(left: Left, server: PyTree, info: dict[str, Any]) -> Left | None:
        found = rounds.finish(Left(), server, info)
        if found is None or (found.moving and left.warm is not None):
            return None if left.warm is None else left
        return left._replace(warm=posterior.to_warm_start(server), unsure=found.moving)

    return rounds._replace(
        name="sites", begin=begin, finish=finish, leave_silo=partial(_leave, posterior), role="start"
    )


def _leave(posterior: SitesPosterior, warm: PyTree, silo: PyTree) -> PyTree:
    found = posterior.local_start(warm, silo)
    return () if found is None else found
