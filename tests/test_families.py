"""Normal families in natural parameters, and what the server does with sites."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_fed.normal import sites, trust
from numpyro_fed.normal.families import Family, Natural, as_family, power, product, quotient
from numpyro_fed.precision import to_user_dtype

pytestmark = pytest.mark.usefixtures("strict_ranks")

FULL = Family("full")
FAMILIES = {kind: Family(kind) for kind in ("full", "diagonal", "identity")}


def covariance(d=4, seed=0):
    root = np.random.default_rng(seed).normal(size=(d, d))
    return root @ root.T + 0.3 * np.eye(d)


@pytest.fixture(params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


def test_moments_come_back(family):
    mean, cov = np.arange(4.0), covariance()
    q = family.project(mean, cov)
    kept = {"full": cov, "diagonal": np.diag(cov), "identity": np.full(4, np.mean(np.diag(cov)))}[family.kind]
    np.testing.assert_allclose(family.mean(q), mean, atol=1e-12)
    np.testing.assert_allclose(family.covariance(q), kept, rtol=1e-12)
    np.testing.assert_allclose(family.sds(q) ** 2, np.diag(kept) if kept.ndim == 2 else kept, rtol=1e-12)
    assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(q)), "in a float32 program, too"


def test_what_is_sent_says_it_all_with_half_a_matrix(family):
    q = family.project(np.arange(4.0), covariance())
    sent = family.pack(q)
    assert sent.precision.size == {"full": 10, "diagonal": 4, "identity": 1}[family.kind]
    for a, b in zip(family.unpack(sent), q, strict=True):
        np.testing.assert_array_equal(a, b)


def test_products_are_sums(family):
    a, b = (family.project(np.full(4, float(s)), covariance(seed=s)) for s in (1, 2))
    both = product(a, b)
    for x, y in zip(quotient(both, b), a, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    for x, y in zip(power(a, 2.0), product(a, a), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12)
    dense = [np.asarray(family.dense(f).precision) for f in (a, b)]
    expected = np.linalg.solve(sum(dense), np.asarray(a.shift) + np.asarray(b.shift))
    np.testing.assert_allclose(family.mean(both), expected, rtol=1e-10)


def test_divergence_is_that_of_the_dense_normals(family):
    a, b = (family.project(np.full(4, float(s)), covariance(seed=s)) for s in (1, 2))
    (ma, mb), (pa, pb) = [family.mean(f) for f in (a, b)], [np.asarray(family.dense(f).precision) for f in (a, b)]
    ca, shift = np.linalg.inv(pa), np.asarray(mb - ma)
    expected = 0.5 * (np.trace(pb @ ca) + shift @ pb @ shift - 4 + np.log(np.linalg.det(pa) / np.linalg.det(pb)))
    np.testing.assert_allclose(family.kl(a, b), expected, rtol=1e-10)
    np.testing.assert_allclose(family.kl(a, a), 0.0, atol=1e-12)


def test_the_normaliser_is_the_integral():
    q = FULL.project(np.array([0.7]), np.array([[0.5]]))
    grid = np.linspace(-12, 12, 20_001)
    values = np.exp(float(q.shift[0]) * grid - 0.5 * float(q.precision[0, 0]) * grid**2)
    np.testing.assert_allclose(FULL.log_normaliser(q), np.log(np.trapezoid(values, grid)), rtol=1e-10)


def test_draws_have_the_moments(family):
    q = family.project(np.arange(4.0), covariance())
    draws = np.asarray(jax.vmap(lambda key: family.sample(key, q))(jax.random.split(jax.random.key(0), 40_000)))
    kept = np.asarray(family.covariance(q))
    sds = np.sqrt(np.diag(kept) if kept.ndim == 2 else kept)
    assert draws.dtype == np.float32
    np.testing.assert_allclose(draws.mean(axis=0) / sds, np.arange(4.0) / sds, atol=4 / np.sqrt(40_000))
    expected = kept if kept.ndim == 2 else np.diag(kept)
    # a covariance of 40,000 draws has an error of at most sqrt(2 / n) sds squared: four of them
    error = (np.cov(draws.T) - expected) / np.outer(sds, sds)
    assert np.max(np.abs(error)) < 4 * np.sqrt(2 / 40_000)


def test_only_distributions_are_proper(family):
    q = family.project(np.zeros(4), covariance())
    bad = [family.flat(4), power(q, -1.0), Natural(q.precision, np.full(4, np.nan))]
    assert bool(family.proper(q))
    assert not any(bool(family.proper(f)) for f in bad)


def test_nearly_singular_is_not_proper():
    direction = np.ones((3, 3)) / 3
    assert not FULL.proper(Natural(jnp.asarray(direction), jnp.zeros(3)))
    assert not FULL.proper(Natural(jnp.asarray(np.diag([1.0, 1.0, -1e-3])), jnp.zeros(3)))


def test_badly_conditioned_posteriors_keep_their_mean_in_a_float32_program():
    """In float32 the same algebra is wrong by many sds, silently."""
    vectors = np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))[0]
    cov = (vectors * np.logspace(-4, 4, 5)) @ vectors.T
    mean = np.random.default_rng(1).normal(size=5) * 10
    first = FULL.project(mean, cov)
    q = product(first, FULL.project(np.zeros(5), 1e6 * np.eye(5)))
    back = quotient(q, FULL.project(np.zeros(5), 1e6 * np.eye(5)))
    white = np.linalg.solve(np.linalg.cholesky(cov), np.asarray(FULL.mean(back)) - mean)
    assert np.max(np.abs(white)) < 1e-6
    assert to_user_dtype(q).precision.dtype == jnp.float32


def test_families_have_names():
    assert as_family("full") is not None
    assert as_family(FULL) is FULL
    with pytest.raises(ValueError, match="'full', 'diagonal' or 'identity', got 'banded'"):
        as_family("banded")


# --- sites ------------------------------------------------------------------------------------------------------------


def changes_of(seeds, scale):
    """Random symmetric changes, stacked; large ones leave no posterior proper."""
    out = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        raw = rng.normal(size=(3, 3)) * scale
        out.append(Natural(raw + raw.T, rng.normal(size=3)))
    with jax.enable_x64(True):
        return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *out)


@jax.jit
def _accept(q, changes, ok):
    return trust.steps_within(FULL, q, changes, jnp.ones(ok.shape[0]), ok)


def accept(q, changes, ok):
    with jax.enable_x64(True):
        return np.asarray(_accept(q, changes, ok))


def total(q, changes, steps):
    moved = sites.scaled(changes, steps)
    return product(q, jax.tree.map(lambda leaf: np.sum(np.asarray(leaf), axis=0), moved))


@pytest.mark.merge
@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
def test_whatever_is_proposed_the_posterior_stays_proper(scale):
    q = FULL.project(np.zeros(3), np.eye(3))
    for seed in range(20):
        changes = changes_of(range(seed * 8, seed * 8 + 8), scale)
        steps = accept(q, changes, jnp.ones(8, bool))
        assert bool(FULL.proper(total(q, changes, steps)))
        assert np.all(np.asarray(steps) <= 1)
        if scale == 0.02:
            np.testing.assert_array_equal(steps, 1.0)  # a proper sum is accepted as it is


def test_one_bad_message_does_not_cost_the_good_ones_everything():
    q = FULL.project(np.zeros(3), np.eye(3))
    good, bad = changes_of([0, 1, 2], 0.1), Natural(-1e6 * np.eye(3)[None], np.zeros((1, 3)))
    with jax.enable_x64(True):
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, jnp.asarray(b)]), good, bad)
    steps = np.asarray(accept(q, both, jnp.ones(4, bool)))
    assert steps[3] == 0, "its tenth halving is still improper: skipped"
    assert np.all(steps[:3] > 0.2)


def test_acceptance_does_not_depend_on_the_order_of_silos():
    q, changes = FULL.project(np.zeros(3), np.eye(3)), changes_of(range(6), 3.0)
    order = np.array([3, 1, 5, 0, 2, 4])
    turned = jax.tree.map(lambda leaf: leaf[order], changes)
    ones = jnp.ones(6, bool)
    np.testing.assert_allclose(np.asarray(accept(q, changes, ones))[order], accept(q, turned, ones), rtol=1e-12)


def test_what_a_silo_does_not_trust_is_left_out():
    q, changes = FULL.project(np.zeros(3), np.eye(3)), changes_of(range(3), 0.1)
    broken = Natural(np.where([[[False]], [[True]], [[False]]], np.nan, changes.precision), changes.shift)
    steps = np.asarray(accept(q, broken, jnp.array([True, False, True])))
    np.testing.assert_array_equal(steps, [1.0, 0.0, 1.0])


def test_movement_is_in_sds():
    a, b = FULL.project(np.zeros(2), np.diag([4.0, 1.0])), FULL.project(np.array([1.0, 0.0]), np.diag([4.0, 1.0]))
    moved = sites.movement(FULL.known(a), FULL.known(b))
    np.testing.assert_allclose(moved.shift, 0.5)
    np.testing.assert_allclose(moved.divergence, 0.25)
    np.testing.assert_allclose(moved.each, [0.5, 0, 0, 0], atol=1e-12)
    nowhere = sites.movement(FULL.known(FULL.flat(2)), FULL.known(b))
    assert np.isinf(nowhere.shift) and np.isinf(nowhere.divergence) and not np.any(nowhere.each)


@pytest.mark.parametrize("kind", ["full", "diagonal", "identity"])
def test_the_divergence_of_a_movement_is_kl_both_ways(kind):
    family, draws = Family(kind), np.random.default_rng(0)
    a, b = (family.project(draws.normal(size=3), np.cov(draws.normal(size=(3, 9)))) for _ in range(2))
    moved = sites.movement(family.known(a), family.known(b))
    np.testing.assert_allclose(moved.divergence, family.kl(a, b) + family.kl(b, a), rtol=1e-10)
    np.testing.assert_allclose(moved.each[3:], np.log(family.sds(b) / family.sds(a)), rtol=1e-10)
