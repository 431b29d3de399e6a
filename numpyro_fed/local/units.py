r"""What is left out at a time when a model is asked to predict its own data: the unit.

Where there are no local latents, a row of a silo's observations. Where there are, all observations that share local
latents, for without them these would not be known either: the row of the silo's plate that holds the local (a child
with all visits, a county in long format), or the silo as a whole where its rows meet or a latent is the silo's. Their
likelihood is that of the silo's factor (:mod:`numpyro_fed.local.integrate`), the locals integrated out,

.. math:: \log p(y_i \mid z_G) = \log \int p(y_i, z_{Li} \mid z_G)\, dz_{Li}.

Given the globals units are independent, so several may be left out together: their logarithms add up.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.integrate import Factor
from numpyro_fed.model.layout import with_mask
from numpyro_fed.model.observations import counted
from numpyro_fed.model.rows import Components, connected, dims_of, num_components
from numpyro_fed.model.split_model import SplitModel

Array = jax.Array
SILO = "silo"  # everything that a silo has, left out at once


class Units(NamedTuple):
    """Which unit each observation of a silo belongs to."""

    parts: dict[str, Array]  # {term: int, in the shape of its log density}: components of local rows, then other rows
    components: int  # how many parts are components of local rows
    num_parts: int
    merged: Array | None = None  # (parts,): the unit of each, where several are left out together
    num_merged: int = 0

    @property
    def num(self) -> int:
        """Of units, at most; those without observations are none."""
        return self.num_parts if self.merged is None else self.num_merged

    def of(self, term: str) -> Array:
        """The unit of each element of a term."""
        return self.parts[term] if self.merged is None else self.merged[self.parts[term]]


def find_units(split: SplitModel, rows: str, by: str | None, data: SiloData, components: Components | None) -> Units:
    """The units of one silo.

    Args:
        rows: how terms find their local rows (:class:`numpyro_fed.local.bound.Weighting`); "none": there are none.
        by: None for the smallest that can be left out; "silo"; or an argument with a number for each row: what has the
            same number is left out together.
        components: of the local rows, in long format.
    """
    shapes = {name: term.shape for name, term in _shapes(split, data).items() if name in observed_terms(split)}
    own = 0 if rows == "none" else 1 if rows == "whole" else num_components(split, data.mask)
    starts: dict[tuple, int] = {}
    parts, number = {}, own
    for name, shape in shapes.items():
        index, key, size = _row_index(split, name, shape)
        if rows == "whole":
            parts[name] = jnp.zeros(shape, int)
            continue
        if rows == "aligned" and dims_of(split, name, split.groups[0]) is not None:
            parts[name] = index
            continue
        if key not in starts:
            starts[key], number = number, number + size
        parts[name] = starts[key] + index
        if rows == "indexed":
            assert components is not None
            parts[name] = jnp.where(components.terms[name] < own, components.terms[name], parts[name])
    found = Units(parts, own, number)
    return found if by is None else _merged(split, found, by, data)


def _merged(split: SplitModel, found: Units, by: str, data: SiloData) -> Units:
    """Units whose observations have the same number in an argument, and those that they meet in turn, as one."""
    if by == SILO:
        return found._replace(merged=jnp.zeros(found.num_parts, int), num_merged=1)
    array, axis = argument(split, by, data)
    rank = jnp.searchsorted(jnp.sort(array), array)  # of each row's number among the silo's own
    given = {}
    for name, ids in found.parts.items():
        dim = next(dim for one, dim in split.partition[name].axes if one == axis)
        each = jnp.repeat(rank, ids.shape[dim] // len(rank), total_repeat_length=ids.shape[dim])
        given[name] = found.num_parts + jnp.broadcast_to(each.reshape(each.shape + (1,) * (-dim - 1)), ids.shape)
    num = found.num_parts + len(rank)
    unit = connected({"own": found.parts, "given": given}, num)
    return found._replace(merged=unit[: found.num_parts], num_merged=num)


def argument(split: SplitModel, by: str, data: SiloData) -> tuple[Any, str]:
    """The silo's argument with a number for each row, and the axis of these; an error where it is none."""
    leaves = [leaf for leaf in split.spec.own if leaf.dtype is not None]
    known = {leaf.path: (array, leaf.axis) for leaf, array in zip(leaves, data.args, strict=True)}
    array, axis = known.get(by, (None, None))
    whole = [path for path, (one, on) in known.items() if on is not None and one.ndim == 1 and one.dtype.kind in "iu"]
    if array is None or by not in whole:
        raise ValueError(
            f"by={by!r} must be 'silo', or an argument of the silos with a whole number for each row"
            + (f" (there is {', '.join(map(repr, whole))})" if whole else " (there is none)")
        )
    assert axis is not None
    for name in observed_terms(split):
        if axis not in {one for one, _ in split.partition[name].axes}:
            raise ValueError(f"by={by!r} has a number for each row of {axis!r}, and site {name!r} lies along others")
    return array, axis


