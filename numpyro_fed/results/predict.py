r"""Predictions: the model run forward on joint draws of the posterior.

Globals always come from :math:`q(z_G)`. Whether a local latent comes from its silo's :math:`q(z_L \mid z_G)` or from
its prior :math:`p(z_L \mid z_G)` depends on whose it is: the units of a silo have their own posterior, new units of it
know only what its other units taught about the silo, and a new silo knows the globals alone. An encoder
(:class:`numpyro_fed.guides.Amortized`) reads the latents of new units off their data. The same holds for discrete
latents, whose posterior given all else is exact. Observed sites are always drawn, never held; ``numpyro.factor`` weighs
no draw.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_fed.data.padding import SiloData, axis_lengths, from_arguments, silo_data
from numpyro_fed.data.silos import at_silo
from numpyro_fed.keys import identity
from numpyro_fed.model.forward import Call, Request, call_of, unit_axes
from numpyro_fed.model.new_units import arguments
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.results.draws import data_of, lengths_of, unpadded
from numpyro_fed.results.value import Fitted

Array = jax.Array
NEW = "\0new"  # a silo that is not there


class Asked(NamedTuple):
    """What is to be predicted."""

    call: Call
    request: Request
    own: SiloData | None = None  # of a silo's own units: the data with the prediction's rows, padded or not


def predict(fit: Fitted, keys: Array, data: Mapping[str, Any] | None, silo: str | None) -> dict[str, Array]:
    """See :meth:`numpyro_fed.results.fit.Fit.predict`."""
    server = fit.state.server
    z = fit.programs.z(keys, server)
    with at_silo(silo):
        call, request, own = asked(fit, data, silo)
        draws = fit.programs.predictor(call, keys, z, server, request)
        return draws if own is None else unpadded(fit, draws, str(silo), own)


def asked(
    fit: Fitted,
    data: Mapping[str, Any] | None,
    silo: str | None,
    *,
    plain: bool = False,
    used: frozenset[str] | None = None,
) -> Asked:
    """From what a user asks for to what is computed. Call it in the silo's room, where there is one.

    Args:
        fit, data, silo: as :meth:`numpyro_fed.results.fit.Fit.predict` has them.
        plain: a silo's own units come without padding.
        used: arguments whose values matter, when they are not those of a prediction.
    """
    if data is None and silo is None:
        raise TypeError(
            "predict needs data, a silo, or both: predict(key, silo='york') for york's own units, predict(key, data, "
            "silo='york') for new units in it, predict(key, data) for a new silo"
        )
    return _own_units(fit, str(silo), plain) if data is None else _new_units(fit, data, silo, used)


def _own_units(fit: Fitted, silo: str, plain: bool) -> Asked:
    """Replicates of a silo's own data."""
    state, _ = fit.state.silo(silo)
    fit.need_silos(f"predictions for the units of {silo!r}")
    padded, own = data_of(fit, silo, plain)
    data, part = padded if own is None else own, fit.split.partition
    held = (*part.local_sites, *part.enumerated_sites)
    call, arrays = call_of(fit.split.spec.kwargs(data), held, axis_lengths(data))
    units = data if part.enumerated_sites else None
    return Asked(call, Request(identity(silo), state, arrays, padded if held else None, units), data)


def _new_units(fit: Fitted, data: Mapping[str, Any], silo: str | None, used: frozenset[str] | None) -> Asked:
    """New units, of a silo or of a new one."""
    split, state, padded, units = fit.split, None, None, None
    discrete = split.partition.enumerated_sites
    held: tuple[str, ...] = ()
    lengths: dict[str, int] = {}
    if silo is not None:
        state, _ = fit.state.silo(silo)
        lengths = lengths_of(split, silo)
    kwargs, new = new_arguments(fit, data, silo, used)
    if encodes(fit, data):  # new units have told of themselves
        state, _ = fit.state.silo(fit.state.names[0])  # an encoder has no parameters in the silos
        held, lengths = split.partition.local_sites, new
        padded = from_arguments(kwargs, split.spec, new)
        if discrete and complete(fit, data):
            held, units = (*held, *discrete), padded
    elif silo is not None:
        held = held_sites(split, lengths, new)
        known = set(held) & set(discrete)
        if held and (fit.reads_data or known):
            fit.need_silos(f"predictions in {silo!r}, whose latents are read off its data,")
        if held:
            padded, _ = data_of(fit, silo)
        if known:
            units = silo_data(fit.any_silos, silo, split.spec, split.partition.axes)
    call, arrays = call_of(kwargs, held, lengths)
    return Asked(call, Request(identity(silo or NEW), state, arrays, padded, units))


def encoded(fit: Fitted, keys: Array, data: Mapping[str, Any]) -> dict[str, Array]:
    """Latents of new units, read off their data: see :meth:`numpyro_fed.results.fit.Fit.sample_local`."""
    kwargs, lengths = new_arguments(fit, data, None)
    if not encodes(fit, data):
        raise ValueError(
            "the latents of new units are read off their data by an amortised guide (nf.guides.Amortized), which "
            "needs all of its inputs in data. This fit has "
            + (f"inputs {', '.join(fit.inputs)}" if fit.inputs else "another guide")
            + "; fit.predict(key, data) draws such latents from their prior instead."
        )
    new, server, programs = from_arguments(kwargs, fit.split.spec, lengths), fit.state.server, fit.programs
    state, _ = fit.state.silo(fit.state.names[0])  # an encoder has no parameters in the silos
    z = programs.z(keys, server)
    local = programs.local_sites(keys, z, identity(NEW), server, state, new, None)
    if not complete(fit, data):  # discrete sites are drawn given all of a unit's data
        unseen = {*fit.split.partition.enumerated_sites, *fit.split.enumeration.drawn}
        local = {name: value for name, value in local.items() if name not in unseen}
    return {**programs.global_sites(z, server), **local}


def held_sites(split: SplitModel, own: dict[str, int], new: dict[str, int]) -> tuple[str, ...]:
    """Local sites that new units of a silo share with its own: the silo's, and those of unchanged groups."""
    units = unit_axes(split)
    same = {axis for axis in own if axis not in units and new.get(axis) == own[axis]}
    return tuple(
        site.name
        for site in split.partition.sites
        if site.role in ("local", "enumerated") and {axis for axis, _ in (*site.axes, *site.value_axes)} <= same
    )


def encodes(fit: Fitted, data: Mapping[str, Any]) -> bool:
    """Whether the latents of these new units can be read off their data."""
    names = {path.split("[")[0].split(".")[0] for path in fit.inputs}
    return bool(names) and all(data.get(name) is not None for name in names)


def complete(fit: Fitted, data: Mapping[str, Any]) -> bool:
    """Whether nothing is left out, so that discrete latents can be read off the data, too."""
    own = jax.tree.unflatten(fit.split.spec.own_structure, fit.split.spec.own)
    return all(data.get(name) is not None for name in own)


def new_arguments(
    fit: Fitted, data: Mapping[str, Any], silo: str | None, used: frozenset[str] | None = None
) -> tuple[dict[str, Any], dict[str, int]]:
    """The model's arguments for new units, and the lengths of their axes."""
    own = {} if silo is None else fit.any_silos.own(silo)
    if fit.silos is None:  # then only the ints are real
        own = {name: value for name, value in own.items() if isinstance(value, int)}
    own = jax.tree.map(lambda leaf: leaf if isinstance(leaf, int) else np.asarray(leaf), own)
    used = fit.programs.used_arguments if used is None else used
    return arguments(fit.split, used, data, own, silo or "new")
