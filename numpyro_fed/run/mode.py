r"""Where to start: a few rounds of Newton's method, counted like any other round.

A prior N(0, 100) says little about an answer of 242, so a start needs data. The objective is the evidence bound with a
point at :math:`x = (z_G, \theta)` and, in each silo, a normal over the locals fitted by Newton's method at that point
(mode :math:`m`, scale :math:`S`, slope :math:`C = dm/dz_G`):

.. math::

    F_j(x) = \frac1K \sum_k \log p(y_j, m + C (z_G - \hat z_G) + S \epsilon_k \mid x) + \log |S|

Integrating over the locals' spread keeps variance parameters from collapsing to zero, where the joint density of a
hierarchical model has its (useless) mode. A silo sends the value, gradient and Hessian of :math:`F_j`: O(d^2) numbers
for at most ``MAX_ROUNDS`` rounds. The server takes damped Newton steps (Levenberg and Marquardt, with the absolute
values of the curvatures), and the curvature at the end is the first guess of the posterior's covariance.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm, Left, Phase
from numpyro_fed.data.padding import SiloData
from numpyro_fed.keys import digest
from numpyro_fed.local.conditional import fit_local_laplace
from numpyro_fed.local.start import LocalStart, WarmStart
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.provenance import provenance
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.newton import Search, advance, floored_inverse_root, start_search, unit_diagonal
from numpyro_fed.precision import in_x64, to_user_dtype

Array = jax.Array
LEAST_CURVATURE = 1e-3  # in units of the diagonal's
LOOK = 5  # rounds between two looks at whether it has converged
MAX_ROUNDS = 30
MAX_DIM = 200  # above this a dense Hessian costs more than it gives
DRAWS = 8  # of the locals, antithetic
LOCAL_STEPS = 4
JITTER = 0.1  # of the first point: components of a mixture that begin alike would stay alike
SLACK = 5.0  # units of log density
ENTROPY = 0.5 * (1 + float(np.log(2 * np.pi)))  # of a standard normal
CONVERGED = 0.05  # expected gain of the next step, in log density: a third of a posterior sd


ModeServer = Search  # over (z_G, theta), (d + p,); ``trial`` is what is sent next


class ModeMessage(NamedTuple):
    value: Array
    gradient: Array  # (d + p,)
    hessian: Array  # (d + p, d + p)


def newton_start(split: SplitModel) -> FederatedAlgorithm:
    """Mode finding as a federated algorithm. Its final states start the variational methods."""
    theta_flat, unravel_theta = ravel_pytree(split.theta)
    d, size = split.dim, split.dim + theta_flat.shape[0]
    free = np.concatenate([np.ones(d, bool), *(np.full(n, not held) for n, held in _held(split))])

    def parts(x: Array) -> tuple[Array, dict]:
        return x[:d], unravel_theta(x[d:])

    def init(key: Array) -> ModeServer:
        return start_search(jnp.concatenate([JITTER * jax.random.normal(key, (d,)), theta_flat]))

    def broadcast(key: Array, server: ModeServer) -> Broadcast:
        return Broadcast(server.trial)

    def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> LocalStart:
        zeros = split.zeros_local(data.mask)
        return LocalStart(
            split.near_zero_local(data.mask),
            jax.tree.map(jnp.ones_like, zeros),
            {group: jnp.zeros((*value.shape, d)) for group, value in zeros.items()},
        )

    def silo_step(key: Array, broadcast: Broadcast, silo: LocalStart, data: SiloData) -> tuple[ModeMessage, LocalStart]:
        x, before = broadcast.common, silo
        silo = fit_locals(split, x[:d], parts(x)[1], silo, data)
        draws = {  # the same in every round: the objective is then a fixed function
            g.name: jax.random.normal(jax.random.key(digest(g.name)), (g.num_rows(data.mask), DRAWS // 2, g.size))
            for g in split.groups
        }
        eps = {g: jnp.moveaxis(jnp.concatenate([e, -e], axis=1), 1, 0) for g, e in draws.items()}

        def bound(x_new: Array) -> Array:
            z, theta = parts(x_new)

            def one(eps: dict) -> Array:
                moved = {g: silo.loc[g] + silo.coupling[g] @ (z - x[:d]) + silo.scale[g] * eps[g] for g in silo.loc}
                return split.log_silo(z, moved, theta, data)

            return jnp.mean(jax.vmap(one)(eps)) if split.groups else split.log_silo(z, {}, theta, data)

        active = split.evaluate(x[:d], silo.loc, parts(x)[1], data).active
        entropy = sum(
            (jnp.sum(jnp.where(active[g], jnp.log(silo.scale[g]) + ENTROPY, 0.0)) for g in silo.scale), jnp.zeros(())
        )
        value, gradient = jax.value_and_grad(bound)(x)
        hessian = jax.jacfwd(jax.grad(bound))(x)
        # a step that was too long must not stay: the server will refuse it, and the next one starts from here
        fine = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(silo)]
        kept = jax.tree.map(lambda new, old: jnp.where(jnp.all(jnp.stack(fine)), new, old), silo, before)
        return ModeMessage(value + entropy, gradient, hessian), kept if fine else silo

    def aggregate(messages: ModeMessage, cohort: Cohort) -> ModeMessage:
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), messages)

    def server_step(key: Array, server: ModeServer, silos: ModeMessage) -> tuple[ModeServer, dict]:
        def prior(x: Array) -> Array:
            return split.log_prior(*parts(x))

        value = silos.value + prior(server.trial)
        gradient = silos.gradient + jax.grad(prior)(server.trial)
        precision = -(silos.hessian + jax.jacfwd(jax.grad(prior))(server.trial))
        gradient = jnp.where(free, gradient, 0.0)
        precision = jnp.where(free[:, None] & free, precision, jnp.eye(size))
        # the locals' scale is their curvature's, not the bound's best, so value and gradient disagree by a few units
        # of log density near the end: there the gradient decides, but no point may be far below the best so far
        slack = 0.1 + 1e-4 * jnp.abs(server.value) + jnp.minimum(server.gain, SLACK)
        new, _ = advance(server, value, gradient, precision, slack)
        new = new._replace(value=jnp.maximum(server.value, new.value))
        return new, {"loss": -value, "_gain": new.gain, "_best": new.value}

    return FederatedAlgorithm(init, init_silo, broadcast, silo_step, aggregate, server_step).traced_once()


def _held(split: SplitModel) -> list[tuple[int, bool]]:
    """Of each theta its size, and whether it shapes the globals' prior.

    There a point has no mode: as the scale of a prior goes to zero with the globals, the density goes to infinity.
    Such a theta stays at its start until inference integrates over the globals.
    """
    if not split.theta:
        return []
    found = provenance(lambda **theta: split.log_prior(jnp.zeros(split.dim), theta), split.theta)
    return [
        (int(sum(np.size(leaf) for leaf in jax.tree.leaves(v))), n in found) for n, v in sorted(split.theta.items())
    ]


def fit_locals(split: SplitModel, z: Array, theta: dict, silo: LocalStart, data: SiloData) -> LocalStart:
    """The locals' normal approximation at z, from the one at another point."""
    if not split.groups:
        return silo
    frame = fit_local_laplace(split, z, theta, silo.loc, data, LOCAL_STEPS)
    return LocalStart(frame.loc, frame.conditional_sds(), frame.coupling)


