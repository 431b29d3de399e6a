r"""Moments from draws: Hamiltonian Monte Carlo in whitened coordinates.

In coordinates z = m + R x of the posterior (or, at first, of the tilted distribution's Laplace approximation) the
tilted distribution is about standard normal, and so are its locals in their frame. So nothing is adapted: unit mass, a
fixed step; data, cavity and start are arguments of one program that serves all rounds and silos.

Moments are corrected by Stein's identity (:mod:`numpyro_fed.normal.stein`), with the gradients that the sampler has
anyway. Where the tilted distribution is normal they are then exact in any number of dimensions; where gradients have
heavy tails, they are the draws' own.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro.infer.hmc import hmc

from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal import affine, lapack, stein
from numpyro_fed.normal.families import LOG_2PI, Family
from numpyro_fed.normal.matrices import diagonal
from numpyro_fed.precision import to_user_dtype, tree_where
from numpyro_fed.solvers import newton
from numpyro_fed.solvers.base import BaseSolver, Projection, Tilted

Array = jax.Array
LENGTH = 1.5  # of a trajectory, in sds: near a quarter of a period, where draws are nearly independent
POOR = 0.5  # acceptance below which steps are halved
WIDE = 4.0  # variances further from one than this factor, and what draws vary by chance, ask for other coordinates
FAR = 2.0  # and so do means further from zero than this
FARTHEST = 4.0  # which are believed up to here
TRIES = 4
ENOUGH = 4  # draws a dimension, at least
FLOOR = 0.02  # least eigenvalue of the covariance in whitened coordinates


@dataclass(frozen=True)
class HMC(BaseSolver):
    """Jittered Hamiltonian Monte Carlo: many short chains, no adaptation.

    Args:
        num_chains, num_samples: draws are kept from ``num_samples`` steps of each chain; more, where that is needed for
            four draws a global.
        num_warmup: steps before those.
        step_size: in sds; by default .7 for the globals alone and .35 where locals are sampled too (less in very many
            dimensions).
        stein: correct moments by gradients.
    """

    num_chains: int = 50
    num_samples: int = 20
    num_warmup: int = 10
    step_size: float | None = None
    stein: bool = True
    name = "hmc"
    noisy = True
    samples_locals = True

    def draw(self, key: Array, density: Any, begin: Array, step_size: Any, d: int) -> tuple[Array, Array, Array]:
        """Draws (chains, samples, D), minus the gradients there by the first d coordinates, the rate of acceptance."""
        value_and_grad = jax.value_and_grad(density)
        leaps = jnp.ceil(LENGTH / step_size).astype(int)

        def transition(carry: tuple, key: Array) -> tuple[tuple, tuple]:
            y, value, gradient = carry
            momentum_key, step_key, accept_key = jax.random.split(key, 3)
            momentum = jax.random.normal(momentum_key, y.shape)
            step = step_size * jax.random.uniform(step_key, minval=0.7, maxval=1.3)

            def leap(_: Any, now: tuple) -> tuple:
                y, momentum, _, gradient = now
                momentum = momentum + 0.5 * step * gradient
                y = y + step * momentum
                value, gradient = value_and_grad(y)
                return y, momentum + 0.5 * step * gradient, value, gradient

            new = jax.lax.fori_loop(0, leaps, leap, (y, momentum, value, gradient))
            change = new[2] - value - 0.5 * (new[1] @ new[1] - momentum @ momentum)
            accept = jnp.log(jax.random.uniform(accept_key)) < jnp.where(jnp.isfinite(change), change, -jnp.inf)
            carry = jax.tree.map(lambda a, b: jnp.where(accept, a, b), (new[0], new[2], new[3]), carry)
            return carry, (carry[0], -carry[2][:d], accept)

        def chain(key: Array, y: Array) -> tuple[Array, Array, Array]:
            keys = jax.random.split(key, self.num_warmup + self.num_samples)
            _, (draws, downhill, accepted) = jax.lax.scan(transition, (y, *value_and_grad(y)), keys)
            # a mean of bools is float32
            return draws[self.num_warmup :], downhill[self.num_warmup :], jnp.mean(accepted, dtype=y.dtype)

        draws, downhill, accepted = jax.vmap(chain)(jax.random.split(key, self.num_chains), begin)
        return draws, downhill, jnp.mean(accepted)

    def evaluations(self, d: int, family: Family) -> int:
        """Of the factor in a visit, with four leaps a draw; a gradient counts as three."""
        return 12 * self.num_chains * (self.num_warmup + self.num_samples)

    def solve(self, key: Array, tilted: Tilted, factor: Factor, frame: Any, solver_state: Any) -> Projection:
        d = tilted.q.shift.shape[0]
        least = math.ceil(ENOUGH * d / self.num_chains)
        if self.num_samples < least:
            return replace(self, num_samples=least).solve(key, tilted, factor, frame, solver_state)
        nodes, cavity = factor.nodes(None), tilted.family.dense(tilted.cavity)
        begin, frame = newton.begin(tilted, factor, frame)
        eps_like = {g: jnp.zeros(shape) for g, shape in factor.eps_shape.items()} if factor.sampled else {}
        flat, unravel = ravel_pytree(eps_like)
        size = flat.shape[0]
        start_key, draw_key = jax.random.split(key)
        places = jax.random.normal(start_key, (self.num_chains, d + size))
        step_size = self.step_size or (0.7 if not size else 0.35 * min(1.0, (1000 / (d + size)) ** 0.25))

        def density_in(at: affine.Coordinates, frame: Any) -> Any:
            quadratic = affine.pull_back(at, cavity)

            def density(y: Array) -> Array:
                z = affine.to_z(at, y[:d])
                silo = factor.joint(z, frame, unravel(y[d:])) if size else factor.log_f(z, frame, nodes)
                return quadratic(y[:d]) + silo

            return density

        def poor(now: _Drawn) -> Array:
            return (now.tries < TRIES) & ~now.fine

        def attempt(now: _Drawn) -> _Drawn:
            """In coordinates that do not fit, draws are poor; but they say how to change the coordinates."""
            again = now.tries > 0
            at = tree_where(
                again, affine.with_lower_root(affine.compose(now.at, now.mean, affine.root_of(now.cov))), now.at
            )
            frame = factor.refit(to_user_dtype(at.mean), now.frame, newton.LOCAL_STEPS)
            step = jnp.where(again & (now.accepted < POOR), 0.5, 1.0) * now.step
            draws, downhill, accepted = self.draw(draw_key, density_in(at, frame), places, step, d)
            draws = draws.reshape(-1, d + size)
            mean, cov, fits = self._moments(draws[:, :d], downhill.reshape(-1, d))
            return _Drawn(at, frame, step, draws, mean, cov, accepted, fits & (accepted > POOR), now.tries + 1)

        empty = jnp.zeros((self.num_chains * self.num_samples, d + size))
        first = _Drawn(
            begin,
            frame,
            jnp.asarray(step_size, jnp.zeros(()).dtype),
            empty,
            jnp.zeros(d),
            jnp.eye(d),
            jnp.zeros(()),
            jnp.zeros((), bool),
            jnp.zeros((), int),
        )
        last = jax.lax.while_loop(poor, attempt, first)
        at, frame, draws, accepted = last.at, last.frame, last.draws, last.accepted
        density, mean, cov = density_in(at, frame), last.mean, last.cov
        some = draws[:: max(1, len(draws) // 64)]
        values = jax.lax.map(density, some, batch_size=1)
        # E[log tilted - log normal] over the draws, the log integral, too large by KL(tilted || normal); of locals this
        # normal has variances alone
        root = to_user_dtype(affine.root_of(cov))
        log_mean = jnp.sum(jnp.log(diagonal(root)))
        lengths = jnp.sum(lapack.solve_lower(root, (some[:, :d] - mean).T) ** 2, axis=0)
        if size:
            centre, variance = jnp.mean(draws[:, d:], axis=0), jnp.maximum(jnp.var(draws[:, d:], axis=0), FLOOR)
            lengths = lengths + jnp.sum((some[:, d:] - centre) ** 2 / variance, axis=1)
            log_mean = log_mean + 0.5 * jnp.sum(jnp.log(variance)) + 0.5 * size * LOG_2PI
        log_mean = log_mean + jnp.mean(values + 0.5 * lengths)
        found = affine.with_lower_root(affine.compose(at, mean, root))
        fine = jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(cov)) & (accepted > 0.3)
        local_posterior = None
        if size:
            eps = jax.vmap(unravel)(draws[:, d:])
            centre = jax.tree.map(lambda e: jnp.mean(e, axis=0), eps)
            second = {g: jnp.einsum("sri,srj->rij", e - centre[g], e - centre[g]) / len(e) for g, e in eps.items()}
            local_posterior = frame.with_moments(centre, second)
        value = affine.log_evidence(tilted.family, tilted.q, at, cavity, log_mean)
        effective = jnp.where(last.fine, accepted, 0.0)  # in coordinates that never fitted, draws are not to be trusted
        return Projection(affine.to_family(tilted.family, found), value, effective, fine, frame, local_posterior)

    def _moments(self, draws: Array, downhill: Array) -> tuple[Array, Array, Array]:
        """Mean and covariance, and whether they are those of a distribution that is about standard normal.

        By chance alone the covariance of l draws of a standard normal has eigenvalues from (1 - r)^2 to (1 + r)^2, with
        r^2 = d / l (Marchenko and Pastur 1967).
        """
        num, d = draws.shape
        mean, cov = jnp.mean(draws, axis=0), jnp.atleast_2d(jnp.cov(draws.T))
        if self.stein:
            better_mean, better_cov = to_user_dtype(stein.moments(draws, downhill))
            useful = jnp.linalg.eigvalsh(better_cov)[0] > 0  # before chains have come to rest it may be no covariance
            mean, cov = jnp.where(useful, better_mean, mean), jnp.where(useful, better_cov, cov)
        values, vectors = jnp.linalg.eigh(cov)
        chance = math.sqrt(d / num)
        fits = (values[0] > (1 - chance) ** 2 / WIDE) & (values[-1] < (1 + chance) ** 2 * WIDE)
        fits = fits & (jnp.max(jnp.abs(mean)) < FAR)
        cov = (vectors * jnp.maximum(values, FLOOR)) @ vectors.T
        return jnp.clip(mean, -FARTHEST, FARTHEST), cov, fits


class _Drawn(NamedTuple):
    at: Any
    frame: Any
    step: Array
    draws: Array
    mean: Array
    cov: Array
    accepted: Array
    fine: Array
    tries: Array


@dataclass(frozen=True)
class NUTS(HMC):
    """NumPyro's No-U-Turn sampler in the same coordinates, without adaptation."""

    num_chains: int = 4
    num_samples: int = 250
    num_warmup: int = 50
    name = "nuts"

    def draw(self, key: Array, density: Any, begin: Array, step_size: Any, d: int) -> tuple[Array, Array, Array]:
        init_kernel, sample_kernel = hmc(lambda y: -density(y), algo="NUTS")

        def chain(key: Array, y: Array) -> tuple[Array, Array, Array]:
            state = init_kernel(
                y,
                num_warmup=0,
                step_size=step_size,
                adapt_step_size=False,
                adapt_mass_matrix=False,
                max_tree_depth=8,
                rng_key=key,
            )

            def transition(state: Any, _: Any) -> tuple[Any, tuple]:
                state = sample_kernel(state)
                return state, (state.z, state.z_grad[:d], state.accept_prob)

            steps = self.num_warmup + self.num_samples
            _, (draws, downhill, accepted) = jax.lax.scan(transition, state, None, steps)
            return draws[self.num_warmup :], downhill[self.num_warmup :], jnp.mean(accepted)

        draws, downhill, accepted = jax.vmap(chain)(jax.random.split(key, self.num_chains), begin)
        return draws, downhill, jnp.mean(accepted)
