"""Importance sampling: points of a Student t, and Pareto smoothed weights."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import logsumexp, ndtri
from scipy.stats import chi2, multivariate_t, qmc

from numpyro_fed.host import folded, real_dtype
from numpyro_fed.keys import digest
from numpyro_fed.precision import in_x64

DEGREES = ((5, 3), (10**9, 6))  # of the Student t, up to so many dimensions: heavy tails where they cost little
INFLATION = 1.1
EQUAL = 1e-2  # log weights that differ by less are equal: an exact proposal's differ by rounding
SCRAMBLE = digest("\0scramble")


def scrambling(key: Any) -> np.ndarray:
    """What makes the points of a key its own: uint32 words."""
    return np.asarray(jax.random.key_data(folded(key, SCRAMBLE))).ravel()


def proposal(
    words: np.ndarray, mean: np.ndarray, covariance: np.ndarray, num_points: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scrambled Sobol points of the Student t, (S, d), in the user's precision, and their log densities.

    S is the next power of two; fewer points are the first of more. A t is a normal over the root of an independent
    chi-square: one more coordinate.
    """
    d = len(mean)
    degrees = next(number for most, number in DEGREES if d <= most)
    sobol = qmc.Sobol(d + 1, scramble=True, rng=np.random.default_rng(np.asarray(words).tolist()))
    unit = np.clip(sobol.random_base2(int(np.ceil(np.log2(num_points)))), 1e-12, 1 - 1e-12)
    white = ndtri(unit[:, :d]) * np.sqrt(degrees / chi2.ppf(unit[:, d:], degrees))
    scale = np.sqrt(np.diagonal(covariance))
    root = np.sqrt(INFLATION) * scale[:, None] * np.linalg.cholesky(covariance / scale / scale[:, None])
    points = (mean + white @ root.T).astype(real_dtype())
    white = np.linalg.solve(root, (points - mean).T)  # of the rounded points, which are those that are evaluated
    # in white coordinates: scipy would call a covariance of condition 1e10 singular
    standard = multivariate_t.logpdf(white.T, np.zeros(d), np.eye(d), df=degrees)
    return points, np.atleast_1d(standard) - np.sum(np.log(np.diagonal(root)))


