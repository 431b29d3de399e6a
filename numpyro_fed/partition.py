"""Which site lives where.

The model is traced on shapes, once as it is and once with the leading axis of a group of arguments doubled. Plates and
log densities that double with it belong to that axis. An axis is the silo's own when its length differs between silos
or when observations lie along it; latents along such an axis are local, all others are global. Where the shapes cannot
tell, :func:`partition` asks.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_fed.silos import Silos, leaves
from numpyro_fed.tracing import (
    Dependence,
    Model,
    PartitionError,
    SiteShape,
    Tracing,
    abstract,
    dependence,
    growth,
    trace_shapes,
    trace_silo,
)


class Axis(NamedTuple):
    """A silo's own axis: rows of data, groups of rows. Its length may differ between silos."""

    name: str
    arguments: tuple[str, ...]  # paths of the arguments (arrays by their leading axis, ints by their value)
    plates: tuple[str, ...]
    lengths: dict[str, int]  # by silo


class Site(NamedTuple):
    """Where a site lives. Dims are counted from the right, of the log density and of the value."""

    name: str
    role: str  # global, local, observed, factor, deterministic, param, constant
    at_server: bool
    axes: tuple[tuple[str, int], ...]  # (axis, dim of the log density)
    value_axes: tuple[tuple[str, int], ...]
    shape: SiteShape


@dataclass(frozen=True)
class Partition:
    """The sites of a model, divided between the server and the silos. Prints as a table."""

    sites: tuple[Site, ...]
    axes: tuple[Axis, ...]
    silo_plates: tuple[str, ...]
    num_silos: int
    reference: str = ""  # the silo whose shapes the sites show
    static_support: tuple[str, ...] = ()  # observed sites whose support depends on no latent
    named: tuple[str, ...] = field(default=())  # plates and sites named in local=

    def _names(self, role: str) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites if site.role == role)

    @property
    def global_sites(self) -> tuple[str, ...]:
        return self._names("global")

    @property
    def local_sites(self) -> tuple[str, ...]:
        return self._names("local")

    @property
    def observed_sites(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites if site.role in ("observed", "factor"))

    @property
    def params(self) -> tuple[str, ...]:
        return self._names("param")

    def __getitem__(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)

    def _rows(self) -> list[tuple[str, ...]]:
        shown = [site for site in self.sites if site.role != "constant"]
        return [
            (
                site.name,
                _role(site),
                ", ".join(plate for plate, _, _ in site.shape.plates) or "-",
                _shape_text(site),
                LEAVES[site.role] if not (site.role == "deterministic" and not site.at_server) else "nothing",
            )
            for site in shown
        ]

    def _suggestion(self) -> str:
        size = sum(int(np.prod(site.shape.unconstrained or ())) for site in self.sites if site.role == "global")
        why = "local latents stay in their silos" if self.local_sites else "no local latents"
        guide = "" if size <= 500 else ', guide=nf.guides.StructuredNormal(global_cov="diagonal")'
        return f"{size} global dimensions, {why}: try nf.SFVI(model{guide}).run(jax.random.key(0), silos)"

    def __str__(self) -> str:
        head = ("site", "role", "plates", "shape", "what leaves the silo")
        rows = self._rows()
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        line = lambda row: "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()  # noqa: E731
        return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, rows), self._suggestion()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{c}</th>" for c in ("site", "role", "plates", "shape", "what leaves the silo"))
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{_escape(c)}</td>" for c in row) + "</tr>" for row in self._rows()
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p>{_escape(self._suggestion())}</p>"


LEAVES = {
    "global": "a gradient or a factor",
    "local": "nothing",
    "observed": "nothing",
    "factor": "nothing",
    "deterministic": "-",
    "param": "a gradient",
}


def _role(site: Site) -> str:
    if site.role in ("observed", "factor"):
        return f"{site.role} (server, once)" if site.at_server else site.role
    if site.role == "deterministic":
        return "deterministic of globals" if site.at_server else "deterministic, local"
    return "param (theta)" if site.role == "param" else site.role


def _shape_text(site: Site) -> str:
    along = {len(site.shape.value) + dim: axis for axis, dim in site.value_axes}
    cells = [f"n[{along[i]}]" if i in along else str(size) for i, size in enumerate(site.shape.value)]
    return "(" + ", ".join(cells) + ("," if len(cells) == 1 else "") + ")"


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


