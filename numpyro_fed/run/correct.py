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
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.checks import check_key
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines.base import traffic
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.guides.normal import GlobalNormal
from numpyro_fed.local.integrate import Marginal, silo_factor, start_frame
from numpyro_fed.model.rows import components_of
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import in_x64
from numpyro_fed.results.correction import Corrected, CorrectedMethod, Correction
from numpyro_fed.results.importance import pareto_smoothed, proposal
from numpyro_fed.results.state import CORRECTED, ById

if TYPE_CHECKING:
    from numpyro_fed.results.fit import Fit

Array = Any
DRAWS = 256  # of a row's locals at each point, where they are not integrated by quadrature
LOCAL_STEPS = 30  # of Newton's method to the locals' modes at the posterior mean, from nowhere


class Sent(NamedTuple):
    """All that a silo receives."""

    points: Array  # (S, d)
    centre: Array  # (d,): where it looks for its locals
    theta: dict[str, Array]


class Server(NamedTuple):
    sent: Sent
    log_prior: Array  # (S,)
    log_f: Array  # (S,) float64: the sum over silos


class SiloState(NamedTuple):
    """Private to the silo."""

    frame: Any
    components: Any


@lru_cache(maxsize=16)  # engines take algorithms as static arguments: the same one must give the same one
def algorithm(split: ById, marginal: Marginal, num_points: int) -> FederatedAlgorithm:
    """The round as pure functions; see :mod:`numpyro_fed.algorithm`. Its message is log f_j at the points, (S,)."""
    model: SplitModel = split.value
    d = model.dim

    def init(key: Array) -> Server:
        sent = Sent(jnp.zeros((num_points, d)), jnp.zeros(d), model.theta)
        with jax.enable_x64(True):
            return Server(sent, jnp.zeros(num_points, sent.points.dtype), jnp.zeros(num_points, jnp.float64))

    def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> SiloState:
        found = components_of(model, data) if marginal.rows == "indexed" else None
        return SiloState(start_frame(model, data), found)

    def broadcast(key: Array, server: Server) -> Broadcast:
        return Broadcast(server.sent)

    def silo_step(key: Array, broadcast: Broadcast, silo: SiloState, data: SiloData) -> tuple[Array, SiloState]:
        sent = broadcast.common
        factor = silo_factor(model, marginal, data, silo.components, sent.theta)
        frame = factor.refit(sent.centre, silo.frame, LOCAL_STEPS)

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

    def server_step(key: Array, server: Server, log_f: Array) -> tuple[Server, dict]:
        log_prior = jax.vmap(lambda z: model.log_prior(z, server.sent.theta))(server.sent.points)
        return server._replace(log_prior=log_prior, log_f=log_f), {}

    return FederatedAlgorithm(init, init_silo, broadcast, silo_step, aggregate, server_step).traced_once()


