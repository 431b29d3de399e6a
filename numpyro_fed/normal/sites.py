r"""Sites: approximate factors, one a silo, all held by the server.

.. math:: q(z_G) = t_0(z_G) \prod_j t_j(z_G)

:math:`t_0` stands for the prior: it is the prior where that is normal, and a site that the server refines for itself
where it is not. The server damps what silos propose, backs off where the posterior would not be proper, and adds
exactly what it accepts, so the law above holds after every round, whatever the schedule, the engine or the cohort.

Sites may be indefinite and cavities flat: that is normal, and projecting them would bias the answer. What must be
proper is the posterior (here) and each tilted distribution (in its silo).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from numpyro_fed.normal.families import Family, Natural, product, summed
from numpyro_fed.precision import in_x64

Array = jax.Array


class Sites(NamedTuple):
    """``prior`` is t_0; ``each`` is stacked over silos (of a tied factorisation: one, the product of all)."""

    prior: Natural
    each: Natural


def posterior(sites: Sites, tied: bool = False) -> Natural:
    """q, from its factors."""
    return product(sites.prior, sites.each if tied else summed(sites.each))


def scaled(changes: Natural, steps: Float[Array, " silos"]) -> Natural:
    """Stacked factors, each to its own power."""

    @in_x64
    def run(changes: Natural, steps: Array) -> Natural:
        return jax.tree.map(lambda leaf: steps.reshape(-1, *(1,) * (leaf.ndim - 1)) * leaf, changes)

    return run(changes, steps)


def zeroed(leaf: Float[Array, "silos ..."], ok: Bool[Array, " silos"]) -> Float[Array, "silos ..."]:
    """Changes that are not to be trusted are left out; NaN times zero would stay NaN."""
    with jax.enable_x64(True):
        return jnp.where(ok.reshape(-1, *(1,) * (leaf.ndim - 1)), leaf, 0.0)


class Movement(NamedTuple):
    """How far the posterior moved."""

    divergence: Float[Array, ""]  # symmetrised KL
    shift: Float[Array, ""]  # the largest of a mean, in sds


def movement(family: Family, old: Natural, new: Natural) -> Movement:
    """From one proper posterior to another; infinite where one is not proper."""
    both = family.proper(old) & family.proper(new)
    divergence = family.kl(old, new), family.kl(new, old)
    means, sds = (family.mean(old), family.mean(new)), family.sds(new)

    @in_x64
    def run(kl: tuple, means: tuple, sds: Array) -> Movement:
        shift = jnp.max(jnp.abs(means[1] - means[0]) / sds)
        divergence = jnp.maximum(kl[0] + kl[1], 0.0)  # rounding
        return Movement(jnp.where(both, divergence, jnp.inf), jnp.where(both, shift, jnp.inf))

    return run(divergence, means, sds)


def move(family: Family, old: Natural, new: Natural) -> Float[Array, " 2*d"]:
    """How means and log sds moved, in sds, (2 d,); nothing from or to a posterior that is not proper."""
    means, sds = (family.mean(old), family.mean(new)), (family.sds(old), family.sds(new))
    both = family.proper(old) & family.proper(new)
    with jax.enable_x64(True):
        moved = jnp.concatenate([(means[1] - means[0]) / sds[1], jnp.log(sds[1] / sds[0])])
        return jnp.where(both & jnp.isfinite(moved), moved, 0.0)
