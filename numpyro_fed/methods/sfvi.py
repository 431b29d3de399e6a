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

from numpyro_fed import start
from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.bound import Weighting, silo_bound
from numpyro_fed.engines.base import Stack
from numpyro_fed.guides.structured import GlobalBase, LocalBase, StructuredNormal
from numpyro_fed.methods.base import Method, Prepared
from numpyro_fed.optim import check_optim, with_horizon
from numpyro_fed.padding import SiloData
from numpyro_fed.rows import Components, aligned, find_components
from numpyro_fed.split_model import SplitModel
from numpyro_fed.tracing import UNOPTIMISED

Array = Any
IMPORTANCE_SAMPLES = 10  # per row, where rows are separable
FULL_LIMIT = 2000


class ServerState(NamedTuple):
    params: dict[str, Array]  # of q(z_G)
    theta: dict[str, Array]  # in units of theta_base
    base: GlobalBase
    theta_base: tuple[dict[str, Array], dict[str, Array]]  # location, scale
    opt_state: Any


class SiloState(NamedTuple):
    """Private to the silo."""

    params: Any  # of q(z_L | z_G)
    base: LocalBase
    opt_state: Any
    components: Components | None


class Message(NamedTuple):
    """All that leaves a silo: the gradient of its bound at the draws, and the bound itself."""

    z: Array  # (num_particles, d)
    mean: Array  # (d,)
    theta: dict[str, Array]
    value: Array


class Sent(NamedTuple):
    """All that a silo receives."""

    z: Array  # (num_particles, d)
    mean: Array  # (d,)
    theta: dict[str, Array]


