r"""Are there other modes? A few searches at the end of a run, in the same rounds; see :mod:`numpyro_fed.run.check`.

Points around q do not see what is far from it. So the server follows several points uphill at once (Levenberg and
Marquardt's steps, :mod:`numpyro_fed.normal.newton`), on the density of the globals with the locals integrated out,

.. math:: \log p(z_G) + \sum_j \log f_j(z_G)

never on the joint one, whose modes are useless where scales are free. A silo sends value, gradient and half of the
Hessian of its :math:`\log f_j` at each. They start at the mirror image of q's mean, at that mean with the elements of
every vector in reverse (components of a mixture, relabelled), far out from q, and around zero at draws as large as
each site's mean (a draw of a wide prior would be too far away).

A search ends where nothing is gained any more, or where q is. A maximum has Laplace's mass,
:math:`p(\hat z) (2 \pi)^{d/2} |P|^{-1/2}` with minus the Hessian P there. Searches that come to no end, and ends that
are flat in some direction, say nothing.
"""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Phase
from numpyro_fed.data.padding import SiloData
from numpyro_fed.host import folded, put, real_dtype
from numpyro_fed.keys import digest
from numpyro_fed.local.integrate import Marginal, silo_factor, start_frame
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.rows import components_of
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.normal.matrices import lower_half, symmetric
from numpyro_fed.normal.newton import Search, advance, derivatives
from numpyro_fed.precision import works
from numpyro_fed.results.looks import FAR, ModesLook, told
from numpyro_fed.results.scalars import scalars
from numpyro_fed.results.verdict import Evidence, globals_at
from numpyro_fed.run.books import Record
from numpyro_fed.run.mode import MAX_DIM, NODES
from numpyro_fed.run.runner import Runner
from numpyro_fed.schedules import as_schedule

Array = jax.Array
DRAWS = 32  # of a row's locals, the same at every point, where there is no quadrature
SEARCHES = ((20, 6), (50, 3), (MAX_DIM, 2))  # up to so many dimensions, so many
MAX_ROUNDS = 10
DAMPING = 0.3  # of the first step: starts are far from any mode, and a refused step costs a round
HOME = 1.0  # sds of q from its mean, within which a search is where q is
LOCAL_STEPS = 4  # of Newton's method to the locals' modes, from those of the round before
CONVERGED = 1e-2  # expected gain of the next step, in log density
FLAT = 1e-6  # the least curvature of a maximum, in a precision with a unit diagonal
WIDE = 6.0  # sds from q's mean
MODES = digest("\0modes")


class SearchBroadcast(NamedTuple):
    """All that a silo receives."""

    points: Array  # (K, d)
    ended: Array  # bool (K,): nothing is asked of these any more
    theta: dict[str, Array]


class SearchMessage(NamedTuple):
    value: Array  # (K,)
    gradient: Array  # (K, d)
    precision: Array  # (K, d (d + 1) / 2): the lower triangle of minus the Hessian


class SearchServer(NamedTuple):
    search: Search  # K of them, stacked
    theta: dict[str, Array]
    mean: Array  # (d,): q's
    whitening: Array  # (d, d): of what is off that, to standard normals


