"""Which site lives where.

The model is traced on shapes, once as it is and once with the leading axis of a group of arguments doubled. Plates and
log densities that double with it belong to that axis. An axis is the silo's own when its length differs between silos
or when observations lie along it; latents along such an axis are local, all others are global. Where the shapes cannot
tell, :func:`partition` asks.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from html import escape
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
    changing_state,
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
    free: bool = False  # the model can be called with any length: padding may round it up


class Site(NamedTuple):
    """Where a site lives. Dims are counted from the right, of the log density and of the value."""

    name: str
    role: str  # global, local, enumerated, observed, factor, deterministic, param, constant
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
    def enumerated_sites(self) -> tuple[str, ...]:
        """Discrete latents of the silos, which are summed out."""
        return self._names("enumerated")

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
                "nothing" if site.role == "deterministic" and not site.at_server else LEAVES.get(site.role, "?"),
            )
            for site in shown
        ]

    def _suggestion(self) -> str:
        size = sum(int(np.prod(site.shape.unconstrained or ())) for site in self.sites if site.role == "global")
        own = self.local_sites or self.enumerated_sites
        why = "local latents stay in their silos" if own else "no local latents"
        guide = "" if size <= 500 else ', guide=nf.guides.StructuredNormal(global_cov="diagonal")'
        return f"{size} global dimensions, {why}: try nf.SFVI(model{guide}).run(jax.random.key(0), silos)"

    def table(self) -> str:
        rows = [HEAD, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
        rows.insert(1, tuple("-" * width for width in widths))
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def __str__(self) -> str:
        return f"{self.table()}\n{self._suggestion()}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        line = lambda row, tag: "".join(f"<{tag} style='text-align:left'>{escape(cell)}</{tag}>" for cell in row)
        body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in self._rows())
        return (
            f"<table><thead><tr>{line(HEAD, 'th')}</tr></thead><tbody>{body}</tbody></table>"
            f"<p>{escape(self._suggestion())}</p>"
        )


HEAD = ("site", "role", "plates", "shape", "what leaves the silo")
LEAVES = {
    "global": "a gradient or a factor",
    "local": "nothing",
    "enumerated": "nothing",
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
    return {"param": "param (theta)", "enumerated": "local, summed out"}.get(site.role, site.role)


def _shape_text(site: Site) -> str:
    along = {len(site.shape.value) + dim: axis for axis, dim in site.value_axes}
    cells = [f"n[{along[i]}]" if i in along else str(size) for i, size in enumerate(site.shape.value)]
    return "(" + ", ".join(cells) + ("," if len(cells) == 1 else "") + ")"


# --- which leading axes go together ---------------------------------------------------------------------------------


class Component(NamedTuple):
    """Arguments whose leading axes must grow together for the model to trace, and what grows with them."""

    arguments: tuple[str, ...]
    lengths: dict[str, int]
    doubled: Tracing

    @property
    def varies(self) -> bool:
        return len(set(self.lengths.values())) > 1


def _double(kwargs: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    return _with_lengths(kwargs, paths, lambda length: 2 * length)


def _with_lengths(kwargs: Mapping[str, Any], paths: Iterable[str], change: Callable[[int], int]) -> dict[str, Any]:
    """The same call with other lengths of the named arguments: ints, and leading axes of arrays."""
    chosen = set(paths)
    flat = []
    for path, leaf in leaves(kwargs):
        if path in chosen:
            leaf = (
                change(leaf)
                if isinstance(leaf, int)
                else jax.ShapeDtypeStruct((change(leaf.shape[0]), *leaf.shape[1:]), leaf.dtype)
            )
        flat.append(leaf)
    return jax.tree.unflatten(jax.tree.structure(dict(kwargs)), flat)


def _takes_any_length(model: Model, kwargs: Mapping[str, Any], axis: Axis) -> bool:
    """Whether the model can be traced with one element more (a reshape to four columns, say, could not)."""
    try:
        trace_shapes(model, _with_lengths(abstract(kwargs), axis.arguments, lambda length: length + 1))
    except Exception:  # a shape error is an answer
        return False
    return True


def _lengths(silos: Silos) -> dict[str, dict[str, int]]:
    """{path: {silo: length}} of every leading axis and every int argument of the silos' own arguments."""
    found: dict[str, dict[str, int]] = {}
    for name in silos.names:
        for path, leaf in leaves(silos.own(name)):
            if isinstance(leaf, bool) or (not isinstance(leaf, int) and leaf.ndim == 0):
                continue
            found.setdefault(path, {})[name] = leaf if isinstance(leaf, int) else leaf.shape[0]
    return found


