"""Draws of a fit, and the silos' data that they are made from."""

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_fed.checks import check_count, check_key
from numpyro_fed.data.padding import SiloData, axis_lengths, cut, silo_data
from numpyro_fed.data.silos import at_silo
from numpyro_fed.data.stack import Bucket, Stack, pad_and_stack
from numpyro_fed.keys import identity
from numpyro_fed.model import forward
from numpyro_fed.model.provenance import provenance
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.results.programs import Draws
from numpyro_fed.results.value import Fitted

Array = jax.Array


def check_keys(rng_key: Any, num_samples: Any) -> Array:
    """The keys of so many draws."""
    return jax.random.split(check_key(rng_key), check_count("num_samples", num_samples))


def global_draws(fit: Fitted, keys: Array) -> Draws:
    """See :meth:`numpyro_fed.results.fit.Fit.sample`."""
    return fit.programs.global_sites(fit.programs.z(keys, fit.state.server), fit.state.server)


def silo_draws(fit: Fitted, keys: Array, silo: str) -> Draws:
    """See :meth:`numpyro_fed.results.fit.Fit.sample_local`."""
    state, _ = fit.state.silo(silo)
    if fit.reads_data:
        fit.need_silos(f"draws of {silo!r}'s latents, which the encoder reads off its data,")
    server, programs = fit.state.server, fit.programs
    z = programs.z(keys, server)
    with at_silo(silo):
        padded, own = data_of(fit, silo)
        local = programs.local_sites(keys, z, identity(silo), server, state, padded, own)
        local = unpadded(fit, local, silo, padded if own is None else own)
    if fit.silos is None:
        local = {name: value for name, value in local.items() if name not in computed_from_data(fit)}
    return {**programs.global_sites(z, server), **local}


# --- a silo's data ----------------------------------------------------------------------------------------------------


def lengths_of(split: SplitModel, silo: str) -> dict[str, int]:
    """Of the silo's axes, without padding."""
    return split.partition.lengths(silo)


def data_of(fit: Fitted, silo: str, plain: bool = False) -> tuple[SiloData, SiloData | None]:
    """A silo's data padded as in the run, and without padding where that could be seen, or is asked for: ``plain``.

    Call it in the silo's room. A program for padded data serves all silos of a bucket, so the second is None where the
    first will do. Rows do not meet in a log density, but they may in a deterministic site (a mean over them).
    """
    split = fit.split
    if fit.from_store:
        fit.need_silos(f"draws for the units of {silo!r}")
        args, mask = pad_and_stack([(silo, fit.any_silos.own(silo))], split.spec, split.partition.axes, rounded=False)
        args, mask = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), (args, mask))
        return SiloData(args, mask, split.shared), None
    padded = fit.padded[fit.state.silo(silo)[1]]
    data = silo_data(fit.any_silos, silo, split.spec, split.partition.axes, padded)
    computed = any(site.role == "deterministic" and not site.at_server for site in split.partition.sites)
    if not (computed or plain) or split.partition.lengths(silo) == padded:
        return data, None
    return data, silo_data(fit.any_silos, silo, split.spec, split.partition.axes)


def unpadded(fit: Fitted, values: Draws, silo: str, data: SiloData, densities: bool = False) -> Draws:
    """Values of sites (or their log densities) with the silo's own rows alone; ``data`` have as many as the values."""
    if fit.from_store:
        return values
    lengths, padded, events = fit.split.partition.lengths(silo), axis_lengths(data), fit.programs.event_dims
    sites = {name: fit.split.partition[name] for name in values}
    along = {name: site.axes if densities else forward.value_axes(site, events) for name, site in sites.items()}
    return {name: cut(value, along[name], lengths, padded) for name, value in values.items()}


def computed_from_data(fit: Fitted) -> frozenset[str]:
    """Local sites whose constrained values depend on the silo's data, not on latents alone."""
    split = fit.split
    data, own = data_of(fit, fit.state.names[0])
    data = data if own is None else own
    zeros = split.zeros_local(data.mask)
    found = provenance(
        lambda args: split.constrain_local(
            jnp.zeros(split.dim), zeros, split.theta, data._replace(args=args), jax.random.key(0)
        ),
        {"args": data.args},
    )
    return frozenset(name for name, sources in found.items() if sources)


def fit_stack(fit: Fitted) -> Stack:
    """All silos, padded and ordered as the states are."""
    buckets = tuple(Bucket(*pair) for pair in zip(fit.state.buckets, fit.padded, strict=True))
    return Stack(fit.state.names, buckets, fit.split.spec, fit.split.partition.axes, fit.any_silos, None)