def mode_phase(split: SplitModel, num_rounds: int) -> Phase:
    """At most so many rounds; what is left is a warm start, the silos' half of which are their own states."""

    def finish(left: Left, server: ModeServer, info: dict[str, Any]) -> Left | None:
        if not np.isfinite(float(server.value)):
            return None
        return left._replace(warm=mode_to_warm_start(split, server))

    return Phase(
        "mode",
        remembered(lambda: newton_start(split), "mode", ByIdentity(split)),
        num_rounds=num_rounds,
        done=lambda info: float(info["_gain"][-1]) < CONVERGED,
        finish=finish,
        role="start",
        effort="least",
        look=LOOK,
    )


def mode_to_warm_start(split: SplitModel, server: ModeServer) -> WarmStart:
    """The end of mode finding as a start: its point, and the inverse of its curvature given theta."""
    d = split.dim

    @in_x64
    def spread(precision: Array) -> tuple[Array, Array]:
        root = floored_inverse_root(precision[:d, :d], LEAST_CURVATURE)
        return jnp.linalg.cholesky(root @ root.T), unit_diagonal(precision)[1]

    chol, scale = to_user_dtype(spread(server.precision))
    unravel = ravel_pytree(split.theta)[1]
    return WarmStart(server.x[:d], chol, scale[:d], unravel(server.x[d:]), unravel(scale[d:]))