def searches_round(split: SplitModel, marginal: Marginal, num: int) -> FederatedAlgorithm:
    """The searches as pure functions; see :mod:`numpyro_fed.algorithm`."""
    d = split.dim

    def init(key: Array) -> SearchServer:
        return begun(np.zeros((num, d), real_dtype()), split.theta, np.zeros(d), np.eye(d))

    def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> Any:
        """The locals' modes, where they are looked for next: for each search its own."""
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), split.near_zero_local(data.mask))

    def broadcast(key: Array, server: SearchServer) -> Broadcast:
        return Broadcast(SearchBroadcast(server.search.trial, _ended(server), server.theta))

    def silo_step(key: Array, broadcast: Broadcast, silo: Any, data: SiloData) -> tuple[SearchMessage, Any]:
        sent: SearchBroadcast = broadcast.common
        components = components_of(split, data) if marginal.rows == "indexed" else None
        factor = silo_factor(split, marginal, data, components, sent.theta)
        nodes = factor.nodes(None)

        def place(ended: Array, z: Array, loc: Any) -> tuple[Any, Any]:
            """The locals around a point, and where they are looked for next."""
            frame = start_frame(split, data)
            found = factor.refit(z, frame._replace(loc=loc), LOCAL_STEPS)
            frame = found._replace(coupling=frame.coupling)  # none: nodes need not move with z to be differentiated
            # a step that was too long must not stay: the next one starts from here
            return frame, jax.tree.map(lambda new, old: jnp.where(jnp.all(jnp.isfinite(new)), new, old), frame.loc, loc)

        def look(ended: Array, z: Array, frame: Any) -> SearchMessage:
            value, gradient, precision = factor.derivatives(z, frame, nodes)
            return SearchMessage(value, gradient, lower_half(precision))

        frames, locs = (), silo
        if split.groups:
            unlooked = lambda ended, z, loc: (start_frame(split, data), loc)
            frames, locs = _each(unlooked, place, sent.ended, sent.points, silo)
        nothing = SearchMessage(jnp.zeros(()), jnp.zeros(d), jnp.zeros(d * (d + 1) // 2))
        return works(partial(_each, lambda *_: nothing, look))(sent.ended, sent.points, frames), locs

    def aggregate(messages: SearchMessage, cohort: Cohort) -> SearchMessage:
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), messages)

    def server_step(key: Array, server: SearchServer, silos: SearchMessage) -> tuple[SearchServer, dict]:
        def one(search: Search, found: SearchMessage) -> Search:
            whole = symmetric(found.precision, d)
            value, gradient, precision = derivatives(lambda z: split.log_prior(z, server.theta), search.trial)
            slack = 1e-3 + 1e-5 * jnp.abs(search.value)  # rounding
            return advance(search, value + found.value, gradient + found.gradient, precision + whole, slack)[0]

        search = jax.vmap(one)(server.search, silos)
        ended = _ended(server)
        keep = lambda new, old: jnp.where(ended.reshape(-1, *(1,) * (new.ndim - 1)), old, new)
        search = jax.tree.map(keep, search, server.search)
        server = server._replace(search=search)
        return server, {"ended": _ended(server)}

    return FederatedAlgorithm(init, init_silo, broadcast, silo_step, aggregate, server_step).traced_once()


def _each(if_ended: Callable[..., Any], look: Callable[..., Any], ended: Array, points: Array, given: Any) -> Any:
    """One search after another: of those that have ended nothing is asked."""
    return jax.lax.map(lambda one: jax.lax.cond(one[0], if_ended, look, *one), (ended, points, given))


def _ended(server: SearchServer) -> Array:
    """Searches that have come to an end, or to where q is, stay there: bool (K,)."""
    off = (server.search.x - server.mean) @ server.whitening.T
    home = (abs(server.search.value) < np.inf) & ((off**2).sum(axis=1) <= HOME**2)
    return home | (server.search.gain <= CONVERGED)


def begun(points: np.ndarray, theta: dict[str, Array], mean: np.ndarray, whitening: np.ndarray) -> SearchServer:
    (num, d), dtype = points.shape, points.dtype
    unknown, curvature = np.full(num, np.inf, dtype), np.broadcast_to(np.eye(d, dtype=dtype), (num, d, d))
    damping = np.full(num, DAMPING, dtype)
    search = put((points, points, -unknown, curvature, np.zeros_like(points), damping, unknown))
    return SearchServer(Search(*search), theta, put(mean.astype(dtype)), put(whitening.astype(dtype)))


def with_few_nodes(marginal: Marginal, split: SplitModel) -> Marginal:
    """As the check integrates locals, but with fewer nodes."""
    size = max((group.size for group in split.groups), default=1)
    return marginal._replace(num={"quadrature": NODES.get(size, 1), "importance_weighted": DRAWS}.get(marginal.kind, 1))


def looked_for(split: SplitModel, marginal: Marginal) -> bool:
    return split.dim <= MAX_DIM and not (marginal.kind == "importance_weighted" and marginal.rows == "whole")


def num_searches(split: SplitModel) -> int:
    return next(number for most, number in SEARCHES if split.dim <= most)


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


def modes_phase(split: SplitModel, few: Marginal, num: int) -> Phase:
    """So many searches; where they begin is left open."""
    make = partial(searches_round, split, few, num)
    return Phase(
        "modes",
        remembered(make, "modes", ByIdentity(split), few, num),
        num_rounds=MAX_ROUNDS,
        done=lambda info: bool(np.all(info["ended"][-1])),
        finish=lambda left, server, info: left._replace(server=(server, int(np.sum(info["ended"][-1])))),
        role="check",
        effort="some",
        looks_at_data=MAX_ROUNDS * num * split.dim * few.evaluations(split),
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
    server = begun(points, theta, mean, whitening)
    phase = modes_phase(split, few, len(points))._replace(begin=lambda left, fresh: Begun(server))
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
