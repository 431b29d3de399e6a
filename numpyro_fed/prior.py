"""The prior of the globals as a normal factor.

Where the prior is normal in unconstrained space its factor is exact. Where it is not (a HalfCauchy's logarithm, say),
it starts at the prior's moments and the server refines it like any other site: the target is the user's model, not an
approximation of its prior.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import init_to_sample

from numpyro_fed.families import Natural, Normal
from numpyro_fed.guides.traced import initial
from numpyro_fed.split_model import SplitModel

Array = Any
DRAWS = 4096
TAIL = 0.005  # of the draws on either side: a Cauchy has no moments


class Prior(NamedTuple):
    factor: Natural
    exact: bool
    log_constant: float  # log p(z) minus the factor's logarithm, where exact


def normal_prior(split: SplitModel, family: Normal) -> Prior:
    """The prior's normal factor, and whether it is the prior itself."""
    d = split.dim
    with jax.enable_x64(True):  # no draws are made here, so the model may be traced in float64
        log_prior = lambda z: split.log_prior(z, split.theta)
        hessian = jax.jit(jax.hessian(log_prior))
        places = np.random.default_rng(0).normal(size=(3, d)) * np.array([[0.3], [1.0], [2.0]])
        found = np.stack([hessian(jnp.asarray(z)) for z in places])
        slope, at_zero = jax.jit(jax.grad(log_prior))(jnp.zeros(d)), float(log_prior(jnp.zeros(d)))
        size = np.max(np.abs(found))
        quadratic = np.all(np.isfinite(found)) and np.max(np.abs(found - found[0])) <= 1e-5 * size
        diagonal = np.max(np.abs(found[0] - np.diag(np.diag(found[0])))) <= 1e-9 * size
        same = np.ptp(np.diag(found[0])) <= 1e-9 * size
        kept = {"full": True, "diagonal": diagonal, "identity": diagonal and same}[family.kind]
        if quadratic and kept:
            precision = -jnp.asarray(found[0])
            if family.kind != "full":
                precision = jnp.diagonal(precision)
                precision = jnp.mean(precision) if family.kind == "identity" else precision
            return Prior(Natural(precision, jnp.asarray(slope, jnp.float64)), True, at_zero)
    keys = jax.random.split(jax.random.key(0), DRAWS)
    draws = np.asarray(jax.jit(jax.vmap(lambda key: initial(split, init_to_sample, key)))(keys), np.float64)
    low, high = np.nanquantile(draws, [TAIL, 1 - TAIL], axis=0)
    draws = np.clip(draws, low, high)
    return Prior(family.project(draws.mean(axis=0), draws.var(axis=0)), False, 0.0)
