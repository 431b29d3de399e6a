"""The tilted distribution's mode and curvature. Exact where it is normal, quick, and wrong where it is skewed."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal import affine
from numpyro_fed.precision import to_user_dtype
from numpyro_fed.solvers import newton
from numpyro_fed.solvers.base import BaseSolver, Projection, Tilted

Array = jax.Array


@dataclass(frozen=True)
class Laplace(BaseSolver):
    """Laplace's approximation. With ``num_nodes=1`` and locals, that of the joint density (a Schur complement)."""

    name = "laplace"

    def solve(self, key: Array, tilted: Tilted, factor: Factor, frame: Any, solver_state: Any) -> Projection:
        nodes, cavity = factor.nodes(None), tilted.family.dense(tilted.cavity)
        at, frame, converged = newton.newton(
            factor, cavity, affine.coordinates(tilted.family, tilted.q), frame, nodes, jnp.asarray(newton.NEWTON_STEPS)
        )
        # over a normal in x the curvature integrates to one
        log_mean = factor.log_f(to_user_dtype(at.mean), frame, nodes)
        value = affine.log_evidence(tilted.family, tilted.q, at, cavity, log_mean)
        return Projection(affine.to_family(tilted.family, at), value, jnp.ones(()), converged, frame)
