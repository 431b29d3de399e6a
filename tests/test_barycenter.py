"""Wasserstein barycenters: closed forms, the equation they solve, and covariances that break square roots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ott.geometry.costs import Bures
from tiers import tiers

from numpyro_fed.normal.barycenter import barycenter, diagonal_barycenter, w2, w2_diagonal

pytestmark = pytest.mark.usefixtures("strict_ranks")

ROUNDING = {jnp.float32: 1e-5, jnp.float64: 1e-9}  # errors of a converged iteration, relative to the sds


def random_covariance(rng, d, condition=1e3):
    """A random SPD matrix with random eigenvectors."""
    vectors, _ = np.linalg.qr(rng.normal(size=(d, d)))
    return (vectors * condition ** rng.uniform(size=d)) @ vectors.T


def random_normals(seed, num, d, condition=1e3):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num, d)), np.stack([random_covariance(rng, d, condition) for _ in range(num)])


def root(covariance):
    """The symmetric square root, in numpy."""
    values, vectors = np.linalg.eigh(covariance)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def residual(covariance, covariances, weights):
    """How far eq. 15 is from holding, as the paper writes it, in float64."""
    covariance = np.asarray(covariance, np.float64)
    half = root(covariance)
    right = sum(w * root(half @ one @ half) for w, one in zip(weights, covariances, strict=True))
    return np.linalg.norm(covariance - right) / np.linalg.norm(covariance)


def error(found, expected):
    """The largest error of a covariance's element, relative to the sds."""
    sds = np.sqrt(np.diagonal(expected))
    return np.max(np.abs(np.asarray(found, np.float64) - expected) / (sds[:, None] * sds))


def solve(means, covariances, weights=None, dtype=jnp.float64):
    """Compiled once per shape: most tests have four normals of six dimensions."""
    weights = np.ones(len(means)) if weights is None else weights
    return jax.jit(barycenter)(*(jnp.asarray(value, dtype) for value in (means, covariances, weights)))


# --- the equation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-4), (jnp.float64, 1e-6)])
@pytest.mark.parametrize("d", tiers([2, 10, 50, 200], 2, 50, others=pytest.mark.merge))
def test_solves_the_papers_equation(x64, d, dtype, tolerance):
    means, covariances = random_normals(d, num := 2 if d == 200 else 5, d)
    weights = np.arange(1.0, num + 1) / np.sum(np.arange(num + 1))
    found = solve(means, covariances, weights, dtype)
    assert found.covariance.dtype == found.residual.dtype == dtype
    np.testing.assert_allclose(found.mean, weights @ means, rtol=1e-5 if dtype == jnp.float32 else 1e-12, atol=1e-6)
    assert float(found.residual) < tolerance
    # The residual that is returned is the paper's, up to the rounding of either.
    assert residual(found.covariance, covariances, weights) < tolerance
    assert abs(float(found.residual) - residual(found.covariance, covariances, weights)) < tolerance / 10


def test_float32_is_the_default():
    means, covariances = (jnp.asarray(value, jnp.float32) for value in random_normals(0, 4, 6))
    found = jax.jit(barycenter)(means, covariances)
    assert found.covariance.dtype == jnp.float32 and float(found.residual) < 1e-4
    np.testing.assert_allclose(found.mean, np.mean(means, axis=0), rtol=1e-5)  # weights are equal by default


@pytest.mark.parametrize("d", [2, 50])
def test_agrees_with_ott(x64, d):
    """ott does not look at its tolerance but at min_iterations; its square roots are good to 1e-6."""
    means, covariances = random_normals(d, 5, d, condition=100)
    weights = jnp.array([0.1, 0.2, 0.3, 0.2, 0.2])
    points = jnp.concatenate([jnp.asarray(means), jnp.asarray(covariances).reshape(5, -1)], axis=1)
    theirs, _ = jax.jit(lambda w, x: Bures(d).barycenter(w, x, min_iterations=30, max_iterations=30))(weights, points)
    ours = solve(means, covariances, weights)
    np.testing.assert_allclose(ours.mean, theirs[:d], rtol=1e-10, atol=1e-12)
    assert error(ours.covariance, np.asarray(theirs[d:]).reshape(d, d)) < 1e-5


