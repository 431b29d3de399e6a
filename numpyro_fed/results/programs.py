"""What a posterior and its model compile to."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax

from numpyro_fed.algorithm import Posterior, PyTree
from numpyro_fed.data.padding import SiloData, axis_lengths
from numpyro_fed.model import forward, new_units
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.pieces import jit
from numpyro_fed.precision import ONCE
from numpyro_fed.results import likelihood

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
        return jit(jax.vmap(self.posterior.sample, in_axes=(0, None)), compiler_options=ONCE)

    @cached_property
    def global_sites(self) -> Callable[[Array, PyTree], Draws]:
        """``(draws of z_G, server) -> {global site: draws}``, constrained, with deterministics."""
        posterior, split = self.posterior, self.split

        def one(z: Array, server: PyTree) -> Draws:
            return split.constrain_global(z, posterior.theta(server))

        return jit(jax.vmap(one, in_axes=(0, None)), compiler_options=ONCE)

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

        return jit(jax.vmap(one, in_axes=(0, 0, None, None, None, None, None)), compiler_options=ONCE)

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
