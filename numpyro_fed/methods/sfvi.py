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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.guides import StructuredNormal, as_guide
from numpyro_fed.guides.normal import GlobalBase
from numpyro_fed.guides.posterior import GuidePosterior
from numpyro_fed.local import minibatch
from numpyro_fed.local.bound import Weighting, silo_bound
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.local.row_optim import RowOptim, RowState
from numpyro_fed.methods.base import Method
from numpyro_fed.model.initial import initial
from numpyro_fed.model.rows import Components, components_of, finder, how_rows_lie
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.optim import DEFAULT, ENCODER, check_optim, with_horizon
from numpyro_fed.run import mode as mode_finding
from numpyro_fed.run.prepare import Prepared

Array = Any
IMPORTANCE_SAMPLES = 10  # per row, where rows are separable


class ServerState(NamedTuple):
    params: dict[str, Any]  # of q(z_G), and what all silos share of q(z_L | z_G)
    theta: dict[str, Array]  # in units of theta_base
    base: GlobalBase
    theta_base: tuple[dict[str, Array], dict[str, Array]]  # location, scale
    opt_state: Any


class SiloState(NamedTuple):
    """Private to the silo."""

    params: Any  # of q(z_L | z_G)
    base: Any
    opt_state: Any
    components: Components | None


class Message(NamedTuple):
    """All that leaves a silo: the gradient of its bound at the draws, and the bound itself."""

    z: Array  # (num_particles, d)
    aid: Any  # of what it was sent of the guide: (d,) for the centre, the weights of an encoder
    theta: dict[str, Array]
    value: Array


class Sent(NamedTuple):
    """All that a silo receives."""

    z: Array  # (num_particles, d)
    aid: Any
    theta: dict[str, Array]


class Parts(NamedTuple):
    """SFVI's step in pieces: :class:`SFVI` divides it between server and silos, SFVI-Avg takes it all in the silo."""

    init: Any  # (key) -> ServerState
    init_silo: Any  # (key, broadcast, data) -> SiloState
    draws: Any  # (key) -> standard normals of z_G
    sent: Any  # (ServerState, draws) -> Sent
    silo_step: Any  # (key, broadcast, SiloState, data) -> (Message, SiloState)
    update: Any  # (ServerState, draws, Message) -> (ServerState, info)


