"""Guides written in NumPyro, on unconstrained vectors.

A NumPyro guide draws constrained values; a density over them becomes one over unconstrained vectors by the Jacobian of
the model's own transforms, so that it can stand beside the model's (:mod:`numpyro_fed.model.split_model`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
from numpyro import handlers
from numpyro.distributions import biject_to, constraints

from numpyro_fed.threads import unvalidated

Array = jax.Array


def guide_trace(guide: Callable, kwargs: dict, params: dict, key: Array, held: dict | None = None) -> dict[str, dict]:
    """One run of the guide: params set (constrained), sites in ``held`` held, the others drawn."""
    guide = handlers.substitute(guide, data={**params, **(held or {})})
    with unvalidated():
        return handlers.trace(handlers.seed(guide, key)).get_trace(**kwargs)


def param_constraints(trace: dict[str, dict]) -> dict[str, Any]:
    return {n: s["kwargs"].get("constraint", constraints.real) for n, s in trace.items() if s["type"] == "param"}


def unconstrained_params(trace: dict[str, dict], names: Iterable[str] | None = None) -> dict[str, Array]:
    limits = param_constraints(trace)
    chosen = limits if names is None else names
    return {name: biject_to(limits[name]).inv(trace[name]["value"]) for name in chosen}


def constrained_params(params: dict[str, Array], limits: dict[str, Any]) -> dict[str, Array]:
    return {name: biject_to(limits[name])(value) for name, value in params.items()}


def log_densities(trace: dict[str, dict], held: Iterable[str] = ()) -> dict[str, Array]:
    """The log density of every drawn site, element by element, on the scale of its (constrained) value."""
    out = {}
    for name, site in trace.items():
        if site["type"] != "sample" or site["is_observed"] or name in held:
            continue
        log_prob = site["fn"].log_prob(site["value"], *([site["intermediates"]] if site["intermediates"] else []))
        out[name] = log_prob if site["scale"] is None else site["scale"] * log_prob
    return out
