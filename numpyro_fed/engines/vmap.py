"""The fast engine: rounds scanned, silos vmapped, one compiled program.

Law: equals :class:`~numpyro_fed.engines.Loopback` up to float rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Cohort, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines.base import sent_to
from numpyro_fed.keys import SERVER, START, identities, silo_keys
from numpyro_fed.precision import QUICK, UNOPTIMISED, engine_in_x64, strong, zeros

CHUNK = 512  # rounds between two looks of the host: progress, stopping, interruption


@dataclass(frozen=True)
class Vmap:
    """All silos of a bucket in one vmapped step; rounds run in a compiled loop. The default."""

    chunk: ClassVar[int] = CHUNK
    holds_states: ClassVar[bool] = True
    reads_store: ClassVar[bool] = False

    @engine_in_x64
    def start(self, algorithm: FederatedAlgorithm, key: Any, stack: Stack) -> tuple[Any, tuple]:
        return _start(algorithm, stack.names, _bucket_names(stack), key, stack.arrays, stack.shared)

    @engine_in_x64
    def rounds(
        self,
        algorithm: FederatedAlgorithm,
        key: Any,
        stack: Stack,
        server: Any,
        silos: tuple,
        first: int,
        cohorts: Any,
        count: int,
        effort: str = "most",
    ) -> tuple[Any, tuple, dict[str, np.ndarray]]:
        if cohorts is not None and len(cohorts) < CHUNK:
            cohorts = np.concatenate([cohorts, np.repeat(cohorts[-1:], CHUNK - len(cohorts), axis=0)])
        server, silos = strong((server, silos))
        compiled = _ROUNDS[effort]
        names = stack.names, _bucket_names(stack)
        server, silos, info = compiled(
            algorithm, *names, key, stack.arrays, stack.shared, server, silos, first, cohorts, count
        )
        return server, silos, {name: np.asarray(rows)[:count] for name, rows in info.items()}

    def in_silos(self, function: Callable[..., Any], given: Any, stack: Stack, *states: tuple | None) -> tuple:
        return in_every_silo(function, given, stack, *states)


def in_every_silo(function: Callable[..., Any], given: Any, stack: Stack, *states: tuple | None) -> tuple:
    """``function(given, *states of one silo)``, vectorised over each bucket, in the precision of the user's program."""
    x64 = jax.config.read("jax_enable_x64")

    def one(*own: Any) -> Any:
        with jax.enable_x64(x64):
            return function(given, *own)

    out = []
    for b, bucket in enumerate(stack.buckets):
        own = [None if state is None else state[b] for state in states]
        with jax.enable_x64(True):
            out.append(jax.vmap(one, axis_size=len(bucket.names))(*own))
    return tuple(out)


def _bucket_names(stack: Stack) -> tuple[tuple[str, ...], ...]:
    return tuple(bucket.names for bucket in stack.buckets)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _start(
    algorithm: FederatedAlgorithm, names: tuple, bucket_names: tuple, key: Any, arrays: tuple, shared: Any
) -> tuple[Any, tuple]:
    key = jax.random.fold_in(key, START)
    server = algorithm.init(jax.random.fold_in(key, SERVER))
    broadcast = algorithm.broadcast(jax.random.fold_in(key, SERVER), server)
    states = []
    for bucket, (args, mask) in zip(bucket_names, arrays, strict=True):
        where = np.array([names.index(name) for name in bucket])

        def init(key: Any, j: Any, args: Any, mask: Any) -> Any:
            return algorithm.init_silo(key, sent_to(broadcast, j), SiloData(args, mask, shared))

        states.append(jax.vmap(init)(silo_keys(key, identities(bucket)), where, args, mask))
    return server, tuple(states)


