r"""Are there other modes? A few searches at the end of a run, in the same rounds; see :mod:`numpyro_fed.run.check`.

Points around q do not see what is far from it. So the server follows several points uphill at once (Levenberg and
Marquardt's steps, :mod:`numpyro_fed.normal.newton`), on the density of the globals with the locals integrated out,

.. math:: \log p(z_G) + \sum_j \log f_j(z_G)

never on the joint one, whose modes are useless where scales are free. A silo sends value, gradient and half of the
Hessian of its :math:`\log f_j` at each. They start at q's mean, at its mirror image, at q's mean with the elements of
every vector in reverse (components of a mixture, relabelled), at draws of the prior, near zero and far out from q.

A maximum has Laplace's mass, :math:`p(\hat z) (2 \pi)^{d/2} |P|^{-1/2}` with minus the Hessian P there. Searches that
come to no end, and ends that are flat in some direction, say nothing.
"""

from copy import copy
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_sample
from scipy.special import logsumexp

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Phase
from numpyro_fed.data.padding import SiloData
from numpyro_fed.keys import digest
from numpyro_fed.local.integrate import Marginal, silo_factor, start_frame
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.initial import initial
from numpyro_fed.model.rows import components_of
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.normal.newton import Search, advance, derivatives, start_search
from numpyro_fed.precision import UNOPTIMISED
from numpyro_fed.results.looks import FAR, ModesLook, told
from numpyro_fed.results.scalars import scalars
from numpyro_fed.results.verdict import Evidence, globals_at
from numpyro_fed.run.mode import MAX_DIM
from numpyro_fed.run.runner import Runner
from numpyro_fed.schedules import as_schedule

Array = jax.Array
NODES = {1: 7, 2: 5}  # per dimension of a row: a mode is not placed by the last digit
DRAWS = 32  # of a row's locals, the same at every point, where there is no quadrature
SEARCHES = ((20, 8), (50, 4), (MAX_DIM, 3))  # up to so many dimensions, so many
MAX_ROUNDS, LOOK = 15, 3
LOCAL_STEPS = 8  # of Newton's method to the locals' modes, from those of the round before
CONVERGED = 1e-2  # expected gain of the next step, in log density
FLAT = 1e-6  # the least curvature of a maximum, in a precision with a unit diagonal
WIDE = 6.0  # sds from q's mean
MODES = digest("\0modes")


class SearchBroadcast(NamedTuple):
    """All that a silo receives."""

    points: Array  # (K, d)
    theta: dict[str, Array]


class SearchMessage(NamedTuple):
    value: Array  # (K,)
    gradient: Array  # (K, d)
    precision: Array  # (K, d (d + 1) / 2): the lower triangle of minus the Hessian


class SearchServer(NamedTuple):
    search: Search  # K of them, stacked
    theta: dict[str, Array]


def searches_round(split: SplitModel, marginal: Marginal, num: int) -> FederatedAlgorithm:
    """The searches as pure functions; see :mod:`numpyro_fed.algorithm`."""
    d = split.dim
    lower = np.tril_indices(d)

    def init(key: Array) -> SearchServer:
        return begun(jnp.zeros((num, d)), split.theta)

    def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> Any:
        """The locals' modes, where they are looked for next: for each search its own."""
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), split.near_zero_local(data.mask))

    def broadcast(key: Array, server: SearchServer) -> Broadcast:
        return Broadcast(SearchBroadcast(server.search.trial, server.theta))

    def silo_step(key: Array, broadcast: Broadcast, silo: Any, data: SiloData) -> tuple[SearchMessage, Any]:
        sent: SearchBroadcast = broadcast.common
        components = components_of(split, data) if marginal.rows == "indexed" else None
        factor = silo_factor(split, marginal, data, components, sent.theta)
        nodes = factor.nodes(None)

        def one(given: tuple[Array, Any]) -> tuple[SearchMessage, Any]:
            z, loc = given
            frame = start_frame(split, data)
            if split.groups:
                frame = factor.refit(z, frame._replace(loc=loc), LOCAL_STEPS)
                # a step that was too long must not stay: the next one starts from here
                loc = jax.tree.map(lambda new, old: jnp.where(jnp.all(jnp.isfinite(new)), new, old), frame.loc, loc)
            value, gradient, precision = derivatives(lambda z: factor.log_f(z, frame, nodes), z)
            return SearchMessage(value, gradient, precision[lower]), loc

        return jax.lax.map(one, (sent.points, silo), batch_size=min(num, factor.batch))

    def aggregate(messages: SearchMessage, cohort: Cohort) -> SearchMessage:
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), messages)

    def server_step(key: Array, server: SearchServer, silos: SearchMessage) -> tuple[SearchServer, dict]:
        def one(search: Search, found: SearchMessage) -> Search:
            half = jnp.zeros((d, d)).at[lower].set(found.precision)
            whole = half + jnp.tril(half, -1).T
            value, gradient, precision = derivatives(lambda z: split.log_prior(z, server.theta), search.trial)
            slack = 1e-3 + 1e-5 * jnp.abs(search.value)  # rounding
            return advance(search, value + found.value, gradient + found.gradient, precision + whole, slack)[0]

        search = jax.vmap(one)(server.search, silos)
        ended = server.search.gain <= CONVERGED  # those that have come to an end stay where they are
        keep = lambda new, old: jnp.where(ended.reshape(-1, *(1,) * (new.ndim - 1)), old, new)
        search = jax.tree.map(keep, search, server.search)
        return SearchServer(search, server.theta), {"gain": search.gain}

    return FederatedAlgorithm(init, init_silo, broadcast, silo_step, aggregate, server_step).traced_once()


