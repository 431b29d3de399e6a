"""q(z_L | z_G) around a point and at one point are the same normal."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import MultivariateNormal

import numpyro_fed as nf
from numpyro_fed.data.padding import silo_data
from numpyro_fed.data.silos import at_silo
from numpyro_fed.local.conditional import LocalLaplace, fit_local_laplace, log_prob_spread, sample, spread
from numpyro_fed.local.integrate import choose, rows_of, silo_factor, start_frame
from numpyro_fed.model.build import split_model
from numpyro_fed.model.rows import components_of

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


def undefined(y):
    """Its value is fine, and its derivative nowhere defined."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(b + 0 * jnp.sqrt(jnp.abs(b - b)), 0.05), obs=y)


def test_rows_of_which_nothing_finite_is_known_are_not_made_up(x64):
    silos = nf.Silos({"leeds": dict(y=np.array([0.1, 0.2, 0.3]))})
    split = split_model(undefined, silos, check=False)
    data = silo_data(silos, "leeds", split.spec, split.partition.axes)
    frame = fit_local_laplace(split, jnp.zeros(1), {}, split.near_zero_local(data.mask), data, 4)
    assert all(np.all(np.isnan(root)) for root in frame.root.values())


def level(y, far):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    u = numpyro.sample("u", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu + u, 1), obs=y)
        numpyro.sample("far", dist.Normal(mu, 1), obs=far)


def alone(y):
    mu, s = numpyro.sample("mu", dist.Normal(0, 1)), numpyro.sample("s", dist.HalfNormal(1))
    u = numpyro.sample("u", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Logistic(mu + s * u[0] + u[1], 1), obs=y)


@pytest.mark.parametrize("model", [alone, level])
def test_locals_that_a_silo_has_once_need_no_index(model, x64):
    """The factor, its derivatives and the locals' moments are those of looking up whose each term is. Where a term
    does not depend on them it is kept apart: in float32 a large sum takes digits from what differs between nodes."""
    silos = nf.Silos(
        {
            name: dict.fromkeys(("y", "far")[: 1 + (model is level)], y)
            for name, y in dict(leeds=np.array([0.5, 2.0, -1.0]), york=np.array([1.0, 0.0])).items()
        }
    )
    split, survey, stack, _ = nf.EP(model, local=["u"]).prepare(silos)
    assert survey.rows == "indexed" and rows_of(split, survey) == ("indexed" if model is level else "single")
    z = jnp.linspace(-0.3, 0.4, split.dim)
    with at_silo("leeds"):
        data = stack.data("leeds")
    found = []
    for rows in ("indexed", "single"):
        marginal = choose(split, survey)._replace(num=7, rows=rows)
        factor = silo_factor(split, marginal, data, components_of(split, data))
        frame, nodes = factor.refit(z, start_frame(split, data), 20), factor.nodes(None)
        of_locals = factor.moments(z, frame, nodes)
        found.append((*factor.derivatives(z, frame, nodes), of_locals.loc["silo"], of_locals.root["silo"]))
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