# --- which leading axes go together -------------------------------------------------------------------------------------


class Component(NamedTuple):
    """Arguments whose leading axes must grow together for the model to trace, and what grows with them."""

    arguments: tuple[str, ...]
    lengths: dict[str, int]
    doubled: Tracing

    @property
    def varies(self) -> bool:
        return len(set(self.lengths.values())) > 1


def _double(kwargs: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    chosen = set(paths)
    flat = []
    for path, leaf in leaves(kwargs):
        if path in chosen:
            leaf = 2 * leaf if isinstance(leaf, int) else jax.ShapeDtypeStruct((2 * leaf.shape[0], *leaf.shape[1:]), leaf.dtype)
        flat.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(dict(kwargs)), flat)


def _lengths(silos: Silos) -> dict[str, dict[str, int]]:
    """{path: {silo: length}} of every leading axis and every int argument of the silos' own arguments."""
    found: dict[str, dict[str, int]] = {}
    for name in silos.names:
        for path, leaf in leaves(silos.own(name)):
            if isinstance(leaf, bool) or (not isinstance(leaf, int) and leaf.ndim == 0):
                continue
            found.setdefault(path, {})[name] = leaf if isinstance(leaf, int) else leaf.shape[0]
    return found


def _components(model: Model, silos: Silos, reference: str) -> list[Component]:
    """The own axes' candidates: within each class of equal lengths, the smallest sets of arguments that trace doubled."""
    lengths = _lengths(silos)
    kwargs = abstract(silos[reference])
    tried: dict[frozenset[str], Tracing | None] = {}

    def attempt(paths: Iterable[str]) -> Tracing | None:
        key = frozenset(paths)
        if key not in tried:
            try:
                tried[key] = trace_shapes(model, _double(kwargs, key))
            except Exception:  # a shape error is an answer: these axes do not grow by themselves
                tried[key] = None
        return tried[key]

    classes: dict[tuple[int, ...], list[str]] = {}
    for path, by_silo in lengths.items():
        classes.setdefault(tuple(by_silo[name] for name in silos.names), []).append(path)
    components = []
    for vector, members in classes.items():
        by_silo = dict(zip(silos.names, vector, strict=True))
        if len(set(vector)) > 1 and (doubled := attempt(members)) is not None:
            components.append(Component(tuple(members), by_silo, doubled))
            continue
        left = list(members)
        while left:
            found = _smallest(left[0], left, members, attempt)
            if found is None:
                left = left[1:]
                continue
            doubled = attempt(found)
            assert doubled is not None
            components.append(Component(tuple(found), by_silo, doubled))
            left = [path for path in left if path not in found]
    return components


def _smallest(path: str, left: list[str], members: list[str], attempt: Any) -> list[str] | None:
    """A smallest set of class members that contains ``path`` and traces when doubled together, or None."""
    current = next((group for group in (left, members) if attempt(group) is not None), None)
    if current is None:  # some member is of another kind (a vector of features as long as the rows): search
        others = [other for other in members if other != path][:7]
        for size in range(len(others) + 1):
            for chosen in itertools.combinations(others, size):
                if attempt([path, *chosen]) is not None:
                    return [path, *chosen]
        return None
    for other in [other for other in current if other != path]:
        fewer = [kept for kept in current if kept != other]
        if attempt(fewer) is not None:
            current = fewer
    return current


# --- the partition --------------------------------------------------------------------------------------------------------


