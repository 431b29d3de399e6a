"""Keys of random numbers, from identity and not from position.

A round's key is the run's key folded with the round; a silo's is the round's, folded with 64 bits of its name. So every
engine, cohort and order of the silos draws the same numbers.

On a CPU, JAX computes Threefry in a loop over its rounds, with a pass over all counters in each. :func:`normal` and
:func:`silo_words` give the same numbers in one pass.
"""

import hashlib
import math
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from numpyro_fed.host import threefry


def digest(text: str) -> int:
    """32 bits that two machines agree on: tags the library's own streams, and groups of latents within a silo."""
    return zlib.crc32(text.encode())


def identity(name: str) -> np.ndarray:
    """64 bits of a silo's name, as two words: uint32 (2,).

    With 32, two of 100,000 names would have the same random numbers with probability .69.
    """
    return np.frombuffer(hashlib.blake2b(name.encode(), digest_size=8).digest(), "<u4").astype(np.uint32)


def identities(names: Sequence[str]) -> np.ndarray:
    """Of several silos, (J, 2); two that agree are refused, for they would draw the same numbers."""
    found = np.array([identity(name) for name in names], np.uint32).reshape(-1, 2)
    order = np.lexsort(found.T)
    same = np.flatnonzero(np.all(found[order[1:]] == found[order[:-1]], axis=1))
    if same.size:
        first, second = names[int(order[same[0]])], names[int(order[same[0] + 1])]
        raise ValueError(
            f"silos {first!r} and {second!r} would draw the same random numbers (64 bits of their names agree): rename "
            "one of them"
        )
    return found


def fold_in_name(key: Any, words: Any) -> Any:
    """A silo's key: ``key`` folded with both words of its identity."""
    return jax.random.fold_in(jax.random.fold_in(key, words[0]), words[1])


def silo_keys(key: Any, words: Any) -> Any:
    """The keys of several silos, from their identities (J, 2)."""
    return jax.vmap(lambda one: fold_in_name(key, one))(words)


def by_place(shape: tuple[int, ...], stream: int) -> Any:
    """Numbers in [0, 1) that look like chance and are known by their place: probes, not draws.

    A few operations, where a key's draws are a hundred to compile: the last steps of MurmurHash3 (Appleby 2011).
    The first axis says which row it is, so that padding changes no row's numbers.

    >>> bool(jnp.all(by_place((8, 2), 3)[:5] == by_place((5, 2), 3))), 0.4 < float(jnp.mean(by_place((999,), 1))) < 0.6
    (True, True)
    """
    place = jax.lax.iota(jnp.uint32, math.prod(shape)) + np.uint32((1 + stream) * 0x9E3779B9 & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        place = (place ^ (place >> np.uint32(shift))) * np.uint32(factor)
    dtype = jnp.zeros(()).dtype
    return ((place >> np.uint32(8)).astype(dtype) * np.asarray(2.0**-24, dtype)).reshape(shape)


# --- Threefry in one pass (Salmon et al. 2011) ------------------------------------------------------------------------


def _fold_in(key: Any, data: Any) -> tuple[Any, Any]:
    return threefry(key, np.uint32(0), jnp.asarray(data, jnp.uint32))


def _counted(key: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    count = jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    return threefry(key, jnp.zeros_like(count), count)


def _random_bits(key: Any, bit_width: int, shape: tuple[int, ...]) -> Any:
    x, y = _counted(key, shape)
    if bit_width == 64:
        return (x.astype(jnp.uint64) << np.uint64(32)) | y.astype(jnp.uint64)
    return (x ^ y).astype(f"uint{bit_width}")


ONE_PASS = define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jnp.stack([jnp.zeros((), jnp.uint32), seed.astype(jnp.uint32)]),
    split=lambda key, shape: jnp.stack(_counted(key, shape), axis=-1),
    random_bits=_random_bits,
    fold_in=lambda key, data: jnp.stack(_fold_in(key, data)),
    name="threefry2x32 in one pass",
    tag="fry1",
)


def _is_threefry(key: Any) -> bool:
    """Whether it is JAX's default kind of key, with the default way to count."""
    counts = bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]
    return counts and str(jax.random.key_impl(key)) == "threefry2x32"


def normal(key: Any, shape: tuple[int, ...]) -> Any:
    """Law: equals ``jax.random.normal(key, shape)``.

    >>> key = jax.random.key(0)
    >>> bool(jnp.all(normal(key, (3, 2)) == jax.random.normal(key, (3, 2))))
    True
    """
    size = math.prod(shape)
    if not _is_threefry(key) or size >= 2**32:
        return jax.random.normal(key, shape)
    key = jax.random.wrap_key_data(jax.random.key_data(key), impl=ONE_PASS)
    drawn = jax.random.normal(key, (size,))  # a vector: XLA on a CPU does not vectorise along a last axis of one
    # XLA on a CPU would draw the same numbers again in every place that uses them, and sees through barriers; quotients
    # it computes once. That the divisor is 1 it cannot know.
    return (drawn / jnp.minimum(1 + drawn**2, 1)).reshape(shape)


def silo_words(key: Any, words: Any) -> tuple[Any, ...]:
    """Law: equals :func:`silo_keys`, each word of the keys in an array of its own, (J,).

    Stacked, they would be computed one by one. :func:`keys_of` puts them together.
    """
    if not _is_threefry(key):
        data = jax.random.key_data(silo_keys(key, words))
        return tuple(jnp.moveaxis(data, -1, 0))
    return _fold_in(_fold_in(jax.random.key_data(key), words[:, 0]), words[:, 1])


def keys_of(words: tuple[Any, ...], like: Any) -> Any:
    """Keys from their words, of the kind of ``like``."""
    data = jnp.stack(words, axis=-1)
    typed = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like)) if typed else data


SERVER = digest("\0server")  # one word, where a silo's has two
START = digest("\0start")
