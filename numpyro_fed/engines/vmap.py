"""The fast engine: rounds scanned, silos vmapped, one compiled program.

Law: equals :class:`~numpyro_fed.engines.Loopback` up to float rounding.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed import ahead
from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines.foretold import look
from numpyro_fed.engines.parts import Parts, parts_of
from numpyro_fed.engines.places import Places, places_of
from numpyro_fed.host import undisturbed
from numpyro_fed.keys import SERVER, START, keys_of, silo_keys, silo_words
from numpyro_fed.memo import remembered
from numpyro_fed.pieces import jit
from numpyro_fed.precision import LITTLE, engine_in_x64, for_rounds, strong, unoptimised, zeros

CHUNK = 512  # rounds between two looks of the host: progress, stopping, interruption


@dataclass(frozen=True)
class Together:
    """How the silos of a bucket lie: all on one device. (:class:`~numpyro_fed.engines.Sharded` spreads them.)"""

    def each(self, function: Callable[..., Any], stacked: tuple[bool, ...]) -> Callable[..., Any]:
        """A function of stacked silos, to be called with all of a bucket; ``stacked``: which arguments are so."""
        return function

    def whole(self, tree: Any) -> Any:
        """What every device is to have in full."""
        return tree


TOGETHER = Together()


class Held(NamedTuple):
    """All silos, as the compiled programs take them."""

    places: Places
    arrays: tuple  # over buckets: arguments and masks, stacked
    shared: Any


@dataclass(frozen=True)
class Vmap:
    """All silos of a bucket in one vmapped step; rounds run in a compiled loop. The default."""

    chunk: ClassVar[int] = CHUNK
    holds_states: ClassVar[bool] = True
    reads_store: ClassVar[bool] = False

    @property
    def across(self) -> Any:
        """How buckets lie on devices: :class:`Together`, or alike."""
        return TOGETHER

    def held(self, stack: Stack) -> Held:
        """What the programs are given of the silos."""
        places = places_of(stack.names, tuple(bucket.names for bucket in stack.buckets))
        return Held(places, stack.arrays, stack.shared)

    @engine_in_x64
    def start(self, algorithm: FederatedAlgorithm, key: Any, stack: Stack) -> tuple[Any, tuple]:
        run, arguments = self._starting(algorithm, key, stack)
        ahead.wait(ahead.program(algorithm, ("start", self.across), arguments))
        with undisturbed():
            return run(algorithm, self.across, *arguments)

    @engine_in_x64
    def start_ahead(self, algorithm: FederatedAlgorithm, key: Any, stack: Stack) -> None:
        """Begin to compile what gives the first states."""
        if ahead.worthwhile():
            run, arguments = self._starting(algorithm, key, stack)
            lower = lambda: run.lower(algorithm, self.across, *arguments)
            ahead.begin(ahead.program(algorithm, ("start", self.across), arguments), lower)

    def _starting(self, algorithm: FederatedAlgorithm, key: Any, stack: Stack) -> tuple[Any, tuple]:
        """The program of first states, and its arguments."""
        held = self.held(stack)
        return _start(stack.elements <= LITTLE), (held.places, key, held.arrays, held.shared)

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
        server, silos = strong((server, silos))
        arguments = _arguments(self.held(stack), key, server, silos, first, cohorts, count)
        program = ahead.program(algorithm, (effort, self.across), arguments)
        ahead.wait(program)
        with undisturbed():
            server, silos, info = self._cut(program, algorithm, arguments, effort)(*arguments)
        return server, silos, {name: np.asarray(rows)[:count] for name, rows in info.items()}

    @engine_in_x64
    def compile_ahead(
        self,
        algorithm: FederatedAlgorithm,
        key: Any,
        stack: Stack,
        server: Any,
        silos: tuple,
        cohorts: Any,
        effort: str,
    ) -> None:
        """Begin to compile rounds from such states (shapes are enough), while something else goes on."""
        if ahead.worthwhile():
            arguments = _arguments(self.held(stack), key, server, silos, 0, cohorts, 1)
            program = ahead.program(algorithm, (effort, self.across), arguments)
            ahead.begin(program, lambda: self._lowered(program, algorithm, arguments, effort))

    def _lowered(self, program: Hashable, algorithm: FederatedAlgorithm, arguments: tuple, effort: str) -> Any:
        """The rounds, traced; what is left is to compile them."""
        run = self._cut(program, algorithm, arguments, effort)
        return run if isinstance(run, Parts) else _rounds(effort, self.across).trace(algorithm, *arguments).lower()

    def _cut(self, program: Hashable, algorithm: FederatedAlgorithm, arguments: tuple, effort: str) -> Any:
        """Rounds as a function of the arguments: in parts, where that is asked for, or in one piece."""
        whole = _rounds(effort, self.across)
        if effort != "some" or self.across != TOGETHER or jax.default_backend() != "cpu":
            return partial(whole, algorithm)

        def cut() -> Any:
            traced, one = whole.trace(algorithm, *arguments), partial(whole, algorithm)
            return parts_of(traced, one, for_rounds("least"), for_rounds("some")) or one

        return remembered(cut, "parts", program)

    def in_silos(self, function: Callable[..., Any], given: Any, stack: Stack, *states: tuple | None) -> tuple:
        return in_every_silo(function, given, stack, *states)


def _arguments(held: Held, key: Any, server: Any, silos: tuple, first: int, cohorts: Any, count: int) -> tuple:
    """Of the compiled rounds."""
    if cohorts is not None and len(cohorts) < CHUNK:
        cohorts = np.concatenate([cohorts, np.repeat(cohorts[-1:], CHUNK - len(cohorts), axis=0)])
    return held.places, key, held.arrays, held.shared, server, silos, first, cohorts, count


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


def _of_bucket(broadcast: Broadcast, places: Places, b: int) -> Any:
    """The slices of ``each`` that a bucket's silos receive, stacked."""
    if len(places.of_bucket) == 1 and places.order is None:
        return broadcast.each
    return jax.tree.map(lambda leaf: leaf[places.of_bucket[b]], broadcast.each)


