r"""Are there other modes? A few searches at the end of a run, in the same rounds; see :mod:`numpyro_fed.run.check`.

Points around q do not see what is far from it. So the server follows several points uphill at once
(:mod:`numpyro_fed.run.searches`). They start at the mirror image of q's mean, at that mean with the elements of every
vector in reverse (components of a mixture, relabelled), far out from q, and around zero at draws as large as each
site's mean (a draw of a wide prior would be too far away).

A search ends where nothing is gained any more, or where q is. A maximum has Laplace's mass,
:math:`p(\hat z) (2 \pi)^{d/2} |P|^{-1/2}` with minus the Hessian P there. Searches that come to no end, and ends that
are flat in some direction, say nothing.
"""

from copy import copy

import jax
import numpy as np
from scipy.special import logsumexp

from numpyro_fed.algorithm import Begun, Left, Phase
from numpyro_fed.host import folded, real_dtype
from numpyro_fed.keys import digest
from numpyro_fed.local.integrate import Marginal
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.results.looks import FAR, ModesLook, told
from numpyro_fed.results.scalars import scalars
from numpyro_fed.results.verdict import Evidence, globals_at
from numpyro_fed.run.books import Record
from numpyro_fed.run.mode import MAX_DIM
from numpyro_fed.run.runner import Runner
from numpyro_fed.run.searches import CONVERGED, SearchServer, begun, looks, num_searches, searches, with_few_nodes
from numpyro_fed.schedules import as_schedule

Array = jax.Array
MAX_ROUNDS = 10
FLAT = 1e-6  # the least curvature of a maximum, in a precision with a unit diagonal
WIDE = 6.0  # sds from q's mean
MODES = digest("\0modes")


def looked_for(split: SplitModel, marginal: Marginal) -> bool:
    return split.dim <= MAX_DIM and not (marginal.kind == "importance_weighted" and marginal.rows == "whole")


def starts(split: SplitModel, key: Array, mean: np.ndarray, sds: np.ndarray) -> np.ndarray:
    """Where the searches begin, (K, d), the most telling ones first; see the module."""
    num = num_searches(split)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
    sizes = [int(np.prod(shape)) for shape in split.global_shapes.values()]
    sites = np.split(mean, np.cumsum(sizes)[:-1])
    shapes = split.global_shapes.values()
    reverse = [
        np.flip(part.reshape(shape), 0).ravel() if shape else part for part, shape in zip(sites, shapes, strict=True)
    ]
    size = np.concatenate([np.full(len(part), max(1.0, np.sqrt(np.mean(part**2)))) for part in sites if len(part)])
    around = size * rng.normal(size=(num, split.dim))
    each = [
        mean,
        -mean,
        np.concatenate(reverse),
        around[0],
        mean + WIDE * sds * rng.normal(size=split.dim),
        *around[1:],
    ]
    different = [mean]
    for point in each:
        if np.all(np.isfinite(point)) and not any(np.allclose(point, other) for other in different):
            different.append(point)
    return np.stack(different[1 : num + 1]).astype(real_dtype())


def modes_phase(split: SplitModel, few: Marginal, num: int, num_silos: int) -> Phase:
    """So many searches; where they begin is left open."""
    return Phase(
        "modes",
        searches(split, few, num, num_silos),
        num_rounds=MAX_ROUNDS,
        done=lambda info: bool(np.all(info["_ended"][-1])),
        finish=lambda left, server, info: left._replace(server=(server, int(np.sum(info["_ended"][-1])))),
        role="check",
        effort="some",
        looks_at_data=looks(split, few, num),
        look=1,  # and so rounds are counted one by one
        watched=False,  # a search may well leave the support
        recipe=("modes", num),
    )


def look_for_modes(
    runner: Runner, marginal: Marginal, normal: Normal, theta: dict[str, Array], evidence: Evidence
) -> ModesLook | str | None:
    """Where the searches ended, or why there were none. None: interrupted."""
    split = runner.split
    if not looked_for(split, marginal) and split.dim > MAX_DIM:
        return f"other modes were not looked for: the globals have {split.dim} dimensions, more than {MAX_DIM}"
    if not looked_for(split, marginal):
        return "other modes were not looked for: locals that meet in a term cannot be integrated out well enough"
    mean, sds = np.asarray(normal.mean, np.float64), np.sqrt(np.diagonal(np.asarray(normal.covariance, np.float64)))
    points = starts(split, folded(runner.key, MODES), mean, sds)
    few = with_few_nodes(marginal, split)
    whitening = np.linalg.inv(np.linalg.cholesky(np.asarray(normal.covariance, np.float64)))
    num_silos = len(runner.stack.names)
    server = begun(split, num_silos, points, theta, mean, whitening)
    phase = modes_phase(split, few, len(points), num_silos)._replace(begin=lambda left, fresh: Begun(server))
    everyone = copy(runner)  # all silos take part in each of the rounds, whatever the run's schedule
    everyone.schedule = as_schedule(None)
    _, states = runner.begun(phase, runner.key)
    left, _ = everyone.run((phase,), Left(), states, None)
    records = runner.books.records
    first = len(records)
    while first and records[first - 1].phase == phase.name:
        first -= 1
    if first < len(records):
        records[first:] = [Record("modes", *np.sum([one[1:] for one in records[first:]], axis=0).tolist())]
    if left.interrupted:
        return None
    server, ended = left.server
    return found_modes(split, server, ended, normal, theta, evidence)


def found_modes(
    split: SplitModel, server: SearchServer, ended: int, normal: Normal, theta: dict[str, Array], evidence: Evidence
) -> ModesLook:
    """The maxima among the searches' ends, float64, beside q's own mass (by importance, or Laplace's if larger)."""
    at = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), server.search)
    log_weights = np.asarray(evidence.log_target) - np.asarray(evidence.log_proposal)
    log_weights = log_weights[np.isfinite(log_weights)]
    own = float(logsumexp(log_weights) - np.log(len(evidence.points))) if log_weights.size else -np.inf
    mean, covariance = np.asarray(normal.mean, np.float64), np.asarray(normal.covariance, np.float64)
    masses, distances, kept = [], [], []
    for i in np.flatnonzero(at.gain <= CONVERGED):
        scale = 1 / np.sqrt(np.maximum(np.abs(np.diagonal(at.precision[i])), np.finfo(float).tiny))
        values = np.linalg.eigvalsh(at.precision[i] * scale * scale[:, None])
        if not values[0] > FLAT:
            continue
        off = at.x[i] - mean
        squared = min(off @ np.linalg.solve(covariance, off), off @ at.precision[i] @ off)
        distances.append(float(np.sqrt(max(squared, 0.0))))
        log_det = np.sum(np.log(values)) - 2 * np.sum(np.log(scale))
        masses.append(float(at.value[i] + 0.5 * split.dim * np.log(2 * np.pi) - 0.5 * log_det))
        kept.append(i)
    own = max([own, *(mass for mass, distance in zip(masses, distances, strict=True) if distance <= FAR)])
    between = [(at.x[i] - at.x[j]) @ at.precision[i] @ (at.x[i] - at.x[j]) for i in kept for j in kept]
    apart = float(np.sqrt(max([0.0, *between])))
    num = len(at.x)
    look = ModesLook(np.array(masses), np.array(distances), own, num, ended, apart)
    if look.other is None:
        return look
    there = globals_at(split, theta, np.asarray(server.search.x)[kept[look.other]][None])
    return look._replace(where=told({name: float(column[0]) for name, column in scalars(there).items()}))