@dataclass(frozen=True)
class SFVI(Method):
    """Structured federated variational inference.

    Args:
        model: an ordinary NumPyro model, called as ``model(**silos[name])``.
        guide: the variational family; by default ``nf.guides.StructuredNormal(scale_coupling=True)``. Also
            ``nf.guides.Amortised(encoder)``, or a NumPyro guide function of the model's arguments.
        optim: any optax optimiser, for the server and (unless ``silo_optim`` is given) the silos. Parameters are
            whitened, so steps are in posterior sds; the default is Adam with a step that falls from 0.02 to 0.0002.
            Above 200 dimensions, where no start is looked for, steps are in the model's own units.
        importance_samples: K of the bound, draws of each local row per round. By default 10 where local rows are
            separable and 1 otherwise. The plain bound (1) underestimates variance parameters of random effects; more
            draws bring the posterior closer to NUTS, at K times a step's cost.
        num_particles: draws of z_G averaged in a round.
        silo_optim: the silos' own optimiser, and that of an encoder's weights.
        start_rounds: at most so many rounds of mode finding before the first. With 0, and above 200 dimensions, the
            globals' location is random and near zero.
        init_loc_fn: a NumPyro initialisation strategy (``init_to_sample``, ``init_to_value(values=...)``) for the
            globals' location in place of mode finding.
        batch_size: rows of a silo that a step looks at, drawn anew each time (in long format: groups, with all their
            rows). Only their local parameters move. By default all.
        local, shared: names of sites or plates, where the automatic partition is to be overridden.

    Example:
        >>> fit = nf.SFVI(model).run(jax.random.key(0), silos)  # doctest: +SKIP
    """

    guide: Any = None
    optim: Any = None
    importance_samples: int | None = None
    num_particles: int = 1
    silo_optim: Any = None
    start_rounds: int = mode_finding.MAX_ROUNDS
    init_loc_fn: Any = None
    batch_size: int | None = None
    local: Any = None
    shared: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optim(self.optim)
        check_optim(self.silo_optim, "silo_optim")
        for name, least in (
            ("num_particles", 1),
            ("start_rounds", 0),
            ("importance_samples", 1),
            ("batch_size", 1),
        ):
            value = getattr(self, name)
            if value is None and name in ("importance_samples", "batch_size"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
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

    moving_centre = True  # the locals' centre is the guide's mean, which moves; else the start's

    def _aid(self, guide: Any, server: ServerState) -> Any:
        return (guide.aid if self.moving_centre else guide.fixed_aid)(server.params, server.base)

    # --- what the base class asks for -------------------------------------------------------------------------------

    def prepare(self, split: SplitModel, stack: Stack) -> Prepared:
        guide = self.family.bind(split)
        if self.batch_size is not None and split.groups and guide.local_cov == "full":
            raise ValueError(
                'batch_size= takes rows apart, and local_cov="full" ties them together: use local_cov="block", or '
                "leave batch_size= out"
            )
        if self.batch_size is not None and guide.arbitrary and guide.local_params:
            guide.take_rows(None, None)  # says why not
        find = finder(split)
        weighting, batching = self._rows(split, stack, find)
        if batching is not None:
            minibatch.certify(split, stack, batching, find)
        mode = mode_finding.newton_start(split) if self._can_start(split) else None
        notes = {"weighting": weighting, "batching": batching, "find": find}
        return Prepared(split, self.algorithm(split, weighting, batching), mode, notes)

    def default_rounds(self, prepared: Prepared, sweep: int = 1) -> int:
        """With one draw a row gradients are noisy, and the locals' coupling takes long to settle."""
        return 20_000 if prepared.split.groups and prepared.notes["weighting"].num == 1 else 5_000

    def _can_start(self, split: SplitModel) -> bool:
        size = split.dim + sum(int(np.size(value)) for value in jax.tree.leaves(split.theta))
        return (
            self.init_loc_fn is None
            and self.start_rounds > 0
            and 0 < size <= mode_finding.MAX_DIM
            and self.family.can_start
        )

    def suits(self, prepared: Prepared, stack: Stack) -> bool:
        """Which term belongs to which row depends on the values of index arguments, not on shapes alone."""
        notes = prepared.notes
        return (notes["weighting"], notes["batching"]) == self._rows(prepared.split, stack, notes["find"])

    def _rows(self, split: SplitModel, stack: Stack, find: Any) -> tuple[Weighting, Batching | None]:
        """How terms find their rows, and how minibatches are taken."""
        long = self.batch_size is not None and split.groups and _long_format(split)
        found = None
        if not split.groups or (self.importance_samples == 1 and not long):
            weighting = Weighting(1)
        elif self.family.local_cov == "full":
            weighting = Weighting(self.importance_samples or 1, "whole")
        else:
            found = [jax.device_get(find(b.args, b.mask, stack.shared)) for b in stack.buckets]
            rows = how_rows_lie(split, stack, found)
            weighting = Weighting(self.importance_samples or (1 if rows == "whole" else IMPORTANCE_SAMPLES), rows)
        if self.batch_size is None:
            return weighting, None
        if weighting.rows == "indexed" and not long:  # a latent that the silo has once joins all its rows
            weighting = Weighting(self.importance_samples or 1)
        if weighting.num > 1 and weighting.rows == "whole":
            raise ValueError(
                f"batch_size= with importance_samples={weighting.num} needs local rows that can be weighted one by "
                "one, and here they meet: pass importance_samples=1"
            )
        return weighting, minibatch.plan(split, stack, weighting, self.batch_size, found)

    def algorithm(
        self, split: SplitModel, weighting: Weighting, batching: Batching | None = None
    ) -> FederatedAlgorithm:
        """SFVI as pure functions; see :mod:`numpyro_fed.algorithm`."""
        parts = self.parts(split, weighting, batching)

        def broadcast(key: Array, server: ServerState) -> Broadcast:
            return Broadcast(parts.sent(server, parts.draws(key)))

        def aggregate(messages: Message, cohort: Cohort) -> Message:
            # unbiased when a cohort speaks for all; a product, since sums over a short first axis are slow on a CPU
            weight = jnp.full(len(cohort.index), cohort.num_silos / len(cohort.index))
            return jax.tree.map(lambda leaf: jnp.tensordot(weight.astype(leaf.dtype), leaf, axes=1), messages)

        def server_step(key: Array, server: ServerState, silos: Message) -> tuple[ServerState, dict]:
            return parts.update(server, parts.draws(key), silos)

        return FederatedAlgorithm(
            parts.init, parts.init_silo, broadcast, parts.silo_step, aggregate, server_step
        ).traced_once()

    def parts(
        self, split: SplitModel, weighting: Weighting, batching: Batching | None = None, tempered: bool = False
    ) -> "Parts":
        """What a step is made of.

        ``tempered``: the silo's density is raised to the power that it is sent in ``each``.
        """
        guide, d = self.family.bind(split), split.dim
        optim, silo_optim = self._optim(split), self._silo_optim(split)

        def theta_of(server: ServerState, theta: dict | None = None) -> dict[str, Array]:
            location, scale = server.theta_base
            return jax.tree.map(lambda a, b, t: a + b * t, location, scale, server.theta if theta is None else theta)

        def draws(key: Array) -> Array:
            if self.num_particles == 1:
                return guide.draw_global(key, d)[None]
            return jax.vmap(lambda key: guide.draw_global(key, d))(jax.random.split(key, self.num_particles))

        def paths(params: dict, base: GlobalBase, eps: Array) -> tuple[Array, Array]:
            return jax.vmap(lambda eps: guide.path(params, base, eps))(eps)

        def init(key: Array) -> ServerState:
            params, base = guide.start_global(key, split)
            if self.init_loc_fn is not None:
                params |= {"loc": initial(split, self.init_loc_fn, key)}
            theta = jax.tree.map(jnp.zeros_like, split.theta)
            units = jax.tree.map(jnp.ones_like, split.theta)
            return ServerState(params, theta, base, (split.theta, units), optim.init((params, theta)))

        def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> SiloState:
            params, base = guide.start_local(key, split, data)
            found = components_of(split, data) if weighting.rows == "indexed" else None
            return SiloState(params, base, silo_optim.init(params), found)

        def sent_at(server: ServerState, eps: Array) -> Sent:
            z, _ = paths(server.params, server.base, eps)
            return Sent(z, self._aid(guide, server), theta_of(server))

        def silo_step(key: Array, broadcast: Broadcast, silo: SiloState, data: SiloData) -> tuple[Message, SiloState]:
            sent = broadcast.common
            power = broadcast.each if tempered else None
            params, base, components, batch, taken = silo.params, silo.base, silo.components, None, None
            if batching is not None:
                taken = minibatch.take(split, batching, jax.random.fold_in(key, 1), data, components)
                data, components, batch = taken.data, taken.components, taken.batch
                if guide.local_params:
                    take = lambda tree: minibatch.gather(tree, taken, silo_optim.rows)
                    params, base = take(params), guide.take_rows(base, take)

            def one(key: Array, z: Array) -> Any:
                return silo_bound(
                    split, guide, weighting, key, params, base, z, sent.aid, sent.theta, data, components, batch, power
                )

            if self.num_particles == 1:
                found = jax.tree.map(lambda leaf: leaf[None], one(key, sent.z[0]))
            else:
                found = jax.vmap(one)(jax.random.split(key, self.num_particles), sent.z)
            average = lambda tree: jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)
            message = Message(
                found.z / self.num_particles, average(found.aid), average(found.theta), average(found.value)
            )
            if not split.groups or not guide.local_params:
                return message, silo
            downhill = jax.tree.map(lambda leaf: -jnp.mean(leaf, axis=0), found.params)
            params, opt_state = silo_optim.step(downhill, silo.opt_state, silo.params, params, taken)
            return message, silo._replace(params=params, opt_state=opt_state)

        def update(server: ServerState, eps: Array, silos: Message) -> tuple[ServerState, dict]:
            (z, log_q), pull = jax.vjp(lambda params: paths(params, server.base, eps), server.params)
            _, pull_aid = jax.vjp(lambda params: self._aid(guide, server._replace(params=params)), server.params)

            def prior(z: Array, theta: dict) -> Array:
                return jnp.mean(jax.vmap(lambda z: split.log_prior(z, theta_of(server, theta)))(z))

            value, (g_z, g_theta) = jax.value_and_grad(prior, argnums=(0, 1))(z, server.theta)
            weight = jnp.full(self.num_particles, -1.0 / self.num_particles, log_q.dtype)
            g_params = jax.tree.map(jnp.add, pull((g_z + silos.z, weight))[0], pull_aid(silos.aid)[0])
            g_theta = jax.tree.map(lambda g, m, unit: g + m * unit, g_theta, silos.theta, server.theta_base[1])
            downhill = jax.tree.map(jnp.negative, (g_params, g_theta))
            updates, opt_state = optim.update(downhill, server.opt_state, (server.params, server.theta))
            params, theta = jax.tree.map(lambda p, u: p + u, (server.params, server.theta), updates)
            server = server._replace(params=params, theta=theta, opt_state=opt_state)
            return server, {"loss": jnp.mean(log_q) - value - silos.value}

        return Parts(init, init_silo, draws, sent_at, silo_step, update)

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

    def _silo_optim(self, split: SplitModel) -> RowOptim:
        optim = check_optim(self.optim if self.silo_optim is None else self.silo_optim)
        drawn = tuple(group.name for group in split.groups if group.axes) if self.batch_size is not None else ()
        return RowOptim(optim, drawn if self.family.bind(split).local_params else ())

    def adopt(self, split: SplitModel, server: ServerState, silos: tuple, found: Any) -> tuple[ServerState, tuple]:
        """The states of a run that starts from ``found``."""
        guide, optim, silo_optim = self.family.bind(split), self._optim(split), self._silo_optim(split)
        source = found.source if found.source is not None and found.source.family == self.family else None
        if source is not None:  # q itself, in its own units
            params, base = source.params, source.base
        else:
            params, base = guide.start_global(jax.random.key(0), split, found)
            params |= {name: server.params[name] for name in guide.shared_params}  # no mode of an encoder is found
        theta = jax.tree.map(jnp.zeros_like, split.theta)
        server = ServerState(params, theta, base, (found.theta, found.theta_sd), optim.init((params, theta)))
        if not split.groups or not guide.local_params:
            return server, silos

        def begin(state: SiloState, mode: Any) -> SiloState:
            if source is not None:
                params, base = guide.recentred(*mode, source.aid, self._aid(guide, server))
            else:
                params, base = guide.adopt_local(split, state.params, state.base, mode, found)
            return state._replace(params=params, base=base, opt_state=silo_optim.init(params))

        modes = found.local if source is None else source.local
        if not modes:  # a guide that reads the data has no locals of its own to give
            modes = tuple(mode_finding.SiloState(state.base.loc, state.base.scale, {}) for state in silos)
        return server, tuple(jax.vmap(begin)(state, mode) for state, mode in zip(silos, modes, strict=True))

    def with_rounds(
        self, server: ServerState, silos: tuple, num_rounds: int, share: float = 1.0
    ) -> tuple[ServerState, tuple]:
        server = server._replace(opt_state=with_horizon(server.opt_state, num_rounds))
        return server, tuple(self._with_visits(state, share * num_rounds) for state in silos)

    def _with_visits(self, state: SiloState, num_rounds: float) -> SiloState:
        """A row's steps are counted by its own visits: in minibatches it is visited in some rounds only."""
        if self.batch_size is None or not self.family.local_params or not isinstance(state.opt_state, RowState):
            return state._replace(opt_state=with_horizon(state.opt_state, max(1, round(num_rounds))))
        rows = {}
        for group, one in state.opt_state.rows.items():
            number = jnp.sum(state.base.valid[group], axis=-1, keepdims=True)  # (silos, 1)
            share = jnp.minimum(1.0, self.batch_size / jnp.maximum(number, 1))
            rows[group] = with_horizon(one, jnp.maximum(1, jnp.round(num_rounds * share)).astype(jnp.int32))
        return state._replace(opt_state=RowState(rows, with_horizon(state.opt_state.rest, max(1, round(num_rounds)))))

    def posterior_of(self, split: SplitModel, survey: Weighting | None = None) -> GuidePosterior:
        return GuidePosterior(split, self.family, survey, self.moving_centre)


def _long_format(split: SplitModel) -> bool:
    """Whether local latents lie along another axis than the observations."""
    observed = {axis for s in split.partition.sites if s.role in ("observed", "factor") for axis, _ in s.axes}
    return bool({axis for group in split.groups for axis, _ in group.axes} - observed)
