"""Whether everybody was heard, nothing moves any more, and what was heard was worth hearing: the end of EP and PVI."""

from typing import Any, NamedTuple

import numpy as np

from numpyro_fed.algorithm import Left, Plan
from numpyro_fed.checks import silos_named
from numpyro_fed.methods.site_rounds import UNHEARD, SitesServer

LEAST_EFFECTIVE = 0.02  # of a silo's points or draws, below which its moments are noise
NOISE = 5.0  # so many tolerances of Monte Carlo error may be left in the posterior by a solver that draws


class Limits(NamedTuple):
    """What a method bears at the end of its rounds."""

    tolerance: float
    allowed: float  # movement, in sds, below which rounds are at rest
    max_move: float | None
    more_draws: str  # what to type against noise
    flat: tuple[str, ...]  # sites with an improper prior


def judged(left: Left, server: SitesServer, info: dict[str, Any], plan: Plan, limits: Limits) -> Left:
    """What the rounds themselves say against the posterior."""
    moving = np.asarray(server.moving)
    silent = [plan.names[j] for j in np.flatnonzero(moving >= UNHEARD).tolist()]
    if silent:
        told = (
            f"nobody asked {silos_named(silent)}, or nothing could be accepted from there: the posterior is not "
            "yet that of all silos. Run more rounds (init_state=fit.state); if rounds are skipped "
            "(fit.history['skipped']), pass damping=0.5 or another solver"
        )
        if limits.flat:
            told += (
                f". The prior of {' and '.join(map(repr, limits.flat))} is improper: a silo whose own rows do not "
                "determine it has no answer. Give it a proper prior, dist.Normal(0, 10)"
            )
        return doubted(left, told, moving=True)
    if limits.max_move is not None:
        held = np.any(np.asarray(info["held_back"])[-plan.sweep :], axis=0)
        if np.any(held):
            names = silos_named([plan.names[j] for j in np.flatnonzero(held).tolist()])
            left = doubted(
                left,
                f"{names} would still have moved the posterior by more than max_move={limits.max_move:g} sds of "
                "a cavity in the last sweep, and had to be held back: compare silos, fit.conflict(), and look at "
                "the data there; where they are right, raise max_move",
            )
    moves, allowed = float(info["moving"][-1]), limits.allowed
    if moves >= allowed > 0:
        averaged = allowed > limits.tolerance
        return doubted(
            left,
            f"the posterior still moves by {moves:.2g} sds a sweep, "
            f"{'or its Monte Carlo error is as large, ' if averaged else ''}above tolerance={limits.tolerance:g}"
            f"{f' x {NOISE:g}' if averaged else ''}: it is not yet the method's answer. Run more rounds, "
            "run(..., init_state=fit.state); if it does not settle, pass damping=0.5 or another solver"
            f"{limits.more_draws}",
            moving=True,
        )
    effective = float(info["ess"][-1])
    if not effective >= LEAST_EFFECTIVE:  # not a number, where no point had a density
        return doubted(
            left,
            f"in the last round some silo had {effective:.1%} effective points or draws, too few for its moments: "
            "pass solver=nf.solvers.HMC() with more chains, num_chains=100, or more points",
        )
    return left


def doubted(left: Left, reason: str, moving: bool = False) -> Left:
    return left._replace(reasons=(*left.reasons, reason), moving=left.moving or moving)
