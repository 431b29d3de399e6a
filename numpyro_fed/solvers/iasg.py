"""Variances from iterate-averaged stochastic gradient samples, in very many dimensions."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from numpyro_fed.checks import check_count, is_number
from numpyro_fed.local.integrate import Factor
from numpyro_fed.local.walk import iterate_average, langevin
from numpyro_fed.normal import affine
from numpyro_fed.normal.curvature import LEAST, largest_curvature, row_norms
from numpyro_fed.normal.families import Natural
from numpyro_fed.normal.moments import shrunk_variances
from numpyro_fed.solvers.base import Tilted
from numpyro_fed.solvers.linear import Linear, place_at

Array = jax.Array


@dataclass(frozen=True)
class IASG(Linear):
    r"""Variances of iterate-averaged stochastic gradient samples.

    From the mode, chains of Langevin's steps, of which two successive ones are averaged
    (:mod:`numpyro_fed.local.walk`); their size is ``step_size`` over the largest curvature, which power iteration
    finds.

    Variances are shrunk towards their mean, in units of the Hessian's rows at the mode, by as much as their Monte Carlo
    error is of their spread (Opgen-Rhein and Strimmer 2007).

    Args:
        num_chains, num_samples: samples are kept from each chain; a chain takes O(d) memory.
        num_warmup: samples before those.
        thinning: steps from one sample to the next.
        step_size: in units of one over the largest curvature; stable below 2.
        shrinkage: in [0, 1]; by default from the samples.
        num_steps, optim, batch_size: as for :class:`~numpyro_fed.solvers.linear.Identity`.
    """

    num_chains: int = 8
    num_samples: int = 30
    num_warmup: int = 10
    thinning: int = 10
    step_size: float = 1.0
    shrinkage: float | None = None
    name = "iasg"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("thinning", self.thinning)
        if not is_number(self.step_size) or not 0 < self.step_size < 2:
            raise ValueError(f"step_size must be a number between 0 and 2, got {self.step_size!r}: step_size=1.0")
        if self.shrinkage is not None and not (is_number(self.shrinkage) and 0 <= self.shrinkage <= 1):
            raise ValueError(f"shrinkage must be a number from 0 to 1, or None, got {self.shrinkage!r}")

    def _found(
        self, key: Array, tilted: Tilted, cavity: Natural, factor: Factor, at: affine.Coordinates, frame: Any
    ) -> Natural:
        curve_key, power_key, begin_key, key = jax.random.split(key, 4)
        place = place_at(at, cavity, factor, frame)
        scale = jax.lax.rsqrt(jnp.maximum(row_norms(curve_key, place.density, at.mean.shape), LEAST))
        at = affine.compose(at, jnp.zeros_like(scale), scale)
        place = place_at(at, cavity, factor, frame)
        uphill = jax.grad(place.density)
        h = self.step_size / largest_curvature(power_key, uphill, scale.shape)

        step = langevin(uphill, h)

        def sample(carry: tuple, given: tuple) -> tuple[tuple, None]:
            x, first, second = carry
            weight, key = given
            (x, _), (drawn, _) = iterate_average(step, (x, ()), key, self.thinning, pairs=True)
            return (x, first + weight * drawn, second + weight * drawn**2), None

        def chain(key: Array, x: Array) -> tuple[Array, Array]:
            total = self.num_warmup + self.num_samples
            weight = (jnp.arange(total) >= self.num_warmup) / self.num_samples
            zeros = jnp.zeros_like(x)
            (_, first, second), _ = jax.lax.scan(sample, (x, zeros, zeros), (weight, jax.random.split(key, total)))
            return first, second

        begin = jax.random.normal(begin_key, (self.num_chains, *scale.shape))
        first, second = jax.vmap(chain)(jax.random.split(key, self.num_chains), begin)
        mean, num = jnp.mean(first, axis=0), self.num_chains * self.num_samples
        variance = (jnp.mean(second, axis=0) - mean**2) * num / max(num - 1, 1)
        if self.num_chains > 1:  # chains are independent, their samples are not
            error = jnp.var(second - 2 * mean * first, axis=0, ddof=1) / self.num_chains
        else:
            error = 2 * variance**2 / num
        at = affine.compose(at, mean, jnp.sqrt(shrunk_variances(variance, error, self.shrinkage)))
        return affine.to_family(tilted.family, at)
