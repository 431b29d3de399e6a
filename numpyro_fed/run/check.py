"""The check at the end of a run: the density of all silos at points around q, from which the fit's verdict is made.

See :mod:`numpyro_fed.results.verdict`. The points are the first of those that a correction would ask for, so that
:meth:`numpyro_fed.results.fit.Fit.correct` only adds to them. What these points do not see is looked at apart:
:mod:`numpyro_fed.run.locals`, :mod:`numpyro_fed.run.modes` and :mod:`numpyro_fed.run.theta`.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from numpyro_fed.algorithm import Posterior, Program, PyTree
from numpyro_fed.host import folded
from numpyro_fed.keys import digest
from numpyro_fed.local.integrate import Marginal, rows_of
from numpyro_fed.model.survey import Survey
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.results.importance import proposal, scrambling
from numpyro_fed.results.looks import Looks
from numpyro_fed.results.verdict import Evidence, foresee_globals, found_change, globals_at, log_weights
from numpyro_fed.run.foresee import foresee
from numpyro_fed.run.locals import foresee_locals, look_at_locals
from numpyro_fed.run.modes import look_for_modes, looked_for, modes_phase
from numpyro_fed.run.runner import Runner
from numpyro_fed.run.searches import num_searches, with_few_nodes
from numpyro_fed.run.target import BLOCK, exact_marginal, log_target, target_phase
from numpyro_fed.run.theta import look_at_theta

MOST = 2048  # points
MOST_DIMS = 500
CHECK = digest("\0check")


def checked(
    runner: Runner, posterior: Posterior, survey: Survey, server: PyTree, interrupted: bool, states: tuple = ()
) -> Evidence | str:
    """What the silos' densities say of the posterior; or why they were not asked.

    ``states`` are the silos', as the rounds left them: of their locals. () for a posterior without.
    """
    split, name = runner.split, runner.label
    if interrupted:
        return "the run was interrupted, and not checked"
    if not runner.engine.holds_states:
        return "silos of a store are not asked again, so there was no check"
    if not split.dim:
        return "the model has no global latents to check"
    if split.dim > MOST_DIMS:
        return f"in {split.dim} dimensions, more than {MOST_DIMS}, points around the posterior say nothing of it"
    normal = posterior.normal(server)
    if normal is None:
        return f"nf.{name} has no normal posterior of the globals here, so there are no points to check it at"
    mean, covariance = np.asarray(normal.mean, np.float64), normal.covariance
    if not (np.all(np.isfinite(mean)) and np.all(np.isfinite(covariance))):
        return "the posterior is improper, and cannot be checked"
    theta, marginal = posterior.theta(server), exact_marginal(split, survey, posterior)
    words = scrambling(folded(runner.key, CHECK))
    points, log_proposal = proposal(words, mean, covariance, MOST)
    evidence, wanted = None, BLOCK
    while evidence is None or len(evidence.points) < wanted:
        done = 0 if evidence is None else len(evidence.points)
        more = log_target(runner, "check", marginal, points[done:wanted], done, mean, theta)
        if more is None:
            return "the check was interrupted"
        known = np.zeros(0) if evidence is None else evidence.log_target
        refined = more.refined if evidence is None else evidence.refined
        log_p = np.concatenate([known, more.log_p])
        evidence = Evidence(points[:wanted], log_p, log_proposal[:wanted], words, refined)
        if not np.any(np.isfinite(evidence.log_target)):
            break
        change, _ = found_change(evidence, normal, globals_at(split, theta, evidence.points))
        if wanted < MOST and not change.precise:
            wanted *= 2
    looks = _looked(runner, posterior, survey, marginal, normal, server, states, evidence)
    return "the check was interrupted" if looks is None else evidence._replace(looks=looks)


def foreseen(runner: Runner, program: Program, survey: Survey) -> list[Callable[[], None]]:
    """What begins to compile the check's larger programs, one by one."""
    split, posterior = runner.split, program.posterior
    if not (runner.engine.holds_states and 0 < split.dim <= MOST_DIMS):
        return []
    marginal = exact_marginal(split, survey, posterior)
    phases = [target_phase(runner, "check", marginal, BLOCK)]
    if looked_for(split, marginal):
        phases.append(modes_phase(split, with_few_nodes(marginal, split), num_searches(split), len(runner.stack.names)))
    rounds = next(phase for phase in program.phases if phase.role == "rounds")
    return [
        *(partial(foresee, runner, phase, scheduled=False) for phase in phases),
        partial(foresee_locals, runner, posterior, rows_of(split, survey), rounds),
        partial(foresee_globals, split),
    ]


def _looked(
    runner: Runner,
    posterior: Posterior,
    survey: Survey,
    marginal: Marginal,
    normal: Normal,
    server: PyTree,
    states: tuple,
    evidence: Evidence,
) -> Looks | None:
    """What the points do not see; None: interrupted."""
    theta, mean = posterior.theta(server), np.asarray(normal.mean, np.float64)
    local = look_at_locals(runner, posterior, normal, rows_of(runner.split, survey), server, states)
    modes = None if local is None else look_for_modes(runner, marginal, normal, theta, evidence)
    if local is None or modes is None:
        return None
    at_points = log_weights(evidence, normal)[0]
    off = look_at_theta(runner, marginal, evidence.points, at_points, mean, theta)
    return None if off is None else Looks(local, modes, off)
