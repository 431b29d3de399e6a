r"""q(z_L | z_G): a silo's locals, normal given the globals, with a mean that is linear in them.

At :math:`z_G = c` each local row has a mode, a curvature and a slope; so near c the row is about

.. math:: z_L = \mu + C (z_G - c) + R \epsilon, \qquad C = \partial \mu / \partial z_G, \quad R R^\top = H^{-1}

This one object, :class:`LocalLaplace`, centres quadrature, proposes to importance sampling, whitens a sampler and
starts a guide. Newton's method finds it, row by row, from wherever it was before. At one z_G it is a
:class:`Conditional` (:meth:`LocalLaplace.given`): what guides make of their parameters, and all that bounds know of
them. There R is :math:`\sigma (I + T)`, with T strictly lower triangular.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular
from numpyro.distributions.util import matrix_to_tril_vec, vec_to_tril_matrix

from numpyro_fed.data.padding import SiloData
from numpyro_fed.keys import digest, normal
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.families import LOG_2PI
from numpyro_fed.normal.matrices import diagonal
from numpyro_fed.normal.newton import Spectrum, positive_spectrum
from numpyro_fed.precision import alongside

Array = jax.Array
FLAT = 1e-4  # the least curvature of a row, in units of its prior
LEAST_DAMPING = 1e-3  # of a row's steps; below it they are Newton's own


class Conditional(NamedTuple):
    """q(z_L | z_G) at one z_G: a normal, row by row unless ``mixing`` joins the rows."""

    loc: dict[str, Array]  # {group: (rows, k)}
    log_scale: dict[str, Array]  # {group: (rows, k)}
    tril: dict[str, Array]  # {group: (rows, k (k - 1) / 2)}: strictly lower triangular, where rows have k > 1
    mixing: Array | None = None  # strictly lower triangular over all locals of a silo


class LocalLaplace(NamedTuple):
    """The locals around ``centre``; padded rows, and elements that a mask leaves out, have a root of one."""

    centre: Array  # (d,)
    loc: dict[str, Array]  # {group: (rows, k)}
    coupling: dict[str, Array]  # {group: (rows, k, d)}; {}: locals stay where they are, whatever z is
    root: dict[str, Array]  # {group: (rows, k, k)}: lower triangular
    curvature: dict[str, Array]  # {group: (rows, k)}: of each element, the others held

    @classmethod
    def from_sds(cls, centre: Array, loc: dict, sds: dict, coupling: dict) -> "LocalLaplace":
        """With independent elements, {group: (rows, k)}."""
        root = {g: sd[..., None] * jnp.eye(sd.shape[-1]) for g, sd in sds.items()}
        return cls(centre, loc, coupling, root, {g: sd**-2 for g, sd in sds.items()})

    def mean(self, z: Array) -> dict[str, Array]:
        """The locals' centre at another z."""
        if not self.coupling:
            return self.loc
        return {g: self.loc[g] + self.coupling[g] @ (z - self.centre) for g in self.loc}

    def at(self, z: Array, eps: dict[str, Array]) -> dict[str, Array]:
        """Locals from standard normals {group: (rows, k)}."""
        mean = self.mean(z)
        return {g: mean[g] + jnp.einsum("rij,rj->ri", self.root[g], eps[g]) for g in mean}

    def given(self, z: Array) -> Conditional:
        """The same normal at one z."""
        scale = self._diagonal()
        unit = {g: root / scale[g][:, :, None] for g, root in self.root.items() if root.shape[-1] > 1}
        tril = {g: matrix_to_tril_vec(matrix, -1) for g, matrix in unit.items()}
        return Conditional(self.mean(z), jax.tree.map(jnp.log, scale), tril)

    def log_prob(self, eps: dict[str, Array], active: dict[str, Array]) -> dict[str, Array]:
        """log q(z_L | z) at ``self.at(z, eps)``, {group: (rows,)}, whatever z is; inactive elements are left out."""
        return _log_prob_white(eps, jax.tree.map(jnp.log, self._diagonal()), active)

    def log_det(self) -> dict[str, Array]:
        """Log determinant of each row's root, {group: (rows,)}."""
        return {g: jnp.sum(jnp.log(scale), axis=1) for g, scale in self._diagonal().items()}

    def sds(self) -> dict[str, Array]:
        """Of each element given the globals, {group: (rows, k)}."""
        return {g: jnp.sqrt(jnp.sum(root**2, axis=-1)) for g, root in self.root.items()}

    def conditional_sds(self) -> dict[str, Array]:
        """The same, the row's other elements held: what a guide with independent elements would learn."""
        return jax.tree.map(jax.lax.rsqrt, self.curvature)

    def with_moments(self, mean: dict[str, Array], cov: dict[str, Array]) -> "LocalLaplace":
        """With the mean and covariance that its standard normals eps turned out to have."""
        loc, root = {}, {}
        for g in self.loc:
            loc[g] = self.loc[g] + jnp.einsum("rij,rj->ri", self.root[g], mean[g])
            safe = cov[g] + 1e-4 * jnp.eye(cov[g].shape[-1])
            root[g] = self.root[g] @ jnp.linalg.cholesky(safe / (1 + 1e-4))
        return self._replace(loc=loc, root=root)

    def _diagonal(self) -> dict[str, Array]:
        return {g: diagonal(root) for g, root in self.root.items()}


