r"""One more round that corrects a normal posterior of the globals by importance sampling.

The server sends S points of a Student t around the posterior approximation :math:`N(m, C)`, every silo returns the
logarithm of its factor :math:`f_j` at them, and the server weighs the points by

.. math:: w_s \propto \frac{p(z_s) \prod_j f_j(z_s)}{t_6(z_s; m, 1.1\, C)}

The t's tails are heavier than those of most posteriors, so weights are bounded where the approximation is fair; where
it is not, the effective sample size and the Pareto k-hat of the weights say so. Only the sum over silos is used: it
could be a secure sum.

The message is not a summary like a site. It is the silo's likelihood at S places, S numbers of which the silo's data
can be read more closely; the round is opt-in.
"""

import time
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Phase
from numpyro_fed.checks import check_count, check_key
from numpyro_fed.data.padding import SiloData
from numpyro_fed.engines.base import Engine
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.local.integrate import Marginal, choose, silo_factor, start_frame
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.rows import components_of
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.precision import in_x64
from numpyro_fed.results.correction import Corrected, CorrectedPosterior, Correction
from numpyro_fed.results.draws import fit_stack
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.importance import pareto_smoothed, proposal
from numpyro_fed.results.summary import described
from numpyro_fed.run.runner import Runner
from numpyro_fed.schedules import as_schedule

Array = jax.Array
DRAWS = 256  # of a row's locals at each point, where they are not integrated by quadrature
LOCAL_STEPS = 30  # of Newton's method to the locals' modes at the posterior mean, from nowhere


class CorrectionBroadcast(NamedTuple):
    """All that a silo receives."""

    points: Array  # (S, d)
    centre: Array  # (d,): where it looks for its locals
    theta: dict[str, Array]


class CorrectionServer(NamedTuple):
    sent: CorrectionBroadcast
    log_prior: Array  # (S,)
    log_f: Array  # (S,) float64: the sum over silos


def correction_round(split: SplitModel, marginal: Marginal, num_points: int) -> FederatedAlgorithm:
    """The round as pure functions; see :mod:`numpyro_fed.algorithm`. Its message is log f_j at the points, (S,)."""
    d = split.dim

    def init(key: Array) -> CorrectionServer:
        return begun(CorrectionBroadcast(jnp.zeros((num_points, d)), jnp.zeros(d), split.theta))

    def broadcast(key: Array, server: CorrectionServer) -> Broadcast:
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
            return factor.log_f(z, frame, factor.nodes(jax.random.fold_in(key, s)))

        places = jnp.arange(num_points), sent.points
        return jax.lax.map(one, places, batch_size=factor.batch_of(num_points)), silo

    @in_x64
    def total(messages: Array) -> Array:
        return jnp.sum(messages, axis=0)

    def aggregate(messages: Array, cohort: Cohort) -> Array:
        return total(messages)

    def server_step(key: Array, server: CorrectionServer, log_f: Array) -> tuple[CorrectionServer, dict]:
        log_prior = jax.vmap(lambda z: split.log_prior(z, server.sent.theta))(server.sent.points)
        return server._replace(log_prior=log_prior, log_f=log_f), {}

    nothing = lambda key, broadcast, data: ()
    return FederatedAlgorithm(init, nothing, broadcast, silo_step, aggregate, server_step).traced_once()


def begun(sent: CorrectionBroadcast) -> CorrectionServer:
    """Before the round: the points, and nothing known of them."""
    num = sent.points.shape[0]
    with jax.enable_x64(True):
        return CorrectionServer(sent, jnp.zeros(num, sent.points.dtype), jnp.zeros(num, jnp.float64))