def begun(points: Array, theta: dict[str, Array]) -> SearchServer:
    return SearchServer(jax.vmap(start_search)(points), theta)


def _marginal(marginal: Marginal, split: SplitModel) -> Marginal:
    """As the check integrates locals, but with fewer nodes."""
    size = max((group.size for group in split.groups), default=1)
    return marginal._replace(num={"quadrature": NODES.get(size, 1), "importance_weighted": DRAWS}.get(marginal.kind, 1))


def starts(split: SplitModel, key: Array, mean: np.ndarray, sds: np.ndarray) -> np.ndarray:
    """Where the searches begin, (K, d), the most telling ones first; see the module."""
    d, dtype = split.dim, jnp.zeros(()).dtype
    num = next(number for most, number in SEARCHES if d <= most)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
    parts = split.unravel(jnp.asarray(mean, dtype))
    reverse = np.asarray(split.ravel({name: part[::-1] if part.ndim else part for name, part in parts.items()}))
    near = rng.normal(size=(2, d))
    try:
        drawn = jax.jit(jax.vmap(lambda key: initial(split, init_to_sample, key)), compiler_options=UNOPTIMISED)
        prior = np.asarray(drawn(jax.random.split(key, 3)))
    except (ValueError, TypeError, NotImplementedError):  # an improper prior has no draws
        prior = 2 * rng.normal(size=(3, d))
    wide = mean + WIDE * sds * near[1]
    each = [mean, -mean, reverse, prior[0], near[0], prior[1], wide, prior[2]]
    different: list[np.ndarray] = []
    for point in each:
        if np.all(np.isfinite(point)) and not any(np.allclose(point, other) for other in different):
            different.append(point)
    return np.stack(different[:num]).astype(dtype)


def look_for_modes(
    runner: Runner, marginal: Marginal, normal: Normal, theta: dict[str, Array], evidence: Evidence
) -> ModesLook | str | None:
    """Where the searches ended, or why there were none. None: interrupted."""
    split = runner.split
    if split.dim > MAX_DIM:
        return f"other modes were not looked for: the globals have {split.dim} dimensions, more than {MAX_DIM}"
    if marginal.kind == "importance_weighted" and marginal.rows == "whole":
        return "other modes were not looked for: locals that meet in a term cannot be integrated out well enough"
    mean, sds = np.asarray(normal.mean, np.float64), np.sqrt(np.diagonal(np.asarray(normal.covariance, np.float64)))
    points = starts(split, jax.random.fold_in(runner.key, MODES), mean, sds)
    few = _marginal(marginal, split)
    algorithm = remembered(
        partial(searches_round, split, few, len(points)), "modes", ByIdentity(split), few, len(points)
    )
    phase = Phase(
        "modes",
        algorithm,
        begin=lambda left, fresh: Begun(begun(jnp.asarray(points), theta)),
        num_rounds=MAX_ROUNDS,
        done=lambda info: bool(np.all(info["gain"][-1] <= CONVERGED)),
        role="check",
        effort="least",
        look=LOOK,
        watched=False,  # a search may well leave the support
    )
    everyone = copy(runner)  # all silos take part in each of the rounds, whatever the run's schedule
    everyone.schedule = as_schedule(None)
    _, states = runner.engine.start(algorithm, runner.key, runner.stack)
    left, _ = everyone.run((phase,), Left(), states, None)
    if left.interrupted:
        return None
    return found_modes(split, left.server.search, normal, theta, evidence, len(points))


def found_modes(
    split: SplitModel, search: Search, normal: Normal, theta: dict[str, Array], evidence: Evidence, num: int
) -> ModesLook:
    """The maxima among the searches' ends, float64, beside q's own mass (by importance, or Laplace's if larger)."""
    at = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), search)
    ended = at.gain <= 10 * CONVERGED
    log_weights = np.asarray(evidence.log_target) - np.asarray(evidence.log_proposal)
    log_weights = log_weights[np.isfinite(log_weights)]
    own = float(logsumexp(log_weights) - np.log(len(evidence.points))) if log_weights.size else -np.inf
    mean, covariance = np.asarray(normal.mean, np.float64), np.asarray(normal.covariance, np.float64)
    masses, distances, kept = [], [], []
    for i in np.flatnonzero(ended):
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
    look = ModesLook(np.array(masses), np.array(distances), own, num, int(np.sum(ended)))
    if look.other is None:
        return look
    there = globals_at(split, theta, np.asarray(search.x)[kept[look.other]][None])
    return look._replace(where=told({name: float(column[0]) for name, column in scalars(there).items()}))
