"""Which observations count, and how many there are: once, for every method and measure."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.data.padding import SiloData
from numpyro_fed.model.layout import user_mask, with_mask
from numpyro_fed.model.partition_table import Site
from numpyro_fed.model.split_model import SplitModel

Array = jax.Array


def counted(site: dict[str, Any]) -> Array:
    """Of a traced site: which of its log densities count; an event counts where any of its elements does."""
    fn = site["fn"]
    shape = np.broadcast_shapes(jnp.shape(site["value"]), tuple(fn.shape()))
    mask, batch = user_mask(fn), shape[: len(shape) - fn.event_dim]
    if mask is None:
        return jnp.ones(batch, bool)
    mask = jnp.broadcast_to(mask, shape)
    return jnp.any(mask, axis=tuple(range(len(batch), len(shape)))) if len(shape) > len(batch) else mask


def silo_terms(split: SplitModel, *roles: str) -> list[Site]:
    """The silo's own sites in these roles: ``"observed"``, ``"factor"``."""
    return [site for site in split.partition.sites if site.role in roles and not site.at_server]


def observations_by_site(split: SplitModel, data: SiloData, trace: dict[str, Any] | None = None) -> dict[str, Array]:
    """How many observations each observed site of a silo has: elements of its log density that are neither padding nor
    masked. Where the silo's terms are all ``numpyro.factor``, these are counted."""
    trace = split.trace_at_zero(data) if trace is None else trace
    sites = silo_terms(split, "observed") or silo_terms(split, "factor")
    ones = {site.name: jnp.where(counted(trace[site.name]), 1, 0).astype(jnp.int32) for site in sites}
    return {site.name: jnp.sum(with_mask(ones[site.name], site, data.mask)) for site in sites}


def num_observations(split: SplitModel, data: SiloData) -> Array:
    """n_j: all of a silo's observations, at least 1; in the precision of the user's program."""
    counts = observations_by_site(split, data)
    return jnp.maximum(sum(counts.values(), jnp.zeros((), jnp.int32)), 1).astype(jnp.zeros(()).dtype)
