"""A round of GI-PVI: the table of all silos' rows goes down, a silo's own rows come back and replace the old ones."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.in_turn import in_turn
from numpyro_fed.methods.gi_visit import Visited, Work, start_rows, visit
from numpyro_fed.model.observations import num_observations
from numpyro_fed.normal.inducing import Rows, noise_for, sample

Array = jax.Array
PATHS = 4  # draws from which the server's divergence from the prior is known


class GIServer(NamedTuple):
    """The rows of all silos: all that is known of the weights beyond their prior."""

    table: Rows  # each leaf (J, ...)
    visits: Array  # int (J,): how often each silo was heard
    log_likelihoods: Array  # (J,): E_q[log p(y_j | W)], as last heard
    moving: Array  # (J,): by how much that changed in the last visit, over what is little; of a first visit, UNKNOWN
    climbs: Array  # (J,): how much the bound still rose at its end, over what is little
    lost: Array  # int (J,): how many of the last answers were not finite, and left out
    damping: Array
    start: Array  # (d,): weights with which silos begin, as standard normals of the prior
    warm: Array  # bool: these are another fit's, and not chance


class GIBroadcast(NamedTuple):
    """All that a silo receives, with its own place in the table."""

    table: Rows
    heard: Array  # bool (J,)
    start: Array
    warm: Array


class GIMessage(NamedTuple):
    """All that leaves a silo: pseudo-rows, and how its steps went."""

    rows: Rows
    log_likelihood: Array
    change: Array
    climb: Array
    observations: Array


UNKNOWN = 1e30
LITTLE, LEAST = 0.01, 0.2  # nats an observation by which a likelihood or bound may change at rest; in all, at least


def stacked_rows(table: Rows, weights: Array) -> Rows:
    """The rows of several silos as one table, a silo's precisions times its weight, (J,)."""
    flat = lambda leaf: leaf.reshape(-1, leaf.shape[-1])
    joined = lambda leaf: jnp.moveaxis(leaf * weights[:, None, None], 0, 1).reshape(leaf.shape[1], -1)
    return Rows(
        flat(table.inputs), tuple(flat(one) for one in table.outputs), tuple(joined(one) for one in table.precisions)
    )


def heard_rows(server: GIServer) -> Rows:
    """The rows of those who were heard, which make the posterior."""
    return stacked_rows(server.table, (server.visits > 0).astype(server.start.dtype))


def damped(old: Rows, new: Rows, damping: Array) -> Rows:
    r"""A silo's rows, as much of their change taken as the damping says.

    For inputs that stay, and given the layers below, that is the factor :math:`t_{old}^{1 - \rho}\, t_{new}^\rho`:
    linear in :math:`\Lambda` and in :math:`\Lambda V`. Inputs follow the first layer's outputs. Rows of nobody have
    precisions of zero, so that of first rows inputs and outputs are taken as they are.
    """
    outputs, precisions, shares = [], [], []
    for was, now, v_was, v_now in zip(old.precisions, new.precisions, old.outputs, new.outputs, strict=True):
        precision = (1 - damping) * was + damping * now  # (groups, M)
        share = damping * now / jnp.maximum(precision, jnp.finfo(now.dtype).tiny)
        precisions.append(precision)
        outputs.append((1 - share.T) * v_was + share.T * v_now)
        shares.append(share)
    along = jnp.mean(shares[0], axis=0)[:, None]
    return Rows((1 - along) * old.inputs + along * new.inputs, tuple(outputs), tuple(precisions))


