r"""SFVI with averaging (SFVI-Avg; Hassan, Salomone and Mengersen 2022, Algorithm 2).

Each round a silo takes ``local_steps`` steps of variational inference on its own, its bound multiplied by
:math:`N / N_j` as if all silos were like it, and sends its :math:`q^{(j)}(z_G)` and :math:`\theta^{(j)}`. The server
replaces :math:`q(z_G)` by the Wasserstein barycenter of the silos' normals (:mod:`numpyro_fed.normal.barycenter`) and
:math:`\theta` by its mean.

Where we deviate, and why:

- **Scaling.** The paper multiplies :math:`\log p(z_{Lj}, y_j \mid z_G)` by :math:`N / N_j` but not
  :math:`-\log q(z_{Lj} \mid z_G)`, which tempers the locals' posterior: with random effects their variance runs away.
  We multiply the silo's whole bound, so that a silo's target is :math:`p(z_G)\, p(y_j \mid z_G)^{N / N_j}`.
  ``scaling="paper"`` gives the paper's. Without local latents the two agree.
- **Units.** The barycenter is taken in the coordinates of the start (:mod:`numpyro_fed.run.mode`), where every
posterior
  sd is about one, so it does not depend on the units of the model's parameters. Where no start is looked for these are
  the model's own.
- **Centre.** The locals move with :math:`z_G` around the start's centre, not the guide's mean: the same family, and
  :math:`q(z_L \mid z_G)` stays what it was when the server moves the mean.
"""

import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.guides import Amortised, StructuredNormal
from numpyro_fed.guides.normal import GlobalBase
from numpyro_fed.guides.posterior import GuidePosterior, theta_of
from numpyro_fed.local.bound import Weighting
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.methods.sfvi import SFVI, ServerState, SiloState
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.barycenter import barycenter, diagonal_barycenter, w2, w2_diagonal
from numpyro_fed.optim import DEFAULT, LINEAR, with_horizon
from numpyro_fed.run import warm_start
from numpyro_fed.run.prepare import Prepared

Array = Any


class AvgSiloState(NamedTuple):
    """Private to the silo."""

    opt_state: Any  # of its copy of q(z_G) and theta; kept between rounds
    local: SiloState


class AvgSent(NamedTuple):
    """All that a silo receives, besides its own N / N_j."""

    params: dict[str, Any]  # of q(z_G), in units of the base
    theta: dict[str, Array]
    base: GlobalBase
    theta_base: tuple[dict[str, Array], dict[str, Array]]


class AvgMessage(NamedTuple):
    """All that leaves a silo."""

    params: dict[str, Any]  # of its q(z_G)
    theta: dict[str, Array]
    value: Array  # its bound where it started from, without the factor (under the paper's scaling: the tempered one)


class Average(NamedTuple):
    params: dict[str, Any]
    theta: dict[str, Array]
    value: Array
    residual: Array  # of the barycenter's equation, relative
    disagreement: Array  # (num_silos,): W2 distance of each silo's normal to the barycenter; NaN: took no part


