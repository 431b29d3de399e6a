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

    def sample(params: Any, z: Array, mean: Array) -> dict:
        return jax.vmap(lambda eps: guide.sample_local(params, base, z, mean, eps))(eps)

    def log_weights(z_local: dict, z: Array, theta: dict) -> Array:
        def one(z_local: dict) -> Array:
            found = split.evaluate(z, z_local, theta, data)
            log_q = guide.log_prob_local(held, base, z, held_mean, z_local, found.active)
            return _combined(split, weighting, found.terms, log_q, data, components)

        return jax.vmap(one)(z_local)

    z_local, pull = jax.vjp(sample, params, z, mean)
    log_w, back = jax.vjp(log_weights, z_local, z, theta)  # (K, components)
    value = jnp.sum(logsumexp(log_w, axis=0) - np.log(weighting.num)) if weighting.num > 1 else jnp.sum(log_w)
    weight = jax.nn.softmax(log_w, axis=0) if weighting.num > 1 else jnp.ones_like(log_w)
    g_local, g_z, g_theta = back(weight)
    g_params, g_path, g_mean = pull(g_local)
    if weighting.num > 1:
        twice = {
            g: _row_weights(split, weighting, weight, g, data, components)[..., None] * v for g, v in g_local.items()
        }
        g_params, _, g_mean = pull(twice)
    return BoundGradients(value, g_params, g_z + g_path, g_mean, g_theta)


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
