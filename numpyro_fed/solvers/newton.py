"""Newton's method to the mode of a tilted distribution, where solvers begin."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal.affine import Coordinates, compose, coordinates, near_zero, pull_back, to_z, with_lower_root
from numpyro_fed.normal.families import Natural
from numpyro_fed.normal.newton import newton_step
from numpyro_fed.precision import in_x64, tree_where
from numpyro_fed.solvers.base import Tilted

Array = Any
NEWTON_STEPS = 40
LOCAL_STEPS = 4
CONVERGED = 1e-4  # expected gain of the next step, in log density
FLOOR = 1e-3  # least curvature, in a Hessian scaled to a unit diagonal


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
    quadratic = pull_back(at, cavity)

    def density(x: Array, frame: Any) -> Array:
        return quadratic(x) + factor.log_f(to_z(at, x), frame, nodes)

    def unfinished(step: _Step) -> Array:
        return (step.count < limit) & (step.gain > CONVERGED)

    def improve(step: _Step) -> _Step:
        frame = factor.refit(to_z(at, step.trial), step.frame, LOCAL_STEPS)

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

    @in_x64
    def curved(precision: Array) -> Array:
        scale = jax.lax.rsqrt(jnp.maximum(jnp.abs(jnp.diagonal(precision)), 1e-10))
        values, vectors = jnp.linalg.eigh(precision * scale[:, None] * scale)
        values = jnp.maximum(jnp.abs(values), FLOOR)
        return jnp.linalg.cholesky(scale[:, None] * ((vectors / values) @ vectors.T) * scale)

    found = with_lower_root(compose(at, x, curved(last.precision)))
    searched = last.count > 0
    return (
        tree_where(searched, found, at),
        last.frame,
        jnp.where(searched, last.gain <= 10 * CONVERGED, True),
    )


def begin(tilted: Tilted, factor: Factor, frame: Any, at: Coordinates | None = None) -> tuple[Coordinates, Any]:
    """Where a solver begins: at q (or ``at``), or, until every silo has been heard, at the tilted mode."""
    found, frame, _ = newton(
        factor,
        tilted.family.dense(tilted.cavity),
        coordinates(tilted.family, tilted.q) if at is None else at,
        frame,
        factor.nodes(None),
        jnp.where(tilted.warming_up, NEWTON_STEPS, 0),
    )
    return found, frame
