"""Guides written in NumPyro, on unconstrained vectors.

A NumPyro guide draws constrained values; a density over them becomes one over unconstrained vectors by the Jacobian of
the model's own transforms, so that it can stand beside the model's (:mod:`numpyro_fed.split_model`).
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.distribution import validation_enabled
from numpyro.distributions.util import sum_rightmost
from numpyro.infer import init_to_uniform

from numpyro_fed.padding import SiloData
from numpyro_fed.split_model import SplitModel

Array = Any


def guide_trace(guide: Callable, kwargs: dict, params: dict, key: Array, held: dict | None = None) -> dict[str, dict]:
    """One run of the guide: params set (constrained), sites in ``held`` held, the others drawn."""
    guide = handlers.substitute(guide, data={**params, **(held or {})})
    with validation_enabled(False):
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


def initial(split: SplitModel, init_loc_fn: Callable, key: Array) -> Array:
    """z_G where a NumPyro initialisation strategy puts the global sites."""
    data = split.spec.dummy()._replace(shared=split.shared)
    params = split.constrain_theta(split.theta) | split.constants
    model = handlers.seed(handlers.substitute(split.model, data=params), key)
    with validation_enabled(False):
        trace = handlers.trace(handlers.substitute(model, substitute_fn=init_loc_fn)).get_trace(
            **split.spec.kwargs(data)
        )
    values = {name: trace[name]["value"] for name in split.global_shapes}
    return split.ravel(unconstrained(split, values, split.theta, data)[0])


def unconstrained(
    split: SplitModel, values: dict[str, Array], theta: dict, data: SiloData
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Constrained values of the model's latents without constraints, and each Jacobian's log determinant.

    The determinants have the shape of the site's log density.
    """
    params = split.constrain_theta(theta) | split.constants
    model = handlers.substitute(split.model, data={**params, **values})
    others = lambda site: None if site["name"] in values else init_to_uniform(site)
    model = handlers.substitute(handlers.seed(model, jax.random.key(0)), substitute_fn=others)
    with validation_enabled(False):
        trace = handlers.trace(model).get_trace(**split.spec.kwargs(data))
    flat, log_det = {}, {}
    for name, value in values.items():
        fn = trace[name]["fn"]
        transform = biject_to(fn.support)
        flat[name] = transform.inv(value)
        by_element = transform.log_abs_det_jacobian(flat[name], value)
        log_det[name] = sum_rightmost(by_element, jnp.ndim(by_element) - jnp.ndim(value) + len(fn.event_shape))
    return flat, log_det
