r"""Are there enough quadrature nodes? Asked once, at the end of a run.

Too few nodes shift the posterior and nothing else shows it. To first order a change :math:`\Delta(z)` of log factors
shifts the posterior's mean by :math:`E_q[x \Delta]` in whitened coordinates x; so every silo evaluates its factor with
the run's n nodes and with 2n + 1, at a few points of q, and returns these d numbers. The server adds them up.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.integrate import Marginal, silo_factor
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal import affine
from numpyro_fed.normal.families import Family, Natural
from numpyro_fed.normal.points import normal_points

Array = jax.Array
POINTS = 16
TOO_FAR = 0.05  # sds


class NodesMessage(NamedTuple):
    shift: Array  # (d,): of the posterior's mean by this silo's nodes, in whitened units


def node_check(split: SplitModel, family: Family, marginal: Marginal, posterior: Any) -> FederatedAlgorithm:
    """One round that asks; its info has the largest shift. ``posterior`` gives q from the method's server state."""
    num = max(POINTS, 2 * split.dim)
    more = marginal._replace(num=2 * marginal.num + 1)

    def broadcast(key: Array, server: Any) -> Broadcast:
        return Broadcast(family.pack(posterior(server)))

    def silo_step(key: Array, broadcast: Broadcast, silo: Any, data: SiloData) -> tuple[NodesMessage, Any]:
        q: Natural = family.unpack(broadcast.common)
        at = affine.coordinates(family, q)
        eps = jnp.asarray(normal_points(split.dim, num), jnp.zeros(()).dtype)
        fewer, finer = (silo_factor(split, one, data, silo.components) for one in (marginal, more))

        def difference(z: Array) -> Array:
            at_n, at_more = (one.log_f(z, silo.frame, one.nodes(None)) for one in (fewer, finer))
            return at_n - at_more

        change = jax.lax.map(difference, affine.to_z(at, eps), batch_size=finer.batch_of(num))
        return NodesMessage(eps.T @ change / num), silo

    def aggregate(messages: NodesMessage, cohort: Cohort) -> Array:
        # those who were asked stand for all
        return cohort.num_silos / len(cohort.index) * jnp.sum(messages.shift, axis=0)

    def server_step(key: Array, server: Any, shift: Array) -> tuple[Any, dict]:
        return server, {"node_shift": jnp.max(jnp.abs(shift))}

    # it begins where the rounds ended: there are no states of its own
    fresh, fresh_silo = lambda key: (), lambda key, broadcast, data: ()
    return FederatedAlgorithm(fresh, fresh_silo, broadcast, silo_step, aggregate, server_step)