def _components(model: Model, silos: Silos, reference: str, base: Tracing) -> list[Component]:
    """The own axes' candidates: sets of arguments with the same lengths in every silo that trace when doubled together.

    All arguments whose lengths differ between silos in the same way are taken as one axis, unless that puts it twice
    into a site (two crossed plates of the same sizes); of lengths equal everywhere, the smallest sets that trace.
    """
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
        together = attempt(members) if len(set(vector)) > 1 else None
        if together is not None and not _grows_twice(base, together):
            sets = [members]
        else:
            sets = _smallest_sets(members, attempt)
        for found in sets:
            doubled = attempt(found)
            assert doubled is not None
            components.append(Component(tuple(found), by_silo, doubled))
    return components


def _grows_twice(base: Tracing, doubled: Tracing) -> bool:
    """In a site that stands in a plate for each: two crossed plates of the same sizes."""
    for name, site in doubled.sites.items():
        dims = set(growth(base.sites[name].log_prob, site.log_prob))
        if len(dims) > 1 and dims <= {dim for _, dim, _ in site.plates}:
            return True
    return False


def _smallest_sets(members: list[str], attempt: Any) -> list[list[str]]:
    """Disjoint smallest sets of the class; those that cannot do without one another are one."""
    sets: list[list[str]] = []
    for path in members:
        if any(path in one for one in sets):
            continue
        found = _smallest(path, [m for m in members if not any(m in one for one in sets)], members, attempt)
        if found is None:
            continue
        overlapping = [one for one in sets if set(one) & set(found)]
        union = [m for m in members if m in found or any(m in one for one in overlapping)]
        if attempt(union) is not None:
            sets = [one for one in sets if one not in overlapping] + [union]
    return sets


def _smallest(path: str, left: list[str], members: list[str], attempt: Any) -> list[str] | None:
    """A smallest set of class members that contains ``path`` and traces when doubled together, or None."""
    others = [other for other in members if other != path]
    # most often all grow together; or one or two are of another kind (a vector of features as long as the rows)
    most = [[m for m in members if m not in out] for k in (1, 2) for out in itertools.combinations(others, k)]
    few = [[path, *some] for k in (0, 1, 2) for some in itertools.combinations(others[:7], k)]
    candidates = [left, members, *most[: 4 * len(members)], *few]
    current = next((group for group in candidates if attempt(group) is not None), None)
    if current is None:
        return None
    for other in [other for other in current if other != path]:
        fewer = [kept for kept in current if kept != other]
        if attempt(fewer) is not None:
            current = fewer
    return current


# --- the partition --------------------------------------------------------------------------------------------------


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
        raise TypeError(
            f"silos must be an nf.Silos, got a {type(silos).__name__}: wrap it as nf.Silos({{name: arguments}})"
        )
    local, shared = _as_names(local), _as_names(shared)
    traces = _trace_all(model, silos)
    sizes = _lengths(silos)
    reference = max(silos.names, key=lambda name: sum(by_silo[name] for by_silo in sizes.values()))
    base = traces[reference]
    _check_names(base, local, shared)
    _check_state(model, silos[reference], base)
    _check_sites(base)
    own = {path for path, _ in leaves(silos.own(reference))}
    depends = dependence(model, silos[reference], own, base.sites)
    components = _components(model, silos, reference, base)
    axes, unclear = _own_axes(base, components, silos, depends, local, shared)
    doubled = {axis.name: next(c.doubled for c in components if c.arguments == axis.arguments) for axis in axes}
    sites = _sites(base, axes, doubled, local, shared)
    plates = tuple(dict.fromkeys([p for axis in axes for p in axis.plates] + [p for p in local if p in base.plates]))
    if unclear:
        raise PartitionError(_question(base, unclear[0], Partition(tuple(sites), tuple(axes), plates, silos.num_silos)))
    _check_global(sites)
    axes += _unused_axes(silos, sizes, axes, components, depends)
    in_event = {axis for site in sites if site.shape.log_prob is not None for axis in _event_axes(site)}
    any_length = lambda axis: axis.name not in in_event and _takes_any_length(model, silos[reference], axis)
    axes = [axis._replace(free=any_length(axis)) for axis in axes]
    sites = _place(sites, depends)
    _check_shapes_between_silos(traces, sites, axes, reference)
    fixed = lambda found: not any(source.startswith(("site:", "param:")) for source in found)
    static = tuple(name for name, found in depends.support.items() if fixed(found))
    return Partition(tuple(sites), tuple(axes), plates, silos.num_silos, reference, static, local)