def correct(fit: "Fit", rng_key: Any, num_points: int, engine: Any) -> "Fit":
    """See :meth:`numpyro_fed.results.fit.Fit.correct`."""
    began, key = time.perf_counter(), check_key(rng_key)
    if isinstance(num_points, bool) or not isinstance(num_points, int | np.integer) or num_points < 16:
        raise ValueError(f"num_points must be an int of at least 16, got {num_points!r}")
    mean, covariance = _normal(fit)
    fit.need_silos("log likelihoods at the points")
    engine = engine or Vmap()
    places, log_proposal = proposal(key, mean, covariance, int(num_points))
    stack = fit._stack()
    run = algorithm(ById(fit.split), _marginal(fit, stack), len(places))
    server, states = engine.start(run, key, stack)
    centre = jnp.asarray(mean, places.dtype)
    server = server._replace(sent=Sent(jnp.asarray(places), centre, fit.method.theta(fit.state.server)))
    sent = traffic(run, server, jax.tree.map(lambda leaf: leaf[0], states[0]), stack.data(stack.buckets[0].names[0]))
    server, _, info = engine.rounds(run, key, stack, server, states, fit.state.round, None, 1, "some")
    log_weights = np.asarray(server.log_prior, np.float64) + np.asarray(server.log_f) - log_proposal
    log_weights = np.where(np.isfinite(log_weights), log_weights, -np.inf)
    if not np.any(np.isfinite(log_weights)):
        raise ValueError(
            f"the log density is not finite at any of {len(places)} points around the posterior approximation: it lies "
            "outside of the model's support. Run more rounds, and look at fit.summary()"
        )
    log_evidence = float(logsumexp(log_weights) - np.log(len(places)))
    smoothed, khat = pareto_smoothed(log_weights)
    inner = fit.state.server.inner if isinstance(fit.state.server, Corrected) else fit.state.server
    method = fit.method.method if isinstance(fit.method, CorrectedMethod) else fit.method
    with jax.enable_x64(True):
        corrected = Corrected(inner, jnp.asarray(places), jnp.asarray(smoothed), khat, log_evidence)
    row = {
        "loss": -log_evidence,
        "bytes_up": len(stack.names) * sent.up,
        "bytes_down": len(stack.names) * sent.down,
        **{name: rows[0] for name, rows in info.items()},
        "ess": Correction(corrected).ess_share,
    }
    name = type(method).__name__ + CORRECTED
    state = fit.state._replace(method=name, server=corrected)
    return replace(
        fit,
        method=CorrectedMethod(method),
        state=state,
        history=_appended(fit.history, row),
        seconds=fit.seconds + time.perf_counter() - began,
    )


def _normal(fit: "Fit") -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance of q(z_G), float64; an error where q is no normal."""
    method, server, split = fit.method, fit.state.server, fit.split
    if split.dim == 0:
        raise ValueError("the model has no global latents, so there is nothing to correct")
    if hasattr(method, "normal"):
        mean, covariance = method.normal(split, server)
    else:
        guide = method.family.bind(split) if hasattr(method, "family") else None
        if not isinstance(guide, GlobalNormal):
            what = f"nf.{fit.state.method} with {method.family!r}" if guide is not None else f"nf.{fit.state.method}"
            raise TypeError(
                f"fit.correct starts from a normal posterior of the globals, and {what} has another: fit with nf.EP, "
                "nf.SEP or nf.PVI, or with nf.SFVI(model, guide=nf.guides.StructuredNormal())"
            )
        mean = np.asarray(guide.mean_global(server.params, server.base), np.float64)
        covariance = np.asarray(guide.covariance(server.params, server.base), np.float64)
    if not (np.all(np.isfinite(mean)) and np.all(np.isfinite(covariance))):
        raise ValueError("the posterior approximation is improper, so no points can be drawn from it: run more rounds")
    return mean, covariance


def _marginal(fit: "Fit", stack: Stack) -> Marginal:
    """How locals are integrated out: as exactly as the model allows, whatever the fit itself could afford."""
    method = fit.method.method if isinstance(fit.method, CorrectedMethod) else fit.method
    from numpyro_fed.methods.ep import EP

    found = EP(method.model).weighting(fit.split, stack)
    if found.kind == "none":
        return found
    solver = getattr(method, "solver", None)
    same = getattr(solver, "marginal", None) in (None, found.kind)
    asked = (getattr(solver, "num_nodes", None) or 0) if same else 0
    return found._replace(num=max(found.num, asked, DRAWS if found.kind == "importance_weighted" else 1))


def _appended(history: dict[str, np.ndarray], row: dict[str, Any]) -> dict[str, np.ndarray]:
    """The history with one more round; what the round does not have is NaN, 0 or False."""
    if not history:
        return {name: np.asarray(value)[None] for name, value in row.items()}

    def last(name: str, rows: np.ndarray) -> np.ndarray:
        nothing = np.nan if np.issubdtype(rows.dtype, np.floating) else 0
        return np.full((1, *rows.shape[1:]), row.get(name, nothing)).astype(rows.dtype)

    return {name: np.concatenate([rows, last(name, rows)]) for name, rows in history.items()}
