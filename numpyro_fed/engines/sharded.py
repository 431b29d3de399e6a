"""The engine over several devices: each holds some of the silos, and works on those.

The programs are those of :class:`~numpyro_fed.engines.Vmap`. A bucket's arrays lie along the devices, and each device
runs the silos' steps on its own part of them (``jax.shard_map``), loops and all, without waiting for the others; only
messages cross between devices. Server and broadcasts are the same on every device.

Law: equals :class:`~numpyro_fed.engines.Vmap` up to float rounding, whatever the number of devices.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from numpyro_fed.algorithm import FederatedAlgorithm
from numpyro_fed.checks import check_count
from numpyro_fed.data.padding import padded_data
from numpyro_fed.data.silos import at_silo
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines.places import places_of
from numpyro_fed.engines.vmap import Held, Vmap

AXIS = "silos"


@dataclass(frozen=True)
class Sharded(Vmap):
    """Silos spread over devices: with D of them, each works on its J / D.

    For many silos and several GPUs, or processor cores; one program of one owner. A bucket whose number of silos is no
    multiple of D is filled up with copies of its last silo, of which nobody hears: 65 silos on two devices take the
    time of 33. Rows stay on the device that their silo is on. With a schedule, each device looks for the cohort's
    members among its own silos, and has room for all of them: that is quicker than one device only where cohorts are
    larger than J / D.

    After ``jax.distributed.initialize(...)`` devices may belong to several processes, which all run the same script on
    the same silos; each reads the data of its own devices' silos alone, and each has the whole fit. That is for a
    cluster of one owner: silos of different owners have :mod:`numpyro_fed.remote`.

    Args:
        devices: how many, or which (of ``jax.devices()``); by default all. On a CPU there is one, unless
            ``XLA_FLAGS=--xla_force_host_platform_device_count=2`` is set before JAX starts.

    Example:
        >>> engine = Sharded(devices=1)  # as Vmap
        >>> len(engine.devices)
        1
        >>> Sharded(devices=1000)
        Traceback (most recent call last):
        ...
        ValueError: devices=1000, and JAX has ... cpu...
    """

    devices: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", _chosen(self.devices))

    @property
    def across(self) -> "Across":
        return Across(self.devices)

    @property
    def processes(self) -> int:
        """That share the devices."""
        return len({device.process_index for device in self.devices})

    def held(self, stack: Stack) -> Held:
        """Placed on the devices when a run first asks, and not again."""
        known = _placed.setdefault(stack, {})
        if self.across not in known:
            known[self.across] = self.across.held(stack)
        return known[self.across]

    def start(self, algorithm: FederatedAlgorithm, key: Any, stack: Stack) -> tuple[Any, tuple]:
        with _in_turn:
            server, silos = super().start(algorithm, key, stack)
            number = [len(bucket.names) for bucket in stack.buckets]
            return at_home(server), tuple(at_home(state, n) for state, n in zip(silos, number, strict=True))

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
        with _in_turn:
            server, silos = self.across.everywhere(server), self.across.along(silos)
            server, silos, info = super().rounds(algorithm, key, stack, server, silos, first, cohorts, count, effort)
            return at_home(server), self._left(stack, jax.block_until_ready(silos)), info

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
        """Begin to compile rounds from states of such shapes."""
        across, multiple = self.across, len(self.devices)

        def same(leaf: Any) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=across.same)

        def apart(leaf: Any) -> Any:
            shape = (filled(leaf.shape[0], multiple), *leaf.shape[1:])
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=across.apart)

        server, silos = jax.tree.map(same, server), jax.tree.map(apart, silos)
        super().compile_ahead(algorithm, key, stack, server, silos, cohorts, effort)

    def in_silos(self, function: Callable[..., Any], given: Any, stack: Stack, *states: tuple | None) -> tuple:
        return super().in_silos(function, given, stack, *(None if one is None else at_home(one) for one in states))

    def gathered(self, states: tuple) -> tuple:
        """Silos' states as a fit keeps them, and any engine takes them."""
        return at_home(states)

    def _left(self, stack: Stack, silos: tuple) -> tuple:
        """States without those of copies. A bucket without copies stays where it is, if this process has all of it."""
        out = []
        for bucket, state in zip(stack.buckets, silos, strict=True):
            number = len(bucket.names)
            stays = number == filled(number, len(self.devices)) and self.across.same.is_fully_addressable
            out.append(state if stays else at_home(state, number))
        return tuple(out)


