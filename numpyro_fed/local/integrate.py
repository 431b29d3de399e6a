r"""A silo's factor, :math:`f_j(z_G) = \int p(y_j, z_{Lj} \mid z_G)\, dz_{Lj}`, and how its integral is taken.

A :class:`Marginal` says how. ``"normal"``: in closed form, where the log density is quadratic in the locals
(:mod:`numpyro_fed.local.closed_form`), as in linear mixed models. ``"quadrature"``: Gauss and Hermite's rule in every
row of one or two dimensions, around the row's mode. ``"importance_weighted"``: K draws per row, weighted (or per silo,
where rows meet); a lower bound in expectation, and with fresh draws at each point what PVI's free energy asks for.
``"joint"``: not at all; a sampler draws the locals with the globals. ``"none"``: there are no locals. One quadrature
node is the profile :math:`\max_{z_L} p(y, z_L | z_G)`, whose curvature is the Schur complement of the joint one.

Solvers see a :class:`Factor`, functions of z_G alone, so the server's prior can be one, too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from numpyro import handlers

from numpyro_fed.data.padding import SiloData
from numpyro_fed.local import minibatch
from numpyro_fed.local.bound import Weighting, combined, row_weights
from numpyro_fed.local.closed_form import MOST_NORMAL, in_closed_form, latent_shapes, normal_nodes, normal_rows
from numpyro_fed.local.conditional import LocalLaplace, draw_rows, fit_local_laplace, standard_local_laplace
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.local.redraw import redraw, replaced
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.observations import num_observations, silo_terms
from numpyro_fed.model.provenance import provenance
from numpyro_fed.model.rows import Components
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.normal.families import LOG_2PI
from numpyro_fed.normal.newton import derivatives
from numpyro_fed.normal.points import gauss_hermite

Array = jax.Array
NODES = {1: 21, 2: 15}  # per dimension of a row
DRAWS = 64
REDRAWN_STEPS = 8  # of Newton's method to the locals' modes, given observations that were just drawn
JOINT_DRAWS = 8  # of the bound that places a joint sampler
MOST_ELEMENTS = 2**21  # of one site's log density that are evaluated at once


class Marginal(NamedTuple):
    """How locals are integrated out. Static: part of the compiled program."""

    kind: str  # "none", "normal", "quadrature", "importance_weighted" or "joint"
    num: int = 1  # nodes per dimension, or draws
    rows: str = "whole"  # how terms find their rows, see bound.Weighting

    def evaluations(self, split: SplitModel) -> int:
        """Of the silo's density, for one of its factor."""
        if self.kind == "normal":
            return 1 + len(normal_nodes(_row_size(split))[0])
        return self.num ** max(_row_size(split), 1) if self.kind == "quadrature" else max(self.num, 1)

    @property
    def weighting(self) -> Weighting:
        return Weighting(self.num, self.rows)


def integrable(split: SplitModel, survey: Survey) -> bool:
    """Whether rows do not meet, and each is integrated without noise: it is normal given the globals, or small."""
    return _apart(split, survey) and (_row_size(split) in NODES or normal_rows(split))


def _apart(split: SplitModel, survey: Survey) -> bool:
    return bool(split.groups) and survey.rows != "whole" and not survey.joined


def choose(
    split: SplitModel, survey: Survey, kind: str | None = None, num: int | None = None, samples_locals: bool = False
) -> Marginal:
    """How a silo's locals are integrated out: as asked for, or as suits the model.

    Args:
        kind, num: as a solver says, or None.
        samples_locals: the solver can sample locals with the globals.
    """
    if not split.groups:
        return Marginal("none")
    apart, size = _apart(split, survey), _row_size(split)
    quadrature, normal = apart and size in NODES, apart and normal_rows(split)
    if kind is None:
        exact = "normal" if normal and num is None else "quadrature" if quadrature else "importance_weighted"
        kind = "joint" if samples_locals else exact
    if kind == "normal" and not normal:
        raise ValueError(
            "marginal='normal' needs rows that do not meet in a term, of up to "
            f"{MOST_NORMAL} local latents in which the log density is quadratic: leave marginal= out"
        )
    if kind == "quadrature" and not quadrature:
        raise ValueError(
            "quadrature needs rows of one or two local latents that do not meet in a term; here "
            + ("rows meet" if survey.rows == "whole" or survey.joined else f"a row has {size}")
            + ": use nf.solvers.HMC(), or marginal='importance_weighted'"
        )
    if kind == "joint" and not samples_locals:
        raise ValueError("marginal='joint' samples the locals with the globals: use nf.solvers.HMC() or NUTS()")
    default = {"normal": 1, "quadrature": NODES.get(size, 1), "importance_weighted": DRAWS, "joint": 1}[kind]
    return Marginal(kind, num or default, rows_of(split, survey))