def _run_rounds(
    algorithm: FederatedAlgorithm,
    names: tuple,
    bucket_names: tuple,
    key: Any,
    arrays: tuple,
    shared: Any,
    server: Any,
    silos: tuple,
    first: Any,
    cohorts: Any,
    count: Any,
) -> tuple[Any, tuple, dict]:
    places = [np.array([names.index(name) for name in bucket]) for bucket in bucket_names]

    def step(key: Any, broadcast: Any, j: Any, state: Any, args: Any, mask: Any) -> tuple[Any, Any]:
        return algorithm.silo_step(key, sent_to(broadcast, j), state, SiloData(args, mask, shared))

    batched = jax.vmap(step, in_axes=(0, None, 0, 0, 0, 0))

    def everyone(keys: Any, broadcast: Any, silos: tuple) -> tuple[Any, tuple, Any]:
        messages, states = [], []
        for place, state, (args, mask) in zip(places, silos, arrays, strict=True):
            message, state = batched(keys[place], broadcast, place, state, args, mask)
            messages.append(message)
            states.append(state)
        if len(messages) == 1 and np.array_equal(places[0], np.arange(len(names))):
            return messages[0], tuple(states), np.arange(len(names))
        order = np.argsort(np.concatenate(places))
        together = jax.tree.map(lambda *parts: jnp.concatenate(parts)[order], *messages)
        return together, tuple(states), np.arange(len(names))

    def members(keys: Any, broadcast: Any, b: int, state: Any, cohort: Any) -> tuple[Any, Any, Any]:
        """Of one bucket: messages of those who are in the cohort, their places in it, and the bucket's states."""
        bucket, place, (args, mask) = bucket_names[b], places[b], arrays[b]
        position = np.full(len(names), len(bucket))  # of a silo in this bucket; the end if it is elsewhere
        position[place] = np.arange(len(bucket))
        size = cohort.shape[0]
        inside = jnp.asarray(position)[cohort]
        order = jnp.argsort(inside >= len(bucket), stable=True)[: min(size, len(bucket))]
        at = inside[order]
        gather = lambda leaf: leaf[jnp.minimum(at, len(bucket) - 1)]
        js = gather(jnp.asarray(place))
        state_in, args_in, mask_in = jax.tree.map(gather, (state, args, mask))
        message, new = batched(keys[js], broadcast, js, state_in, args_in, mask_in)
        state = jax.tree.map(lambda old, rows: old.at[at].set(rows, mode="drop"), state, new)
        return message, jnp.where(at < len(bucket), order, size), state

    def some(keys: Any, broadcast: Any, silos: tuple, cohort: Any) -> tuple[Any, tuple, Any]:
        """Only the cohort's silos are computed: each bucket has a slot for every member it may have this round."""
        size = cohort.shape[0]
        if size == 1 and len(places) > 1:
            return one_of(keys, broadcast, silos, cohort)
        together, states = None, []
        for b, state in enumerate(silos):
            message, target, state = members(keys, broadcast, b, state, cohort)
            states.append(state)
            if together is None:
                together = jax.tree.map(lambda leaf: zeros((size, *leaf.shape[1:]), leaf.dtype), message)
            together = jax.tree.map(lambda all_, rows, t=target: all_.at[t].set(rows, mode="drop"), together, message)
        return together, tuple(states), cohort

    def one_of(keys: Any, broadcast: Any, silos: tuple, cohort: Any) -> tuple[Any, tuple, Any]:
        """A single silo: the other buckets have nothing to do."""
        own = np.zeros(len(names), np.int32)
        for b, place in enumerate(places):
            own[place] = b

        def branch(b: int) -> Callable[[tuple], tuple[Any, tuple]]:
            def run(silos: tuple) -> tuple[Any, tuple]:
                message, _, state = members(keys, broadcast, b, silos[b], cohort)
                return message, (*silos[:b], state, *silos[b + 1 :])

            return run

        message, silos = jax.lax.switch(jnp.asarray(own)[cohort[0]], [branch(b) for b in range(len(places))], silos)
        return message, silos, cohort

    # every key of the chunk at once: drawing them inside the loop costs more, to compile and to run
    round_keys = jax.vmap(lambda i: jax.random.fold_in(key, first + i))(jnp.arange(CHUNK))
    server_keys = jax.vmap(lambda key: jax.random.fold_in(key, SERVER))(round_keys)
    all_keys = jax.vmap(lambda key: silo_keys(key, identities(names)))(round_keys)

    def one_round(i: Any, server: Any, silos: tuple) -> tuple[Any, tuple, dict]:
        broadcast = algorithm.broadcast(server_keys[i], server)
        if cohorts is None:
            messages, silos, index = everyone(all_keys[i], broadcast, silos)
        else:
            messages, silos, index = some(all_keys[i], broadcast, silos, cohorts[i])
        aggregate = algorithm.aggregate(messages, Cohort(index, len(names)))
        server, info = algorithm.server_step(server_keys[i], server, aggregate)
        return server, silos, info

    one_round = jax.jit(one_round)  # traced once, for its shapes and for the loop
    at = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = jax.eval_shape(one_round, at, server, silos)[2]
    history = jax.tree.map(lambda leaf: zeros((CHUNK, *leaf.shape), leaf.dtype), shapes)

    def body(i: Any, carry: tuple) -> tuple:
        server, silos, history = carry
        server, silos, info = one_round(i.astype(jnp.int32), server, silos)
        return server, silos, jax.tree.map(lambda rows, row: rows.at[i].set(row), history, info)

    return jax.lax.fori_loop(0, count, body, (server, silos, history))


_ROUNDS = {
    effort: jax.jit(_run_rounds, static_argnums=(0, 1, 2), compiler_options=options)
    for effort, options in (("most", None), ("some", QUICK), ("least", UNOPTIMISED))
}
