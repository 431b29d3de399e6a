r"""The evidence bound of all silos together.

.. math:: E_q\Big[\log p(z_G \mid \theta) - \log q(z_G) + \sum_j \mathcal{L}_j(z_G)\Big]

A posterior that has a density offers what it takes: a draw with its log density, and a silo's term at that draw.
"""

from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from numpyro_fed.algorithm import Key, PyTree
from numpyro_fed.data.padding import SiloData
from numpyro_fed.keys import fold_in_name, identities
from numpyro_fed.memo import ByIdentity
from numpyro_fed.precision import ONCE
from numpyro_fed.results.draws import fit_stack
from numpyro_fed.results.value import Fitted

Array = jax.Array


@runtime_checkable
class HasBound(Protocol):
    """A posterior with an evidence bound."""

    def sample_with_log_prob(self, key: Key, server: PyTree) -> tuple[Array, Array]:
        """One draw of z_G, and log q there."""
        ...

    def silo_elbo(self, key: Key, z: Array, server: PyTree, silo: PyTree, data: SiloData) -> Array:
        """One draw of a silo's term at z_G = z. In the silo."""
        ...


def elbo(fit: Fitted, keys: Array) -> float:
    """See :meth:`numpyro_fed.results.fit.Fit.elbo`."""
    if not isinstance(fit.posterior, HasBound):
        raise ValueError(
            f"nf.{fit.state.method} finds a point, which has no evidence bound; fit.history['loss'] is minus its "
            "density"
        )
    stack = fit_stack(fit)
    silos = tuple(
        (identities(bucket.names), states, *arrays)
        for bucket, states, arrays in zip(stack.buckets, fit.state.silos, stack.arrays, strict=True)
    )
    values = _bounds(ByIdentity(fit.posterior), ByIdentity(fit.split), keys, fit.state.server, silos, stack.shared)
    return float(jnp.mean(values))


@partial(jax.jit, static_argnums=(0, 1), compiler_options=ONCE)
def _bounds(
    of: ByIdentity, within: ByIdentity, keys: Array, server: PyTree, silos: tuple[Any, ...], shared: tuple
) -> Array:
    posterior, split = of.value, within.value

    def one(key: Array) -> Array:
        z, log_q = posterior.sample_with_log_prob(key, server)
        total = split.log_prior(z, posterior.theta(server)) - log_q

        def term(words: Array, silo: PyTree, args: Any, mask: Any) -> Array:
            return posterior.silo_elbo(fold_in_name(key, words), z, server, silo, SiloData(args, mask, shared))

        return total + sum((jnp.sum(jax.vmap(term)(*bucket)) for bucket in silos), jnp.zeros(()))

    return jax.lax.map(one, keys)
