r"""Structured federated variational inference (SFVI; Hassan, Salomone and Mengersen 2022, Algorithm 1).

Each round the server draws :math:`z_G \sim q` and sends it with the guide's centre and :math:`\theta`; a silo draws its
locals given :math:`z_G`, moves its own part of the guide, and returns the gradient of its bound with respect to
:math:`z_G`, the centre and :math:`\theta`. The server pulls the sum back through its own guide and takes a step.

We deviate from the paper in the message: it sends gradients of the global variational parameters, O(d^2) numbers with
a full covariance. By the chain rule the same update needs the O(d) numbers above, and the silo need not know the guide
over the globals. Law: with one silo, or any number, the parameters' path is that of centralised structured
variational inference with the same draws.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Lost, Phase, Plan, Program
from numpyro_fed.checks import check_count
from numpyro_fed.guides import StructuredNormal
from numpyro_fed.guides.function import as_guide
from numpyro_fed.guides.posterior import GuidePosterior
from numpyro_fed.local import minibatch
from numpyro_fed.local.bound import Weighting
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.local.row_optim import RowOptim, RowState
from numpyro_fed.local.start import LocalStart, WarmStart
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.methods.base import Method
from numpyro_fed.methods.rest import BLOCKS, OFTEN, at_rest
from numpyro_fed.methods.sfvi_step import Optims, Parts, SFVIMessage, SFVIServer, SFVISilo, step_parts
from numpyro_fed.methods.site_start import site_start
from numpyro_fed.model.observations import silo_terms
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.optim import DEFAULT, ENCODER, check_optim, shortened, with_horizon
from numpyro_fed.run.mode import MAX_DIM, MAX_ROUNDS, mode_phases

Array = jax.Array
IMPORTANCE_SAMPLES = 10  # per row, where rows are separable


class Given(NamedTuple):
    """What a silo receives for its half of a warm start."""

    loc: Array  # (d,): the globals' centre
    unit: Array  # (d,): their sds
    contexts: Any  # of the guide that its own parameters come from, and of this run's; () where guides differ


@dataclass(frozen=True)
class SFVI(Method):
    """Structured federated variational inference.

    Args:
        model: an ordinary NumPyro model, called as ``model(**silos[name])``.
        guide: the variational family; by default ``nf.guides.StructuredNormal(scale_coupling=True)``. Also
            ``nf.guides.Amortized(encoder)``, or a NumPyro guide function of the model's arguments.
        optim: any optax optimiser, for the server and (unless ``silo_optim`` is given) the silos. Parameters are
            whitened, so steps are in posterior sds; the default is Adam with a step that falls from 0.02 to 0.0002.
            Above 200 dimensions, where no start is looked for, steps are in the model's own units.
        importance_samples: K of the bound, draws of each local row per round. By default 10 where local rows are
            separable and 1 otherwise. The plain bound (1) underestimates variance parameters of random effects; more
            draws bring the posterior closer to NUTS, at K times a step's cost.
        num_particles: draws of z_G averaged in a round.
        silo_optim: the silos' own optimiser, and that of an encoder's weights.
        start_rounds: at most so many rounds for each of up to three searches for the mode, before the first. With 0,
            and above 200 dimensions, the globals' location is random and near zero.
        init_loc_fn: a NumPyro initialisation strategy (``init_to_sample``, ``init_to_value(values=...)``) for the
            globals' location in place of mode finding.
        batch_size: rows of a silo that a step looks at, drawn anew each time (in long format: groups, with all their
            rows). Only their local parameters move. By default all.
        local, shared: names of sites or plates, where the automatic partition is to be overridden.

    Example:
        >>> fit = nf.SFVI(model).run(jax.random.key(0), silos, 500)
        >>> fit.sample(jax.random.key(1), 100)["beta"].shape
        (100, 2)
    """

    guide: Any = None
    optim: Any = None
    importance_samples: int | None = None
    num_particles: int = 1
    silo_optim: Any = None
    start_rounds: int = MAX_ROUNDS
    init_loc_fn: Any = None
    batch_size: int | None = None
    local: Any = None
    shared: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optim(self.optim)
        check_optim(self.silo_optim, "silo_optim")
        check_count("num_particles", self.num_particles)
        check_count("start_rounds", self.start_rounds, least=0)
        check_count("importance_samples", self.importance_samples, optional=True)
        check_count("batch_size", self.batch_size, optional=True)
        guide = as_guide(self.guide)
        if self.init_loc_fn is not None:
            if not callable(self.init_loc_fn):
                raise TypeError(f"init_loc_fn must be a function such as init_to_sample, got {self.init_loc_fn!r}")
            if guide is not None and (not hasattr(guide, "global_cov") or guide.global_guide is not None):
                raise ValueError(
                    f"init_loc_fn= places a normal over the globals, and {guide!r} is another guide: set its start "
                    "where it is made (AutoNormal(model, init_loc_fn=...), or the values of its numpyro.param)"
                )

    @property
    def family(self) -> Any:
        return as_guide(self.guide) if self.guide is not None else StructuredNormal(scale_coupling=True)

    moving_centre: ClassVar[bool] = True  # the locals' centre is the guide's mean, which moves; else the start's
    patient: ClassVar[bool] = True  # a round without finite gradients is left out, where every row is asked in each

    # --- the program ------------------------------------------------------------------------------------------------

    def compile(self, split: SplitModel, survey: Survey, plan: Plan) -> Program:
        weighting, batching = self._rows(split, survey)
        posterior = self._posterior(split, weighting)
        guide = posterior.guide
        if self.batch_size is not None and split.groups and guide.local_cov == "full":
            raise ValueError(
                'batch_size= takes rows apart, and local_cov="full" ties them together: use local_cov="block", or '
                "leave batch_size= out"
            )
        if self.batch_size is not None and guide.arbitrary and guide.local_params:
            guide.take_rows(None, None)  # says why not
        make = lambda: self._algorithm(split, survey, guide, weighting, batching)
        algorithm = remembered(make, self, ByIdentity(split), survey, weighting, batching)
        if plan.num_rounds is None:  # another, twice as long, where the one before had not come to rest
            first = self._rounds(split, weighting)
            blocks = [first * 2**block for block in range(BLOCKS)]
        else:
            blocks = [plan.num_rounds]
        phases = [self._rounds_phase(split, survey, plan, guide, algorithm, rounds) for rounds in blocks]
        if self._can_start(split):
            phases = [*mode_phases(split, self.start_rounds, survey), *site_start(split, survey, plan.names), *phases]
        return Program(tuple(phases), posterior)

    def posterior_of(self, split: SplitModel, survey: Survey) -> GuidePosterior:
        return self._posterior(split, self._rows(split, survey)[0])

    def _posterior(self, split: SplitModel, weighting: Weighting) -> GuidePosterior:
        return GuidePosterior(split, self.family, weighting, self.moving_centre)

    def _rounds(self, split: SplitModel, weighting: Weighting) -> int:
        """By default. With one draw a row gradients are noisy, and the locals' coupling takes long to settle."""
        return 20_000 if split.groups and weighting.num == 1 else 5_000

    def _can_start(self, split: SplitModel) -> bool:
        size = split.dim + sum(int(np.size(value)) for value in jax.tree.leaves(split.theta))
        return self.init_loc_fn is None and self.start_rounds > 0 and 0 < size <= MAX_DIM and self.family.can_start

    def _rows(self, split: SplitModel, survey: Survey) -> tuple[Weighting, Batching | None]:
        """How terms find their rows, and how minibatches are taken."""
        long = self.batch_size is not None and split.groups and _long_format(split)
        if not split.groups or (self.importance_samples == 1 and not long):
            weighting = Weighting(1)
        elif self.family.local_cov == "full":
            weighting = Weighting(self.importance_samples or 1, "whole")
        else:
            default = 1 if survey.rows == "whole" else IMPORTANCE_SAMPLES
            weighting = Weighting(self.importance_samples or default, survey.rows)
        if self.batch_size is None:
            return weighting, None
        if weighting.rows == "indexed" and not long:  # a latent that the silo has once joins all its rows
            weighting = Weighting(self.importance_samples or 1)
        if weighting.num > 1 and weighting.rows == "whole":
            raise ValueError(
                f"batch_size= with importance_samples={weighting.num} needs local rows that can be weighted one by "
                "one, and here they meet: pass importance_samples=1"
            )
        return weighting, minibatch.plan(split, survey, weighting.rows, self.batch_size)

    def _algorithm(
        self, split: SplitModel, survey: Survey, guide: Any, weighting: Weighting, batching: Batching | None
    ) -> FederatedAlgorithm:
        """SFVI as pure functions; see :mod:`numpyro_fed.algorithm`."""
        parts = self._parts(split, guide, weighting, batching)

        def broadcast(key: Array, server: SFVIServer) -> Broadcast:
            return Broadcast(parts.sent(server, parts.draws(key)))

        def aggregate(messages: SFVIMessage, cohort: Cohort) -> SFVIMessage:
            # unbiased when a cohort speaks for all; a product, since sums over a short first axis are slow on a CPU
            weight = jnp.full(len(cohort.index), cohort.num_silos / len(cohort.index))
            return jax.tree.map(lambda leaf: jnp.tensordot(weight.astype(leaf.dtype), leaf, axes=1), messages)

        def server_step(key: Array, server: SFVIServer, silos: SFVIMessage) -> tuple[SFVIServer, dict]:
            return parts.update(server, parts.draws(key), silos)

        # the gradient in the guide's parameters belongs to the round's draw, and is held; that in z_G would not do
        lost = Lost(
            hold=True,
            absorb=lambda key, server, message: parts.pulled(server, parts.draws(key), message),
            server_step=lambda key, server, found: parts.moved(server, parts.draws(key), found),
        )
        return FederatedAlgorithm(
            parts.init, parts.init_silo, broadcast, parts.silo_step, aggregate, server_step, lost
        ).traced_once()

    def _parts(
        self, split: SplitModel, guide: Any, weighting: Weighting, batching: Batching | None, tempered: bool = False
    ) -> Parts:
        return step_parts(
            *(split, guide, self._optims(split, guide), weighting, batching, self.num_particles),
            *(self.init_loc_fn, self.moving_centre, tempered, self.patient and batching is None),
        )

    # --- optimisers ---------------------------------------------------------------------------------------------------

    def _optims(self, split: SplitModel, guide: Any) -> Optims:
        silo = check_optim(self.optim if self.silo_optim is None else self.silo_optim)
        drawn = tuple(group.name for group in split.groups if group.axes) if self.batch_size is not None else ()
        return Optims(self._optim(split), RowOptim(silo, drawn if guide.local_params else ()))

    def _optim(self, split: SplitModel, default: Any = DEFAULT) -> Any:
        """The server's optimiser; an encoder's weights belong to the locals' guide, though the server holds them."""
        optim, names = default if self.optim is None else check_optim(self.optim), self.family.shared_params
        if not names:
            return optim
        given = self.optim if self.silo_optim is None else self.silo_optim
        kind = lambda name, tree: jax.tree.map(lambda _: "local" if name in names else "global", tree)
        kinds = lambda tree: ({name: kind(name, own) for name, own in tree[0].items()}, kind("theta", tree[1]))
        return optax.multi_transform(
            {"global": optim, "local": ENCODER if given is None else check_optim(given)}, kinds
        )

    # --- where rounds begin -------------------------------------------------------------------------------------------

    def _rounds_phase(
        self, split: SplitModel, survey: Survey, plan: Plan, guide: Any, algorithm: FederatedAlgorithm, rounds: int
    ) -> Phase:
        optims = self._optims(split, guide)

        def begin(left: Left, fresh: SFVIServer) -> Begun:
            server, given = self._begin(split, guide, optims, left, fresh)
            return Begun(server._replace(opt_state=with_horizon(server.opt_state, rounds)), given)

        def begin_silo(given: Given | tuple, state: SFVISilo, local: LocalStart | None) -> SFVISilo:
            state = self._begin_silo(split, guide, optims, given, state, local)
            return self._with_visits(guide, state, plan.visits(rounds))

        shorter = _shorter if self.optim is None else None  # the user's steps are as long as the user says
        often = OFTEN if plan.cohort is None else 0.0  # of some silos, one may be left out whenever it is asked
        finish = partial(at_rest, often=often)
        return Phase("rounds", algorithm, begin, begin_silo, rounds, finish=finish, shorter=shorter)

    def _begin(self, split: SplitModel, guide: Any, optims: Optims, left: Left, fresh: SFVIServer) -> Begun:
        """The server's half of a start, and what silos are given for theirs."""
        if left.server is not None:
            return Begun(left.server)
        if left.warm is None:
            return Begun(fresh)
        warm: WarmStart = left.warm
        same = warm.source is not None and warm.source[0] == self.family
        if same:  # q itself, in its own units
            _, params, base = warm.source
        else:
            params, base = guide.start_global(jax.random.key(0), split, warm)
            params |= {name: fresh.params[name] for name in guide.shared_params}  # no mode of an encoder is found
        theta = jax.tree.map(jnp.zeros_like, split.theta)
        server = SFVIServer(params, theta, base, (warm.theta, warm.theta_sd), optims.server.init((params, theta)))
        if not split.groups or not guide.local_params:
            return Begun(server)
        contexts = (warm.context, self._context(guide, server)) if same else ()
        return Begun(server, Given(warm.loc, warm.unit, contexts))

    def _begin_silo(
        self,
        split: SplitModel,
        guide: Any,
        optims: Optims,
        given: Given | tuple,
        state: SFVISilo,
        local: LocalStart | None,
    ) -> SFVISilo:
        """The silo's half: its own parameters where it has such of the same guide, else its locals' normal."""
        if not isinstance(given, Given):
            return state
        if local is not None and given.contexts and local.own:
            params, base = guide.recentred(*local.own, *given.contexts)
        else:
            # a guide that reads the data has no locals of its own to give
            mode = LocalStart(state.base.loc, state.base.scale, {}) if local is None or not local.loc else local
            params, base = guide.adopt_local(split, state.params, state.base, mode, given)
        return state._replace(params=params, base=base, opt_state=optims.silo.init(params))

    def _context(self, guide: Any, server: SFVIServer) -> Any:
        return (guide.context if self.moving_centre else guide.frozen_context)(server.params, server.base)

    def _with_visits(self, guide: Any, state: SFVISilo, num_rounds: float) -> SFVISilo:
        """A row's steps are counted by its own visits: in minibatches it is visited in some rounds only."""
        rounds = max(1, round(num_rounds))
        if self.batch_size is None or not guide.local_params or not isinstance(state.opt_state, RowState):
            return state._replace(opt_state=with_horizon(state.opt_state, rounds))
        rows = {}
        for group, one in state.opt_state.rows.items():
            number = jnp.sum(state.base.valid[group], axis=-1, keepdims=True)
            share = jnp.minimum(1.0, self.batch_size / jnp.maximum(number, 1))
            rows[group] = with_horizon(one, jnp.maximum(1, jnp.round(num_rounds * share)).astype(jnp.int32))
        return state._replace(opt_state=RowState(rows, with_horizon(state.opt_state.rest, rounds)))


def _shorter(state: SFVIServer | SFVISilo) -> SFVIServer | SFVISilo:
    """Of both sides: the same, with shorter steps."""
    return state._replace(opt_state=shortened(state.opt_state))


def _long_format(split: SplitModel) -> bool:
    """Whether local latents lie along another axis than the observations."""
    observed = {axis for site in silo_terms(split, "observed", "factor") for axis, _ in site.axes}
    return bool({axis for group in split.groups for axis, _ in group.axes} - observed)
