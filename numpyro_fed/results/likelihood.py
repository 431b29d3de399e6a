"""What is observed, and its log density at draws of the latents."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_fed.algorithm import Posterior, PyTree
from numpyro_fed.data.padding import SiloData, axis_lengths
from numpyro_fed.model.forward import local_key, silo_latents
from numpyro_fed.model.observations import counted
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.pieces import jit
from numpyro_fed.precision import ONCE

Array = jax.Array
Observations = tuple[dict[str, Array], dict[str, Array]]


def observations(split: SplitModel) -> Callable[[SiloData], Observations]:
    """``data -> ({observed site: values}, {observed site: which of them the model's mask lets count})``, compiled."""

    def run(data: SiloData) -> Observations:
        trace = _trace(split, jnp.zeros(split.dim), split.zeros_local(data.mask), split.theta, data)
        values, counts = {}, {}
        for name, site in trace.items():
            shape = np.broadcast_shapes(jnp.shape(site["value"]), site["fn"].shape())
            values[name], counts[name] = jnp.broadcast_to(site["value"], shape), counted(site)
        return values, counts

    return jit(run, compiler_options=ONCE)


def log_likelihoods(posterior: Posterior, split: SplitModel) -> Callable[..., dict[str, Array]]:
    """``(keys, draws of z_G, identity, server, silo, padded, own) -> {observed site: log densities}``, compiled.

    ``padded`` are the silo's data as in the run; ``own`` those whose densities are asked for, None: the same.

    Where discrete latents are summed out, a row has one log density for all sites that depend on them, under the name
    of the first; if a continuous latent depends on them too, or if they have other rows than the observations, these
    sites have none.
    """
    joined = split.enumeration.joined

    def one(
        key: Array, z: Array, identity: Any, server: PyTree, silo: PyTree, padded: SiloData, own: SiloData | None
    ) -> dict[str, Array]:
        data, theta, local = padded if own is None else own, posterior.theta(server), local_key(key, identity)
        z_local = silo_latents(posterior, split, local, z, server, silo, padded, axis_lengths(data))
        trace = _trace(split, z, z_local, theta, data)
        found = {name: site["fn"].log_prob(site["value"]) for name, site in trace.items() if name not in joined}
        if joined:
            terms = split.evaluate(z, z_local, theta, data).terms
            found |= {name: terms[name] for name in _summed_out(split)}
        return found

    return jit(jax.vmap(one, in_axes=(0, 0, None, None, None, None, None)), compiler_options=ONCE)


def _summed_out(split: SplitModel) -> list[str]:
    """Components' terms that are likelihoods of rows: no site of theirs is a continuous latent."""
    role = {site.name: site.role for site in split.partition.sites}
    plain = [
        one
        for one in split.enumeration.components
        if all(role[f.site] in ("observed", "enumerated") for f in one.factors)
    ]
    return [one.name for one in plain if role[one.name] == "observed"]


def _trace(
    split: SplitModel, z: Array, z_local: dict[str, Array], theta: dict[str, Any], data: SiloData
) -> dict[str, dict[str, Any]]:
    """The silo's observed sites as the model meets them."""
    model = split.substituted(split.unravel(z) | split.unpack(z_local, data.mask), theta)
    trace = handlers.trace(model).get_trace(**split.spec.kwargs(data))
    return {s.name: trace[s.name] for s in split.partition.sites if s.role == "observed" and not s.at_server}
