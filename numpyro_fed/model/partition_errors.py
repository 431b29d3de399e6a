"""Models that cannot be split as they stand: every error says what to type."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpyro_fed.data.axis import Axis
from numpyro_fed.model.axes import Component, followers
from numpyro_fed.model.lookups import Lookup
from numpyro_fed.model.partition_table import Partition, Site
from numpyro_fed.model.provenance import Dependence
from numpyro_fed.model.trace import Model, PartitionError, SiteShape, Tracing, changing_state


def check_names(base: Tracing, local: tuple[str, ...], shared: tuple[str, ...]) -> None:
    latents = [name for name, site in base.sites.items() if site.kind == "latent"]
    for keyword, names in (("local", local), ("shared", shared)):
        for name in names:
            kind = base.sites[name].kind if name in base.sites else ""
            if name in latents or name in base.plates or (keyword == "local" and kind in ("observed", "factor")):
                continue
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


def check_state(model: Model, kwargs: Mapping[str, Any], base: Tracing) -> None:
    changing = changing_state(model, kwargs) if base.state else ()
    if changing:
        raise PartitionError(
            f"site {changing[0]!r} is mutable state that every call changes (a network's batch statistics, a dropout "
            "layer's counter): silos cannot change it together, and each would have another model. Take nnx.LayerNorm "
            "or nnx.GroupNorm in place of nnx.BatchNorm, and leave dropout out; or call module.eval() on a flax nnx "
            "module before the model uses it, which keeps batch statistics as they are and switches dropout off."
        )


def check_sites(base: Tracing) -> None:
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


def check_refused(
    base: Tracing,
    refused: dict[str, str],
    sizes: dict[str, dict[str, int]],
    reference: str,
    components: list[Component],
    named: tuple[str, ...],
) -> None:
    """Latents as long as an argument that the model itself refuses to take longer: nobody can tell whose they are."""
    grown = {name for component in components for some in followers(base, component) for name in some}
    for path, said in refused.items():
        length = sizes[path][reference]
        if set(sizes[path].values()) != {length}:  # ragged, and told as such
            continue
        for name, site in base.sites.items():
            plates = [plate for plate, _, _ in site.plates]
            if site.kind != "latent" or length not in (site.log_prob or ()) or grown & {name, *plates}:
                continue
            if {name, *plates} & set(named):
                continue
            what = plates[-1] if plates else name
            raise PartitionError(
                f"whether site {name!r}, of {length} like the rows of {path!r}, is each silo's own is found by "
                f"doubling the rows, and the model refuses twice as many: {said}. Check sizes before the silos are "
                f"made, not in the model; or type local=[{what!r}] if each silo has its own, shared=[{what!r}] if they "
                "are the same in all silos."
            )


UNCLEAR = "global or local?"


def question(base: Tracing, component: Component, table: Partition) -> str:
    plates, grown = followers(base, component)
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
        + replace(table, sites=sites).table
    )


def check_global(sites: list[Site]) -> None:
    for site in sites:
        if site.role == "global" and site.shape.discrete:
            raise PartitionError(
                f"latent site {site.name!r} is discrete ({site.shape.distribution}) and global: all silos would have "
                "to be summed over the same variable at once, and no silo can do that alone. Sum it out in the model "
                "(for mixtures: dist.MixtureSameFamily); or, if it is each silo's own, put it into the silo's plate or "
                f"type local=[{site.name!r}]."
            )


def check_improper(sites: list[Site], depends: Dependence) -> None:
    """A flat prior that no other term speaks of stays flat."""
    for site in sites:
        itself = f"site:{site.name}"
        terms = [name for name, found in depends.log_prob.items() if itself in found and name != site.name]
        if site.shape.improper and not terms:
            raise PartitionError(
                f"the prior of site {site.name!r} ({site.shape.distribution}) is improper, and no other site depends "
                "on it: its posterior is improper, too. Give it a proper prior (dist.Normal(0, 10)), or take it out."
            )


def check_crossed(name: str, shape: SiteShape, along: list[tuple[str, int]]) -> None:
    """Rows on two axes are meant when there is a plate for each; else they broadcast, n x n."""
    free = [axis for axis, dim in along if dim not in {dim for _, dim, _ in shape.plates}]
    if len(along) > 1 and free:
        raise PartitionError(
            f"the log density of site {name!r} has rows on {len(along)} axes "
            f"({' and '.join(axis for axis, _ in along)}; shape {shape.log_prob}): vectors would broadcast to n x n. "
            "Give all the same shape (x @ beta, not x @ beta[:, None]); if you mean a table, put it in two plates."
        )


def check_shapes_between_silos(traces: dict[str, Tracing], sites: list[Site], axes: list[Axis], reference: str) -> None:
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


def check_renumbered(looked_up: list[Lookup], renumbered: frozenset[str], sites: list[Site]) -> None:
    """A group's number within its silo means nothing in an array that all silos share."""
    local = {f"site:{site.name}" for site in sites if site.role in ("local", "enumerated")}
    for found in looked_up:
        index = sorted(renumbered & {name.removeprefix("arg:") for name in found.by})
        if index and not any(source in local or source.startswith("arg:") for source in found.into):
            what = ", ".join(sorted(repr(name.partition(":")[2]) for name in found.into)) or "a constant"
            raise PartitionError(
                f"groups= of nf.split names {index[0]!r}, which is then renumbered from 0 within each silo, but the "
                f"model looks it up in {what}, an array of {found.size} rows that all silos share: row 0 would be "
                "another group in every silo. If each silo has its own groups, let their number be an argument of the "
                f"model, numpyro.plate(..., num_{index[0]}), and pass groups=dict({index[0]}='num_{index[0]}'); if "
                f"groups are the same in all silos, leave {index[0]!r} out of groups=."
            )