@dataclass(frozen=True)
class SFVIAvg(SFVI):
    """SFVI that talks every ``local_steps`` steps: silos work alone, the server averages their posteriors.

    Args:
        local_steps: m, steps a silo takes between two rounds.
        scaling: ``"whole"`` (default) multiplies a silo's whole bound by N / N_j; ``"paper"`` its log density alone.
        weights: of the silos in the average: ``"size"`` (default, by their number of observations) or ``"equal"``.

    The other arguments are those of :class:`~numpyro_fed.SFVI`; ``guide`` needs a normal with full or diagonal
    covariance over the globals. ``fit.history`` has, for every round, the ``residual`` of the barycenter's equation and
    the ``disagreement`` of the silos: the Wasserstein distance of each silo's posterior to the barycenter, in units of
    the start's sds. Silos of one population are about sqrt(d (N / N_j - 1)) apart, if they take enough steps; distances
    well above that say that they disagree. (As steps become smaller towards the end, distances shrink: look at earlier
    rounds.) Then an average after many steps is not the posterior of all data: take fewer ``local_steps``, or go on
    with :class:`~numpyro_fed.SFVI`, ``run(..., init_state=fit)``.

    Example:
        >>> fit = nf.SFVIAvg(model, local_steps=200).run(jax.random.key(0), silos, 20)  # doctest: +SKIP
    """

    local_steps: int = 100
    scaling: str = "whole"
    weights: str = "size"

    moving_centre = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.local_steps, bool) or not isinstance(self.local_steps, int) or self.local_steps < 1:
            raise ValueError(f"local_steps must be an int of at least 1, got {self.local_steps!r}")
        if self.scaling not in ("whole", "paper"):
            raise ValueError(f"scaling is {self.scaling!r}; use 'whole' or 'paper'")
        if self.weights not in ("size", "equal"):
            raise ValueError(f"weights is {self.weights!r}; use 'size' or 'equal'")
        family = self.family
        normal = isinstance(family, StructuredNormal | Amortised) and family.global_guide is None
        if not normal or family.global_cov not in ("full", "diagonal"):
            raise ValueError(
                f"SFVIAvg averages normals with full or diagonal covariance over the globals, got {family!r}: pass "
                'guide=nf.guides.StructuredNormal(global_cov="diagonal"), or use nf.SFVI with this guide'
            )

    @property
    def steps_per_round(self) -> int:
        return self.local_steps

    def default_rounds(self, prepared: Prepared, sweep: int = 1) -> int:
        return 50

    def prepare(self, split: SplitModel, stack: Stack) -> Prepared:
        if len(stack.names) == 1:
            warnings.warn("SFVIAvg has one silo, so there is nothing to average: nf.SFVI does the same", stacklevel=3)
        return super().prepare(split, stack)

    def algorithm(
        self, split: SplitModel, weighting: Weighting, batching: Batching | None = None
    ) -> FederatedAlgorithm:
        """SFVI-Avg as pure functions: a silo runs SFVI with itself, so many steps, and the server averages."""
        tempered = self.scaling == "paper" and bool(split.groups)
        own = self.parts(split, weighting, batching, tempered)
        guide, optim = self.family.bind(split), self._optim(split)
        sizes = _sizes(split)
        full = self.family.global_cov == "full"

        def init(key: Array) -> ServerState:
            return own.init(key)._replace(opt_state=())

        def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> AvgSiloState:
            sent = broadcast.common
            state = optim.init((_unpacked(sent.params, split.dim), sent.theta))
            return AvgSiloState(state, own.init_silo(key, broadcast, data))

        def broadcast(key: Array, server: ServerState) -> Broadcast:
            sent = AvgSent(_packed(server.params), server.theta, server.base, server.theta_base)
            return Broadcast(sent, jnp.asarray(sizes.sum() / sizes, jnp.zeros(()).dtype))

        def silo_step(key: Array, broadcast: Broadcast, silo: AvgSiloState, data: SiloData) -> tuple:
            sent, factor = broadcast
            params = _unpacked(sent.params, split.dim)
            server = ServerState(params, sent.theta, sent.base, sent.theta_base, silo.opt_state)

            def step(carry: tuple, key: Array) -> tuple[tuple, Array]:
                server, local = carry
                at_server, in_silo = jax.random.split(key)
                # drawn once: the compiler does not see that two draws from one key are the same
                eps = jax.lax.optimization_barrier(own.draws(at_server))
                message, local = own.silo_step(in_silo, Broadcast(own.sent(server, eps), factor), local, data)
                value = message.value
                if not tempered:
                    message = jax.tree.map(lambda leaf: factor * leaf, message)
                server, _ = own.update(server, eps, message)
                return (server, local), value

            keys = jax.random.split(key, self.local_steps)
            (server, local), values = jax.lax.scan(step, (server, silo.local), keys)
            return (
                AvgMessage(_packed(server.params), server.theta, values[0]),
                AvgSiloState(server.opt_state, local),
            )

        def aggregate(messages: AvgMessage, cohort: Cohort) -> Average:
            number = len(cohort.index)
            weights = jnp.ones(number) if self.weights == "equal" else jnp.asarray(sizes, jnp.float32)[cohort.index]
            weights = weights / jnp.sum(weights)
            mean = lambda tree: jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1), tree)
            params = jax.vmap(lambda params: _unpacked(params, split.dim))(messages.params)
            if full:
                covariances = jax.vmap(_covariance)(params)
                found = barycenter(params["loc"], covariances, weights)
                distance = jax.vmap(lambda m, c: w2(m, c, found.mean, found.covariance))(params["loc"], covariances)
                new, residual = _from_covariance(found.mean, found.covariance), found.residual
            else:
                sds = jnp.exp(params["log_scale"])
                plain = diagonal_barycenter(params["loc"], sds, weights)
                distance = jax.vmap(lambda m, s: w2_diagonal(m, s, plain.mean, plain.sds))(params["loc"], sds)
                new, residual = {"loc": plain.mean, "log_scale": jnp.log(plain.sds)}, plain.residual
            new |= {name: mean(params[name]) for name in guide.shared_params}
            apart = jnp.full(cohort.num_silos, jnp.nan).at[cohort.index].set(distance)
            value = cohort.num_silos / number * jnp.sum(messages.value)
            return Average(new, mean(messages.theta), value, residual, apart)

        def server_step(key: Array, server: ServerState, found: Average) -> tuple[ServerState, dict]:
            z, log_q = guide.path(server.params, server.base, guide.draw_global(key, split.dim))
            prior = split.log_prior(z, theta_of(server))
            info = {
                "loss": log_q - prior - found.value,
                "residual": found.residual,
                "disagreement": found.disagreement,
            }
            return server._replace(params=found.params, theta=found.theta), info

        return FederatedAlgorithm(init, init_silo, broadcast, silo_step, aggregate, server_step).traced_once()

    def _optim(self, split: SplitModel, default: Any = DEFAULT) -> Any:
        """Linear where the start gives every direction its unit."""
        return super()._optim(split, LINEAR if self._can_start(split) else default)

    # --- states -----------------------------------------------------------------------------------------------------

    def adopt(self, split: SplitModel, server: ServerState, silos: tuple, found: warm_start.Found) -> tuple:
        server, local = super().adopt(split, server, tuple(state.local for state in silos), found)
        states = []
        for state, own in zip(silos, local, strict=True):
            repeat = lambda new, old: jnp.repeat(jnp.asarray(new, old.dtype)[None], old.shape[0], axis=0)
            states.append(AvgSiloState(jax.tree.map(repeat, server.opt_state, state.opt_state), own))
        return server._replace(opt_state=()), tuple(states)

    def with_rounds(
        self, server: ServerState, silos: tuple, num_rounds: int, share: float = 1.0
    ) -> tuple[ServerState, tuple]:
        steps = max(1, round(share * num_rounds * self.local_steps))
        return server, tuple(
            AvgSiloState(with_horizon(state.opt_state, steps), self._with_visits(state.local, steps)) for state in silos
        )

    def posterior_of(self, split: SplitModel, survey: Weighting | None = None) -> "AveragedPosterior":
        return AveragedPosterior(split, self.family, survey, self.moving_centre)


