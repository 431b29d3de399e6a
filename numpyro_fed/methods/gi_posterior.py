"""The posterior of GI-PVI: weights drawn layer by layer, given the rows of all silos that were heard."""

from typing import Any

import jax
import numpy as np

from numpyro_fed.algorithm import Key, PyTree
from numpyro_fed.data.padding import SiloData
from numpyro_fed.methods.gi_rounds import GIServer, heard_rows
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.normal.inducing import noise_for, sample
from numpyro_fed.normal.network import Network

Array = jax.Array
EACH = (
    "table",
    "visits",
    "log_likelihoods",
    "moving",
    "climbs",
    "lost",
)  # of the server's state: an entry for each silo


class GIPosterior:
    """Normal given the layers below, and not normal as a whole."""

    no_factors = (
        "a silo's factor is a normal only given the layers below, so that there is none of all weights to compare"
    )

    def __init__(self, split: SplitModel, network: Network) -> None:
        self.split, self.network = split, network

    @property
    def family(self) -> str:
        return f"inducing points of {len(self.network.layers)} layers"

    def sample(self, key: Key, server: GIServer) -> Array:
        weights, _ = sample(self.network, heard_rows(server), noise_for(self.network, key))
        return self.split.ravel(self.network.sites(weights))

    def sample_local(self, key: Key, z: Array, server: GIServer, silo: PyTree, data: SiloData) -> dict[str, Array]:
        return {}

    def theta(self, server: GIServer) -> dict[str, Any]:
        return {}

    def normal(self, server: GIServer) -> Normal | None:
        return None

    # --- silos that leave, join, or come in another order -------------------------------------------------------------

    def reordered(self, server: GIServer, order: list[int]) -> GIServer:
        place = np.array(order)
        return server._replace(**{name: jax.tree.map(lambda leaf: leaf[place], getattr(server, name)) for name in EACH})

    def joined(self, fresh: GIServer, old: GIServer, places: np.ndarray) -> GIServer:
        grown = lambda new, was: new.at[places].set(was)
        return old._replace(**{name: jax.tree.map(grown, getattr(fresh, name), getattr(old, name)) for name in EACH})

    def joined_silo(self, fresh: PyTree, old: PyTree, rows: dict) -> PyTree:
        return fresh
