"""The prior of the globals as a normal factor.

Where the prior is normal in unconstrained space its factor is exact. Where it is not (a HalfCauchy's logarithm, say),
it starts at the prior's median and quartiles, and the server refines it like any other site: the target is the user's
model, not an approximation of its prior.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.infer import init_to_sample

from numpyro_fed.host import key_of, put
from numpyro_fed.model.initial import initial
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.families import Family, Natural
from numpyro_fed.pieces import jit
from numpyro_fed.precision import unoptimised

Array = jax.Array
MOST_DENSE = 500  # dimensions in which the prior's Hessian is looked at as a matrix
DRAWS, FEWEST, MOST_DRAWN = 4096, 256, 2**25  # of a prior that is not normal; numbers in all of them


class Prior(NamedTuple):
    factor: Natural
    exact: bool
    log_constant: float  # log p(z) minus the factor's logarithm, where exact


def normal_prior(split: SplitModel, family: Family) -> Prior:
    """The prior's normal factor, and whether it is the prior itself."""
    d = split.dim
    try:
        exact = _exact(split, family)
    except TypeError:
        # JAX keeps what it traced of a model with NumPy arrays of doubles (a prior's scale) in float32, and takes it
        # out again in float64, where it does not fit; but nothing is traced without jit
        with jax.disable_jit():
            exact = _exact(split, family)
    if exact is not None:
        return exact
    num, one = int(np.clip(MOST_DRAWN // d, FEWEST, DRAWS)), lambda key: initial(split, init_to_sample, key)
    drawn = jit(lambda key: jax.vmap(one)(jax.random.split(key, num)), compiler_options=unoptimised())
    draws = np.asarray(drawn(key_of(0)), np.float64)
    # medians and quartiles: a Cauchy has no moments, and draws of an explosive prior may overflow
    low, middle, high = np.nanquantile(np.where(np.isfinite(draws), draws, np.nan), [0.25, 0.5, 0.75], axis=0)
    centre, sd = np.nan_to_num(middle), np.clip(np.nan_to_num((high - low) / 1.349), 1e-3, 1e3)
    return Prior(family.project(centre, sd**2), False, 0.0)


def _exact(split: SplitModel, family: Family) -> Prior | None:
    d = split.dim
    with jax.enable_x64(True):  # no draws are made here, so the model may be traced in float64
        log_prior = lambda z: split.log_prior(z, split.theta)
        dense = d <= MOST_DENSE or family.kind == "full"
        curvature = jax.hessian(log_prior) if dense else partial(_along, log_prior, _probes(d))
        seen = jit(lambda at: (*jax.value_and_grad(log_prior)(at), curvature(at)), compiler_options=unoptimised())
        places = _places(d)
        # not at zero, where NumPyro's gradients of logits are wrong
        values, slopes, curved = (np.stack(column) for column in zip(*map(seen, places), strict=True))
        precision = (_dense if dense else _diagonal)(curved, family)
        if precision is None:
            return None
        times = [precision @ z if np.ndim(precision) == 2 else precision * z for z in places]
        slope = slopes[0] + times[0]
        if not _linear(places, slopes, slope, precision):
            return None
        at_zero = values[0] - places[0] @ slope + 0.5 * places[0] @ times[0]
        found: Any = np.asarray(precision), np.asarray(slope, np.float64)
        return Prior(Natural(*put(found)), True, float(at_zero))


def _linear(places: np.ndarray, slopes: np.ndarray, slope: np.ndarray, precision: np.ndarray) -> bool:
    """Whether the gradient is a quadratic's: a Laplace prior's jumps, though its Hessian is the same everywhere."""
    dense = np.ndim(precision) == 2
    for z, there in zip(places, slopes, strict=True):
        times = precision @ z if dense else precision * z
        size = np.abs(precision) @ np.abs(z) if dense else np.abs(times)
        allowed = 1e-5 * (np.abs(slope) + size) + 1e-9
        if not np.all(np.abs(there - (slope - times)) <= allowed):
            return False
    return True


def _places(d: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3, d)) * np.array([[0.3], [1.0], [2.0]])


def _dense(found: np.ndarray, family: Family) -> np.ndarray | None:
    """The precision, from Hessians (3, d, d): if the log density is quadratic and the family can keep it."""
    size = np.max(np.abs(found))
    scale = np.sqrt(np.max(np.abs(np.diagonal(found, axis1=1, axis2=2)), axis=0))
    unit = np.outer(scale, scale)  # of each pair: one tight prior must not hide what another is
    quadratic = np.all(np.isfinite(found)) and np.all(np.abs(found - found[0]) <= 1e-5 * unit + 1e-12)
    diagonal = np.diag(found[0])
    alone = np.all(np.abs(found[0] - np.diag(diagonal)) <= 1e-9 * unit + 1e-12)
    if not quadratic or (family.kind != "full" and not alone):
        return None
    return -found[0] if family.kind == "full" else _kept(-diagonal, size, family)


def _probes(d: int) -> np.ndarray:
    return np.concatenate([np.ones((1, d)), np.random.default_rng(1).normal(size=(2, d))])


def _along(log_prior: Callable, probes: np.ndarray, z: Array) -> Array:
    """The Hessian times each of the probes."""
    return jax.vmap(lambda v: jax.jvp(jax.grad(log_prior), (z,), (v,))[1])(probes)


def _diagonal(found: np.ndarray, family: Family) -> np.ndarray | None:
    """The same without a matrix, for families without correlations; from Hessians times probes.

    A Hessian H is the same everywhere if Hv is, for random v; it is diagonal, D, if H1 = D1 and Hv = Dv.
    """
    probes = _probes(found.shape[-1])
    size = np.max(np.abs(found))
    quadratic = np.all(np.isfinite(found)) and np.max(np.abs(found - found[0])) <= 1e-5 * size
    diagonal = found[0, 0]
    alone = np.max(np.abs(found[0] - probes * diagonal)) <= 1e-9 * size
    return _kept(-diagonal, size, family) if quadratic and alone else None


def _kept(precision: np.ndarray, size: float, family: Family) -> np.ndarray | None:
    if family.kind == "diagonal":
        return precision
    return np.mean(precision) if np.ptp(precision) <= 1e-9 * size else None
