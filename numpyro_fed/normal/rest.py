r"""When rounds whose answers are noisy have come to rest.

With Monte Carlo noise in every answer no round leaves the posterior where it was. What can come to rest is the running
average. In the t-th sweep over all silos whole steps would move means and log sds by :math:`u_t` (in sds); the server
takes the share :math:`w_t` of it. Were there nothing left to learn, the :math:`u_t` would be noise alone, and what they
leave in q,

.. math:: D_t = (1 - w_t) D_{t-1} + w_t u_t, \qquad E_t = (1 - w_t)^2 E_{t-1} + w_t^2 u_t^2,

would be D with variance E, coordinate by coordinate. So :math:`\sqrt{E}` is q's own Monte Carlo error, and rounds are
still on their way where D is larger than chance makes the largest of so many coordinates.

Where a round hears some of the silos, rounds are added up until as many silos have spoken as there are: silos that
differ may pull to and fro within a sweep, and it is their sum that comes to nothing.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

Array = jax.Array
FARTHEST = 1e6  # sds that a move counts, at most


class Rest(NamedTuple):
    """What the last sweeps moved on average; coordinates are means and log sds, in sds."""

    drift: Float[Array, " c"]  # D
    noise: Float[Array, " c"]  # E
    sweeps: Int[Array, ""]  # so far; none before every silo has been heard
    part: Float[Array, " c"]  # what the present sweep has moved
    share: Float[Array, ""]  # of the silos that have spoken in it


def unknown(num: int) -> Rest:
    return Rest(jnp.zeros(num), jnp.zeros(num), jnp.zeros((), int), jnp.zeros(num), jnp.zeros(()))


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
    part, heard = rest.part + jnp.clip(move / step, -FARTHEST, FARTHEST), rest.share + share
    weight = jnp.maximum(step, 1 / (rest.sweeps + 1))  # at first the plain mean
    swept = Rest(
        (1 - weight) * rest.drift + weight * part,
        (1 - weight) ** 2 * rest.noise + weight**2 * part**2,
        rest.sweeps + 1,
        jnp.zeros_like(part),
        jnp.zeros_like(heard),
    )
    whole = heard > 1 - 0.5 * share
    now = jax.tree.map(lambda new, old: jnp.where(whole, new, old), swept, rest._replace(part=part, share=heard))
    return jax.tree.map(lambda new, old: jnp.where(settled, new, old), now, rest)


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
    return jnp.where(rest.sweeps > 0, jnp.max(jnp.maximum(error, drift)), FARTHEST)