@dataclass(frozen=True)
class SFVI(Method):
    """Structured federated variational inference.

    Args:
        model: an ordinary NumPyro model, called as ``model(**silos[name])``.
        guide: the variational family; by default ``nf.guides.StructuredNormal(scale_coupling=True)``.
        optim: any optax optimiser, for the server and (unless ``silo_optim`` is given) the silos. Parameters are
            whitened, so steps are in posterior sds; the default is Adam with a step that falls from 0.02 to 0.0002.
        importance_samples: K of the bound, draws of each local row per round. By default 10 where local rows are
            separable and 1 otherwise. The plain bound (1) underestimates variance parameters of random effects; more
            draws bring the posterior closer to NUTS, at K times a step's cost.
        num_particles: draws of z_G averaged in a round.
        silo_optim: the silos' own optimiser.
        start_rounds: at most so many rounds of mode finding before the first; 0 starts at zero.
        local, shared: names of sites or plates, where the automatic partition is to be overridden.

    Example:
        >>> fit = nf.SFVI(model).run(jax.random.key(0), silos)  # doctest: +SKIP
    """

    guide: StructuredNormal | None = None
    optim: Any = None
    importance_samples: int | None = None
    num_particles: int = 1
    silo_optim: Any = None
    start_rounds: int = start.MAX_ROUNDS
    local: Any = None
    shared: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optim(self.optim)
        check_optim(self.silo_optim, "silo_optim")
        for name, least in (("num_particles", 1), ("start_rounds", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an int of at least {least}, got {value!r}")
        k = self.importance_samples
        if k is not None and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
            raise ValueError(f"importance_samples must be an int of at least 1, got {k!r}")
        if self.guide is not None and not isinstance(self.guide, StructuredNormal):
            raise TypeError(f"guide must be a nf.guides.StructuredNormal, got a {type(self.guide).__name__}")

    @property
    def family(self) -> StructuredNormal:
        return self.guide or StructuredNormal(scale_coupling=True)

    # --- what the base class asks for -------------------------------------------------------------------------------

    def prepare(self, split: SplitModel, stack: Stack) -> Prepared:
        if split.dim > FULL_LIMIT and self.family.global_cov == "full":
            raise ValueError(
                f"a full covariance over {split.dim} global dimensions takes {4 * split.dim**2 * 4 / 1e9:.1f} GB with "
                'its optimiser: pass guide=nf.guides.StructuredNormal(global_cov="low_rank") or "diagonal"'
            )
        find = _finder(split)
        weighting = self._weighting(split, stack, find)
        mode = start.newton_start(split) if self._can_start(split) else None
        return Prepared(split, self.algorithm(split, weighting), mode, {"weighting": weighting, "find": find})

    def default_rounds(self, prepared: Prepared) -> int:
        """With one draw a row gradients are noisy, and the locals' coupling takes long to settle."""
        return 20_000 if prepared.split.groups and prepared.notes["weighting"].num == 1 else 5_000

    def _can_start(self, split: SplitModel) -> bool:
        size = split.dim + sum(int(np.size(value)) for value in split.theta.values())
        return self.start_rounds > 0 and 0 < size <= start.MAX_DIM

    def suits(self, prepared: Prepared, stack: Stack) -> bool:
        """Which term belongs to which row depends on the values of index arguments, not on shapes alone."""
        find = prepared.notes["find"]
        return prepared.notes["weighting"] == self._weighting(prepared.split, stack, find)

    def _weighting(self, split: SplitModel, stack: Stack, find: Any) -> Weighting:
        if not split.groups or self.importance_samples == 1:
            return Weighting(1)
        if self.family.local_cov == "full":
            return Weighting(self.importance_samples or 1, "whole")
        everywhere_aligned = True
        for bucket in stack.buckets:
            found = jax.device_get(find(bucket.args, bucket.mask, stack.shared))
            if not bool(np.all(found.separable)):
                return Weighting(self.importance_samples or 1, "whole")
            for j in range(len(bucket.names)):
                data, one = jax.tree.map(lambda leaf, j=j: leaf[j], (SiloData(bucket.args, bucket.mask, ()), found))
                everywhere_aligned = everywhere_aligned and aligned(split, data, one)
        return Weighting(self.importance_samples or IMPORTANCE_SAMPLES, "aligned" if everywhere_aligned else "indexed")

    def algorithm(self, split: SplitModel, weighting: Weighting) -> FederatedAlgorithm:
        """SFVI as pure functions; see :mod:`numpyro_fed.algorithm`."""
        guide, d = self.family, split.dim
        optim = check_optim(self.optim)
        silo_optim = optim if self.silo_optim is None else check_optim(self.silo_optim)

        def theta_of(server: ServerState, theta: dict | None = None) -> dict[str, Array]:
            location, scale = server.theta_base
            return jax.tree.map(lambda a, b, t: a + b * t, location, scale, server.theta if theta is None else theta)

        def draws(key: Array) -> Array:
            if self.num_particles == 1:
                return guide.draw_global(key, d)[None]
            return jax.vmap(lambda key: guide.draw_global(key, d))(jax.random.split(key, self.num_particles))

        def sample(params: dict, base: GlobalBase, eps: Array) -> Array:
            return jax.vmap(lambda eps: guide.sample_global(params, base, eps))(eps)

        def init(key: Array) -> ServerState:
            loc = jnp.zeros(d)
            params, base = guide.init_global(loc, None, jnp.full(d, 0.1))
            theta = jax.tree.map(jnp.zeros_like, split.theta)
            units = jax.tree.map(lambda value: jnp.full_like(value, 0.1), split.theta)
            return ServerState(params, theta, base, (split.theta, units), optim.init((params, theta)))

        def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> SiloState:
            zeros = split.zeros_local(data.mask)
            coupling = {g: jnp.zeros((*value.shape, d)) for g, value in zeros.items()}
            valid = {g.name: split.row_mask(g, data.mask) for g in split.groups}
            scale = jax.tree.map(lambda value: jnp.full_like(value, 0.5), zeros)
            params, base = guide.init_local(split.groups, zeros, scale, coupling, jnp.ones(d), valid)
            found = None
            if weighting.rows == "indexed":
                found = find_components(split, jax.random.key(0), data, broadcast.common.mean, split.theta)
            return SiloState(params, base, silo_optim.init(params), found)

        def broadcast(key: Array, server: ServerState) -> Broadcast:
            z = sample(server.params, server.base, draws(key))
            return Broadcast(Sent(z, guide.mean_global(server.params, server.base), theta_of(server)))

        def silo_step(key: Array, broadcast: Broadcast, silo: SiloState, data: SiloData) -> tuple[Message, SiloState]:
            sent = broadcast.common

            def one(key: Array, z: Array) -> Any:
                return silo_bound(
                    split,
                    guide,
                    weighting,
                    key,
                    silo.params,
                    silo.base,
                    z,
                    sent.mean,
                    sent.theta,
                    data,
                    silo.components,
                )

            if self.num_particles == 1:
                found = jax.tree.map(lambda leaf: leaf[None], one(key, sent.z[0]))
            else:
                found = jax.vmap(one)(jax.random.split(key, self.num_particles), sent.z)
            average = lambda tree: jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)
            message = Message(
                found.z / self.num_particles, average(found.mean), average(found.theta), average(found.value)
            )
            if not split.groups:
                return message, silo
            downhill = jax.tree.map(lambda leaf: -jnp.mean(leaf, axis=0), found.params)
            updates, opt_state = silo_optim.update(downhill, silo.opt_state, silo.params)
            params = jax.tree.map(lambda p, u: p + u, silo.params, updates)
            return message, silo._replace(params=params, opt_state=opt_state)

        def aggregate(messages: Message, cohort: Cohort) -> Message:
            scale = cohort.num_silos / len(cohort.index)  # unbiased when a cohort speaks for all
            return jax.tree.map(lambda leaf: scale * jnp.sum(leaf, axis=0), messages)

        def server_step(key: Array, server: ServerState, silos: Message) -> tuple[ServerState, dict]:
            eps = draws(key)
            z, pull = jax.vjp(lambda params: sample(params, server.base, eps), server.params)
            _, pull_mean = jax.vjp(lambda params: guide.mean_global(params, server.base), server.params)

            def own(z: Array, theta: dict) -> Array:
                values = jax.vmap(
                    lambda z: (
                        split.log_prior(z, theta_of(server, theta))
                        - guide.log_prob_global(server.params, server.base, z)
                    )
                )(z)
                return jnp.mean(values)

            value, (g_z, g_theta) = jax.value_and_grad(own, argnums=(0, 1))(z, server.theta)
            g_params = jax.tree.map(jnp.add, pull(g_z + silos.z)[0], pull_mean(silos.mean)[0])
            g_theta = jax.tree.map(lambda g, m, unit: g + m * unit, g_theta, silos.theta, server.theta_base[1])
            downhill = jax.tree.map(jnp.negative, (g_params, g_theta))
            updates, opt_state = optim.update(downhill, server.opt_state, (server.params, server.theta))
            params, theta = jax.tree.map(lambda p, u: p + u, (server.params, server.theta), updates)
            server = server._replace(params=params, theta=theta, opt_state=opt_state)
            return server, {"loss": -(value + silos.value)}

        return FederatedAlgorithm(init, init_silo, broadcast, silo_step, aggregate, server_step).traced_once()

    def adopt(
        self, split: SplitModel, server: ServerState, silos: tuple, found: start.Found
    ) -> tuple[ServerState, tuple]:
        """The states of a run that starts from ``found``."""
        guide = self.family
        optim = check_optim(self.optim)
        silo_optim = optim if self.silo_optim is None else check_optim(self.silo_optim)
        params, base = guide.init_global(found.loc, found.chol, found.sd)
        theta = jax.tree.map(jnp.zeros_like, split.theta)
        server = ServerState(params, theta, base, (found.theta, found.theta_sd), optim.init((params, theta)))
        unit = found.sd if found.chol is None else jnp.sqrt(jnp.sum(found.chol**2, axis=1))

        def begin(state: SiloState, mode: start.SiloState) -> SiloState:
            params, base = guide.init_local(split.groups, mode.loc, mode.scale, mode.coupling, unit, state.base.valid)
            return state._replace(params=params, base=base, opt_state=silo_optim.init(params))

        return server, tuple(jax.vmap(begin)(state, mode) for state, mode in zip(silos, found.local, strict=True))

    def found(self, split: SplitModel, server: ServerState, silos: tuple) -> start.Found:
        """A fit of this method as the start of another run."""
        guide = self.family
        loc = guide.mean_global(server.params, server.base)
        if guide.global_cov == "diagonal":
            chol, sd = None, server.base.scale * jnp.exp(server.params["log_scale"])
        else:
            covariance = np.asarray(guide.covariance(server.params, server.base), np.float64)
            chol = jnp.asarray(np.linalg.cholesky(covariance), loc.dtype)
            sd = jnp.asarray(1 / np.sqrt(np.diagonal(np.linalg.inv(covariance))), loc.dtype)

        def local(state: SiloState) -> start.SiloState:
            loc, scale, coupling = {}, {}, {}
            for g in split.groups:
                own, base = state.params[g.name], state.base.scale[g.name]
                loc[g.name] = state.base.loc[g.name] + base * own["loc"]
                scale[g.name] = base * jnp.exp(own["log_scale"])
                zero = jnp.zeros((*base.shape, split.dim))
                coupling[g.name] = base[..., None] * own["coupling"] / state.base.unit if "coupling" in own else zero
            return start.SiloState(loc, scale, coupling)

        states = tuple(jax.vmap(local)(state) for state in silos)
        return start.Found(loc, chol, sd, self.theta(server), server.theta_base[1], states)

    def with_rounds(self, server: ServerState, silos: tuple, num_rounds: int) -> tuple[ServerState, tuple]:
        server = server._replace(opt_state=with_horizon(server.opt_state, num_rounds))
        return server, tuple(state._replace(opt_state=with_horizon(state.opt_state, num_rounds)) for state in silos)

    # --- what a fit asks for ----------------------------------------------------------------------------------------

    def theta(self, server: ServerState) -> dict[str, Array]:
        location, scale = server.theta_base
        return jax.tree.map(lambda a, b, t: a + b * t, location, scale, server.theta)

    def sample_global(self, split: SplitModel, server: ServerState, key: Array) -> Array:
        return self.family.sample_global(server.params, server.base, self.family.draw_global(key, split.dim))

    def sample_local(
        self, split: SplitModel, server: ServerState, silo: SiloState, key: Array, z: Array, mask: dict[str, Array]
    ) -> dict[str, Array]:
        guide = self.family
        eps = jax.tree.map(lambda leaf: leaf[0], guide.draw_local(key, split, mask, 1))
        return guide.sample_local(silo.params, silo.base, z, guide.mean_global(server.params, server.base), eps)


def _finder(split: SplitModel) -> Any:
    """The components of all silos of a bucket, compiled: (args, mask, shared) -> Components, stacked."""

    def one(args: Any, mask: Any, shared: Any) -> Components:
        key = jax.random.key(0)
        z = 0.1 * jax.random.normal(key, (split.dim,))
        return find_components(split, key, SiloData(args, mask, shared), z, split.theta)

    return jax.jit(jax.vmap(one, in_axes=(0, 0, None)), compiler_options=UNOPTIMISED)
