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
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import gammaln, logsumexp, ndtri
from scipy.stats import chi2, qmc

from numpyro_fed import start
from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.engines.base import Stack, traffic
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.families import double, single
from numpyro_fed.fit import CORRECTED, ById
from numpyro_fed.guides.normal import GlobalNormal
from numpyro_fed.keys import check_key, digest
from numpyro_fed.methods.ep import EP
from numpyro_fed.padding import SiloData
from numpyro_fed.rows import components_of
from numpyro_fed.solvers.factor import Marginal, silo_factor, start_frame
from numpyro_fed.split_model import SplitModel

if TYPE_CHECKING:
    from numpyro_fed.fit import Fit

Array = Any
DEGREES, INFLATION = 6, 1.1  # of the Student t
DRAWS = 256  # of a row's locals at each point, where they are not integrated by quadrature
LOCAL_STEPS = 30  # of Newton's method to the locals' modes at the posterior mean, from nowhere
TRUSTED = 0.7  # k-hat above which importance sampling is unreliable (Vehtari et al. 2024)
FEW = 100  # effective points, below which means and sds are noisy
SCRAMBLE = digest("\0scramble")


# --- the round ------------------------------------------------------------------------------------------------------


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

    @double
    def total(messages: Array) -> Array:
        return jnp.sum(messages, axis=0)

    def aggregate(messages: Array, cohort: Cohort) -> Array:
        return total(messages)

    def server_step(key: Array, server: Server, log_f: Array) -> tuple[Server, dict]:
        log_prior = jax.vmap(lambda z: model.log_prior(z, server.sent.theta))(server.sent.points)
        return server._replace(log_prior=log_prior, log_f=log_f), {}

    return FederatedAlgorithm(init, init_silo, broadcast, silo_step, aggregate, server_step).traced_once()


def correct(fit: "Fit", rng_key: Any, num_points: int, engine: Any) -> "Fit":
    """See :meth:`numpyro_fed.fit.Fit.correct`."""
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


def uncorrected(fit: "Fit") -> "Fit":
    """See :attr:`numpyro_fed.fit.Fit.uncorrected`."""
    if fit.correction is None:
        return fit
    state = fit.state._replace(method=type(fit.method.method).__name__, server=fit.state.server.inner)
    return replace(fit, method=fit.method.method, state=state)


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
    found = EP(method.model).weighting(fit.split, stack)
    if found.kind == "none":
        return found
    solver = getattr(method, "solver", None)
    same = getattr(solver, "marginal", None) in (None, found.kind)
    asked = (getattr(solver, "num_nodes", None) or 0) if same else 0
    return found._replace(num=max(found.num, asked, DRAWS if found.kind == "iw" else 1))


# --- points and weights ---------------------------------------------------------------------------------------------


def proposal(key: Any, mean: np.ndarray, covariance: np.ndarray, num_points: int) -> tuple[np.ndarray, np.ndarray]:
    """Scrambled Sobol points of the Student t, (S, d), in the user's precision, and their log densities.

    S is the next power of two. A t is a normal over the root of an independent chi-square: one more coordinate.
    """
    d = len(mean)
    words = np.asarray(jax.random.key_data(jax.random.fold_in(key, SCRAMBLE))).ravel().tolist()
    sobol = qmc.Sobol(d + 1, scramble=True, rng=np.random.default_rng(words))
    unit = np.clip(sobol.random_base2(int(np.ceil(np.log2(num_points)))), 1e-12, 1 - 1e-12)
    white = ndtri(unit[:, :d]) * np.sqrt(DEGREES / chi2.ppf(unit[:, d:], DEGREES))
    scale = np.sqrt(np.diagonal(covariance))
    root = np.sqrt(INFLATION) * scale[:, None] * np.linalg.cholesky(covariance / scale / scale[:, None])
    points = (mean + white @ root.T).astype(jnp.zeros(()).dtype)
    white = np.linalg.solve(root, (points - mean).T)  # of the rounded points, which are those that are evaluated
    log_density = (
        gammaln((DEGREES + d) / 2)
        - gammaln(DEGREES / 2)
        - 0.5 * d * np.log(DEGREES * np.pi)
        - np.sum(np.log(np.diagonal(root)))
        - 0.5 * (DEGREES + d) * np.log1p(np.sum(white**2, axis=0) / DEGREES)
    )
    return points, log_density


