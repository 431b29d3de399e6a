"""Newton's method to the mode of a tilted distribution, where solvers begin."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal.affine import Coordinates, compose, coordinates, near_zero, pull_back, to_z, with_lower_root
from numpyro_fed.normal.families import Natural
from numpyro_fed.normal.newton import derivatives, find_mode, floored_inverse_root, unit_diagonal
from numpyro_fed.precision import in_x64
from numpyro_fed.solvers.base import Tilted

Array = jax.Array
NEWTON_STEPS = 40
PASSES = 4
LOCAL_STEPS = 4
FLOOR = 1e-3  # least curvature, in a Hessian scaled to a unit diagonal


class _Found(NamedTuple):
    at: Coordinates
    frame: Any
    converged: Array  # bool
    floored: Array  # bool: some curvature was lost to rounding, and the coordinates do not know it yet
    passes: Array  # int


def newton(
    factor: Factor, cavity: Natural, at: Coordinates, frame: Any, nodes: Any, limit: Any
) -> tuple[Coordinates, Any, Array]:
    """To the mode of cavity x factor: coordinates of the normal with its mode and curvature, and the frame there.

    From the origin of ``at``, looking at no more than ``limit`` points, each with its locals fitted anew; with 0
    nothing is evaluated and nothing changes. Also returned: whether the search converged.

    A Hessian in float32 knows nothing of directions that are a million times flatter than others (an intercept and the
    slope of a calendar year). Their curvature is taken to be ``FLOOR``, and the search goes on in the coordinates that
    this makes, where they are less flat: a few times, until none is lost.
    """

    def search(now: _Found) -> _Found:
        quadratic = pull_back(now.at, cavity)

        def look(x: Array, frame: Any) -> tuple[Array, Array, Array, Any]:
            frame = factor.refit(to_z(now.at, x), frame, LOCAL_STEPS)
            return *derivatives(lambda x: quadratic(x) + factor.log_f(to_z(now.at, x), frame, nodes), x), frame

        # at exactly zero NumPyro's gradients of logits are wrong
        mode = find_mode(look, near_zero(at.mean.shape[0]), now.frame, limit)
        root = in_x64(lambda precision: floored_inverse_root(precision, FLOOR))(mode.precision)
        least = jnp.min(jnp.abs(jnp.linalg.eigvalsh(unit_diagonal(mode.precision)[0])))
        found = with_lower_root(compose(now.at, mode.x, root))
        return _Found(found, mode.carried, mode.converged, least < FLOOR, now.passes + 1)

    def unfinished(now: _Found) -> Array:
        return (now.passes < PASSES) & now.floored & (limit > 0)

    none = jnp.zeros((), int)
    found = jax.lax.while_loop(unfinished, search, _Found(at, frame, limit <= 0, limit > 0, none))
    return found.at, found.frame, found.converged


def begin(tilted: Tilted, factor: Factor, frame: Any, at: Coordinates | None = None) -> tuple[Coordinates, Any]:
    """Where a solver begins: at q (or ``at``), or, until every silo has been heard, at the tilted mode."""
    if tilted.q_is_known:
        return coordinates(tilted.family, tilted.q) if at is None else at, frame
    found, frame, _ = newton(
        factor,
        tilted.family.dense(tilted.cavity),
        coordinates(tilted.family, tilted.q) if at is None else at,
        frame,
        factor.nodes(None),
        jnp.where(tilted.warming_up, NEWTON_STEPS, 0),
    )
    return found, frame
