r"""Projections in very many dimensions: time and memory linear in d.

The four ways of FedEP (Guo et al. 2023, section 2.2.2) for families without correlations. All start with ``num_steps``
steps of an optimiser, from q's mean to the mode of the tilted distribution

.. math:: \log q_{-k}(z) + \log f_k(z)

in coordinates in which q is standard normal; :math:`\log f_k` is a sum over the silo's observations and is weighted no
further. They differ in the variances:

======================  ==========================================================================================
:class:`Identity` (I)   precision :math:`n_k c_0` + the cavity's; a constant for all dimensions
``IASG`` (M)            the sample variance of stochastic gradient iterates, averaged and shrunk
:class:`Fisher` (L)     Laplace's approximation with the diagonal Fisher information in the Hessian's place
:class:`NGVI` (V)       the same information averaged over q as it is found: natural-gradient variational inference
======================  ==========================================================================================

**Fisher information without a gradient for each datum.** With all observations redrawn from the model at z, the
silo's score has mean zero and covariance F(z): so the mean square of its elements over redraws is the diagonal of F.
Each redraw is a chi-squared variable with one degree of freedom, so R of them have a relative error of
:math:`\sqrt{2 / R}`, of the silo's own information, not of the posterior's.

At a fixed point of EP with Identity or Fisher the gradients of prior and factors sum to zero: its mean is the mode of
the pooled posterior, whatever the variances. Those of Fisher and NGVI are conditional variances, as of any mean field.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from numpyro_fed.checks import check_count, is_number
from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal import affine
from numpyro_fed.normal.curvature import LEAST, curvature
from numpyro_fed.normal.families import Family, Natural
from numpyro_fed.optim import check_optim
from numpyro_fed.precision import in_x64, to_user_dtype
from numpyro_fed.solvers import newton
from numpyro_fed.solvers.base import BaseSolver, Projection, Tilted

Array = jax.Array
PEAK, FLOOR = 0.1, 1e-4  # of the default optimiser's steps, in sds of q
LEGS = 4  # times that locals are looked for again on the way to the mode


class Place(NamedTuple):
    """A point, a scale, and the tilted distribution in coordinates z = m + s x."""

    at: affine.Coordinates  # m and s, (d,), float64
    frame: Any
    log_f: Callable  # of x
    cavity: affine.Quadratic

    def density(self, x: Array) -> Array:
        """Of the tilted distribution, but for a constant."""
        return self.with_factor(self.log_f, x)

    def with_factor(self, log_f: Callable, x: Array) -> Array:
        return self.cavity(x) + log_f(x)


@dataclass(frozen=True)
class Linear(BaseSolver):
    """What the four share: the way to the mode.

    Args:
        num_steps: of the optimiser, a visit.
        optim: an optax optimiser; parameters are in sds of q. By default Adam, its step falling from .1 to .0001.
        batch_size: rows of the silo that a step looks at, drawn with replacement, for models without local latents. By
            default all of them. (Variances are found from all of the silo's rows.)
    """

    num_steps: int = 200
    optim: Any = None
    batch_size: int | None = None
    # Not `noisy`: steps that fall with every visit would reach the mean too late. Where variances are all that is kept,
    # many rounds are needed, and the server shortens its steps when Monte Carlo error is all that moves the posterior.
    noisy = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optim is not None:
            check_optim(self.optim)
        check_count("batch_size", self.batch_size, optional=True)

    def init_state(self, family: Family, q: Natural) -> Any:
        if family.kind == "full":
            raise ValueError(
                f"solver={self.name!r} finds variances, no correlations: pass family='diagonal' (or 'identity'), or a "
                "solver for few dimensions, such as 'importance' or 'hmc'"
            )
        return ()

    def solve(self, key: Array, tilted: Tilted, factor: Factor, frame: Any, solver_state: Any) -> Projection:
        cavity = tilted.cavity
        begin, variance_key = jax.random.split(key)
        at, frame = self._mode(begin, tilted, cavity, factor, frame)
        found = self._found(variance_key, tilted, cavity, factor, at, frame)
        mean, sds = tilted.family.moments(found)
        value = affine.log_evidence(
            tilted.family,
            tilted.q,
            affine.Coordinates(mean, sds),
            cavity,
            factor.log_f(to_user_dtype(mean), frame, factor.nodes(None)),
        )
        return Projection(found, value, jnp.ones(()), tilted.family.proper(found), frame)

    def _found(
        self, key: Array, tilted: Tilted, cavity: Natural, factor: Factor, at: affine.Coordinates, frame: Any
    ) -> Natural:
        """The projection, given the mode and the locals' frame there."""
        raise NotImplementedError

    def _mode(
        self, key: Array, tilted: Tilted, cavity: Natural, factor: Factor, frame: Any
    ) -> tuple[affine.Coordinates, Any]:
        """The tilted distribution's mode, in units of q's sds."""
        at = affine.coordinates(tilted.family, tilted.q, dense=False)
        legs = LEGS if factor.eps_shape else 1
        steps = -(-self.num_steps // legs)
        optim = self.optim or optax.adam(optax.cosine_decay_schedule(PEAK, legs * steps, alpha=FLOOR / PEAK), b2=0.95)

        def leg(carry: tuple, keys: Array) -> tuple[tuple, None]:
            x, state, frame = carry
            frame = factor.refit(affine.to_z(at, x), frame, newton.LOCAL_STEPS)
            place = place_at(at, cavity, factor, frame)

            def step(carry: tuple, key: Array) -> tuple[tuple, None]:
                x, state = carry
                part = factor.part
                log_f = place.log_f if part is None else lambda x: part(key, affine.to_z(at, x))
                downhill = jax.grad(lambda x: -place.with_factor(log_f, x))(x)
                updates, state = optim.update(downhill, state, x)
                return (optax.apply_updates(x, updates), state), None

            (x, state), _ = jax.lax.scan(step, (x, state), keys)
            return (x, state, frame), None

        x = affine.near_zero(tilted.q.shift.shape[0])
        keys = jax.random.split(key, (legs, steps))
        (x, _, frame), _ = jax.lax.scan(leg, (x, optim.init(x), frame), keys)
        at = affine.compose(at, x, jnp.ones_like(x))
        return at, factor.refit(to_user_dtype(at.mean), frame, newton.LOCAL_STEPS)


@dataclass(frozen=True)
class Identity(Linear):
    """A precision of ``scale`` for each observation, the same in all dimensions: where curvatures are not to be had.

    Args:
        scale: c_0, one over the paper's alpha_cov: about the largest curvature of one observation's log density (1/4
            for a logistic regression on standardised covariates). If it is smaller silos overshoot; if it is larger
            means are slow and variances too small.
        num_steps, optim, batch_size: of the way to the mode, as for all solvers of this kind: 200 steps of Adam,
            falling from .1 to .0001 sds of q; with ``batch_size``, on minibatches of so many rows.
    """

    scale: float = 1.0
    name = "identity"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.scale) or not self.scale > 0:
            raise ValueError(f"scale is the precision of one observation, a positive number, got {self.scale!r}")

    def _found(
        self, key: Array, tilted: Tilted, cavity: Natural, factor: Factor, at: affine.Coordinates, frame: Any
    ) -> Natural:
        if factor.num_obs is None:  # the server's prior holds no observations
            place = place_at(at, cavity, factor, frame)
            return _natural(tilted.family, at, cavity, curvature(key, place.log_f, at.mean.shape))
        information = jnp.broadcast_to(self.scale * factor.num_obs(), at.mean.shape) * to_user_dtype(at.root) ** 2
        return _natural(tilted.family, at, cavity, information)


@dataclass(frozen=True)
class Fisher(Linear):
    """Laplace's approximation with the diagonal Fisher information.

    Args:
        num_draws: of all observations, at the mode.
        num_steps, optim, batch_size: as for :class:`Identity`.

    ``numpyro.factor`` terms, from which nothing can be drawn, count for the mode but not for the curvature.
    """

    num_draws: int = 64
    name = "fisher"

    def _found(
        self, key: Array, tilted: Tilted, cavity: Natural, factor: Factor, at: affine.Coordinates, frame: Any
    ) -> Natural:
        place = place_at(at, cavity, factor, frame)
        return _natural(tilted.family, at, cavity, _information(key, factor, place, self.num_draws))


@dataclass(frozen=True)
class NGVI(Linear):
    r"""Natural-gradient variational inference with the diagonal Fisher information (the paper's Algorithm 5).

    From the mode and the information there, with :math:`z \sim N(\mu_t, \Sigma_t)`,

    .. math::

        S_{t+1} = \beta_t S_t + (1 - \beta_t) F(z), \qquad \Sigma_{t+1} = (S_{t+1} + \Lambda_{-k})^{-1}

    and the mean follows the gradient of the tilted log density at the same draws, an antithetic pair, to the mean of
    the variational optimum. (The paper leaves it at the mode.) S is that of all :math:`n_k` observations.

    Args:
        num_updates: t goes so far; each costs two gradients and two redraws of all observations.
        beta: at most; :math:`\beta_t = \min(\beta, 1 - 1/(t + 2))` forgets the start.
        num_draws: of the information at the mode.
        num_steps, optim, batch_size: as for :class:`Identity`.
    """

    num_updates: int = 100
    beta: float = 0.99
    num_draws: int = 16
    name = "ngvi"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.beta) or not 0 <= self.beta < 1:
            raise ValueError(f"beta must be a number from 0 to below 1, got {self.beta!r}: beta=0.99")

    def _found(
        self, key: Array, tilted: Tilted, cavity: Natural, factor: Factor, at: affine.Coordinates, frame: Any
    ) -> Natural:
        start_key, key = jax.random.split(key)
        place = place_at(at, cavity, factor, frame)
        information = _information(start_key, factor, place, self.num_draws)
        # in units of the tilted's sds, as far as they are known now
        scale = jax.lax.rsqrt(jnp.maximum(place.cavity.precision + information, LEAST))
        at = affine.compose(at, jnp.zeros_like(scale), scale)
        place = place_at(at, cavity, factor, frame)
        optim = optax.adam(optax.cosine_decay_schedule(0.05, self.num_updates, alpha=0.01))

        def update(carry: tuple, given: tuple) -> tuple[tuple, None]:
            x, information, state = carry
            t, key = given
            draw_key, *keys = jax.random.split(key, 3)
            sds = jax.lax.rsqrt(jnp.maximum(place.cavity.precision + information, LEAST))
            away = sds * jax.random.normal(draw_key, x.shape)
            both = jnp.stack([x + away, x - away])
            downhill = jnp.mean(jax.vmap(jax.grad(lambda x: -place.density(x)))(both), axis=0)
            updates, state = optim.update(downhill, state, x)
            seen = jax.vmap(lambda key, x: _squared(key, factor, place, x))(jnp.stack(keys), both)
            beta = jnp.minimum(self.beta, 1 - 1 / (t + 2))
            information = beta * information + (1 - beta) * jnp.mean(seen, axis=0)
            return (optax.apply_updates(x, updates), information, state), None

        x = jnp.zeros_like(scale)
        given = jnp.arange(self.num_updates), jax.random.split(key, self.num_updates)
        (x, information, _), _ = jax.lax.scan(update, (x, information * scale**2, optim.init(x)), given)
        at = affine.compose(at, x, jnp.ones_like(x))
        return _natural(tilted.family, at, cavity, information, mean_of_precisions=True)