def _fresh(
    algorithm: FederatedAlgorithm, across: Any, places: Places, key: Any, arrays: tuple, shared: Any
) -> tuple[Any, tuple]:
    key = jax.random.fold_in(key, START)
    server = algorithm.init(jax.random.fold_in(key, SERVER))
    broadcast = algorithm.broadcast(jax.random.fold_in(key, SERVER), server)

    def init(key: Any, common: Any, each: Any, args: Any, mask: Any, shared: Any) -> Any:
        return algorithm.init_silo(key, Broadcast(common, each), SiloData(args, mask, shared))

    batched = across.each(jax.vmap(init, in_axes=(0, None, 0, 0, 0, None)), (True, False, True, True, True, False))
    states = []
    for b, (args, mask) in enumerate(arrays):
        keys = silo_keys(key, places.words[places.of_bucket[b]])
        states.append(batched(keys, broadcast.common, _of_bucket(broadcast, places, b), args, mask, shared))
    return server, tuple(states)


def _run_rounds(
    across: Any,
    few: bool,
    algorithm: FederatedAlgorithm,
    places: Places,
    key: Any,
    arrays: tuple,
    shared: Any,
    server: Any,
    silos: tuple,
    first: Any,
    cohorts: Any,
    count: Any,
) -> tuple[Any, tuple, dict]:
    num_silos, num_buckets = len(places.words), len(places.of_bucket)

    def step(key: Any, common: Any, each: Any, state: Any, args: Any, mask: Any, shared: Any) -> tuple[Any, Any]:
        return algorithm.silo_step(key, Broadcast(common, each), state, SiloData(args, mask, shared))

    batched = jax.vmap(step, in_axes=(0, None, 0, 0, 0, 0, None))
    of_all = across.each(batched, (True, False, True, True, True, True, False))

    def everyone(keys: Any, broadcast: Broadcast, silos: tuple) -> tuple[Any, tuple, Any]:
        messages, states = [], []
        for b, (state, (args, mask)) in enumerate(zip(silos, arrays, strict=True)):
            own = keys if num_buckets == 1 and places.order is None else keys[places.of_bucket[b]]
            each = _of_bucket(broadcast, places, b)
            message, state = of_all(own, broadcast.common, each, state, args, mask, shared)
            messages.append(message)
            states.append(state)
        if num_buckets == 1 and places.order is None:
            return messages[0], tuple(states), np.arange(num_silos)
        messages = across.whole(messages)
        together = messages[0] if num_buckets == 1 else jax.tree.map(lambda *m: jnp.concatenate(m), *messages)
        if places.order is not None:
            together = jax.tree.map(lambda leaf: leaf[places.order], together)
        return together, tuple(states), np.arange(num_silos)

    def of_some(
        keys: Any, broadcast: Any, inside: Any, number: Any, place: Any, state: Any, args: Any, mask: Any, shared: Any
    ) -> tuple[Any, Any, Any]:
        """On one device, which holds the silos ``number`` of a bucket; the cohort's members are at ``inside`` of it."""
        size, length = inside.shape[0], number.shape[0]
        inside = jnp.where((inside >= number[0]) & (inside <= number[-1]), inside - number[0], length)
        order = jnp.argsort(inside >= length, stable=True)[: min(size, length)]
        at = inside[order]
        gather = lambda leaf: leaf[jnp.minimum(at, length - 1)]
        each = jax.tree.map(lambda leaf: leaf[gather(place)], broadcast.each)
        state_in, args_in, mask_in = jax.tree.map(gather, (state, args, mask))
        message, new = batched(keys[order], broadcast.common, each, state_in, args_in, mask_in, shared)
        state = jax.tree.map(lambda old, rows: old.at[at].set(rows, mode="drop"), state, new)
        return message, jnp.where(at < length, order, size), state

    on_devices = across.each(of_some, (False, False, False, True, True, True, True, True, False))

    def members(keys: Any, broadcast: Broadcast, b: int, state: Any, cohort: Any) -> tuple[Any, Any, Any]:
        """Of one bucket: messages of those who are in the cohort, their places in it, and the bucket's states."""
        place, inside = places.of_bucket[b], places.within[b][cohort]
        number = jnp.arange(place.shape[0], dtype=inside.dtype)
        message, target, state = on_devices(keys, broadcast, inside, number, place, state, *arrays[b], shared)
        return *across.whole((message, target)), state

    def some(keys: Any, broadcast: Broadcast, silos: tuple, cohort: Any) -> tuple[Any, tuple, Any]:
        """Only the cohort's silos are computed: each bucket has a slot for every member it may have this round."""
        size = cohort.shape[0]
        if size == 1 and num_buckets > 1:
            return one_of(keys, broadcast, silos, cohort)
        together, states = None, []
        for b, state in enumerate(silos):
            message, target, state = members(keys, broadcast, b, state, cohort)
            states.append(state)
            if together is None:
                together = jax.tree.map(lambda leaf: zeros((size, *leaf.shape[1:]), leaf.dtype), message)
            together = jax.tree.map(lambda all_, rows, t=target: all_.at[t].set(rows, mode="drop"), together, message)
        return together, tuple(states), cohort

    def one_of(keys: Any, broadcast: Broadcast, silos: tuple, cohort: Any) -> tuple[Any, tuple, Any]:
        """A single silo: the other buckets have nothing to do."""

        def branch(b: int) -> Callable[[tuple], tuple[Any, tuple]]:
            def run(silos: tuple) -> tuple[Any, tuple]:
                message, target, state = members(keys, broadcast, b, silos[b], cohort)
                message = jax.tree.map(lambda leaf: leaf[jnp.argmin(target)][None], message)
                return message, (*silos[:b], state, *silos[b + 1 :])

            return run

        message, silos = jax.lax.switch(places.bucket[cohort[0]], [branch(b) for b in range(num_buckets)], silos)
        return message, silos, cohort

    index = np.arange(num_silos) if cohorts is None else cohorts[0]
    looked = look(algorithm, key, num_silos, arrays, shared, server, silos, index)
    # the chunk's keys at once: drawing them inside the loop costs more, to compile and to run
    if looked.silos_draw or looked.server_draws:
        round_keys = jax.vmap(lambda i: jax.random.fold_in(key, first + i))(jnp.arange(CHUNK + 1))
    if looked.server_draws:
        server_keys = jax.vmap(lambda key: jax.random.fold_in(key, SERVER))(round_keys)
    asked = num_silos if cohorts is None else cohorts.shape[1]

    at = lambda rows, i: jax.lax.dynamic_index_in_dim(rows, i, keepdims=False)  # without a look whether i is inside

    def who(i: Any) -> Any:
        """The names of those that take part in a round, as words."""
        return places.words if cohorts is None else places.words[at(cohorts, i)]

    def words_at(i: Any) -> tuple:
        """Of their keys; in few rounds these are made as JAX does it, with fewer operations."""
        return silo_words(at(round_keys, i), who(i)) if looked.silos_draw and not few else ()

    def one_round(i: Any, server: Any, silos: tuple, words: tuple) -> tuple[Any, tuple, dict]:
        server_key = at(server_keys, i) if looked.server_draws else key
        keys = jnp.broadcast_to(key, (asked,))
        if looked.silos_draw:
            keys = silo_keys(at(round_keys, i), who(i)) if few else keys_of(words, key)
        broadcast = algorithm.broadcast(server_key, server)
        if cohorts is None:
            messages, silos, index = everyone(keys, broadcast, silos)
        else:
            messages, silos, index = some(keys, broadcast, silos, at(cohorts, i))
        aggregate = across.whole(algorithm.aggregate(messages, Cohort(index, num_silos)))
        server, info = algorithm.server_step(server_key, server, aggregate)
        return server, silos, info

    history = jax.tree.map(lambda leaf: zeros((CHUNK, *leaf.shape), leaf.dtype), looked.info)

    def body(i: Any, carry: tuple) -> tuple:
        server, silos, history, words = carry
        server, silos, info = one_round(i, server, silos, words)
        history = jax.tree.map(lambda rows, row: jax.lax.dynamic_update_index_in_dim(rows, row, i, 0), history, info)
        # the next round's: what the loop carries is computed once, and not again for every row that is drawn with it
        return server, silos, history, words_at(i + 1)

    return jax.lax.fori_loop(0, count, body, (server, silos, history, words_at(0)))[:3]


@cache
def _start(little: bool = True) -> Any:
    return jit(_fresh, static_argnums=(0, 1), compiler_options=unoptimised() if little else None)


def _rounds(effort: str, across: Any = TOGETHER) -> Any:
    return _compiled(effort, across)


@cache
def _compiled(effort: str, across: Any) -> Any:
    run = partial(_run_rounds, across, effort != "most")
    return jit(run, static_argnums=0, compiler_options=for_rounds(effort))
