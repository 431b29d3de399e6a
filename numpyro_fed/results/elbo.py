r"""The evidence bound of all silos together.

.. math:: E_q\Big[\log p(z_G \mid \theta) - \log q(z_G) + \sum_j \mathcal{L}_j(z_G)\Big]

A posterior that has a density offers what it takes: a draw with its log density, and a silo's term at that draw.
"""

from functools import partial
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from numpyro_fed.algorithm import Key, PyTree
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.silos import at_silo
from numpyro_fed.keys import fold_in_name, identity
from numpyro_fed.memo import ByIdentity
from numpyro_fed.pieces import jit
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
    of, within, server, stack = ByIdentity(fit.posterior), ByIdentity(fit.split), fit.state.server, fit_stack(fit)
    z, total = _at_server(of, within, keys, server)
    for name in fit.state.names:
        state, _ = fit.state.silo(name)
        with at_silo(name):
            own = jax.vmap(fold_in_name, (0, None))(keys, identity(name))
            total = total + _in_silo(of, own, z, server, state, stack.data(name))
    return float(total)


@partial(jit, static_argnums=(0, 1), compiler_options=ONCE)
def _at_server(of: ByIdentity, within: ByIdentity, keys: Array, server: PyTree) -> tuple[Array, Array]:
    """Draws of the globals, and the mean of log p - log q there."""
    posterior, split = of.value, within.value

    def one(key: Array) -> tuple[Array, Array]:
        z, log_q = posterior.sample_with_log_prob(key, server)
        return z, split.log_prior(z, posterior.theta(server)) - log_q

    z, values = jax.lax.map(one, keys)
    return z, jnp.mean(values)


@partial(jit, static_argnums=0, compiler_options=ONCE)
def _in_silo(of: ByIdentity, keys: Array, z: Array, server: PyTree, silo: PyTree, data: SiloData) -> Array:
    """The silo's mean term at these draws: a number is all that leaves."""
    term = lambda key_and_z: of.value.silo_elbo(*key_and_z, server, silo, data)
    return jnp.mean(jax.lax.map(term, (keys, z)))
