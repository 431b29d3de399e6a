r"""Newton's method, and what it leaves: a mode and a root of the inverse curvature there.

Searches are Levenberg and Marquardt's. With gradient g and precision P (minus the Hessian), scaled to a unit diagonal,

.. math:: x' = x + (|P| + \lambda I)^{-1} g

where :math:`|P|` has the absolute values of P's eigenvalues, so that every step is uphill. A step that is refused makes
the damping :math:`\lambda` larger, one that is accepted makes it smaller, until it is none: see :func:`advance`.

>>> mode = find_mode(lambda x, _: derivatives(lambda x: -jnp.cosh(x[0] - 3.0), x), jnp.zeros(1), limit=20)
>>> round(float(mode.x[0]), 3), bool(mode.converged)
(3.0, True)
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float

from numpyro_fed.normal.matrices import diagonal

Array = jax.Array
LEAST = 1e-10  # a diagonal below this has no unit
FLAT = 1e-6  # the least curvature of a step, in a precision with a unit diagonal
DAMPING, LEAST_DAMPING, MOST_DAMPING = 1e-3, 1e-6, 1e6  # the first, and how far it goes
UNDAMPED = 1e-5  # below which it counts as none: then a step on a normal density is exact
FEW = 8  # dimensions, up to which second derivatives are taken forward twice: a shorter program, and as fast
CONVERGED = 1e-4  # expected gain of the next step, in log density


# --- curvature ------------------------------------------------------------------------------------------------------


class Spectrum(NamedTuple):
    """Eigenvalues, made positive, and eigenvectors (in columns) of symmetric matrices."""

    values: Float[Array, "*rows d"]
    vectors: Float[Array, "*rows d d"]

    def solve(self, right: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
        """The inverse times a vector."""
        along = jnp.einsum("...ji,...j->...i", self.vectors, right)
        return jnp.einsum("...ij,...j->...i", self.vectors, along / self.values)


def positive_spectrum(matrix: Float[Array, "*rows d d"], floor: float) -> Spectrum:
    """Curvatures count by their absolute values, and are at least ``floor``."""
    if matrix.shape[-1] == 1:
        values, vectors = matrix[..., 0], jnp.ones_like(matrix)
    else:
        values, vectors = jnp.linalg.eigh(matrix)
    return Spectrum(jnp.maximum(jnp.abs(values), floor), vectors)


def unit_diagonal(
    precision: Float[Array, "d d"], least: Float[Array, ""] | float = LEAST
) -> tuple[Float[Array, "d d"], Float[Array, " d"]]:
    """The precision of z / scale, whose diagonal is one (or minus one), and the scale."""
    scale = jax.lax.rsqrt(jnp.maximum(jnp.abs(diagonal(precision)), least))
    return precision * scale[:, None] * scale[None, :], scale


def floored_inverse_root(
    precision: Float[Array, "d d"], floor: float, least: Float[Array, ""] | float = LEAST
) -> Float[Array, "d d"]:
    """R, not triangular, with R R' the inverse of a precision: exactly, where that is positive definite by a margin.

    Args:
        precision: of any symmetric matrix, eigenvalues count by their absolute values.
        floor: the least eigenvalue, once the precision is scaled to a unit diagonal.
        least: diagonals below it count as so much. With the largest of them nothing is scaled, and a flat direction has
            ``floor`` times that: for densities that may be flat in some.

    >>> root = floored_inverse_root(jnp.diag(jnp.array([4.0, 0.25])), 1e-3)
    >>> (root @ root.T).tolist()
    [[0.25, 0.0], [0.0, 4.0]]
    """
    scaled, scale = unit_diagonal(precision, least)
    values, vectors = positive_spectrum(scaled, floor)
    return scale[:, None] * (vectors * jax.lax.rsqrt(values)[None, :])


# --- searches -------------------------------------------------------------------------------------------------------


def newton_step(
    gradient: Float[Array, " d"], precision: Float[Array, "d d"], damping: Float[Array, ""] | float
) -> Float[Array, " d"]:
    """A damped step uphill: curvatures enter by their absolute values, scaled to a unit diagonal first."""
    scaled, scale = unit_diagonal(precision)
    values, vectors = positive_spectrum(scaled, FLAT)
    return scale * (vectors @ ((vectors.T @ (scale * gradient)) / (values + damping)))


class Search(NamedTuple):
    """A point, what is known there, and the point to look at next."""

    x: Float[Array, " d"]
    trial: Float[Array, " d"]
    value: Float[Array, ""]  # of the log density at x; what another point has to reach
    precision: Float[Array, "d d"]  # minus the Hessian at x
    gradient: Float[Array, " d"]
    damping: Float[Array, ""]
    gain: Float[Array, ""]  # expected of the next step, in log density; infinite while steps are refused


def start_search(trial: Float[Array, " d"]) -> Search:
    """Before anything is known: the first trial is accepted wherever the density is finite."""
    infinite, zero = jnp.array(jnp.inf), jnp.zeros_like(trial)
    return Search(trial, trial, -infinite, jnp.eye(trial.shape[0]), zero, jnp.array(DAMPING), infinite)


def advance(
    search: Search,
    value: Float[Array, ""],
    gradient: Float[Array, " d"],
    precision: Float[Array, "d d"],
    slack: Float[Array, ""] | float,
    rung: Float[Array, ""] | float = 1.0,
) -> tuple[Search, Array]:
    """Accept the trial or refuse it, and choose the next; also returned: whether it was accepted.

    Args:
        search: with the trial at which ``value``, ``gradient`` and ``precision`` (minus the Hessian) were found.
        slack: how much worse than x the trial may be: rounding, or what the objective itself leaves open.
        rung: by how many times its damping the next step is damped.
    """
    finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient)) & jnp.all(jnp.isfinite(precision))
    better = finite & (value >= search.value - slack)
    keep = lambda new, old: jnp.where(better, new, old)
    x, value = keep(search.trial, search.x), keep(value, search.value)
    gradient, precision = keep(gradient, search.gradient), keep(precision, search.precision)
    damping = keep(search.damping / 5, jnp.maximum(search.damping * 10, 1e-2))
    damping = jnp.clip(damping, LEAST_DAMPING, MOST_DAMPING)
    used = damping * rung
    step = newton_step(gradient, precision, jnp.where(used <= UNDAMPED, 0.0, used))
    gain = jnp.where(better, 0.5 * gradient @ step, jnp.inf)
    return Search(x, x + step, value, precision, gradient, damping, gain), better


def derivatives(density: Callable[[Array], Array], x: Float[Array, " d"]) -> tuple[Array, Array, Array]:
    """Value, gradient and minus the Hessian of a log density."""

    def forward(x: Array) -> tuple[Array, tuple[Array, Array]]:
        values, gradient = jax.vmap(lambda unit: jax.jvp(density, (x,), (unit,)))(jnp.eye(len(x), dtype=x.dtype))
        return gradient, (values[0], gradient)

    def reverse(x: Array) -> tuple[Array, tuple[Array, Array]]:
        value, gradient = jax.value_and_grad(density)(x)
        return gradient, (value, gradient)

    def found(slope: Callable[..., Any]) -> tuple[Array, Array, Array]:
        hessian, (value, gradient) = jax.jacfwd(slope, has_aux=True)(x)
        return value, gradient, -hessian

    if 0 < len(x) <= FEW:
        with suppress(TypeError):  # a function with a reverse derivative of its own (jax.custom_vjp) has no other
            return found(forward)
    return found(reverse)


class Mode(NamedTuple):
    """Where a search ended."""

    x: Float[Array, " d"]
    precision: Float[Array, "d d"]  # minus the Hessian, one small step before
    carried: Any
    converged: Array  # bool
    searched: Array  # bool: whether a single step was allowed


class _Loop(NamedTuple):
    search: Search
    carried: Any
    looked: Array  # int: at so many points


def find_mode(look: Callable, begin: Float[Array, " d"], carried: Any = (), limit: Any = 40) -> Mode:
    """Search for the mode of a log density.

    Args:
        look: ``(x, carried) -> (value, gradient, precision)``, or these and a new ``carried``; see :func:`derivatives`.
        begin: the first point that is looked at.
        carried: what goes along with accepted points, any pytree.
        limit: of points looked at; an array may be given. With 0 nothing is evaluated.
    """

    def unfinished(loop: _Loop) -> Array:
        return (loop.looked < limit) & (loop.search.gain > CONVERGED)

    def improve(loop: _Loop) -> _Loop:
        search = loop.search
        value, gradient, precision, *rest = look(search.trial, loop.carried)
        # rounding, of a log density that is a sum over observations
        new, better = advance(search, value, gradient, precision, 1e-3 + 1e-5 * jnp.abs(search.value))
        carried = loop.carried
        if rest:
            carried = jax.tree.map(lambda new, old: jnp.where(better, new, old), rest[0], carried)
        return _Loop(new, carried, loop.looked + 1)

    search, carried, looked = jax.lax.while_loop(
        unfinished, improve, _Loop(start_search(begin), carried, jnp.zeros((), int))
    )
    # the last step was worth less than CONVERGED, but a normal density's mode is exact only after it
    x = jnp.where(search.gain <= CONVERGED, search.trial, search.x)
    return Mode(x, search.precision, carried, search.gain <= 10 * CONVERGED, looked > 0)
