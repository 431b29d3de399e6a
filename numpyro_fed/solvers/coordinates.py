r"""Coordinates in which a tilted distribution is about standard normal, and Newton's method to get there.

.. math:: z = m + R x

Natural parameters are float64 and may be badly conditioned; in these coordinates all numbers are of order one, so the
model is evaluated in the user's own precision and only the change of coordinates is done in float64.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_fed.families import LOG_2PI, Natural, Normal, double, either, inverse, quotient, single
from numpyro_fed.solvers.base import Ask
from numpyro_fed.solvers.factor import Factor
from numpyro_fed.split_model import GOLDEN, NEAR_ZERO
from numpyro_fed.start import newton_step

Array = Any
NEWTON_STEPS = 40
LOCAL_STEPS = 4
CONVERGED = 1e-4  # expected gain of the next step, in log density
FLOOR = 1e-3  # least curvature, in a Hessian scaled to a unit diagonal


class Coordinates(NamedTuple):
    mean: Array  # (d,) float64
    root: Array  # (d, d) float64, lower triangular or (where nothing asks for that) any root of the covariance


class Quadratic(NamedTuple):
    """A normal factor in coordinates x, but for a constant: b'x - x'Ax / 2, in the user's precision."""

    precision: Array
    shift: Array

    def __call__(self, x: Array) -> Array:
        return self.shift @ x - 0.5 * x @ self.precision @ x


def coordinates(family: Normal, q: Natural) -> Coordinates:
    """Those of q; where q is improper the model's own."""
    mean, root = family.moments(q)
    proper = family.proper(q)

    @double
    def run(mean: Array, root: Array) -> Coordinates:
        d = mean.shape[0]
        full = root if root.ndim == 2 else jnp.diag(root)
        return Coordinates(jnp.where(proper, mean, 0.0), jnp.where(proper, full, jnp.eye(d)))

    return run(mean, root)


def seen_from(at: Coordinates, factor: Natural) -> Quadratic:
    """A normal factor (with a precision matrix) in coordinates x."""

    @double
    def run(at: Coordinates, factor: Natural) -> Quadratic:
        slope = factor.shift - factor.precision @ at.mean
        return Quadratic(at.root.T @ factor.precision @ at.root, at.root.T @ slope)

    return single(run(at, factor))


def log_evidence(ask: Any, at: Coordinates, cavity: Natural, log_mean: Array) -> Array:
    """log E_q[f / site], where ``log_mean`` is the log of the mean of cavity x f over a standard normal in x.

    The logarithm of a model's evidence is the posterior's log normaliser and these, summed over the factors.
    """
    proper, normaliser = ask.family.proper(ask.q), ask.family.log_normaliser(ask.q)

    @double
    def run(at: Coordinates, cavity: Natural, log_mean: Array) -> Array:
        times = cavity.precision @ at.mean if cavity.precision.ndim == 2 else cavity.precision * at.mean
        const = cavity.shift @ at.mean - 0.5 * at.mean @ times
        log_det = jnp.linalg.slogdet(at.root)[1] if at.root.ndim == 2 else jnp.sum(jnp.log(at.root))
        volume = log_det + 0.5 * at.mean.shape[0] * LOG_2PI
        return const + volume + log_mean - jnp.where(proper, normaliser, 0.0)

    return single(run(at, cavity, log_mean))


def placed(at: Coordinates, x: Array) -> Array:
    """z = m + R x, for points (..., d), in the user's precision: the model's derivatives are taken through it."""
    here = single(at)
    return here.mean + x @ here.root.T


@double
def moved(at: Coordinates, mean: Array, root: Array) -> Coordinates:
    """Coordinates of a normal that has this mean and root in the old ones."""
    return Coordinates(at.mean + at.root @ mean, at.root @ root)


@double
def natural(at: Coordinates) -> Natural:
    """The normal whose coordinates these are."""
    precision = inverse(at.root @ at.root.T)
    return Natural(precision, precision @ at.mean)


def kept(family: Normal, at: Coordinates) -> Natural:
    """The member of the family with this normal's moments, as far as the family keeps them."""
    if family.kind == "full":
        return natural(at)
    with jax.enable_x64(True):
        return family.project(at.mean, jnp.sum(at.root**2, axis=1))


@double
def factor_from(at: Coordinates, precision: Array, shift: Array) -> Natural:
    """The factor exp(b'x - x'Ax / 2) in z. The root must be lower triangular."""
    half = solve_triangular(at.root, precision, lower=True, trans=1)
    precision = solve_triangular(at.root, half.T, lower=True, trans=1)
    precision = 0.5 * (precision + precision.T)
    return Natural(precision, solve_triangular(at.root, shift, lower=True, trans=1) + precision @ at.mean)


