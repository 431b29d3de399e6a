"""What NumPyro itself says of a program: the density of one silo's model, unpadded, on values by name.

Nothing here is the library's. A silo's joint density has the globals' prior and the server's terms in it; those by
themselves are added up from a trace, so that they can be counted once.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import constrain_fn, potential_energy

from .description import Truth

Values = dict[str, Any]


def seeded(model: Any, params: Values) -> Any:
    return handlers.seed(handlers.substitute(model, data=params), jax.random.PRNGKey(0))


def shapes(
    model: Any, kwargs: dict[str, Any]
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[tuple[int, ...], int]]]:
    """Unconstrained shapes of continuous latents; shapes and numbers of values of discrete ones."""
    continuous: dict[str, tuple[int, ...]] = {}
    discrete: dict[str, tuple[tuple[int, ...], int]] = {}

    def look() -> int:
        for name, site in handlers.trace(seeded(model, {})).get_trace(**kwargs).items():
            if site["type"] != "sample" or site["is_observed"]:
                continue
            shape = jnp.shape(site["value"])
            if site["fn"].support.is_discrete:
                discrete[name] = shape, len(site["fn"].enumerate_support(expand=False).reshape(-1))
            else:
                continuous[name] = tuple(biject_to(site["fn"].support).inverse_shape(shape))
        return 0

    jax.eval_shape(look)
    return continuous, discrete


def assignments(discrete: dict[str, tuple[tuple[int, ...], int]]) -> Values:
    """All joint values of the discrete latents, stacked on axis 0."""
    axes = [range(number) for shape, number in discrete.values() for _ in range(int(np.prod(shape)))]
    table = np.array(list(itertools.product(*axes)), np.int32)
    out, start = {}, 0
    for name, (shape, _) in discrete.items():
        size = int(np.prod(shape))
        out[name] = table[:, start : start + size].reshape(-1, *shape)
        start += size
    return out


def joint(model: Any, kwargs: dict[str, Any], values: Values, params: Values, discrete: dict, ignored: float) -> Any:
    """log p(y_j, z_Lj, z_G), Jacobians included, discrete latents summed out by going through all their values.

    ``ignored``: the log of how often the same value is met, since elements that a mask leaves out take them all.
    """
    if not discrete:
        return -potential_energy(seeded(model, params), (), kwargs, values)
    at = lambda given: -potential_energy(seeded(handlers.substitute(model, data=given), params), (), kwargs, values)
    return jax.scipy.special.logsumexp(jax.vmap(at)(assignments(discrete))) - ignored


def server(model: Any, kwargs: dict[str, Any], values: Values, params: Values, truth: Truth) -> Any:
    """The globals' prior density with its Jacobians, and the terms that are counted once, as one silo sees them."""
    constrained = constrain_fn(seeded(model, params), (), kwargs, values)
    trace = handlers.trace(handlers.substitute(seeded(model, params), data=constrained)).get_trace(**kwargs)
    total = jnp.zeros(())
    for name in truth.global_sites | truth.server_terms:
        site = trace[name]
        total += jnp.sum(site["fn"].log_prob(site["value"]) * (1.0 if site["scale"] is None else site["scale"]))
        if name in truth.global_sites:
            move = biject_to(site["fn"].support)
            total += jnp.sum(move.log_abs_det_jacobian(values[name], constrained[name]))
    return total
