r"""EP and PVI: one algebra, two projections.

The posterior is a product of sites (:mod:`numpyro_fed.normal.sites`), one a silo. Each round the server broadcasts q
and sends every silo its own site; a silo takes its site out (the cavity), puts its factor in (the tilted distribution),
projects that onto the family with a solver (:mod:`numpyro_fed.solvers`), and returns what should change, new / q. The
server adds as much of it as it accepts to that silo's site.

A few rounds are enough, and a round's message is O(d^2) numbers (O(d) without correlations), whatever the data.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed import schedules
from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.keys import fold_in_name, identities
from numpyro_fed.local import minibatch
from numpyro_fed.local.bound import Weighting
from numpyro_fed.local.conditional import LocalLaplace, draw_rows
from numpyro_fed.local.integrate import DRAWS, NODES, Marginal, plain_factor, silo_factor, start_frame
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.methods.base import Method
from numpyro_fed.model.rows import components_of, finder, how_rows_lie, joined_groups
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.normal import sites, trust
from numpyro_fed.normal.affine import Coordinates, coordinates
from numpyro_fed.normal.families import Natural, as_family, power, product, quotient
from numpyro_fed.normal.prior import normal_prior
from numpyro_fed.normal.sites import Sites
from numpyro_fed.optim import check_optim
from numpyro_fed.precision import to_user_dtype, tree_where
from numpyro_fed.run import mode as mode_finding
from numpyro_fed.run import warm_start
from numpyro_fed.run.diagnose import VerdictWarning
from numpyro_fed.run.node_check import TOO_FAR, node_check
from numpyro_fed.run.prepare import Prepared
from numpyro_fed.solvers import Solver, Tilted

Array = Any
RESTLESS = 0.5  # a round that takes back more than this share of the last one's (squared) move
SHORTER, LEAST_STEP = 0.7, 0.1  # is answered by shorter steps
NEARLY = 0.5  # sds that a posterior may still move when its nodes are checked
UNHEARD = 1e30  # how far a silo that was never heard might move the posterior
MOST_DENSE = 500  # dimensions in which a matrix of natural parameters is still a good idea


class Server(NamedTuple):
    sites: Sites
    visits: Array  # int (J,): how often each silo was heard
    moving: Array  # (J,): how far the posterior moved, in sds, when each silo was last heard
    values: Array  # (J + 1,): log E_q[f / t] of each silo's factor, as last heard, and of the prior
    step: Array  # how much of a change is accepted
    first_step: Array  # how much of a silo's first
    calming: Array  # bool: steps fall with visits, as solvers' noise asks for
    wary: Array  # bool: steps are shortened when the posterior swings to and fro
    last: Array  # (2 d,): the last round's move of each mean and log sd, in sds
    opt_state: Any
    own: Any  # what the solver keeps for the prior


class SiloState(NamedTuple):
    """Private to the silo."""

    frame: Any  # where locals are looked for
    kept: Any  # locals given the globals, for draws
    own: Any  # what the solver keeps
    components: Any


class Sent(NamedTuple):
    """All that a silo receives, with its own site."""

    q: Natural
    warming_up: Array  # bool: not every silo has been heard yet
    site: Any = ()  # the one of all silos, where sites are tied: what a silo receives of its own is its share


class Message(NamedTuple):
    """All that leaves a silo: how its site should change."""

    change: Natural
    value: Array  # log E_q[f / t]
    ess: Array  # effective share of the solver's points
    ok: Array  # bool: the solver trusts its answer


@dataclass(frozen=True)
class Factorised(Method):
    """What EP, SEP and PVI share; the fields are described there."""

    family: Any = "full"
    damping: float | None = None
    solver: Any = None
    server_optim: Any = None
    tolerance: float = 0.01
    local: Any = None
    shared: Any = None

    tied = False  # one site for all, of which each silo owns a share
    sweeps = 8  # by default, at most

    def __post_init__(self) -> None:
        super().__post_init__()
        as_family(self.family)
        if self.solver is not None:
            self._check_solver(self.solver)
        number = isinstance(self.damping, int | float) and not isinstance(self.damping, bool)
        if self.damping is not None and not (number and 0 < self.damping <= 1):
            raise ValueError(f"damping is the share of a change that is accepted, in (0, 1], got {self.damping!r}")
        if not isinstance(self.tolerance, int | float) or not self.tolerance >= 0:
            raise ValueError(f"tolerance must be a number of at least 0, got {self.tolerance!r}")
        if self.server_optim is not None:
            check_optim(self.server_optim, "server_optim")

    # --- what the subclasses say ------------------------------------------------------------------------------------

    def _check_solver(self, solver: Any) -> Solver:
        raise NotImplementedError

    def _default_solver(self, split: SplitModel, quadrature: bool) -> Solver:
        raise NotImplementedError

    # --- what the base class asks for -------------------------------------------------------------------------------

    @property
    def program(self) -> "Factorised":
        return replace(self, damping=None, tolerance=0.0)

    accepts_stale = True
    effort = "some"

    @property
    def stops(self) -> bool:  # type: ignore[override]
        return self.tolerance > 0 and self.server_optim is None  # an optimiser's small steps are no rest

    def prepare(self, split: SplitModel, stack: Stack) -> Prepared:
        self._check_model(split)
        find = finder(split)
        solver, marginal = self._choose(split, stack, find)
        prior = normal_prior(split, as_family(self.family))
        shares = self._shares(split, stack) if self.tied else None
        batching = self._batching(split, stack, solver)
        algorithm = self.algorithm(split, solver, marginal, prior, stack.names, shares, batching)
        notes: dict[str, Any] = {"solver": solver, "marginal": marginal, "find": find, "prior": prior}
        if marginal.kind == "quadrature" and marginal.num > 1 and split.dim <= MOST_DENSE:
            notes["nodes"] = node_check(split, as_family(self.family), marginal, self.q)
        return Prepared(split, algorithm, None, notes)

    def closing(self, prepared: Prepared, server: Server, names: tuple[str, ...]) -> FederatedAlgorithm | None:
        """Warns of silos that were not heard; asks about quadrature nodes once the posterior is nearly at rest."""
        moving = np.asarray(server.moving)
        silent = [name for name, far in zip(names, moving, strict=True) if far >= UNHEARD]
        if silent:
            warnings.warn(
                f"silo {', '.join(map(repr, silent[:5]))}{' and others' if len(silent) > 5 else ''} was not asked, or "
                "nothing could be accepted from it: the posterior is not yet that of all silos. Run more rounds "
                "(init_state=fit.state); if rounds are skipped (fit.history['skipped']), pass damping=0.5 or another "
                "solver",
                stacklevel=5,
            )
        elif np.max(moving, initial=0.0) >= self.tolerance > 0:
            warnings.warn(
                f"the posterior still moves by {np.max(moving):.2g} sds a sweep, above tolerance={self.tolerance:g}: "
                "it is not yet the method's answer. Run more rounds, run(..., init_state=fit.state); if it does not "
                "settle, pass damping=0.5 or another solver, or a tolerance= above the solver's noise",
                VerdictWarning,
                stacklevel=5,
            )
        return prepared.notes.get("nodes") if np.max(moving) < NEARLY else None

    def conclude(self, prepared: Prepared, info: dict[str, np.ndarray]) -> None:
        """Warns when more quadrature nodes would have given another answer."""
        shift, num = float(info["node_shift"][-1]), prepared.notes["marginal"].num
        if not shift < TOO_FAR:
            name = type(prepared.notes["solver"]).__name__
            warnings.warn(
                f"{num} quadrature nodes a row are too few: with {2 * num + 1} a mean would move by {shift:.2g} sds. "
                f"Pass solver=nf.solvers.{name}(num_nodes={2 * num + 1})",
                stacklevel=5,
            )

    def _check_model(self, split: SplitModel) -> None:
        name = type(self).__name__
        if split.theta:
            raise PartitionError(
                f"nf.{name} has no way to learn numpyro.param {', '.join(map(repr, split.theta))}: give it a prior "
                "(numpyro.sample), or use nf.SFVI, which learns params"
            )
        if split.dim == 0:
            raise PartitionError(
                f"nf.{name} approximates the globals' posterior, and this model has no global latents: each silo is a "
                "problem of its own (nf.Independent)"
            )
        if as_family(self.family).kind == "full" and split.dim > MOST_DENSE:
            raise PartitionError(
                f"the model has {split.dim} global dimensions, too many for a full covariance: pass family='diagonal'"
            )

    def suits(self, prepared: Prepared, stack: Stack) -> bool:
        """Which term belongs to which row depends on the values of index arguments, not on shapes alone."""
        notes = prepared.notes
        return (notes["solver"], notes["marginal"]) == self._choose(prepared.split, stack, notes["find"])

    def _choose(self, split: SplitModel, stack: Stack, find: Any) -> tuple[Solver, Marginal]:
        """The solver, and how locals are integrated out."""
        rows, joined = "whole", True
        if split.groups:
            found = [jax.device_get(find(b.args, b.mask, stack.shared)) for b in stack.buckets]
            rows = how_rows_lie(split, stack, found)
            joined = any(joined_groups(one.rows) for one in found)
        size = max((group.size for group in split.groups), default=0)
        quadrature = bool(split.groups) and rows != "whole" and not joined and size in NODES
        given = None if self.solver is None else self._check_solver(self.solver)
        solver = self._default_solver(split, quadrature or not split.groups) if given is None else given
        if not split.groups:
            return solver, Marginal("none")
        samples = solver.samples_locals
        suited = "joint" if samples else "quadrature" if quadrature else "importance_weighted"
        kind = getattr(solver, "marginal", None) or suited
        if kind == "quadrature" and not quadrature:
            raise ValueError(
                "quadrature needs rows of one or two local latents that do not meet in a term; here "
                + ("rows meet" if rows == "whole" or joined else f"a row has {size}")
                + ": use nf.solvers.HMC(), or marginal='importance_weighted'"
            )
        if kind == "joint" and not samples:
            raise ValueError("marginal='joint' samples the locals with the globals: use nf.solvers.HMC() or NUTS()")
        default = {"quadrature": NODES.get(size, 1), "importance_weighted": DRAWS, "joint": 1}[kind]
        return solver, Marginal(kind, getattr(solver, "num_nodes", None) or default, rows)

    def _batching(self, split: SplitModel, stack: Stack, solver: Solver) -> Batching | None:
        """The solver's minibatches, if it takes them."""
        size = getattr(solver, "batch_size", None)
        if size is None:
            return None
        if split.groups:
            raise ValueError("batch_size= of a solver is for models without local latents: leave it out")
        batching = minibatch.plan(split, stack.example, Weighting(1), size, None)
        minibatch.certify(split, stack.example, batching, None)
        return batching

    def _shares(self, split: SplitModel, stack: Stack) -> np.ndarray:
        """Each silo's share of the observations."""
        observed = [s for s in split.partition.sites if s.role in ("observed", "factor") and not s.at_server]
        names = {axis for site in observed for axis, _ in site.axes}
        count = {
            name: max([sum(axis.lengths[name] for axis in split.partition.axes if axis.name in names), 1])
            for name in stack.names
        }
        sizes = np.array([count[name] for name in stack.names], np.float64)
        return sizes / sizes.sum()

    def default_rounds(self, prepared: Prepared, sweep: int = 1) -> int:
        return self.sweeps * sweep

    def with_schedule(self, prepared: Prepared, server: Server, schedule: Any, names: tuple[str, ...]) -> Server:
        """Steps that suit the schedule: shorter where messages are stale or few silos speak for all."""
        solver, family = prepared.notes["solver"], as_family(self.family)
        partial = schedules.stale(schedule) or isinstance(schedule, schedules.Sampled)
        longest = solver.step(prepared.split.dim, family)
        step = min(0.5 if partial else 1.0, longest) if self.damping is None else self.damping
        first = longest if self.damping is None else self.damping
        calming = self.damping is None and solver.noisy and not isinstance(schedule, schedules.Sequential)
        with jax.enable_x64(True):
            both = jnp.asarray(step, jnp.float64), jnp.asarray(first, jnp.float64)
            everyone = isinstance(schedule, schedules.Synchronous)  # else rounds are different silos' moves
            wary = jnp.asarray(self.damping is None and everyone)
            return server._replace(step=both[0], first_step=both[1], calming=jnp.asarray(calming), wary=wary)

    def reordered(self, server: Server, order: list[int]) -> Server:
        take = lambda leaf: leaf[np.array(order)]
        with jax.enable_x64(True):
            each = server.sites.each if self.tied else jax.tree.map(take, server.sites.each)
            return server._replace(
                sites=server.sites._replace(each=each),
                visits=take(server.visits),
                moving=take(server.moving),
                values=server.values[np.array([*order, -1])],
            )

    def settled(self, history: dict[str, np.ndarray]) -> bool:
        """Whether the posterior stopped moving: no silo, when last heard, shifted it by ``tolerance`` sds."""
        return bool(history["moving"][-1] < self.tolerance)

    def algorithm(
        self,
        split: SplitModel,
        solver: Solver,
        marginal: Marginal,
        prior: Any,
        names: tuple[str, ...],
        shares: np.ndarray | None,
        batching: Batching | None = None,
    ) -> FederatedAlgorithm:
        """The method as pure functions; see :mod:`numpyro_fed.algorithm`."""
        family, d, num = as_family(self.family), split.dim, len(names)
        optim = self.server_optim

        def init(key: Array) -> Server:
            flat = family.flat(d)
            if self.tied:
                each = flat
            else:
                each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)), flat)
            values = jnp.zeros(num + 1).at[-1].set(prior.log_constant)
            with jax.enable_x64(True):
                opt_state = () if optim is None else optim.init(flat)
                step = jnp.ones((), jnp.float64)
            visits = jnp.zeros(num, jnp.int32)
            return Server(
                Sites(prior.factor, each),
                visits,
                jnp.full(num, UNHEARD),
                values,
                step,
                step,
                jnp.zeros((), bool),
                jnp.zeros((), bool),
                jnp.zeros(2 * d),
                opt_state,
                solver.init_state(family, prior.factor),
            )

        def warming_up(server: Server, q: Natural) -> Array:
            return jnp.any(server.visits == 0) | ~family.proper(q)

        def broadcast(key: Array, server: Server) -> Broadcast:
            q = sites.posterior(server.sites, self.tied)
            if shares is None:
                return Broadcast(Sent(family.pack(q), warming_up(server, q)), family.pack(server.sites.each))
            with jax.enable_x64(True):
                own = jnp.asarray(shares, jnp.float64)
            return Broadcast(Sent(family.pack(q), warming_up(server, q), family.pack(server.sites.each)), own)

        def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> SiloState:
            frame, found = start_frame(split, data), components_of(split, data) if marginal.rows == "indexed" else None
            return SiloState(frame, frame, solver.init_state(family, family.flat(d)), found)

        def silo_step(key: Array, broadcast: Broadcast, silo: SiloState, data: SiloData) -> tuple[Message, SiloState]:
            sent = broadcast.common
            q = family.unpack(sent.q)
            site = family.unpack(broadcast.each if shares is None else sent.site)
            if shares is not None:
                site = power(site, broadcast.each)
            tilted = Tilted(family, q, site, sent.warming_up, not self.tied)
            factor = silo_factor(split, marginal, data, silo.components, batching=batching)
            found = solver.solve(key, tilted, factor, silo.frame, silo.own)
            change = quotient(found.natural, q)
            fine = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((change, found.frame))]
            ok = jnp.all(jnp.stack(fine)) & found.ok & family.proper(found.natural)
            keep = lambda new, old: tree_where(ok, new, old)  # what failed is not where to begin next time
            frame, kept = keep(found.frame, silo.frame), silo.kept
            if split.groups:
                kept = found.local_posterior
                kept = factor.moments(frame.centre, frame, factor.nodes(None)) if kept is None else kept
                kept = keep(kept, silo.kept)
            value = jnp.where(jnp.isfinite(found.value), found.value, 0.0)
            message = Message(family.pack(change), value, found.ess, ok)
            finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(found.solver_state)]
            own = tree_where(jnp.all(jnp.stack([jnp.ones((), bool), *finite])), found.solver_state, silo.own)
            return message, SiloState(frame, kept, own, silo.components)

        def aggregate(messages: Message, cohort: Cohort) -> tuple[Message, Array]:
            return messages, jnp.asarray(cohort.index)

        def server_step(key: Array, server: Server, arrived: tuple[Message, Array]) -> tuple[Server, dict]:
            messages, index = arrived
            old = sites.posterior(server.sites, self.tied)
            changes = jax.vmap(family.unpack)(messages.change)
            values, ok = server.values.at[index].set(messages.value), messages.ok
            own, own_change = server.own, family.flat(d)
            own_ok = jnp.ones((), bool)
            if not prior.exact:
                tilted = Tilted(family, old, server.sites.prior, jnp.zeros((), bool))
                found = solver.solve(key, tilted, plain_factor(lambda z: split.log_prior(z, split.theta)), (), own)
                own, own_change = found.solver_state, quotient(found.natural, old)
                own_ok = found.ok & family.proper(found.natural)
                values = values.at[-1].set(jnp.where(jnp.isfinite(found.value), found.value, 0.0))
            with jax.enable_x64(True):
                both = jax.tree.map(lambda a, b: jnp.concatenate([a, b[None]]), changes, own_change)
                ok = jnp.append(ok, own_ok)
                visits = jnp.append(server.visits[index], jnp.max(server.visits))
                calm = jnp.where(server.calming, 1 / (1 + 0.5 * visits.astype(jnp.float64)), 1.0)
                steps = jnp.where(visits == 0, server.first_step, server.step * calm)
            if optim is None:
                accepted = trust.steps_within(family, old, both, steps, ok, warming_up(server, old))
                moves, opt_state = sites.scaled(jax.tree.map(lambda leaf: sites.zeroed(leaf, ok), both), accepted), ()
            else:
                moves, opt_state, accepted = trust.optimised(
                    family, optim, server.opt_state, server.step, old, both, ok, not prior.exact
                )
            each, last = jax.tree.map(lambda m: m[:-1], moves), jax.tree.map(lambda m: m[-1], moves)
            with jax.enable_x64(True):
                if self.tied:
                    moved = jax.tree.map(lambda s, m: s + jnp.sum(m, axis=0), server.sites.each, each)
                else:
                    moved = jax.tree.map(lambda s, m: s.at[index].add(m), server.sites.each, each)
                heard = accepted[:-1] > 0
            now = Sites(product(server.sites.prior, last), moved)
            new = sites.posterior(now, self.tied)
            far = to_user_dtype(sites.movement(family, old, new))
            normaliser = jnp.where(family.proper(old), to_user_dtype(family.log_normaliser(old)), 0.0)
            move = to_user_dtype(sites.move(family, old, new))
            distance = jnp.minimum(jnp.maximum(far.shift, jnp.sqrt(far.divergence)), UNHEARD)
            back = (move @ server.last < 0) & (move @ move > RESTLESS * server.last @ server.last)
            # a short step moves little: what counts is how far a whole one would have gone
            whole = distance / jnp.clip(jnp.max(to_user_dtype(steps)), LEAST_STEP, 1.0)
            moving = server.moving.at[index].set(jnp.where(heard, jnp.minimum(whole, UNHEARD), UNHEARD))
            info = {
                "loss": -jnp.clip(jnp.nan_to_num(normaliser + jnp.sum(values)), -UNHEARD, UNHEARD),
                "divergence": far.divergence,
                "shift": far.shift,
                "moving": jnp.max(moving),
                "ess": jnp.min(messages.ess),
                "skipped": jnp.sum(~heard),
            }
            with jax.enable_x64(True):
                shorter = jnp.maximum(SHORTER * server.step, LEAST_STEP)
                step = jnp.where(server.wary & back, shorter, server.step)
            server = server._replace(
                sites=now,
                visits=server.visits.at[index].add(heard.astype(jnp.int32)),
                moving=moving,
                step=step,
                last=move,
                values=values,
                opt_state=opt_state,
                own=own,
            )
            return server, info

        return FederatedAlgorithm(init, init_silo, broadcast, silo_step, aggregate, server_step).traced_once()

    # --- starts -----------------------------------------------------------------------------------------------------

    def adopt(self, split: SplitModel, server: Server, silos: tuple, found: warm_start.Found) -> tuple[Server, tuple]:
        """Sites, equal parts, whose product with the prior is what another method found."""
        family, num = as_family(self.family), server.visits.shape[0]
        mean, sd = np.asarray(found.loc, np.float64), np.asarray(found.sd, np.float64)
        if found.chol is None:
            covariance = np.diag(sd**2) if family.kind == "full" else sd**2
        else:
            covariance = np.asarray(found.chol, np.float64) @ np.asarray(found.chol, np.float64).T
        q = family.project(mean, covariance)
        rest = quotient(q, server.sites.prior)
        with jax.enable_x64(True):
            if self.tied:
                each = rest
            else:
                each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf / num, (num, *leaf.shape)), rest)
        server = server._replace(
            sites=server.sites._replace(each=each),
            visits=jnp.ones_like(server.visits),
            moving=jnp.full_like(server.moving, UNHEARD),
            own=_known(server.own, family, q),
        )
        silos = tuple(state._replace(own=_repeated(state.own, _known(state.own, family, q))) for state in silos)
        if not split.groups or not found.local:
            return server, silos

        def begin(state: SiloState, mode: mode_finding.SiloState) -> SiloState:
            root = {g: jax.vmap(jnp.diag)(scale) for g, scale in mode.scale.items()}
            curvature = jax.tree.map(lambda scale: scale**-2, mode.scale)
            coupling = mode.coupling or state.frame.coupling
            frame = LocalLaplace(found.loc, mode.loc, coupling, root, curvature)
            return state._replace(frame=frame, kept=frame)

        return server, tuple(jax.vmap(begin)(state, mode) for state, mode in zip(silos, found.local, strict=True))

    def found(self, split: SplitModel, server: Server, silos: tuple) -> warm_start.Found:
        """A fit of this method as the start of another run."""
        family, q = as_family(self.family), self.q(server)
        mean, root = to_user_dtype(family.moments(q))

        def one(state: SiloState) -> mode_finding.SiloState:
            kept = state.kept
            scale = {g: jnp.sqrt(jnp.sum(r**2, axis=-1)) for g, r in kept.root.items()}
            return mode_finding.SiloState(kept.mean(mean), scale, kept.coupling)

        local = tuple(jax.vmap(one)(state) for state in silos) if split.groups else ()
        if root.ndim < 2:
            return warm_start.Found(mean, None, jnp.broadcast_to(root, mean.shape), dict(split.theta), {}, local)
        sd = jax.lax.rsqrt(jnp.diagonal(to_user_dtype(q.precision)))
        return warm_start.Found(mean, root, sd, dict(split.theta), {}, local)

    # --- what a fit asks for ----------------------------------------------------------------------------------------

    def q(self, server: Server) -> Natural:
        """The posterior of the globals."""
        return sites.posterior(server.sites, self.tied)

    def normal(self, split: SplitModel, server: Server) -> tuple[Array, Array]:
        """Mean and covariance of the unconstrained globals, float64."""
        family = as_family(self.family)
        q = self.q(server)
        cov = np.asarray(family.covariance(q))
        return np.asarray(family.mean(q)), cov if cov.ndim == 2 else np.diag(cov)

    def mode(self, split: SplitModel, server: Server) -> Array:
        """The posterior's mean, which is its mode."""
        return to_user_dtype(as_family(self.family).mean(self.q(server)))

    def theta(self, server: Server) -> dict[str, Array]:
        return {}

    def sample_global(self, split: SplitModel, server: Server, key: Array) -> Array:
        return as_family(self.family).sample(key, self.q(server))

    def sample_local(
        self,
        split: SplitModel,
        server: Server,
        silo: SiloState,
        key: Array,
        z: Array,
        mask: dict[str, Array],
        data: SiloData | None = None,
    ) -> dict[str, Array]:
        """One draw of a silo's locals given z_G = z."""
        if not split.groups:
            return {}
        eps = jax.tree.map(lambda leaf: leaf[0], draw_rows(key, split, mask, 1))
        return silo.kept.at(z, eps)

    def point(self, split: SplitModel, server: Server, silo: Any, data: SiloData) -> tuple[Any, dict, dict]:
        z = to_user_dtype(as_family(self.family).mean(self.q(server)))
        z = jnp.where(jnp.all(jnp.isfinite(z)), z, 0.0)
        return z, (silo.frame.mean(z) if split.groups else {}), {}

    def weighting(self, split: SplitModel, stack: Stack) -> Marginal:
        """How the fit integrates out the locals of these silos."""
        marginal = self._choose(split, stack, finder(split))[1]
        return marginal._replace(kind="importance_weighted", num=DRAWS) if marginal.kind == "joint" else marginal

    def elbo(
        self, split: SplitModel, marginal: Marginal, stack: Stack, server: Server, silos: tuple, key: Array
    ) -> Array:
        """One draw of the evidence bound of all silos together."""
        family, q = as_family(self.family), self.q(server)
        z = family.sample(key, q)
        mean, root = to_user_dtype(family.moments(q))
        white = jax.scipy.linalg.solve_triangular(root, z - mean, lower=True) if root.ndim == 2 else (z - mean) / root
        scale = jnp.abs(jnp.diagonal(root)) if root.ndim == 2 else root
        log_q = -0.5 * white @ white - jnp.sum(jnp.log(scale)) - 0.5 * split.dim * np.log(2 * np.pi)
        total = split.log_prior(z, {}) - log_q
        for bucket, states in zip(stack.buckets, silos, strict=True):

            def one(identity: Array, state: SiloState, args: Any, mask: Any) -> Array:
                factor = silo_factor(split, marginal, SiloData(args, mask, stack.shared), state.components)
                return factor.log_f(z, state.frame, factor.nodes(fold_in_name(key, identity)))

            total = total + jnp.sum(jax.vmap(one)(identities(bucket.names), states, bucket.args, bucket.mask))
        return total


def _known(own: Any, family: Any, q: Natural) -> Any:
    """What a solver keeps, where that is the coordinates of its tilted distribution: begun at those of q."""
    return coordinates(family, q) if isinstance(own, Coordinates) else own


def _repeated(like: Any, own: Any) -> Any:
    """One silo's keeping for all of a bucket."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda many, one: jnp.broadcast_to(one, many.shape), like, own)