def _event_axes(site: Site) -> set[str]:
    """Axes that lie inside the site's event: its rows cannot be told apart, nor padded."""
    return {axis for axis, _ in site.value_axes} - {axis for axis, _ in site.axes}


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
    latents = [name for name, site in base.sites.items() if site.kind == "latent"]
    for keyword, names in (("local", local), ("shared", shared)):
        for name in names:
            if name in latents or name in base.plates:
                continue
            kind = base.sites[name].kind if name in base.sites else ""
            what = (
                f"a {kind} site" if kind in ("deterministic", "param") else f"an {kind} site" if kind else "not there"
            )
            raise PartitionError(
                f"{keyword}= names {name!r}, which is {what}: name latent sites or plates. Latent sites: "
                f"{', '.join(latents) or 'none'}. Plates: {', '.join(base.plates) or 'none'}."
            )
    both = set(local) & set(shared)
    if both:
        raise PartitionError(f"{sorted(both)[0]!r} is in local= and in shared=: keep one of them")


def _check_state(model: Model, kwargs: Mapping[str, Any], base: Tracing) -> None:
    changing = changing_state(model, kwargs) if base.state else ()
    if changing:
        raise PartitionError(
            f"site {changing[0]!r} is mutable state that every call changes (a network's batch statistics, a dropout "
            "layer's counter): silos cannot change it together, and each would have another model. Take nnx.LayerNorm "
            "or nnx.GroupNorm in place of nnx.BatchNorm, and leave dropout out; or call module.eval() on a flax nnx "
            "module before the model uses it, which keeps batch statistics as they are and switches dropout off."
        )


def _check_sites(base: Tracing) -> None:
    for name, site in base.sites.items():
        if site.kind == "latent" and site.discrete and not site.support:
            raise PartitionError(
                f"latent site {name!r} is discrete ({site.distribution}), and its values cannot be listed: there are "
                "infinitely many, their number depends on data or latents, or each is an array. Take a distribution "
                "with the same few values in every row (Categorical, Bernoulli, or a Binomial whose total_count is a "
                "number), or sum it out in the model (for mixtures: dist.MixtureSameFamily; for missing observations: "
                "handlers.mask in place of obs_mask)"
            )
    if not any(site.kind == "latent" or site.kind == "param" for site in base.sites.values()):
        raise PartitionError("the model has no latent sites: there is nothing to infer")
    if not any(site.kind in ("observed", "factor") for site in base.sites.values()):
        raise PartitionError("the model has no observed site: it ignores the data. Pass obs= in a numpyro.sample.")


def _own_axes(
    base: Tracing,
    components: list[Component],
    silos: Silos,
    depends: Dependence,
    local: tuple[str, ...],
    shared: tuple[str, ...],
) -> tuple[list[Axis], list[Component]]:
    """The silo's own axes, and the components of which shapes cannot tell."""
    axes: list[Axis] = []
    unclear = []
    for component in components:
        plates, grown = _followers(base, component)
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
        if component.varies or observed or counted or follows & set(local) or _own_priors(base, grown, silos, depends):
            title = _untaken(plates[0] if plates else component.arguments[0], component, axes)
            axes.append(Axis(title, component.arguments, plates, component.lengths))
        else:
            unclear.append(component)
    return axes, unclear


def _untaken(title: str, component: Component, axes: list[Axis]) -> str:
    return title if title not in {axis.name for axis in axes} else f"{title}:{component.arguments[0]}"


def _followers(base: Tracing, component: Component) -> tuple[tuple[str, ...], list[str]]:
    """The plates and the sites that double with the component."""
    plates = tuple(p for p, size in component.doubled.plates.items() if size == 2 * base.plates.get(p, 0))
    grown = [
        name
        for name, site in component.doubled.sites.items()
        if growth(base.sites[name].log_prob, site.log_prob) or growth(base.sites[name].value, site.value)
    ]
    return plates, grown


