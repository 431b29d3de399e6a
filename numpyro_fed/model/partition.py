"""Which site lives where.

The model is traced on shapes, once as it is and once with the leading axis of a group of arguments doubled. Plates and
log densities that double with it belong to that axis. An axis is the silo's own when its length differs between silos
or when observations lie along it; latents along such an axis are local, all others are global. Where the shapes cannot
tell, :func:`partition` asks.
"""

from collections.abc import Iterable
from typing import Any

from numpyro_fed.data.axis import Axis
from numpyro_fed.data.inputs import leaves
from numpyro_fed.data.silos import Silos
from numpyro_fed.model.axes import find_components, leading_lengths, own_axes, takes_any_length, unused_axes
from numpyro_fed.model.lookups import lookups
from numpyro_fed.model.partition_errors import (
    check_crossed,
    check_global,
    check_improper,
    check_names,
    check_refused,
    check_renumbered,
    check_shapes_between_silos,
    check_sites,
    check_state,
    question,
)
from numpyro_fed.model.partition_table import Partition, Site
from numpyro_fed.model.provenance import Dependence, by_input, dependence
from numpyro_fed.model.trace import Model, PartitionError, Tracing, growth, trace_silo


def partition(
    model: Model, silos: Silos, local: Iterable[str] | str | None = None, shared: Iterable[str] | str | None = None
) -> Partition:
    """Divide the model's sites between the server and the silos.

    Args:
        model: a NumPyro model, called as ``model(**silos[name])``.
        silos: the data.
        local: sample sites or plates that are the silo's own, where the automatic reading is not what you mean. An
            observed site may be named, too: that its rows look at all other rows of the silo is then meant.
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
    sizes = leading_lengths(silos)
    reference = max(silos.names, key=lambda name: sum(by_silo[name] for by_silo in sizes.values()))
    base = traces[reference]
    check_names(base, local, shared)
    check_state(model, silos[reference], base)
    check_sites(base)
    own = {path for path, _ in leaves(silos.own(reference))}
    depends = dependence(model, silos[reference], own, base.sites)
    components, failed, refused = find_components(model, silos, reference, base, depends)
    axes, unclear = own_axes(base, components, silos, depends, local, shared)
    doubled = {axis.name: next(c.doubled for c in components if c.arguments == axis.arguments) for axis in axes}
    sites = _sites(base, axes, doubled, local, shared)
    plates = tuple(dict.fromkeys([p for axis in axes for p in axis.plates] + [p for p in local if p in base.plates]))
    if unclear:
        raise PartitionError(question(base, unclear[0], Partition(tuple(sites), tuple(axes), plates, silos.num_silos)))
    check_refused(base, refused, sizes, reference, components, (*local, *shared))
    check_global(sites)
    axes += unused_axes(silos, sizes, axes, components, depends, failed)
    in_event = {axis for site in sites if site.shape.log_prob is not None for axis in _event_axes(site)}
    any_length = lambda axis: axis.name not in in_event and takes_any_length(model, silos[reference], axis)
    axes = [axis._replace(free=any_length(axis)) for axis in axes]
    sites = _place(sites, depends)
    check_improper(sites, depends)
    check_shapes_between_silos(traces, sites, axes, reference)
    fixed = lambda found: not any(source.startswith(("site:", "param:")) for source in found)
    static = tuple(name for name, found in depends.support.items() if fixed(found))
    if silos.renumbered and silos.num_silos > 1:
        looked_up = lookups(*by_input(model, silos[reference], own, base.sites))
        check_renumbered(looked_up, silos.renumbered, sites)
    notes = _hints(sites, depends, shared) if silos.num_silos > 1 else ()
    notes += tuple(
        f"{path!r} is taken as it is, for the model refuses twice as many rows ({said}): its rows are neither padded "
        "nor drawn in minibatches"
        for path, said in refused.items()
    )
    return Partition(tuple(sites), tuple(axes), plates, silos.num_silos, reference, static, local, notes, shared)


def _hints(sites: list[Site], depends: Dependence, shared: tuple[str, ...]) -> tuple[str, ...]:
    """A single number with a population's prior that silos alone use: perhaps each silo should have its own."""
    found = []
    terms = [site for site in sites if site.name in depends.log_prob]
    for site in sites:
        if site.role != "global" or site.shape.value != () or site.name in shared:
            continue
        itself = f"site:{site.name}"
        parents = sorted(s[5:] for s in depends.log_prob[site.name] if s.startswith("site:") and s != itself)
        users = [one for one in terms if one is not site and itself in depends.log_prob[one.name]]
        if parents and users and not any(user.at_server for user in users):
            found.append(
                f"{site.name!r} is one number for all silos. Its prior depends on {' and '.join(map(repr, parents))}, "
                f"and the silos' terms alone use it: if each silo has its own, type local=[{site.name!r}]; if one is "
                f"meant, shared=[{site.name!r}] says so"
            )
    return tuple(found)


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
        check_crossed(name, shape, along)
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