def partition(
    model: Model, silos: Silos, local: Iterable[str] | str | None = None, shared: Iterable[str] | str | None = None
) -> Partition:
    """Divide the model's sites between the server and the silos.

    Args:
        model: a NumPyro model, called as ``model(**silos[name])``.
        silos: the data.
        local: sample sites or plates that are the silo's own, where the automatic reading is not what you mean.
        shared: sample sites or plates that are one and the same in all silos.

    Raises:
        PartitionError: when the model cannot be split, or when shapes alone cannot tell; the message says what to type.
    """
    if not isinstance(silos, Silos):
        raise TypeError(f"silos must be an nf.Silos, got a {type(silos).__name__}: wrap it as nf.Silos({{name: arguments}})")
    local, shared = _as_names(local), _as_names(shared)
    traces = _trace_all(model, silos)
    sizes = _lengths(silos)
    reference = max(silos.names, key=lambda name: sum(by_silo[name] for by_silo in sizes.values()))
    base = traces[reference]
    _check_names(base, local, shared)
    _check_sites(base)
    components = _components(model, silos, reference)
    axes = _own_axes(base, components, silos, local, shared)
    sites = _sites(base, axes, dict(zip((axis.name for axis in axes), _doubled(axes, components), strict=True)), local, shared)
    own = {path for path, _ in leaves(silos.own(reference))}
    depends = dependence(model, silos[reference], own, base.sites)
    _check_ragged(sizes, axes, components, sites, depends)
    sites = _place(sites, depends)
    _check_shapes_between_silos(traces, sites, axes, reference)
    plates = tuple(dict.fromkeys([p for axis in axes for p in axis.plates] + [p for p in local if p in base.plates]))
    static = tuple(
        name for name, found in depends.support.items() if not any(source.startswith("site:") for source in found)
    )
    return Partition(tuple(sites), tuple(axes), plates, silos.num_silos, reference, static, local)


def _as_names(names: Iterable[str] | str | None) -> tuple[str, ...]:
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def _trace_all(model: Model, silos: Silos) -> dict[str, Tracing]:
    """Every silo's trace; silos of the same shapes share one."""
    seen: dict[Any, Tracing] = {}
    traces = {}
    for name in silos.names:
        kwargs = silos[name]
        signature = tuple((p, leaf) if isinstance(leaf, int) else (p, leaf.shape) for p, leaf in leaves(kwargs))
        if signature not in seen:
            seen[signature] = trace_silo(model, name, kwargs)
        traces[name] = seen[signature]
    first = next(iter(traces))
    for name, trace in traces.items():
        if set(trace.sites) != set(traces[first].sites):
            raise PartitionError(
                f"the model has the sites {', '.join(sorted(traces[first].sites))} in silo {first!r} and "
                f"{', '.join(sorted(trace.sites))} in silo {name!r}: every silo must have the same sites"
            )
    return traces


def _check_names(base: Tracing, local: tuple[str, ...], shared: tuple[str, ...]) -> None:
    known = [*base.sites, *base.plates]
    for keyword, names in (("local", local), ("shared", shared)):
        for name in names:
            if name not in known:
                raise PartitionError(
                    f"{keyword}= names {name!r}, which is neither a site nor a plate. Sites: {', '.join(base.sites)}. "
                    f"Plates: {', '.join(base.plates) or 'none'}."
                )
    both = set(local) & set(shared)
    if both:
        raise PartitionError(f"{sorted(both)[0]!r} is in local= and in shared=: keep one of them")


def _check_sites(base: Tracing) -> None:
    for name, site in base.sites.items():
        if site.kind == "mutable":
            raise PartitionError(
                f"site {name!r} is mutable state (a flax module with batch statistics?): a silo's state cannot be shared. "
                "Use a module without mutable state."
            )
        if site.kind == "latent" and site.discrete:
            raise PartitionError(
                f"latent site {name!r} is discrete ({site.distribution}): sum it out in the model (for mixtures: "
                "dist.MixtureSameFamily; for missing observations: handlers.mask in place of obs_mask)"
            )
    if not any(site.kind == "latent" or site.kind == "param" for site in base.sites.values()):
        raise PartitionError("the model has no latent sites: there is nothing to infer")
    if not any(site.kind in ("observed", "factor") for site in base.sites.values()):
        raise PartitionError("the model has no observed site: it ignores the data. Pass obs= in a numpyro.sample.")


