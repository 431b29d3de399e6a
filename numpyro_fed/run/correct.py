r"""One more round that corrects a normal posterior of the globals by importance sampling.

The server sends S points of a Student t around the posterior approximation :math:`N(m, C)`, every silo returns the
logarithm of its factor :math:`f_j` at them, and the server weighs the points by

.. math:: w_s \propto \frac{p(z_s) \prod_j f_j(z_s)}{t_6(z_s; m, 1.1\, C)}

The t's tails are heavier than those of most posteriors, so weights are bounded where the approximation is fair; where
it is not, the effective sample size and the Pareto k-hat of the weights say so. Only the sum over silos is used: it
could be a secure sum.

The message is not a summary like a site. It is the silo's likelihood at S places, S numbers of which the silo's data
can be read more closely; the round is opt-in. (The check at the end of a run asks for the first 256 of them.)
"""

import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from numpyro_fed.checks import check_count, check_key
from numpyro_fed.engines.base import Engine
from numpyro_fed.engines.hearing import Gone
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.results.correction import Corrected, CorrectedPosterior, Correction
from numpyro_fed.results.draws import fit_stack
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.importance import pareto_smoothed, proposal, scrambling
from numpyro_fed.results.summary import described
from numpyro_fed.run.books import Record
from numpyro_fed.run.lost import SiloLostError
from numpyro_fed.run.runner import Runner
from numpyro_fed.run.target import exact_marginal, log_target
from numpyro_fed.schedules import as_schedule


def correct(default: Engine, fit: Fit, rng_key: Any, num_points: int, engine: Engine | None = None) -> Fit:
    """See :meth:`numpyro_fed.results.fit.Fit.correct`; ``default`` is the engine that the fit was made on."""
    began, key = time.perf_counter(), check_key(rng_key)
    num = check_count("num_points", num_points, least=16)
    normal = _normal(fit)
    fit.need_silos("log likelihoods at the points")
    split, theta = fit.split, fit.posterior.theta(fit.state.server)
    chosen = default if engine is None else engine
    known = None if fit.correction is not None or isinstance(fit.evidence, str) else fit.evidence
    words = scrambling(key) if known is None else known.words  # the points of a run's check are the first
    mean = np.asarray(normal.mean, np.float64)
    points, log_proposal = proposal(words, mean, normal.covariance, num)
    runner = Runner(Vmap() if chosen.reads_store else chosen, key, fit_stack(fit), split, as_schedule(None), False, "")
    runner.round = fit.state.round
    log_p = np.zeros(0) if known is None else np.asarray(known.log_target)[: len(points)]
    if len(log_p) < len(points):
        marginal = exact_marginal(split, fit.survey, fit.uncorrected.posterior)
        try:
            more = log_target(runner, "correct", marginal, points[len(log_p) :], len(log_p), mean, theta)
        except Gone as gone:
            raise SiloLostError(f"{gone}. The fit is not corrected") from None
        if more is None:
            raise KeyboardInterrupt
        log_p = np.concatenate([log_p, more.log_p])
    corrected = _weighted(fit, points, log_proposal, log_p)
    sent = [sum(getattr(one, way) for one in runner.books.records) for way in ("bytes_up", "bytes_down")]
    record = Record("correct", len(runner.books.records), *sent)
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
        sent=(*fit.sent, *(one._replace(row=fit.num_rounds) for one in runner.books.entries)),
        seconds=fit.seconds + time.perf_counter() - began,
    )


def _weighted(fit: Fit, points: np.ndarray, log_proposal: np.ndarray, log_p: np.ndarray) -> Corrected:
    log_weights = log_p - log_proposal
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


def _appended(history: dict[str, np.ndarray], row: dict[str, Any]) -> dict[str, np.ndarray]:
    """The history with one more round; what the round does not have is NaN, 0 or False."""
    if not history:
        return {name: np.asarray(value)[None] for name, value in row.items()}

    def last(name: str, rows: np.ndarray) -> np.ndarray:
        nothing = {"f": np.nan, "U": ""}.get(rows.dtype.kind, 0)
        return np.full((1, *rows.shape[1:]), row.get(name, nothing)).astype(rows.dtype)

    return {name: np.concatenate([rows, last(name, rows)]) for name, rows in history.items()}