@dataclass(frozen=True)
class Across:
    """How the silos of a bucket lie: along devices, as many on each."""

    devices: tuple[jax.Device, ...]

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), (AXIS,))

    @cached_property
    def apart(self) -> NamedSharding:
        """Of an array whose first axis is that of a bucket's silos."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    @cached_property
    def same(self) -> NamedSharding:
        """Of an array that every device has."""
        return NamedSharding(self.mesh, PartitionSpec())

    def each(self, function: Callable[..., Any], stacked: tuple[bool, ...]) -> Callable[..., Any]:
        """A function of stacked silos, called on each device with its own."""
        specs = tuple(PartitionSpec(AXIS) if one else PartitionSpec() for one in stacked)
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=PartitionSpec(AXIS), check_vma=False)

    def whole(self, tree: Any) -> Any:
        """Within a program: what every device is to have in full."""
        constrain = lambda leaf: (
            jax.lax.with_sharding_constraint(leaf, self.same) if isinstance(leaf, jax.Array) else leaf
        )
        return jax.tree.map(constrain, tree)

    def everywhere(self, tree: Any) -> Any:
        """The same on all devices."""
        return jax.tree.map(lambda leaf: _put(leaf, self.same), tree)

    def along(self, states: tuple) -> tuple:
        """Buckets' states along the devices, those of copies too; what is there already stays."""
        fill = lambda host: np.pad(host, [(0, -len(host) % len(self.devices))] + [(0, 0)] * (host.ndim - 1), "edge")
        return jax.tree.map(lambda leaf: _put(leaf, self.apart, fill), states)

    def held(self, stack: Stack) -> Held:
        """Places and data; of the data only what the devices of this process hold is read."""
        places = places_of(stack.names, tuple(bucket.names for bucket in stack.buckets), len(self.devices))
        arrays = [self._stacked(stack, b, [stack.names[j] for j in place]) for b, place in enumerate(places.of_bucket)]
        return Held(places, tuple(arrays), self.everywhere(stack.shared))

    def _stacked(self, stack: Stack, b: int, names: list[str]) -> tuple[tuple, dict[str, Any]]:
        found: dict[str, Any] = {}

        def own(name: str) -> Any:
            if name not in found:
                with at_silo(name):
                    data = padded_data(stack.silos, name, stack.spec, stack.axes, stack.buckets[b].lengths)
                found[name] = data.args, data.mask
            return found[name]

        def leaf(position: int, like: Any) -> jax.Array:
            part = lambda index: np.stack([jax.tree.leaves(own(name))[position] for name in names[index[0]]])
            return jax.make_array_from_callback((len(names), *like.shape), self.apart, part, dtype=like.dtype)

        shapes = stack.shapes(b)
        leaves, structure = jax.tree.flatten((shapes.args, shapes.mask))
        return jax.tree.unflatten(structure, [leaf(i, like) for i, like in enumerate(leaves)])


def filled(number: int, multiple: int) -> int:
    """Silos of a bucket, and copies.

    >>> filled(65, 2), filled(64, 2)
    (66, 64)
    """
    return number + -number % multiple


# Devices that wait for each other must all have the same program next: runs in several threads take turns.
_in_turn = Lock()
_placed: "WeakKeyDictionary[Stack, dict[Across, Held]]" = WeakKeyDictionary()  # for as long as a stack lives


def at_home(tree: Any, rows: int | None = None) -> Any:
    """Arrays on JAX's default device that were on several, or the first ``rows`` of each."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    beyond = [leaf for leaf in arrays if not (leaf.is_fully_addressable or leaf.is_fully_replicated)]
    if beyond:  # on other processes' devices
        where: Any = beyond[0].sharding
        tree = _on_all(where.mesh)(tree)

    def home(own: Any) -> Any:
        host = np.asarray(own)
        return jax.device_put(host if rows is None else host[:rows])

    with jax.enable_x64(True):
        return jax.tree.map(lambda leaf: _by_words(home, leaf), tree)


@lru_cache(maxsize=8)
def _on_all(mesh: Mesh) -> Callable[[Any], Any]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _put(leaf: Any, where: NamedSharding, fill: Callable[[np.ndarray], np.ndarray] = lambda host: host) -> Any:
    """An array that this process has, on devices of which some may be others'; what is there already stays."""
    if getattr(leaf, "sharding", None) == where and not leaf.weak_type:
        return leaf

    def put(own: Any) -> Any:
        host = fill(np.asarray(own))
        if where.is_fully_addressable:
            return jax.device_put(host, where)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    with jax.enable_x64(True):
        return _by_words(put, leaf)


def _by_words(function: Callable[[Any], Any], leaf: Any) -> Any:
    """The function of an array; of keys, of their words."""
    if not (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)):
        return function(leaf)
    return jax.random.wrap_key_data(function(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))


def _chosen(devices: Any) -> tuple[jax.Device, ...]:
    """The devices that are meant, or an error that says which there are."""
    there = jax.devices()
    if devices is None:
        return tuple(there)
    if isinstance(devices, int | np.integer):
        number = check_count("devices", devices)
        if number > len(there):
            raise ValueError(f"devices={number}, and JAX has {len(there)} {there[0].platform}{_more(number, there)}")
        chosen = tuple(there[:number])
    elif isinstance(devices, Iterable) and not isinstance(devices, str):
        chosen = tuple(devices)
    else:
        raise TypeError(f"devices must be a number, or a list of jax.devices(), got {devices!r}")
    wrong = [one for one in chosen if not isinstance(one, jax.Device)]
    if wrong or not chosen:
        raise TypeError(
            f"devices must be a number, or a list of jax.devices(), got {wrong[0] if wrong else chosen!r} in it"
        )
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"devices has {len(chosen)} entries, and names {len(set(chosen))} devices: each is used once")
    missing = set(range(jax.process_count())) - {one.process_index for one in chosen}
    if missing:
        raise ValueError(
            f"devices has none of process {min(missing)}, and all {jax.process_count()} processes run the program: "
            "leave devices= out, or start fewer processes"
        )
    return chosen


def _more(number: int, there: list[jax.Device]) -> str:
    """What to do about too few devices."""
    if there[0].platform != "cpu":
        return ": ask for fewer, or leave devices= out for all"
    return (
        f" device{'s' * (len(there) > 1)}: a CPU is divided before JAX starts, XLA_FLAGS="
        f"--xla_force_host_platform_device_count={number} in the environment; leave devices= out for all there are"
    )