def correct(default: Engine, fit: Fit, rng_key: Any, num_points: int, engine: Engine | None = None) -> Fit:
    """See :meth:`numpyro_fed.results.fit.Fit.correct`; ``default`` is the engine that the fit was made on."""
    began, key = time.perf_counter(), check_key(rng_key)
    num = check_count("num_points", num_points, least=16)
    normal = _normal(fit)
    fit.need_silos("log likelihoods at the points")
    split, stack = fit.split, fit_stack(fit)
    chosen = default if engine is None else engine
    points, log_proposal = proposal(key, np.asarray(normal.mean, np.float64), normal.covariance, num)
    marginal = _marginal(fit)
    make = lambda: correction_round(split, marginal, len(points))
    sent = CorrectionBroadcast(
        jnp.asarray(points), jnp.asarray(normal.mean, points.dtype), fit.posterior.theta(fit.state.server)
    )
    phase = Phase(
        "correct",
        remembered(make, "correct", ByIdentity(split), marginal, len(points)),
        begin=lambda left, fresh: Begun(begun(sent)),
        finish=lambda left, server, info: left._replace(server=server),
        role="check",
        effort="some",
        watched=False,  # a density may well be zero at some of the points
    )
    runner = Runner(Vmap() if chosen.reads_store else chosen, key, stack, split, as_schedule(None), False, "")
    runner.round = fit.state.round
    left, _ = runner.run((phase,), Left(server=fit.state.server), tuple(() for _ in stack.buckets), None)
    corrected = _weighted(fit, points, log_proposal, left.server)
    (record,) = runner.records
    row = {
        "loss": -corrected.log_evidence,
        "bytes_up": record.bytes_up,
        "bytes_down": record.bytes_down,
        "ess": Correction(corrected).ess_share,
    }
    return replace(
        fit,
        posterior=CorrectedPosterior(fit.uncorrected.posterior),
        state=fit.state._replace(server=corrected),
        history=_appended(fit.history, row),
        records=(*fit.records, record),
        seconds=fit.seconds + time.perf_counter() - began,
    )


def _weighted(fit: Fit, points: np.ndarray, log_proposal: np.ndarray, server: Any) -> Corrected:
    if not isinstance(server, CorrectionServer):
        raise ValueError(_nowhere(len(points)))
    log_weights = np.asarray(server.log_prior, np.float64) + np.asarray(server.log_f) - log_proposal
    log_weights = np.where(np.isfinite(log_weights), log_weights, -np.inf)
    if not np.any(np.isfinite(log_weights)):
        raise ValueError(_nowhere(len(points)))
    log_evidence = float(logsumexp(log_weights) - np.log(len(points)))
    smoothed, pareto_k = pareto_smoothed(log_weights)
    with jax.enable_x64(True):
        return Corrected(
            fit.uncorrected.state.server, jnp.asarray(points), jnp.asarray(smoothed), pareto_k, log_evidence
        )


def _nowhere(num: int) -> str:
    return (
        f"the log density is not finite at any of {num} points around the posterior approximation: it lies outside of "
        "the model's support. Run more rounds, and look at fit.summary()"
    )


def _normal(fit: Fit) -> Normal:
    """q(z_G); an error where it is no normal."""
    if fit.split.dim == 0:
        raise ValueError("the model has no global latents, so there is nothing to correct")
    normal = fit.posterior.normal(fit.state.server)
    if normal is None:
        raise TypeError(
            f"fit.correct starts from a normal posterior of the globals, and {described(fit)} has another: fit with "
            "nf.EP, nf.SEP or nf.PVI, or with nf.SFVI(model, guide=nf.guides.StructuredNormal())"
        )
    if not (np.all(np.isfinite(normal.mean)) and np.all(np.isfinite(normal.root))):
        raise ValueError("the posterior approximation is improper, so no points can be drawn from it: run more rounds")
    return normal


def _marginal(fit: Fit) -> Marginal:
    """How locals are integrated out: as exactly as the model allows, whatever the fit itself could afford."""
    found = choose(fit.split, fit.survey)
    if found.kind == "none":
        return found
    own = getattr(fit.uncorrected.posterior, "marginal", None)
    asked = own.num if own is not None and own.kind == found.kind else 0
    return found._replace(num=max(found.num, asked, DRAWS if found.kind == "importance_weighted" else 1))


def _appended(history: dict[str, np.ndarray], row: dict[str, Any]) -> dict[str, np.ndarray]:
    """The history with one more round; what the round does not have is NaN, 0 or False."""
    if not history:
        return {name: np.asarray(value)[None] for name, value in row.items()}

    def last(name: str, rows: np.ndarray) -> np.ndarray:
        nothing = np.nan if np.issubdtype(rows.dtype, np.floating) else 0
        return np.full((1, *rows.shape[1:]), row.get(name, nothing)).astype(rows.dtype)

    return {name: np.concatenate([rows, last(name, rows)]) for name, rows in history.items()}
