"""What the host does by itself: every eager operation of JAX is a program to compile, ten milliseconds or more.

>>> import jax
>>> put({"x": np.arange(3.0)})["x"].dtype == real_dtype()
True
>>> bool(folded(jax.random.key(0), 7) == jax.random.fold_in(jax.random.key(0), 7))
True
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

THREEFRY = "threefry2x32"
WORD = 0xFFFFFFFF
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def real_dtype() -> np.dtype:
    """The floating type of the user's program: float32, or float64 under x64."""
    return np.dtype(jax.dtypes.canonicalize_dtype(np.float64))


def concrete(tree: Any) -> bool:
    """Whether all leaves are values, none an argument of a program that is being traced."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def put(tree: Any) -> Any:
    """Host arrays on the device, in the types that JAX has now; a copy, so that nobody changes them afterwards."""
    return jax.tree.map(lambda leaf: jax.device_put(np.array(leaf)), tree)


def zeros_like(shapes: Any) -> Any:
    """Zeros on the device, of the shapes and types of the leaves, in whatever precision these are."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), shapes)


def key_of(seed: int) -> Any:
    """``jax.random.key(seed)``, of a seed of 32 bits."""
    if str(getattr(jax.config, "jax_default_prng_impl", "")) != THREEFRY:
        return jax.random.key(seed)
    return _key(0, seed)


def folded(key: Any, word: int) -> Any:
    """``jax.random.fold_in(key, word)``, the same bits."""
    typed = not isinstance(key, jax.core.Tracer) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not typed or str(jax.random.key_impl(key)) != THREEFRY or key.shape:
        return jax.random.fold_in(key, word)
    first, second = np.asarray(jax.random.key_data(key)).tolist()
    return _key(*_threefry(first, second, 0, int(word) & WORD))


def _key(first: int, second: int) -> Any:
    words: Any = np.array([first, second], np.uint32)
    return jax.random.wrap_key_data(words, impl=THREEFRY)


def _threefry(first: int, second: int, x: int, y: int) -> tuple[int, int]:
    """Threefry of two words in 20 rounds (Salmon et al. 2011), the generator behind JAX's keys."""
    keys = first, second, first ^ second ^ 0x1BD11BDA
    x, y = (x + keys[0]) & WORD, (y + keys[1]) & WORD
    for i in range(5):
        for turn in ROTATIONS[i % 2]:
            x = (x + y) & WORD
            y = ((y << turn | y >> (32 - turn)) & WORD) ^ x
        x, y = (x + keys[(i + 1) % 3]) & WORD, (y + keys[(i + 2) % 3] + i + 1) & WORD
    return x, y
