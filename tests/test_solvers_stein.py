"""Moments from points and gradients: exact for normals whatever the points, EP's own elsewhere; and where EP begins."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.normal import stein
from numpyro_fed.normal.points import normal_points
from numpyro_fed.solvers.stein import _power, effective


def conjugate(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 0.5), obs=y)


def conjugate_silos(d, num_silos, dtype=np.float32):
    """Each silo has fewer rows than there are coefficients: only together they know them all."""
    rng = np.random.default_rng(d)
    rows = d // 2 + 3
    x = rng.normal(size=(num_silos, rows, d)) * np.geomspace(0.1, 10, d)  # scales of the coefficients differ
    y = x @ rng.normal(size=d) + 0.5 * rng.normal(size=(num_silos, rows))
    return nf.Silos({f"s{j}": dict(x=x[j].astype(dtype), y=y[j].astype(dtype)) for j in range(num_silos)})


def closed_form(silos):
    x = np.concatenate([np.asarray(silos[name]["x"], float) for name in silos.names])
    y = np.concatenate([np.asarray(silos[name]["y"], float) for name in silos.names])
    precision = 4 * x.T @ x + np.eye(x.shape[1]) / 4
    cov = np.linalg.inv(precision)
    return cov @ (4 * x.T @ y), np.sqrt(np.diag(cov))


def logistic(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def logistic_silos(d, num_silos, rows):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_silos, rows, d)).astype(np.float32)
    y = (rng.uniform(size=(num_silos, rows)) < 1 / (1 + np.exp(-x @ rng.normal(size=d)))).astype(np.int32)
    return nf.Silos({f"s{j}": dict(x=x[j], y=y[j]) for j in range(num_silos)})


# --- the estimator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["equal", "unequal"])
def test_a_normal_is_found_exactly_whatever_the_weights(x64, weights):
    rng = np.random.default_rng(0)
    d, root = 6, np.tril(rng.normal(size=(6, 6))) + 3 * np.eye(6)
    precision, mean = root @ root.T, rng.normal(size=6)
    points = normal_points(d, 64)
    weight = np.full(64, 1 / 64) if weights == "equal" else rng.dirichlet(np.ones(64))
    found = stein.regressed(jnp.asarray(points), jnp.asarray((points - mean) @ precision), jnp.asarray(weight))
    np.testing.assert_allclose(found[0] - np.linalg.solve(found[2], found[1]), mean, atol=1e-10)
    np.testing.assert_allclose(found[2], precision, rtol=1e-10)


def test_weights_make_the_moments_those_of_a_skewed_density():
    """In one dimension a density that is no normal: E x and 1 / Var x, where equal weights give another answer."""
    points, log_p = normal_points(1, 4096), lambda x: -0.5 * x**2 + 0.4 * x - 0.3 * np.exp(x)
    downhill = points - 0.4 + 0.3 * np.exp(points)
    weight = np.exp(log_p(points) + 0.5 * points**2)[:, 0]
    grid = np.linspace(-12, 8, 20001)
    density = np.exp(log_p(grid)) / np.sum(np.exp(log_p(grid)))
    mean = density @ grid
    exact = mean, 1 / (density @ (grid - mean) ** 2)
    found, plain = (
        [float(np.squeeze(part)) for part in stein.regressed(jnp.asarray(points), jnp.asarray(downhill), w)]
        for w in (jnp.asarray(weight / weight.sum()), jnp.full(4096, 1 / 4096))
    )
    found, plain = ((centre - slope / precision, precision) for centre, slope, precision in (found, plain))
    np.testing.assert_allclose(found, exact, rtol=2e-3, atol=1e-3)  # 4,096 quasi-random points
    assert abs(plain[1] / exact[1] - 1) > 0.01


def test_weights_are_made_as_equal_as_they_must_be():
    log_w = jnp.asarray(np.random.default_rng(0).normal(size=256) * 3)
    beta = float(_power(log_w, 100.0))
    assert 0 < beta < 1
    np.testing.assert_allclose(effective(jax.nn.softmax(beta * log_w)), 100, rtol=0.01)
    assert float(_power(0.1 * log_w, 100.0)) == 1, "enough are effective as they are"


# --- the method -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "d", [30, pytest.param(100, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.slow)]
)
def test_expectation_propagation_is_exact_on_a_conjugate_normal(d):
    """In float32, where a silo alone knows half of the directions; rounding is all that is left."""
    silos = conjugate_silos(d, 4)
    fit = nf.EP(conjugate).run(jax.random.key(0), silos, progress_bar=False)
    mean, sd = closed_form(silos)
    np.testing.assert_allclose((fit.normal().mean - mean) / sd, 0, atol=0.02)
    np.testing.assert_allclose(fit.normal().sds / sd, 1, atol=0.005)


@pytest.mark.merge
def test_gradients_on_few_points_give_what_many_points_give():
    """A logistic regression of few rows, skewed: importance sampling on 4,096 points beside 128 with gradients."""
    silos = logistic_silos(4, 3, 20)
    few, many = (
        nf.EP(logistic, solver=solver).run(jax.random.key(0), silos, progress_bar=False).normal()
        for solver in (nf.solvers.Stein(num_points=128), nf.solvers.Importance(num_points=4096))
    )
    np.testing.assert_allclose((few.mean - many.mean) / many.sds, 0, atol=0.02)
    np.testing.assert_allclose(few.sds / many.sds, 1, atol=0.02)


def test_rounds_begin_at_laplaces_approximation():
    """The start's sites and the prior multiply to the normal at the posterior's mode, with its curvature there."""
    silos = logistic_silos(3, 4, 15)
    x, y = (np.concatenate([np.asarray(silos[name][k], float) for name in silos.names]) for k in "xy")
    z = np.zeros(3)
    for _ in range(20):
        p = 1 / (1 + np.exp(-x @ z))
        hessian = (x.T * p * (1 - p)) @ x + np.eye(3)
        z = z + np.linalg.solve(hessian, x.T @ (y - p) - z)
    cov = np.linalg.inv(hessian)
    still = nf.EP(logistic, damping=1e-9, tolerance=0).run(jax.random.key(0), silos, 1, progress_bar=False)
    assert still.history["start"].sum() > 1
    sds = np.sqrt(np.diag(cov))
    np.testing.assert_allclose((still.normal().mean - z) / sds, 0, atol=0.02)  # the search ends a little before
    np.testing.assert_allclose(still.normal().covariance, cov, atol=0.02 * np.max(cov))


@pytest.mark.merge
def test_where_there_is_no_mode_to_be_found_rounds_begin_at_the_prior():
    """A log density that is flat: the search for a maximum ends nowhere, and silos look for themselves."""

    def heavy(y=None):
        mu = numpyro.sample("mu", dist.StudentT(1.0, 0, 1))
        with numpyro.plate("rows", 4):
            numpyro.sample("y", dist.StudentT(1.0, mu, 0.01), obs=y)

    silos = nf.Silos({"a": dict(y=np.full(4, -3.0, np.float32)), "b": dict(y=np.full(4, 3.0, np.float32))})
    fit = nf.EP(heavy).run(jax.random.key(0), silos, 4, progress_bar=False)
    assert np.all(np.isfinite(fit.normal().mean)), "whatever was found, it is a posterior"
