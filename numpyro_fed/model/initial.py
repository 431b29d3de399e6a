"""Values of the model's latents without constraints, and the start that a NumPyro strategy gives."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.distributions.util import sum_rightmost
from numpyro.infer import init_to_uniform

from numpyro_fed.data.padding import SiloData
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.threads import unvalidated

Array = jax.Array


def initial(split: SplitModel, init_loc_fn: Callable, key: Array) -> Array:
    """z_G where a NumPyro initialisation strategy puts the global sites."""
    data = split.dummy()
    params = split.constrain_theta(split.theta) | split.constants
    model = handlers.seed(handlers.substitute(split.model, data=params), key)
    with unvalidated():
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
    with unvalidated():
        trace = handlers.trace(model).get_trace(**split.spec.kwargs(data))
    flat, log_det = {}, {}
    for name, value in values.items():
        fn = trace[name]["fn"]
        transform = biject_to(fn.support)
        flat[name] = transform.inv(value)
        by_element = transform.log_abs_det_jacobian(flat[name], value)
        log_det[name] = sum_rightmost(by_element, jnp.ndim(by_element) - jnp.ndim(value) + len(fn.event_shape))
    return flat, log_det
