"""The affine map to coordinates x, Newton's method in them, and Stein's identity: each against dense algebra."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_fed.normal import affine, stein
from numpyro_fed.normal.families import Family, Natural
from numpyro_fed.normal.newton import advance, derivatives, find_mode, floored_inverse_root, newton_step, start_search

DIAGONAL, FULL = Family("diagonal"), Family("full")

pytestmark = pytest.mark.usefixtures("strict_ranks", "x64")
D = 4


def positive(seed=0):
    root = np.random.default_rng(seed).normal(size=(D, D))
    return jnp.asarray(root @ root.T + 0.3 * np.eye(D))


@pytest.fixture
def at():
    return affine.Coordinates(jnp.arange(D) / 2.0, jnp.linalg.cholesky(positive()))


# --- the map ----------------------------------------------------------------------------------------------------------


def test_a_factor_pulled_back_is_the_factor_but_for_a_constant(at):
    factor = Natural(positive(1), jnp.ones(D))
    quadratic = affine.pull_back(at, factor)
    log_factor = lambda z: factor.shift @ z - 0.5 * z @ factor.precision @ z
    for seed in range(3):
        x = jax.random.normal(jax.random.key(seed), (D,))
        gained = log_factor(affine.to_z(at, x)) - log_factor(at.mean)
        np.testing.assert_allclose(quadratic(x), gained, rtol=1e-10)
    back = affine.factor_from(at, quadratic.precision, quadratic.shift)
    for a, b in zip(back, factor, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


def test_maps_compose(at):
    mean, root = jnp.linspace(-1.0, 1.0, D), jnp.linalg.cholesky(positive(2))
    x = jax.random.normal(jax.random.key(0), (7, D))
    inner = affine.Coordinates(mean, root)
    np.testing.assert_allclose(
        affine.to_z(affine.compose(at, mean, root), x), affine.to_z(at, affine.to_z(inner, x)), rtol=1e-12, atol=1e-12
    )


def test_a_diagonal_root_is_the_same_map_as_its_matrix():
    mean, sds = jnp.arange(D) - 1.0, jnp.linspace(0.5, 2.0, D)
    thin, dense = affine.Coordinates(mean, sds), affine.Coordinates(mean, jnp.diag(sds))
    factor, x = Natural(jnp.linspace(1.0, 3.0, D), jnp.ones(D)), jax.random.normal(jax.random.key(0), (D,))
    np.testing.assert_allclose(affine.to_z(thin, x), affine.to_z(dense, x), rtol=1e-12)
    np.testing.assert_allclose(
        affine.pull_back(thin, factor)(x), affine.pull_back(dense, DIAGONAL.dense(factor))(x), rtol=1e-12
    )
    other = affine.compose(thin, x, sds), affine.compose(dense, x, jnp.diag(sds))
    np.testing.assert_allclose(jnp.diag(other[0].root), other[1].root, rtol=1e-12)
    for a, b in zip(*(affine.to_family(DIAGONAL, one) for one in (thin, dense)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_coordinates_of_a_normal_and_back():
    q = FULL.project(jnp.arange(D) * 1.0, positive())
    turned = affine.coordinates(FULL, q)
    turned = turned._replace(root=turned.root @ jnp.linalg.qr(positive(3))[0])
    lower = affine.with_lower_root(turned)
    np.testing.assert_allclose(lower.root, jnp.linalg.cholesky(positive()), rtol=1e-9, atol=1e-12)
    for a, b in zip(affine.natural(lower), q, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)


# --- Newton's method --------------------------------------------------------------------------------------------------


def test_an_undamped_step_on_a_normal_density_ends_at_its_mode():
    precision, mode = positive(), jnp.arange(D) * 1.0
    gradient = precision @ mode  # at zero
    np.testing.assert_allclose(newton_step(gradient, precision, 0.0), mode, rtol=1e-10, atol=1e-10)


def test_every_step_is_uphill_where_curvatures_are_negative():
    gradient = jnp.ones(D)
    assert gradient @ newton_step(gradient, -positive(), 0.1) > 0


def test_a_refused_trial_is_damped_and_nothing_else_changes():
    search, accepted = advance(start_search(jnp.zeros(D)), jnp.array(0.0), jnp.ones(D), positive(), 0.0)
    assert accepted
    for bad in (-1.0, np.nan, -np.inf):
        after, better = advance(search, jnp.array(bad), jnp.ones(D), positive(1), 0.5)
        assert not better and np.isinf(after.gain)
        assert after.damping > search.damping
        for name in ("x", "value", "gradient", "precision"):
            np.testing.assert_array_equal(getattr(after, name), getattr(search, name))
        assert jnp.linalg.norm(after.trial - after.x) < jnp.linalg.norm(search.trial - search.x)
    assert advance(search, jnp.array(-0.4), jnp.ones(D), positive(1), 0.5)[1], "within the slack"


def test_a_mode_is_found_from_far_away():
    """A logistic likelihood's curvature vanishes far out, where plain Newton steps would overshoot."""
    x = jax.random.normal(jax.random.key(0), (50, D))
    y = jax.random.bernoulli(jax.random.key(1), 0.4, (50,))

    def density(z):
        logits = x @ z
        return jnp.sum(jnp.where(y, logits, 0.0) - jnp.logaddexp(logits, 0.0)) - 0.5 * z @ z

    mode = find_mode(lambda z, _: derivatives(density, z), jnp.full(D, 8.0))
    assert mode.converged and mode.searched
    _, gradient, precision = derivatives(density, mode.x)
    assert 0.5 * gradient @ jnp.linalg.solve(precision, gradient) < 1e-6, "a thousandth of an sd"


