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
  posterior sd is about one, so it does not depend on the units of the model's parameters. Where no start is looked for
  these are the model's own.
- **Centre.** The locals move with :math:`z_G` around the start's centre, not the guide's mean: the same family, and
  :math:`q(z_L \mid z_G)` stays what it was when the server moves the mean.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions.util import matrix_to_tril_vec, vec_to_tril_matrix
from scipy.stats import chi2

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Lost, Phase, Plan
from numpyro_fed.checks import check_count, silos_named
from numpyro_fed.data.padding import SiloData
from numpyro_fed.guides.normal import GlobalBase
from numpyro_fed.guides.posterior import GuidePosterior, theta_of
from numpyro_fed.local.bound import Weighting
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.local.start import LocalStart
from numpyro_fed.methods.rest import at_rest
from numpyro_fed.methods.sfvi import SFVI
from numpyro_fed.methods.sfvi_step import SFVIServer, SFVISilo
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.normal.barycenter import barycenter, diagonal_barycenter, w2, w2_diagonal
from numpyro_fed.optim import DEFAULT, LINEAR, shortened, with_horizon

LOOK = 512  # steps of a silo between two looks of the host
WIDE = 4.0  # times the sd of all data: then a silo alone does not tell
ALONE = 0.01  # N / N_j - 1, at least: a silo that has all data is no distance away, up to rounding
Array = jax.Array


class AvgSilo(NamedTuple):
    """Private to the silo."""

    opt_state: Any  # of its copy of q(z_G) and theta; kept between rounds
    local: SFVISilo


class AvgBroadcast(NamedTuple):
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
    widest: Array  # (num_silos,): sd of each silo's normal where it is widest, in units of the start's, about


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
        >>> fit = nf.SFVIAvg(model, local_steps=200).run(jax.random.key(0), silos, 5)
        >>> fit.history["disagreement"].shape  # rounds, the start's included, and silos
        (..., 2)
    """

    local_steps: int = 100
    scaling: str = "whole"
    weights: str = "size"

    moving_centre: ClassVar[bool] = False
    patient: ClassVar[bool] = False
    fewest: ClassVar[int] = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("local_steps", self.local_steps)
        if self.scaling not in ("whole", "paper"):
            raise ValueError(f"scaling is {self.scaling!r}; use 'whole' or 'paper'")
        if self.weights not in ("size", "equal"):
            raise ValueError(f"weights is {self.weights!r}; use 'size' or 'equal'")
        family = self.family
        other = getattr(family, "global_guide", None)
        if other is not None or getattr(family, "global_cov", None) not in ("full", "diagonal"):
            raise ValueError(
                f"SFVIAvg averages normals with full or diagonal covariance over the globals, got {family!r}: pass "
                'guide=nf.guides.StructuredNormal(global_cov="diagonal"), or use nf.SFVI with this guide'
            )

    def _rounds(self, split: SplitModel, weighting: Weighting) -> int:
        return 50

    def _posterior(self, split: SplitModel, weighting: Weighting) -> GuidePosterior:
        return AveragedPosterior(split, self.family, weighting, self.moving_centre)

    def _algorithm(
        self, split: SplitModel, survey: Survey, guide: Any, weighting: Weighting, batching: Batching | None
    ) -> FederatedAlgorithm:
        """SFVI-Avg as pure functions: a silo runs SFVI with itself, so many steps, and the server averages."""
        tempered = self.scaling == "paper" and bool(split.groups)
        own = self._parts(split, guide, weighting, batching, tempered)
        optim, sizes = self._optim(split), np.array(survey.sizes, np.float64)
        full = self.family.global_cov == "full"

        def init(key: Array) -> SFVIServer:
            return own.init(key)._replace(opt_state=())

        def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> AvgSilo:
            sent = broadcast.common
            state = optim.init((_unpacked(sent.params, split.dim), sent.theta))
            return AvgSilo(state, own.init_silo(key, broadcast, data))

        def broadcast(key: Array, server: SFVIServer) -> Broadcast:
            sent = AvgBroadcast(_packed(server.params), server.theta, server.base, server.theta_base)
            return Broadcast(sent, jnp.asarray(sizes.sum() / sizes, jnp.zeros(()).dtype))

        def silo_step(key: Array, broadcast: Broadcast, silo: AvgSilo, data: SiloData) -> tuple:
            sent, factor = broadcast
            params = _unpacked(sent.params, split.dim)
            server = SFVIServer(params, sent.theta, sent.base, sent.theta_base, silo.opt_state)

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
                AvgSilo(server.opt_state, local),
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
                widest = jnp.sum(covariances**2, axis=(1, 2)) ** 0.25  # between the largest sd and d^(1/4) times it
            else:
                sds = jnp.exp(params["log_scale"])
                plain = diagonal_barycenter(params["loc"], sds, weights)
                distance = jax.vmap(lambda m, s: w2_diagonal(m, s, plain.mean, plain.sds))(params["loc"], sds)
                new, residual = {"loc": plain.mean, "log_scale": jnp.log(plain.sds)}, plain.residual
                widest = jnp.max(sds, axis=1)
            new |= {name: mean(params[name]) for name in guide.shared_params}
            by_silo = lambda found: jnp.full(cohort.num_silos, jnp.nan).at[cohort.index].set(found)
            value = cohort.num_silos / number * jnp.sum(messages.value)
            return Average(new, mean(messages.theta), value, residual, by_silo(distance), by_silo(widest))

        def server_step(key: Array, server: SFVIServer, found: Average) -> tuple[SFVIServer, dict]:
            z, log_q = guide.rsample_with_log_prob(server.params, server.base, guide.noise(key, split.dim))
            prior = split.log_prior(z, theta_of(server))
            info = {
                "loss": log_q - prior - found.value,
                "residual": found.residual,
                "disagreement": found.disagreement,
                "_widest": found.widest,
            }
            return server._replace(params=found.params, theta=found.theta), info

        parts = (init, init_silo, broadcast, silo_step, aggregate, server_step, Lost(hold=True))
        return FederatedAlgorithm(*parts).traced_once()

    def _optim(self, split: SplitModel, default: Any = DEFAULT) -> Any:
        """Linear where the start gives every direction its unit."""
        return super()._optim(split, LINEAR if self._can_start(split) else default)

    # --- where rounds begin -------------------------------------------------------------------------------------------

    def _rounds_phase(
        self, split: SplitModel, survey: Survey, plan: Plan, guide: Any, algorithm: FederatedAlgorithm, rounds: int
    ) -> Phase:
        optims = self._optims(split, guide)
        steps = max(1, round(plan.visits(rounds) * self.local_steps))

        def begin(left: Left, fresh: SFVIServer) -> Begun:
            server, given = self._begin(split, guide, optims, left, fresh)
            begun = left.server is None and left.warm is not None
            return Begun(server._replace(opt_state=()), (given, _packed(server.params), server.theta) if begun else ())

        def begin_silo(given: tuple, state: AvgSilo, local: LocalStart | None) -> AvgSilo:
            opt_state, own = state
            if given:
                own = self._begin_silo(split, guide, optims, given[0], own, local)
                opt_state = optims.server.init((_unpacked(given[1], split.dim), given[2]))
            return AvgSilo(with_horizon(opt_state, steps), self._with_visits(guide, own, steps))

        def finish(left: Left, server: SFVIServer, info: dict[str, Any]) -> Left:
            # the loss alone: silos' steps pull an average aside, so that its mean moves as they become shorter
            if left.server is None or not left.hints:  # once, whatever the start had to say
                left = left._replace(hints=(*left.hints, *_apart(split, survey, plan.names, info)))
            return at_rest(left, server, info)

        return Phase(
            "rounds",
            algorithm,
            begin,
            begin_silo,
            rounds,
            finish=finish,
            look=max(1, LOOK // self.local_steps),
            shorter=_shorter if self.optim is None else None,
        )


def _shorter(state: SFVIServer | AvgSilo) -> SFVIServer | AvgSilo:
    """Steps are the silos' alone, of q(z_G) and of their own."""
    if not isinstance(state, AvgSilo):
        return state
    own = state.local._replace(opt_state=shortened(state.local.opt_state))
    return AvgSilo(shortened(state.opt_state), own)


