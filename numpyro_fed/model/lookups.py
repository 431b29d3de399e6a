"""What the model looks up, and by which argument: ``alpha[county]``.

JAX takes the last row where an index lies beyond it, in silence. So the model's program is read equation by equation:
where rows are looked up by numbers that come from an argument, the index is compared with the array it points into.
Lookups that say what becomes of such an index (``mode="clip"``, ``mode="fill"``) are left alone, and so are those
inside a ``scan``.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.lax import GatherScatterMode

Array = jax.Array
Names = frozenset[str]
NONE: Names = frozenset()


class Lookup(NamedTuple):
    """Rows of an array, looked up along one of its axes."""

    by: Names  # inputs whose numbers are the index
    into: Names  # inputs that the array depends on
    size: int  # of the axis
    width: int  # rows taken at each place
    place: Callable[[], Array]  # where they begin; computed when called


class _Flow(NamedTuple):
    """A variable of the program: its value, when asked for, and where its numbers and all of it come from."""

    value: Callable[[], Any]
    numbers: Names  # what a lookup returns has the array's numbers, not the index's
    sources: Names
    columns: tuple[Names, ...] = ()  # of an index into several axes, the numbers of each


def lookups(function: Callable[..., Any], inputs: dict[str, Any], latents: Names = NONE) -> list[Lookup]:
    """All that ``function(**inputs)`` looks up by numbers of its inputs; where no index is asked for, shapes will do.

    By those of ``latents`` it looks up nothing.

    >>> import numpy as np
    >>> look = lambda a, i: {"sum": a[i - 1].sum()}
    >>> (found,) = lookups(look, {"a": np.zeros(3), "i": np.array([1, 3])})
    >>> sorted(found.by), sorted(found.into), found.size, found.place().tolist()
    (['i'], ['a'], 3, [0, 2])
    """
    closed = jax.make_jaxpr(lambda inputs: function(**inputs))(inputs)
    paths, _ = jax.tree_util.tree_flatten_with_path(inputs)
    names = [frozenset({path[0].key}) for path, _ in paths]
    given = [_Flow(_known(leaf), name - latents, name) for name, (_, leaf) in zip(names, paths, strict=True)]
    found: list[Lookup] = []
    _read(closed.jaxpr, closed.consts, given, found)
    return found


def _known(value: Any) -> Callable[[], Any]:
    return lambda: value


def _read(jaxpr: Any, consts: Any, inputs: list[_Flow], found: list[Lookup]) -> list[_Flow]:
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= {var: _Flow(_known(value), NONE, NONE) for var, value in zip(jaxpr.constvars, consts, strict=True)}
    read = lambda var: _Flow(_known(var.val), NONE, NONE) if isinstance(var, Literal) else known[var]
    for equation in jaxpr.eqns:
        args = [read(var) for var in equation.invars]
        inner, inner_consts = _called(equation)
        out = _read(inner, inner_consts, args, found) if inner is not None else _computed(equation, args, found)
        known |= dict(zip(equation.outvars, out, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _called(equation: Any) -> tuple[Any, Any]:
    """The program inside an equation that does nothing but run it, and its constants."""
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    consts, inner = getattr(inner, "consts", ()), getattr(inner, "jaxpr", inner)
    same = lambda: (len(inner.invars), len(inner.outvars)) == (len(equation.invars), len(equation.outvars))
    return (inner, consts) if inner is not None and equation.primitive.name != "scan" and same() else (None, ())


def _computed(equation: Any, args: list[_Flow], found: list[Lookup]) -> list[_Flow]:
    name, params = equation.primitive.name, equation.params
    looks = name in ("gather", "dynamic_slice")
    sources = NONE.union(*(arg.sources for arg in args))
    numbers = args[0].numbers if looks else NONE.union(*(arg.numbers for arg in args))
    if name == "gather" and params["mode"] == GatherScatterMode.PROMISE_IN_BOUNDS and args[1].numbers:
        shape, widths = equation.invars[0].aval.shape, params["slice_sizes"]
        for k, dim in enumerate(params["dimension_numbers"].start_index_map):
            by = args[1].columns[k] if args[1].columns else args[1].numbers
            if by:  # in table[county, jnp.arange(n)] the second is no argument's
                found.append(Lookup(by, args[0].sources, shape[dim], widths[dim], _column(args[1].value, k)))
    elif name == "dynamic_slice":
        starts = zip(args[1:], equation.invars[0].aval.shape, params["slice_sizes"], strict=True)
        found.extend(
            Lookup(start.numbers, args[0].sources, size, width, start.value)
            for start, size, width in starts
            if start.numbers
        )
    kept: list[Any] = []

    def values() -> list[Any]:
        if not kept:
            out = equation.primitive.bind(*(arg.value() for arg in args), **params)
            kept.extend(out if equation.primitive.multiple_results else [out])
        return kept

    kinds = [NONE if var.aval.dtype == bool else numbers for var in equation.outvars]
    columns: tuple[Names, ...] = ()
    if name == "concatenate" and all(var.aval.shape[params["dimension"] :] == (1,) for var in equation.invars):
        columns = tuple(arg.numbers for arg in args)
    return [_Flow(_part(values, i), kind, sources, columns) for i, kind in enumerate(kinds)]


def _column(value: Callable[[], Any], k: int) -> Callable[[], Array]:
    return lambda: jnp.asarray(value())[..., k]


def _part(values: Callable[[], list[Any]], i: int) -> Callable[[], Any]:
    return lambda: values()[i]