def _own_priors(base: Tracing, grown: list[str], silos: Silos, depends: Dependence) -> bool:
    """A latent whose prior uses an argument of which each silo has its own values cannot be shared."""
    latents = [name for name in grown if base.sites[name].kind == "latent"]
    used = {source[4:] for name in latents for source in depends.log_prob[name] if source.startswith("arg:")}
    first = next(iter(silos))
    return any(
        path in used and not np.array_equal(leaf, dict(leaves(silos.own(first)))[path])
        for name in silos.names
        for path, leaf in leaves(silos.own(name))
    )


UNCLEAR = "global or local?"


def _question(base: Tracing, component: Component, table: Partition) -> str:
    plates, grown = _followers(base, component)
    latents = [name for name in grown if base.sites[name].kind == "latent"]
    size = next(iter(component.lengths.values()))
    name = plates[0] if plates else latents[0] if latents else grown[0]
    argument = component.arguments[0]
    sites = tuple(site._replace(role=UNCLEAR) if site.name in latents else site for site in table.sites)
    return (
        f"argument {argument!r} has the same size, {size}, in every silo, and sizes the "
        f"{'plate' if plates else 'site'} {name!r} (latents: {', '.join(latents) or 'none'}). {size} shared by all "
        f"silos, or {size} of each silo's own? Shapes cannot tell. Type local=[{name!r}] if each silo has its own, or "
        f"shared=[{name!r}] if they are the same in all silos (or pass {argument!r} in nf.Silos(..., shared=)).\n\n"
        + replace(table, sites=sites).table()
    )