def gi_rounds(work: Work, num: int) -> FederatedAlgorithm:
    """The method as pure functions; see :mod:`numpyro_fed.algorithm`."""
    network, split = work.network, work.split

    def init(key: Array) -> GIServer:
        dtype = jnp.zeros(()).dtype
        size, width = work.num_inducing, network.layers[0].mean.shape[0] - (network.layers[0].bias is not None)
        table = Rows(
            jnp.zeros((num, size, width), dtype),
            tuple(jnp.zeros((num, size, layer.units), dtype) for layer in network.layers),
            tuple(jnp.zeros((num, groups, size), dtype) for groups in work.groups),
        )
        nothing, unknown = jnp.zeros(num, dtype), jnp.full(num, UNKNOWN, dtype)
        start = split.ravel(network.sites(noise_for(network, key))).astype(dtype)
        none, chance = jnp.zeros(num, jnp.int32), jnp.zeros((), bool)
        return GIServer(table, none, nothing, unknown, nothing, none, jnp.ones((), dtype), start, chance)

    def broadcast(key: Array, server: GIServer) -> Broadcast:
        sent = GIBroadcast(server.table, server.visits > 0, server.start, server.warm)
        return Broadcast(sent, jnp.arange(num, dtype=jnp.int32))

    def silo_step(key: Array, broadcast: Broadcast, silo: tuple, data: SiloData) -> tuple[GIMessage, tuple]:
        sent, place = broadcast.common, broadcast.each
        begin_key, steps_key = jax.random.split(key)
        others = stacked_rows(sent.table, (sent.heard & (jnp.arange(num) != place)).astype(sent.start.dtype))
        noise = network.weights(split.unravel(sent.start))
        fresh = start_rows(work, begin_key, data, others, noise, sent.warm)
        begin = jax.tree.map(lambda old, new: jnp.where(sent.heard[place], old[place], new), sent.table, fresh)
        found: Visited = in_turn(partial(visit, work))(steps_key, others, begin, data)
        return GIMessage(*found, observations=num_observations(split, data)), silo

    def aggregate(messages: GIMessage, cohort: Cohort) -> tuple[GIMessage, Array]:
        return messages, jnp.asarray(cohort.index)

    def server_step(key: Array, server: GIServer, arrived: tuple[GIMessage, Array]) -> tuple[GIServer, dict[str, Any]]:
        messages, index = arrived
        fine = [jnp.all(jnp.isfinite(one.reshape(len(index), -1)), axis=1) for one in jax.tree.leaves(messages)]
        ok = jnp.all(jnp.stack(fine), axis=0)
        known = server.visits[index] > 0
        old = jax.tree.map(lambda leaf: leaf[index], server.table)
        mixed = jax.vmap(damped, (0, 0, None))(old, messages.rows, server.damping)
        fits = lambda leaf: ok.reshape((-1,) + (1,) * (leaf.ndim - 1))
        mixed = jax.tree.map(lambda new, was: jnp.where(fits(new), new, was), mixed, old)
        table = jax.tree.map(lambda leaf, new: leaf.at[index].set(new), server.table, mixed)
        keep = lambda old, new: old.at[index].set(jnp.where(ok, new, old[index]))
        little = jnp.maximum(LITTLE * messages.observations, LEAST)
        # of first rows at the end of the visit; else of the posterior that all silos had made, as it was broadcast
        likelihoods = messages.log_likelihood + jnp.where(known, 0.0, messages.change)
        moving = jnp.where(known, jnp.abs(messages.change) / little, UNKNOWN)
        server = server._replace(
            table=table,
            visits=server.visits.at[index].add(ok.astype(jnp.int32)),
            log_likelihoods=keep(server.log_likelihoods, likelihoods),
            moving=keep(server.moving, moving),
            climbs=keep(server.climbs, messages.climb / little),
            lost=server.lost.at[index].set(jnp.where(ok, 0, server.lost[index] + 1)),
        )
        heard = heard_rows(server)
        divergence = lambda key: sample(network, heard, noise_for(network, key))[1]
        divergences = jax.vmap(divergence)(jax.random.split(key, PATHS))
        info = {
            "loss": jnp.mean(divergences) - jnp.sum(server.log_likelihoods),
            "divergence": jnp.mean(divergences),
            "moving": jnp.maximum(jnp.max(server.moving), jnp.max(server.climbs)),
            "heard": jnp.sum(server.visits > 0),
            "skipped": jnp.sum(~ok),
        }
        return server, info

    return FederatedAlgorithm(init, lambda key, broadcast, data: (), broadcast, silo_step, aggregate, server_step)
