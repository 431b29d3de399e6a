"""What a correction by importance sampling found, and the posterior whose globals are drawn from its points."""

from html import escape
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp

from numpyro_fed.algorithm import Key, Posterior, PyTree
from numpyro_fed.data.padding import SiloData
from numpyro_fed.host import real_dtype
from numpyro_fed.local.start import LocalStart, WarmStart
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.precision import in_x64, to_user_dtype

Array = jax.Array
TRUSTED = 0.7  # k-hat above which importance sampling is unreliable (Vehtari et al. 2024)
FEW = 100  # effective points, below which means and sds are noisy


class Corrected(NamedTuple):
    """The server's state after the round."""

    inner: PyTree  # as it was before
    points: Array  # (S, d), of the unconstrained globals
    log_weights: Array  # (S,) float64, normalised and smoothed
    pareto_k: float
    log_evidence: float


class Correction:
    """What a correction found; ``fit.correction``.

    Attributes:
        ess: effective sample size of the weights, of ``len(points)``; ``ess_share`` is their ratio.
        pareto_k: Pareto k-hat of the weights; above 0.7 they are not to be trusted.
        points, log_weights: of the unconstrained globals, (S, d) and (S,); normalised, the largest Pareto smoothed.
        log_evidence: the estimate of log p(y) (given theta, where the model has numpyro.params).
    """

    def __init__(self, found: Corrected) -> None:
        self.points, self.log_weights = np.asarray(found.points), np.asarray(found.log_weights)
        self.pareto_k, self.log_evidence = float(found.pareto_k), float(found.log_evidence)
        self.ess = float(np.exp(-logsumexp(2 * self.log_weights)))
        self.ess_share = self.ess / len(self.points)

    @property
    def trusted(self) -> bool:
        return self.pareto_k <= TRUSTED and self.ess >= FEW

    def verdict(self) -> str:
        """Whether to trust it, and what to do if not."""
        if self.trusted:
            return "to be trusted"
        more = f"fit.uncorrected.correct(key, num_points={4 * len(self.points)})"
        if self.pareto_k <= TRUSTED:
            return f"too few effective points: correct once more from around these, fit.correct(key), or {more}"
        if self.ess_share > 0.5:
            return "do not trust its tails yet, where few points weigh much: correct once more, fit.correct(key)"
        return (
            "do not trust it, the posterior approximation is too far away: run more rounds first, correct once more "
            f"from around these points, fit.correct(key), or {more}"
        )

    def __repr__(self) -> str:
        return f"ess {self.ess:.0f} of {len(self.points)} points, k-hat {self.pareto_k:.2f}: {self.verdict()}"

    def _repr_html_(self) -> str:
        facts = {
            "effective points": f"{self.ess:.0f} of {len(self.points)}",
            "Pareto k-hat": f"{self.pareto_k:.2f}",
            "log evidence": f"{self.log_evidence:.2f}",
            "verdict": self.verdict(),
        }
        cell = "style='text-align:left'"
        rows = "".join(f"<tr><th {cell}>{n}</th><td {cell}>{escape(fact)}</td></tr>" for n, fact in facts.items())
        return f"<p><b>Correction</b></p><table><tbody>{rows}</tbody></table>"

    def moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Weighted mean and covariance, float64."""
        weights, points = np.exp(self.log_weights), self.points.astype(np.float64)
        mean = weights @ points
        return mean, (weights[:, None] * (points - mean)).T @ (points - mean)


@runtime_checkable
class HasCorrection(Protocol):
    """A posterior that was corrected."""

    def correction(self, server: PyTree) -> Correction:
        """What the correction found."""
        ...

    def uncorrected(self, server: PyTree) -> tuple[Posterior, PyTree]:
        """The posterior before, and its server's state."""
        ...


class CorrectedPosterior:
    """A posterior whose globals are drawn from weighted points; locals given the globals are ``inner``'s.

    The points have no density, so it has no evidence bound, and no factor for each silo: ``fit.uncorrected`` has them.
    """

    def __init__(self, inner: Posterior) -> None:
        self.inner = inner
        self.reads_data: bool = getattr(inner, "reads_data", False)
        self.inputs: tuple[str, ...] = getattr(inner, "inputs", ())
        self.family: Any = getattr(inner, "family", None)

    def correction(self, server: Corrected) -> Correction:
        return Correction(server)

    def uncorrected(self, server: Corrected) -> tuple[Posterior, PyTree]:
        return self.inner, server.inner

    def sample(self, key: Key, server: Corrected) -> Array:
        """One of the points, by its weight."""

        @in_x64
        def cumulative(log_weights: Array) -> Array:
            summed = jnp.cumsum(jnp.exp(log_weights))
            return summed / summed[-1]

        steps = to_user_dtype(cumulative(server.log_weights))
        index = jnp.searchsorted(steps, jax.random.uniform(key), side="right")
        return server.points[jnp.minimum(index, len(steps) - 1)]

    def sample_local(self, key: Key, z: Array, server: Corrected, silo: PyTree, data: SiloData) -> dict[str, Array]:
        return self.inner.sample_local(key, z, server.inner, silo, data)

    def theta(self, server: Corrected) -> dict[str, Any]:
        return self.inner.theta(server.inner)

    def normal(self, server: Corrected) -> Normal:
        """With the points' weighted mean and covariance."""
        mean, covariance = self._moments(server)
        with jax.enable_x64(True):
            return Normal(jnp.asarray(mean), jnp.asarray(np.linalg.cholesky(covariance)))

    def _moments(self, server: Corrected) -> tuple[np.ndarray, np.ndarray]:
        found = Correction(server)
        mean, covariance = found.moments()
        if found.ess < 2 * (len(mean) + 1) or not np.all(np.linalg.eigvalsh(covariance) > 0):
            raise ValueError(
                f"the weights have an effective sample size of {found.ess:.1f}, too few for a covariance in "
                f"{len(mean)} dimensions: start from the fit before its correction, fit.uncorrected"
            )
        return mean, covariance

    def to_warm_start(self, server: Corrected) -> WarmStart:
        """A start for another run: the weighted mean and covariance."""
        mean, covariance = self._moments(server)
        dtype = real_dtype()
        sd = 1 / np.sqrt(np.diagonal(np.linalg.inv(covariance)))
        loc, chol, sd = (jnp.asarray(x, dtype) for x in (mean, np.linalg.cholesky(covariance), sd))
        if hasattr(self.inner, "to_warm_start"):
            return self.inner.to_warm_start(server.inner)._replace(loc=loc, chol=chol, sd=sd, source=None)
        theta = self.theta(server)
        return WarmStart(loc, chol, sd, theta, jax.tree.map(jnp.ones_like, theta))

    def local_start(self, warm: WarmStart, silo: PyTree) -> LocalStart | None:
        return self.inner.local_start(warm, silo) if hasattr(self.inner, "local_start") else None
