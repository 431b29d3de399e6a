r"""A silo's evidence bound and its gradients.

With K draws of the locals per row :math:`i` of the silo plate (Geffner and Domke 2022, the locally enhanced bound):

.. math::

    \mathcal{L}_j(z_G) = \sum_i \log \frac1K \sum_{k=1}^K w_{ik}, \qquad
    w_{ik} = \frac{p(z_{ik}, y_i \mid z_G, \theta)}{q(z_{ik} \mid z_G)}

K = 1 is the plain bound. Gradients with respect to the guide's parameters are doubly reparametrised (Tucker et al.
2019): the draws' path counts with the squared normalised weights and the parameters inside :math:`\log q` are held
fixed; at K = 1 this is sticking the landing (Roeder et al. 2017). Gradients with respect to :math:`z_G` and
:math:`\theta` are the bound's own. (Holding the parameters fixed without squaring the weights is wrong for K > 1.)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Bool, Float

from numpyro_fed.data.padding import SiloData
from numpyro_fed.local import conditional
from numpyro_fed.model.rows import Components, add_aligned, add_indexed, num_components
from numpyro_fed.model.split_model import SplitModel

Array = jax.Array


class Weighting(NamedTuple):
    """How many draws per row, and how terms find their row. Static: part of the compiled program."""

    num: int = 1  # K
    rows: str = "whole"  # "whole" silo, "aligned" with the rows, "indexed" by Components, or "single": there is one row


class Batch(NamedTuple):
    """How much the rows of a minibatch count (see :mod:`numpyro_fed.local.minibatch`)."""

    axis: str
    factor: Float[Array, ""]  # rows of the silo for each row of the batch
    chosen: Bool[Array, " components"] | None = None  # in long format the others are there, and do not count


class BoundGradients(NamedTuple):
    """A silo's bound at one draw of the globals, and its gradients."""

    value: Float[Array, ""]
    params: Any  # of the silo's guide; stays in the silo
    z: Float[Array, " d"]
    context: Any  # with respect to what the silo was sent of the guide over the globals
    theta: dict[str, Array]


def silo_bound(
    split: SplitModel,
    guide: Any,
    weighting: Weighting,
    key: Array,
    params: Any,
    base: Any,
    z: Array,
    context: Any,
    theta: dict[str, Array],
    data: SiloData,
    components: Components | None = None,
    batch: Batch | None = None,
    power: Array | None = None,
) -> BoundGradients:
    """One draw of the bound of a silo at z_G = z, with its gradients.

    ``power`` tempers the silo's density alone, log w = power log p - log q (as the SFVI-Avg paper has it).
    """
    if not split.groups:

        def value_at(z: Array, theta: dict) -> Array:
            terms = split.evaluate(z, {}, theta, data).terms
            total = sum((jnp.sum(term) for term in _scaled(split, terms, batch).values()), jnp.zeros(()))
            return total if power is None else power * total

        value, (g_z, g_theta) = jax.value_and_grad(value_at, argnums=(0, 1))(z, theta)
        return BoundGradients(value, params, g_z, jax.tree.map(jnp.zeros_like, context), g_theta)
    combine = lambda found, log_q: combined(split, weighting, found.terms, log_q, data, components, batch, power)
    counts = _counts(split, weighting, data, batch)
    if guide.arbitrary:
        return _plain(split, guide, weighting, key, params, base, z, context, theta, data, combine, counts)
    eps = conditional.draw_rows(key, split, data.mask, weighting.num)
    many = weighting.num > 1
    each = jax.vmap if many else lambda function: function  # an axis of one draw would keep sums from being shared
    eps = eps if many else jax.tree.map(lambda leaf: leaf[0], eps)
    held, held_context = jax.lax.stop_gradient((params, context))

    def log_weights(z_local: dict, off_mean: dict, given: conditional.Conditional, z: Array, theta: dict) -> Array:
        """log p at z_L minus log q at z_L less its mean: the mean given z_G moves with z_G, so z_G cancels there."""

        def one(z_local: dict, off_mean: dict) -> Array:
            found = split.evaluate(z, z_local, theta, data)
            return combine(found, conditional.log_prob_spread(given, off_mean, found.active))

        return each(one)(z_local, off_mean)

    at = lambda params, z, context: guide.condition(params, base, z, context, data)
    given, pull_z = jax.vjp(lambda z: at(held, z, held_context), z)
    off_mean, pull_spread = jax.vjp(lambda given: each(lambda eps: conditional.spread(given, eps))(eps), given)
    z_local = jax.tree.map(lambda loc, off: loc + off, given.loc, off_mean)
    log_w, back = jax.vjp(log_weights, z_local, off_mean, given, z, theta)  # (K, components), or without K if it is 1
    log_mean = logsumexp(log_w, axis=0) - np.log(weighting.num) if many else log_w
    value = jnp.sum(log_mean if counts is None else counts * log_mean)
    weight = jax.nn.softmax(log_w, axis=0) if many else jnp.ones_like(log_w)
    g_p, g_q, g_given, g_z, g_theta = back(weight if counts is None else counts * weight)
    both = jax.tree.map(jnp.add, g_p, g_q)
    total = lambda tree: jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), tree) if many else tree
    add = lambda *trees: jax.tree.map(lambda *leaves: sum(leaves), *trees)
    (by_spread,) = pull_spread(both)
    g_z = g_z + pull_z(add(by_spread, g_given)._replace(loc=total(g_p)))[0]
    if many:
        twice = lambda group: row_weights(split, weighting, weight, group, data, components)[..., None]
        both = {group: twice(group) * value for group, value in both.items()}
        (by_spread,) = pull_spread(both)
    _, pull = jax.vjp(lambda params, context: at(params, z, context), params, context)
    g_params, g_context = pull(by_spread._replace(loc=total(both)))
    return BoundGradients(value, g_params, g_z, g_context, g_theta)