def _sites(
    base: Tracing, axes: list[Axis], doubled: dict[str, Tracing], local: tuple[str, ...], shared: tuple[str, ...]
) -> list[Site]:
    sites = []
    for name, shape in base.sites.items():
        along: list[tuple[str, int]] = []
        value_along: list[tuple[str, int]] = []
        for axis in axes:
            grown = doubled[axis.name].sites[name]
            dims = growth(shape.log_prob, grown.log_prob)
            shares = [other for other, dim in along if dim in dims]
            if shares:
                raise PartitionError(
                    f"site {name!r} has the rows of {shares[0]!r} times those of {axis.name!r} on one axis: padded "
                    f"rows would fall between others. Keep them on two axes, in two plates (dim=-2 and dim=-1)."
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
        _check_crossed(name, shape, along)
        if shape.kind == "param" and value_along:
            raise PartitionError(
                f"param {name!r} has a value for each row of a silo: a local parameter cannot be averaged between "
                "silos. Make it a numpyro.sample with a prior, or take it out of the plate."
            )
        plates = {plate for plate, _, _ in shape.plates}
        inside = [axis.name for axis in axes if plates & set(axis.plates)] + sorted(plates & set(local))
        if shape.kind == "param" and inside:
            raise PartitionError(
                f"param {name!r} stands inside the silo's own plate {inside[0]!r}: is it one value for all silos, or a "
                f"silo's own? One for all: move numpyro.param({name!r}, ...) out of the plate. Each its own: make it a "
                "numpyro.sample with a prior; a param is one and the same in all silos."
            )
        role = {"latent": "global", "param": "param"}.get(shape.kind, shape.kind)
        if (
            shape.kind == "latent"
            and (along or value_along or plates & set(local) or name in local)
            and name not in shared
        ):
            role = "enumerated" if shape.discrete else "local"
        if name in shared and role == "global" and along:
            raise PartitionError(f"shared= names {name!r}, which lies in the silo's own plate: name the plate instead")
        sites.append(Site(name, role, role in ("global", "param"), tuple(along), tuple(value_along), shape))
    return sites


def _check_global(sites: list[Site]) -> None:
    for site in sites:
        if site.role == "global" and site.shape.discrete:
            raise PartitionError(
                f"latent site {site.name!r} is discrete ({site.shape.distribution}) and global: all silos would have "
                "to be summed over the same variable at once, and no silo can do that alone. Sum it out in the model "
                "(for mixtures: dist.MixtureSameFamily); or, if it is each silo's own, put it into the silo's plate or "
                f"type local=[{site.name!r}]."
            )


def _check_crossed(name: str, shape: SiteShape, along: list[tuple[str, int]]) -> None:
    """Rows on two axes are meant when there is a plate for each; else they broadcast, n x n."""
    free = [axis for axis, dim in along if dim not in {dim for _, dim, _ in shape.plates}]
    if len(along) > 1 and free:
        raise PartitionError(
            f"the log density of site {name!r} has rows on {len(along)} axes "
            f"({' and '.join(axis for axis, _ in along)}; shape {shape.log_prob}): vectors would broadcast to n x n. "
            "Give all the same shape (x @ beta, not x @ beta[:, None]); if you mean a table, put it in two plates."
        )


def _unused_axes(
    silos: Silos,
    sizes: dict[str, dict[str, int]],
    axes: list[Axis],
    components: list[Component],
    depends: Dependence,
) -> list[Axis]:
    """Axes for ragged arguments that the model does not use; an argument that it uses must lie along an own axis."""
    placed = {path for axis in axes for path in axis.arguments}
    used = frozenset().union(*depends.log_prob.values(), *depends.value.values())
    known = {path: component for component in components for path in component.arguments}
    kinds = dict(leaves(silos.own(silos.names[0])))
    extra: list[Axis] = []
    for path, by_silo in sizes.items():
        if path in placed or len(set(by_silo.values())) == 1:
            continue
        values = list(by_silo.items())
        two = f"{values[0][0]!r} {values[0][1]}, " + next(f"{n!r} {v}" for n, v in values if v != values[0][1])
        if isinstance(kinds[path], int):
            raise PartitionError(
                f"int argument {path!r} differs between silos ({two}), but no plate's size follows it: ints are sizes. "
                f"If it is a number of the silo's own, pass {path}=np.asarray({values[0][1]})."
            )
        if path not in known:
            alike = ", ".join(axis.arguments[0] for axis in axes) or "no other argument"
            raise PartitionError(
                f"the rows of {path!r} differ between silos ({two}), but the model cannot be traced with twice as "
                f"many: does their number have to agree with another argument's ({alike}), or is it written in the "
                "model? Only arguments that grow together may be ragged."
            )
        if f"arg:{path}" in used:
            terms = [
                n for part in (depends.log_prob, depends.value) for n, found in part.items() if f"arg:{path}" in found
            ]
            raise PartitionError(
                f"the rows of {path!r} are combined (a sum, a mean, a shift such as {path}[1:]) before site "
                f"{terms[0]!r} sees them, and silos differ in their rows ({two}), so that padded rows would count. "
                "Give one log density per row (numpyro.factor with a vector), or compute the number beforehand and "
                "pass it as an argument."
            )
        if path not in {p for axis in extra for p in axis.arguments}:
            component = known[path]
            extra.append(Axis(_untaken(path, component, axes + extra), component.arguments, (), component.lengths))
    return extra


def _place(sites: list[Site], depends: Dependence) -> list[Site]:
    """Whose term is it: the silo's when it depends on the silo's own arguments or local latents, else the server's."""
    local = {f"site:{site.name}" for site in sites if site.role in ("local", "enumerated")}
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
                    f"the prior of global site {site.name!r} depends on the silo's own argument {arguments[0]!r}: each "
                    f"silo would have another prior. Pass the number it needs in nf.Silos(..., shared=), or list "
                    f"{site.name!r} in local=."
                )
            if parents:
                raise PartitionError(
                    f"sample site {parents[0]!r} is local but global site {site.name!r} depends on it. Global sites "
                    f"must not depend on local ones: list {site.name!r} in local=, or sample {site.name!r} before "
                    f"{parents[0]!r}."
                )
        elif site.role == "param":
            own = sorted(source[4:] for source in depends.start[site.name] if source.startswith("arg:"))
            if own:
                raise PartitionError(
                    f"param {site.name!r} starts from the silo's argument {own[0]!r}: it is one value for all silos, "
                    "and the server has no data. Write a number, or pass one in nf.Silos(..., shared=)."
                )
            if f"param:{site.name}" not in used:
                site = site._replace(role="constant")
        elif site.role in ("observed", "factor"):
            source = depends.value.get(site.name, frozenset())
            elsewhere = not any(s.startswith(("arg:", "site:")) for s in source)
            if site.role == "observed" and arguments and elsewhere and site.shape.value and not site.value_axes:
                raise PartitionError(
                    f"the observed value of site {site.name!r} depends on no silo's argument, but its distribution "
                    f"does ({arguments[0]}): it would be counted once per silo. Pass the observations as an argument "
                    "of the silos, and use it in obs=."
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


def _check_shapes_between_silos(
    traces: dict[str, Tracing], sites: list[Site], axes: list[Axis], reference: str
) -> None:
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