def pareto_smoothed(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Normalised log weights, their largest smoothed, and the Pareto k-hat (Vehtari et al. 2024).

    Weights that are all equal are exact: -inf.

    >>> pareto_smoothed(np.zeros(64))[1]
    -inf
    """
    finite = np.isfinite(log_weights)
    given = log_weights[finite] - np.max(log_weights[finite])
    smoothed, k = (np.zeros_like(given), -np.inf) if np.ptp(given) < 1e-6 else _smoothed(given)
    out = np.full_like(log_weights, -np.inf)
    out[finite] = smoothed - logsumexp(smoothed)
    return out, float(k)


def _smoothed(log_weights: np.ndarray) -> tuple[np.ndarray, float]:
    """Of log weights whose largest is 0: those in the tail become quantiles of the generalised Pareto fitted to it."""
    num = len(log_weights)
    tail = int(np.ceil(min(num / 5, 3 * np.sqrt(num))))
    order = np.argsort(log_weights)
    least = max(log_weights[order[-tail - 1]], np.log(np.finfo(float).tiny))
    above = order[log_weights[order] > least]
    if len(above) < 5:  # too few to fit anything to
        return log_weights, np.inf
    with np.errstate(all="ignore"):
        k, sigma = _generalised_pareto(np.exp(log_weights[above]) - np.exp(least))
        if not np.isfinite(k):
            return log_weights, k
        beyond = -np.log1p(-(np.arange(len(above)) + 0.5) / len(above))  # quantiles of a standard exponential
        excess = sigma * (np.expm1(k * beyond) / k if abs(k) > np.finfo(float).eps else beyond)
        out = np.array(log_weights, np.float64)
        out[above] = np.minimum(np.log(excess + np.exp(least)), 0.0)
    return out, k


def _generalised_pareto(x: np.ndarray) -> tuple[float, float]:
    """k and sigma of excesses x, ascending: the estimator of :func:`pareto_k`."""
    tail = len(x)
    grid = np.arange(1, 30 + int(np.sqrt(tail)) + 1) - 0.5
    b = 1 / x[-1] + (1 - np.sqrt(len(grid) / grid)) / (3 * x[int(tail / 4 + 0.5) - 1])
    k = np.mean(np.log1p(-b[:, None] * x), axis=1)
    likelihood = tail * (np.log(-b / k) - k - 1)
    likelihood = np.where(np.isnan(likelihood), -np.inf, likelihood)
    mean = float(np.sum(np.exp(likelihood - logsumexp(likelihood)) * b))
    found = float(np.mean(np.log1p(-mean * x)))
    k_hat = (tail * found + 10 * 0.5) / (tail + 10)
    return (np.inf if np.isnan(k_hat) else k_hat), -found / mean  # NaN: one weight is all there is


@in_x64
def pareto_k(log_weights: jax.Array) -> jax.Array:
    r"""The Pareto k-hat of log weights (S, ...), over the first axis, in JAX: for many sets of weights inside a silo.

    The largest weights' excess x over the next one is taken for a generalised Pareto's,
    :math:`p(x) \propto (1 + k x / \sigma)^{-1/k - 1}`. With :math:`b = -k / \sigma` the likelihood's maximum over k
    is :math:`k(b) = \overline{\log(1 - b x)}`, so b is the one parameter: its mean over a grid, under the likelihood
    and a weak prior, gives k (Zhang and Stephens 2009), which is drawn a little towards 1/2 (Vehtari et al. 2024).
    Weights that are all equal are exact: -inf. In float64.

    >>> heavy = -2.0 * jnp.log(jnp.linspace(1e-4, 1.0, 4096))  # of u ** -k with uniform u
    >>> round(float(pareto_k(heavy / 5)), 1), float(pareto_k(jnp.zeros(64)))
    (0.4, -inf)
    """
    return _tail(jnp.sort(log_weights, axis=0) - jnp.max(log_weights, axis=0)).k


@in_x64
def smoothed_sets(log_weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """:func:`pareto_smoothed` of many sets of log weights (S, ...), over the first axis, in JAX, and their k-hats.

    >>> log_weights, k = smoothed_sets(jnp.zeros((64, 2)))
    >>> np.allclose(np.exp(np.asarray(log_weights)), 1 / 64), k.tolist()
    (True, [-inf, -inf])
    """
    order = jnp.argsort(log_weights, axis=0)
    ordered = jnp.take_along_axis(log_weights, order, axis=0) - jnp.max(log_weights, axis=0)
    found = _tail(ordered)
    num = found.x.shape[0]
    beyond = -np.log1p(-(np.arange(num) + 0.5) / num).reshape(-1, *(1,) * (ordered.ndim - 1))
    k = jnp.where(jnp.isfinite(found.k) & (jnp.abs(found.k) > np.finfo(float).eps), found.k, 1e-8)
    tail = jnp.minimum(jnp.log(found.sigma * jnp.expm1(k * beyond) / k + found.least), 0.0)
    tail = jnp.where(jnp.isfinite(found.k) & jnp.isfinite(tail), tail, ordered[-num:])
    smooth = jnp.concatenate([ordered[:-num], tail])
    back = jnp.take_along_axis(smooth, jnp.argsort(order, axis=0), axis=0)
    return back - jax.scipy.special.logsumexp(back, axis=0), found.k


class Tail(NamedTuple):
    """The largest of sets of weights, and the generalised Pareto fitted to their excess over the next one."""

    x: jax.Array  # (tail, ...), ascending
    least: jax.Array
    k: jax.Array
    sigma: jax.Array


def _tail(ordered: jax.Array) -> Tail:
    """Of log weights (S, ...), ascending, whose largest are 0."""
    num = ordered.shape[0]
    tail = int(np.ceil(min(num / 5, 3 * np.sqrt(num))))
    tiny = jnp.finfo(ordered.dtype).tiny
    least = jnp.maximum(jnp.exp(ordered[-tail - 1]), tiny)
    x = jnp.maximum(jnp.exp(ordered[-tail:]) - least, tiny)
    grid = np.arange(1, 30 + int(np.sqrt(tail)) + 1) - 0.5
    spread = jnp.asarray(1 - np.sqrt(len(grid) / grid), x.dtype).reshape(-1, *(1,) * (x.ndim - 1))
    b = 1 / x[-1] + spread / (3 * x[int(tail / 4 + 0.5) - 1])
    k_of = lambda b: jnp.mean(jnp.log1p(-b * x), axis=0)
    k = jax.lax.map(k_of, b)
    likelihood = tail * (jnp.log(-b / k) - k - 1)
    mean = jnp.sum(jax.nn.softmax(jnp.where(jnp.isnan(likelihood), -jnp.inf, likelihood), axis=0) * b, axis=0)
    at_mean = k_of(mean)
    found = (tail * at_mean + 10 * 0.5) / (tail + 10)
    found = jnp.where(jnp.isnan(found), jnp.inf, found)  # one weight is all there is
    return Tail(x, least, jnp.where(ordered[0] > -EQUAL, -jnp.inf, found), -at_mean / mean)