def observed_terms(split: SplitModel) -> tuple[str, ...]:
    """The silo's terms that hold observations; of sites that share discrete latents, the one term they have."""
    role = {site.name: site.role for site in split.partition.sites if not site.at_server}
    seen = lambda name: role.get(name) in ("observed", "factor")
    plain = [name for name in role if seen(name) and name not in split.enumeration.joined]
    summed = [one.name for one in split.enumeration.components if any(seen(factor.site) for factor in one.factors)]
    return (*plain, *summed)


def _shapes(split: SplitModel, data: SiloData) -> dict[str, Any]:
    zeros = split.zeros_local(data.mask)
    return jax.eval_shape(lambda: split.evaluate(jnp.zeros(split.dim), zeros, split.theta, data).terms)


def _row_index(split: SplitModel, name: str, shape: tuple[int, ...]) -> tuple[Array, tuple, int]:
    """Of each element of a term: its row, counted along the silo's own axes; these axes, and how many rows there are.

    Without such an axis all its elements are one row.
    """
    index, size, along = np.zeros(shape, int), 1, sorted(split.partition[name].axes)
    for _, dim in along:
        index = index * shape[dim] + np.arange(shape[dim]).reshape(-1, *(1,) * (-dim - 1))
        size *= shape[dim]
    return jnp.asarray(index), tuple((axis, shape[dim]) for axis, dim in along), size


def sizes(split: SplitModel, units: Units, data: SiloData) -> tuple[Array, Array]:
    """How many observations each unit has, and the place of its first: those of padding and of masks are none."""
    trace, joined = split.trace_at_zero(data), split.enumeration.joined
    count, first = jnp.zeros(units.num, int), jnp.full(units.num, np.iinfo(np.int32).max)
    start = 0
    for name in sorted(units.parts):
        ids, site = units.of(name), split.partition[name]
        ones = jnp.ones(ids.shape, bool) if name in joined else jnp.broadcast_to(counted(trace[name]), ids.shape)
        ones = with_mask(ones.astype(int), site, data.mask)
        place = jnp.where(ones > 0, start + jnp.arange(ids.size).reshape(ids.shape), np.iinfo(np.int32).max)
        count, first = count.at[ids].add(ones), first.at[ids].min(place)
        start += ids.size
    return count, first


def log_likelihoods(
    split: SplitModel, units: Units, factor: Factor, frame: Any, theta: dict[str, Array], data: SiloData
) -> Callable[[Array, Any], Array]:
    """``(z, nodes) -> log p(y_i | z)`` of every unit, (num,)."""
    own, parts = units.components, units.parts

    def rest(z: Array) -> Array:
        """Of what depends on no local: at any value of these."""
        terms = split.evaluate(z, frame.loc if own else {}, theta, data).terms
        total = jnp.zeros(units.num_parts)
        for name, part in parts.items():
            total = total.at[part].add(jnp.where(part >= own, terms[name], 0.0))
        return total

    def at(z: Array, nodes: Any) -> Array:
        total = rest(z) if units.num_parts > own else jnp.zeros(own)
        if own:
            assert factor.by_rows is not None, "locals are integrated"
            total = total.at[:own].set(factor.by_rows(z, frame, nodes)[:own])
        return total if units.merged is None else jnp.zeros(units.num).at[units.merged].add(total)

    return at
