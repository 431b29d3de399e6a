"""A silo's observations, drawn anew from the model."""

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_fed.data.padding import SiloData
from numpyro_fed.model.forward import forward
from numpyro_fed.model.observations import silo_terms
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.threads import unvalidated

Array = jax.Array


def redraw(split: SplitModel, z: Array, theta: dict, data: SiloData, key: Array) -> dict[str, Array]:
    """All observations of a silo drawn from the model at z, with its own covariates; padded rows too.

    Locals are drawn first, so these are draws of y given z_G alone.
    """
    names = [site.name for site in silo_terms(split, "observed")]
    if not names:
        raise ValueError(
            "this solver draws observations from the model, and the silos' terms are all numpyro.factor: use "
            "solver='iasg', which asks for gradients only"
        )
    try:
        with unvalidated():
            drawn = forward(split, split.unravel(z), theta, split.spec.kwargs(data), key)
    except NotImplementedError as error:
        raise ValueError(
            f"this solver draws observations ({', '.join(map(repr, names))}) from the model, and a distribution has no "
            "sample method: use solver='iasg', which asks for gradients only"
        ) from error
    return {name: drawn[name] for name in names}


def replaced(values: dict[str, Any], site: dict) -> Array | None:
    """A condition_fn: scores given other observations.

    Terms that nothing can be drawn from (``numpyro.factor``, None here) are left out. A term that counts c times has c
    times the curvature, so its score counts root c times.
    """
    if site["name"] not in values:
        return None
    value = values[site["name"]]
    if value is None:
        site["scale"] = 0.0
    elif site["scale"] is not None:
        site["scale"] = jnp.sqrt(site["scale"])
    return value
