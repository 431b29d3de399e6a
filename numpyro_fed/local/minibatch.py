r"""Minibatches inside a silo.

A step looks at ``size`` rows of the silo's own axis, drawn without replacement; their terms count ``n / size`` times,
so value and gradients are unbiased for the whole silo's. Only these rows' local parameters and optimiser state move. In
long format whole groups are drawn (a county with its homes): a local row must meet all its observations, or its own
density would be counted against a part of them.

A silo with fewer rows than a batch uses all of them. Padded rows are never drawn.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.bound import Batch
from numpyro_fed.model.observations import silo_terms
from numpyro_fed.model.rows import Components
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.precision import unforeseen

Array = jax.Array


class Batching(NamedTuple):
    """What a minibatch takes. Static: part of the compiled program."""

    axis: str  # the axis whose rows are taken
    size: int  # rows, or groups, in a batch
    rows: int  # elements of the axis for each row drawn (a reshape makes several elements one row)
    limit: int = 0  # long format: room for the observations of so many groups; 0 when rows are drawn directly


class Minibatch(NamedTuple):
    """A minibatch: its data, its components, how it counts, and which local rows move."""

    data: SiloData
    components: Components | None
    batch: Batch
    place: Array | None  # (size,) local rows in the batch; the number of rows where there is none
    moved: dict[str, Array] | None  # long format: {group: bool (rows,)}
    where: Array  # bool: which elements of the axis are in the batch


def draw(key: Array, total: Array, size: int) -> Array:
    """``size`` of the numbers 0 .. total - 1, each set equally likely (Floyd's algorithm); all, if there are fewer.

    Missing ones are ``total``, at the end.

    >>> sorted(draw(jax.random.key(0), jnp.array(5), 5).tolist())
    [0, 1, 2, 3, 4]
    >>> draw(jax.random.key(0), jnp.array(2), 4).tolist()[2:]
    [2, 2]
    """
    total = jnp.asarray(total, jnp.int32)
    number = jnp.minimum(total, size)
    uniform = jax.random.uniform(key, (size,))

    def add(i: Array, chosen: Array) -> Array:
        last = total - number + i.astype(jnp.int32)
        new = jnp.minimum((uniform[i] * (last + 1)).astype(jnp.int32), last)
        return chosen.at[i].set(jnp.where(jnp.any(chosen == new), last, new))

    chosen = jax.lax.fori_loop(0, number, add, jnp.full(size, -1, jnp.int32))
    return jnp.where(jnp.arange(size) < number, chosen, total)


def lies(split: SplitModel) -> tuple[str, int, bool]:
    """The axis whose rows are taken, its elements for each row, and whether rows are drawn directly (else by groups).

    Raises:
        ValueError: when rows of this model cannot be taken apart; the message says why.
    """
    observed = silo_terms(split, "observed", "factor")
    units = sorted({axis for site in observed for axis, _ in site.axes})
    if len(units) != 1:
        what = "no observations along an axis of the silos" if not units else f"observations along {', '.join(units)}"
        raise ValueError(f"batch_size= needs observations along one axis of the silos; this model has {what}")
    (unit,) = units
    if unit in split.enumeration.whole:
        raise ValueError(
            f"batch_size=: the discrete latent {split.enumeration.whole[unit]!r} is summed out over all rows of "
            f"{unit!r} together. Leave batch_size= out."
        )
    others = [axis for site in observed for axis, _ in site.value_axes if axis not in dict(site.axes)]
    if others:
        raise ValueError(f"batch_size=: site {observed[0].name!r} has all rows of a silo in one event")
    names = {axis for group in split.groups for axis, _ in group.axes}
    if not names <= {unit}:
        return unit, 1, False
    if any(len(group.axes) > 1 for group in split.groups):
        raise ValueError(f"batch_size=: local latents lie along {unit!r} twice")
    ratios = {ratio for group in split.groups for _, ratio in group.axes}
    if len(ratios) > 1 or any(ratio > 1 for ratio in ratios):
        raise ValueError("batch_size=: local latents have rows of several kinds; leave batch_size= out")
    return unit, int(1 / ratios.pop()) if ratios else 1, True


def plan(split: SplitModel, survey: Survey, rows: str, size: int) -> Batching:
    """How minibatches of ``size`` rows are taken from these silos, or an error that says why they cannot be."""
    unit, elements, direct = lies(split)
    if not direct and rows != "indexed":
        names = {axis for group in split.groups for axis, _ in group.axes}
        raise ValueError(
            f"batch_size=: local latents lie along {', '.join(sorted(names))} and observations along {unit}, and terms "
            "meet several rows at once, so rows cannot be taken apart. Leave batch_size= out."
        )
    if not direct and survey.room < 0:
        raise ValueError(
            f"batch_size=: an observation along {unit!r} belongs to no group: every one must meet a local latent. "
            "Leave batch_size= out."
        )
    if survey.mixed:
        raise ValueError(
            f"batch_size=: the log densities of site {survey.mixed!r} in some rows change when other rows are left out "
            "(a difference between rows, a mean over them). Leave batch_size= out."
        )
    return Batching(unit, size, elements, 0 if direct else survey.room)


def rows_apart(
    split: SplitModel, size: int, data: SiloData, found: Components | None
) -> tuple[Array, dict[str, Array]]:
    """What a silo tells of its minibatches: how many observations ``size`` groups have at most (-1: one belongs to no
    group), and by site whether rows have the same log densities in a minibatch as among all rows."""
    try:
        unit, elements, direct = lies(split)
    except ValueError:  # the method will say so
        return jnp.zeros((), jnp.int32), {}
    room = jnp.zeros((), jnp.int32)
    if not direct:
        assert found is not None
        number = sum(rows.shape[-1] for rows in found.rows.values())
        component = jnp.where(data.mask[unit], _row_component(split, unit, found), number + 1)
        counts = jnp.zeros(number + 2, jnp.int32).at[component].add(1)[:number]
        most = jnp.sum(jnp.sort(counts)[::-1][: min(size, number)])
        room = jnp.where(jnp.any(component == number), -1, most).astype(jnp.int32)
    batching = Batching(unit, size, elements, 0 if direct else data.mask[unit].shape[-1])
    return room, _same_in_a_batch(split, batching, data, found)


def _row_component(split: SplitModel, unit: str, found: Components) -> Array:
    """The component of each element of the observations' axis."""
    for site in split.partition.sites:
        if site.role in ("observed", "factor") and not site.at_server and site.name in found.terms:
            (dim,) = (dim for axis, dim in site.axes if axis == unit)
            ids = jnp.moveaxis(found.terms[site.name], dim, 0)
            return jnp.min(ids.reshape(ids.shape[0], -1), axis=1)
    raise AssertionError("observations lie along the axis")


def _same_in_a_batch(
    split: SplitModel, batching: Batching, data: SiloData, found: Components | None, seed: int = 0
) -> dict[str, Array]:
    """By site, at a random point and for a random minibatch.

    A row that looks at others differs, as a difference in time or a mean over rows does.
    """
    draws = np.random.default_rng(seed)
    dtype = jnp.zeros(()).dtype
    z = jnp.asarray(draws.normal(scale=0.3, size=split.dim), dtype)
    rows = {
        g.name: jnp.asarray(draws.normal(scale=0.3, size=(g.num_rows(data.mask), g.size)), dtype) for g in split.groups
    }
    z, rows = unforeseen((z, rows), data.mask)
    drawn = tuple(group.name for group in split.groups if group.axes)
    taken = take(split, batching, jax.random.key(seed), data, found)
    whole = split.evaluate(z, rows, split.theta, data).terms
    part = split.evaluate(z, gather(rows, taken, drawn), split.theta, taken.data).terms
    same = {}
    for site, term in whole.items():
        dims = [dim for axis, dim in split.partition[site].axes if axis == batching.axis]
        if dims:
            chosen = taken.where if term.shape[dims[0]] == taken.where.shape[0] else taken.where[:: batching.rows]
            sums = jnp.sum(jnp.where(chosen.reshape(-1, *(1,) * (-dims[0] - 1)), term, 0.0)), jnp.sum(part[site])
            same[site] = ~jnp.isfinite(sums[0]) | jnp.isclose(sums[0], sums[1], rtol=1e-3, atol=1e-3)
    return same


def take(split: SplitModel, batching: Batching, key: Array, data: SiloData, found: Components | None) -> Minibatch:
    """A random minibatch of one silo."""
    if batching.limit:
        return _take_groups(split, batching, key, data, found)
    valid = data.mask[batching.axis]
    total = jnp.sum(valid) // batching.rows
    chosen = draw(key, total, batching.size)
    return take_rows(split, batching, data, found, chosen, total)


def with_replacement(split: SplitModel, batching: Batching, key: Array, data: SiloData) -> Minibatch:
    """Rows drawn independently: the noise of a minibatch is then that of independent observations in any silo."""
    total = jnp.sum(data.mask[batching.axis]) // batching.rows
    chosen = jax.random.randint(key, (batching.size,), 0, total)
    return take_rows(split, batching, data, None, chosen, total)


def log_silo(split: SplitModel, z: Array, theta: dict, taken: Minibatch) -> Array:
    """The silo's term from a minibatch, of a model without local latents: right on average."""
    batch, total = taken.batch, jnp.zeros(())
    for name, term in split.evaluate(z, {}, theta, taken.data).terms.items():
        along = any(axis == batch.axis for axis, _ in split.partition[name].axes)
        total = total + (batch.factor * jnp.sum(term) if along else jnp.sum(term))
    return total


def take_rows(
    split: SplitModel, batching: Batching, data: SiloData, found: Components | None, chosen: Array, total: Array
) -> Minibatch:
    """The minibatch of the given rows; a row past the last is none."""
    inside = chosen < total
    element = (jnp.where(inside, chosen, 0)[:, None] * batching.rows + jnp.arange(batching.rows)).reshape(-1)
    real = jnp.repeat(inside, batching.rows) if batching.rows > 1 else inside
    factor = total / jnp.sum(inside)
    count = data.mask[batching.axis].shape[-1] // batching.rows
    place = jnp.where(inside, chosen, count)
    where = (
        jnp.zeros(data.mask[batching.axis].shape, bool)
        .at[jnp.where(real, element, data.mask[batching.axis].shape[-1])]
        .set(True, mode="drop")
    )
    rows = _gathered(split, batching.axis, data, element, real)
    return Minibatch(rows, found, Batch(batching.axis, factor), place, None, where)


def _gathered(split: SplitModel, axis: str, data: SiloData, element: Array, real: Array) -> SiloData:
    arrays = [leaf for leaf in split.spec.own if leaf.dtype is not None]
    args = tuple(array[element] if leaf.axis == axis else array for leaf, array in zip(arrays, data.args, strict=True))
    return SiloData(args, {**data.mask, axis: real}, data.shared)


def _take_groups(
    split: SplitModel, batching: Batching, key: Array, data: SiloData, found: Components | None
) -> Minibatch:
    assert found is not None
    number = sum(rows.shape[0] for rows in found.rows.values())
    # a component is known by its smallest row: those of real rows
    real_rows = jnp.concatenate([split.row_mask(group, data.mask) for group in split.groups])
    component = jnp.concatenate([found.rows[group.name] for group in split.groups])
    is_head = jnp.zeros(number + 1, bool).at[jnp.where(real_rows, component, number)].set(True)[:-1]
    total = jnp.sum(is_head)
    order = jnp.cumsum(is_head) - 1  # rank of each component among the real ones
    ranks = draw(key, total, batching.size)
    taken = jnp.zeros(number + 1, bool).at[jnp.minimum(ranks, number)].set(True).at[number].set(False)
    chosen = is_head & taken[jnp.clip(order, 0, number)]
    return take_groups(split, batching, data, found, chosen, total)


def take_groups(
    split: SplitModel, batching: Batching, data: SiloData, found: Components, chosen: Array, total: Array
) -> Minibatch:
    """The minibatch of the chosen components, bool (components,)."""
    of_row = _row_component(split, batching.axis, found)
    wanted = jnp.append(chosen, False)[jnp.minimum(of_row, chosen.shape[0])] & data.mask[batching.axis]
    size = wanted.shape[0]
    element = jnp.nonzero(wanted, size=batching.limit, fill_value=size)[0]
    real = element < size
    element = jnp.where(real, element, 0)
    terms = {}
    for site, ids in found.terms.items():
        dims = [dim for axis, dim in split.partition[site].axes if axis == batching.axis]
        terms[site] = jnp.take(ids, element, axis=dims[0]) if dims else ids
    factor = total / jnp.maximum(jnp.sum(chosen), 1)
    moved = {group: jnp.append(chosen, False)[rows] for group, rows in found.rows.items()}
    batch = Batch(batching.axis, factor, chosen)
    rows = _gathered(split, batching.axis, data, element, real)
    return Minibatch(rows, found._replace(terms=terms), batch, None, moved, wanted)


# --- local parameters of the rows in a batch ------------------------------------------------------------------------


def gather(tree: Any, taken: Minibatch, groups: tuple[str, ...]) -> Any:
    """The rows in the batch, of a dict over groups; other groups whole."""
    if taken.place is None:
        return tree
    rows = lambda leaf: jnp.take(leaf, taken.place, axis=0, mode="clip")
    return {name: jax.tree.map(rows, value) if name in groups else value for name, value in tree.items()}


def scatter(old: Any, new: Any, taken: Minibatch, groups: tuple[str, ...]) -> Any:
    """Put the batch's rows back; rows that are not in it stay, bit for bit."""

    def put(name: str) -> Any:
        if name not in groups:
            return new[name]
        if taken.place is not None:
            return jax.tree.map(lambda a, b: a.at[taken.place].set(b, mode="drop"), old[name], new[name])
        assert taken.moved is not None
        where = lambda leaf: taken.moved[name].reshape((-1,) + (1,) * (leaf.ndim - 1))
        return jax.tree.map(lambda a, b: jnp.where(where(a), b, a), old[name], new[name])

    return {name: put(name) for name in old}