def test_minimises_the_sum_of_squared_distances(x64):
    """No step in a random direction goes downhill; the second-order increase is seen, so the test can fail."""
    means, covariances = random_normals(3, 4, 6, condition=50)
    weights = np.array([0.4, 0.3, 0.2, 0.1])
    found = solve(means, covariances, weights)

    @jax.jit
    def objective(mean, covariance):
        each = jax.vmap(lambda m, c: w2(mean, covariance, m, c) ** 2)(jnp.asarray(means), jnp.asarray(covariances))
        return jnp.asarray(weights) @ each

    least = float(objective(found.mean, found.covariance))
    rng = np.random.default_rng(4)
    for _ in range(20):
        direction = rng.normal(size=(6, 6))
        push = np.eye(6) + 1e-3 * (direction + direction.T)  # keeps the covariance positive definite
        assert float(objective(found.mean, push @ found.covariance @ push.T)) > least + 1e-8
        assert float(objective(found.mean + 1e-3 * rng.normal(size=6), found.covariance)) > least + 1e-8


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_one_dimension_averages_sds(x64, dtype):
    sds, weights = np.array([0.5, 1.0, 4.0]), np.array([2.0, 1.0, 1.0])
    found = solve(np.array([[0.0], [1.0], [3.0]]), sds[:, None, None] ** 2, weights, dtype)
    np.testing.assert_allclose(found.covariance, [[(weights @ sds / 4) ** 2]], rtol=ROUNDING[dtype])
    np.testing.assert_allclose(found.mean, [1.0], rtol=ROUNDING[dtype])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_diagonal_closed_form_is_the_full_one_on_diagonal_covariances(x64, dtype):
    rng = np.random.default_rng(5)
    means, sds, weights = rng.normal(size=(4, 6)), 10 ** rng.uniform(-3, 2, (4, 6)), rng.uniform(size=4)
    full = solve(means, np.stack([np.diag(row**2) for row in sds]), weights, dtype)
    cast = lambda value: jnp.asarray(value, dtype)
    closed = diagonal_barycenter(cast(means), cast(sds), cast(weights))
    np.testing.assert_allclose(closed.mean, full.mean, rtol=ROUNDING[dtype])
    np.testing.assert_allclose(closed.sds, np.sqrt(np.diagonal(full.covariance)), rtol=ROUNDING[dtype])
    np.testing.assert_allclose(closed.sds, weights @ sds / np.sum(weights), rtol=ROUNDING[dtype])
    assert np.array_equal(full.covariance, np.diag(np.diagonal(full.covariance)))
    assert float(closed.residual) == 0


def test_commuting_covariances_average_their_roots(x64):
    rng = np.random.default_rng(6)
    vectors, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    sds = rng.uniform(0.1, 10, (4, 6))
    found = solve(np.zeros((4, 6)), np.stack([(vectors * row**2) @ vectors.T for row in sds]))
    assert error(found.covariance, (vectors * np.mean(sds, axis=0) ** 2) @ vectors.T) < 1e-9


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("num", [1, 4])
def test_of_identical_normals_is_that_normal(x64, num, dtype):
    means, covariances = random_normals(7, 1, 6)
    found = solve(np.repeat(means, num, axis=0), np.repeat(covariances, num, axis=0), None, dtype)
    np.testing.assert_allclose(found.mean, means[0], rtol=1e-5)
    assert error(found.covariance, covariances[0]) < ROUNDING[dtype]
    assert float(found.residual) < ROUNDING[dtype]


# --- invariances and weights ------------------------------------------------------------------------------------------


def test_rotates_with_the_normals_and_does_not_see_the_order_of_silos(x64):
    means, covariances = random_normals(8, 4, 6)
    weights = np.array([0.3, 0.1, 0.2, 0.4])
    found = solve(means, covariances, weights)
    turn, _ = np.linalg.qr(np.random.default_rng(9).normal(size=(6, 6)))
    turned = solve(means @ turn.T, turn @ covariances @ turn.T, weights)
    np.testing.assert_allclose(turned.mean, turn @ found.mean, atol=1e-12)
    assert error(turned.covariance, turn @ np.asarray(found.covariance) @ turn.T) < 1e-9
    order = np.array([3, 0, 2, 1])
    other = solve(means[order], covariances[order], weights[order])
    assert error(other.covariance, np.asarray(found.covariance)) < 1e-9


