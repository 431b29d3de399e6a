"""Units that no silo has seen, under a guide that reads latents off the data."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from numpyro_fed.arguments import arguments

if TYPE_CHECKING:
    from numpyro_fed.fit import Fit


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
