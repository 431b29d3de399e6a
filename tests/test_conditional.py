"""q(z_L | z_G) around a point and at one point are the same normal."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions import MultivariateNormal

from numpyro_fed.local.conditional import LocalLaplace, log_prob_spread, sample, spread

ROWS = {"a": (4, 1), "b": (3, 2)}
D = 5


@pytest.fixture
def local(x64):
    draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
    loc = {g: draw(1, *shape) for g, shape in ROWS.items()}
    coupling = {g: draw(2, *shape, D) for g, shape in ROWS.items()}
    root = {g: jnp.tril(draw(3, *shape, shape[1]), -1) + 2 * jnp.eye(shape[1]) for g, shape in ROWS.items()}
    return LocalLaplace(draw(4, D), loc, coupling, root, jax.tree.map(jnp.ones_like, loc))


@pytest.fixture
def eps(x64):
    return {g: jax.random.normal(jax.random.key(7), shape) for g, shape in ROWS.items()}


@pytest.mark.merge
def test_both_give_the_same_draws_and_log_densities(local, eps):
    z = jnp.arange(D) / 3.0
    active = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, bool), eps)
    given = local.given(z)
    places, others = local.at(z, eps), sample(given, eps)
    log_q, other_log_q = local.log_prob(eps, active), log_prob_spread(given, spread(given, eps), active)
    for g in ROWS:
        np.testing.assert_allclose(places[g], others[g], rtol=1e-12, atol=1e-12)
        exact = MultivariateNormal(local.mean(z)[g], scale_tril=local.root[g]).log_prob(places[g])
        np.testing.assert_allclose(log_q[g], exact, rtol=1e-12)
        np.testing.assert_allclose(other_log_q[g], exact, rtol=1e-12)
        np.testing.assert_allclose(local.log_det()[g], np.linalg.slogdet(local.root[g])[1], rtol=1e-12)


def test_elements_left_out_have_no_density(local, eps):
    active = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, bool), eps)
    assert all(np.all(value == 0) for value in local.log_prob(eps, active).values())


def test_moments_of_standard_normals_change_nothing(local):
    zero = {g: jnp.zeros(shape) for g, shape in ROWS.items()}
    unit = {g: jnp.broadcast_to(jnp.eye(shape[1]), (*shape, shape[1])) for g, shape in ROWS.items()}
    same = local.with_moments(zero, unit)
    for g in ROWS:
        np.testing.assert_allclose(same.loc[g], local.loc[g], rtol=1e-12)
        np.testing.assert_allclose(same.root[g], local.root[g], rtol=1e-12)


def test_from_sds_keeps_them(local):
    sds = jax.tree.map(lambda leaf: 0.5 + leaf**2, local.loc)
    made = LocalLaplace.from_sds(local.centre, local.loc, sds, local.coupling)
    for g in ROWS:
        np.testing.assert_allclose(made.sds()[g], sds[g], rtol=1e-12)
        np.testing.assert_allclose(made.conditional_sds()[g], sds[g], rtol=1e-12)
