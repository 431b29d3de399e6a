r"""Is theta where the evidence is largest? One round of the check, for models with ``numpyro.param``.

By Fisher's identity and Louis' formula the evidence's gradient and information are posterior moments of the score
:math:`S(z) = \partial_\theta \log p(z, y \mid \theta)` (locals integrated out, as everywhere in the check):

.. math::

    g = E[S], \qquad I = -E[\partial_\theta S] - \mathrm{Var}[S]

The check has just weighed points by the posterior's density, so these are weighted sums: a silo returns its scores at
the points, and its weighted second derivatives. The step :math:`I^{-1} g` in units of theta's standard errors,
:math:`\sqrt{\operatorname{diag} I^{-1}}`, says how far theta is off, whatever its scale.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Phase
from numpyro_fed.data.padding import SiloData
from numpyro_fed.host import put
from numpyro_fed.local.integrate import Marginal, silo_factor, start_frame
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.rows import components_of
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.matrices import lower_half
from numpyro_fed.results.looks import ThetaLook
from numpyro_fed.results.scalars import scalars
from numpyro_fed.run.runner import Runner
from numpyro_fed.run.target import BLOCK, LOCAL_STEPS

Array = jax.Array
MOST = 20  # params: second derivatives at every point
LEAST = 0.05  # of the complete data's information, that the evidence has at least: their difference is noisy


class ThetaBroadcast(NamedTuple):
    """All that a silo receives."""

    points: Array  # (S, d)
    weights: Array  # (S,): they add up to one
    centre: Array  # (d,): where it looks for its locals
    theta: dict[str, Array]


class ThetaMessage(NamedTuple):
    score: Array  # (S, p)
    hessian: Array  # (p (p + 1) / 2): the lower triangle, weighted


class ThetaServer(NamedTuple):
    sent: ThetaBroadcast
    found: ThetaMessage


def theta_round(split: SplitModel, marginal: Marginal, num: int) -> FederatedAlgorithm:
    """The round as pure functions; see :mod:`numpyro_fed.algorithm`."""

    def at_points(log_density: Any, sent: ThetaBroadcast, batch: int) -> ThetaMessage:
        """Of ``log_density(z, theta)``."""
        flat, unravel = ravel_pytree(sent.theta)

        def one(given: tuple[Array, Array]) -> tuple[Array, Array]:
            z, weight = given

            def slope(x: Array) -> tuple[Array, Array]:
                gradient = jax.grad(lambda x: log_density(z, unravel(x)))(x)
                return gradient, gradient

            hessian, score = jax.jacfwd(slope, has_aux=True)(flat)
            seen = weight > 0  # where the density is zero its derivatives may be anything
            return jnp.where(seen, score, 0.0), jnp.where(seen, weight * lower_half(hessian), 0.0)

        score, hessian = jax.lax.map(one, (sent.points, sent.weights), batch_size=batch)
        return ThetaMessage(score, jnp.sum(hessian, axis=0))

    def broadcast(key: Array, server: ThetaServer) -> Broadcast:
        return Broadcast(server.sent)

    def silo_step(key: Array, broadcast: Broadcast, silo: tuple, data: SiloData) -> tuple[ThetaMessage, tuple]:
        sent: ThetaBroadcast = broadcast.common
        components = components_of(split, data) if marginal.rows == "indexed" else None
        factor = lambda theta: silo_factor(split, marginal, data, components, theta)
        here = factor(sent.theta)
        frame, nodes = here.refit(sent.centre, start_frame(split, data), LOCAL_STEPS), here.nodes(None)
        log_f = lambda z, theta: factor(theta).log_f(z, frame, nodes)
        return at_points(log_f, sent, here.batch_of(num)), silo

    def aggregate(messages: ThetaMessage, cohort: Cohort) -> ThetaMessage:
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), messages)

    def server_step(key: Array, server: ThetaServer, silos: ThetaMessage) -> tuple[ThetaServer, dict]:
        own = at_points(split.log_prior, server.sent, num)
        return server._replace(found=jax.tree.map(jnp.add, own, silos)), {}

    fresh, fresh_silo = lambda key: (), lambda key, broadcast, data: ()
    return FederatedAlgorithm(fresh, fresh_silo, broadcast, silo_step, aggregate, server_step).traced_once()


def look_at_theta(
    runner: Runner, marginal: Marginal, points: np.ndarray, log_weights: np.ndarray, centre: np.ndarray, theta: dict
) -> ThetaLook | str | None:
    """How far theta is off, or why nobody was asked; "": there is none. None: interrupted.

    ``log_weights`` are those of the points under the posterior, p / t, unnormalised.
    """
    split, size = runner.split, sum(np.size(leaf) for leaf in jax.tree.leaves(theta))
    if not size:
        return ""
    if size > MOST:
        return f"theta was not looked at: numpyro.params have {size} elements, more than {MOST}"
    points, log_weights = points[:BLOCK], log_weights[:BLOCK]
    weights = np.exp(log_weights - np.max(log_weights))
    if not np.all(np.isfinite(weights)):
        return "theta was not looked at: the density is zero at every point"
    weights = weights / np.sum(weights)
    dtype, num = points.dtype, len(points)
    sent = ThetaBroadcast(put(points), put(weights.astype(dtype)), put(centre.astype(dtype)), theta)
    unknown = ThetaMessage(*put((np.zeros((num, size), dtype), np.zeros(size * (size + 1) // 2, dtype))))
    phase = Phase(
        "theta",
        remembered(partial(theta_round, split, marginal, num), "theta", ByIdentity(split), marginal, num),
        begin=lambda left, fresh: Begun(ThetaServer(sent, unknown)),
        cohort=len(runner.stack.names),
        role="check",
        effort="some",
        watched=False,
        recipe=("theta", num),
    )
    left, _ = runner.run((phase,), Left(), tuple(() for _ in runner.stack.buckets), None)
    if left.interrupted:
        return None
    found: Any = left.server
    score, triangle = (np.asarray(leaf, np.float64) for leaf in found.found)
    half = np.zeros((size, size))
    half[np.tril_indices(size)] = triangle
    complete = -(half + np.tril(half, -1).T)
    if not (np.all(np.isfinite(score)) and np.all(np.isfinite(complete))):
        return "theta was not looked at: the density's derivatives are not finite"
    return newton_step(score, complete, weights, names_of(theta))


def newton_step(score: np.ndarray, complete: np.ndarray, weights: np.ndarray, names: tuple[str, ...]) -> ThetaLook:
    """From scores (S, p) and the complete data's information (p, p).

    >>> look = newton_step(np.array([[1.0], [3.0]]), np.array([[5.0]]), np.array([0.5, 0.5]), ("a",))
    >>> look.step.tolist()  # the gradient is 2, and the information 5 - 1
    [1.0]
    """
    gradient = weights @ score
    off = score - gradient
    values, vectors = np.linalg.eigh(complete)
    root = vectors * np.sqrt(np.maximum(np.abs(values), 1e-10 * np.max(np.abs(values)) + np.finfo(float).tiny))
    missing = np.linalg.solve(root, (weights[:, None] * off).T @ off) @ np.linalg.inv(root).T
    shares, basis = np.linalg.eigh(np.eye(len(names)) - 0.5 * (missing + missing.T))
    half = np.linalg.solve(root.T, basis / np.sqrt(np.maximum(shares, LEAST)))  # half half' is the inverse
    inverse = half @ half.T
    sds = np.sqrt(np.diagonal(inverse))
    each = (weights[:, None] * off) @ inverse
    return ThetaLook(inverse @ gradient / sds, np.sqrt(np.sum(each**2, axis=0)) / sds, names)


def names_of(theta: dict) -> tuple[str, ...]:
    """Of its scalars, in the order of ``ravel_pytree``.

    >>> names_of({"a": np.zeros(2), "b": np.zeros(())})
    ('a[0]', 'a[1]', 'b')
    """
    found: list[str] = []
    for path, value in jax.tree_util.tree_leaves_with_path(theta):
        name = ".".join(str(getattr(key, "key", key)) for key in path)
        found += scalars({name: np.asarray(value)[None]})
    return tuple(found)
