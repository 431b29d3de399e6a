r"""When rounds whose answers are noisy have come to rest.

With Monte Carlo noise in every answer no round leaves the posterior where it was. What can come to rest is the running
average. In round t a whole step would move means and log sds by :math:`u_t` (in sds); the server takes the share
:math:`w_t` of it. Were there nothing left to learn, the :math:`u_t` would be noise alone, and what they leave in q,

.. math:: D_t = (1 - w_t) D_{t-1} + w_t u_t, \qquad E_t = (1 - w_t)^2 E_{t-1} + w_t^2 u_t^2,

would be D with variance E, coordinate by coordinate. So :math:`\sqrt{E}` is q's own Monte Carlo error, and rounds are
still on their way where D is larger than chance makes the largest of so many coordinates.

Where a round hears K of J silos, D is what a sweep over all of them would move: :math:`u_t` counts J / K times, with a
K / J of its weight.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

Array = jax.Array
FARTHEST = 1e6  # sds that a move counts, at most


class Rest(NamedTuple):
    """What the last rounds moved on average; coordinates are means and log sds, in sds."""

    drift: Float[Array, " c"]  # D
    noise: Float[Array, " c"]  # E
    rounds: Int[Array, ""]  # so far; none before every silo has been heard


def unknown(num: int) -> Rest:
    return Rest(jnp.zeros(num), jnp.zeros(num), jnp.zeros((), int))


def after(
    rest: Rest,
    move: Float[Array, " c"],
    step: Float[Array, ""] | float,
    share: float = 1.0,
    settled: Bool[Array, ""] | bool = True,
) -> Rest:
    """One more round, that moved q by ``move``, ``step`` of a whole one, with a ``share`` of the silos heard.

    Args:
        settled: every silo had been heard before; else nothing is counted.
    """
    whole = jnp.clip(move / (step * share), -FARTHEST, FARTHEST)
    weight = jnp.maximum(share * step, 1 / (rest.rounds + 1))  # first of all the plain mean, over a sweep
    new = Rest(
        (1 - weight) * rest.drift + weight * whole,
        (1 - weight) ** 2 * rest.noise + weight**2 * whole**2,
        rest.rounds + 1,
    )
    return jax.tree.map(lambda now, was: jnp.where(settled, now, was), new, rest)


def restless(rest: Rest) -> Float[Array, ""]:
    """The largest Monte Carlo error of q, or a larger drift that is none of chance's; in sds.

    >>> noise, still, moved = jax.random.normal(jax.random.key(0), (30, 2)), unknown(2), unknown(2)
    >>> for t in range(30):
    ...     step = 1 / (t + 1)
    ...     still, moved = after(still, step * noise[t], step), after(moved, step * (3 + noise[t]), step)
    >>> bool(restless(still) < 0.5), bool(restless(moved) > 2)
    (True, True)
    """
    error = jnp.sqrt(rest.noise)
    chance = jnp.sqrt(2 * jnp.log(8.0 * error.shape[0]))  # of so many normal numbers, 3 times in 100 one is larger
    drift = jnp.where(jnp.abs(rest.drift) > chance * error, jnp.abs(rest.drift), 0.0)
    return jnp.where(rest.rounds > 0, jnp.max(jnp.maximum(error, drift)), FARTHEST)