# --- coordinates ----------------------------------------------------------------------------------------------------


def place_at(at: affine.Coordinates, cavity: Natural, factor: Factor, frame: Any) -> Place:
    nodes = factor.nodes(None)

    def log_f(x: Array) -> Array:
        return factor.log_f(affine.to_z(at, x), frame, nodes)

    return Place(at, frame, log_f, affine.pull_back(at, cavity))


def _natural(
    family: Family, at: affine.Coordinates, cavity: Natural, information: Array, mean_of_precisions: bool = False
) -> Natural:
    """The normal at m whose precision is the cavity's and the information, which is in units of ``at``."""

    @in_x64
    def run(at: affine.Coordinates, cavity: Natural, information: Array) -> Natural:
        precision = cavity.precision + information / at.root**2
        if family.kind == "identity":
            precision = jnp.mean(precision) if mean_of_precisions else 1 / jnp.mean(1 / precision)
        return Natural(precision, precision * at.mean)

    return run(at, cavity, information)


# --- curvatures -----------------------------------------------------------------------------------------------------


def _squared(key: Array, factor: Factor, place: Place, x: Array) -> Array:
    """One term of the diagonal Fisher information at x, in units of ``place``."""
    if factor.redrawn is None:  # the server's prior: its own curvature
        return curvature(key, lambda away: place.log_f(x + away), x.shape, 1)
    return (to_user_dtype(place.at.root) * factor.redrawn(key, affine.to_z(place.at, x), place.frame)) ** 2


def _information(key: Array, factor: Factor, place: Place, num_draws: int) -> Array:
    """The diagonal Fisher information at the origin of ``place``."""
    zero = jnp.zeros(place.cavity.shift.shape)
    one = lambda key: _squared(key, factor, place, zero)
    each = jax.lax.map(one, jax.random.split(key, num_draws), batch_size=factor.batch_of(num_draws))
    return jnp.mean(each, axis=0)
