"""How local latents are arranged in rows, and what an evaluation of the model returns."""

from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import MaskedDistribution
from numpyro.infer.util import _unconstrain_reparam

from numpyro_fed.data.padding import cut
from numpyro_fed.model.discrete import resized
from numpyro_fed.model.partition_table import Site

Array = jax.Array
NEAR_ZERO = 1e-5  # where searches begin
GOLDEN = 0.6180339887498949  # multiples of it, modulo one, are all different


class Evaluation(NamedTuple):
    """The silo's log densities at one point, site by site, padded rows at zero, and which local elements are real.

    Sites that depend on a discrete latent are one term with it, named after the observed site in its rows (or after
    the latent itself, when there is none).
    """

    terms: dict[str, Array]
    active: dict[str, Array]  # {group: bool (rows, size of a row)}


class LocalSite(NamedTuple):
    name: str
    positions: tuple[int, ...]  # of the row axes in the unconstrained value, in the group's order
    rest: tuple[int, ...]  # the other axes' sizes
    batch_rank: int
    dims: tuple[int, ...]  # of the row axes in the log density

    @property
    def size(self) -> int:
        return int(np.prod(self.rest))


class Group(NamedTuple):
    """Local latents that share their rows."""

    name: str
    axes: tuple[tuple[str, Fraction], ...]  # axis, and rows per element of it
    sites: tuple[LocalSite, ...]

    @property
    def size(self) -> int:
        """Length of one row."""
        return sum(site.size for site in self.sites)

    def row_shape(self, mask: dict[str, Array]) -> tuple[int, ...]:
        return tuple(int(mask[axis].shape[-1] * ratio) for axis, ratio in self.axes)

    def num_rows(self, mask: dict[str, Array]) -> int:
        return int(np.prod(self.row_shape(mask)))


def filled(values: dict[str, Array], discrete: dict[str, Array], site: dict) -> Array | None:
    """A substitute_fn: continuous latents from unconstrained values, discrete ones from values that are broadcast."""
    value = discrete.get(site["name"])
    if value is None:
        return _unconstrain_reparam(values, site)
    shape = site["fn"].shape(site["kwargs"].get("sample_shape", ()))
    index = site["infer"].get("_scan_current_index")  # in a scan, all steps' values may be given
    value = value[index] if index is not None and jnp.ndim(value) > len(shape) else value
    return jnp.broadcast_to(value, shape)


def mask_name(site: str) -> str:
    return f"mask of {site}"


def user_mask(fn: Any) -> Array | None:
    """Which elements of a value no mask (``handlers.mask``, ``obs_mask``) leaves out, or None: all of them.

    Aligned with batch and event axes: a mask around ``to_event`` is one of whole vectors, one inside of it of elements.
    """
    found = None
    while fn is not None:
        if isinstance(fn, MaskedDistribution) and fn._mask is not True:
            mask = jnp.asarray(fn._mask)
            mask = mask.reshape(mask.shape + (1,) * fn.event_dim)
            found = mask if found is None else found & mask
        fn = getattr(fn, "base_dist", None)
    return found


def real_rows(group: Group, lengths: dict[str, int], padded: dict[str, int]) -> np.ndarray:
    """Which rows of the padded group are real, from lengths alone."""
    shape = tuple(int(padded[axis] * ratio) for axis, ratio in group.axes)
    places = np.arange(int(np.prod(shape))).reshape(shape)
    along = [(axis, i - len(shape)) for i, (axis, _) in enumerate(group.axes)]
    return cut(places, along, lengths, padded).reshape(-1)


def with_mask(log_prob: Array, site: Site, mask: dict[str, Array]) -> Array:
    """A silo's log densities (or counts), padded rows at zero."""
    for axis, dim in site.axes:
        along = resized(mask[axis], log_prob.shape[dim])
        log_prob = jnp.where(along.reshape(along.shape + (1,) * (-dim - 1)), log_prob, 0)
    return log_prob