def rows_of(split: SplitModel, survey: Survey) -> str:
    """How terms find their rows; where all read locals that a silo has once, nothing is looked up."""
    once = len(split.groups) == 1 and not split.groups[0].axes and survey.rows == "indexed"
    return "single" if once and remembered(lambda: _all_read(split), "all read", ByIdentity(split)) else survey.rows


def _all_read(split: SplitModel) -> bool:
    """Whether every term of a silo depends on its locals.

    A sum of millions of others would take digits from what differs between nodes, were it added to each.
    """
    locals_, z = latent_shapes(split)
    terms = lambda globals_, **own: split.evaluate(globals_, own, split.theta, split.dummy()).terms
    found = provenance(terms, {"globals_": z} | locals_)
    return all(sources - {"globals_"} for sources in found.values())


def _row_size(split: SplitModel) -> int:
    return max((group.size for group in split.groups), default=0)


class Nodes(NamedTuple):
    """Standardised places of the locals, and the log weight of each."""

    eps: dict[str, Array]  # {group: (K, rows, k)}
    log_weight: Array  # (K,)


class Factor(NamedTuple):
    """A factor as a solver sees it; ``frame`` is () where there are no locals."""

    refit: Callable  # (z, frame, steps) -> frame, centred at z; has no reverse-mode derivative
    log_f: Callable  # (z, frame, nodes) -> its logarithm at z
    nodes: Callable  # (key or None) -> nodes; with a key, fresh draws where there are draws
    joint: Callable  # (z, frame, eps) -> log p(y, z_L | z) |dz_L / deps| at z_L = frame(z, eps)
    derivatives: Callable  # (z, frame, nodes) -> value, gradient and minus the Hessian of log f at z
    moments: Callable  # (z, frame, nodes) -> frame with the locals' mean and covariance given z, for draws
    eps_shape: dict[str, tuple[int, ...]]  # {group: (rows, k)}
    batch: int  # points of z that may be evaluated at once
    sampled: bool = False  # locals are to be sampled with the globals
    redrawn: Callable | None = None  # (key, z, frame) -> gradient of log f at z, all observations redrawn given z
    num_obs: Callable | None = None  # () -> how many observations the factor holds; None: it holds none
    part: Callable | None = None  # (key, z) -> log f at z from a minibatch, right on average; None: there are none
    by_rows: Callable | None = None  # (z, frame, nodes) -> log f at z by component of local rows; None: no locals

    def batch_of(self, num: int) -> int:
        """The largest power of two in ``batch`` that divides ``num``: a remainder would be compiled, too."""
        size = 1
        while 2 * size <= min(self.batch, num) and num % (2 * size) == 0:
            size *= 2
        return size