def lower(at: Coordinates) -> Coordinates:
    """The same normal with a lower triangular root."""
    with jax.enable_x64(True):
        upper = jnp.linalg.qr(at.root.T, mode="r")
        signs = jnp.where(jnp.diagonal(upper) < 0, -1.0, 1.0)
        return at._replace(root=(signs[:, None] * upper).T)


def near_zero(d: int) -> Array:
    """Where a search in coordinates x begins: hardly away from the origin, and nowhere zero."""
    return jnp.asarray(NEAR_ZERO * (0.5 + (np.arange(1, d + 1) * GOLDEN) % 1.0), jnp.zeros(()).dtype)


class _Step(NamedTuple):
    x: Array
    trial: Array
    frame: Any
    value: Array
    gradient: Array
    precision: Array
    damping: Array
    gain: Array
    count: Array


def newton(
    factor: Factor, cavity: Natural, at: Coordinates, frame: Any, nodes: Any, limit: Any
) -> tuple[Coordinates, Any, Array]:
    """To the mode of cavity x factor: coordinates of the normal with its mode and curvature, and the frame there.

    Damped Newton steps from the origin of ``at``, at most ``limit`` of them; with 0 nothing is evaluated and nothing
    changes. Curvatures enter by their absolute values. Also returned: whether it converged.
    """
    d = at.mean.shape[0]
    quadratic = seen_from(at, cavity)

    def density(x: Array, frame: Any) -> Array:
        return quadratic(x) + factor.log_f(placed(at, x), frame, nodes)

    def unfinished(step: _Step) -> Array:
        return (step.count < limit) & (step.gain > CONVERGED)

    def improve(step: _Step) -> _Step:
        frame = factor.refit(placed(at, step.trial), step.frame, LOCAL_STEPS)

        def slope(x: Array) -> tuple[Array, tuple]:
            value, gradient = jax.value_and_grad(density)(x, frame)
            return gradient, (value, gradient)

        hessian, (value, gradient) = jax.jacfwd(slope, has_aux=True)(step.trial)
        precision = -hessian
        finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient)) & jnp.all(jnp.isfinite(precision))
        better = finite & (value >= step.value - 1e-3 - 1e-5 * jnp.abs(step.value))
        keep = lambda new, old: jnp.where(better, new, old)
        x, value, gradient, precision, frame = jax.tree.map(
            keep,
            (step.trial, value, gradient, precision, frame),
            (step.x, step.value, step.gradient, step.precision, step.frame),
        )
        damping = jnp.clip(keep(step.damping / 5, jnp.maximum(step.damping * 10, 1e-2)), 1e-6, 1e6)
        move = newton_step(gradient, precision, jnp.where(damping <= 1e-5, 0.0, damping))
        gain = jnp.where(better, 0.5 * gradient @ move, jnp.inf)
        return _Step(x, x + move, frame, value, gradient, precision, damping, gain, step.count + 1)

    zero = jnp.zeros(d)
    first = _Step(
        zero,
        near_zero(d),  # at exactly zero NumPyro's gradients of logits are wrong
        frame,
        jnp.array(-jnp.inf),
        zero,
        jnp.eye(d),
        jnp.array(1e-3),
        jnp.array(jnp.inf),
        jnp.zeros((), int),
    )
    last = jax.lax.while_loop(unfinished, improve, first)
    # the last step was worth less than CONVERGED, but a normal likelihood's mode is exact only after it
    x = jnp.where(last.gain <= CONVERGED, last.trial, last.x)

    @double
    def curved(precision: Array) -> Array:
        scale = jax.lax.rsqrt(jnp.maximum(jnp.abs(jnp.diagonal(precision)), 1e-10))
        values, vectors = jnp.linalg.eigh(precision * scale[:, None] * scale)
        values = jnp.maximum(jnp.abs(values), FLOOR)
        return jnp.linalg.cholesky(scale[:, None] * ((vectors / values) @ vectors.T) * scale)

    found = lower(moved(at, x, curved(last.precision)))
    searched = last.count > 0
    return (
        either(searched, found, at),
        last.frame,
        jnp.where(searched, last.gain <= 10 * CONVERGED, True),
    )


@double
def sds(at: Coordinates) -> Array:
    """Conditional sds: what a family without correlations would learn from its free energy."""
    return jax.lax.rsqrt(jnp.diagonal(inverse(at.root @ at.root.T)))


def begin(ask: Ask, factor: Factor, frame: Any, at: Coordinates | None = None) -> tuple[Coordinates, Any]:
    """Where a solver begins: at q (or ``at``), or, until every silo has been heard, at the tilted mode."""
    found, frame, _ = newton(
        factor,
        ask.family.dense(quotient(ask.q, ask.site)),
        coordinates(ask.family, ask.q) if at is None else at,
        frame,
        factor.nodes(None),
        jnp.where(ask.settling, NEWTON_STEPS, 0),
    )
    return found, frame
