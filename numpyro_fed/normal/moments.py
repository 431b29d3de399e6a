r"""Moments of a silo's posterior from few draws in many dimensions: time and memory linear in d.

From draws :math:`x_1, \dots, x_\ell` with mean :math:`\bar x` and covariance S (divisor :math:`\ell - 1`) posterior
averaging (Al-Shedivat et al. 2021) needs

.. math::

    \Delta = \hat\Sigma^{-1} (\theta - \bar x), \qquad
    \hat\Sigma = \varrho I + (1 - \varrho) S, \qquad \varrho = \frac{1}{1 + (\ell - 1) \rho}

and no matrix of size d x d. :func:`start` and :func:`add` are the paper's dynamic programme (its appendix C): each draw
changes :math:`\tilde\Sigma = \hat\Sigma / \varrho` by a matrix of rank one, so that the Sherman-Morrison formula keeps
:math:`\Delta` up to date, draw by draw: :math:`O(\ell d)` for each, and :math:`O(\ell d)` memory. :func:`delta` runs
them as a scan; :func:`direct` solves the same equations with the matrix.

Every estimator here has the form :math:`a T (I + c\, T^{-1} S T^{-1}) T` with a diagonal T, a :class:`Shrinkage`. The
paper's rho gives :math:`T = I`, :math:`a = \varrho`, :math:`c = (\ell - 1) \rho`: it shrinks towards the identity, and
so has a unit. :func:`oas` and :func:`rblw` (Chen et al. 2010) choose how much from the draws; then T holds the draws'
standard deviations, themselves shrunk towards their mean as far as they are noise (Opgen-Rhein and Strimmer 2007), and
what is shrunk is the matrix of correlations.

>>> import jax, jax.numpy as jnp, numpy as np
>>> draws, theta = jax.random.normal(jax.random.key(0), (20, 3)), jnp.ones(3)
>>> np.allclose(delta(theta, draws, 0.5), direct(theta, draws, 0.5))
True
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from numpyro_fed.checks import is_number
from numpyro_fed.normal import stein
from numpyro_fed.precision import in_x64

Array = jax.Array
NEARLY_NONE = 1e-8  # identity's share where there is to be no shrinkage: the inverse must exist
LEAST = 1e-30


class Shrinkage(NamedTuple):
    """The covariance a T (I + c S~) T, with S~ the covariance of T^{-1} x."""

    a: Array
    c: Array
    scale: Array  # the diagonal of T, (d,) or ()

    @property
    def row(self) -> Array:
        """The scale, for draws and directions: (1, d) or (1, 1)."""
        return jnp.reshape(self.scale, (1, -1))


def oas(trace: Array, trace_of_square: Array, num: int, d: int) -> Array:
    """The identity's share by the oracle approximating shrinkage estimator, from tr S and tr S^2 of ``num`` draws."""
    above = (1 - 2 / d) * trace_of_square + trace**2
    below = (num + 1 - 2 / d) * (trace_of_square - trace**2 / d)
    return jnp.where(below > 0, jnp.clip(above / jnp.where(below > 0, below, 1.0), 0.0, 1.0), 1.0)


def rblw(trace: Array, trace_of_square: Array, num: int, d: int) -> Array:
    """The identity's share by the Rao-Blackwellised Ledoit-Wolf estimator."""
    above = max(num - 2, 0) / num * trace_of_square + trace**2
    below = (num + 2) * (trace_of_square - trace**2 / d)
    return jnp.where(below > 0, jnp.clip(above / jnp.where(below > 0, below, 1.0), 0.0, 1.0), 1.0)


CHOSEN = {"oas": oas, "rblw": rblw}


def check_rho(rho: Any) -> Any:
    """A number of at least 0, or the name of a way to choose one."""
    if (is_number(rho) and rho >= 0) or (isinstance(rho, str) and rho in CHOSEN):
        return rho
    raise ValueError(
        f"shrinkage is {rho!r}; use 'oas' or 'rblw' (chosen from the draws), a number of at least 0 (the paper's rho; "
        "0 is the identity), or math.inf (the plain sample covariance)"
    )


def shrinkage(draws: Float[Array, "l d"], rho: Any) -> Shrinkage:
    """How much a sample covariance is shrunk, and to what; float64.

    Args:
        draws: (l, d), l of at least 2.
        rho: the paper's number; ``"oas"`` or ``"rblw"``; ``math.inf`` for hardly at all.
    """
    num, d = draws.shape

    @in_x64
    def chosen(draws: Array) -> Shrinkage:
        one = jnp.ones(())
        if not isinstance(rho, str) and math.isfinite(rho):
            return Shrinkage(one / (1 + (num - 1) * rho), one * (num - 1) * rho, one)
        away = draws - jnp.mean(draws, axis=0, keepdims=True)
        variances = jnp.sum(away**2, axis=0) / (num - 1)
        scale = jnp.sqrt(shrunk_variances(variances, 2 * variances**2 / (num + 1)))  # as of normal draws
        away = away / scale[None]
        gram = away @ away.T / (num - 1)  # (l, l), with the eigenvalues of S~
        trace = jnp.trace(gram)
        nu = jnp.maximum(trace / d, LEAST)
        share = CHOSEN[rho](trace, jnp.sum(gram**2), num - 1, d) if isinstance(rho, str) else 0 * one
        share = jnp.clip(share, NEARLY_NONE, 1.0)
        return Shrinkage(share * nu, (1 - share) / (share * nu), scale)

    return chosen(draws)


