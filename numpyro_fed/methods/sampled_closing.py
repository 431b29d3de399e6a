"""A closing round of posterior averaging from samples: linear in d, and for silos of which a few stand for all.

Each silo sends the precision of its samples around the server's point, and its gradient there; their sum, with the
prior's, is the posterior. Where likelihoods are not normal that is the curvature around each silo's own mode.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Broadcast, FederatedAlgorithm, Left
from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.descent import Task
from numpyro_fed.local.walk import Flat
from numpyro_fed.methods.averaging import AveragingServer
from numpyro_fed.methods.closing import OFF
from numpyro_fed.methods.fedpa_posterior import DENSE, dense, low_rank
from numpyro_fed.normal.moments import Precision
from numpyro_fed.pieces import jit
from numpyro_fed.precision import to_user_dtype, unoptimised

Array = jax.Array


class Precisions(NamedTuple):
    """All that leaves a silo: its precision diag(e) + Q' diag(q) Q, in units of mean losses, and its gradient."""

    diagonal: Array  # (d,): e
    weights: Array  # (r,): q
    directions: Array  # (r, d): Q
    gradient: Array  # (d,): of its log likelihood at the server's point
    rows: Array


class Closing(NamedTuple):
    server: AveragingServer
    found: Precisions  # stacked


def sampled_look(task: Task, sample: Callable[[Array, Array, SiloData], Precision]) -> FederatedAlgorithm:
    """The round as pure functions; ``sample(key, w, data)`` is a silo's precision."""
    own = task.flat

    def broadcast(key: Array, state: Closing) -> Broadcast:
        return Broadcast(own.joined(state.server))

    def silo_step(key: Array, broadcast: Broadcast, silo: tuple, data: SiloData) -> tuple[Precisions, tuple]:
        w = broadcast.common
        diagonal, weights, directions = to_user_dtype(sample(key, w, data))
        return Precisions(diagonal, weights, directions, jax.grad(task.whole)(w, data), task.count(data)), silo

    def server_step(key: Array, state: Closing, found: Precisions) -> tuple[Closing, dict]:
        return Closing(state.server, found), {}

    aggregate = lambda messages, cohort: messages
    nothing = lambda key, broadcast, data: ()
    return FederatedAlgorithm(lambda key: (), nothing, broadcast, silo_step, aggregate, server_step)


def opening(own: Flat, server: AveragingServer, num_samples: int, num_asked: int) -> Closing:
    """Before the round; engines know its shapes from it."""
    rank = min(num_samples, own.size)
    zeros = lambda *shape: jnp.zeros((num_asked, *shape), server.z.dtype)
    vector = zeros(own.size)
    return Closing(server, Precisions(vector, zeros(rank), zeros(rank, own.size), vector, zeros()))


def closed(task: Task, prior: bool, left: Left, state: Closing) -> Left:
    """The posterior around the server's point; and, of all silos together, how far that is from the mode."""
    own, server = task.flat, left.server
    found = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.found)
    rows = found.rows * float(server.total) / found.rows.sum()  # those who were asked stand for all
    weights = (rows[:, None] * found.weights).reshape(-1)
    every = own.size <= DENSE or own.size == found.weights.shape[1]
    make, w = dense if every else low_rank, own.joined(server)
    normal, doubt = make(own, w, rows @ found.diagonal, weights, found.directions.reshape(-1, own.size), prior)
    if task.survey.known and len(rows) == task.survey.num_silos:
        gradient = found.gradient.sum(axis=0)
        if prior:
            gradient += np.asarray(jit(jax.grad(own.log_prior), compiler_options=unoptimised())(w), np.float64)
        away = normal.size(gradient)
        if away > OFF:
            doubt = (
                *doubt,
                f"the point is {away:.2g} posterior sds away from where the gradient is zero: run more rounds"
                + (", or pass closing='newton'" if own.size <= DENSE else ", or use another method (nf.SEP, nf.SFVI)"),
            )
    normal = jax.tree.map(lambda leaf: jnp.asarray(leaf, server.z.dtype), normal)
    return left._replace(server=server._replace(posterior=normal), reasons=(*left.reasons, *doubt))
