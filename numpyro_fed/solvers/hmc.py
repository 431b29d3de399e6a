r"""Moments from draws: Hamiltonian Monte Carlo in whitened coordinates.

In coordinates z = m + R x of the posterior (or, at first, of the tilted distribution's Laplace approximation) the
tilted distribution is about standard normal, and so are its locals in their frame. So nothing is adapted: unit mass, a
fixed step; data, cavity and start are arguments of one program that serves all rounds and silos.

Moments are corrected by Stein's identity (:mod:`numpyro_fed.normal.stein`), with the gradients that the sampler has
anyway; where these have heavy tails, the draws' own moments are taken.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from numpyro.infer.hmc import hmc

from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal import affine, stein
from numpyro_fed.normal.families import LOG_2PI
from numpyro_fed.precision import to_user_dtype, tree_where
from numpyro_fed.solvers import newton
from numpyro_fed.solvers.base import BaseSolver, Projection, Tilted

Array = jax.Array
LENGTH = 1.5  # of a trajectory, in sds: near a quarter of a period, where draws are nearly independent
POOR = 0.5  # acceptance below which steps are halved
WIDE = 4.0  # variances further from one than this factor ask for other coordinates
TRIES = 4
FLOOR = 0.02  # least eigenvalue of the covariance in whitened coordinates


@dataclass(frozen=True)
class HMC(BaseSolver):
    """Jittered Hamiltonian Monte Carlo: many short chains, no adaptation.

    Args:
        num_chains, num_samples: draws are kept from ``num_samples`` steps of each chain.
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

    def draw(self, key: Array, density: Any, begin: Array, step_size: Any) -> tuple[Array, Array]:
        """Draws (chains, samples, D) and how often proposals were accepted."""
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
            return carry, (carry[0], accept)

        def chain(key: Array, y: Array) -> tuple[Array, Array]:
            keys = jax.random.split(key, self.num_warmup + self.num_samples)
            _, (draws, accepted) = jax.lax.scan(transition, (y, *value_and_grad(y)), keys)
            return draws[self.num_warmup :], jnp.mean(accepted, dtype=y.dtype)  # a mean of bools is float32

        draws, accepted = jax.vmap(chain)(jax.random.split(key, self.num_chains), begin)
        return draws, jnp.mean(accepted)

    def solve(self, key: Array, tilted: Tilted, factor: Factor, frame: Any, solver_state: Any) -> Projection:
        d = tilted.q.shift.shape[0]
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
            draws, accepted = self.draw(draw_key, density_in(at, frame), places, step)
            draws = draws.reshape(-1, d + size)
            x = draws[:, :d]
            mean, cov = jnp.mean(x, axis=0), jnp.atleast_2d(jnp.cov(x.T))
            spread = jnp.linalg.eigvalsh(cov)
            fits = (jnp.max(jnp.abs(mean)) < 2.0) & (spread[0] > 1 / WIDE) & (spread[-1] < WIDE)
            cov = _floored(cov)
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
        density = density_in(at, frame)
        mean, cov = last.mean, last.cov
        if self.stein:
            downhill = jax.grad(lambda y: -density(y))
            gradients = jax.lax.map(downhill, draws, batch_size=_divisor(len(draws)))[:, :d]
            exact_mean, exact_cov = stein.whitened_moments(draws[:, :d], gradients)
            # gradients with heavy tails (a funnel) add more noise than they take away
            useful = last.fine & (jnp.linalg.eigvalsh(gradients.T @ gradients / len(gradients))[-1] < WIDE)
            mean, cov = jnp.where(useful, exact_mean, mean), jnp.where(useful, _floored(exact_cov), cov)
        values = jax.lax.map(density, draws[:: max(1, len(draws) // 64)], batch_size=1)
        # E[log tilted - log normal] over the draws: the log integral, too large by KL(tilted || normal)
        log_mean = jnp.mean(values) + 0.5 * (d + size) + 0.5 * jnp.linalg.slogdet(cov)[1]
        log_mean = log_mean + (0.5 * size * LOG_2PI if size else 0.0)
        found = affine.with_lower_root(affine.compose(at, mean, affine.root_of(cov)))
        fine = jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(cov)) & (accepted > 0.3)
        local_posterior = None
        if size:
            eps = jax.vmap(unravel)(draws[:, d:])
            centre = jax.tree.map(lambda e: jnp.mean(e, axis=0), eps)
            second = {g: jnp.einsum("sri,srj->rij", e - centre[g], e - centre[g]) / len(e) for g, e in eps.items()}
            local_posterior = frame.with_moments(centre, second)
        value = affine.log_evidence(tilted.family, tilted.q, at, cavity, log_mean)
        return Projection(affine.to_family(tilted.family, found), value, accepted, fine, frame, local_posterior)


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

    def draw(self, key: Array, density: Any, begin: Array, step_size: Any) -> tuple[Array, Array]:
        init_kernel, sample_kernel = hmc(lambda y: -density(y), algo="NUTS")

        def chain(key: Array, y: Array) -> tuple[Array, Array]:
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
                return state, (state.z, state.accept_prob)

            _, (draws, accepted) = jax.lax.scan(transition, state, None, self.num_warmup + self.num_samples)
            return draws[self.num_warmup :], jnp.mean(accepted)

        draws, accepted = jax.vmap(chain)(jax.random.split(key, self.num_chains), begin)
        return draws, jnp.mean(accepted)


def _floored(cov: Array) -> Array:
    values, vectors = jnp.linalg.eigh(0.5 * (cov + cov.T))
    return (vectors * jnp.maximum(values, FLOOR)) @ vectors.T


def _divisor(num: int, most: int = 100) -> int:
    return next(k for k in range(min(most, num), 0, -1) if num % k == 0)
