r"""Fixed points of a proposal, weighted to stand for the tilted distribution: what two solvers share.

With points :math:`e_s` (:mod:`numpyro_fed.normal.points`) placed by the proposal, :math:`z_s = m + R e_s`,

.. math:: \log w_s = \log t_{\setminus j}(z_s) + \log f_j(z_s) - \log N(z_s; m, R R^\top)

The proposal is the posterior as broadcast, whose distance from the tilted distribution is what is sought. As long as
not every silo has been heard the posterior says little, and the proposal is the Laplace approximation of the tilted
distribution. A proposal with few effective points is replaced by what it found, a few times; later, when nothing but
the posterior moves, less readily, for a change of the proposal makes the map jump.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_fed.equations import works
from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal import affine
from numpyro_fed.normal.families import Family, Natural
from numpyro_fed.normal.points import normal_points
from numpyro_fed.precision import alongside, to_user_dtype, tree_where
from numpyro_fed.solvers import newton
from numpyro_fed.solvers.base import BaseSolver, Projection, Tilted

Array = jax.Array
TRIES = 5
INFLATION = 1.3  # of the covariance of a proposal that follows a bad one


class Seen(NamedTuple):
    """A factor at the points, in coordinates x."""

    log_w: Array  # (S,): minus infinity where it is not finite
    downhill: Any = ()  # (S, d): minus the gradient of the tilted distribution's log density, for solvers that ask


class Found(NamedTuple):
    """The tilted distribution's moments in coordinates x."""

    mean: Array  # (d,)
    root: Array  # (d, d): of the covariance, lower triangular, float64
    ess: Array  # effective points
    fine: Array  # bool


@dataclass(frozen=True)
class Weighted(BaseSolver):
    """What solvers with fixed points share."""

    num_points: int | None = None
    begins_at_q = True
    enough: ClassVar[tuple[float, float]] = (0.5, 0.1)  # effective, of all points, for a proposal: at first, and later
    gradients: ClassVar[bool] = False  # whether factors are differentiated at the points

    def points(self, d: int, correlations: bool) -> int:
        raise NotImplementedError

    def moments(self, eps: Array, seen: Seen) -> Found:
        raise NotImplementedError

    def evaluations(self, d: int, family: Family) -> int:
        """Of the factor in a visit, as a rule; a gradient counts as three."""
        return self.points(d, family.kind == "full") * (3 if self.gradients else 1)

    def solve(self, key: Array, tilted: Tilted, factor: Factor, frame: Any, solver_state: Any) -> Projection:
        family, d = tilted.family, tilted.q.shift.shape[0]
        full = family.kind == "full"
        eps = jnp.asarray(normal_points(d, self.points(d, full)), jnp.zeros(()).dtype)
        cavity = family.dense(tilted.cavity)
        nodes = factor.nodes(None)
        q = family.known(tilted.q)
        of_q = affine.coordinates(family, q)
        # a family that cannot keep the tilted's correlations leaves that to the silo
        begin, frame = newton.begin(
            tilted, factor, frame, of_q if full else tree_where(tilted.warming_up, of_q, solver_state)
        )
        least = 1 if full and tilted.q_is_close else 3  # where q is not what it should be, the proposal has to be found
        enough = jnp.where(tilted.warming_up, *self.enough)

        def unfinished(carry: _Try) -> Array:
            return (carry.tries < TRIES) & ((carry.tries < least) | (carry.ess < enough))

        def attempt(carry: _Try) -> _Try:
            again = (carry.tries > 0) & (carry.ess < enough)
            at = affine.compose(carry.at, jnp.zeros(d), jnp.where(again, INFLATION**0.5, 1.0) * jnp.eye(d))
            frame = factor.refit(to_user_dtype(at.mean), carry.frame, newton.LOCAL_STEPS)
            seen = self._seen(factor, frame, nodes, at, affine.pull_back(at, cavity), eps)
            found = self.moments(eps, seen)
            log_mean = logsumexp(seen.log_w) - np.log(len(eps))
            value = affine.log_evidence(family, q, at, cavity, log_mean)
            now = affine.compose(at, found.mean, found.root)  # a product of lower triangular roots is one
            return _Try(now, frame, found.ess / len(eps), found.fine, value, carry.tries + 1)

        no, zero = jnp.zeros((), bool), jnp.zeros(())
        first = alongside(_Try(begin, frame, zero, no, zero, jnp.zeros((), int)), tilted.site.shift)
        last = jax.lax.while_loop(unfinished, attempt, first)
        natural = affine.to_family(family, last.at)
        # what failed is not where to begin next time
        again = () if full else tree_where(last.fine, last.at, of_q)
        return Projection(natural, last.value, last.ess, last.fine, last.frame, solver_state=again)

    def _seen(
        self, factor: Factor, frame: Any, nodes: Any, at: affine.Coordinates, quadratic: affine.Quadratic, eps: Array
    ) -> Seen:
        """The factor at all points, as many at once as memory allows."""
        batch = factor.batch_of(len(eps))
        beside = jax.vmap(lambda x: quadratic(x))(eps) + 0.5 * jnp.sum(eps**2, axis=1)
        marked = works if factor.num_obs is not None else lambda function: function  # a prior is little work
        if not self.gradients:
            at_points = lambda points: jax.lax.map(lambda z: factor.log_f(z, frame, nodes), points, batch_size=batch)
            log_f = marked(at_points)(affine.to_z(at, eps))
            log_w = log_f + beside
            return Seen(jnp.where(jnp.isfinite(log_w), log_w, -jnp.inf))
        both = jax.value_and_grad(lambda x: factor.log_f(affine.to_z(at, x), frame, nodes))
        log_f, uphill = marked(lambda eps: jax.lax.map(both, eps, batch_size=batch))(eps)
        log_w, downhill = log_f + beside, eps @ quadratic.precision - quadratic.shift - uphill
        fine = jnp.isfinite(log_w) & jnp.all(jnp.isfinite(downhill), axis=1)
        return Seen(jnp.where(fine, log_w, -jnp.inf), jnp.where(fine[:, None], downhill, 0.0))

    def init_state(self, family: Family, q: Natural) -> Any:
        """Coordinates of the tilted distribution, where the family cannot keep them."""
        return () if family.kind == "full" else affine.coordinates(family, q)


class _Try(NamedTuple):
    at: Any
    frame: Any
    ess: Array
    fine: Array
    value: Array
    tries: Array
