"""Where solvers begin: Newton's method in coordinates that float32 can hold."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_fed.local.integrate import plain_factor
from numpyro_fed.normal import affine
from numpyro_fed.normal.families import Family
from numpyro_fed.solvers.newton import newton

FULL = Family("full")
PRIOR = 1000.0


def calendar(d):
    """A polynomial trend over calendar years: columns correlated to 1 - 1e-5, and nearer still."""
    rng = np.random.default_rng(0)
    x = np.vander(rng.integers(1990, 2021, 120).astype(float), d, increasing=True) / 2000.0 ** np.arange(d)
    return x, x @ np.ones(d) + rng.normal(size=120)


# the weakest direction's curvature is 1e-5 and 1e-10 of the strongest's: the second is beyond float32 in one Hessian
@pytest.mark.parametrize(("d", "tolerance"), [(2, 0.01), (3, 0.1)])
def test_curvature_that_float32_cannot_see_beside_another(d, tolerance):
    x, y = calendar(d)
    covariance = np.linalg.inv(x.T @ x + np.eye(d) / PRIOR**2)
    mean, sds = covariance @ (x.T @ y), np.sqrt(np.diagonal(covariance))
    rows, seen = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    factor = plain_factor(lambda z: -0.5 * jnp.sum((seen - rows @ z) ** 2))
    prior = FULL.project(np.zeros(d), np.full(d, PRIOR**2))
    at, _, converged = newton(factor, prior, affine.coordinates(FULL, prior), (), (), jnp.asarray(40))
    assert bool(converged)
    found = np.sqrt(np.sum(np.asarray(at.root) ** 2, axis=1))
    # float32 rounds the rows themselves: 6e-8 of a column beside directions of 3e-3 (d = 2) and 1e-5 (d = 3)
    np.testing.assert_allclose(found, sds, rtol=tolerance)
    np.testing.assert_array_less(np.abs(np.asarray(at.mean) - mean) / sds, 10 * tolerance)


def test_nothing_is_looked_at_without_a_limit():
    factor = plain_factor(lambda z: jnp.full((), jnp.nan))
    prior = FULL.project(np.ones(2), np.ones(2))
    at, _, converged = newton(factor, prior, affine.coordinates(FULL, prior), (), (), jnp.asarray(0))
    assert bool(converged) and at.mean.tolist() == [1.0, 1.0]
