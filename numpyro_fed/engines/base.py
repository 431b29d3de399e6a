"""What engines share: the silos' stacked data, keys from names, and the size of what crosses."""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Broadcast, FederatedAlgorithm
from numpyro_fed.engines import wire
from numpyro_fed.keys import identities
from numpyro_fed.padding import Bucket, CallSpec, SiloData, gathered
from numpyro_fed.partition import Axis
from numpyro_fed.store import SiloStore


class Source(NamedTuple):
    """Where the data of a store's silos come from, and how the model wants them."""

    store: SiloStore
    spec: CallSpec
    axes: tuple[Axis, ...]

    def cohort(self, index: Any) -> tuple[np.ndarray, tuple, dict]:
        """Identities, args and mask of a cohort, stacked, on the host."""
        names = [self.store.name(j) for j in np.asarray(index).tolist()]
        members = [(name, self.store.read(j)) for name, j in zip(names, np.asarray(index).tolist(), strict=True)]
        return (identities(names), *gathered(members, self.spec, self.axes))


class Stack(NamedTuple):
    """All silos' data, in buckets, and what they share.

    Of a store (``source`` is given) ``names`` are all silos', and the buckets hold an example of a few of them.
    """

    names: tuple[str, ...]
    buckets: tuple[Bucket, ...]
    shared: tuple[Any, ...]
    source: Source | None = None

    @property
    def example(self) -> "Stack":
        """The silos whose data are in the buckets: everyone, or a few of a store."""
        if self.source is None:
            return self
        return Stack(tuple(name for bucket in self.buckets for name in bucket.names), self.buckets, self.shared)

    def place(self, name: str) -> tuple[int, int]:
        """Bucket and position of a silo."""
        for b, bucket in enumerate(self.buckets):
            if name in bucket.names:
                return b, bucket.names.index(name)
        raise KeyError(name)

    def data(self, name: str) -> SiloData:
        """One silo's data, padded as in its bucket."""
        if self.source is not None:
            _, args, mask = self.source.cohort([self.names.index(name)])
            args, mask = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), (args, mask))
            return SiloData(args, mask, self.shared)
        b, position = self.place(name)
        args, mask = jax.tree.map(lambda leaf: leaf[position], (self.buckets[b].args, self.buckets[b].mask))
        return SiloData(args, mask, self.shared)


class Traffic(NamedTuple):
    """Bytes that one silo sends and receives in one round."""

    up: int
    down: int


class Engine(Protocol):
    """Runs a FederatedAlgorithm. Silo states are a tuple over buckets, stacked; they leave the engine only in a Fit."""

    def start(self, algorithm: FederatedAlgorithm, key: Any, stack: Stack) -> tuple[Any, tuple]: ...

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
        effort: str = "most",  # of the compiler: "most" for thousands of rounds, "some" for tens, "least" for a few
    ) -> tuple[Any, tuple, dict[str, np.ndarray]]: ...


def sent_to(broadcast: Broadcast, j: Any) -> Broadcast:
    """What silo j receives: the common part and its own slice."""
    return Broadcast(broadcast.common, jax.tree.map(lambda leaf: leaf[j], broadcast.each))


def traffic(algorithm: FederatedAlgorithm, server: Any, silo: Any, data: SiloData) -> Traffic:
    """The exact length of one silo's encoded message and broadcast, from shapes alone."""
    key = jax.random.key(0)
    broadcast = jax.eval_shape(lambda s: sent_to(algorithm.broadcast(key, s), 0), server)
    message, _ = jax.eval_shape(algorithm.silo_step, key, broadcast, silo, data)
    return Traffic(wire.num_bytes(message), wire.num_bytes(broadcast))


def stacked(trees: list[Any]) -> Any:
    with jax.enable_x64(True):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def strong(tree: Any) -> Any:
    """Arrays whose type does not give way to others': a weakly typed start would compile the same program twice."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype) if getattr(leaf, "weak_type", False) else leaf, tree)


@lru_cache(maxsize=64)
def apart(algorithm: FederatedAlgorithm, x64: bool) -> FederatedAlgorithm:
    """The algorithm, traced in the user's precision wherever an engine's own code is traced in float64.

    Natural parameters are float64 in any program (:mod:`numpyro_fed.families`), and JAX vectorises what it has traced
    under the precision of the moment: so an engine works in float64, and the model must not notice.
    """

    def under(function: Callable) -> Callable:
        def run(*args: Any) -> Any:
            with jax.enable_x64(x64):  # Python's own numbers (the start of a param) become arrays in it, too
                return jax.tree.map(lambda leaf: jnp.asarray(leaf) if np.isscalar(leaf) else leaf, function(*args))

        return run

    once = lambda function: jax.jit(under(function), inline=True)
    return FederatedAlgorithm(
        under(algorithm.init),
        once(algorithm.init_silo),
        once(algorithm.broadcast),
        once(algorithm.silo_step),
        under(algorithm.aggregate),
        once(algorithm.server_step),
    )


def in_float64(run: Callable) -> Callable:
    """An engine's method, traced in float64, its algorithm kept in the user's precision."""

    @wraps(run)
    def wrapped(self: Any, algorithm: FederatedAlgorithm, *args: Any, **options: Any) -> Any:
        algorithm = apart(algorithm, jax.config.read("jax_enable_x64"))
        with jax.enable_x64(True):
            return run(self, algorithm, *args, **options)

    return wrapped


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Natural parameters are float64 in any program."""
    with jax.enable_x64(True):
        return jnp.zeros(shape, dtype)
