"""Shrunk moments: the dynamic programme against dense algebra, and laws of the estimators."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_fed.normal import moments

pytestmark = pytest.mark.usefixtures("strict_ranks")

RHOS = [0.0, 0.01, 1.0, "oas", "rblw"]


def draws_of(num, d, seed=0):
    """Correlated draws away from zero, whose scales differ by a factor of ten."""
    rng = np.random.default_rng(seed)
    mix = np.eye(d) + 0.3 * rng.normal(size=(d, d)) / np.sqrt(d)
    draws = 2 + rng.normal(size=(num, d)) @ mix * np.geomspace(0.1, 1.0, d)
    return jnp.asarray(draws, jnp.zeros(()).dtype), jnp.asarray(rng.normal(size=d), jnp.zeros(()).dtype)


def relative(a, b):
    return np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(b)


def dense(found):
    e, q, directions = (np.asarray(leaf) for leaf in found)
    return np.diag(e) + directions.T @ (q[:, None] * directions)


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("num, d", [(2, 1), (3, 7), (40, 7), (100, 2000)])
def test_the_dynamic_programme_is_the_direct_solve(num, d, rho):
    draws, theta = draws_of(num, d)
    assert relative(moments.delta(theta, draws, rho), moments.direct(theta, draws, rho)) < 1e-5


def test_without_shrinkage_it_is_the_sample_covariance(x64):
    draws, theta = draws_of(60, 5)
    plain = np.linalg.solve(np.cov(np.asarray(draws).T), np.asarray(theta - jnp.mean(draws, axis=0)))
    assert relative(moments.delta(theta, draws, math.inf), plain) < 1e-5


def test_rho_zero_is_the_identity(x64):
    draws, theta = draws_of(6, 4)
    np.testing.assert_allclose(moments.delta(theta, draws, 0.0), theta - jnp.mean(draws, axis=0), rtol=1e-12)


def test_any_time_the_programme_has_the_delta_of_the_draws_so_far(x64):
    draws, theta = draws_of(9, 5)
    now = moments.start(theta, 9)
    for t, draw in enumerate(draws, 1):
        now = moments.add(now, draw, 0.3)
        if t > 1:
            expected = moments.direct(theta, draws[:t], 0.3)
            assert relative(now.delta * (1 + (t - 1) * 0.3), expected) < 1e-12


@pytest.mark.parametrize("rho", [*RHOS, math.inf])
@pytest.mark.parametrize("num, d", [(4, 9), (40, 9)])
def test_precision_times_the_distance_is_delta(num, d, rho, x64):
    if rho == math.inf and num <= d:
        pytest.skip("needs more draws than dimensions")
    draws, theta = draws_of(num, d)
    shrunk = moments.shrinkage(draws, rho)
    found = dense(moments.precision(draws, shrunk))
    expected = moments.direct(theta, draws, rho)
    assert relative(found @ np.asarray(theta - jnp.mean(draws, axis=0)), expected) < 1e-6
    top = np.linalg.eigvalsh(found)[-1]
    bound = float(moments.largest(draws, shrunk))
    assert top * (1 - 1e-9) <= bound <= (1.3 if num <= d else 1 + 1e-9) * top


def test_shares_of_the_identity_by_hand():
    """Chen et al. 2010, equations (17) and (23), for S = diag(1, 3) and five draws."""
    trace, square = 4.0, 10.0
    assert float(moments.oas(trace, square, 5, 2)) == pytest.approx(min((0 * 10 + 16) / (5 * (10 - 8)), 1))
    assert float(moments.rblw(trace, square, 50, 2)) == pytest.approx((48 / 50 * 10 + 16) / (52 * (10 - 8)))


@pytest.mark.parametrize("rho", ["oas", "rblw"])
def test_more_draws_are_shrunk_less_and_the_estimate_comes_closer(rho):
    errors, shares = [], []
    for num in (10, 100, 1000):
        draws, _ = draws_of(num, 8)
        rng = np.random.default_rng(0)
        mix = np.eye(8) + 0.3 * rng.normal(size=(8, 8)) / np.sqrt(8)
        scales = np.geomspace(0.1, 1.0, 8)
        truth = np.linalg.inv(scales[:, None] * (mix.T @ mix) * scales)
        shrunk = moments.shrinkage(draws, rho)
        shares.append(1 - float(shrunk.a) * float(shrunk.c))
        errors.append(relative(dense(moments.precision(draws, shrunk)), truth))
    assert shares[0] > shares[1] > shares[2]
    assert errors[0] > errors[1] > errors[2]


def test_equal_draws_do_not_divide_by_zero():
    draws = jnp.ones((5, 3))
    for rho in RHOS:
        assert np.all(np.isfinite(moments.delta(jnp.ones(3), draws, rho)))


def test_gradients_make_delta_exact_where_the_density_is_normal(x64):
    """A x - b at the draws: whatever they are, Delta is the gradient at theta and the precision is A."""
    draws, theta = draws_of(30, 6)
    rng = np.random.default_rng(2)
    a = np.cov(rng.normal(size=(20, 6)).T)
    gradients = jnp.asarray((np.asarray(draws) - 0.7) @ a)
    shrunk = moments.shrinkage(draws, math.inf)
    plain = moments.delta(theta, draws, math.inf, shrunk)
    assert relative(moments.corrected(plain, draws, gradients, shrunk), a @ (np.asarray(theta) - 0.7)) < 1e-5
    assert relative(dense(moments.precision(draws, shrunk, gradients)), a) < 1e-5


def test_gradients_leave_the_limit_alone():
    """Of a normal with few draws: the corrected Delta is much nearer to the truth."""
    rng = np.random.default_rng(3)
    plain, better = [], []
    theta = jnp.asarray(rng.normal(size=4), jnp.float32)
    for _ in range(20):
        draws = jnp.asarray(rng.normal(size=(25, 4)), jnp.float32)
        shrunk = moments.shrinkage(draws, "oas")
        delta = moments.delta(theta, draws, "oas", shrunk)
        plain.append(np.asarray(delta) - np.asarray(theta))
        better.append(np.asarray(moments.corrected(delta, draws, draws, shrunk)) - np.asarray(theta))
    assert np.mean(np.square(better)) < 0.6 * np.mean(np.square(plain))  # most of it was shrunk away


@pytest.mark.parametrize("rho", [-1.0, "ledoit", True, None])
def test_other_rhos_are_explained(rho):
    with pytest.raises(ValueError, match="use 'oas' or 'rblw'"):
        moments.check_rho(rho)


def test_it_runs_for_many_silos_at_once(x64):
    draws, theta = draws_of(6, 5)
    both = jnp.stack([draws, draws + 1])
    found = jax.jit(jax.vmap(lambda x: moments.delta(theta, x, "oas")))(both)
    assert relative(found[0], moments.direct(theta, draws, "oas")) < 1e-5