def of_narrower(shrunk: Shrinkage, spread: Array, restored: bool) -> Shrinkage:
    r"""The estimate that ``shrunk`` would have been of draws whose variances were smaller by ``spread``.

    Draws are averages of minibatch steps, made wider until they have the posterior's spread; the paper's rho is for the
    averages themselves, :math:`\hat\Sigma = \varrho I + (1 - \varrho) S / \text{spread}`.

    Args:
        restored: times the spread: an estimate of the posterior's covariance, rather than of the averages'.
    """

    @in_x64
    def of(shrunk: Shrinkage, spread: Array) -> Shrinkage:
        return Shrinkage(shrunk.a * spread if restored else shrunk.a, shrunk.c / spread, shrunk.scale)

    return of(shrunk, spread)


def shrunk_variances(
    variances: Float[Array, " d"], error: Float[Array, " d"], share: Array | float | None = None
) -> Array:
    """Shrunk towards their mean by as much as their Monte Carlo error is of their spread (Opgen-Rhein and Strimmer).

    Args:
        variances: (d,).
        error: (d,), the variance of each of them as an estimate.
        share: of the mean in the result, in [0, 1], where it is not to be chosen.
    """
    mean = jnp.mean(variances)
    if share is None:
        spread = jnp.maximum(jnp.sum((variances - mean) ** 2), LEAST)
        share = jnp.clip(jnp.sum(error) / spread, 0.0, 1.0)
    return jnp.maximum(share * mean + (1 - share) * variances, 1e-12 * mean + LEAST)


# --- the dynamic programme ------------------------------------------------------------------------------------------


class Programme(NamedTuple):
    """What is known after t draws; u_k = x_k - mean of those before, v_k = Sigma~_{k-1}^{-1} u_k."""

    mean: Array  # (d,)
    delta: Array  # (d,): Sigma~^{-1} (theta - mean)
    v: Array  # (l, d), rows of zeros where there is no draw yet
    weight: Array  # (l,): gamma_k / (1 + gamma_k u_k' v_k)
    num_draws: Array  # t


def start(theta: Array, capacity: int) -> Programme:
    """Before the first of at most ``capacity`` draws."""
    zeros = jnp.zeros((capacity, *theta.shape), theta.dtype)
    # without a draw the mean is theta: so the first one's u is its distance to theta, and counts whole
    return Programme(theta, jnp.zeros_like(theta), zeros, jnp.zeros(capacity, theta.dtype), jnp.zeros((), jnp.int32))


def add(now: Programme, draw: Array, rho: Any) -> Programme:
    r"""One more draw, for a ``rho`` that is known beforehand.

    With t draws in all, :math:`\gamma = \rho (t - 1) / t`,

    .. math::

        v = u - \sum_k \frac{\gamma_k \, v_k^\top u}{1 + \gamma_k u_k^\top v_k} v_k, \qquad
        \tilde\Delta_t = \tilde\Delta_{t-1} - \left[1 + \frac{\gamma (t \, u^\top \tilde\Delta_{t-1} - u^\top v)}
        {1 + \gamma u^\top v}\right] \frac{v}{t}
    """
    t = (now.num_draws + 1).astype(now.mean.dtype)
    u = draw - now.mean
    v = u - (now.weight * (now.v @ u)) @ now.v
    gamma = rho * (t - 1) / t
    along = u @ v
    weight = gamma / (1 + gamma * along)
    step = 1 + weight * (t * (u @ now.delta) - along)
    return Programme(
        now.mean + u / t,
        now.delta - step * v / t,
        now.v.at[now.num_draws].set(jnp.where(now.num_draws > 0, v, 0.0)),  # the first draw changes no covariance
        now.weight.at[now.num_draws].set(weight),
        now.num_draws + 1,
    )


@in_x64
def _scanned(theta: Array, draws: Array, shrunk: Shrinkage) -> Array:
    num = draws.shape[0]
    rho = shrunk.c / (num - 1)
    step = lambda now, draw: (add(now, draw, rho), None)
    now, _ = jax.lax.scan(step, start(theta / shrunk.scale, num), draws / shrunk.row)
    return now.delta / (shrunk.a * shrunk.scale)