def standard_local_laplace(split: SplitModel, data: SiloData) -> LocalLaplace:
    """Standard normals: where nothing is known yet."""
    zeros = split.zeros_local(data.mask)
    return LocalLaplace(
        jnp.zeros(split.dim),
        split.near_zero_local(data.mask),
        {g: jnp.zeros((*value.shape, split.dim)) for g, value in zeros.items()},
        {g: jnp.broadcast_to(jnp.eye(value.shape[1]), (*value.shape, value.shape[1])) for g, value in zeros.items()},
        jax.tree.map(jnp.ones_like, zeros),
    )


class _Rows(NamedTuple):
    """Newton's search in all rows at once: where they are, what is known there, and how much their steps are damped."""

    loc: dict[str, Array]  # {group: (rows, k)}
    step: dict[str, Array]  # to where they look next, {group: (rows, k)}
    slope: dict[str, Array]  # of the log density, {group: (rows, k)}
    spectrum: dict[str, Spectrum]  # of each row's negative Hessian
    damping: dict[str, Array]  # {group: (rows,)}, in units of the row's largest curvature


def fit_local_laplace(split: SplitModel, z: Array, theta: dict, loc: dict, data: SiloData, steps: Any) -> LocalLaplace:
    r"""Newton's method on the locals of a silo, given the globals, row by row, from ``loc``.

    A row's curvature is found by moving all rows of a group at once: exact when rows are independent given z_G. A row
    accepts its own step s, from slope g to slope g', where the density rose along it by the trapezium's rule,

    .. math:: \tfrac12 (g + g')^\top s \ge 0

    and else stays and takes a shorter one, so that one row that goes too far holds up no other. Where rows meet, slopes
    tell of that too: a step that all of them together took too far is refused by those that gave it. (Not the search of
    :mod:`numpyro_fed.normal.newton`, which needs the Hessian of everything it moves: here are many rows, each with a
    small one, and a fixed number of steps keeps all silos in step.)
    """
    # padded rows, and elements that a mask leaves out, stay where they are with a scale of one
    active = split.evaluate(z, loc, theta, data).active

    def density(z_local: dict, z: Array = z) -> Array:
        return split.log_silo(z, z_local, theta, data)

    gradient = jax.grad(density)

    def look(z_local: dict) -> tuple[dict, dict]:
        """The slope there, and the spectrum of each row's negative Hessian."""
        slope, push = jax.linearize(gradient, z_local)
        spectra = {}
        for group in split.groups:

            def column(unit: Any, group: Any = group) -> Array:
                """Of every row's Hessian: along an element of the group, of all rows at once."""
                tangent = {g: jnp.zeros_like(value) for g, value in z_local.items()}
                tangent[group.name] = jnp.broadcast_to(unit, tangent[group.name].shape).astype(slope[group.name].dtype)
                return -push(tangent)[group.name]

            if group.size == 1:
                hessian = column(1.0)[:, :, None]
            else:
                hessian = jnp.moveaxis(jax.vmap(column)(np.eye(group.size)), 0, -1)
            hessian = 0.5 * (hessian + jnp.swapaxes(hessian, -1, -2))
            real = active[group.name]
            hessian = jnp.where(real[:, :, None] & real[:, None, :], hessian, jnp.eye(group.size))
            spectra[group.name] = positive_spectrum(hessian, FLAT)
        return {g: jnp.where(active[g], slope[g], 0.0) for g in slope}, spectra

    def improve(i: Any, now: _Rows) -> _Rows:
        trial = jax.tree.map(jnp.add, now.loc, now.step)
        slope, spectrum = look(trial)
        better = {g: _rose(now.slope[g], slope[g], now.step[g], spectrum[g]) for g in trial}

        def keep(new: dict, old: dict) -> dict:
            chosen = lambda g, a, b: jnp.where(better[g].reshape(-1, *[1] * (a.ndim - 1)), a, b)
            return {g: jax.tree.map(partial(chosen, g), new[g], old[g]) for g in new}

        slope, spectrum = keep(slope, now.slope), keep(spectrum, now.spectrum)
        damping = {g: jnp.where(better[g], 0.1 * now.damping[g], 10 * now.damping[g] + 0.1) for g in trial}
        step = {g: _damped(spectrum[g], damping[g]).solve(slope[g]) for g in trial}
        return _Rows(keep(trial, now.loc), step, slope, spectrum, damping)

    # the first look is at ``loc`` itself, a step of nothing; a row of which nothing finite is ever known is NaN
    nowhere = jax.tree.map(jnp.zeros_like, loc)
    unknown = {
        g: Spectrum(jnp.full_like(v, jnp.nan), jnp.full((*v.shape, v.shape[1]), jnp.nan, v.dtype))
        for g, v in loc.items()
    }
    at_rest = {g: jnp.zeros(v.shape[0], v.dtype) for g, v in loc.items()}
    first = alongside(_Rows(loc, nowhere, nowhere, unknown, at_rest), next(iter(data.mask.values()), z))
    found = jax.lax.fori_loop(0, steps + 1, improve, first)
    loc, spectrum = found.loc, found.spectrum
    cross = jax.vmap(lambda e: jax.jvp(lambda z: jax.grad(density)(loc, z), (z,), (e,))[1])(jnp.eye(split.dim))
    coupling, root, curvature = {}, {}, {}
    for group in split.groups:
        values, vectors = spectrum[group.name]
        solved = jax.vmap(spectrum[group.name].solve)(cross[group.name])
        coupling[group.name] = jnp.moveaxis(jnp.where(active[group.name], solved, 0.0), 0, -1)
        curvature[group.name] = jnp.einsum("rij,rj,rij->ri", vectors, values, vectors)
        if group.size == 1:
            root[group.name] = jax.lax.rsqrt(values)[..., None]
        else:
            root[group.name] = jnp.linalg.cholesky(jnp.einsum("rij,rj,rkj->rik", vectors, 1 / values, vectors))
    return LocalLaplace(z, loc, coupling, root, curvature)


