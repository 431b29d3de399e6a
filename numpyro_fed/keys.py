"""Keys of random numbers, from identity and not from position.

A round's key is the run's key folded with the round; a silo's is the round's, folded with 64 bits of its name. So every
engine, cohort and order of the silos draws the same numbers.
"""

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


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


SERVER = digest("\0server")  # one word, where a silo's has two
START = digest("\0start")