def _own_axes(
    base: Tracing, components: list[Component], silos: Silos, local: tuple[str, ...], shared: tuple[str, ...]
) -> list[Axis]:
    axes: list[Axis] = []
    for component in components:
        plates = tuple(p for p, size in component.doubled.plates.items() if size == 2 * base.plates.get(p, 0))
        grown = [
            name
            for name, site in component.doubled.sites.items()
            if growth(base.sites[name].log_prob, site.log_prob) or growth(base.sites[name].value, site.value)
        ]
        if not plates and not grown:
            continue
        follows = {*plates, *grown}
        observed = [name for name in grown if base.sites[name].kind in ("observed", "factor")]
        if follows & set(shared):
            name = sorted(follows & set(shared))[0]
            if component.varies:
                sizes = ", ".join(f"{silo} {n}" for silo, n in list(component.lengths.items())[:4])
                raise PartitionError(
                    f"shared= names {name!r}, but its size differs between silos ({sizes}): it is the silo's own"
                )
            continue
        counted = bool(set(component.arguments) & silos.own_counts)
        if not (component.varies or observed or counted or follows & set(local)):
            raise PartitionError(_question(base, component, plates, grown))
        title = plates[0] if plates else component.arguments[0]
        taken = {axis.name for axis in axes}
        axes.append(Axis(title if title not in taken else f"{title}:{component.arguments[0]}", component.arguments, plates, component.lengths))
    return axes


def _doubled(axes: list[Axis], components: list[Component]) -> list[Tracing]:
    return [next(c.doubled for c in components if c.arguments == axis.arguments) for axis in axes]


def _question(base: Tracing, component: Component, plates: tuple[str, ...], grown: list[str]) -> str:
    latents = [name for name in grown if base.sites[name].kind == "latent"]
    size = next(iter(component.lengths.values()))
    name = plates[0] if plates else latents[0] if latents else grown[0]
    return (
        f"the argument {component.arguments[0]!r} is {size} in every silo and sizes "
        f"{'the plate ' + repr(plates[0]) if plates else 'the site ' + repr(name)} (latents: {', '.join(latents) or 'none'}): "
        f"{size} shared groups, or {size} groups of each silo's own? Shapes cannot tell. Type local=[{name!r}] if each silo "
        f"has its own, or shared=[{name!r}] if they are the same in all silos (or pass {component.arguments[0]!r} in "
        "nf.Silos(..., shared=))."
    )


def _sites(
    base: Tracing, axes: list[Axis], doubled: dict[str, Tracing], local: tuple[str, ...], shared: tuple[str, ...]
) -> list[Site]:
    sites = []
    for name, shape in base.sites.items():
        along, value_along = [], []
        for axis in axes:
            grown = doubled[axis.name].sites[name]
            dims = growth(shape.log_prob, grown.log_prob)
            if len(dims) > 1:
                raise PartitionError(
                    f"the log density of site {name!r} has the rows of {axis.arguments[0]!r} on {len(dims)} axes "
                    f"(shape {shape.log_prob}): observations and distribution would broadcast to n x n. Give "
                    "both the same shape (x @ beta, not x @ beta[:, None])."
                )
            along += [(axis.name, dim) for dim in dims]
            value_along += [(axis.name, dim) for dim in growth(shape.value, grown.value)]
            event = growth(shape.value, grown.value) and not dims and shape.kind in ("latent", "observed")
            if event and len(set(axis.lengths.values())) > 1:
                raise PartitionError(
                    f"site {name!r} ({shape.distribution}) holds all rows of a silo in one event (to_event or a joint "
                    f"distribution), and silos differ in their rows: rows cannot be padded. Put it in "
                    f"numpyro.plate({axis.name!r}, ...) without to_event."
                )
        if shape.kind == "param" and value_along:
            raise PartitionError(
                f"param {name!r} has a value for each row of a silo: a local parameter cannot be averaged between silos. "
                "Make it a numpyro.sample with a prior, or take it out of the plate."
            )
        plates = {plate for plate, _, _ in shape.plates}
        role = {"latent": "global", "param": "param"}.get(shape.kind, shape.kind)
        if shape.kind == "latent" and (along or value_along or plates & set(local) or name in local) and name not in shared:
            role = "local"
        if name in shared and role == "global" and along:
            raise PartitionError(f"shared= names {name!r}, which lies in the silo's own plate: name the plate instead")
        sites.append(Site(name, role, role in ("global", "param"), tuple(along), tuple(value_along), shape))
    return sites


