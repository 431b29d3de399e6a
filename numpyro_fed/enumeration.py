r"""Discrete local latents, summed out exactly inside the silo.

A discrete latent :math:`c` of a silo (a row's mixture component, a county's class) has no place in an unconstrained
vector. It is summed out instead: where rows :math:`i` are independent given the rest,

.. math::

    \log p(y, z_L \mid z_G) = \sum_i \log \sum_{c} p(c \mid z_G, z_{Li}) \; p(y_i \mid c, z_G, z_{Li}).

The model is evaluated under ``jax.vmap`` over the values of each discrete site, all rows at the same value: since a log
density of row i depends on the discrete latents of row i alone, this gives its table over their values. (The model sees
arrays of ordinary shapes, so it need not be written for enumeration; what does not depend on a discrete site is
computed once.) Tables that share a site are added and summed out, one site after the other, the deepest plates first;
what is left is one term per row. Kept on the way, the same tables give exact draws of the discrete sites.

The assumption is checked when a split is certified: at drawn discrete values, different in every row, the tables must
add up to NumPyro's own log density there.

In long format (``means[kind[county]]``) the log densities have other rows than the discrete site. Which county a row
belongs to is found by :func:`owners`: the classes of counties are set to the bits of their numbers, and each row's log
density tells the bits of its county.

Masked elements (``handlers.mask``, ``obs_mask``) are not there: their values weigh 1/K each, so that they sum to one.
(NumPyro's own enumeration counts log K for each.) Scales multiply each site's log density inside the sum, as in
NumPyro.
"""

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_fed.keys import digest
from numpyro_fed.partition import Partition, Site
from numpyro_fed.tracing import PartitionError, provenance

Array = Any
LIMIT = 100_000  # entries of the largest joint table, per row

# What an axis of a log density is: (own axis, its occurrence, rows per element) or ("", dim, size)
Label = tuple[str, int, Fraction]


class Variable(NamedTuple):
    """A discrete site that is summed out."""

    name: str
    support: tuple[int, ...]
    cells: frozenset[Label]  # the axes along which it has independent elements


class Factor(NamedTuple):
    """A log density that depends on discrete sites, as a table over their values."""

    site: str
    variables: tuple[str, ...]  # the table's leading axes
    labels: tuple[Label | None, ...]  # its other axes; None has length one
    owner: str = ""  # in long format: the variable whose element each log density has to find


class Component(NamedTuple):
    """Discrete sites that meet in log densities, and how they are summed out."""

    name: str  # the site that has the axes of the term that is left
    order: tuple[str, ...]  # of elimination
    factors: tuple[Factor, ...]
    axes: tuple[Label | None, ...]  # of all tables, once placed; the term's are the last ``rank``
    rank: int


class Enumeration(NamedTuple):
    """How a model's discrete sites are summed out. Static; found once, from shapes."""

    variables: dict[str, Variable]
    components: tuple[Component, ...]
    reads: dict[str, tuple[str, ...]]  # the variables that each output of a run depends on
    drawn: frozenset[str]  # deterministic sites that depend on a variable

    @property
    def joined(self) -> frozenset[str]:
        """Sites whose log densities are part of a component's term."""
        return frozenset(factor.site for component in self.components for factor in component.factors)

    @property
    def whole(self) -> dict[str, str]:
        """``{own axis: variable}`` where all rows of the axis add up before the variable is summed out.

        So it is in long format, and for a latent that a silo has once: a part of these rows says nothing about the
        whole sum, and minibatches of them would be biased.
        """
        out: dict[str, str] = {}
        for component in self.components:
            kept = {label[0] for label in self.variables[component.order[-1]].cells}
            axes = {label[0] for factor in component.factors for label in factor.labels if label}
            out |= {axis: component.order[-1] for axis in sorted(axes - kept) if axis}
        return out


NOTHING = Enumeration({}, (), {}, frozenset())
Run = Callable[[dict[str, Array]], dict[str, Array]]  # {variable: value} -> {output: array}
Mask = Mapping[str, Array]  # {own axis: which rows are real}


# --- the plan -------------------------------------------------------------------------------------------------------


def plan(part: Partition, run: Run, outputs: Callable[[dict[str, Array]], dict[str, Array]]) -> Enumeration:
    """How to sum out the discrete local sites of a partition.

    ``run`` gives log densities, ``outputs`` the values of deterministic sites, both for given discrete values.
    """
    sites = [site for site in part.sites if site.role == "enumerated"]
    if not sites:
        return NOTHING
    start = {site.name: jax.ShapeDtypeStruct((), int) for site in sites}
    found = provenance(lambda **chosen: run(chosen), start)
    # a uniform distribution's log density does not depend on its value, but it is one of each value
    reads = {name: tuple(v for v in start if v in sources or v == name) for name, sources in found.items()}
    drawn = provenance(lambda **chosen: outputs(chosen), start)
    lengths = {axis.name: axis.lengths[part.reference] for axis in part.axes}
    variables = {
        site.name: Variable(site.name, tuple(site.shape.support or ()), frozenset(filter(None, labels(site, lengths))))
        for site in sites
    }
    factors = [
        _factor(site, labels(site, lengths), variables, reads[site.name])
        for site in part.sites
        if reads.get(site.name) and not site.at_server
    ]
    components = tuple(_component(part, group, variables) for group in _connected(factors))
    return Enumeration(variables, components, reads, frozenset(name for name, sources in drawn.items() if sources))


