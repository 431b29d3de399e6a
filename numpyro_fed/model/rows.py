"""Which log density belongs to which local row.

Importance weighting row by row (each child, county or document has its own weights) needs to know which terms of the
silo's log density depend on which local row; in long format (``alpha[county_idx]``) shapes do not tell. Derivatives
do: move every row of a group by 1, then each row by its own label; a term that depends on one row alone changes in the
ratio of that row's label. A second set of labels must agree. Rows that meet in a term are joined, and weights belong to
the connected components.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.data.padding import SiloData
from numpyro_fed.keys import by_place
from numpyro_fed.model.layout import Group
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import unforeseen

Array = jax.Array


class Components(NamedTuple):
    """Component of each local row and of each term's element, as ids in 0..num; ``num`` itself is 'no local row'."""

    rows: dict[str, Array]  # {group: int (rows,)}
    terms: dict[str, Array]  # {site: int, in the shape of its log density}
    separable: Array  # bool: every term depends on at most one row of each group


def num_components(split: SplitModel, mask: dict[str, Array]) -> int:
    return sum(group.num_rows(mask) for group in split.groups)


def find_components(split: SplitModel, data: SiloData, z: Array, theta: dict[str, Array]) -> Components:
    """The components of one silo, from forward-mode derivatives at a fixed point. Pure, can be vmapped over silos."""
    starts = dict(zip((g.name for g in split.groups), _offsets(split.groups, data.mask), strict=True))
    num = num_components(split, data.mask)
    point = {g.name: 1.2 * (by_place((g.num_rows(data.mask), g.size), 2 * i) - 0.5) for i, g in enumerate(split.groups)}

    def terms(z_local: dict) -> dict:
        return split.evaluate(z, z_local, theta, data).terms

    labels: dict[str, dict[str, Array]] = {}
    separable = jnp.ones((), bool)
    for i, group in enumerate(split.groups):
        rows = group.num_rows(data.mask)
        weights = jnp.asarray(np.random.default_rng(i).uniform(0.5, 1.5, group.size), point[group.name].dtype)
        second = 1 + by_place((rows,), 2 * i + 1)

        def move(label: Array, group: Group = group, weights: Array = weights) -> dict:
            tangent = {g.name: jnp.zeros_like(point[g.name]) for g in split.groups}
            tangent[group.name] = label[:, None] * weights
            return jax.jvp(terms, (point,), (tangent,))[1]

        index = jnp.arange(rows)
        moves = jax.vmap(move)(jnp.stack([jnp.ones(rows), (index + 1.0), second]))
        ones, by_label, by_second = ({s: t[k] for s, t in moves.items()} for k in range(3))
        labels[group.name] = {}
        for site, unit in ones.items():
            touched = (unit != 0) | (by_label[site] != 0) | (by_second[site] != 0)
            safe = jnp.where(unit != 0, unit, 1.0)
            row = jnp.clip(jnp.round(by_label[site] / safe).astype(int) - 1, 0, rows - 1)
            agrees = jnp.abs(by_second[site] / safe - second[row]) < 1e-3
            agrees &= jnp.abs(by_label[site] / safe - (row + 1)) < 1e-3 * (row + 1)
            separable &= jnp.all(jnp.where(touched, agrees & (unit != 0), True))
            labels[group.name][site] = jnp.where(touched, row + starts[group.name], num)
    component = connected(labels, num)
    by_row = {g.name: component[starts[g.name] : starts[g.name] + g.num_rows(data.mask)] for g in split.groups}
    by_term = {
        site: jnp.min(jnp.stack([jnp.append(component, num)[labels[g][site]] for g in labels]), axis=0)
        for site in next(iter(labels.values()))
    }
    return Components(by_row, by_term, separable)


def _offsets(groups: tuple[Group, ...], mask: dict[str, Array]) -> list[int]:
    return np.cumsum([0, *(group.num_rows(mask) for group in groups)])[:-1].tolist()