def test_weights_are_relative_and_zero_leaves_a_silo_out(x64):
    means, covariances = random_normals(10, 4, 6)
    weights = np.array([1.0, 0.0, 2.0, 1.0])
    found = solve(means, covariances, weights)
    scaled = solve(means, covariances, 7 * weights)
    without = solve(means[[0, 2, 3]], covariances[[0, 2, 3]], weights[[0, 2, 3]])
    doubled = solve(means[[0, 2, 2, 3]], covariances[[0, 2, 2, 3]])
    for other in (scaled, without, doubled):
        np.testing.assert_allclose(other.mean, found.mean, rtol=1e-9, atol=1e-12)
        assert error(other.covariance, np.asarray(found.covariance)) < 1e-9


def test_vmaps_inside_a_compiled_loop():
    """As SFVI-Avg uses it; a batch waits for its slowest member, which must not disturb the others."""
    means, covariances = (jnp.asarray(value, jnp.float32) for value in random_normals(11, 12, 6))
    means, covariances = means.reshape(3, 4, 6), covariances.reshape(3, 4, 6, 6)

    @jax.jit
    def rounds(covariances):
        def body(carry, _):
            found = jax.vmap(barycenter)(means, carry)
            return 0.5 * (carry + found.covariance[:, None]), found

        return jax.lax.scan(body, covariances, None, length=3)[1]

    batch = rounds(covariances)
    for i in range(3):
        one = solve(means[i], covariances[i], None, jnp.float32)
        assert error(batch.covariance[0, i], np.asarray(one.covariance, np.float64)) < ROUNDING[jnp.float32]
    assert np.all(batch.residual < 1e-4)


# --- covariances that break square roots ------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [10, 50])
def test_small_sds_beside_large_ones_keep_their_digits(x64, d):
    """sds from 1e-3 to 1e2, correlated: in float32 a variance of 1e-6 is far below the rounding of one of 1e4."""
    rng = np.random.default_rng(12)
    scale, covariances = 10 ** rng.uniform(-3, 2, d), []
    for _ in range(5):
        factor = rng.normal(size=(d, 2 * d))
        sds = scale * np.exp(0.3 * rng.normal(size=d)) / np.linalg.norm(factor, axis=1)
        covariances.append(sds[:, None] * (factor @ factor.T) * sds)
    means, covariances = np.zeros((5, d)), np.stack(covariances)
    exact = solve(means, covariances)
    assert float(exact.residual) < 1e-10
    # A draw of the barycenter is the average of draws of the silos' normals, so no sd is above the average of theirs.
    marginal = np.mean(np.sqrt(np.diagonal(covariances, axis1=1, axis2=2)), axis=0)
    ratio = np.sqrt(np.diagonal(exact.covariance)) / marginal
    assert np.all((0.5 < ratio) & (ratio <= 1 + 1e-9))
    assert error(solve(means, covariances, None, jnp.float32).covariance, np.asarray(exact.covariance)) < 1e-4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_coordinate_without_variance(x64, dtype):
    """In one silo its sd counts as zero; in all, it stays zero and the other coordinates do not notice."""
    means, covariances = random_normals(13, 4, 6)
    covariances[:, 2, :] = covariances[:, :, 2] = 0
    found = solve(means, covariances, None, dtype)
    assert not np.any(found.covariance[2]) and not np.any(found.covariance[:, 2])
    covariances[0, 2, 2] = 16.0
    other = solve(means, covariances, None, dtype)
    np.testing.assert_allclose(other.covariance[2, 2], 1.0, rtol=ROUNDING[dtype])  # ((4 + 0 + 0 + 0) / 4)^2
    keep = np.ix_([0, 1, 3, 4, 5], [0, 1, 3, 4, 5])
    assert error(found.covariance[keep], np.asarray(other.covariance[keep], np.float64)) < ROUNDING[dtype]
    assert max(float(found.residual), float(other.residual)) < ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_a_common_null_space_stays_null(x64, dtype):
    rng = np.random.default_rng(14)
    turn, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    covariances = np.zeros((4, 6, 6))
    covariances[:, :4, :4] = [random_covariance(rng, 4, 100) for _ in range(4)]
    within = np.asarray(solve(np.zeros((4, 6)), covariances, None, dtype).covariance, np.float64)
    found = solve(np.zeros((4, 6)), turn @ covariances @ turn.T, None, dtype)
    covariance = turn.T @ np.asarray(found.covariance, np.float64) @ turn
    # The inputs themselves are null there only up to rounding, whose root is what an sd shows.
    spread = np.sqrt(np.max(np.abs(covariance[4:, 4:])))
    assert spread < 10 * np.sqrt(jnp.finfo(dtype).eps) * np.sqrt(np.trace(covariance))
    assert error(covariance[:4, :4], within[:4, :4]) < 10 * ROUNDING[dtype]
    assert not np.any(within[4:]) and float(found.residual) < 10 * ROUNDING[dtype]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_singular_covariances_of_different_null_spaces(x64, dtype):
    """With one covariance of full rank the barycenter is unique, and the limit of that of nearly singular ones."""
    rng = np.random.default_rng(15)
    factors = rng.normal(size=(3, 6, 3))
    covariances = np.concatenate([factors @ np.swapaxes(factors, 1, 2), np.eye(6)[None]])
    found = solve(np.zeros((4, 6)), covariances, None, dtype)
    assert np.all(np.isfinite(found.covariance)) and float(found.residual) < 1e-5
    near = solve(np.zeros((4, 6)), covariances + 1e-12 * np.eye(6))
    tolerance = 10 * np.sqrt(jnp.finfo(dtype).eps) + 1e-5  # an eigenvalue of zero is rounded; 1e-6 sds are added above
    assert error(found.covariance, np.asarray(near.covariance)) < tolerance


