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
    damping: Array
    start: Array  # (d,): weights with which silos begin, as standard normals of the prior


class GIBroadcast(NamedTuple):
    """All that a silo receives, with its own place in the table."""

    table: Rows
    heard: Array  # bool (J,)
    start: Array


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
        return GIServer(table, jnp.zeros(num, jnp.int32), nothing, unknown, nothing, jnp.ones((), dtype), start)

    def broadcast(key: Array, server: GIServer) -> Broadcast:
        return Broadcast(GIBroadcast(server.table, server.visits > 0, server.start), jnp.arange(num, dtype=jnp.int32))

    def silo_step(key: Array, broadcast: Broadcast, silo: tuple, data: SiloData) -> tuple[GIMessage, tuple]:
        sent, place = broadcast.common, broadcast.each
        begin_key, steps_key = jax.random.split(key)
        others = stacked_rows(sent.table, (sent.heard & (jnp.arange(num) != place)).astype(sent.start.dtype))
        fresh = start_rows(work, begin_key, data, others, network.weights(split.unravel(sent.start)))
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

        def taken(old: Array, new: Array) -> Array:
            """As much of a change as the damping says; of first rows inputs and outputs as they are."""
            shape = (-1,) + (1,) * (new.ndim - 1)
            share = jnp.where(known, server.damping, 1.0).reshape(shape)
            mixed = old[index] + share * (jnp.where(ok.reshape(shape), new, old[index]) - old[index])
            return old.at[index].set(mixed)

        first = jnp.where(known, 1.0, server.damping)  # and precisions to a power, as if their old ones were zero
        weakened = tuple(one * first[:, None, None] for one in messages.rows.precisions)
        table = jax.tree.map(taken, server.table, messages.rows._replace(precisions=weakened))
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
