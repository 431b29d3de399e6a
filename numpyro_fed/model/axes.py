"""Which leading axes go together, and which of them are the silo's own.

Arguments whose leading axes must be doubled together for the model to trace lie along one axis.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax

from numpyro_fed.data.axis import Axis
from numpyro_fed.data.inputs import leaves
from numpyro_fed.data.silos import Silos
from numpyro_fed.model.provenance import Dependence
from numpyro_fed.model.refusals import models_own, told
from numpyro_fed.model.trace import Model, PartitionError, Tracing, abstract, growth, trace_shapes

MOST_BY_TWOS = 12  # arguments of one length: each try is a trace of the model


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


def takes_any_length(model: Model, kwargs: Mapping[str, Any], axis: Axis) -> bool:
    """Whether the model can be traced with one element more (a reshape to four columns, say, could not)."""
    return _traces(model, _with_lengths(abstract(kwargs), axis.arguments, lambda length: length + 1))


def leading_lengths(silos: Silos) -> dict[str, dict[str, int]]:
    """{path: {silo: length}} of every leading axis and every int argument of the silos' own arguments."""
    found: dict[str, dict[str, int]] = {}
    for name in silos.names:
        for path, leaf in leaves(silos.own(name)):
            if isinstance(leaf, bool) or (not isinstance(leaf, int) and leaf.ndim == 0):
                continue
            found.setdefault(path, {})[name] = leaf if isinstance(leaf, int) else leaf.shape[0]
    return found


def find_components(
    model: Model, silos: Silos, reference: str, base: Tracing, depends: Dependence
) -> tuple[list[Component], dict[str, str], dict[str, str]]:
    """The own axes' candidates: sets of arguments with the same lengths in every silo that trace when doubled together.

    All arguments whose lengths differ between silos in the same way are taken as one axis, unless that puts it twice
    into a site (two crossed plates of the same sizes); of lengths equal everywhere, the smallest sets that trace.

    Also returned: {argument: why it did not trace when it was last doubled}. And of those that stayed
    as they are because a line of the model refused them, its words.
    """
    lengths = leading_lengths(silos)
    kwargs = abstract(silos[reference])
    ints = {path for path, leaf in leaves(kwargs) if isinstance(leaf, int)}
    tried: dict[frozenset[str], Tracing | None] = {}
    failed: dict[str, str] = {}
    own_words: set[str] = set()  # arguments of which the model itself says that they cannot be longer

    def attempt(paths: Iterable[str]) -> Tracing | None:
        key = frozenset(paths)
        if key not in tried:
            try:
                tried[key] = trace_shapes(model, _double(kwargs, key))
            except Exception as error:  # a shape error is an answer: these axes do not grow by themselves
                tried[key] = None
                for path in key:
                    if models_own(error) or path not in own_words:
                        failed[path] = told(error)
                own_words.update(key if models_own(error) else ())
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
            alone = set(vector) == {1} and len(members) > 1
            counts = [path for path in members if path in ints]
            sets = _smallest_sets(
                members, counts, _apart(model, kwargs, members, attempt) if alone else attempt, depends
            )
        for found in sets:
            doubled = attempt(found)
            assert doubled is not None
            components.append(Component(tuple(found), by_silo, doubled))
    known = {path for component in components for path in component.arguments}
    return components, failed, {path: failed[path] for path in lengths if path in own_words - known}


def _apart(model: Model, kwargs: Mapping[str, Any], members: list[str], attempt: Any) -> Any:
    """``attempt`` for members that have one element everywhere: one broadcasts with two, but two do not with four."""
    longer = _double(kwargs, members)
    if not _traces(model, longer):  # they do not all grow
        return attempt
    return lambda paths: attempt(paths) if _traces(model, _double(longer, paths)) else None


def _traces(model: Model, kwargs: Mapping[str, Any]) -> bool:
    try:
        trace_shapes(model, kwargs)
    except Exception:  # a shape error is an answer
        return False
    return True


