"""Keys of random numbers."""

from typing import Any

import jax
import jax.numpy as jnp


def check_key(rng_key: Any) -> Any:
    """A typed key from what the user gave (typed or legacy), or an error that says what to type."""
    if isinstance(rng_key, jax.Array) and jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key) and rng_key.shape == ():
        return rng_key
    if hasattr(rng_key, "dtype") and rng_key.dtype == jnp.uint32 and rng_key.shape == (2,):
        return jax.random.wrap_key_data(jnp.asarray(rng_key))
    got = "nothing" if rng_key is None else f"a {type(rng_key).__name__}"
    raise TypeError(f"rng_key must be a JAX key, got {got}: pass jax.random.key(0)")
