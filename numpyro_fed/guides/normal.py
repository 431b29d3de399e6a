r"""A normal over the globals, at the server.

.. math:: z_G = \mu_0 + A_0 \, [\mu + \sigma \odot (L \epsilon)]

with unit lower triangular :math:`L`. The base :math:`(\mu_0, A_0)`, a location and scale found by the start
(:mod:`numpyro_fed.run.mode`), is not learned: parameters are measured in its units, so that one step size suits a
coefficient of size 1e-3 and an intercept of 242.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from numpyro.distributions import LowRankMultivariateNormal

from numpyro_fed.checks import check_count
from numpyro_fed.keys import normal
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.families import LOG_2PI

Array = jax.Array
START_SD = 0.05  # of every coordinate, where no start is looked for
JITTER = 0.05  # ... and of its location, which is random: equal topics or hidden units could not be told apart
FULL_LIMIT = 2000


class GlobalBase(NamedTuple):
    loc: Array  # (d,)
    scale: Array  # lower triangular (d, d) for a full covariance, else (d,)


class GlobalNormal:
    """What guides share that have a normal over the globals: a mixin with the fields ``global_cov`` and ``rank``."""

    global_cov: str
    rank: int | None

    def init_global(self, loc: Array, chol: Array | None, sd: Array) -> tuple[dict[str, Array], GlobalBase]:
        """Parameters and base of a start: its mean, the Cholesky factor of its covariance (or None) and its sds."""
        d = loc.shape[0]
        params = {"loc": jnp.zeros(d), "log_scale": jnp.zeros(d)}
        if self.global_cov == "full":
            params["tril"] = jnp.zeros((d, d))
            return params, GlobalBase(loc, jnp.diag(sd) if chol is None else chol)
        if self.global_cov == "low_rank":
            params["factor"] = jnp.full((d, self._rank(d)), 1e-2) * (-1.0) ** jnp.arange(self._rank(d))
        return params, GlobalBase(loc, sd)

    def _rank(self, d: int) -> int:
        return min(d, self.rank or max(1, round(d**0.5)))

    def noise(self, key: Array, d: int) -> Array:
        return normal(key, (d + (self._rank(d) if self.global_cov == "low_rank" else 0),))

    def _white(self, params: dict[str, Array], eps: Array) -> Array:
        """A draw in units of the base."""
        if self.global_cov == "full":
            return params["loc"] + jnp.exp(params["log_scale"]) * (eps + jnp.tril(params["tril"], -1) @ eps)
        white = params["loc"] + jnp.exp(params["log_scale"]) * eps[: params["loc"].shape[0]]
        return white + params["factor"] @ eps[params["loc"].shape[0] :] if self.global_cov == "low_rank" else white

    def _in_model(self, base: GlobalBase, white: Array) -> Array:
        return base.loc + (base.scale @ white if self.global_cov == "full" else base.scale * white)

    def sample_global(self, params: dict[str, Array], base: GlobalBase, eps: Array) -> Array:
        return self._in_model(base, self._white(params, eps))

    def log_prob_global(self, params: dict[str, Array], base: GlobalBase, z: Array) -> Array:
        d = base.loc.shape[0]
        if self.global_cov == "full":
            white = solve_triangular(base.scale, z - base.loc, lower=True) - params["loc"]
            unit = jnp.tril(params["tril"], -1) + jnp.eye(d)
            eps = solve_triangular(unit, white * jnp.exp(-params["log_scale"]), lower=True, unit_diagonal=True)
            log_det = jnp.sum(params["log_scale"]) + jnp.sum(jnp.log(jnp.diagonal(base.scale)))
            return -0.5 * jnp.sum(eps**2) - log_det - 0.5 * d * LOG_2PI
        white = (z - base.loc) / base.scale
        if self.global_cov == "low_rank":
            low_rank = LowRankMultivariateNormal(params["loc"], params["factor"], jnp.exp(2 * params["log_scale"]))
            return low_rank.log_prob(white) - jnp.sum(jnp.log(base.scale))
        eps = (white - params["loc"]) * jnp.exp(-params["log_scale"])
        return -0.5 * jnp.sum(eps**2) - jnp.sum(params["log_scale"]) - jnp.sum(jnp.log(base.scale)) - 0.5 * d * LOG_2PI

    def mean_global(self, params: dict[str, Array], base: GlobalBase) -> Array:
        return self._in_model(base, params["loc"])

    def covariance(self, params: dict[str, Array], base: GlobalBase) -> Array:
        """Covariance of q(z_G), (d, d)."""
        d = base.loc.shape[0]
        if self.global_cov == "full":
            unit = jnp.tril(params["tril"], -1) + jnp.eye(d)
            factor = base.scale @ (jnp.exp(params["log_scale"])[:, None] * unit)
            return factor @ factor.T
        white = jnp.diag(jnp.exp(2 * params["log_scale"]))
        if self.global_cov == "low_rank":
            white = white + params["factor"] @ params["factor"].T
        return base.scale[:, None] * white * base.scale

    # --- what a method asks for -------------------------------------------------------------------------------------

    def start_global(self, key: Array, split: SplitModel, found: Any = None) -> tuple[dict[str, Any], GlobalBase]:
        """Parameters and base at what a start found; without one, small and random around zero."""
        d = split.dim
        if d > FULL_LIMIT and self.global_cov == "full":
            raise ValueError(
                f"a full covariance over {d} global dimensions takes {4 * d**2 * 4 / 1e9:.1f} GB with its optimiser: "
                'pass guide=nf.guides.StructuredNormal(global_cov="low_rank") or "diagonal"'
            )
        if found is not None:
            return self.init_global(found.loc, found.chol, found.sd)
        params, base = self.init_global(jnp.zeros(d), None, jnp.ones(d))
        params["loc"] = JITTER * normal(key, (d,))
        params["log_scale"] = jnp.full(d, float(np.log(START_SD)))
        return params, base

    def rsample_with_log_prob(self, params: dict[str, Array], base: GlobalBase, eps: Array) -> tuple[Array, Array]:
        r"""A draw and its log density; the gradient sticks the landing (the density's parameters are held fixed).

        In units of the base the draw is :math:`w = \mu + \sigma \odot L \epsilon`, so the density at it is known from
        :math:`\epsilon`, and its gradient is :math:`-\sigma^{-1} \odot L^{-\top} \epsilon`.
        """
        white = self._white(params, eps)
        z, held = self._in_model(base, white), jax.lax.stop_gradient(params)
        if self.global_cov == "low_rank":
            return z, self.log_prob_global(held, base, z)
        pull, scale = eps, base.scale
        if self.global_cov == "full":
            unit = jnp.tril(held["tril"], -1) + jnp.eye(len(eps))
            pull, scale = solve_triangular(unit, eps, trans=1, lower=True, unit_diagonal=True), jnp.diagonal(scale)
        density = -0.5 * jnp.sum(eps**2 + LOG_2PI) - jnp.sum(held["log_scale"]) - jnp.sum(jnp.log(scale))
        moved = white - jax.lax.stop_gradient(white)  # zero, with the draw's gradient
        return z, density - jnp.exp(-held["log_scale"]) * pull @ moved

    def moments(self, params: dict[str, Array], base: GlobalBase) -> tuple[Array, Array | None, Array]:
        """Mean, Cholesky factor of the covariance (None: diagonal) and conditional sds."""
        loc = self.mean_global(params, base)
        if self.global_cov == "diagonal":
            return loc, None, base.scale * jnp.exp(params["log_scale"])
        covariance = np.asarray(self.covariance(params, base), np.float64)
        chol = jnp.asarray(np.linalg.cholesky(covariance), loc.dtype)
        return loc, chol, jnp.asarray(1 / np.sqrt(np.diagonal(np.linalg.inv(covariance))), loc.dtype)


def check_global(global_cov: str, rank: int | None) -> None:
    """Raises when there is no such normal."""
    allowed = ("full", "diagonal", "low_rank")
    if global_cov not in allowed:
        raise ValueError(f"global_cov is {global_cov!r}; use one of {', '.join(map(repr, allowed))}")
    check_count("rank", rank, optional=True)