def _apart(split: SplitModel, survey: Survey, names: Any, info: dict[str, Any]) -> tuple[str, ...]:
    r"""What of the silos' posteriors, after their first round, would explain an average that is wrong.

    All is in units of the start's sds. Silos of one population are as wide as all data together, and their squared
    distances are :math:`\chi^2_d (N / N_j - 1)`.
    """
    remedy = "so the average of silos' posteriors is not that of all data: use nf.SFVI, nf.EP or nf.PVI"
    named = lambda places: silos_named([names[j] for j in places])
    widest = np.nan_to_num(info["_widest"][0])
    wide = np.flatnonzero(widest > WIDE * split.dim**0.25)
    if wide.size:
        times = f"up to {widest.max():.2g} times the sd that all data give"
        return (f"{named(wide)} cannot tell some direction of the globals alone ({times}), {remedy}",)
    if split.groups:
        return ()
    sizes, distance = np.array(survey.sizes, np.float64), np.nan_to_num(info["disagreement"][0])
    others = np.maximum(sizes.sum() / sizes - 1, ALONE)
    limit = chi2.ppf(1 - 0.01 / len(sizes), split.dim) * others
    far = np.flatnonzero(distance**2 > limit)
    if not far.size:
        return ()
    return (f"{named(far)} is further from all than chance allows (by {distance.max():.2g} sds), {remedy}",)


class AveragedPosterior(GuidePosterior):
    """A silo's own part of q stands beside its optimiser's state for the globals."""

    def own(self, silo: AvgSilo) -> SFVISilo:
        return silo.local


def _packed(params: dict[str, Any]) -> dict[str, Any]:
    """Only the lower triangle crosses."""
    if "tril" not in params:
        return params
    return {**params, "tril": matrix_to_tril_vec(params["tril"], diagonal=-1)}


def _unpacked(params: dict[str, Any], d: int) -> dict[str, Any]:
    """The inverse of `_packed`."""
    if "tril" not in params:
        return params
    return {**params, "tril": vec_to_tril_matrix(params["tril"], diagonal=-1) if d > 1 else jnp.zeros((d, d))}


def _covariance(params: dict[str, Array]) -> Array:
    """In units of the base."""
    unit = jnp.tril(params["tril"], -1) + jnp.eye(params["loc"].shape[0])
    factor = jnp.exp(params["log_scale"])[:, None] * unit
    return factor @ factor.T


def _from_covariance(mean: Array, covariance: Array) -> dict[str, Array]:
    factor = jnp.linalg.cholesky(covariance)
    scale = jnp.diagonal(factor)
    return {"loc": mean, "log_scale": jnp.log(scale), "tril": jnp.tril(factor / scale[:, None], -1)}
