"""The engine over several devices: each holds some of the silos, and works on those.

The programs are those of :class:`~numpyro_fed.engines.Vmap`. A bucket's arrays lie along the devices, and each device
runs the silos' steps on its own part of them (``jax.shard_map``), loops and all, without waiting for the others; only
messages cross between devices. Server and broadcasts are the same on every device.

Law: equals :class:`~numpyro_fed.engines.Vmap` up to float rounding, whatever the number of devices.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
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
from numpyro_fed.data.stack import Bucket, Stack
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

    def held(self, stack: Stack) -> Held:
        """Placed on the devices when a run first asks, and not again."""
        known = _placed.setdefault(stack, {})
        if self.across not in known:
            known[self.across] = self.across.held(stack)
        return known[self.across]

    def start(self, algorithm: FederatedAlgorithm, key: Any, stack: Stack) -> tuple[Any, tuple]:
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
        server, silos = self.across.everywhere(server), self._entered(stack, silos)
        server, silos, info = super().rounds(algorithm, key, stack, server, silos, first, cohorts, count, effort)
        return at_home(server), self._left(stack, silos), info

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
        shape = lambda leaf, rows, where: jax.ShapeDtypeStruct(
            (*rows, *leaf.shape[len(rows) :]), leaf.dtype, sharding=where
        )
        server = jax.tree.map(lambda leaf: shape(leaf, (), self.across.same), server)
        filled = [
            jax.tree.map(lambda leaf, n=self._filled(bucket): shape(leaf, (n,), self.across.apart), state)
            for bucket, state in zip(stack.buckets, silos, strict=True)
        ]
        super().compile_ahead(algorithm, key, stack, server, tuple(filled), cohorts, effort)

    def in_silos(self, function: Callable[..., Any], given: Any, stack: Stack, *states: tuple | None) -> tuple:
        return super().in_silos(function, given, stack, *(None if one is None else at_home(one) for one in states))

    def gathered(self, states: tuple) -> tuple:
        """Silos' states as a fit keeps them, and any engine takes them."""
        return at_home(states)

    def _filled(self, bucket: Bucket) -> int:
        """Silos of a bucket, and copies."""
        return -(-len(bucket.names) // len(self.devices)) * len(self.devices)

    def _entered(self, stack: Stack, silos: tuple) -> tuple:
        """States on the devices, with those of copies; what is there already stays."""
        place = self.across.placed
        return tuple(
            jax.tree.map(lambda leaf, n=self._filled(bucket): place(leaf, n), state)
            for bucket, state in zip(stack.buckets, silos, strict=True)
        )

    def _left(self, stack: Stack, silos: tuple) -> tuple:
        """States without those of copies. A bucket without copies stays where it is, if this process has all of it."""
        out = []
        for bucket, state in zip(stack.buckets, silos, strict=True):
            number = len(bucket.names)
            if number < self._filled(bucket) or not self.across.same.is_fully_addressable:
                state = at_home(state, number)
            out.append(state)
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
        return jax.lax.with_sharding_constraint(tree, self.same)

    def everywhere(self, tree: Any) -> Any:
        """The same on all devices."""
        return jax.tree.map(lambda leaf: _put(leaf, self.same), tree)

    def placed(self, leaf: Any, rows: int) -> Any:
        """A bucket's leaf along the devices, filled up to ``rows`` silos by copies of the last."""
        fill = lambda host: host[np.minimum(np.arange(rows), len(host) - 1)] if len(host) < rows else host
        return _put(leaf, self.apart, fill)

    def held(self, stack: Stack) -> Held:
        """Places and data; of the data only what the devices of this process hold is read."""
        places = places_of(stack.names, tuple(bucket.names for bucket in stack.buckets), len(self.devices))
        arrays = [
            self._stacked(stack, bucket, [stack.names[j] for j in filled])
            for bucket, filled in zip(stack.buckets, places.of_bucket, strict=True)
        ]
        return Held(places, tuple(arrays), self.everywhere(stack.shared))

    def _stacked(self, stack: Stack, bucket: Bucket, names: list[str]) -> tuple[tuple, dict[str, Any]]:
        found: dict[str, Any] = {}

        def own(name: str) -> Any:
            if name not in found:
                with at_silo(name):
                    data = padded_data(stack.silos, name, stack.spec, stack.axes, bucket.lengths)
                found[name] = data.args, data.mask
            return found[name]

        here = self.apart.addressable_devices_indices_map((len(names),)).values()
        example = own(names[next(iter(here))[0].indices(len(names))[0]])

        def along(position: int, leaf: np.ndarray) -> jax.Array:
            part = lambda index: np.stack([jax.tree.leaves(own(name))[position] for name in names[index[0]]])
            return jax.make_array_from_callback((len(names), *leaf.shape), self.apart, part)

        leaves, structure = jax.tree.flatten(example)
        return jax.tree.unflatten(structure, [along(i, leaf) for i, leaf in enumerate(leaves)])


_placed: "WeakKeyDictionary[Stack, dict[Across, Held]]" = WeakKeyDictionary()  # for as long as a stack lives


def at_home(tree: Any, rows: int | None = None) -> Any:
    """Arrays on JAX's default device that were on several, or the first ``rows`` of each."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    beyond = [leaf for leaf in arrays if not (leaf.is_fully_addressable or leaf.is_fully_replicated)]
    if beyond:
        tree = jax.jit(lambda tree: tree, out_shardings=NamedSharding(beyond[0].sharding.mesh, PartitionSpec()))(tree)

    def home(own: Any) -> Any:
        host = np.asarray(own)
        return jax.device_put(host if rows is None else host[:rows])

    with jax.enable_x64(True):
        return jax.tree.map(lambda leaf: _by_words(home, leaf), tree)


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
