r"""Closing rounds of averaging: where the posterior's gradient is zero, and how it curves there.

Averaged silos do not meet at the posterior's mode. Those of federated averaging have each gone their own way; those of
posterior averaging know their likelihoods around their own modes, and the product of such normals has another mode than
the product of the likelihoods (see :mod:`numpyro_fed.methods.fedpa`). Both are mended, or at least measured, by looking
at one point together. The server sends w; a silo answers with value, gradient and Hessian of
its log likelihood there, O(d^2) numbers; the server adds the prior's, and

.. math:: w' = w + t\, |P|^{-1} g, \qquad \text{size} = \sqrt{g^\top |P|^{-1} g}

with g the gradient of the log posterior, and :math:`|P|` minus its Hessian, with the absolute values of its
eigenvalues. Only a step that does not lower the density is kept; after one that does, t is a quarter. The size is how
many posterior sds the zero of the gradient is away. At the end :math:`P^{-1}` is the covariance of the normal around
the mode (Laplace). All of the server's algebra is in float64.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Phase
from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.descent import Task
from numpyro_fed.methods.fedpa_posterior import FLAT, around
from numpyro_fed.normal.newton import derivatives, positive_spectrum, unit_diagonal
from numpyro_fed.precision import in_x64, to_user_dtype

Array = jax.Array
MOST_ROUNDS = 20
AT_REST = 1e-3  # posterior sds from the mode at which there is nothing left to do
NEARLY = 0.05  # from where a step that does not bring it nearer has met the gradient's rounding
STILL_MOVING = 0.1  # posterior sds at which a mode has not been found
OFF = 0.2  # at which a point is no longer the mode, whatever it is
ROUNDING = 10  # times the user's epsilon: what rounding does to a Hessian's smallest eigenvalue


class Curved(NamedTuple):
    """All that leaves a silo: of its log likelihood at the server's point."""

    value: Array
    gradient: Array  # (d,)
    precision: Array  # (d, d), minus the Hessian


class Ascent(NamedTuple):
    """A point, what is known there, and the point to look at next. Float64, of the posterior's log density."""

    x: Array  # (d,)
    trial: Array  # (d,)
    value: Array
    gradient: Array  # (d,)
    precision: Array  # (d, d), minus the Hessian
    stride: Array  # t
    size: Array  # posterior sds to where the gradient is zero; infinite until a density was finite


def ascent_from(w: Array) -> Ascent:
    """Before anything is known."""
    with jax.enable_x64(True):
        w = jnp.asarray(w, jnp.float64)
        infinite, d = jnp.asarray(jnp.inf, jnp.float64), w.shape[0]
        return Ascent(w, w, -infinite, jnp.zeros(d), jnp.eye(d), jnp.ones(()), infinite)


@in_x64
def onward(now: Ascent, found: Curved, rounding: float) -> tuple[Ascent, Array]:
    """After a look at the trial: kept or refused, and the next one; and whether it has come to rest."""
    finite = jnp.isfinite(found.value) & jnp.all(jnp.isfinite(found.gradient)) & jnp.all(jnp.isfinite(found.precision))
    better = finite & (found.value >= now.value - 1e-3 - 100 * rounding * jnp.abs(now.value))
    keep = lambda new, old: jnp.where(better, new, old)
    x, value = keep(now.trial, now.x), keep(found.value, now.value)
    gradient, precision = keep(found.gradient, now.gradient), keep(found.precision, now.precision)
    scaled, scale = unit_diagonal(precision)
    step = scale * positive_spectrum(scaled, FLAT).solve(scale * gradient)
    size = jnp.where(better, jnp.sqrt(jnp.maximum(gradient @ step, 0.0)), now.size)
    stride = keep(jnp.minimum(4 * now.stride, 1.0), now.stride / 4)
    rest = (size < AT_REST) | ((now.size < NEARLY) & (size > 0.5 * now.size))
    return Ascent(x, x + stride * step, value, gradient, precision, stride, size), rest


def climb(task: Task, prior: bool) -> FederatedAlgorithm:
    """The round as pure functions; see the module."""
    own = task.flat

    def broadcast(key: Array, server: Ascent) -> Broadcast:
        return Broadcast(to_user_dtype(server.trial))

    def silo_step(key: Array, broadcast: Broadcast, silo: tuple, data: SiloData) -> tuple[Curved, tuple]:
        return Curved(*derivatives(lambda x: task.whole(x, data), broadcast.common)), silo

    @in_x64
    def total(messages: Curved) -> Curved:
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), messages)

    def aggregate(messages: Curved, cohort: Cohort) -> Curved:
        return total(messages)

    add = in_x64(lambda a, b: jax.tree.map(jnp.add, a, b))

    def server_step(key: Array, server: Ascent, found: Curved) -> tuple[Ascent, dict]:
        if prior:
            found = add(found, Curved(*derivatives(own.log_prior, to_user_dtype(server.trial))))
        new, rest = onward(server, found, float(jnp.finfo(jnp.zeros(()).dtype).eps))
        return new, {"_rest": rest}

    nothing = lambda key, broadcast, data: ()
    init = lambda key: ascent_from(jnp.zeros(own.size))
    return FederatedAlgorithm(init, nothing, broadcast, silo_step, aggregate, server_step).traced_once()


def climb_phase(
    name: str, algorithm: FederatedAlgorithm, task: Task, num_rounds: int, finish: Callable[[Left, Ascent], Left]
) -> Phase:
    """From the server's point on, in every silo; ``finish`` is asked if any density was finite."""
    return Phase(
        name,
        algorithm,
        begin=lambda left, fresh: Begun(ascent_from(task.flat.joined(left.server))),
        num_rounds=num_rounds,
        done=lambda info: bool(np.asarray(info["_rest"])[-1]),
        finish=lambda left, found, info: finish(left, found) if np.isfinite(np.asarray(found.value)) else None,
        cohort=task.survey.num_silos,
        role="check",
        effort="least",
        look=1,
        watched=False,
    )


def arrived(left: Left, found: Ascent) -> Left:
    """The mode and its curvature. The rounds' own point stays as it is, for a run that goes on."""
    dtype = left.server.z.dtype
    normal, doubt = around(found.x, np.asarray(found.precision), least_curvature(dtype))
    normal = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), normal)
    far = float(found.size) > STILL_MOVING
    if far:
        doubt = (
            *doubt,
            f"after {MOST_ROUNDS} closing rounds the gradient was still {float(found.size):.2g} posterior sds from "
            "zero: pass init_loc_fn=init_to_sample (another start), or use nf.EP(model)",
        )
    server = left.server._replace(posterior=normal)
    return left._replace(server=server, reasons=(*left.reasons, *doubt), moving=left.moving or far)


def least_curvature(dtype: Any) -> float:
    """The smallest eigenvalue of a precision with a unit diagonal that is no rounding."""
    return max(FLAT, ROUNDING * float(np.finfo(dtype).eps))
