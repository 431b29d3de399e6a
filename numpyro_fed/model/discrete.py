"""Tables over discrete values: built, added, summed out, and drawn from."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_fed.keys import digest
from numpyro_fed.model.enumeration import Component, Enumeration, Factor, Label, Run, Variable

Array = jax.Array


Mask = Mapping[str, Array]  # {own axis: which rows are real}


# --- tables ---------------------------------------------------------------------------------------------------------


def tables(enumeration: Enumeration, run: Run) -> dict[str, Array]:
    """Every output of ``run`` for all values of the variables it depends on, which become its leading axes."""

    def over(names: tuple[str, ...], chosen: dict[str, Array]) -> dict[str, Array]:
        if not names:
            return run(chosen)
        name, rest = names[0], names[1:]
        axes = {output: 0 if name in read else None for output, read in enumeration.reads.items()}
        values = jnp.asarray(enumeration.variables[name].support)
        return jax.vmap(lambda value: over(rest, chosen | {name: value}), out_axes=axes)(values)

    return over(tuple(enumeration.variables), {})


class Placed(NamedTuple):
    """A component's table with an axis for each variable (in the component's order) and each of the component's axes;
    those it does not have are of length one."""

    variables: frozenset[str]
    labels: frozenset[Label]
    table: Array


def placed(
    enumeration: Enumeration, component: Component, found: Mapping[str, Array], mask: Mask, probe: Run | None
) -> list[Placed]:
    """The component's tables, ready to be added. ``probe`` is ``run`` at a few fixed points: see :func:`owners`."""
    out = []
    for factor in component.factors:
        table, own = found[factor.site], factor.labels
        if factor.owner:
            variable = enumeration.variables[factor.owner]
            assert probe is not None
            table = _gathered(table, own, variable, found[variable.name].shape[1:], mask, probe, factor.site)
            own = next(one.labels for one in component.factors if one.site == variable.name)
        table = _place(component, factor, own, table)
        out.append(Placed(frozenset(factor.variables), frozenset(filter(None, own)), table))
    return out


def _place(component: Component, factor: Factor, own: tuple[Label | None, ...], table: Array) -> Array:
    lead = len(factor.variables)
    variables = [name for name in component.order if name in factor.variables]
    axes = [label for label in component.axes if label is not None and label in own]
    order = [factor.variables.index(name) for name in variables] + [lead + own.index(label) for label in axes]
    rest = [i for i in range(table.ndim) if i not in order]  # of length one
    sizes: dict[Any, int] = dict(zip([*variables, *axes], (table.shape[i] for i in order), strict=True))
    shape = [sizes.get(key, 1) for key in (*component.order, *component.axes)]
    return jnp.transpose(table, [*order, *rest]).reshape(shape)


