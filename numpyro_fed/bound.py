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

from numpyro_fed.guides.structured import LocalBase, StructuredNormal
from numpyro_fed.padding import SiloData
from numpyro_fed.rows import Components, add_aligned, add_indexed, num_components
from numpyro_fed.split_model import SplitModel

Array = Any


class Weighting(NamedTuple):
    """How many draws per row, and how terms find their row. Static: part of the compiled program."""

    num: int = 1  # K
    rows: str = "whole"  # "whole" silo, "aligned" with the rows, or "indexed" by Components


class BoundGradients(NamedTuple):
    value: Array
    params: Any  # of the silo's guide; stays in the silo
    z: Array  # (d,)
    mean: Array  # (d,) with respect to the guide's centre mu_G
    theta: dict[str, Array]


def silo_bound(
    split: SplitModel,
    guide: StructuredNormal,
    weighting: Weighting,
    key: Array,
    params: Any,
    base: LocalBase,
    z: Array,
    mean: Array,
    theta: dict[str, Array],
    data: SiloData,
    components: Components | None = None,
) -> BoundGradients:
    """One draw of the bound of a silo at z_G = z, with its gradients."""
    if not split.groups:
        value, (g_z, g_theta) = jax.value_and_grad(lambda z, theta: split.log_silo(z, {}, theta, data), argnums=(0, 1))(
            z, theta
        )
        return BoundGradients(value, params, g_z, jnp.zeros_like(mean), g_theta)
    # the barrier keeps the compiler from drawing the same numbers again in every place that uses them
    eps = jax.lax.optimization_barrier(guide.draw_local(key, split, data.mask, weighting.num))
    held, held_mean = jax.lax.stop_gradient((params, mean))

    def spread(params: Any, z: Array, mean: Array) -> dict:
        return jax.vmap(lambda eps: guide.spread(params, base, z, mean, eps))(eps)

    def log_weights(z_local: dict, off_mean: dict, z: Array, theta: dict) -> Array:
        """log p at z_L minus log q at z_L less its mean: the mean given z_G moves with z_G, so z_G cancels there."""

        def one(z_local: dict, off_mean: dict) -> Array:
            found = split.evaluate(z, z_local, theta, data)
            log_q = guide.log_prob_spread(held, base, z, held_mean, off_mean, found.active)
            return _combined(split, weighting, found.terms, log_q, data, components)

        return jax.vmap(one)(z_local, off_mean)

    loc, pull_loc = jax.vjp(lambda *at: guide.location(at[0], base, at[1], at[2]), params, z, mean)
    off_mean, pull_spread = jax.vjp(spread, params, z, mean)
    z_local = jax.lax.optimization_barrier(jax.tree.map(lambda loc, off: loc + off, loc, off_mean))  # (K, rows, k)
    log_w, back = jax.vjp(log_weights, z_local, off_mean, z, theta)  # (K, components)
    value = jnp.sum(logsumexp(log_w, axis=0) - np.log(weighting.num)) if weighting.num > 1 else jnp.sum(log_w)
    weight = jax.nn.softmax(log_w, axis=0) if weighting.num > 1 else jnp.ones_like(log_w)
    g_p, g_q, g_z, g_theta = jax.lax.optimization_barrier(back(weight))
    both = jax.tree.map(jnp.add, g_p, g_q)
    total = lambda tree: jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), tree)
    g_z = g_z + pull_loc(total(g_p))[1] + pull_spread(both)[1]
    if weighting.num > 1:
        twice = lambda group: _row_weights(split, weighting, weight, group, data, components)[..., None]
        both = {group: twice(group) * value for group, value in both.items()}
    by_loc, by_spread = pull_loc(total(both)), pull_spread(both)
    g_params, g_mean = jax.tree.map(jnp.add, (by_loc[0], by_loc[2]), (by_spread[0], by_spread[2]))
    return BoundGradients(value, g_params, g_z, g_mean, g_theta)


def _combined(
    split: SplitModel, weighting: Weighting, terms: dict, log_q: dict, data: SiloData, components: Components | None
) -> Array:
    if weighting.rows == "aligned":
        (group,) = split.groups
        return add_aligned(split, terms, data.mask).at[:-1].add(-log_q[group.name])
    if weighting.rows == "indexed":
        assert components is not None
        return add_indexed(components, terms, log_q, num_components(split, data.mask))
    total = sum((jnp.sum(term) for term in terms.values()), jnp.zeros(()))
    return (total - sum(jnp.sum(rows) for rows in log_q.values()))[None]


def _row_weights(
    split: SplitModel, weighting: Weighting, weight: Array, group: str, data: SiloData, components: Components | None
) -> Array:
    """Normalised weights (K, rows) of the components that a group's rows belong to."""
    if weighting.rows == "aligned":
        return weight[:, :-1]
    if weighting.rows == "indexed":
        assert components is not None
        return weight[:, components.rows[group]]
    rows = next(g for g in split.groups if g.name == group).num_rows(data.mask)
    return jnp.broadcast_to(weight, (weight.shape[0], rows))