def _plain(
    split: SplitModel,
    guide: Any,
    weighting: Weighting,
    key: Array,
    params: Any,
    base: Any,
    z: Array,
    context: Any,
    theta: dict,
    data: SiloData,
    combine: Any,
    counts: Array | None,
) -> BoundGradients:
    """The same bound for a guide of any form: the full reparametrised gradient."""
    keys = jax.random.split(key, weighting.num)

    def bound(params: Any, z: Array, context: Any, theta: dict) -> Array:
        def one(key: Array) -> Array:
            z_local, log_q = guide.draw_with_density(key, split, params, base, z, context, theta, data)
            return combine(split.evaluate(z, z_local, theta, data), log_q)

        log_mean = logsumexp(jax.vmap(one)(keys), axis=0) - np.log(weighting.num)
        return jnp.sum(log_mean if counts is None else counts * log_mean)

    value, gradients = jax.value_and_grad(bound, argnums=(0, 1, 2, 3))(params, z, context, theta)
    return BoundGradients(value, *gradients)


def _along(split: SplitModel, site: str, axis: str) -> bool:
    return axis in {name for name, _ in split.partition[site].axes}


def _scaled(split: SplitModel, terms: dict, batch: Batch | None) -> dict:
    """Terms of a minibatch's rows count for all rows of the silo."""
    if batch is None:
        return terms
    return {site: batch.factor * term if _along(split, site, batch.axis) else term for site, term in terms.items()}


def _counts(split: SplitModel, weighting: Weighting, data: SiloData, batch: Batch | None) -> Array | None:
    """How much each component's term counts: (components,); the last one, of no row, once."""
    if batch is None or weighting.rows == "whole":
        return None
    if batch.chosen is None:
        return jnp.append(jnp.full(num_components(split, data.mask), batch.factor), 1.0)
    return jnp.append(jnp.where(batch.chosen, batch.factor, 0.0), 1.0)


def combined(
    split: SplitModel,
    weighting: Weighting,
    terms: dict,
    log_q: dict,
    data: SiloData,
    components: Components | None,
    batch: Batch | None,
    power: Array | None,
) -> Float[Array, " components"]:
    """log p(y, z_L | z_G) - log q(z_L | z_G), added up within each component of rows that meet.

    Where rows do not meet a component is a row, and the last one has the terms of no row; else it is the whole silo.

    Args:
        terms: {site: log densities of the silo's terms}, padded rows at zero.
        log_q: {group: (rows,)}, log q of each row's locals.
        components: which component each row and each term belong to, in long format.
        batch: how much the rows of a minibatch count.
        power: of the density, where it is tempered.
    """
    if power is not None:
        terms = {site: power * term for site, term in terms.items()}
    if weighting.rows == "aligned":
        (group,) = split.groups
        return add_aligned(split, terms, log_q[group.name], data.mask)
    if weighting.rows == "single":
        total = sum((jnp.sum(term) for term in terms.values()), jnp.zeros(()))
        return total - log_q[split.groups[0].name]
    if weighting.rows == "indexed":
        assert components is not None
        return add_indexed(components, terms, log_q, num_components(split, data.mask))
    total = sum((jnp.sum(term) for term in _scaled(split, terms, batch).values()), jnp.zeros(()))
    if batch is not None:  # a silo-level group is there once
        axes = {group.name: [axis for axis, _ in group.axes] for group in split.groups}
        log_q = {group: batch.factor * v if batch.axis in axes[group] else v for group, v in log_q.items()}
    return (total - sum(jnp.sum(rows) for rows in log_q.values()))[None]


def row_weights(
    split: SplitModel,
    weighting: Weighting,
    weight: Float[Array, "draws components"],
    group: str,
    data: SiloData,
    components: Components | None,
) -> Float[Array, "draws rows"]:
    """Normalised weights (K, rows) of the components that a group's rows belong to."""
    if weighting.rows == "aligned":
        return weight[:, :-1]
    if weighting.rows == "single":
        return weight
    if weighting.rows == "indexed":
        assert components is not None
        return weight[:, components.rows[group]]
    rows = next(g for g in split.groups if g.name == group).num_rows(data.mask)
    return jnp.broadcast_to(weight, (weight.shape[0], rows))
