r"""Natural gradients of the local free energy: PVI's default.

The free energy of a silo is :math:`E_q[\log f_j] - KL(q \| q / t_j)`, over normal q; its stationary points satisfy
:math:`t_j = (-E_q \nabla^2 \log f_j,\; E_q \nabla \log f_j - E_q \nabla^2 \log f_j\, m)` in natural parameters (P, h).
With whitened points :math:`z_s = m + R x_s` and gradients :math:`g_s` of :math:`\log f_j` with respect to x, Stein's
lemma gives both from gradients alone: :math:`-\mathrm{sym}(\overline{g x^\top})` and :math:`\bar g` in coordinates x.
Where :math:`f_j` is normal one step is exact.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.checks import is_number
from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal import affine
from numpyro_fed.normal.families import Family, Natural, quotient
from numpyro_fed.normal.matrices import diagonal
from numpyro_fed.normal.points import normal_points
from numpyro_fed.precision import in_x64, to_user_dtype, tree_where
from numpyro_fed.solvers import newton
from numpyro_fed.solvers.base import BaseSolver, Projection, Tilted

Array = jax.Array
HALVINGS = 10


class _Now(NamedTuple):
    q: Natural
    frame: Any
    value: Array
    fine: Array


@dataclass(frozen=True)
class NaturalGradient(BaseSolver):
    """``num_steps`` natural-gradient steps a visit, on ``num_points`` fixed points; a ``rate`` of 1 is undamped.

    With ``marginal="importance_weighted"`` draws of locals come from the Laplace approximation of each row, which is
    not improved: take many (``num_nodes=64``), or `Gradient`, which learns the locals' guide.
    """

    num_points: int = 64
    num_steps: int = 3
    rate: float = 1.0
    name = "natural"
    minimises_free_energy = True
    begins_at_q = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.rate) or not 0 < self.rate <= 1:
            raise ValueError(f"rate must be a number above 0 and at most 1, got {self.rate!r}: rate=1.0")

    def evaluations(self, d: int, family: Family) -> int:
        """Of the factor in a visit; a gradient counts as three."""
        return 3 * self.num_steps * max(self.num_points, 4 * d)

    def solve(self, key: Array, tilted: Tilted, factor: Factor, frame: Any, solver_state: Any) -> Projection:
        family, d = tilted.family, tilted.q.shift.shape[0]
        num = max(self.num_points + self.num_points % 2, 4 * d)
        eps = jnp.asarray(normal_points(d, num), jnp.zeros(()).dtype)
        cavity = tilted.cavity
        # the same in every round, so that the map is deterministic, and the same at x and -x, whose difference is the
        # curvature: the draws' noise cancels in it
        half = jax.random.split(jax.random.key(1), num // 2)
        keys = jnp.concatenate([half, half])
        at, frame = newton.begin(tilted, factor, frame)
        begin = tree_where(tilted.warming_up, _nearest(family, at), tilted.q)

        def improve(_: Any, now: _Now) -> _Now:
            at = affine.coordinates(family, now.q)
            frame = factor.refit(to_user_dtype(at.mean), now.frame, newton.LOCAL_STEPS)

            def one(given: tuple) -> tuple[Array, Array]:
                key, x = given
                nodes = factor.nodes(key)
                return jax.value_and_grad(lambda x: factor.log_f(affine.to_z(at, x), frame, nodes))(x)

            values, gradients = jax.lax.map(one, (keys, eps), batch_size=factor.batch_of(num))
            found = _site(family, at, -(gradients.T @ eps) / num, jnp.mean(gradients, axis=0))
            old = quotient(now.q, cavity)
            change = quotient(found, old)

            def at_rate(k: Array) -> Natural:
                with jax.enable_x64(True):
                    rate = self.rate * 0.5 ** k.astype(jnp.float64)
                    return jax.tree.map(lambda c, o, x: c + o + rate * x, cavity, old, change)

            tries = jax.vmap(at_rate)(jnp.arange(HALVINGS + 1))
            proper = jax.vmap(family.proper)(tries)
            first = jnp.argmax(proper)
            new = tree_where(jnp.any(proper), jax.tree.map(lambda t: t[first], tries), now.q)
            mean_site = _expected(affine.pull_back(at, family.dense(found)), at, family.dense(found))
            value = jnp.mean(values) - mean_site
            return _Now(new, frame, value, now.fine & jnp.any(proper))

        last = jax.lax.fori_loop(0, self.num_steps, improve, _Now(begin, frame, jnp.zeros(()), jnp.ones((), bool)))
        fine = last.fine & family.proper(begin)
        return Projection(last.q, last.value, jnp.ones(()), fine, last.frame)


def _nearest(family: Family, at: affine.Coordinates) -> Natural:
    """The normal's nearest member of the family by KL(member || normal): conditional variances are kept."""
    with jax.enable_x64(True):
        return restricted(family, affine.natural(at).precision, jnp.zeros_like(at.mean), at.mean)


def restricted(family: Family, precision: Array, slope: Array, mean: Array) -> Natural:
    """What the family keeps of a curvature and a slope at a point."""

    @in_x64
    def run(precision: Array, slope: Array, mean: Array) -> Natural:
        if family.kind == "full":
            return Natural(precision, slope + precision @ mean)
        kept = diagonal(precision)
        kept = jnp.mean(kept) if family.kind == "identity" else kept
        return Natural(kept, slope + kept * mean)

    return run(precision, slope, mean)


def _site(family: Family, at: affine.Coordinates, precision: Array, slope: Array) -> Natural:
    @in_x64
    def run(precision: Array) -> Array:
        return 0.5 * (precision + precision.T)

    found = affine.factor_from(at, run(precision), slope)
    return restricted(family, found.precision, _difference(found, at.mean), at.mean)


@in_x64
def _difference(factor: Natural, mean: Array) -> Array:
    return factor.shift - factor.precision @ mean


def _expected(quadratic: affine.Quadratic, at: affine.Coordinates, site: Natural) -> Array:
    """E[log site] under the normal of ``at``."""

    @in_x64
    def const(at: affine.Coordinates, site: Natural) -> Array:
        return site.shift @ at.mean - 0.5 * at.mean @ site.precision @ at.mean

    return to_user_dtype(const(at, site)) - 0.5 * jnp.trace(quadratic.precision)
