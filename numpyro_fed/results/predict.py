r"""Predictions: the model run forward on joint draws of the posterior.

Globals always come from :math:`q(z_G)`. Whether a local latent comes from its silo's :math:`q(z_L \mid z_G)` or from
its prior :math:`p(z_L \mid z_G)` depends on whose it is: the units of a silo have their own posterior, new units of it
know only what its other units taught about the silo, and a new silo knows the globals alone. An encoder
(:class:`numpyro_fed.guides.Amortised`) reads the latents of new units off their data. The same holds for discrete
latents, whose posterior given all else is exact. Observed sites are always drawn, never held; ``numpyro.factor`` weighs
no draw.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from numpyro_fed.data.padding import from_arguments, silo_data
from numpyro_fed.keys import identity
from numpyro_fed.model.forward import call_of, unit_axes
from numpyro_fed.model.new_units import arguments
from numpyro_fed.model.split_model import SplitModel

if TYPE_CHECKING:
    from numpyro_fed.results.fit import Fit

Array = Any
NEW = "\0new"  # a silo that is not there


def predict(fit: "Fit", keys: Array, data: Mapping[str, Any] | None, silo: str | None) -> dict[str, Array]:
    """See :meth:`numpyro_fed.results.fit.Fit.predict`."""
    if data is None and silo is None:
        raise TypeError(
            "predict needs data, a silo, or both: predict(key, silo='york') for york's own units, predict(key, data, "
            "silo='york') for new units in it, predict(key, data) for a new silo"
        )
    if data is None:
        return own_units(fit, keys, str(silo))
    split = fit.split
    state = mask = units = None
    lengths: dict[str, int] = {}
    if silo is not None:
        state, b = fit.state.silo(silo)
        lengths = {axis.name: axis.lengths[silo] for axis in split.partition.axes}
        mask = {axis: jnp.arange(n) < lengths[axis] for axis, n in fit.padded[b].items()}
    kwargs, new = new_arguments(fit, data, silo)
    held = held_sites(split, lengths, new) if silo is not None else ()
    if encodes(fit, data):  # new units have told of themselves
        state, _ = fit.state.silo(fit.state.names[0])  # an encoder has no parameters in the silos
        units, held, lengths = from_arguments(kwargs, split.spec, new), split.partition.local_sites, new
        if complete(fit, data):
            held = (*held, *split.partition.enumerated_sites)
    elif held and (fit.reads_data or set(held) & set(split.partition.enumerated_sites)):
        fit.need_silos(f"predictions in {silo!r}, whose latents are read off its data,")
        units = silo_data(fit.any_silos, str(silo), split.spec, split.partition.axes)
    call, arrays = call_of(kwargs, held, lengths)
    return fit._predictor(keys, identity(silo or NEW), fit.state.server, state, mask, arrays, call, units)


def own_units(fit: "Fit", keys: Array, silo: str) -> dict[str, Array]:
    """Replicates of a silo's own data."""
    state, _ = fit.state.silo(silo)
    fit.need_silos(f"predictions for the units of {silo!r}")
    mask, data = fit._data(silo)
    lengths = {axis: rows.shape[-1] for axis, rows in data.mask.items()}
    part = fit.split.partition
    call, arrays = call_of(fit.split.spec.kwargs(data), (*part.local_sites, *part.enumerated_sites), lengths)
    units = data if fit.reads_data or part.enumerated_sites else None
    draws = fit._predictor(keys, identity(silo), fit.state.server, state, mask, arrays, call, units)
    return fit._unpad(draws, silo, data)


def held_sites(split: SplitModel, own: dict[str, int], new: dict[str, int]) -> tuple[str, ...]:
    """Local sites that new units of a silo share with its own: the silo's, and those of unchanged groups."""
    units = unit_axes(split)
    same = {axis for axis in own if axis not in units and new.get(axis) == own[axis]}
    return tuple(
        site.name
        for site in split.partition.sites
        if site.role in ("local", "enumerated") and {axis for axis, _ in (*site.axes, *site.value_axes)} <= same
    )


def inputs(fit: "Fit") -> tuple[str, ...]:
    """The arguments that the fit's encoder reads; () when it has none."""
    family = getattr(fit.method, "family", None)
    found = getattr(family, "argument_names", None)
    return () if found is None or not fit.split.groups else found(fit.split)


def encodes(fit: "Fit", data: Mapping[str, Any]) -> bool:
    """Whether the latents of these new units can be read off their data."""
    names = {path.split("[")[0].split(".")[0] for path in inputs(fit)}
    return bool(names) and all(data.get(name) is not None for name in names)


def complete(fit: "Fit", data: Mapping[str, Any]) -> bool:
    """Whether nothing is left out, so that discrete latents can be read off the data, too."""
    own = jax.tree.unflatten(fit.split.spec.own_structure, fit.split.spec.own)
    return all(data.get(name) is not None for name in own)


def new_arguments(fit: "Fit", data: Mapping[str, Any], silo: str | None) -> tuple[dict[str, Any], dict[str, int]]:
    """The model's arguments for new units, and the lengths of their axes."""
    own = {} if silo is None else fit.any_silos.own(silo)
    if fit.silos is None:  # then only the ints are real
        own = {name: value for name, value in own.items() if isinstance(value, int)}
    return arguments(fit.split, fit._used_arguments, data, own, silo or "new")
