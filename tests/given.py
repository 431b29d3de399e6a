"""Fits whose posterior is given, not found: what a Fit does with a posterior can be checked in closed form."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import numpyro_fed as nf
from numpyro_fed.algorithm import Plan, Program
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.stack import stack_of
from numpyro_fed.model.build import split_model
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.state import State


class GivenPosterior:
    """Independent normals over z_G and z_L, the latter shifted by the first global."""

    def __init__(self, split: SplitModel) -> None:
        self.split = split

    def theta(self, server: dict) -> dict[str, Any]:
        return server["theta"]

    def sample(self, key: Any, server: dict) -> Any:
        return server["loc"] + server["scale"] * jax.random.normal(key, (self.split.dim,))

    def sample_local(self, key: Any, z: Any, server: dict, silo: dict, data: SiloData) -> dict:
        noise = lambda group, value: jax.random.normal(jax.random.fold_in(key, len(group)), value.shape)
        shift = z[0] if self.split.dim else 0.0
        return {
            group: silo["loc"][group] + silo["coupling"] * shift + silo["scale"] * noise(group, silo["loc"][group])
            for group in silo["loc"]
        }

    def normal(self, server: dict) -> Normal | None:
        return None


@dataclass(frozen=True)
class Given(nf.Method):
    """The method of such a fit: nothing is done in it, so that it has no phases."""

    local: Any = None
    shared: Any = None

    def compile(self, split: SplitModel, survey: Survey, plan: Plan) -> Program:
        return Program((), GivenPosterior(split))


def given_fit(
    model: Any, silos: Silos, *, loc: Any = 0.0, scale: float = 1.0, silo: dict[str, Any] | None = None, **options: Any
) -> Fit:
    """A Fit with z_G ~ N(loc, scale^2); ``silo`` has ``loc`` (one for each row), ``scale`` and ``coupling`` of z_L."""
    split = split_model(model, silos, check=False, **options)
    stack = stack_of(silos, silos, split.spec, split.partition.axes)
    local = {"loc": 0.0, "scale": 0.5, "coupling": 0.0} | (silo or {})
    states = []
    for bucket, (_, mask) in zip(stack.buckets, stack.arrays, strict=True):
        number = len(bucket.names)
        zeros = jax.vmap(split.zeros_local)(mask)
        states.append(
            {
                "loc": jax.tree.map(lambda value: value + jnp.asarray(local["loc"]), zeros),
                "scale": jnp.full(number, local["scale"]),
                "coupling": jnp.full(number, local["coupling"]),
            }
        )
    server = {"loc": jnp.full(split.dim, loc), "scale": jnp.asarray(scale), "theta": split.theta}
    state = State("Given", silos.names, tuple(bucket.names for bucket in stack.buckets), server, tuple(states), 3)
    history = {"loss": np.array([3.0, 2.0, 1.0]), "bytes_up": np.full(3, 1000)}
    padded = tuple(bucket.lengths for bucket in stack.buckets)
    return Fit(GivenPosterior(split), split, state, history, 0.1, padded, silos)