def delta(theta: Float[Array, " d"], draws: Float[Array, "l d"], rho: Any, shrunk: Shrinkage | None = None) -> Array:
    """Sigma^{-1} (theta - mean) by the dynamic programme, float64.

    Args:
        theta: (d,).
        draws: (l, d), l of at least 2.
        rho: as for :func:`shrinkage`.
        shrunk: instead of ``rho``, where it is known.
    """
    return _scanned(theta, draws, shrinkage(draws, rho) if shrunk is None else shrunk)


def direct(theta: Float[Array, " d"], draws: Float[Array, "l d"], rho: Any) -> Array:
    """The same by solving d equations, O(d^3)."""
    shrunk = shrinkage(draws, rho)

    @in_x64
    def solved(theta: Array, draws: Array, shrunk: Shrinkage) -> Array:
        covariance = jnp.cov(draws.T).reshape(theta.shape[0], theta.shape[0])
        sigma = shrunk.a * (jnp.diag(shrunk.scale**2 * jnp.ones(theta.shape)) + shrunk.c * covariance)
        return jnp.linalg.solve(sigma, theta - jnp.mean(draws, axis=0))

    return solved(theta, draws, shrunk)


# --- with gradients -------------------------------------------------------------------------------------------------


@in_x64
def corrected(
    delta: Float[Array, " d"], draws: Float[Array, "l d"], gradients: Float[Array, "l d"], shrunk: Shrinkage
) -> Array:
    r"""Delta without most of its Monte Carlo error, from the gradients g of minus the log density at the draws.

    By Stein's identity (:mod:`numpyro_fed.normal.stein`), with C the draws' covariance of g and x, and s the share of
    the diagonal in the shrunk covariance,

    .. math:: \Delta' = [(1 - s) C + s I] \Delta + \bar g

    has the same limit. Where the density is normal and nothing is shrunk, it is the gradient at :math:`\theta`,
    exactly, whatever the draws are. :math:`O(\ell d)`.
    """
    return stein.corrected(delta, draws, gradients, shrunk.a * shrunk.c) + jnp.mean(gradients, axis=0)


# --- the precision --------------------------------------------------------------------------------------------------


class Precision(NamedTuple):
    """The inverse covariance diag(e) + Q' diag(q) Q, with r = min(l, d) directions."""

    diagonal: Array  # e, (d,); 0 with more draws than dimensions
    weights: Array  # q, (r,); negative, but with more draws than dimensions positive
    directions: Array  # Q, (r, d)


@in_x64
def precision(draws: Float[Array, "l d"], shrunk: Shrinkage, gradients: Float[Array, "l d"] | None = None) -> Precision:
    """Of a shrunk covariance, without differences of large numbers: by the eigenvectors of S~.

    With ``gradients`` at more draws than dimensions, :func:`corrected` as Delta is.
    """
    num, d = draws.shape
    if gradients is not None and num > d:
        return _corrected_precision(draws, shrunk, gradients)
    x = (draws - jnp.mean(draws, axis=0, keepdims=True)) / shrunk.row * jnp.sqrt(shrunk.c / (num - 1))
    ones = jnp.ones(d)
    if num <= d:
        values, vectors = jnp.linalg.eigh(x @ x.T)
        values = jnp.maximum(values, 0.0)
        directions = vectors.T @ x / jnp.sqrt(jnp.maximum(values, LEAST))[:, None]
        weights = -values / (1 + values) / shrunk.a
        return Precision(ones / (shrunk.a * shrunk.scale**2), weights, directions / shrunk.row)
    values, vectors = jnp.linalg.eigh(x.T @ x)
    return Precision(0 * ones, 1 / (shrunk.a * (1 + jnp.maximum(values, 0.0))), vectors.T / shrunk.row)


def _corrected_precision(draws: Array, shrunk: Shrinkage, gradients: Array) -> Precision:
    d = draws.shape[1]
    plain = precision(draws, shrunk)
    inverse = plain.directions.T @ (plain.weights[:, None] * plain.directions)
    found = stein.corrected(inverse, draws, gradients, shrunk.a * shrunk.c)
    values, vectors = jnp.linalg.eigh(0.5 * (found + found.T))
    return Precision(jnp.zeros(d), values, vectors.T)  # noise may make one negative: the sum is what counts


def largest(draws: Float[Array, "l d"], shrunk: Shrinkage, gradients: Float[Array, "l d"] | None = None) -> Array:
    """The precision's largest eigenvalue; with fewer draws than dimensions, a bound that is near."""
    num, d = draws.shape
    found = None if num <= d else precision(draws, shrunk, gradients)

    @in_x64
    def value(shrunk: Shrinkage, found: Precision | None) -> Array:
        if found is None:
            return jnp.max(1 / (shrunk.a * shrunk.scale**2))
        return jnp.linalg.eigvalsh(found.directions.T @ (found.weights[:, None] * found.directions))[-1]

    return value(shrunk, found)
