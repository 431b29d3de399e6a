"""The tilted distribution's mode and curvature. Exact where it is normal, quick, and wrong where it is skewed."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal import affine
from numpyro_fed.normal.families import quotient
from numpyro_fed.precision import to_user_dtype
from numpyro_fed.solvers import newton
from numpyro_fed.solvers.base import Ask, Solved, Solver

Array = Any


@dataclass(frozen=True)
class Laplace(Solver):
    """Laplace's approximation. With ``num_nodes=1`` and locals, that of the joint density (a Schur complement)."""

    name = "laplace"

    def solve(self, key: Array, ask: Ask, factor: Factor, frame: Any, own: Any) -> Solved:
        nodes, cavity = factor.nodes(None), ask.family.dense(quotient(ask.q, ask.site))
        at, frame, converged = newton.newton(
            factor, cavity, affine.coordinates(ask.family, ask.q), frame, nodes, jnp.asarray(newton.NEWTON_STEPS)
        )
        log_mean = factor.log_f(
            to_user_dtype(at.mean), frame, nodes
        )  # over a normal in x the curvature integrates to one
        value = affine.log_evidence(ask, at, cavity, log_mean)
        return Solved(affine.to_family(ask.family, at), value, jnp.ones(()), converged, frame)
