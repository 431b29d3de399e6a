"""The log density of all silos at points of the globals, locals integrated out: one round for each block of points.

Corrections weigh points by it, and the check at the end of a run asks what a correction would change. The message is
not a summary like a site. It is the silo's likelihood at so many places, numbers of which the silo's data can be read
more closely than of other messages.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Phase, Posterior
from numpyro_fed.data.padding import SiloData
from numpyro_fed.equations import works
from numpyro_fed.host import put, zeros_like
from numpyro_fed.local.integrate import Marginal, choose, silo_factor, start_frame
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.rows import components_of
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.precision import in_x64
from numpyro_fed.run.runner import Runner

Array = jax.Array
BLOCK = 256  # points of a round: another number is another program
REFINED = 16  # points at which locals are integrated again, with twice the nodes
DRAWS = 256  # of a row's locals at each point, where they are not integrated by quadrature
LOCAL_STEPS = 30  # of Newton's method to the locals' modes at the posterior mean, from nowhere


class TargetBroadcast(NamedTuple):
    """All that a silo receives."""

    points: Array  # (S, d)
    first: Array  # int: the place of the first of them in the sequence
    centre: Array  # (d,): where it looks for its locals
    theta: dict[str, Array]


class TargetServer(NamedTuple):
    """The points, and what is known of them."""

    sent: TargetBroadcast
    log_prior: Array  # (S,)
    log_f: Array  # (S + R,) float64: the sum over silos; at the end the first points again, with more nodes


class Target(NamedTuple):
    """The log density of all silos at points, float64."""

    log_p: np.ndarray  # (S,)
    refined: np.ndarray  # (R,): what twice the nodes change of the first of them; (0,) where there are no nodes


def target_round(split: SplitModel, marginal: Marginal, num_points: int) -> FederatedAlgorithm:
    """The round as pure functions; see :mod:`numpyro_fed.algorithm`. Its message is log f_j at the points, (S,).

    Where locals are integrated by quadrature it is followed by log f_j at the first of them, with twice as many nodes.
    """
    d, again, draws = split.dim, num_refined(marginal, num_points), marginal.kind == "importance_weighted"
    finer = marginal._replace(num=2 * marginal.num + 1)

    def init(key: Array) -> TargetServer:
        sent = TargetBroadcast(jnp.zeros((num_points, d)), jnp.zeros((), jnp.int32), jnp.zeros(d), split.theta)
        return begun(sent, again)

    def broadcast(key: Array, server: TargetServer) -> Broadcast:
        return Broadcast(server.sent)

    def silo_step(key: Array, broadcast: Broadcast, silo: tuple, data: SiloData) -> tuple[Array, tuple]:
        sent = broadcast.common
        components = components_of(split, data) if marginal.rows == "indexed" else None
        factor = silo_factor(split, marginal, data, components, sent.theta)
        frame = factor.refit(sent.centre, start_frame(split, data), LOCAL_STEPS)

        def one(given: tuple[Array, Array]) -> Array:
            # where locals are drawn, afresh at every point: estimates of f are then unbiased and independent, so the
            # weights are right on average and their noise is seen in the effective sample size
            s, z = given
            return factor.log_f(z, frame, factor.nodes(jax.random.fold_in(key, s) if draws else None))

        places = sent.first + jnp.arange(num_points), sent.points
        log_f = works(lambda *all_: jax.lax.map(one, all_, batch_size=factor.batch_of(num_points)))(*places)
        if again:
            better = silo_factor(split, finer, data, components, sent.theta)
            at = lambda z: better.log_f(z, frame, better.nodes(None))
            log_f = jnp.append(log_f, jax.lax.map(at, sent.points[:again], batch_size=better.batch_of(again)))
        return log_f, silo

    @in_x64
    def total(messages: Array) -> Array:
        return jnp.sum(messages, axis=0)

    def aggregate(messages: Array, cohort: Cohort) -> Array:
        return total(messages)

    def server_step(key: Array, server: TargetServer, log_f: Array) -> tuple[TargetServer, dict]:
        log_prior = jax.vmap(lambda z: split.log_prior(z, server.sent.theta))(server.sent.points)
        return server._replace(log_prior=log_prior, log_f=log_f), {}

    nothing = lambda key, broadcast, data: ()
    return FederatedAlgorithm(init, nothing, broadcast, silo_step, aggregate, server_step).traced_once()


def num_refined(marginal: Marginal, num_points: int) -> int:
    """Points at which locals are integrated again, with twice the nodes."""
    return min(REFINED, num_points) if marginal.kind == "quadrature" else 0


def begun(sent: TargetBroadcast, again: int) -> TargetServer:
    """Before the round: the points, and nothing known of them."""
    num = sent.points.shape[0]
    unknown = (jax.ShapeDtypeStruct((num,), sent.points.dtype), jax.ShapeDtypeStruct((num + again,), np.float64))
    return TargetServer(sent, *zeros_like(unknown))


def _begin(sent: TargetBroadcast, again: int, left: Left, fresh: Any) -> Begun:
    return Begun(begun(sent, again))


def exact_marginal(split: SplitModel, survey: Survey, posterior: Posterior) -> Marginal:
    """How locals are integrated out: as exactly as the model allows, whatever the fit itself could afford."""
    found = choose(split, survey)
    if found.kind == "none":
        return found
    own = getattr(posterior, "marginal", None)
    asked = own.num if own is not None and own.kind == found.kind else 0
    return found._replace(num=max(found.num, asked, DRAWS if found.kind == "importance_weighted" else 1))


def target_phase(runner: Runner, name: str, marginal: Marginal, size: int) -> Phase:
    """One block of points; how it begins is left open."""
    split = runner.split
    make = partial(target_round, split, marginal, size)
    return Phase(
        name,
        remembered(make, "target", ByIdentity(split), marginal, size),
        finish=lambda left, server, info: left._replace(server=server),
        cohort=len(runner.stack.names),
        role="check",
        effort="some",
        looks_at_data=size * marginal.evaluations(split),
        watched=False,  # a density may well be zero at some of the points
        recipe=("target", name, size),
    )


def log_target(
    runner: Runner, name: str, marginal: Marginal, points: np.ndarray, first: int, centre: np.ndarray, theta: dict
) -> Target | None:
    """log p(z, y) at points (S, d) that begin at place ``first`` of their sequence; None: interrupted.

    ``name`` is the phase's: of the records, and of the stream of random numbers.
    """
    out, refined = [], []
    for start in range(0, len(points), BLOCK):
        block, place = points[start : start + BLOCK], np.asarray(first + start, np.int32)
        sent = TargetBroadcast(put(block), put(place), put(centre.astype(block.dtype)), theta)
        size, again = len(block), num_refined(marginal, len(block))
        phase = target_phase(runner, name, marginal, size)._replace(begin=partial(_begin, sent, again))
        left, _ = runner.run((phase,), Left(), tuple(() for _ in runner.stack.buckets), None)
        if left.interrupted:
            return None
        found: Any = left.server
        log_f = np.asarray(found.log_f)
        out.append(np.asarray(found.log_prior, np.float64) + log_f[:size])
        with np.errstate(invalid="ignore"):  # a density may be zero with either number of nodes
            refined.append(log_f[size:] - log_f[:again])
    return Target(np.concatenate(out), refined[0])