def _check_ragged(
    sizes: dict[str, dict[str, int]],
    axes: list[Axis],
    components: list[Component],
    sites: list[Site],
    depends: Dependence,
) -> None:
    """An argument whose length differs between silos must lie along an own axis, or the model must not use it."""
    placed = {path for axis in axes for path in axis.arguments}
    used = frozenset().union(*depends.log_prob.values()) if depends.log_prob else frozenset()
    known = {path for component in components for path in component.arguments}
    for path, by_silo in sizes.items():
        if path in placed or len(set(by_silo.values())) == 1:
            continue
        values = list(by_silo.items())
        two = f"{values[0][0]!r} {values[0][1]}, " + next(f"{n!r} {v}" for n, v in values if v != values[0][1])
        if path in known and f"arg:{path}" in used:
            terms = [name for name, found in depends.log_prob.items() if f"arg:{path}" in found]
            raise PartitionError(
                f"the rows of {path!r} are summed up before site {terms[0]!r} sees them, and silos differ in their rows "
                f"({two}): give one log density per row (numpyro.factor with a vector, in a plate), so that rows can be masked"
            )
        if path not in known:
            alike = ", ".join(axis.arguments[0] for axis in axes) or "no other argument"
            raise PartitionError(
                f"argument {path!r} differs between silos ({two}), but the model cannot be traced with it doubled: is it "
                f"used as a number, or does its length have to agree with another argument's ({alike})? Only a leading "
                "axis may be ragged; pass a number as a 0-d array."
            )


def _place(sites: list[Site], depends: Dependence) -> list[Site]:
    """Whose term is it: the silo's when it depends on the silo's own arguments or local latents, else the server's."""
    local = {f"site:{site.name}" for site in sites if site.role == "local"}
    placed = []
    used = frozenset().union(*depends.log_prob.values(), *depends.value.values())
    data_terms = 0
    for site in sites:
        found = depends.log_prob.get(site.name, frozenset()) | (
            depends.value.get(site.name, frozenset()) if site.role == "deterministic" else frozenset()
        )
        arguments = sorted(source[4:] for source in found if source.startswith("arg:"))
        parents = sorted(source[5:] for source in found & local if source != f"site:{site.name}")
        silos_own = bool(arguments or parents or site.axes or site.value_axes)
        if site.role == "global":
            if arguments:
                raise PartitionError(
                    f"the prior of global site {site.name!r} depends on the silo's own argument {arguments[0]!r}: each silo "
                    f"would have another prior. Pass the number it needs in nf.Silos(..., shared=), or list "
                    f"{site.name!r} in local=."
                )
            if parents:
                raise PartitionError(
                    f"sample site {parents[0]!r} is local but global site {site.name!r} depends on it. Global sites must not "
                    f"depend on local ones: list {site.name!r} in local=, or sample {site.name!r} before {parents[0]!r}."
                )
        elif site.role == "param" and f"param:{site.name}" not in used:
            site = site._replace(role="constant")
        elif site.role in ("observed", "factor"):
            source = depends.value.get(site.name, frozenset())
            if site.role == "observed" and arguments and not any(s.startswith(("arg:", "site:")) for s in source):
                raise PartitionError(
                    f"the observed value of site {site.name!r} depends on no silo's argument, but its distribution does "
                    f"({arguments[0]}): it would be counted once per silo. Pass the observations as an argument of the silos."
                )
            site = site._replace(at_server=not silos_own)
            data_terms += bool(arguments)
        elif site.role == "deterministic":
            site = site._replace(at_server=not silos_own)
        placed.append(site)
    if not data_terms:
        names = ", ".join(site.name for site in placed if site.role in ("observed", "factor"))
        raise PartitionError(
            f"the model ignores the data: no observed site ({names}) depends on an argument of the silos. Pass "
            "the observations as an argument and use it in obs=."
        )
    return placed


def _check_shapes_between_silos(traces: dict[str, Tracing], sites: list[Site], axes: list[Axis], reference: str) -> None:
    lengths = {axis.name: axis.lengths for axis in axes}
    for name, trace in traces.items():
        for site in sites:
            expected = list(site.shape.value)
            for axis, dim in site.value_axes:
                expected[dim] = expected[dim] * lengths[axis][name] // lengths[axis][reference]
            if tuple(expected) != trace.sites[site.name].value:
                raise PartitionError(
                    f"site {site.name!r} has shape {site.shape.value} in silo {reference!r} and "
                    f"{trace.sites[site.name].value} in silo {name!r}: sites may differ between silos only along the "
                    f"silo plates ({', '.join(p for axis in axes for p in axis.plates) or 'there are none'})"
                )