def silo_factor(
    split: SplitModel,
    marginal: Marginal,
    data: SiloData,
    components: Components | None,
    theta: dict | None = None,
    batching: Batching | None = None,
    kept: bool = True,
) -> Factor:
    """The factor of one silo; what is traced of it is ``kept`` for whoever asks again."""
    theta = split.theta if theta is None else theta
    once = split.once if kept else lambda function, *options: partial(function, split, *options)
    none = marginal.kind == "none"
    shapes: dict[str, tuple[int, ...]] = {g.name: (g.num_rows(data.mask), g.size) for g in split.groups}
    dtype = jnp.zeros(()).dtype

    def refit(z: Array, frame: LocalLaplace, steps: Any) -> Any:
        return () if none else once(fit_local_laplace)(z, theta, frame.loc, data, jnp.asarray(steps, jnp.int32))

    def nodes(key: Array | None) -> Any:
        if none:
            return ()
        if marginal.kind == "joint":  # antithetic, the same in every round: a bound for Newton's method
            half = draw_rows(jax.random.key(0), split, data.mask, JOINT_DRAWS // 2)
            eps = jax.tree.map(lambda draws: jnp.concatenate([draws, -draws]), half)
            return Nodes(eps, jnp.full(JOINT_DRAWS, -np.log(JOINT_DRAWS), dtype))
        if marginal.kind == "importance_weighted":
            eps = draw_rows(jax.random.key(0) if key is None else key, split, data.mask, marginal.num)
            return Nodes(eps, jnp.full(marginal.num, -np.log(marginal.num), dtype))
        dims = max(k for _, k in shapes.values())
        normal = marginal.kind == "normal"
        grid, log_weight = normal_nodes(dims) if normal else gauss_hermite(marginal.num, dims)
        eps = {
            name: jnp.broadcast_to(jnp.asarray(grid[:, None, :k], dtype), (len(grid), rows, k))
            for name, (rows, k) in shapes.items()
        }
        return Nodes(eps, jnp.asarray(log_weight, dtype))

    def log_f(z: Array, frame: LocalLaplace, nodes: Nodes) -> Array:
        if none:
            return split.log_silo(z, {}, theta, data)
        if marginal.kind == "joint":
            return jnp.mean(jax.vmap(lambda eps: joint(z, frame, eps))(nodes.eps))
        return jnp.sum(by_rows(z, frame, nodes))

    def by_rows(z: Array, frame: LocalLaplace, nodes: Nodes) -> Array:
        log_terms = once(_log_terms, marginal)(z, frame, nodes, theta, data, components)
        if marginal.kind != "normal":
            return logsumexp(log_terms, axis=0)
        known = in_closed_form(log_terms)
        mode = {g: mean[:, 0] for g, mean in of_rows(known.mean()[:, None]).items()}
        return known.log_integral(once(_log_joint, marginal)(z, frame, mode, theta, data, components))

    def of_rows(values: Array) -> dict[str, Array]:
        """What is known of components, (components, a, b): of the rows of each group, (rows, a, its k)."""
        flat, out = values.reshape(len(values), -1).T, {}
        for g, (_, k) in shapes.items():
            own = row_weights(split, marginal.weighting, flat, g, data, components)
            out[g] = own.T.reshape(-1, *values.shape[1:])[..., :k]
        return out

    def derivatives_at(z: Array, frame: LocalLaplace, nodes: Nodes) -> tuple[Array, Array, Array]:
        if marginal.kind == "joint":
            return derivatives(lambda z: log_f(z, frame, nodes), z)
        return once(_derivatives, marginal)(z, frame, nodes, theta, data, components)

    def joint(z: Array, frame: LocalLaplace, eps: dict) -> Array:
        log_det = frame.log_det()
        active = split.evaluate(z, frame.loc, theta, data).active
        padding = sum(jnp.sum(jnp.where(active[g], 0.0, -0.5 * eps[g] ** 2 - 0.5 * LOG_2PI)) for g in eps)
        total = split.log_silo(z, frame.at(z, eps), theta, data) + padding
        return total + sum(jnp.sum(log_det[g]) for g in eps)

    def moments(z: Array, frame: LocalLaplace, nodes: Nodes) -> Any:
        if none:
            return ()
        log_terms = once(_log_terms, marginal)(z, frame, nodes, theta, data, components)
        mean, cov = {}, {}
        if marginal.kind == "normal":
            known = in_closed_form(log_terms)
            both = of_rows(jnp.concatenate([known.mean()[:, None], known.covariance()], axis=1))
            mean = {g: value[:, 0] for g, value in both.items()}
            return frame.with_moments(mean, {g: value[:, 1 : value.shape[-1] + 1] for g, value in both.items()})
        weight = jax.nn.softmax(log_terms, axis=0)
        for g, eps in nodes.eps.items():
            own = row_weights(split, marginal.weighting, weight, g, data, components)  # (K, rows)
            mean[g] = jnp.einsum("kr,krj->rj", own, eps)
            cov[g] = jnp.einsum("kr,kri,krj->rij", own, eps, eps) - mean[g][:, :, None] * mean[g][:, None, :]
        return frame.with_moments(mean, cov)

    def redrawn(key: Array, z: Array, frame: Any) -> Array:
        values: dict[str, Any] = dict.fromkeys(site.name for site in silo_terms(split, "factor"))
        values |= redraw(split, z, theta, data, key)
        model = handlers.condition(split.model, condition_fn=partial(replaced, values))
        other = silo_factor(split._replace(model=model), marginal, data, components, theta, kept=False)
        own = other.refit(z, frame, REDRAWN_STEPS)
        return jax.grad(lambda z: other.log_f(z, own, other.nodes(None)))(z)

    elements = max(
        (int(np.prod(leaf.shape)) for leaf in jax.tree.leaves((data.args, data.mask)) if np.ndim(leaf)), default=1
    )
    each = marginal.evaluations(split) if marginal.kind != "joint" else 1
    batch = int(np.clip(MOST_ELEMENTS // max(elements * each, 1), 1, 1024))
    count = partial(num_observations, split, data)
    part = None if batching is None else partial(_estimate, split, theta, data, batching)
    known = marginal.kind in ("normal", "quadrature", "importance_weighted")
    return Factor(
        *(refit, log_f, nodes, joint, derivatives_at, moments, shapes, batch, marginal.kind == "joint", redrawn, count),
        *(part, by_rows if known else None),
    )


def _log_terms(
    split: SplitModel,
    marginal: Marginal,
    z: Array,
    frame: LocalLaplace,
    nodes: Nodes,
    theta: dict,
    data: SiloData,
    components: Components | None,
) -> Array:
    """log w_k p(y, z_Lk | z) / N(z_Lk; frame) at every node k, by component, (K, components)."""

    def at(eps: dict) -> Array:
        found = split.evaluate(z, frame.at(z, eps), theta, data)
        log_q = frame.log_prob(eps, found.active)
        return combined(split, marginal.weighting, found.terms, log_q, data, components, None, None)

    return jax.vmap(at)(nodes.eps) + nodes.log_weight[:, None]


def _log_joint(
    split: SplitModel,
    marginal: Marginal,
    z: Array,
    frame: LocalLaplace,
    eps: dict[str, Array],
    theta: dict,
    data: SiloData,
    components: Components | None,
) -> Array:
    """log p(y, z_L | z) |dz_L / deps| (2 pi)^(k / 2) at z_L = frame(z, eps), by component."""
    found = split.evaluate(z, frame.at(z, eps), theta, data)
    log_q = frame.log_prob(jax.tree.map(jnp.zeros_like, eps), found.active)
    return combined(split, marginal.weighting, found.terms, log_q, data, components, None, None)


def _derivatives(
    split: SplitModel,
    marginal: Marginal,
    z: Array,
    frame: LocalLaplace,
    nodes: Nodes,
    theta: dict,
    data: SiloData,
    components: Components | None,
) -> tuple[Array, Array, Array]:
    """Value, gradient and minus the Hessian of log f at z."""
    factor = silo_factor(split, marginal, data, components, theta)
    return derivatives(lambda z: factor.log_f(z, frame, nodes), z)


def _estimate(split: SplitModel, theta: dict, data: SiloData, batching: Batching, key: Array, z: Array) -> Array:
    return minibatch.log_silo(split, z, theta, minibatch.with_replacement(split, batching, key, data))


def start_frame(split: SplitModel, data: SiloData) -> Any:
    return standard_local_laplace(split, data) if split.groups else ()


def plain_factor(log_f: Callable) -> Factor:
    """A factor without locals: the server's prior."""
    nothing, known = lambda *_: (), lambda z, frame, nodes: derivatives(log_f, z)
    return Factor(nothing, lambda z, frame, nodes: log_f(z), nothing, nothing, known, nothing, {}, 1024)
