"""Guides: density and draws belong to the same normal, whatever the covariance's structure."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed.data.padding import silo_data
from numpyro_fed.guides import StructuredNormal
from numpyro_fed.local import conditional
from numpyro_fed.model.build import split_model

GLOBAL = [StructuredNormal(global_cov=cov) for cov in ("full", "diagonal", "low_rank")]
LOCAL = [
    StructuredNormal(local_cov=cov, coupling=coupling, scale_coupling=scale)
    for cov in ("block", "diagonal", "full")
    for coupling, scale in ((True, False), (False, False), (True, True))
]


def noisy(tree, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: leaf + jnp.asarray(rng.normal(scale=0.4, size=leaf.shape)), tree)


@pytest.mark.parametrize("guide", GLOBAL, ids=lambda guide: guide.global_cov)
def test_density_of_globals_is_that_of_the_draws(x64, guide):
    """A draw is linear in its standard normals: mean and covariance follow, and with them the density."""
    d = 4
    chol = jnp.tril(jnp.asarray(np.random.default_rng(1).normal(size=(d, d)))) + 2 * jnp.eye(d)
    params, base = guide.init_global(jnp.arange(4.0), chol, jnp.array([1.0, 2.0, 0.5, 3.0]))
    params = noisy(params)
    eps = guide.noise(jax.random.key(0), d)
    jacobian = jax.jacobian(lambda eps: guide.sample_global(params, base, eps))(eps)
    covariance, mean = jacobian @ jacobian.T, guide.sample_global(params, base, 0 * eps)
    np.testing.assert_allclose(guide.mean_global(params, base), mean, rtol=1e-12)
    np.testing.assert_allclose(guide.covariance(params, base), covariance, rtol=1e-10, atol=1e-12)
    z = guide.sample_global(params, base, eps)
    expected = dist.MultivariateNormal(mean, covariance).log_prob(z)
    np.testing.assert_allclose(guide.log_prob_global(params, base, z), expected, rtol=1e-10)


def growth(y):
    """Two latents a row, and one that the silo has once."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    site = numpyro.sample("site", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1.0).to_event(1))
        numpyro.sample("y", dist.Normal(b.sum(-1) + site, 1.0), obs=y)


@pytest.mark.parametrize(
    "guide", tiers(LOCAL, LOCAL[0]), ids=lambda g: f"{g.local_cov} {g.coupling} {g.scale_coupling}"
)
def test_density_of_locals_is_that_of_the_draws(x64, guide):
    """Given z_G, over the real rows; padded rows change neither draws nor density."""
    silos = nf.Silos([dict(y=np.arange(3.0)), dict(y=np.arange(5.0))])
    split = split_model(growth, silos, local=["site"], check=False)
    results = []
    for length in (3, 5):
        data = silo_data(silos, "0", split.spec, split.partition.axes, {"rows": length})
        zeros = split.zeros_local(data.mask)
        valid = {g.name: split.row_mask(g, data.mask) for g in split.groups}
        coupling = {g: jnp.zeros((*value.shape, 2)) for g, value in zeros.items()}
        ones = jax.tree.map(jnp.ones_like, zeros)
        params, base = guide.init_local(split.groups, zeros, ones, coupling, jnp.array([0.5, 2.0]), valid)
        flat = {name: value for name, value in params.items() if name != "tril"}
        rows = {g.name: np.flatnonzero(np.asarray(valid[g.name])) for g in split.groups}
        rng = np.random.default_rng(0)
        for group in flat:  # the same numbers in the real rows, whatever the padding
            for name, value in flat[group].items():
                values = jnp.asarray(rng.normal(scale=0.4, size=(len(rows[group]), *value.shape[1:])))
                flat[group][name] = value.at[rows[group]].set(values)
        if guide.local_cov == "full":
            sizes = {g: (value.shape, np.repeat(np.asarray(valid[g]), value.shape[1])) for g, value in zeros.items()}
            real = np.concatenate([sizes[g][1] for g in sorted(sizes)])
            noise = rng.normal(scale=0.4, size=(real.sum(), real.sum()))
            params["tril"] = params["tril"].at[np.ix_(real, real)].set(noise)
        z, mean = jnp.array([0.3, -1.0]), jnp.array([0.1, 0.2])
        eps = jax.tree.map(lambda leaf: leaf[0], conditional.draw_rows(jax.random.key(0), split, data.mask, 1))
        given = guide.condition(params, base, z, mean)
        off_mean = conditional.spread(given, eps)
        drawn = conditional.sample(given, eps)
        active = {g: jnp.broadcast_to(valid[g][:, None], drawn[g].shape) for g in drawn}
        log_q = sum(jnp.sum(v) for v in conditional.log_prob_spread(given, off_mean, active).values())

        def real_values(eps, given=given, rows=rows):
            draws = conditional.sample(given, eps)
            return jnp.concatenate([draws[g][rows[g]].reshape(-1) for g in sorted(draws)])

        flat_eps, unravel = jax.flatten_util.ravel_pytree(eps)
        jacobian = jax.jacobian(lambda flat, unravel=unravel: real_values(unravel(flat)))(flat_eps)
        centre = real_values(jax.tree.map(jnp.zeros_like, eps))
        expected = dist.MultivariateNormal(centre, jacobian @ jacobian.T).log_prob(real_values(eps))
        np.testing.assert_allclose(log_q, expected, rtol=1e-9)
        results.append((log_q, real_values(eps)))
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-12)
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-10)


def correlated(y):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(z[0] + z[1] + 0.5 * z[2], 1.0), obs=y)


@pytest.mark.parametrize("guide", GLOBAL, ids=lambda guide: guide.global_cov)
def test_each_family_finds_its_optimum(guide):
    """Full: the posterior. Diagonal: its mean with conditional sds, the known answer. Low rank: in between."""
    silos = nf.Silos([dict(y=np.full(n, 1.0, "f")) for n in (5, 8)])
    fit = nf.SFVI(correlated, guide=guide).run(jax.random.key(0), silos, 4000, progress_bar=False)
    x = np.array([1.0, 1.0, 0.5])
    precision = np.eye(3) + 13 * np.outer(x, x)
    covariance = np.linalg.inv(precision)
    server = fit.state.server
    sd = np.sqrt(np.diag(guide.covariance(server.params, server.base)))
    mean_field = 1 / np.sqrt(np.diag(precision))
    expected = {"full": np.sqrt(np.diag(covariance)), "diagonal": mean_field}.get(guide.global_cov)
    # where the family is not exact the gradient stays noisy: a tenth of a posterior sd
    gap = np.abs(guide.mean_global(server.params, server.base) - covariance @ (13 * x))
    np.testing.assert_array_less(gap, (0.01 if guide.global_cov == "full" else 0.1) * np.sqrt(np.diag(covariance)))
    if expected is not None:
        np.testing.assert_allclose(sd, expected, rtol=0.01 if guide.global_cov == "full" else 0.05)
    else:
        assert np.all(sd > mean_field * 0.99) and np.all(sd < np.sqrt(np.diag(covariance)) * 1.05)


def test_bad_guides():
    with pytest.raises(ValueError, match="global_cov is 'dense'; use one of 'full', 'diagonal', 'low_rank'"):
        StructuredNormal(global_cov="dense")
    with pytest.raises(ValueError, match="rank must be an int of at least 1, got 0"):
        StructuredNormal(rank=0)