def test_points_on_two_lines(x64):
    """Two normals on lines with an acute angle: the optimal plan pairs x = t b_1 with y = t b_2, so (b_1 + b_2) / 2."""
    lines = np.array([[1.0, 0.0], [2.0, 1.0]])
    found = solve(np.zeros((2, 2)), np.einsum("ki,kj->kij", lines, lines))
    centre = np.mean(lines, axis=0)
    np.testing.assert_allclose(found.covariance, np.outer(centre, centre), atol=1e-8)


def test_of_points_is_a_point():
    means = np.arange(24.0).reshape(4, 6)
    found = solve(means, np.zeros((4, 6, 6)), None, jnp.float32)
    assert not np.any(found.covariance) and float(found.residual) == 0
    np.testing.assert_allclose(found.mean, np.mean(means, axis=0))


# --- distances --------------------------------------------------------------------------------------------------------


def test_distances_of_closed_forms(x64):
    rng, distance = np.random.default_rng(16), jax.jit(w2)
    (a, b), (sds_a, sds_b) = rng.normal(size=(2, 5)), rng.uniform(0.1, 3, (2, 5))
    expected = np.sqrt(np.sum((a - b) ** 2) + np.sum((sds_a - sds_b) ** 2))
    np.testing.assert_allclose(distance(a, np.diag(sds_a**2), b, np.diag(sds_b**2)), expected, rtol=1e-12)
    np.testing.assert_allclose(w2_diagonal(a, sds_a, b, sds_b), expected, rtol=1e-12)
    _, (one, two) = random_normals(17, 2, 5)
    textbook = np.trace(one + two - 2 * root(root(one) @ two @ root(one)))
    np.testing.assert_allclose(distance(a, one, a, two) ** 2, textbook, rtol=1e-9)
    mean_square = np.sum((a - b) ** 2) + np.trace(one)  # of the distance between a point and a normal's draw
    np.testing.assert_allclose(distance(a, one, b, np.zeros((5, 5))) ** 2, mean_square, rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_distances_are_a_metric(x64, dtype):
    """To the root of the rounding: squares of distances are what is computed to full precision."""
    means, covariances = random_normals(18, 6, 20)
    covariances[0, 4, :] = covariances[0, :, 4] = 0
    between = jax.vmap(jax.vmap(w2, (None, None, 0, 0)), (0, 0, None, None))
    args = (jnp.asarray(value, dtype) for value in (means, covariances, means, covariances))
    distance = np.asarray(jax.jit(between)(*args), np.float64)
    slack = 10 * np.sqrt(jnp.finfo(dtype).eps) * np.sqrt(np.max(np.trace(covariances, axis1=1, axis2=2)))
    assert np.max(np.diagonal(distance)) < slack < 0.1 * np.min(distance[~np.eye(6, dtype=bool)])
    np.testing.assert_allclose(distance, distance.T, atol=slack)
    detour = np.min(distance[:, :, None] + distance[None, :, :], axis=1)
    assert np.all(distance <= detour + slack)
