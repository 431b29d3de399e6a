"""Draws of a posterior: the programs that a fit compiles, and the silos' data that they run on."""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from numpyro_fed.algorithm import Posterior, PyTree
from numpyro_fed.data.padding import SiloData, axis_lengths, cut, silo_data
from numpyro_fed.data.stack import Bucket, Stack, gathered
from numpyro_fed.keys import identity
from numpyro_fed.model import forward, new_units
from numpyro_fed.model.provenance import provenance
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import ONCE
from numpyro_fed.results import likelihood

if TYPE_CHECKING:
    from numpyro_fed.results.fit import Fit

Array = jax.Array
Draws = dict[str, Array]  # {site: draws}


class Programs:
    """What a posterior and its model compile to, each when it is first asked for.

    Everything starts from the same draws of z_G, those of :attr:`z`: so draws of one key belong together.
    """

    def __init__(self, posterior: Posterior, split: SplitModel) -> None:
        self.posterior, self.split = posterior, split

    @cached_property
    def z(self) -> Callable[[Array, PyTree], Array]:
        """``(keys, server) -> draws of z_G``, (S, d)."""
        return jax.jit(jax.vmap(self.posterior.sample, in_axes=(0, None)), compiler_options=ONCE)

    @cached_property
    def global_sites(self) -> Callable[[Array, PyTree], Draws]:
        """``(draws of z_G, server) -> {global site: draws}``, constrained, with deterministics."""
        posterior, split = self.posterior, self.split

        def one(z: Array, server: PyTree) -> Draws:
            return split.constrain_global(z, posterior.theta(server))

        return jax.jit(jax.vmap(one, in_axes=(0, None)), compiler_options=ONCE)

    @cached_property
    def local_sites(self) -> Callable[..., Draws]:
        """``(keys, draws of z_G, identity, server, silo, padded, own) -> {local site: draws}``.

        ``padded`` are the silo's data as in the run; ``own`` those that the sites are to see, None: the same.
        """
        posterior, split = self.posterior, self.split

        def one(
            key: Array, z: Array, identity: Any, server: PyTree, silo: PyTree, padded: SiloData, own: SiloData | None
        ) -> Draws:
            data = padded if own is None else own
            local = forward.local_key(key, identity)
            z_local = forward.silo_latents(posterior, split, local, z, server, silo, padded, axis_lengths(data))
            discrete = forward.discrete_key(key, identity)
            return split.constrain_local(z, z_local, posterior.theta(server), data, discrete)

        return jax.jit(jax.vmap(one, in_axes=(0, 0, None, None, None, None, None)), compiler_options=ONCE)

    @cached_property
    def predictor(self) -> Callable[..., Draws]:
        return forward.predictor(self.posterior, self.split)

    @cached_property
    def log_likelihoods(self) -> Callable[..., Draws]:
        return likelihood.log_likelihoods(self.posterior, self.split)

    @cached_property
    def observations(self) -> Callable[[SiloData], tuple[Draws, Draws]]:
        return likelihood.observations(self.split)

    @cached_property
    def used_arguments(self) -> frozenset[str]:
        return new_units.used_arguments(self.split)

    @cached_property
    def event_dims(self) -> dict[str, int]:
        return forward.event_dims(self.split)


def silo_draws(fit: "Fit", keys: Array, silo: str) -> Draws:
    """See :meth:`numpyro_fed.results.fit.Fit.sample_local`."""
    state, _ = fit.state.silo(silo)
    if fit.reads_data:
        fit.need_silos(f"draws of {silo!r}'s latents, which the encoder reads off its data,")
    padded, own = data_of(fit, silo)
    server, programs = fit.state.server, fit.programs
    z = programs.z(keys, server)
    local = programs.local_sites(keys, z, identity(silo), server, state, padded, own)
    if fit.silos is None:
        local = {name: value for name, value in local.items() if name not in fit.from_data}
    return {**programs.global_sites(z, server), **unpadded(fit, local, silo, padded if own is None else own)}


# --- a silo's data ----------------------------------------------------------------------------------------------------


def lengths_of(split: SplitModel, silo: str) -> dict[str, int]:
    """Of the silo's axes, without padding."""
    return {axis.name: axis.lengths[silo] for axis in split.partition.axes}


def data_of(fit: "Fit", silo: str, plain: bool = False) -> tuple[SiloData, SiloData | None]:
    """A silo's data padded as in the run, and without padding where that could be seen, or is asked for: ``plain``.

    A program for padded data serves all silos of a bucket, so the second is None where the first will do. Rows do not
    meet in a log density, but they may in a deterministic site (a mean over them).
    """
    split = fit.split
    if fit.from_store:
        fit.need_silos(f"draws for the units of {silo!r}")
        args, mask = gathered([(silo, fit.any_silos.own(silo))], split.spec, split.partition.axes, rounded=False)
        args, mask = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), (args, mask))
        return SiloData(args, mask, split.shared), None
    padded = fit.padded[fit.state.silo(silo)[1]]
    data = silo_data(fit.any_silos, silo, split.spec, split.partition.axes, padded)
    computed = any(site.role == "deterministic" and not site.at_server for site in split.partition.sites)
    if not (computed or plain) or lengths_of(split, silo) == padded:
        return data, None
    return data, silo_data(fit.any_silos, silo, split.spec, split.partition.axes)


def unpadded(fit: "Fit", values: Draws, silo: str, data: SiloData, densities: bool = False) -> Draws:
    """Values of sites (or their log densities) with the silo's own rows alone; ``data`` have as many as the values."""
    if fit.from_store:
        return values
    lengths, padded, events = lengths_of(fit.split, silo), axis_lengths(data), fit.programs.event_dims
    sites = {name: fit.split.partition[name] for name in values}
    along = {name: site.axes if densities else forward.value_axes(site, events) for name, site in sites.items()}
    return {name: cut(value, along[name], lengths, padded) for name, value in values.items()}


def computed_from_data(fit: "Fit") -> frozenset[str]:
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


def stack_of(fit: "Fit") -> Stack:
    """All silos, padded and ordered as the states are."""
    buckets = tuple(Bucket(*pair) for pair in zip(fit.state.buckets, fit.padded, strict=True))
    return Stack(fit.state.names, buckets, fit.split.spec, fit.split.partition.axes, fit.any_silos, None)
