r"""Whether stochastic steps have come to rest.

Steps that fall over a horizon end at rest wherever they are, so the loss alone does not tell. Over a block of rounds
the mean :math:`\mu_t` of q is averaged in each half. Where it wanders around its place the two averages agree; where it
is still on its way they differ, by more than the error that wandering leaves them:

.. math:: |\bar\mu_2 - \bar\mu_1| > 0.05\,\sigma + 4\,\mathrm{se}

in sds of q, with standard errors from the averages of shorter stretches. Then another block follows, with twice the
horizon.
"""

from typing import Any

import numpy as np

from numpyro_fed.algorithm import Left
from numpyro_fed.run.diagnose import REFUSED

BLOCKS = 3  # each twice as long as the one before
FEWEST = 40  # rounds that tell a trend from noise
LATEST = 512  # rounds whose losses are compared
BEYOND_NOISE, FELL = 4.0, 0.05  # standard errors, and nats: a twentieth moves a mean by a third of an sd
STRETCHES = 10  # of half a block
FAR, BEYOND_ERROR = 0.05, 4.0  # sds, and standard errors
OFTEN = 0.01  # of the rounds
MOST_WATCHED = 1000  # dimensions in which every round's mean is kept


def still_falling(losses: np.ndarray) -> str:
    """A reason, where the loss fell beyond its noise from the first to the second half of the last rounds."""
    losses = np.asarray(losses, np.float64)
    losses = losses[np.isfinite(losses)][-LATEST:]
    if len(losses) < FEWEST:
        return ""
    halves = np.array_split(losses, 2)
    fell = halves[0].mean() - halves[1].mean()
    noise = np.sqrt(sum(half.var(ddof=1) / len(half) for half in halves))
    if fell < max(BEYOND_NOISE * noise, FELL):
        return ""
    return f"the loss still fell, by {fell:.2g} over the last {len(losses)} rounds: {MORE}"


def still_drifting(means: np.ndarray, sds: np.ndarray) -> str:
    """A reason, where means (rounds, d) moved on from the first to the second half, in sds (d,) of q.

    >>> still_drifting(np.random.default_rng(0).normal(size=(400, 2)), np.ones(2))
    ''
    >>> still_drifting(np.linspace(0, 1, 400)[:, None], np.ones(1))[:39]
    'the mean moved by 0.5 sd from the first'
    """
    if len(means) < FEWEST:
        return ""
    stretches = np.array_split(np.asarray(means, np.float64) / sds, 2 * STRETCHES)
    averages = np.stack([one.mean(axis=0) for one in stretches])
    first, second = averages[:STRETCHES], averages[STRETCHES:]
    moved = np.abs(second.mean(axis=0) - first.mean(axis=0))
    # of the second half, from its neighbouring stretches: a drift, or the way from the start, would count as noise
    error = np.sqrt(np.mean(np.diff(second, axis=0) ** 2, axis=0) / STRETCHES)
    if not np.any(moved > FAR + BEYOND_ERROR * error):
        return ""
    return f"the mean moved by {np.max(moved):.2g} sd from the first to the second half of {len(means)} rounds: {MORE}"


MORE = "run more, num_rounds=..., or go on, run(..., init_state=fit.state)"


def at_rest(left: Left, server: Any, info: dict[str, Any], often: float = OFTEN) -> Left:
    """What the rounds of a block say of their end; ``info`` has the whole block's."""
    left = left._replace(server=server)
    found = [still_falling(info["loss"])]
    if "_mean" in info:
        found.append(still_drifting(info["_mean"], white_sds(server.params)))
    moving = any(found)
    reasons = (reason for reason in (*found, often_refused(info, often)) if reason)
    return left._replace(reasons=(*left.reasons, *reasons), moving=left.moving or moving)


def often_refused(info: dict[str, Any], often: float) -> str:
    """A reason, where more than a few rounds' gradients were not finite: draws that count were left out."""
    share = float(np.mean(info.get(REFUSED, 0.0)))
    if share <= often:
        return ""
    return (
        f"in {share:.2g} of the rounds the density or its gradient was not finite at the draws, which were left out: "
        "the posterior without these is another. Call numpyro.enable_x64() first, or keep the distributions' "
        "parameters from the edges of their supports (logits= instead of probs=)"
    )


def watched(params: dict[str, Any]) -> dict[str, Any]:
    """A row of what :func:`at_rest` looks at, where q is a normal in few enough dimensions."""
    mean = params.get("loc")
    return {} if mean is None or mean.size > MOST_WATCHED or "log_scale" not in params else {"_mean": mean}


def white_sds(params: dict[str, Any]) -> np.ndarray:
    """Of q, in the coordinates of its parameters."""
    sds = np.exp(np.asarray(params["log_scale"], np.float64))
    if "tril" in params:
        return sds * np.sqrt(1 + np.sum(np.tril(np.asarray(params["tril"], np.float64), -1) ** 2, axis=1))
    if "factor" in params:
        return np.sqrt(sds**2 + np.sum(np.asarray(params["factor"], np.float64) ** 2, axis=1))
    return sds