def connected(labels: dict[str, dict[str, Array]], num: int) -> Array:
    """The smallest id in each row's component: rows that meet in a term pass the smaller one on until nothing moves."""
    if len(labels) == 1:
        return jnp.arange(num)
    sites = next(iter(labels.values()))
    meetings = [jnp.stack([labels[g][site].reshape(-1) for g in labels]) for site in sites]

    def spread(component: Array) -> Array:
        for meeting in meetings:
            smallest = jnp.min(jnp.append(component, num)[meeting], axis=0)
            for rows in meeting:
                component = component.at[rows].min(smallest, mode="drop")
        return component

    def moved(carry: tuple) -> tuple:
        component, _ = carry
        new = spread(component)
        return new, jnp.any(new != component)

    return jax.lax.while_loop(lambda carry: carry[1], moved, (jnp.arange(num), jnp.ones((), bool)))[0]


def dims_of(split: SplitModel, site: str, group: Group) -> list[int] | None:
    """The dims of a site's log density along which the group's rows lie, or None when it has other axes."""
    along = sorted(split.partition[site].axes)
    return [dim for _, dim in along] if [axis for axis, _ in along] == [axis for axis, _ in group.axes] else None


def add_aligned(split: SplitModel, terms: dict[str, Array], by_row: Array, mask: dict[str, Array]) -> Array:
    """Terms less ``by_row``, summed by row, with one more entry for those of no row: (rows + 1,). For aligned silos."""
    group = split.groups[0]
    rows, rest = [], jnp.zeros(())
    for site, term in terms.items():
        dims = dims_of(split, site, group)
        if dims is not None:
            own = jnp.moveaxis(term, dims, range(len(dims))).reshape(group.num_rows(mask), -1)
            rows.append(jnp.sum(own, axis=1))
        else:
            rest = rest + jnp.sum(term)
    return jnp.append(sum(rows[1:], rows[0]) - by_row if rows else -by_row, rest)


def add_indexed(found: Components, terms: dict[str, Array], by_row: dict[str, Array], num: int) -> Array:
    """Terms and the guide's per-row log densities (subtracted) summed by component: (num + 1,)."""
    total = jnp.zeros(num + 1)
    for site, term in terms.items():
        total = total.at[found.terms[site]].add(term)
    for group, log_q in by_row.items():
        total = total.at[found.rows[group]].add(-log_q)
    return total


def components_of(split: SplitModel, data: SiloData) -> Components:
    """The components of one silo, found at a fixed point."""
    z = np.asarray(0.1 * np.random.default_rng(0).normal(size=split.dim), jnp.zeros(()).dtype)
    return find_components(split, data, *unforeseen((jnp.asarray(z), split.theta), data.mask))


def how_rows_lie(split: SplitModel, data: SiloData, found: Components) -> tuple[Array, Array, Array]:
    """Of one silo, whether every term meets one row of each group at most, whether every element of every term belongs
    to the row it stands at (no index is then needed to add terms up), and whether rows of several groups meet."""
    return found.separable, found.separable & _aligned(split, data, found), _joined(found.rows)


def _aligned(split: SplitModel, data: SiloData, found: Components) -> Array:
    if len(split.groups) != 1:
        return jnp.zeros((), bool)
    group, fine = split.groups[0], jnp.ones((), bool)
    num = group.num_rows(data.mask)
    for site, ids in found.terms.items():
        dims = dims_of(split, site, group)
        if dims is None:
            fine &= jnp.all(ids == num)
            continue
        if tuple(ids.shape[d] for d in dims) != group.row_shape(data.mask):
            return jnp.zeros((), bool)
        flat = jnp.moveaxis(ids, dims, range(len(dims))).reshape(num, -1)
        fine &= jnp.all((flat == jnp.arange(num)[:, None]) | (flat == num))
    return fine


def _joined(rows: dict[str, Array]) -> Array:
    """Whether rows of several groups share a component."""
    if len(rows) < 2:
        return jnp.zeros((), bool)
    ids = jnp.sort(jnp.concatenate(list(rows.values())))
    return jnp.any(ids[1:] == ids[:-1])
