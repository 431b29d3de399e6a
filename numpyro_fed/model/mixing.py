r"""Rows that look at all other rows of their silo.

A model that is written for pooled data and standardises in passing, ``(x - x.mean()) / x.std()``, is another model in
every silo, since each has its own mean. Nothing in shapes shows it, and with silos of equal size nothing else does. So
a silo moves its first row, to the largest value that each column has in the silo (numbers that are no integers: a
little beyond) and to the smallest, and looks at the terms of the others, latents held fixed:

.. math::

    \log p(y_i \mid x_1, x_2, \ldots, z) \ne \log p(y_i \mid x_1', x_2, \ldots, z), \quad i > 1.

A mean, a standard deviation, ranks and risk sets change nearly all of them; in an autoregression, or among matched
pairs, the neighbours alone change.
"""

from typing import Any

import jax
import jax.numpy as jnp

from numpyro_fed.data.padding import SiloData
from numpyro_fed.model.layout import with_mask
from numpyro_fed.model.partition_table import Site
from numpyro_fed.model.probes import probes
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import unforeseen

Array = jax.Array
NEARLY_ALL = 0.75
FEWEST = 3  # other rows: among fewer, neighbours are nearly all


def watched(split: SplitModel) -> dict[str, str]:
    """{site: the axis of its rows}: sites whose rows might look at others, but for those that local= says should."""
    moved = {leaf.axis for leaf in split.spec.own if leaf.dtype is not None and leaf.axis is not None}
    found = {}
    for site in split.partition.sites:
        along = [axis for axis, _ in site.axes if axis in moved]
        if along and site.role in TERMS and not site.at_server and site.name not in split.partition.named:
            found[site.name] = along[0]
    return found


TERMS = ("observed", "factor", "local", "enumerated")


def rows_look_around(split: SplitModel, data: SiloData) -> dict[str, Array]:
    """By site: 1 where nearly all rows' terms change with another row's data, 0 where not, -1 where rows are too few
    to tell. Pure; the model is traced once."""
    sites = watched(split)
    axes = sorted(set(sites.values()))
    if not axes:
        return {}
    z, z_local, theta = unforeseen(probes(split, data.mask)[0], data.mask)

    def terms(move: tuple[Array, Array]) -> dict[str, Array]:
        found = split.evaluate(z, z_local, theta, _moved(split, data, axes, *move)).terms
        return {name: term for name, term in found.items() if name in sites}

    # first as it is: the same program, so that what does not change is the same to the last bit
    which = jnp.array([-1, *(i for i in range(len(axes)) for _ in range(2))])
    upwards = jnp.array([False, *(up for _ in axes for up in (True, False))])
    found = jax.lax.map(terms, (which, upwards))
    out = {}
    for name, term in found.items():
        site, first = split.partition[name], 1 + 2 * axes.index(sites[name])
        different = jnp.any(_differ(term[0], term[first : first + 2]), axis=0)
        real = with_mask(jnp.ones(term.shape[1:], jnp.int32), site, data.mask) > 0
        out[name] = _judged(_others(site, sites[name], different, real))
    return out


def _moved(split: SplitModel, data: SiloData, axes: list[str], which: Array, up: Array) -> SiloData:
    """The silo's data with the first row of one axis elsewhere; of none where ``which`` is -1."""
    leaves = [leaf for leaf in split.spec.own if leaf.dtype is not None]

    def moved(axis: str | None, array: Array) -> Array:
        if axis not in axes:
            return array
        low, high = jnp.min(array, axis=0), jnp.max(array, axis=0)  # padding repeats a row: it is no further
        beyond = (high - low) / 8 if jnp.issubdtype(array.dtype, jnp.floating) else 0
        far = jnp.where(up, high + beyond, low - beyond).astype(array.dtype)
        return array.at[0].set(jnp.where(which == axes.index(axis), far, array[0]))

    args = tuple(moved(leaf.axis, jnp.asarray(array)) for leaf, array in zip(leaves, data.args, strict=True))
    return data._replace(args=args)


def _differ(before: Array, after: Array) -> Array:
    return (before != after) & ~(jnp.isnan(before) & jnp.isnan(after))


def _others(site: Site, axis: str, different: Array, real: Array) -> tuple[Array, Array]:
    """How many other rows change, and how many there are. A row is an element along the axis, all else together."""
    dims = [dim for name, dim in site.axes if name == axis]
    for dim in dims:
        there = jnp.arange(different.shape[dim]).reshape(-1, *(1,) * (-dim - 1)) > 0
        different, real = different & there, real & there
    rest = tuple(i for i in range(different.ndim) if i - different.ndim not in dims)
    count = lambda rows: jnp.sum(jnp.any(rows, axis=rest)).astype(jnp.int32)
    return count(different & real), count(real)


def _judged(counts: tuple[Array, Array]) -> Array:
    changed, others = counts
    return jnp.where(others < FEWEST, -1, jnp.where(changed >= NEARLY_ALL * others, 1, 0)).astype(jnp.int32)


def looking_around(answers: dict[str, Any]) -> tuple[str, ...]:
    """Sites of which most silos that can tell say that rows look at all others."""
    told = {name: [int(one) for one in column.reshape(-1) if one >= 0] for name, column in answers.items()}
    return tuple(name for name, found in told.items() if 2 * sum(found) > len(found))


def meant(site: str) -> str:
    """What to type about a site whose rows look at all others of their silo."""
    return (
        f"the log density of a row of site {site!r} depends on the data of nearly all other rows of its silo (a mean, "
        "a standard deviation, ranks, a risk set): each silo has its own, so this is not the model of the pooled data. "
        "Compute it over all silos before the model: nf.prepare.standardize(silos, ['x']). If it is meant within each "
        f"silo (a Gaussian process, a covariate relative to its silo), say so: local=[{site!r}]"
    )
