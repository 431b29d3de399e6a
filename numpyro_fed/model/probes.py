"""Points at which a model is looked at to learn how it is built, not what it says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SCALES = (0.5, 1.5, 4.0)  # distances from zero; of each a point and its mirror image

Point = tuple[Any, dict[str, Any], dict[str, Any]]  # z_G, z_L, theta


def probes(split: Any, mask: dict[str, Any]) -> list[Point]:
    """Fixed points at which classes differ, though they may all be equal where a method starts.

    Several, since a row may lie where its density is flat (a clipped predictor), and there does not tell whose it is.

    Args:
        split: a :class:`~numpyro_fed.model.split_model.SplitModel`.
        mask: of a silo's rows.
    """
    draws, dtype, found = np.random.default_rng(0), jnp.zeros(()).dtype, []
    for scale in SCALES:
        noise = lambda *shape, scale=scale: np.asarray(draws.normal(scale=scale, size=shape), dtype)
        z, local = noise(split.dim), {g.name: noise(g.num_rows(mask), g.size) for g in split.groups}
        off = jax.tree.map(lambda start, noise=noise: noise(*jnp.shape(start)), split.theta)
        for sign in (1, -1):
            at = lambda leaf, sign=sign: jnp.asarray(sign * leaf, dtype)
            theta = jax.tree.map(lambda start, by, at=at: start + at(by), split.theta, off)
            found.append((at(z), jax.tree.map(at, local), theta))
    return found
