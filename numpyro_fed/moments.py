r"""Moments of a silo's posterior from few draws in many dimensions: time and memory linear in d.

From draws :math:`x_1, \dots, x_\ell` with mean :math:`\bar x` and covariance S (divisor :math:`\ell - 1`) posterior
averaging (Al-Shedivat et al. 2021) needs

.. math::

    \Delta = \hat\Sigma^{-1} (\theta - \bar x), \qquad
    \hat\Sigma = \varrho I + (1 - \varrho) S, \qquad \varrho = \frac{1}{1 + (\ell - 1) \rho}

and no matrix of size d x d. :func:`start`, :func:`add` and :func:`delta_of` are the paper's dynamic programme (its
appendix C): each draw changes :math:`\tilde\Sigma = \hat\Sigma / \varrho` by a matrix of rank one, so that the
Sherman-Morrison formula keeps :math:`\Delta` up to date, draw by draw: :math:`O(\ell d)` for each, and
:math:`O(\ell d)` memory. :func:`delta` runs them as a scan; :func:`direct` solves the same equations with the matrix.

Every estimator here has the form :math:`a (I + c S)`, a :class:`Shrinkage`. The paper's rho gives
:math:`a = \varrho`, :math:`c = (\ell - 1) \rho`. :func:`oas` and :func:`rblw` (Chen et al. 2010) choose
:math:`s \nu I + (1 - s) S` from the draws, with :math:`\nu = \mathrm{tr}(S) / d`: unlike the paper's, such an estimator
has a scale of its own.

>>> import jax, jax.numpy as jnp
>>> draws, theta = jax.random.normal(jax.random.key(0), (20, 3)), jnp.ones(3)
>>> bool(jnp.allclose(delta(theta, draws, 0.5), direct(theta, draws, 0.5), rtol=1e-4))
True
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.families import double

Array = Any
NEARLY_NONE = 1e-8  # identity's share where there is to be no shrinkage: the inverse must exist
LEAST = 1e-30


class Shrinkage(NamedTuple):
    """The covariance a (I + c S)."""

    a: Array
    c: Array


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
    number = isinstance(rho, int | float) and not isinstance(rho, bool)
    if (number and rho >= 0) or (isinstance(rho, str) and rho in CHOSEN):
        return rho
    raise ValueError(
        f"rho is {rho!r}; use 'oas' or 'rblw' (chosen from the draws), a number of at least 0 (the paper's; 0 is the "
        "identity), or math.inf (the plain sample covariance)"
    )


def shrinkage(draws: Array, rho: Any) -> Shrinkage:
    """How much a sample covariance is shrunk, and to what; float64.

    Args:
        draws: (l, d), l of at least 2.
        rho: the paper's number; ``"oas"`` or ``"rblw"``; ``math.inf`` for hardly at all.
    """
    num, d = draws.shape

    @double
    def chosen(draws: Array) -> Shrinkage:
        if not isinstance(rho, str) and math.isfinite(rho):
            return Shrinkage(jnp.asarray(1 / (1 + (num - 1) * rho)), jnp.asarray((num - 1.0) * rho))
        away = draws - jnp.mean(draws, axis=0)
        gram = away @ away.T / (num - 1)  # (l, l), with the eigenvalues of S
        trace = jnp.trace(gram)
        nu = jnp.maximum(trace / d, LEAST)
        share = CHOSEN[rho](trace, jnp.sum(gram**2), num - 1, d) if isinstance(rho, str) else jnp.zeros(())
        share = jnp.clip(share, NEARLY_NONE, 1.0)
        return Shrinkage(share * nu, (1 - share) / (share * nu))

    return chosen(draws)


# --- the dynamic programme ------------------------------------------------------------------------------------------


class Programme(NamedTuple):
    """What is known after t draws; u_k = x_k - mean of those before, v_k = Sigma~_{k-1}^{-1} u_k."""

    mean: Array  # (d,)
    delta: Array  # (d,): Sigma~^{-1} (theta - mean)
    v: Array  # (l, d), rows of zeros where there is no draw yet
    weight: Array  # (l,): gamma_k / (1 + gamma_k u_k' v_k)
    count: Array  # t


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
    t = (now.count + 1).astype(now.mean.dtype)
    u = draw - now.mean
    v = u - (now.weight * (now.v @ u)) @ now.v
    gamma = rho * (t - 1) / t
    along = u @ v
    weight = gamma / (1 + gamma * along)
    step = 1 + weight * (t * (u @ now.delta) - along)
    return Programme(
        now.mean + u / t,
        now.delta - step * v / t,
        now.v.at[now.count].set(jnp.where(now.count > 0, v, 0.0)),  # the first draw changes no covariance
        now.weight.at[now.count].set(weight),
        now.count + 1,
    )


def delta_of(now: Programme, rho: Any) -> Array:
    """Delta of the draws so far."""
    return now.delta * (1 + (now.count - 1) * rho)


@double
def _scanned(theta: Array, draws: Array, shrunk: Shrinkage) -> Array:
    num = draws.shape[0]
    rho = shrunk.c / (num - 1)
    now, _ = jax.lax.scan(lambda now, draw: (add(now, draw, rho), None), start(theta, num), draws)
    return now.delta / shrunk.a


def delta(theta: Array, draws: Array, rho: Any, shrunk: Shrinkage | None = None) -> Array:
    """Sigma^{-1} (theta - mean) by the dynamic programme, float64.

    Args:
        theta: (d,).
        draws: (l, d), l of at least 2.
        rho: as for :func:`shrinkage`.
        shrunk: instead of ``rho``, where it is known.
    """
    return _scanned(theta, draws, shrinkage(draws, rho) if shrunk is None else shrunk)


def direct(theta: Array, draws: Array, rho: Any) -> Array:
    """The same by solving d equations, O(d^3)."""
    shrunk = shrinkage(draws, rho)

    @double
    def solved(theta: Array, draws: Array, shrunk: Shrinkage) -> Array:
        covariance = jnp.atleast_2d(jnp.cov(draws.T))
        sigma = shrunk.a * (jnp.eye(theta.shape[0]) + shrunk.c * covariance)
        return jnp.linalg.solve(sigma, theta - jnp.mean(draws, axis=0))

    return solved(theta, draws, shrunk)


# --- the precision --------------------------------------------------------------------------------------------------


class Precision(NamedTuple):
    """The inverse covariance (I - W'W) / a, with W (at most l, d)."""

    a: Array
    factor: Array


@double
def precision(draws: Array, shrunk: Shrinkage) -> Precision:
    """Of a (I + c S), by Woodbury's identity: W'W = X' (I + X X')^{-1} X with X'X = c S."""
    num, d = draws.shape
    x = jnp.sqrt(shrunk.c / (num - 1)) * (draws - jnp.mean(draws, axis=0))
    if num <= d:
        root = jnp.linalg.cholesky(jnp.eye(num) + x @ x.T)
        return Precision(shrunk.a, jax.scipy.linalg.solve_triangular(root, x, lower=True))
    values, vectors = jnp.linalg.eigh(x.T @ x)
    values = jnp.maximum(values, 0.0)
    return Precision(shrunk.a, jnp.sqrt(values / (1 + values))[:, None] * vectors.T)


@double
def largest(draws: Array, shrunk: Shrinkage) -> Array:
    """The largest eigenvalue of the precision."""
    num, d = draws.shape
    if num <= d:  # some direction has no draws in it
        return 1 / shrunk.a
    values = jnp.linalg.eigvalsh(jnp.cov(draws.T).reshape(d, d))
    return 1 / (shrunk.a * (1 + shrunk.c * jnp.maximum(values[0], 0.0)))