def _damped(spectrum: Spectrum, damping: Array) -> Spectrum:
    values = spectrum.values
    least = (LEAST_DAMPING < damping)[:, None] * damping[:, None] * jnp.max(values, axis=-1, keepdims=True)
    return spectrum._replace(values=values + least)


def _rose(slope: Array, new: Array, step: Array, spectrum: Spectrum) -> Array:
    """Whether each row's density rose along its step, or fell by no more than rounding."""
    gain = jnp.sum(step * slope, axis=-1)
    rise = 0.5 * (gain + jnp.sum(step * new, axis=-1))
    fine = jnp.all(jnp.isfinite(new), axis=-1) & jnp.all(jnp.isfinite(spectrum.values), axis=-1)
    return fine & (rise >= -1e-3 * gain - 1e-6)


def draw_rows(key: Array, split: SplitModel, mask: dict[str, Array], num: int) -> dict[str, Array]:
    """Standard normals, {group: (num, rows, k)}. A row's numbers depend on its place, not on the padding."""
    out = {}
    for group in split.groups:
        own = key if len(split.groups) == 1 else jax.random.fold_in(key, digest(group.name))
        shape = group.row_shape(mask)
        if len(shape) > 1:
            keys = jax.vmap(lambda i, own=own: jax.random.fold_in(own, i))(jnp.arange(shape[0]))
            tail = (int(np.prod(shape[1:])), num, group.size)
            eps = jax.vmap(lambda one, tail=tail: normal(one, tail))(keys).reshape(-1, num, group.size)
        else:
            eps = normal(own, (group.num_rows(mask), num, group.size))
        out[group.name] = jnp.moveaxis(eps, 1, 0)
    return out


def spread(given: Conditional, eps: dict) -> dict:
    """z_L minus its mean, from one set of standard normals."""
    if given.mixing is not None:
        flat = flattened(eps)
        eps = _regrouped(flat + given.mixing @ flat, eps)
    out = {}
    for group, white in eps.items():
        if group in given.tril:
            white = white + jnp.einsum("rij,rj->ri", vec_to_tril_matrix(given.tril[group], -1), white)
        out[group] = jnp.exp(given.log_scale[group]) * white
    return out


def log_prob_spread(given: Conditional, spread: dict, active: dict) -> dict:
    """log q(z_L | z_G) from z_L minus its mean, {group: (rows,)}; inactive elements (padding) are left out."""
    white = {}
    for group, value in spread.items():
        white[group] = value * jnp.exp(-given.log_scale[group])
        if group in given.tril:
            unit = vec_to_tril_matrix(given.tril[group], -1) + jnp.eye(value.shape[-1])
            white[group] = solve_triangular(unit, white[group][..., None], lower=True, unit_diagonal=True)[..., 0]
    if given.mixing is not None:
        flat = flattened(white)
        unit = given.mixing + jnp.eye(flat.shape[0])
        white = _regrouped(solve_triangular(unit, flat, lower=True, unit_diagonal=True), white)
    return _log_prob_white(white, given.log_scale, active)


def _log_prob_white(white: dict, log_scale: dict, active: dict) -> dict:
    """The log density of a normal at its standardised value, by row: the scales' logarithms are all of the root's."""
    density = lambda group: -0.5 * white[group] ** 2 - log_scale[group] - 0.5 * LOG_2PI
    return {group: jnp.sum(jnp.where(active[group], density(group), 0.0), axis=-1) for group in white}


def sample(given: Conditional, eps: dict) -> dict:
    """z_L from one set of standard normals."""
    return jax.tree.map(jnp.add, given.loc, spread(given, eps))


def flattened(values: dict) -> Array:
    return jnp.concatenate([values[group].reshape(-1) for group in sorted(values)])


def _regrouped(flat: Array, like: dict) -> dict:
    out, start = {}, 0
    for group in sorted(like):
        out[group] = flat[start : start + like[group].size].reshape(like[group].shape)
        start += like[group].size
    return out