def test_without_a_step_nothing_is_looked_at():
    mode = find_mode(lambda z, count: (*derivatives(jnp.sum, z), count + 1), jnp.zeros(D), jnp.array(0), limit=0)
    assert not mode.searched and mode.carried == 0


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_the_inverse_root_has_no_unit(unit):
    precision = positive() * unit
    root = floored_inverse_root(precision, 1e-3)
    np.testing.assert_allclose(root @ root.T @ precision, np.eye(D), atol=1e-9)


def test_what_is_flat_is_floored():
    precision = jnp.diag(jnp.array([4.0, 1.0, 0.0, -1.0]))
    root = floored_inverse_root(precision, 1e-3, jnp.max(jnp.abs(precision)))
    np.testing.assert_allclose(jnp.diagonal(root @ root.T), [1 / 4, 1.0, 1 / 4e-3, 1.0], rtol=1e-9)


# --- Stein's identity -------------------------------------------------------------------------------------------------


def test_moments_of_a_normal_are_exact_whatever_the_draws():
    draws = jax.random.normal(jax.random.key(0), (3 * D, D)) @ positive()
    precision, mean = positive(1), jnp.arange(D) * 1.0
    gradients = (draws - mean[None]) @ precision
    sample_precision = jnp.linalg.inv(jnp.cov(draws.T))
    np.testing.assert_allclose(stein.corrected(sample_precision, draws, gradients), precision, rtol=1e-8, atol=1e-8)
    vector = sample_precision @ jnp.ones(D)
    np.testing.assert_allclose(stein.corrected(vector, draws, gradients), precision @ jnp.ones(D), rtol=1e-8)


def test_corrected_moments_of_a_normal_are_exact_whatever_the_draws():
    """Far off, of another covariance, and hardly more than there are dimensions."""
    draws = jax.random.normal(jax.random.key(0), (D + 2, D)) @ positive() + 5.0
    precision, mean = positive(1), jnp.arange(D) * 1.0
    found, cov = stein.moments(draws, (draws - mean[None]) @ precision)
    # rounding, times the condition number of six draws in four dimensions
    np.testing.assert_allclose(found, mean, atol=1e-6)
    np.testing.assert_allclose(cov, jnp.linalg.inv(precision), atol=1e-6)


def test_corrected_moments_have_no_unit():
    """An affine map of the draws maps the moments."""
    draws, root = jax.random.normal(jax.random.key(0), (50, D)), jnp.linalg.cholesky(positive(2))
    gradients = jnp.sinh(draws)
    mean, cov = stein.moments(draws, gradients)
    moved_mean, moved_cov = stein.moments(draws @ root.T + 10.0, jnp.linalg.solve(root.T, gradients.T).T)
    np.testing.assert_allclose(moved_mean, root @ mean + 10.0, rtol=1e-8)
    np.testing.assert_allclose(moved_cov, root @ cov @ root.T, rtol=1e-8, atol=1e-8)


def test_corrected_moments_have_less_error_than_the_draws_own():
    """Logarithms of exponentials, as skewed as a likelihood of one event: 40 sets of 400 draws in three dimensions."""
    centre, variance = -np.euler_gamma, np.pi**2 / 6
    errors = {"corrected": [], "plain": []}
    for key in jax.random.split(jax.random.key(0), 40):
        x = jnp.log(jax.random.exponential(key, (400, 3)))
        mean, cov = stein.moments(x, jnp.exp(x) - 1.0)  # minus the gradient of x - exp(x)
        errors["corrected"].append(np.append((mean - centre) ** 2, (jnp.diagonal(cov) - variance) ** 2))
        errors["plain"].append(np.append((x.mean(0) - centre) ** 2, (x.var(0) - variance) ** 2))
    corrected, plain = (np.mean(errors[name], axis=0).reshape(2, 3).mean(axis=1) for name in ("corrected", "plain"))
    # gradients explain 1 / Var(x) = .61 of the mean's variance; 120 errors each know theirs to 13 %, and are paired
    assert corrected[0] < 0.55 * plain[0] and corrected[1] < 0.9 * plain[1], (corrected, plain)


def test_too_few_draws_are_refused():
    with pytest.raises(ValueError, match="5 draws do not determine moments in 4 dimensions: draw at least 6"):
        stein.moments(jnp.zeros((5, 4)), jnp.zeros((5, 4)))
