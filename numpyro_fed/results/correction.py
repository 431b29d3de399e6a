"""What a correction by importance sampling found, and the method whose globals are drawn from its points."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from numpyro_fed.data.stack import Stack
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import in_x64, to_user_dtype

if TYPE_CHECKING:
    from numpyro_fed.results.fit import Fit

Array = Any
TRUSTED = 0.7  # k-hat above which importance sampling is unreliable (Vehtari et al. 2024)
FEW = 100  # effective points, below which means and sds are noisy


def uncorrected(fit: "Fit") -> "Fit":
    """See :attr:`numpyro_fed.results.fit.Fit.uncorrected`."""
    if fit.correction is None:
        return fit
    state = fit.state._replace(method=type(fit.method.method).__name__, server=fit.state.server.inner)
    return replace(fit, method=fit.method.method, state=state)


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

        @in_x64
        def cumulative(log_weights: Array) -> Array:
            summed = jnp.cumsum(jnp.exp(log_weights))
            return summed / summed[-1]

        steps = to_user_dtype(cumulative(server.log_weights))
        index = jnp.searchsorted(steps, jax.random.uniform(key), side="right")
        return server.points[jnp.minimum(index, len(steps) - 1)]

    def sample_local(
        self, split: SplitModel, server: Corrected, silo: Any, key: Array, z: Array, mask: dict, data: Any = None
    ) -> dict[str, Array]:
        return self.method.sample_local(split, server.inner, silo, key, z, mask, data)

    def found(self, split: SplitModel, server: Corrected, silos: tuple) -> Any:
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
