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
belongs to is found by :func:`~numpyro_fed.model.discrete.owners`: the classes of counties are set to the bits of their
numbers, and each row's log density tells the bits of its county.

Masked elements (``handlers.mask``, ``obs_mask``) are not there: their values weigh 1/K each, so that they sum to one.
(NumPyro's own enumeration counts log K for each.) Scales multiply each site's log density inside the sum, as in
NumPyro.
"""

from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import NamedTuple

import jax
import numpy as np

from numpyro_fed.model.partition_table import Partition, Site
from numpyro_fed.model.provenance import provenance
from numpyro_fed.model.trace import PartitionError

Array = jax.Array
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
    lengths = part.lengths(part.reference)
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
