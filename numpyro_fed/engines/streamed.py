"""The engine for very many silos: cohorts are read while the device works.

Law: with the same names, cohorts and data in memory, and silos that keep nothing between rounds, it equals
:class:`~numpyro_fed.engines.Vmap` up to float rounding.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import jax
import numpy as np

from numpyro_fed.algorithm import Cohort, FederatedAlgorithm
from numpyro_fed.checks import check_count
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines.base import sent_to
from numpyro_fed.keys import SERVER, START, silo_keys
from numpyro_fed.pieces import jit
from numpyro_fed.precision import engine_in_x64, for_rounds, strong

IN_FLIGHT = 2  # rounds the device has been given: one to work on, one to go on with


@dataclass(frozen=True)
class Streamed:
    """Each round's cohort is read from a :class:`~numpyro_fed.SiloStore`, padded and stacked on the host.

    The default for a store. Reading and the device's work overlap; the device holds ``prefetch`` + 3 cohorts at most. A
    silo's state is made anew each time it takes part. Cohorts are padded to a power of two of rows, so that few
    programs are compiled; all silos of a cohort are as long as its longest, so silos of very different sizes should be
    capped by the store's function.

    Args:
        prefetch: rounds that are read ahead by threads. 0: no threads; a cohort is read while the device works on the
            one before.
        readers: threads. More than one help where silos have to be waited for, and then a store's function must bear
            being called by several at once.

    Example:
        >>> engine = Streamed(prefetch=8, readers=4)  # for a slow disk
    """

    prefetch: int = 2
    readers: int = 1
    chunk: ClassVar[int] = 16  # rounds between two looks of the host, and at most lost to an interruption
    holds_states: ClassVar[bool] = False  # a silo begins afresh each time it takes part
    reads_store: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("prefetch", self.prefetch, least=0)
        check_count("readers", self.readers)

    @engine_in_x64
    def start(self, algorithm: FederatedAlgorithm, key: Any, stack: Stack) -> tuple[Any, tuple]:
        return _init(algorithm, jax.random.fold_in(jax.random.fold_in(key, START), SERVER)), ()

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
        if stack.known:
            raise TypeError("nf.engines.Streamed reads silos from an nf.SiloStore: use nf.engines.Vmap() for nf.Silos")
        num_silos, server, rows = len(stack.names), strong(server), []
        everyone = np.arange(num_silos, dtype=np.int32)
        wanted = [everyone if cohorts is None else np.asarray(cohorts[i], np.int32) for i in range(count)]
        with _gathered(stack, wanted, self.prefetch, self.readers) as arriving:
            for i, arrays in enumerate(arriving):
                server, info = _round(effort)(algorithm, num_silos, key, first + i, arrays, stack.shared, server)
                rows.append(info)
                if len(rows) >= IN_FLIGHT:  # else cohorts would queue up in the device's memory
                    jax.block_until_ready(rows[-IN_FLIGHT])
        rows = jax.device_get(rows)
        return server, silos, {name: np.stack([row[name] for row in rows]) for name in rows[0]} if rows else {}

    def in_silos(self, function: Callable[..., Any], given: Any, stack: Stack, *states: tuple | None) -> tuple:
        return ()


@contextmanager
def _gathered(stack: Stack, cohorts: list[np.ndarray], ahead: int, readers: int) -> Iterator[Iterator[tuple]]:
    """Each cohort's index, identities, args and mask on the device, in order; no thread is left behind."""

    def gather(index: np.ndarray) -> tuple:
        with jax.enable_x64(True):  # of this thread; the arrays have the types that the user's program gives them
            return jax.device_put((index, *stack.cohort(index)))

    if ahead == 0:
        yield map(gather, cohorts)
        return
    pool = ThreadPoolExecutor(readers, "numpyro_fed-reader")

    def in_order() -> Iterator[tuple]:
        coming: deque[Future] = deque()
        for index in cohorts:
            coming.append(pool.submit(gather, index))
            if len(coming) > ahead:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()

    try:
        yield in_order()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@partial(jit, static_argnums=0)
def _init(algorithm: FederatedAlgorithm, key: Any) -> Any:
    return algorithm.init(key)


def _one_round(
    algorithm: FederatedAlgorithm, num_silos: int, key: Any, at: Any, arrays: tuple, shared: tuple, server: Any
) -> tuple[Any, dict]:
    index, identities, args, mask = arrays
    round_key = jax.random.fold_in(key, at)
    server_key = jax.random.fold_in(round_key, SERVER)
    broadcast = algorithm.broadcast(server_key, server)

    def step(key: Any, start_key: Any, j: Any, args: Any, mask: Any) -> Any:
        received, data = sent_to(broadcast, j), SiloData(args, mask, shared)
        return algorithm.silo_step(key, received, algorithm.init_silo(start_key, received, data), data)[0]

    start_keys = silo_keys(jax.random.fold_in(key, START), identities)
    messages = jax.vmap(step)(silo_keys(round_key, identities), start_keys, index, args, mask)
    return algorithm.server_step(server_key, server, algorithm.aggregate(messages, Cohort(index, num_silos)))


@cache
def _round(effort: str) -> Any:
    effort = "least" if effort == "least" else "most"  # a program for all rounds of all cohorts
    return jit(_one_round, static_argnums=(0, 1), compiler_options=for_rounds(effort))