def pareto_smoothed(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Normalised log weights, their largest smoothed, and the Pareto k-hat (Vehtari et al. 2024).

    Weights that are all equal are exact: -inf.

    >>> pareto_smoothed(np.zeros(64))[1]
    -inf
    """
    import arviz

    finite = np.isfinite(log_weights)
    given = log_weights[finite] - np.max(log_weights[finite])
    if np.ptp(given) < 1e-6:
        smoothed, khat = np.zeros_like(given), -np.inf
    elif arviz.__version__.startswith("0."):
        smoothed, khat = arviz.psislw(given)
    else:
        from arviz_stats.base import array_stats

        smoothed, khat = array_stats.psislw(-given)  # it takes log likelihoods, whose weights are their inverse
    out = np.full_like(log_weights, -np.inf)
    out[finite] = smoothed - logsumexp(smoothed)
    return out, float(khat)


def _appended(history: dict[str, np.ndarray], row: dict[str, Any]) -> dict[str, np.ndarray]:
    """The history with one more round; what the round does not have is NaN, 0 or False."""
    if not history:
        return {name: np.asarray(value)[None] for name, value in row.items()}

    def last(name: str, rows: np.ndarray) -> np.ndarray:
        nothing = np.nan if np.issubdtype(rows.dtype, np.floating) else 0
        return np.full((1, *rows.shape[1:]), row.get(name, nothing)).astype(rows.dtype)

    return {name: np.concatenate([rows, last(name, rows)]) for name, rows in history.items()}


# --- what comes back ------------------------------------------------------------------------------------------------


class Corrected(NamedTuple):
    """The server's state after the round."""

    inner: Any  # as it was before
    points: Array  # (S, d), of the unconstrained globals
    log_weights: Array  # (S,) float64, normalised and smoothed
    khat: float
    log_evidence: float


class Correction:
    """What a correction found; ``fit.correction``.

    Attributes:
        ess: effective sample size of the weights, of ``len(points)``; ``ess_share`` is their ratio.
        khat: Pareto k-hat of the weights; above 0.7 they are not to be trusted.
        points, log_weights: of the unconstrained globals, (S, d) and (S,); normalised, the largest Pareto smoothed.
        log_evidence: the estimate of log p(y) (given theta, where the model has numpyro.params).
    """

    def __init__(self, found: Corrected) -> None:
        self.points, self.log_weights = np.asarray(found.points), np.asarray(found.log_weights)
        self.khat, self.log_evidence = float(found.khat), float(found.log_evidence)
        self.ess = float(np.exp(-logsumexp(2 * self.log_weights)))
        self.ess_share = self.ess / len(self.points)

    @property
    def trusted(self) -> bool:
        return self.khat <= TRUSTED and self.ess >= FEW

    def verdict(self) -> str:
        """Whether to trust it, and what to do if not."""
        if self.trusted:
            return "to be trusted"
        more = f"fit.uncorrected.correct(key, num_points={4 * len(self.points)})"
        if self.khat <= TRUSTED:
            return f"too few effective points: correct once more from around these, fit.correct(key), or {more}"
        if self.ess_share > 0.5:
            return "do not trust its tails yet, where few points weigh much: correct once more, fit.correct(key)"
        return (
            "do not trust it, the posterior approximation is too far away: run more rounds first, correct once more "
            f"from around these points, fit.correct(key), or {more}"
        )

    def __repr__(self) -> str:
        return f"ess {self.ess:.0f} of {len(self.points)} points, k-hat {self.khat:.2f}: {self.verdict()}"

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Weighted mean and covariance, float64."""
        weights, points = np.exp(self.log_weights), self.points.astype(np.float64)
        mean = weights @ points
        return mean, (weights[:, None] * (points - mean)).T @ (points - mean)


@dataclass(frozen=True)
class CorrectedMethod:
    """A method whose globals are drawn from weighted points; all else is as it was."""

    method: Any

    model = property(lambda self: self.method.model)
    family = property(lambda self: getattr(self.method, "family", None))
    local = property(lambda self: self.method.local)
    shared = property(lambda self: self.method.shared)

    def theta(self, server: Corrected) -> dict[str, Array]:
        return self.method.theta(server.inner)

    def normal(self, split: SplitModel, server: Corrected) -> tuple[np.ndarray, np.ndarray]:
        found = Correction(server)
        mean, covariance = found.moments()
        if found.ess < 2 * (split.dim + 1) or not np.all(np.linalg.eigvalsh(covariance) > 0):
            raise ValueError(
                f"the weights have an effective sample size of {found.ess:.1f}, too few for a covariance in "
                f"{split.dim} dimensions: start from the fit before its correction, fit.uncorrected"
            )
        return mean, covariance

    def sample_global(self, split: SplitModel, server: Corrected, key: Array) -> Array:
        """One of the points, by its weight."""

        @double
        def cumulative(log_weights: Array) -> Array:
            summed = jnp.cumsum(jnp.exp(log_weights))
            return summed / summed[-1]

        steps = single(cumulative(server.log_weights))
        index = jnp.searchsorted(steps, jax.random.uniform(key), side="right")
        return server.points[jnp.minimum(index, len(steps) - 1)]

    def sample_local(
        self, split: SplitModel, server: Corrected, silo: Any, key: Array, z: Array, mask: dict, data: Any = None
    ) -> dict[str, Array]:
        return self.method.sample_local(split, server.inner, silo, key, z, mask, data)

    def found(self, split: SplitModel, server: Corrected, silos: tuple) -> start.Found:
        """A start for another run: the weighted mean and covariance."""
        mean, covariance = self.normal(split, server)
        old = self.method.found(split, server.inner, silos)
        sd = 1 / np.sqrt(np.diagonal(np.linalg.inv(covariance)))
        loc, chol, sd = (jnp.asarray(x, old.loc.dtype) for x in (mean, np.linalg.cholesky(covariance), sd))
        return old._replace(loc=loc, chol=chol, sd=sd, source=None)

    def weighting(self, split: SplitModel, stack: Stack) -> Any:
        return self.method.weighting(split, stack)

    def elbo(self, split: SplitModel, weighting: Any, stack: Stack, server: Corrected, silos: tuple, key: Array) -> Any:
        """Of the fit before its correction, which has a density."""
        return self.method.elbo(split, weighting, stack, server.inner, silos, key)
