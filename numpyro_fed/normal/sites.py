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

from numpyro_fed.normal.families import Known, Natural, product, summed
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
    """How far the posterior moved, float64."""

    divergence: Float[Array, ""]  # symmetrised KL
    shift: Float[Array, ""]  # the largest of a mean, in sds
    each: Float[Array, " 2*d"]  # of means and log sds, in sds


def movement(old: Known, new: Known) -> Movement:
    r"""From one proper posterior to another; infinite, in no direction, where one is not proper.

    The logarithms of KL(a || b) and KL(b || a) cancel: with precisions P and covariances C, and means that differ by m,
    their sum is :math:`\tfrac12 \mathrm{tr}(P_a C_b + P_b C_a) - d + \tfrac12 m^\top (P_a + P_b) m`.
    """
    with jax.enable_x64(True):
        both, d = old.proper & new.proper, old.mean.shape[0]
        off, sds = new.mean - old.mean, new.sds
        total = old.factor.precision + new.factor.precision
        if old.root.ndim == 2:
            trace = sum(jnp.sum((a.factor.precision @ b.root) * b.root) for a, b in ((old, new), (new, old)))
            far = off @ total @ off
        else:
            trace = jnp.sum(old.factor.precision * new.root**2 + new.factor.precision * old.root**2)
            far = jnp.sum(total * off**2)
        divergence = jnp.maximum(0.5 * (trace + far) - d, 0.0)  # rounding
        each = jnp.concatenate([off / sds, jnp.log(sds / old.sds)])
        shift = jnp.max(jnp.abs(each[:d]))
        return Movement(
            jnp.where(both, divergence, jnp.inf),
            jnp.where(both, shift, jnp.inf),
            jnp.where(both & jnp.isfinite(each), each, 0.0),
        )
