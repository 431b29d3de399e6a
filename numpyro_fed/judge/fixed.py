"""The model's params at values that a user gives."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.distributions import biject_to

from numpyro_fed.model.split_model import SplitModel

Array = jax.Array


def fixed_theta(split: SplitModel, theta: Mapping[str, Any] | None) -> dict[str, Array]:
    """The params, unconstrained: those in ``theta`` (constrained) at their values, the others as the model has them."""
    given = dict(theta or {})
    unknown = sorted(set(given) - set(split.theta) - set(split.constants))
    if unknown:
        raise ValueError(
            f"theta= names {', '.join(map(repr, unknown))}; the model's params are {', '.join(split.theta) or 'none'}"
        )
    fixed = dict(split.theta)
    for name in split.theta:
        if name in given:
            like = lambda new, old: jnp.broadcast_to(jnp.asarray(new, old.dtype), old.shape)
            value = jax.tree.map(jnp.asarray, given[name])  # of a network, a tree
            fixed[name] = jax.tree.map(like, biject_to(split.constraints[name]).inv(value), split.theta[name])
    return fixed
