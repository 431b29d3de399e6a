r"""EP and PVI: one algebra, two projections.

The posterior is a product of sites (:mod:`numpyro_fed.normal.sites`), one a silo. Each round the server broadcasts q
and sends every silo its own site; a silo takes its site out (the cavity), puts its factor in (the tilted distribution),
projects that onto the family with a solver (:mod:`numpyro_fed.solvers`), and returns what should change, new / q. The
server adds as much of it as it accepts to that silo's site.

A few rounds are enough, and a round's message is O(d^2) numbers (O(d) without correlations), whatever the data.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Begun, FederatedAlgorithm, Left, Phase, Plan, Program
from numpyro_fed.checks import is_number
from numpyro_fed.host import put
from numpyro_fed.local import integrate, minibatch
from numpyro_fed.local.conditional import LocalLaplace
from numpyro_fed.local.integrate import Marginal
from numpyro_fed.local.start import LocalStart, WarmStart
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.methods.base import Method
from numpyro_fed.methods.factorised_posterior import SitesPosterior
from numpyro_fed.methods.laplace_start import laplace_start
from numpyro_fed.methods.site_doubts import NOISE, Limits, doubted, judged
from numpyro_fed.methods.site_rounds import UNHEARD, SitesServer, SitesSilo, site_rounds
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.normal.families import as_family, quotient
from numpyro_fed.normal.prior import Prior, normal_prior
from numpyro_fed.normal.sites import Sites
from numpyro_fed.optim import check_optim
from numpyro_fed.run.foresee import foresee, foresee_start
from numpyro_fed.run.node_check import TOO_FAR, node_check
from numpyro_fed.run.runner import Runner
from numpyro_fed.run.survey import likely
from numpyro_fed.solvers import Solver

Array = jax.Array
USUAL = 4  # rounds until nothing moves any more, as a rule
NEARLY = 0.5  # sds that a posterior may still move when its nodes are checked
MOST_DENSE = 500  # dimensions in which a matrix of natural parameters is still a good idea


class Given(NamedTuple):
    """What a silo receives for its half of a warm start."""

    loc: Array  # (d,): the globals' centre
    q: Any  # a Natural, packed; () where the silo's half does not depend on it


class Chosen(NamedTuple):
    """What a method takes for one model and its silos."""

    solver: Solver
    marginal: Marginal
    rounds: FederatedAlgorithm
    settled: FederatedAlgorithm  # rounds that begin where q says something already
    starts: tuple[Phase, ...]
    nodes: FederatedAlgorithm | None  # asks whether there are enough quadrature nodes


@dataclass(frozen=True)
class Factorised(Method):
    """What EP, SEP and PVI share; the fields are described there."""

    family: Any = "full"
    damping: float | None = None
    solver: Any = None
    server_optim: Any = None
    tolerance: float = 0.01
    max_move: float | None = None
    local: Any = None
    shared: Any = None

    accepts_stale: ClassVar[bool] = True
    tied: ClassVar[bool] = False  # one site for all, of which each silo owns a share
    more_draws: ClassVar[str] = "nf.solvers.HMC(num_chains=200)"
    sweeps: ClassVar[int] = 50  # at most; nothing moves any more long before, where all is well

    def __post_init__(self) -> None:
        super().__post_init__()
        as_family(self.family)
        if self.solver is not None:
            self._check_solver(self.solver)
        if self.damping is not None and not (is_number(self.damping) and 0 < self.damping <= 1):
            raise ValueError(f"damping is the share of a change that is accepted, in (0, 1], got {self.damping!r}")
        if not is_number(self.tolerance) or not self.tolerance >= 0:
            raise ValueError(f"tolerance must be a number of at least 0, got {self.tolerance!r}")
        if self.server_optim is not None:
            check_optim(self.server_optim, "server_optim")
        if self.max_move is not None and not (is_number(self.max_move) and self.max_move > 0):
            raise ValueError(f"max_move must be a positive number of sds, or None, got {self.max_move!r}")
        if self.max_move is not None and self.tied:
            raise ValueError(
                f"nf.{type(self).__name__} has one site for all silos, so none has a cavity to measure its move by: "
                "leave max_move= out, or use nf.EP"
            )

    # --- what the subclasses say ------------------------------------------------------------------------------------

    def _check_solver(self, solver: Any) -> Solver:
        raise NotImplementedError

    def _default_solver(self, split: SplitModel, quadrature: bool) -> Solver:
        raise NotImplementedError

    # --- the program ------------------------------------------------------------------------------------------------

    def compile(self, split: SplitModel, survey: Survey, plan: Plan) -> Program:
        self._check_model(split)
        core = replace(self, damping=None, tolerance=0.0)  # these are in the server's state, not in the program
        chosen = remembered(lambda: core._chosen(split, survey), core, ByIdentity(split), survey)
        posterior = self._posterior(split, chosen.marginal)
        rounds = self.sweeps * plan.sweep if plan.num_rounds is None else plan.num_rounds
        improper = tuple(site.name for site in split.partition.sites if site.at_server and site.shape.improper)
        stops = self.tolerance > 0 and self.server_optim is None  # an optimiser's small steps are no rest
        phase = Phase(
            "rounds",
            chosen.rounds,
            begin=lambda left, fresh: self._begin(split, chosen.solver, plan, self._counted(survey, left), fresh),
            begin_silo=lambda given, state, local: self._begin_silo(split, chosen.solver, given, state, local),
            num_rounds=rounds,
            done=(lambda info: bool(info["moving"][-1] < self._allowed(chosen.solver, plan))) if stops else None,
            finish=lambda left, server, info: self._finish(chosen.solver, plan, left, server, info, improper),
            effort="some",
            looks_at_data=_looks(split, chosen, self.family),
            look=plan.sweep if stops else None,
            variants=(chosen.settled,),
            suited=lambda server: 0 if _settled(server) else None,
            likely=0 if chosen.starts else None,
        )
        if chosen.nodes is None or (plan.check and survey.known):  # the check looks at more nodes, too
            return Program((*chosen.starts, phase), posterior)
        check = Phase(
            "nodes",
            chosen.nodes,
            begin=lambda left, fresh: Begun(left.server) if np.max(np.asarray(left.server.moving)) < NEARLY else None,
            finish=lambda left, server, info: _enough_nodes(chosen, left, float(info["node_shift"][-1])),
            role="check",
            effort="least",
        )
        return Program((*chosen.starts, phase, check), posterior)

    def posterior_of(self, split: SplitModel, survey: Survey) -> SitesPosterior:
        return self._posterior(split, self._solver(split, survey)[1])

    def _posterior(self, split: SplitModel, marginal: Marginal) -> SitesPosterior:
        return SitesPosterior(split, self.family, self.tied, marginal)

    def _chosen(self, split: SplitModel, survey: Survey) -> Chosen:
        family = as_family(self.family)
        solver, marginal = self._solver(split, survey)
        size = getattr(solver, "batch_size", None)
        if size is not None and split.groups:
            sites = ", ".join(repr(site.name) for group in split.groups for site in group.sites)
            raise PartitionError(
                f"batch_size={size}: a minibatch would leave out rows whose local latents ({sites}) a silo of "
                f"nf.{type(self).__name__} integrates out all together. Leave batch_size= out, or use "
                f"nf.SFVI(model, batch_size={size}), in which only the rows of a minibatch move"
            )
        batching = None if size is None else minibatch.plan(split, survey, "whole", size)
        prior = self._prior(split)
        kept = self.tied, batching, self.server_optim, self.max_move
        rounds, settled = (
            site_rounds(split, family, solver, marginal, prior, survey, *kept, started=started)
            for started in (False, True)
        )
        starts = self._starts(split, survey, solver, prior)
        nodes = None
        if marginal.kind == "quadrature" and marginal.num > 1 and split.dim <= MOST_DENSE:
            nodes = node_check(split, family, marginal, self._posterior(split, marginal).q)
        return Chosen(solver, marginal, rounds, settled, starts, nodes)

    def _solver(self, split: SplitModel, survey: Survey) -> tuple[Solver, Marginal]:
        """The solver, and how locals are integrated out."""
        given = None if self.solver is None else self._check_solver(self.solver)
        exact = integrate.integrable(split, survey) or not split.groups
        solver = self._default_solver(split, exact) if given is None else given
        asked = getattr(solver, "marginal", None), getattr(solver, "num_nodes", None)
        return solver, integrate.choose(split, survey, *asked, solver.samples_locals)

    def _prior(self, split: SplitModel) -> Prior:
        make = lambda: normal_prior(split, as_family(self.family))
        return remembered(make, "prior", ByIdentity(split), as_family(self.family).kind)

    def meanwhile(self, runner: Runner) -> None:
        """The prior; and the search for a start (and for other modes), for answers that are likely."""
        split = runner.split
        self._check_model(split)
        survey, prior = likely(split, len(runner.stack.names)), self._prior(split)
        if runner.stack.known and survey is not None:
            for phase in self._starts(split, survey, self._solver(split, survey)[0], prior):
                foresee_start(runner, phase)
                foresee(runner, phase, scheduled=False)

    def _starts(self, split: SplitModel, survey: Survey, solver: Solver, prior: Prior) -> tuple[Phase, ...]:
        full = as_family(self.family).kind == "full" and not self.tied
        return laplace_start(split, survey, solver, prior) if full else ()

    def batch_size_for(self, split: SplitModel) -> int | None:
        return None if self.solver is None else getattr(self._check_solver(self.solver), "batch_size", None)

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

    # --- where rounds begin and end -----------------------------------------------------------------------------------

    def _counted(self, survey: Survey, left: Left) -> Left:
        """With the observations of those who are there now: silos may have left since."""
        if left.server is None or not self.tied or not survey.known:
            return left
        with jax.enable_x64(True):
            return left._replace(server=left.server._replace(total=put(np.float64(survey.total))))

    def _begin(self, split: SplitModel, solver: Solver, plan: Plan, left: Left, fresh: SitesServer) -> Begun:
        if left.server is not None:
            return Begun(self._steps(split, solver, plan, left.server))
        if left.warm is None:
            return Begun(self._steps(split, solver, plan, fresh))
        server, q = self._from_warm_start(solver, left.warm, fresh)
        return Begun(self._steps(split, solver, plan, server), Given(left.warm.loc, q))

    def _steps(self, split: SplitModel, solver: Solver, plan: Plan, server: SitesServer) -> SitesServer:
        """Steps that suit the schedule: shorter where messages are stale or few silos speak for all."""
        longest, free = solver.step(split.dim, as_family(self.family)), self.damping is None
        step = min(0.5 if plan.stale or plan.random else 1.0, longest) if self.damping is None else self.damping
        first = longest if self.damping is None else self.damping
        with jax.enable_x64(True):
            return server._replace(
                step=put(np.float64(step)),
                initial_step=put(np.float64(first)),
                robbins_monro=put(free and self._averaged(solver, plan)),
                averaged=put(self._averaged(solver, plan)),
                backtrack=put(free and plan.cohort is None),  # else rounds are different silos' moves
            )

    def _from_warm_start(self, solver: Solver, warm: WarmStart, server: SitesServer) -> tuple[SitesServer, Any]:
        """Sites, known or equal parts, whose product with the prior is what was found before; and that, if asked."""
        family, num = as_family(self.family), server.visits.shape[0]
        heard: dict[str, Any] = dict(
            started=np.ones((), bool),
            visits=np.ones(server.visits.shape, server.visits.dtype),
            moving=np.full(server.moving.shape, UNHEARD, server.moving.dtype),
        )
        server = server._replace(**put(heard))
        if warm.sites and not self.tied and family.kind == "full":
            with jax.enable_x64(True):
                return server._replace(sites=Sites(*put(warm.sites))), ()
        mean, sd = np.asarray(warm.loc, np.float64), np.asarray(warm.sd, np.float64)
        if warm.chol is None:
            covariance = np.diag(sd**2) if family.kind == "full" else sd**2
        else:
            covariance = np.asarray(warm.chol, np.float64) @ np.asarray(warm.chol, np.float64).T
        q = family.project(mean, covariance)
        rest = quotient(q, server.sites.prior)
        with jax.enable_x64(True):
            if self.tied:
                each = rest
            else:
                each = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf / num, (num, *leaf.shape)), rest)
        state = solver.init_state(family, q)
        return server._replace(sites=server.sites._replace(each=each), solver_state=state), family.pack(q)

    def _begin_silo(
        self, split: SplitModel, solver: Solver, given: Given | tuple, state: SitesSilo, local: LocalStart | None
    ) -> SitesSilo:
        if not isinstance(given, Given):
            return state
        family = as_family(self.family)
        if given.q:
            state = state._replace(solver_state=solver.init_state(family, family.unpack(given.q)))
        if not split.groups or local is None or not local.loc:
            return state
        frame = local.frame
        if frame is None:
            frame = LocalLaplace.from_sds(given.loc, local.loc, local.scale, local.coupling or state.frame.coupling)
        return state._replace(frame=frame, local_posterior=frame)

    def _averaged(self, solver: Solver, plan: Plan) -> bool:
        """Whether rounds go on moving for ever: by a solver's noise, or as silos pull at one site in turn."""
        return solver.noisy or (self.tied and plan.cohort is not None)

    def _allowed(self, solver: Solver, plan: Plan) -> float:
        """Movement, in sds, below which rounds are at rest."""
        return self.tolerance * (NOISE if self._averaged(solver, plan) else 1.0)

    def _finish(
        self,
        solver: Solver,
        plan: Plan,
        left: Left,
        server: SitesServer,
        info: dict[str, Any],
        flat: tuple[str, ...] = (),
    ) -> Left:
        more = f", or one with more draws, {self.more_draws}" if solver.noisy else ""
        limits = Limits(self.tolerance, self._allowed(solver, plan), self.max_move, more, flat)
        return judged(left._replace(server=server), server, info, plan, limits)


def _looks(split: SplitModel, chosen: Chosen, family: Any) -> int | None:
    """How often the data are looked at until nothing moves any more, about; None where the solver does not tell."""
    of_visit = getattr(chosen.solver, "evaluations", lambda d, family: None)(split.dim, as_family(family))
    return None if of_visit is None else USUAL * of_visit * chosen.marginal.evaluations(split)


def _settled(server: SitesServer) -> bool:
    """Whether the rounds began where q says something, and nobody is new."""
    return bool(np.asarray(server.started)) and bool(np.all(np.asarray(server.visits) > 0))


def _enough_nodes(chosen: Chosen, left: Left, shift: float) -> Left:
    """Whether more quadrature nodes would have given another answer."""
    if shift < TOO_FAR:
        return left
    num, name = chosen.marginal.num, type(chosen.solver).__name__
    return doubted(
        left,
        f"{num} quadrature nodes a row are too few: with {2 * num + 1} a mean would move by {shift:.2g} sds. Pass "
        f"solver=nf.solvers.{name}(num_nodes={2 * num + 1})",
    )
