"""What the host does by itself: every eager operation of JAX is a program to compile, ten milliseconds or more.

>>> import jax
>>> put({"x": np.arange(3.0)})["x"].dtype == real_dtype()
True
>>> bool(folded(jax.random.key(0), 7) == jax.random.fold_in(jax.random.key(0), 7))
True
"""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

THREEFRY = "threefry2x32"
WORD = 0xFFFFFFFF
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = np.uint32(0x1BD11BDA)


_lock = threading.Lock()
_undisturbed = 0  # traces that are going on


@contextmanager
def undisturbed() -> Iterator[None]:
    """Without Python's search for cycles: a trace makes very many objects, none of them garbage, and the search goes
    over all of them again and again, a fifth of a trace's time. What there is is found afterwards.

    >>> with undisturbed():
    ...     gc.isenabled()
    False
    """
    global _undisturbed
    ours = False
    try:
        with _lock:
            ours = bool(_undisturbed) or gc.isenabled()  # who has turned it off for good finds it so
            _undisturbed += ours
            gc.disable()
        yield
    finally:
        if ours:
            with _lock:
                _undisturbed -= 1
                if not _undisturbed:
                    gc.enable()


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
    words = np.asarray(jax.random.key_data(key))[:, None]  # arrays, which wrap around
    found = threefry(words, np.zeros(1, np.uint32), np.array([int(word) & WORD], np.uint32))
    return _key(*np.concatenate(found))


def _key(first: Any, second: Any) -> Any:
    words: Any = np.array([first, second], np.uint32)
    return jax.random.wrap_key_data(words, impl=THREEFRY)


def threefry(key: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Threefry-2x32 in 20 rounds (Salmon et al. 2011), the generator behind JAX's keys; all uint32 arrays.

    Args:
        key: its two words.
        x, y: the two words of each counter.
    """
    words = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    x, y = x + words[0], y + words[1]
    for block in range(5):
        for by in ROTATIONS[block % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(by)) | (y >> np.uint32(32 - by)))
        x = x + words[(block + 1) % 3]
        y = y + words[(block + 2) % 3] + np.uint32(block + 1)
    return x, y


def shapes_of(function: Callable[..., Any], *args: Any) -> Any:
    """``jax.eval_shape``, of which nothing is left behind.

    JAX keeps what it has traced for as long as the function lives, anew for each call if the function is not jitted:
    with an algorithm that is kept for many runs, a little more in every run.

    >>> shapes_of(lambda x: x + 1, np.zeros(2, "f")).shape
    (2,)
    """
    return jax.eval_shape(function if hasattr(function, "eval_shape") else lambda *given: function(*given), *args)
