"""Which elements of a silo's arguments an observed site observes, found by labels.

The arguments are filled with labels, and the labels that arrive at an observed site say where its values come from.
So an observation may be an argument, a column of one, a slice, a reshape or rows looked up by an index: whatever copies
numbers. What computes with them (``obs=jnp.log(y)``) does not hand labels on as they are, and is found out.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.data.padding import SiloData
from numpyro_fed.model.discrete import resized
from numpyro_fed.model.forward import value_axes
from numpyro_fed.model.observations import silo_terms
from numpyro_fed.model.partition_table import Site
from numpyro_fed.model.split_model import SplitModel

Array = jax.Array
NOWHERE = -1  # the place of an element that is no copy, or padding


def copied(split: SplitModel, argument: int, data: SiloData) -> dict[str, Array]:
    """Of each observed site: the places in an argument that its values are copies of, or NOWHERE, in their shape.

    Args:
        split: the model.
        argument: its position in ``data.args``.
        data: of one silo, padded.

    The k-th bit of an element's number is put in its place, for all k at once, so labels are zeros and ones whatever
    the argument's type. Arguments of zeros and of other numbers tell copies from ``1 - y``, ``y > 0`` or ``y**2``. The
    other arguments, of which some may be indices, stay as they are.
    """
    like = data.args[argument]
    total = int(np.prod(like.shape))
    num_bits = max((total - 1).bit_length(), 1)
    bits = (np.arange(total) >> np.arange(num_bits)[:, None]) & 1
    other = np.ones(total, int) if like.dtype == bool else np.random.default_rng(0).integers(2, 100, total)

    def values(pattern: Array) -> dict[str, Array]:
        args = list(data.args)
        args[argument] = pattern.reshape(like.shape).astype(like.dtype)
        trace = split.trace_at_zero(data._replace(args=tuple(args)))
        return {site.name: jnp.asarray(trace[site.name]["value"]) for site in silo_terms(split, "observed")}

    found = jax.vmap(values)(jnp.asarray(np.concatenate([bits, np.zeros((1, total), int), other[None]])))
    places = {}
    for name, value in found.items():
        labels, at_zero, at_other = value[:num_bits], value[num_bits], value[num_bits + 1]
        weights = (1 << np.arange(num_bits)).reshape(-1, *(1,) * at_zero.ndim)
        place = jnp.sum(jnp.where(labels == 1, weights, 0), axis=0)
        binary = jnp.all((labels == 0) | (labels == 1), axis=0) & (at_zero == 0) & (place < total)
        copy = binary & (at_other == jnp.asarray(other)[jnp.minimum(place, total - 1)].astype(at_other.dtype))
        places[name] = jnp.where(copy, place, NOWHERE).astype(jnp.int32)
    return places


def real_elements(site: Site, shape: tuple[int, ...], events: dict[str, int], mask: dict[str, Any]) -> Array:
    """Which elements of an observed value are no padding.

    ``events`` has, of the observed sites, how many of a value's last axes one log density covers.
    """
    valid = jnp.ones(shape, bool)
    for axis, dim in value_axes(site, events):
        if -dim <= len(shape) and shape[dim] > 1:
            along = resized(mask[axis], shape[dim])
            valid &= along.reshape(along.shape + (1,) * (-dim - 1))
    return valid
