r"""Structured normal guides.

.. math::

    z_G    &= \mu_G + A_0 \, [\sigma_G \odot (L_G \epsilon_G)] \\
    z_{Lj} &= \bar\mu_j + C_j (z_G - \mu_G) + \sigma_j \odot (L_j \epsilon_j)

with unit lower triangular :math:`L` (Tan, Bhaskaran and Nott 2020; section 3.4 of the SFVI paper). The coupling
:math:`C_j` lets local latents move with the global ones, which is what makes the marginals of :math:`z_G` right.

Coordinates are whitened: parameters are measured in units of a *base*, a location and scale found by the start
(:mod:`numpyro_fed.start`), so that one step size suits a coefficient of size 1e-3 and an intercept of 242. The base is
not learned and does not change the family.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from numpyro.distributions import LowRankMultivariateNormal

from numpyro_fed.split_model import Group, SplitModel
from numpyro_fed.tracing import digest

Array = Any
LOG_2PI = float(np.log(2 * np.pi))
SCALE_RANGE = 2.0  # a draw far out must not make scales overflow: log-scales move linearly, up to about this much


class GlobalBase(NamedTuple):
    loc: Array  # (d,)
    scale: Array  # lower triangular (d, d) for a full covariance, else (d,)


class LocalBase(NamedTuple):
    loc: dict[str, Array]  # {group: (rows, k)}
    scale: dict[str, Array]  # {group: (rows, k)}
    unit: Array  # (d,): the globals' scale, in which the coupling is measured
    valid: dict[str, Array]  # {group: bool (rows,)}: rows that are not padding


@dataclass(frozen=True)
class StructuredNormal:
    """A normal over the globals, and over each silo's locals given the globals.

    Args:
        global_cov: ``"full"``, ``"diagonal"`` or ``"low_rank"`` (diagonal plus ``rank`` factors).
        local_cov: ``"block"`` (rows independent given z_G, each with its own covariance), ``"diagonal"``, or ``"full"``
            over all locals of a silo.
        coupling: local means move linearly with z_G.
        scale_coupling: local log-scales move with z_G too, linearly up to a factor of about exp(2).
        rank: of the low-rank part; by default the square root of the dimension.
    """

    global_cov: str = "full"
    local_cov: str = "block"
    coupling: bool = True
    scale_coupling: bool = False
    rank: int | None = None

    def __post_init__(self) -> None:
        for field, allowed in (
            ("global_cov", ("full", "diagonal", "low_rank")),
            ("local_cov", ("block", "diagonal", "full")),
        ):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} is {getattr(self, field)!r}; use one of {', '.join(map(repr, allowed))}")
        if self.rank is not None and (not isinstance(self.rank, int) or self.rank < 1):
            raise ValueError(f"rank must be an int of at least 1, got {self.rank!r}")

    # --- over the globals -------------------------------------------------------------------------------------------

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

    def draw_global(self, key: Array, d: int) -> Array:
        return jax.random.normal(key, (d + (self._rank(d) if self.global_cov == "low_rank" else 0),))

    def sample_global(self, params: dict[str, Array], base: GlobalBase, eps: Array) -> Array:
        d = base.loc.shape[0]
        if self.global_cov == "full":
            scaled = jnp.exp(params["log_scale"]) * (eps + jnp.tril(params["tril"], -1) @ eps)
            return base.loc + base.scale @ (params["loc"] + scaled)
        scaled = jnp.exp(params["log_scale"]) * eps[:d]
        if self.global_cov == "low_rank":
            scaled = scaled + params["factor"] @ eps[d:]
        return base.loc + base.scale * (params["loc"] + scaled)

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
            normal = LowRankMultivariateNormal(params["loc"], params["factor"], jnp.exp(2 * params["log_scale"]))
            return normal.log_prob(white) - jnp.sum(jnp.log(base.scale))
        eps = (white - params["loc"]) * jnp.exp(-params["log_scale"])
        return -0.5 * jnp.sum(eps**2) - jnp.sum(params["log_scale"]) - jnp.sum(jnp.log(base.scale)) - 0.5 * d * LOG_2PI

    def mean_global(self, params: dict[str, Array], base: GlobalBase) -> Array:
        return base.loc + (base.scale @ params["loc"] if self.global_cov == "full" else base.scale * params["loc"])

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

    # --- over a silo's locals, given the globals --------------------------------------------------------------------

    def init_local(
        self, groups: tuple[Group, ...], loc: dict, scale: dict, coupling: dict, unit: Array, valid: dict
    ) -> tuple[dict, LocalBase]:
        """Parameters and base of a start: each group's mean and scale (rows, k) and coupling (rows, k, d)."""
        params: dict[str, Any] = {}
        d = unit.shape[0]
        for group in groups:
            rows, k = loc[group.name].shape
            own = {"loc": jnp.zeros((rows, k)), "log_scale": jnp.zeros((rows, k))}
            if self.local_cov == "block" and k > 1:
                own["tril"] = jnp.zeros((rows, k * (k - 1) // 2))
            if self.coupling and d:
                own["coupling"] = coupling[group.name] * unit / scale[group.name][..., None]
            if self.scale_coupling and d:
                own["scale_coupling"] = jnp.zeros((rows, k, d))
            params[group.name] = own
        if self.local_cov == "full" and groups:
            size = sum(leaf.size for leaf in loc.values())
            params["tril"] = jnp.zeros((size, size))
        return params, LocalBase(loc, scale, unit, valid)

    def draw_local(self, key: Array, split: SplitModel, mask: dict[str, Array], num: int) -> dict[str, Array]:
        """Standard normals, {group: (num, rows, k)}. A row's numbers depend on its place, not on the padding."""
        out = {}
        for group in split.groups:
            own = key if len(split.groups) == 1 else jax.random.fold_in(key, digest(group.name))
            shape = group.row_shape(mask)
            if len(shape) > 1:
                keys = jax.vmap(lambda i, own=own: jax.random.fold_in(own, i))(jnp.arange(shape[0]))
                tail = (int(np.prod(shape[1:])), num, group.size)
                eps = jax.vmap(lambda one, tail=tail: jax.random.normal(one, tail))(keys).reshape(-1, num, group.size)
            else:
                eps = jax.random.normal(own, (group.num_rows(mask), num, group.size))
            out[group.name] = jnp.moveaxis(eps, 1, 0)
        return out

    def location(self, params: dict, base: LocalBase, z: Array, mean: Array) -> dict:
        """Mean of z_L given z_G = z, {group: (rows, k)}."""
        shift = (z - mean) / base.unit
        out = {}
        for group in base.loc:
            own = params[group]
            loc = own["loc"] + _coupled(own["coupling"], shift) if "coupling" in own else own["loc"]
            out[group] = base.loc[group] + base.scale[group] * loc
        return out

    def _log_scale(self, own: dict, base: LocalBase, z: Array, mean: Array) -> Array:
        if "scale_coupling" not in own:
            return own["log_scale"]
        moved = _coupled(own["scale_coupling"], (z - mean) / base.unit)
        return own["log_scale"] + SCALE_RANGE * jnp.tanh(moved / SCALE_RANGE)

    def spread(self, params: dict, base: LocalBase, z: Array, mean: Array, eps: dict) -> dict:
        """z_L minus its mean given z_G = z, from one set of standard normals."""
        if self.local_cov == "full":
            eps = _mixed(params["tril"], eps, base.valid)
        out = {}
        for group, white in eps.items():
            own = params[group]
            if "tril" in own:
                white = white + jnp.einsum("rij,rj->ri", _unpacked(own["tril"], white.shape[-1]), white)
            out[group] = base.scale[group] * jnp.exp(self._log_scale(own, base, z, mean)) * white
        return out

    def log_prob_spread(self, params: dict, base: LocalBase, z: Array, mean: Array, spread: dict, active: dict) -> dict:
        """log q(z_L | z_G) from z_L minus its mean, {group: (rows,)}; inactive elements (padding) are left out."""
        white, logs = {}, {}
        for group, value in spread.items():
            own = params[group]
            log_scale = self._log_scale(own, base, z, mean)
            white[group] = value / base.scale[group] * jnp.exp(-log_scale)
            logs[group] = log_scale + jnp.log(base.scale[group])
            if "tril" in own:
                k = value.shape[-1]
                unit = _unpacked(own["tril"], k) + jnp.eye(k)
                white[group] = solve_triangular(unit, white[group][..., None], lower=True, unit_diagonal=True)[..., 0]
        if self.local_cov == "full":
            white = _unmixed(params["tril"], white, base.valid)
        density = lambda group: -0.5 * white[group] ** 2 - logs[group] - 0.5 * LOG_2PI
        return {group: jnp.sum(jnp.where(active[group], density(group), 0.0), axis=-1) for group in spread}

    def sample_local(self, params: dict, base: LocalBase, z: Array, mean: Array, eps: dict) -> dict:
        """z_L given z_G = z, from one set of standard normals."""
        return jax.tree.map(jnp.add, self.location(params, base, z, mean), self.spread(params, base, z, mean, eps))

    def log_prob_local(self, params: dict, base: LocalBase, z: Array, mean: Array, z_local: dict, active: dict) -> dict:
        """log q(z_L | z_G), {group: (rows,)}."""
        spread = jax.tree.map(jnp.subtract, z_local, self.location(params, base, z, mean))
        return self.log_prob_spread(params, base, z, mean, spread, active)


def _coupled(coupling: Array, shift: Array) -> Array:
    """(rows, k, d) times (d,). For few globals a sum of columns: a batch of small matrix products is slower."""
    if shift.shape[0] > 8:
        return coupling @ shift
    return sum((coupling[..., a] * shift[a] for a in range(shift.shape[0])), jnp.zeros(coupling.shape[:-1]))


def _unpacked(packed: Array, k: int) -> Array:
    """Strictly lower triangular matrices from their entries: (rows, k (k - 1) / 2) -> (rows, k, k)."""
    i, j = np.tril_indices(k, -1)
    return jnp.zeros((*packed.shape[:-1], k, k), packed.dtype).at[..., i, j].set(packed)


def _lower(tril: Array, like: dict, valid: dict) -> Array:
    """The strictly lower triangular mixing matrix; padded rows neither mix nor are mixed."""
    real = _flat({group: jnp.broadcast_to(valid[group][:, None], like[group].shape) for group in like})
    return jnp.where(real[:, None] & real[None, :], jnp.tril(tril, -1), 0.0)


def _mixed(tril: Array, eps: dict, valid: dict) -> dict:
    flat = _flat(eps)
    return _regrouped(flat + _lower(tril, eps, valid) @ flat, eps)


def _unmixed(tril: Array, white: dict, valid: dict) -> dict:
    flat = _flat(white)
    unit = _lower(tril, white, valid) + jnp.eye(flat.shape[0])
    return _regrouped(solve_triangular(unit, flat, lower=True, unit_diagonal=True), white)


def _flat(values: dict) -> Array:
    return jnp.concatenate([values[group].reshape(-1) for group in sorted(values)])


def _regrouped(flat: Array, like: dict) -> dict:
    out, start = {}, 0
    for group in sorted(like):
        out[group] = flat[start : start + like[group].size].reshape(like[group].shape)
        start += like[group].size
    return out
