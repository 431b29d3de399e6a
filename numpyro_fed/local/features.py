"""What a silo's rows look like to a network beside the model, and which of the parameters it speaks of."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.walk import Flat
from numpyro_fed.model.forward import unit_axes
from numpyro_fed.model.new_units import used_arguments
from numpyro_fed.model.split_model import SplitModel

Array = jax.Array


class Features(NamedTuple):
    """Of a silo's rows."""

    read: Callable[[Array, SiloData], tuple[Array, Array]]  # (w, data) -> (rows, size), and which of them are real
    size: int


def features_of(own: Flat, wanted: Any = None) -> Features:
    """How the features of a silo's rows are read.

    Args:
        own: the model and its parameters w, as a vector.
        wanted: names of arguments and of deterministic sites that have a row for each unit, or a function of the
            model's arguments that gives an array with a row for each observed unit. None: all such arguments on whose
            values predictions depend, or all such arguments if there are none.

    Raises:
        ValueError: where there is nothing to read, or something else than rows.
    """
    split = own.split
    if callable(wanted):
        read = lambda w, data: {"the function": wanted(**split.spec.kwargs(data))}
        axis, dims = _unit(split), dict[str, int]()
    else:
        names = _by_default(split) if wanted is None else wanted
        axis, dims = _along(split, names)
        read = lambda w, data: _values(own, names, w, data)

    def rows(w: Array, data: SiloData) -> tuple[Array, Array]:
        real, parts = data.mask[axis], []
        for name, value in read(w, data).items():
            value = jnp.moveaxis(jnp.asarray(value), dims.get(name, 0), 0) if jnp.ndim(value) else jnp.asarray(value)
            if value.shape[:1] != real.shape:
                raise ValueError(
                    f"features: {name} has the shape {value.shape}, and {real.shape[0]} rows of {axis!r} are needed, "
                    "first: pass names of arguments, of deterministic sites inside of that plate, or a function"
                )
            parts.append(value.reshape(real.shape[0], -1).astype(jnp.zeros(()).dtype))
        return jnp.concatenate(parts, axis=1), real

    shape = jax.eval_shape(rows, jnp.zeros(own.size), split.dummy())[0].shape
    return Features(rows, shape[1])


def _unit(split: SplitModel) -> str:
    """The axis of the silos along which they have observations."""
    axes = sorted(unit_axes(split))
    if len(axes) != 1:
        raise ValueError(
            f"features: silos have observations along {', '.join(axes) or 'no axis'}, and rows of one are needed: name "
            'arguments that have a row for each unit, features=("x",)'
        )
    return axes[0]


def _by_default(split: SplitModel) -> tuple[str, ...]:
    unit, used = _unit(split), used_arguments(split)
    names = [leaf.path for leaf in split.spec.own if leaf.dtype is not None and leaf.axis == unit]
    if not names:
        raise ValueError(f"features: no argument has a row for each of {unit!r}: pass a function of the arguments")
    return tuple(name for name in names if name in used) or tuple(names)


def _along(split: SplitModel, names: tuple[str, ...]) -> tuple[str, dict[str, int]]:
    """The axis that all of these lie along, and which dim of a site's value it is."""
    arguments = {leaf.path: leaf.axis for leaf in split.spec.own if leaf.dtype is not None and leaf.axis is not None}
    sites = {site.name: site for site in split.partition.sites if site.role == "deterministic" and site.value_axes}
    unknown = [name for name in names if name not in arguments and name not in sites]
    if unknown:
        raise ValueError(
            f"features names {unknown[0]!r}; arguments with rows are {', '.join(arguments) or 'none'}, deterministic "
            f"sites with rows {', '.join(sites) or 'none'}"
        )
    places = {name: arguments[name] if name in arguments else sites[name].value_axes[0][0] for name in names}
    if len(set(places.values())) != 1:
        raise ValueError(f"features lie along several axes ({places}): name those of one")
    dims = {name: sites[name].value_axes[0][1] for name in names if name not in arguments}
    return next(iter(places.values())), dims


def _values(own: Flat, names: tuple[str, ...], w: Array, data: SiloData) -> dict[str, Array]:
    split = own.split
    arrays = [leaf for leaf in split.spec.own if leaf.dtype is not None]
    found = {leaf.path: array for leaf, array in zip(arrays, data.args, strict=True)}
    if not set(names) <= set(found):
        z, theta = own.parts(w)
        found = split.constrain_local(z, {}, theta, data) | found
    return {name: found[name] for name in names}


# --- which parameters -------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """Some of the parameters w: where they lie."""

    runs: tuple[tuple[int, int], ...]  # first, and one past the last

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def of(self, w: Array) -> Array:
        return jnp.concatenate([w[start:stop] for start, stop in self.runs])


def head_of(split: SplitModel, names: tuple[str, ...] | None) -> Head:
    """Where the named sample sites and params lie in w; None: all of them.

    A param that is a tree (a flax module's) may be named in part: ``"net$params.out.kernel"``.
    """
    theta = jax.tree_util.tree_flatten_with_path(split.theta)[0]
    path = lambda keys: jax.tree_util.keystr(keys, simple=True, separator=".")
    sizes = [(name, int(np.prod(shape))) for name, shape in split.global_shapes.items()]
    sizes += [(path(keys), int(np.size(value))) for keys, value in theta]
    stops = np.cumsum([size for _, size in sizes])
    found, runs = set(), []
    for (name, size), stop in zip(sizes, stops, strict=True):
        chosen = [given for given in names or ("",) if names is None or f"{name}.".startswith(f"{given}.")]
        found |= set(chosen)
        if chosen and size:
            runs.append((int(stop) - size, int(stop)))
    unknown = [name for name in names or () if name not in found]
    if unknown:
        raise ValueError(
            f"head names {unknown[0]!r}, and this model's global sites and params are "
            f"{', '.join(name for name, _ in sizes)}"
        )
    return Head(_joined(runs))


def _joined(runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Neighbours as one.

    >>> _joined([(0, 2), (2, 5), (7, 8)])
    ((0, 5), (7, 8))
    """
    out: list[tuple[int, int]] = []
    for start, stop in runs:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)
