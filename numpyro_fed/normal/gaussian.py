r"""A normal over the unconstrained globals, as a value: :math:`N(m, R R^\top + F^\top F)`.

What every method with a normal posterior returns, and all that corrections, warm starts and comparisons know of it. The
root R is a lower triangular matrix or, where there are no correlations, a vector of sds; F, if any, has few rows, so
that nothing of size d x d is made in very many dimensions.

>>> import jax, jax.numpy as jnp
>>> q = Normal(jnp.zeros(2), jnp.ones(2), jnp.ones((1, 2)))
>>> q.covariance.tolist()
[[2.0, 1.0], [1.0, 2.0]]
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from numpyro.distributions import LowRankMultivariateNormal, MultivariateNormal
from numpyro.distributions import Normal as Independent

Array = jax.Array


class Normal(NamedTuple):
    """A normal over the unconstrained globals; :meth:`numpyro_fed.Fit.normal` returns one."""

    mean: Float[Array, " d"]
    root: Float[Array, "d d"] | Float[Array, " d"]  # lower triangular, or sds
    factor: Float[Array, "r d"] | None = None

    @property
    def dim(self) -> int:
        return int(self.mean.shape[0])

    @property
    def variances(self) -> np.ndarray:
        """Marginal ones, float64 (d,)."""
        root = np.asarray(self.root, np.float64)
        own = np.sum(root**2, axis=1) if root.ndim == 2 else root**2
        return own if self.factor is None else own + np.sum(np.asarray(self.factor, np.float64) ** 2, axis=0)

    @property
    def sds(self) -> np.ndarray:
        return np.sqrt(self.variances)

    @property
    def covariance(self) -> np.ndarray:
        """Float64 (d, d), also where it is diagonal."""
        root = np.asarray(self.root, np.float64)
        own = root @ root.T if root.ndim == 2 else np.diag(root**2)
        if self.factor is None:
            return own
        factor = np.asarray(self.factor, np.float64)
        return own + factor.T @ factor

    def sample(self, key: Array) -> Float[Array, " d"]:
        """One draw."""
        if self.factor is None:
            eps = jax.random.normal(key, self.mean.shape, self.mean.dtype)
            return self.mean + (self.root @ eps if self.root.ndim == 2 else self.root * eps)
        own, common = jax.random.split(key)
        eps = jax.random.normal(own, self.mean.shape, self.mean.dtype)
        spread = self.root @ eps if self.root.ndim == 2 else self.root * eps
        return self.mean + spread + jax.random.normal(common, self.factor.shape[:1], self.mean.dtype) @ self.factor

    def drawn(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """So many draws by the host, float64 (num, d)."""
        root = np.asarray(self.root, np.float64)
        white = rng.normal(size=(num, self.dim))
        own = np.asarray(self.mean, np.float64) + (white @ root.T if root.ndim == 2 else white * root)
        if self.factor is None:
            return own
        factor = np.asarray(self.factor, np.float64)
        return own + rng.normal(size=(num, len(factor))) @ factor

    def log_prob(self, z: Float[Array, " d"]) -> Float[Array, ""]:
        """Log density at a point."""
        if self.factor is None:
            if self.root.ndim == 2:
                return MultivariateNormal(self.mean, scale_tril=self.root).log_prob(z)
            return jnp.sum(Independent(self.mean, self.root).log_prob(z))
        if self.root.ndim == 1 and len(self.factor) < self.dim:
            return LowRankMultivariateNormal(self.mean, self.factor.T, self.root**2).log_prob(z)
        own = self.root @ self.root.T if self.root.ndim == 2 else jnp.diag(self.root**2)
        return MultivariateNormal(self.mean, own + self.factor.T @ self.factor).log_prob(z)
