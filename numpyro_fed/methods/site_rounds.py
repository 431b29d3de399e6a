r"""A round of EP or PVI: cavity, tilted distribution, projection; and what the server accepts of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.integrate import Marginal, plain_factor, silo_factor, start_frame
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.model.observations import num_observations
from numpyro_fed.model.rows import components_of
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.normal import rest, sites, trust
from numpyro_fed.normal.families import Family, Natural, power, product, quotient
from numpyro_fed.normal.prior import Prior
from numpyro_fed.normal.rest import Rest
from numpyro_fed.normal.sites import Sites
from numpyro_fed.precision import in_x64, to_user_dtype, tree_where
from numpyro_fed.solvers import Solver, Start, Tilted

Array = jax.Array
RESTLESS = 0.5  # a round that takes back more than this share of the last one's (squared) move
SHORTER, LEAST_STEP = 0.7, 0.1  # is answered by shorter steps
UNHEARD = 1e30  # how far a silo that was never heard might move the posterior


class SitesServer(NamedTuple):
    """All factors, and how the rounds go. After every round the posterior is the product of ``sites``."""

    sites: Sites
    visits: Array  # int (J,): how often each silo was heard
    moving: Array  # (J,): how far the posterior moved, in sds, when each silo was last heard
    values: Array  # (J + 1,): log E_q[f / t] of each silo's factor, as last heard, and of the prior
    step: Array  # how much of a change is accepted
    initial_step: Array  # how much of a silo's first
    robbins_monro: Array  # bool: steps fall as 1 / visits (Robbins and Monro 1951), so that solvers' noise averages out
    averaged: Array  # bool: moves never end, and rest is that of the running average
    rest: Rest  # which is known here
    backtrack: Array  # bool: steps are shortened when the posterior swings to and fro
    previous_move: Array  # (2 d,): the last round's move of each mean and log sd, in sds
    opt_state: Any
    solver_state: Any  # what the solver keeps for the prior
    total: Any = ()  # where sites are tied: observations in all silos, as far as they are known; float64
    heard: Any = ()  # (2,): observations and messages so far, from which the total is guessed where it is not known
    started: Any = ()  # bool: the rounds began where q said something already


class SitesSilo(NamedTuple):
    """Private to the silo."""

    frame: Any  # where locals are looked for
    local_posterior: Any  # locals given the globals, for draws
    solver_state: Any  # what the solver keeps
    components: Any


class SitesBroadcast(NamedTuple):
    """All that a silo receives, with its own site."""

    q: Natural
    warming_up: Array  # bool: not every silo has been heard yet
    site: Any = ()  # the one of all silos, where sites are tied: a silo owns the share n_j / N of it
    total: Any = ()  # N, there
    seed: Any = ()  # (2,) uint32: of the place where silos begin while q is the prior, for a solver that asks for one


class SitesMessage(NamedTuple):
    """All that leaves a silo: how its site should change."""

    change: Natural
    value: Array  # log E_q[f / t]
    ess: Array  # effective share of the solver's points
    ok: Array  # bool: the solver trusts its answer
    rows: Any = ()  # where sites are tied: the silo's number of observations


def site_rounds(
    split: SplitModel,
    family: Family,
    solver: Solver,
    marginal: Marginal,
    prior: Prior,
    survey: Survey,
    tied: bool = False,
    batching: Batching | None = None,
    optim: Any = None,
    max_move: float | None = None,
    started: bool = False,
) -> FederatedAlgorithm:
    """The method as pure functions; see :mod:`numpyro_fed.algorithm`.

    Args:
        tied: one site for all, of which a silo owns the share n_j / N; else a site each.
        optim: the server's optimiser over natural parameters, or None.
        max_move: sds of its cavity by which a silo may move a mean, once it has been heard; None: any.
        started: rounds begin where q says something already, and silos look for no modes.
    """
    d, num = split.dim, survey.num_silos
    told = getattr(solver, "is_told_where", lambda d: False)(d)
    restless = solver.noisy or tied  # moves may never end

    def init(key: Array) -> SitesServer:
        flat = family.flat(d)
        if tied:
            each = flat
        else:
            each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), flat)
        values = jnp.zeros(num + 1).at[-1].set(prior.log_constant)
        with jax.enable_x64(True):
            opt_state = () if optim is None else optim.init(flat)
            step = jnp.ones((), jnp.float64)
            counts = jnp.asarray(survey.total, jnp.float64), jnp.zeros(2, jnp.float64)
        visits = jnp.zeros(num, jnp.int32)
        server = SitesServer(
            Sites(prior.factor, each),
            visits,
            jnp.full(num, UNHEARD),
            values,
            step,
            step,
            jnp.zeros((), bool),
            jnp.zeros((), bool),
            rest.unknown(2 * d),
            jnp.zeros((), bool),
            jnp.zeros(2 * d),
            opt_state,
            solver.init_state(family, prior.factor),
            *(counts if tied else ()),
        )
        return server._replace(started=jnp.zeros((), bool))

    def warming_up(server: SitesServer, proper: Array) -> Array:
        return jnp.any(server.visits == 0) | ~proper

    def broadcast(key: Array, server: SitesServer) -> Broadcast:
        q = sites.posterior(server.sites, tied)
        packed = family.pack(q), warming_up(server, family.proper(q))
        seed = jax.random.bits(key, (2,), "uint32") if told else ()
        if tied:
            return Broadcast(SitesBroadcast(*packed, family.pack(server.sites.each), server.total, seed))
        return Broadcast(SitesBroadcast(*packed, seed=seed), family.pack(server.sites.each))

    def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> SitesSilo:
        frame, found = start_frame(split, data), components_of(split, data) if marginal.rows == "indexed" else None
        return SitesSilo(frame, frame, solver.init_state(family, family.flat(d)), found)

    def silo_step(key: Array, broadcast: Broadcast, silo: SitesSilo, data: SiloData) -> tuple[SitesMessage, SitesSilo]:
        sent = broadcast.common
        q = family.unpack(sent.q)
        site: Natural = family.unpack(sent.site if tied else broadcast.each)
        rows: Any = ()
        if tied:
            rows = num_observations(split, data)
            site = power(site, quotient_of(rows, sent.total))
        start = start_of(sent.seed, q, prior.factor) if told else None
        tilted = Tilted(family, q, site, sent.warming_up, started, not tied, start)
        factor = silo_factor(split, marginal, data, silo.components, batching=batching)
        found = solver.solve(key, tilted, factor, silo.frame, silo.solver_state)
        change = quotient(found.natural, q)
        fine = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((change, found.frame))]
        ok = jnp.all(jnp.stack(fine)) & found.ok & family.proper(found.natural)
        keep = lambda new, old: tree_where(ok, new, old)  # what failed is not where to begin next time
        frame, local = keep(found.frame, silo.frame), silo.local_posterior
        if split.groups:
            local = found.local_posterior
            local = factor.moments(frame.centre, frame, factor.nodes(None)) if local is None else local
            local = keep(local, silo.local_posterior)
        value = jnp.where(jnp.isfinite(found.value), found.value, 0.0)
        message = SitesMessage(family.pack(change), value, found.ess, ok, rows)
        finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(found.solver_state)]
        solver_state = tree_where(
            jnp.all(jnp.stack([jnp.ones((), bool), *finite])), found.solver_state, silo.solver_state
        )
        return message, SitesSilo(frame, local, solver_state, silo.components)

    def aggregate(messages: SitesMessage, cohort: Cohort) -> tuple[SitesMessage, Array | None]:
        return messages, None if cohort.everyone else jnp.asarray(cohort.index)

    def server_step(
        key: Array, server: SitesServer, arrived: tuple[SitesMessage, Array | None]
    ) -> tuple[SitesServer, dict]:
        messages, index = arrived
        those = lambda all_: all_ if index is None else all_[index]  # of the silos, those that were heard
        put = lambda all_, new: new if index is None else all_.at[index].set(new)
        asked = messages.ok.shape[0]
        before = family.known(sites.posterior(server.sites, tied))
        old, at_first = before.factor, warming_up(server, before.proper)
        changes = jax.vmap(family.unpack)(messages.change)
        values, ok = jnp.append(put(server.values[:-1], messages.value), server.values[-1]), messages.ok
        held_back = {}
        if max_move is not None:
            own = jax.tree.map(those, server.sites.each)
            within = lambda site, change: trust.share_within(family, old, site, change, max_move)
            with jax.enable_x64(True):
                share = jnp.where(ok & (those(server.visits) > 0), jax.vmap(within)(own, changes), 1.0)
                held_back = {"held_back": put(jnp.zeros(num, bool), share < 1)}
            changes = sites.scaled(changes, share)
        solver_state, own_change = server.solver_state, family.flat(d)
        own_ok = jnp.ones((), bool)
        if not prior.exact:
            tilted = Tilted(family, old, server.sites.prior, jnp.zeros((), bool), True)
            found = solver.solve(key, tilted, plain_factor(lambda z: split.log_prior(z, split.theta)), (), solver_state)
            solver_state, own_change = found.solver_state, quotient(found.natural, old)
            own_ok = found.ok & family.proper(found.natural)
            values = values.at[-1].set(jnp.where(jnp.isfinite(found.value), found.value, 0.0))
        with jax.enable_x64(True):
            both = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), changes, own_change)
            ok = jnp.append(ok, own_ok)
            visits = jnp.append(those(server.visits), jnp.max(server.visits))
            calm = jnp.where(server.robbins_monro, 1 / (1 + 0.5 * visits.astype(jnp.float64)), 1.0)
            steps = jnp.where(visits == 0, server.initial_step, server.step * calm)
        if optim is None:
            accepted = trust.steps_within(family, old, both, steps, ok, at_first)
            moves, opt_state = sites.scaled(jax.tree.map(lambda leaf: sites.zeroed(leaf, ok), both), accepted), ()
        else:
            moves, opt_state, accepted = trust.optimised(
                family, optim, server.opt_state, server.step, old, both, ok, not prior.exact
            )
        each, last = jax.tree.map(lambda m: m[:-1], moves), jax.tree.map(lambda m: m[-1], moves)
        with jax.enable_x64(True):
            if tied:
                moved = jax.tree.map(lambda s, m: s + jnp.sum(m, axis=0), server.sites.each, each)
            else:
                moved = jax.tree.map(lambda s, m: put(s, those(s) + m), server.sites.each, each)
            heard = accepted[:-1] > 0
        now = Sites(product(server.sites.prior, last), moved)
        far = to_user_dtype(sites.movement(before, family.known(sites.posterior(now, tied))))
        normaliser = jnp.where(before.proper, to_user_dtype(before.log_normaliser), 0.0)
        move = far.each
        distance = jnp.minimum(jnp.maximum(far.shift, jnp.sqrt(far.divergence)), UNHEARD)
        back = (move @ server.previous_move < 0) & (
            move @ move > RESTLESS * server.previous_move @ server.previous_move
        )
        # a short step moves little: what counts is how far a whole one would have gone
        longest = jnp.clip(jnp.max(to_user_dtype(steps)), 1 / UNHEARD, 1.0)
        whole = distance / jnp.maximum(longest, LEAST_STEP)
        moving = put(server.moving, jnp.where(heard, jnp.minimum(whole, UNHEARD), UNHEARD))
        at_rest, far_off = server.rest, jnp.max(moving)
        if restless:
            at_rest = rest.after(server.rest, move, longest, asked / num, ~at_first)
            far_off = jnp.where(server.averaged & (far_off < UNHEARD), rest.restless(at_rest), far_off)
        info = {
            "loss": -jnp.clip(jnp.nan_to_num(normaliser + jnp.sum(values)), -UNHEARD, UNHEARD),
            "divergence": far.divergence,
            "shift": far.shift,
            "moving": far_off,
            "ess": jnp.min(messages.ess),
            "skipped": jnp.sum(~heard),
            **held_back,
        }
        with jax.enable_x64(True):
            shorter = jnp.maximum(SHORTER * server.step, LEAST_STEP)
            step = jnp.where(server.backtrack & back, shorter, server.step)
            counts = (server.total, server.heard)
            if tied and not survey.known:
                spoke = jnp.stack([jnp.sum(messages.rows).astype(jnp.float64), jnp.asarray(asked, jnp.float64)])
                heard_of = server.heard + spoke
                counts = (num * heard_of[0] / heard_of[1], heard_of)
        server = server._replace(
            total=counts[0],
            heard=counts[1],
            sites=now,
            visits=put(server.visits, those(server.visits) + heard.astype(jnp.int32)),
            moving=moving,
            step=step,
            previous_move=move,
            values=values,
            opt_state=opt_state,
            solver_state=solver_state,
            rest=at_rest,
        )
        return server, info

    return FederatedAlgorithm(init, init_silo, broadcast, silo_step, aggregate, server_step).traced_once()


def start_of(seed: Array, q: Natural, prior: Natural) -> Start:
    """A place of the prior while q is nothing else; later q's own centre."""
    unheard = _equal(q, prior)
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return Start(unheard, jnp.where(unheard, jax.random.normal(key, q.shift.shape), 0.0))


@in_x64
def _equal(a: Natural, b: Natural) -> Array:
    return jnp.all(a.precision == b.precision) & jnp.all(a.shift == b.shift)


@in_x64
def quotient_of(a: Array, b: Array) -> Array:
    return a / b