def resized(mask: Array, size: int) -> Array:
    """The mask of an axis for a site with ``size`` elements along it (a reshape makes several rows one)."""
    length = mask.shape[-1]
    if size == length:
        return mask
    return mask[:: length // size] if size < length else jnp.repeat(mask, size // length)


def _only_real(component: Component, table: Array, along: Iterable[Label], mask: Mask) -> Array:
    """Zero in the padded rows of the given axes."""
    lead = len(component.order)
    for label in along:
        if label[0]:
            axis = lead + component.axes.index(label)
            real = resized(mask[label[0]], table.shape[axis])
            table = jnp.where(real.reshape(real.shape + (1,) * (table.ndim - axis - 1)), table, 0)
    return table


# --- sums and draws -------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    variable: str
    joint: Array  # log density of the variable and of those that are summed out later, up to a constant


def eliminate(
    enumeration: Enumeration, component: Component, found: list[Placed], mask: Mask
) -> tuple[Array, list[Step]]:
    """The component's term, one log density per row, and the tables on the way. Padded rows are not yet masked."""
    steps = []
    lead = len(component.order)
    for axis, name in enumerate(component.order):
        cells = enumeration.variables[name].cells
        mine = [one for one in found if name in one.variables]
        joint: Any = 0.0
        for one in mine:  # log densities of a deeper plate add up
            extra = one.labels - cells
            table = _only_real(component, one.table, extra, mask)
            joint = joint + jnp.sum(table, tuple(lead + component.axes.index(label) for label in extra), keepdims=True)
        steps.append(Step(name, joint))
        others = frozenset().union(*(one.variables for one in mine)) - {name}
        rest = [one for one in found if name not in one.variables]
        found = [*rest, Placed(others, cells, logsumexp(joint, axis=axis, keepdims=True))]
    (last,) = found
    return last.table.reshape(last.table.shape[last.table.ndim - component.rank :]), steps


def draw(
    enumeration: Enumeration, component: Component, steps: list[Step], gumbel: Callable[[str, tuple[int, ...]], Array]
) -> dict[str, Array]:
    """Positions in the supports, drawn from the discrete sites' joint posterior; the last to go is drawn first.

    ``gumbel(site, shape)`` is noise, with rows first, so that padding does not change the draws of real rows.
    """
    drawn: dict[str, Array] = {}
    for name, joint in reversed(steps):
        axis, support = component.order.index(name), enumeration.variables[name].support
        logits = _at(component, joint, drawn)
        noise = gumbel(name, (*logits.shape[len(component.order) :], len(support)))
        noise = jnp.moveaxis(noise, -1, 0).reshape(logits.shape)
        drawn[name] = jnp.argmax(logits + noise, axis=axis, keepdims=True)
    return drawn


def gumbel(key: Array) -> Callable[[str, tuple[int, ...]], Array]:
    """Noise for `draw`."""
    return lambda name, shape: jax.random.gumbel(jax.random.fold_in(key, digest(name)), shape)


def _at(component: Component, table: Array, positions: Mapping[str, Array]) -> Array:
    """The table at given values of variables."""
    for name, position in positions.items():
        axis = component.order.index(name)
        if table.shape[axis] > 1:
            rows = np.broadcast_shapes(table.shape[len(component.order) :], position.shape[len(component.order) :])
            shape = (*table.shape[: len(component.order)], *rows)
            index = jnp.broadcast_to(position, (*(1 if i == axis else n for i, n in enumerate(shape)),))
            table = jnp.take_along_axis(jnp.broadcast_to(table, shape), index, axis=axis)
    return table


def at(component: Component, found: list[Placed], positions: Mapping[str, Array], mask: Mask) -> dict[str, Array]:
    """``{site: log densities}`` of the component at given discrete values, as NumPyro has them without enumeration."""
    out = {}
    for factor, one in zip(component.factors, found, strict=True):
        table = _at(component, one.table, {name: positions[name] for name in one.variables})
        out[factor.site] = _only_real(component, table, one.labels, mask)
    return out


def values(enumeration: Enumeration, component: Component, positions: Mapping[str, Array]) -> dict[str, Array]:
    """Positions in the supports as values of the sites, in the sites' own shapes."""
    out = {}
    for name, position in positions.items():
        own = next(factor.labels for factor in component.factors if factor.site == name)
        rows = position.reshape(position.shape[len(component.order) :])
        there = [label for label in component.axes if label is not None and label in own]
        kept = rows.reshape([n for n, label in zip(rows.shape, component.axes, strict=True) if label in there])
        order = [there.index(label) for label in own if label is not None]
        kept = jnp.transpose(kept, order)
        sizes = iter(kept.shape)
        kept = kept.reshape([1 if label is None else next(sizes) for label in own])
        out[name] = jnp.asarray(enumeration.variables[name].support)[kept]
    return out


# --- long format ----------------------------------------------------------------------------------------------------


def owners(variable: Variable, shape: tuple[int, ...], probe: Run, site: str) -> Array:
    """For every log density of a site, the element of ``variable`` that it depends on.

    Elements are set to value 0 or k by the bits of their numbers; a log density that moves as it does when all elements
    go from 0 to k has that bit set. Of the values k, and of the points of ``probe`` (leading axes of its outputs), the
    ones that move it most are read. A log density that none of them moves depends on no element, and may be given to
    any.
    """
    number = int(np.prod(shape))
    if len(variable.support) == 1:
        return jnp.zeros(jax.eval_shape(probe, {}).get(site).shape[1:], int)
    bits = max(1, (number - 1).bit_length())
    pattern = (np.arange(number) >> np.arange(bits)[:, None] & 1).astype(bool).reshape(bits, *shape)
    support = jnp.asarray(variable.support)
    at = lambda value: jax.lax.stop_gradient(probe({variable.name: value})[site])
    base = at(support[0])  # (points, ...)
    together = lambda leaf: leaf.reshape(-1, *leaf.shape[2:])
    moved = together(jax.vmap(at)(support[1:]) - base)  # ((K - 1) points, ...)
    assigned = jnp.where(pattern, support[1:].reshape((-1, 1) + (1,) * len(shape)), support[0])
    bitwise = together(jnp.moveaxis(jax.vmap(jax.vmap(at))(assigned) - base, 1, 2))  # ((K - 1) points, bits, ...)
    strength = jnp.where(jnp.isfinite(moved), jnp.abs(moved), 0.0)
    best = jnp.argmax(strength, axis=0)[None]
    moved = jnp.take_along_axis(moved, best, axis=0)
    bitwise = jnp.take_along_axis(bitwise, best[:, None], axis=0)[0]
    is_set = jnp.abs(bitwise - moved) < jnp.abs(bitwise)
    weight = 2 ** np.arange(bits).reshape((-1,) + (1,) * (bitwise.ndim - 1))
    return jnp.minimum(jnp.sum(jnp.where(is_set, weight, 0), axis=0), number - 1)


def _gathered(
    table: Array,
    own: tuple[Label | None, ...],
    variable: Variable,
    shape: tuple[int, ...],
    mask: Mask,
    probe: Run,
    site: str,
) -> Array:
    """A long-format table, (K, rows), summed over the rows of each element: (K, *shape)."""
    for axis, label in enumerate(own):
        if label is not None and label[0]:
            real = resized(mask[label[0]], table.shape[1 + axis])
            table = jnp.where(real.reshape(real.shape + (1,) * (len(own) - axis - 1)), table, 0)
    index = owners(variable, shape, probe, site).reshape(-1)
    number = int(np.prod(shape))
    rows = table.reshape(table.shape[0], -1)
    return jax.vmap(lambda one: jax.ops.segment_sum(one, index, number))(rows).reshape(-1, *shape)