def labels(site: Site, lengths: Mapping[str, int]) -> tuple[Label | None, ...]:
    """What the axes of a site's log density are."""
    shape = site.shape.log_prob or ()
    found: list[Label | None] = []
    for dim in range(-len(shape), 0):
        own = [axis for axis, at in site.axes if at == dim]
        if own:
            occurrence = sum(label is not None and label[0] == own[0] for label in found)
            found.append((own[0], occurrence, Fraction(shape[dim], lengths[own[0]])))
        else:
            found.append(("", dim, Fraction(shape[dim])) if shape[dim] != 1 else None)
    return tuple(found)


def _factor(
    site: Site, own: tuple[Label | None, ...], variables: dict[str, Variable], reads: tuple[str, ...]
) -> Factor:
    apart = [name for name in reads if not variables[name].cells <= set(own)]
    if not apart:
        return Factor(site.name, reads, own)
    (label, *more) = variables[apart[0]].cells
    if len(reads) > 1 or more or not label[0]:
        raise PartitionError(
            f"site {site.name!r} (axes {_told(own)}) depends on the discrete latent {apart[0]!r}, which has other axes "
            f"({_told(variables[apart[0]].cells)})"
            + (f", and on {', '.join(name for name in reads if name != apart[0])}" if len(reads) > 1 else "")
            + ": such latents cannot be summed out row by row. Give the discrete latents of a site the site's own rows "
            "(the same plates at the same dims), or sum them out in the model with a logsumexp."
        )
    return Factor(site.name, reads, own, apart[0])


def _told(axes: Iterable[Label | None]) -> str:
    return ", ".join(label[0] or f"{label[2]} at dim {label[1]}" for label in axes if label) or "none"


def _connected(factors: list[Factor]) -> list[list[Factor]]:
    """Factors that share variables, directly or through others."""
    groups: list[list[Factor]] = []
    for factor in factors:
        meets = lambda group, factor=factor: any(set(one.variables) & set(factor.variables) for one in group)
        joined = [one for group in groups if meets(group) for one in group]
        groups = [group for group in groups if not meets(group)] + [[*joined, factor]]
    return groups


def _component(part: Partition, factors: list[Factor], variables: dict[str, Variable]) -> Component:
    order = _order(factors, variables)
    root = variables[order[-1]]
    alike = [f for f in factors if set(filter(None, f.labels)) == root.cells and not f.owner]
    observed = [f for f in alike if part[f.site].role in ("observed", "factor")]
    anchor = (observed or [f for f in alike if f.site == root.name])[0]
    more = dict.fromkeys(label for f in factors if not f.owner for label in f.labels if label)
    axes = (*(label for label in more if label not in anchor.labels), *anchor.labels)
    return Component(anchor.site, order, tuple(factors), axes, len(anchor.labels))


def _order(factors: list[Factor], variables: dict[str, Variable]) -> tuple[str, ...]:
    """Deepest plates first; among those that may go, the one whose joint table is smallest."""
    scopes = [set(factor.variables) for factor in factors]
    left = dict.fromkeys(name for factor in factors for name in factor.variables)
    order = []
    while left:
        joint = {name: set().union(*(scope for scope in scopes if name in scope)) for name in left}
        ready = [name for name in left if all(variables[o].cells <= variables[name].cells for o in joint[name])]
        size = lambda name, joint=joint: int(np.prod([len(variables[other].support) for other in joint[name]]))
        if not ready:
            raise PartitionError(
                f"the discrete latents {', '.join(left)} lie in crossed plates and meet in one site: their sum has a "
                "term for every combination of rows. Sum out all but one in the model, or nest their plates."
            )
        best = min(ready, key=size)
        if size(best) > LIMIT:
            raise PartitionError(
                f"the discrete latents {', '.join(sorted(joint[best]))} meet in one sum of {size(best)} terms per row "
                f"(at most {LIMIT}): let sites depend on fewer of them at a time."
            )
        scopes = [scope for scope in scopes if best not in scope] + [joint[best] - {best}]
        del left[best]
        order.append(best)
    return tuple(order)


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
    """The component's tables, ready to be added. ``probe`` is ``run`` at a fixed random point: see :func:`owners`."""
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
    go from 0 to k has that bit set. Of the values k the one that moves it most is read. A log density that none of them
    moves depends on no element, and may be given to any.
    """
    number = int(np.prod(shape))
    if len(variable.support) == 1:
        return jnp.zeros(jax.eval_shape(probe, {}).get(site).shape, int)
    bits = max(1, (number - 1).bit_length())
    pattern = (np.arange(number) >> np.arange(bits)[:, None] & 1).astype(bool).reshape(bits, *shape)
    support = jnp.asarray(variable.support)
    at = lambda value: jax.lax.stop_gradient(probe({variable.name: value})[site])
    base = at(support[0])
    moved = jax.vmap(at)(support[1:]) - base  # (K - 1, ...)
    assigned = jnp.where(pattern, support[1:].reshape((-1, 1) + (1,) * len(shape)), support[0])
    bitwise = jax.vmap(jax.vmap(at))(assigned) - base  # (K - 1, bits, ...)
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