def _grows_twice(base: Tracing, doubled: Tracing) -> bool:
    """In a site that stands in a plate for each: two crossed plates of the same sizes."""
    for name, site in doubled.sites.items():
        dims = set(growth(base.sites[name].log_prob, site.log_prob))
        if len(dims) > 1 and dims <= {dim for _, dim, _ in site.plates}:
            return True
    return False


def _smallest_sets(members: list[str], counts: list[str], attempt: Any, depends: Dependence) -> list[list[str]]:
    """Disjoint smallest sets of the class; those that cannot do without one another are one.

    Arrays come first, each with those that are in a term with it, and perhaps with one of the ``counts``, the ints of
    the class; what is left of these is last.
    """
    sets: list[list[str]] = []
    for path in sorted(members, key=counts.__contains__):
        if any(path in one for one in sets):
            continue
        left = [m for m in members if not any(m in one for one in sets)]
        near = _related(path, members, depends)
        counted = [[*near, count] for count in counts if count in left and count not in near]
        found = _smallest(path, [[path], near, *counted, left], members, attempt)
        if found is None:
            continue
        overlapping = [one for one in sets if set(one) & set(found)]
        union = [m for m in members if m in found or any(m in one for one in overlapping)]
        if attempt(union) is not None:
            sets = [one for one in sets if one not in overlapping] + [union]
    return sets


def _related(path: str, members: list[str], depends: Dependence) -> list[str]:
    """The argument, and those that are in a term with it: a count of groups, as many as there are rows, is not."""
    terms = [found for part in (depends.log_prob, depends.value) for found in part.values() if f"arg:{path}" in found]
    return [m for m in members if m == path or any(f"arg:{m}" in found for found in terms)]


def _smallest(path: str, first: list[list[str]], members: list[str], attempt: Any) -> list[str] | None:
    """A smallest set of class members that contains ``path`` and traces when doubled together, or None."""
    others = [other for other in members if other != path]
    # most often all grow together; or one or two are of another kind (a vector of features as long as the rows)
    most = [[m for m in members if m not in out] for k in (1, 2) for out in itertools.combinations(others, k)]
    few = [[path, *some] for k in (0, 1, 2) for some in itertools.combinations(others[:7], k)]
    candidates = [*first, members, *most[: 4 * len(members)], *few]
    current = next((group for group in candidates if attempt(group) is not None), None)
    if current is None:
        return None
    # one after the other, and then by twos: arrays of groups, as many as the rows, go together or not at all
    for size in (1, 2) if len(members) <= MOST_BY_TWOS else (1,):
        for out in itertools.combinations([other for other in current if other != path], size):
            fewer = [kept for kept in current if kept not in out]
            if len(fewer) == len(current) - size and attempt(fewer) is not None:
                current = fewer
    return current


def own_axes(
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
        plates, grown = followers(base, component)
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
        if component.varies or observed or counted or follows & set(local):
            title = _untaken(plates[0] if plates else component.arguments[0], component, axes)
            axes.append(Axis(title, component.arguments, plates, component.lengths))
        else:
            unclear.append(component)
    return axes, unclear


def _untaken(title: str, component: Component, axes: list[Axis]) -> str:
    return title if title not in {axis.name for axis in axes} else f"{title}:{component.arguments[0]}"


def followers(base: Tracing, component: Component) -> tuple[tuple[str, ...], list[str]]:
    """The plates and the sites that double with the component."""
    plates = tuple(p for p, size in component.doubled.plates.items() if size == 2 * base.plates.get(p, 0))
    grown = [
        name
        for name, site in component.doubled.sites.items()
        if growth(base.sites[name].log_prob, site.log_prob) or growth(base.sites[name].value, site.value)
    ]
    return plates, grown


def unused_axes(
    silos: Silos,
    sizes: dict[str, dict[str, int]],
    axes: list[Axis],
    components: list[Component],
    depends: Dependence,
    failed: dict[str, str],
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
                + (f" With twice as many: {failed[path]}" if path in failed else "")
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