class AveragedPosterior(GuidePosterior):
    """Silos keep the guide's state beside that of their own copy of q(z_G)."""

    def own(self, silo: AvgSiloState) -> SiloState:
        return silo.local


def _sizes(split: SplitModel) -> np.ndarray:
    """N_j: each silo's number of observations, in the order of the silos."""
    part = split.partition
    if not part.axes:
        return np.ones(part.num_silos)
    lengths = {axis.name: axis.lengths for axis in part.axes}
    observed = [site for site in part.sites if site.role in ("observed", "factor") and not site.at_server]
    count = lambda site, name: np.prod([lengths[axis][name] for axis, _ in site.axes or site.value_axes])
    return np.array([sum(count(site, name) for site in observed) for name in part.axes[0].lengths], float)


def _packed(params: dict[str, Any]) -> dict[str, Any]:
    """Only the lower triangle crosses."""
    if "tril" not in params:
        return params
    rows, columns = np.tril_indices(params["tril"].shape[0], -1)
    return {**params, "tril": params["tril"][rows, columns]}


def _unpacked(params: dict[str, Any], d: int) -> dict[str, Any]:
    if "tril" not in params:
        return params
    rows, columns = np.tril_indices(d, -1)
    return {**params, "tril": jnp.zeros((d, d), params["tril"].dtype).at[rows, columns].set(params["tril"])}


def _covariance(params: dict[str, Array]) -> Array:
    """In units of the base."""
    unit = jnp.tril(params["tril"], -1) + jnp.eye(params["loc"].shape[0])
    factor = jnp.exp(params["log_scale"])[:, None] * unit
    return factor @ factor.T


def _from_covariance(mean: Array, covariance: Array) -> dict[str, Array]:
    factor = jnp.linalg.cholesky(covariance)
    scale = jnp.diagonal(factor)
    return {"loc": mean, "log_scale": jnp.log(scale), "tril": jnp.tril(factor / scale[:, None], -1)}
