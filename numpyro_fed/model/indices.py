"""Indices that point beyond the array they are looked up in, found before anything is run.

One-based numbers, or groups of the pooled data in a silo that has a few of them: JAX takes the last row in silence.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.data.inputs import leaves
from numpyro_fed.data.padding import SiloData, silo_data
from numpyro_fed.data.silos import Silos
from numpyro_fed.model.forward import forward
from numpyro_fed.model.lookups import Lookup, lookups
from numpyro_fed.model.split_model import SplitModel

Array = jax.Array


def silo_lookups(split: SplitModel, data: SiloData) -> list[tuple[str, Lookup, Any]]:
    """What a silo's call of the model looks up by its arguments: the argument, the lookup, and how many rows are real.

    An array that lies along an own axis is padded; its real rows are that axis'. Whether it does shows when the axis is
    twice as long: of a table of three items by three rows, padded, both lengths are the same.
    """
    lookups_here = _lookups(split, data)
    axes = {f"arg:{leaf.path}": {leaf.axis} for leaf in split.spec.own if leaf.axis is not None}
    axes |= {f"site:{site.name}": {axis for axis, _ in site.value_axes} for site in split.partition.sites}
    sizes: dict[str, list[int]] = {}  # of all lookups, one axis twice as long
    out = []
    for i, found in enumerate(lookups_here):
        rows = []
        for axis in sorted({axis for source in found.into for axis in axes.get(source, ())}):
            if data.mask[axis].shape[-1] != found.size:
                continue
            if axis not in sizes:
                sizes[axis] = [one.size for one in _lookups(split, _doubled(split, data, axis))]
            if len(sizes[axis]) != len(lookups_here) or sizes[axis][i] != found.size:
                rows.append(jnp.sum(data.mask[axis]))
        argument = " and ".join(sorted(name.partition(":")[2] for name in found.by))
        out.append((argument, found, jnp.max(jnp.stack(rows)) if rows else found.size))
    return out


def _lookups(split: SplitModel, data: SiloData) -> list[Lookup]:
    """All of them; of data that are shapes alone, without places."""
    own = [leaf for leaf in split.spec.own if leaf.dtype is not None]
    shared = [leaf for leaf in split.spec.shared if leaf.dtype is not None]
    inputs: dict[str, Any] = {f"arg:{leaf.path}": array for leaf, array in zip(own, data.args, strict=True)}
    inputs |= {f"shared:{leaf.path}": array for leaf, array in zip(shared, data.shared, strict=True)}
    latents = split.unravel(jnp.zeros(split.dim)) | split.unpack(split.zeros_local(data.mask), data.mask)
    inputs |= {f"site:{name}": value for name, value in latents.items()}

    def run(**inputs: Any) -> dict[str, Array]:
        args = tuple(inputs[f"arg:{leaf.path}"] for leaf in own)
        common = tuple(inputs[f"shared:{leaf.path}"] for leaf in shared)
        values = {name: inputs[f"site:{name}"] for name in latents}
        return split._log_probs(values, split.theta, SiloData(args, data.mask, common))[0]

    return lookups(run, inputs, frozenset(f"site:{name}" for name in latents))


def _doubled(split: SplitModel, data: SiloData, axis: str) -> SiloData:
    """What data with twice as many rows would look like."""
    own = [leaf for leaf in split.spec.own if leaf.dtype is not None]
    size = lambda leaf, array: (array.shape[0] * (1 + (leaf.axis == axis)), *array.shape[1:]) if array.ndim else ()
    args = (jax.ShapeDtypeStruct(size(leaf, array), array.dtype) for leaf, array in zip(own, data.args, strict=True))
    return SiloData(tuple(args), data.mask | {axis: jnp.ones(2 * data.mask[axis].shape[-1], bool)}, data.shared)


def in_range(split: SplitModel, data: SiloData) -> dict[str, Array]:
    """By argument: whether all that is looked up by its numbers is there. Pure; for the survey."""
    fine: dict[str, Array] = {}
    for argument, found, rows in silo_lookups(split, data):
        index = found.place()
        there = jnp.all((index >= 0) & (index <= rows - found.width))
        fine[argument] = fine.get(argument, jnp.ones((), bool)) & there
    return fine


def beyond(split: SplitModel, silos: Silos, silo: str, argument: str) -> str:
    """The message for a silo's index that points beyond an array."""
    data = silo_data(silos, silo, split.spec, split.partition.axes)
    for by, found, rows in silo_lookups(split, data):
        message = _message(f"silo {silo!r}", by, found, int(rows)) if by == argument else None
        if message is not None:
            return message
    return (
        f"silo {silo!r}: {argument} has negative numbers, which count from the end of an array of the silo's own, and "
        "silos differ in their rows: padded rows would be taken. Count from 0."
    )


def _message(where: str, argument: str, found: Lookup, rows: int) -> str | None:
    """What to type where a lookup points beyond its array; None where it does not."""
    index = np.asarray(found.place())
    bad = index[(index < 0) | (index > rows - found.width)]
    if not bad.size:
        return None
    sources = ", ".join(sorted(repr(name.rpartition(":")[2]) for name in found.into)) or "nothing else"
    one_based = index.min() > 0 and index.max() == rows
    return (
        f"{where}: by {argument} the model looks up row {int(bad.reshape(-1)[0])} of an array of {rows} rows (0 to "
        f"{rows - 1}; it depends on {sources}), and JAX would take another row in silence. Count from 0"
        + (f" ({argument} - 1). " if one_based else ". ")
        + f"Groups of pooled data are renumbered within each silo by nf.split(labels, groups=dict({argument}=...), "
        "...). Rows that are masked out need an index that is there, too."
    )


def check_call(split: SplitModel, kwargs: dict[str, Any]) -> None:
    """Raise when a call of the model on new units looks up rows that are not there."""
    arrays = {path: jnp.asarray(leaf) for path, leaf in leaves(kwargs) if not isinstance(leaf, int)}
    flat, structure = jax.tree.flatten(kwargs)
    paths = [path for path, _ in leaves(kwargs)]

    def run(**inputs: Any) -> dict[str, Array]:
        full = [inputs.get(path, leaf) for path, leaf in zip(paths, flat, strict=True)]
        values = {name: inputs[f"site:{name}"] for name in latents}
        return forward(split, values, split.theta, jax.tree.unflatten(structure, full), jax.random.key(0))

    latents = split.unravel(jnp.zeros(split.dim))
    sites = {f"site:{name}": value for name, value in latents.items()}
    for found in lookups(run, arrays | sites, frozenset(sites)):
        message = _message("data", " and ".join(sorted(found.by)), found, found.size)
        if message is not None:
            raise ValueError(message)
