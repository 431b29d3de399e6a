"""How much of a proposed change the server accepts."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from numpyro_fed.normal.families import Family, Natural, product, summed
from numpyro_fed.normal.sites import scaled, zeroed

Array = jax.Array
HALVINGS = 10
TRUST = 16.0  # a round changes no variance by more than this factor, once every silo has been heard


def acceptable(family: Family, old: Natural, new: Natural, free: Bool[Array, ""] | bool) -> Bool[Array, ""]:
    """Whether a posterior may follow another: it is proper, and (unless ``free``) it is not a different one altogether.

    Noisy messages can be amplified by one another, with sites that grow without bounds and cancel; so a round changes
    no variance by more than a factor of ``TRUST``, in any direction.
    """
    with jax.enable_x64(True):
        three = jax.tree.map(lambda n, o: jnp.stack([n, TRUST * n - o, TRUST * o - n]), new, old)
    proper = jax.vmap(family.proper)(three)
    return proper[0] & (free | (proper[1] & proper[2]))


def steps_within(
    family: Family,
    q: Natural,
    changes: Natural,
    steps: Float[Array, " silos"],
    ok: Bool[Array, " silos"],
    free: Bool[Array, ""] | bool = True,
) -> Float[Array, " silos"]:
    """How much of each change (stacked) the server accepts: ``steps`` if the posterior stays `acceptable`, else less.

    First all together. If that fails, each change is halved until it would be acceptable on its own (0 when it never
    is), and then all of them together until the sum is. Acceptable posteriors are a convex set, so a J-th of each is
    always enough: no good message is lost to a bad one. Nothing depends on the order of the silos.
    """
    changes = jax.tree.map(lambda leaf: zeroed(leaf, ok), changes)
    with jax.enable_x64(True):
        steps = jnp.where(ok, steps, 0.0).astype(jnp.float64)

    def fine(new: Natural) -> Array:
        return acceptable(family, q, new, free)

    def after(steps: Array) -> Natural:
        return product(q, summed(scaled(changes, steps)))

    def everything(_: None) -> Array:
        return steps

    def less(_: None) -> Array:
        with jax.enable_x64(True):
            halves = 0.5 ** jnp.arange(HALVINGS + 1, dtype=jnp.float64)

        def alone(change: Natural, step: Array) -> Array:
            with jax.enable_x64(True):
                tries = halves * step
                proper = jax.vmap(lambda s: fine(jax.tree.map(lambda a, b: a + s * b, q, change)))(tries)
                return jnp.where(jnp.any(proper), tries[jnp.argmax(proper)], 0.0)

        own = jax.vmap(alone)(changes, steps)

        def unfinished(carry: tuple) -> Array:
            count, _, found = carry
            return (count <= 3 * HALVINGS) & ~found

        def halve(carry: tuple) -> tuple:
            count, factor, _ = carry
            with jax.enable_x64(True):
                return count + 1, 0.5 * factor, fine(after(0.5 * factor * own))

        with jax.enable_x64(True):
            begin = jnp.zeros((), jnp.int32), jnp.full((), 2.0, jnp.float64), jnp.zeros((), bool)
        last = jax.lax.while_loop(unfinished, halve, begin)
        with jax.enable_x64(True):
            return jnp.where(last[2], last[1] * own, 0.0)

    return jax.lax.cond(fine(after(steps)), everything, less, None)


def share_within(family: Family, q: Natural, site: Natural, change: Natural, most: float) -> Float[Array, ""]:
    """How much of a silo's change moves no mean of q by more than ``most`` sds of its cavity: 1, or a power of 1/2.

    A silo whose cavity is flat in some direction is the only one that knows of it, and may move there as it likes.
    """
    cavity = jax.tree.map(lambda a, b: a - b, q, site)
    proper, sds, mean = family.proper(cavity), family.sds(cavity), family.mean(q)
    with jax.enable_x64(True):
        shares = 0.5 ** jnp.arange(4 * HALVINGS + 1, dtype=jnp.float64)

    def fine(share: Array) -> Array:
        with jax.enable_x64(True):
            new = jax.tree.map(lambda a, b: a + share * b, q, change)
            far = jnp.max(jnp.abs(family.mean(new) - mean) / sds)
            return family.proper(new) & (far <= most)

    found = jax.vmap(fine)(shares)
    with jax.enable_x64(True):
        return jnp.where(~proper, 1.0, jnp.where(jnp.any(found), shares[jnp.argmax(found)], 0.0))


def optimised(
    family: Family, optim: Any, opt_state: Any, step: Array, q: Natural, changes: Natural, ok: Array, refined: bool
) -> tuple[Natural, Any, Array]:
    """The server's optimiser moves q; the sites that were heard move with it, so that their product is still q.

    Each takes its own change, and an equal part of what the optimiser adds to (or leaves out of) their sum; the last,
    the prior's, has no part in it where the prior is exact (``refined`` is False). Returned: the sites' moves, the
    optimiser's state, and how much of each was accepted.
    """
    changes = jax.tree.map(lambda leaf: zeroed(leaf, ok), changes)
    with jax.enable_x64(True):
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), changes)
        update, opt_state = optim.update(jax.tree.map(jnp.negative, total), opt_state, q)
        part = ok if refined else ok.at[-1].set(False)
        share = part / jnp.maximum(jnp.sum(part), 1)
        rest = jax.tree.map(lambda u, t: step * u - t, update, total)
        moves = jax.tree.map(lambda c, r: c + share.reshape(-1, *(1,) * r.ndim).astype(jnp.float64) * r, changes, rest)
        moves = jax.tree.map(lambda m: jnp.where(jnp.any(part), m, 0.0), moves)
        combined = jax.tree.map(lambda m: jnp.sum(m, axis=0)[None], moves)
    factor = steps_within(family, q, combined, jnp.ones(1), jnp.ones(1, bool))
    with jax.enable_x64(True):
        return jax.tree.map(lambda m: factor[0] * m, moves), opt_state, jnp.where(ok, factor[0], 0.0)
