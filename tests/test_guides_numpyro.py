"""Encoders, AutoGuides and guide functions: densities that belong to their draws, posteriors that are right."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import nnx
from jax.example_libraries import stax
from numpyro.distributions import constraints
from numpyro.infer.autoguide import (
    AutoDelta,
    AutoIAFNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed import optim
from numpyro_fed.data.padding import silo_data
from numpyro_fed.guides import Amortized, StructuredNormal
from numpyro_fed.guides.function import as_guide
from numpyro_fed.model.build import split_model


def positive(y):
    """Constrained globals, one in a plate of its own."""
    rate = numpyro.sample("rate", dist.LogNormal(0.0, 1.0))
    with numpyro.plate("items", 2):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.array([2.0, 3.0, 4.0])))
    with numpyro.plate("rows", y.shape[0]):
        a = numpyro.sample("a", dist.Gamma(2.0, rate))
        numpyro.sample("y", dist.Normal(a * level.sum() + weights[0], 1.0), obs=y)


SILOS = nf.Silos([dict(y=np.arange(n, dtype="f") / 3) for n in (3, 5)])
FACTORIES = {
    "AutoNormal": lambda model: AutoNormal(model, init_scale=0.9),
    "AutoMultivariateNormal": lambda model: AutoMultivariateNormal(model, init_scale=0.9),
    "AutoLowRankMultivariateNormal": lambda model: AutoLowRankMultivariateNormal(model, init_scale=0.9, rank=2),
    "AutoIAFNormal": lambda model: AutoIAFNormal(model, num_flows=1, hidden_dims=[5, 5]),
}


def positive_guide(y):
    loc = numpyro.param("loc", jnp.array(0.1))
    scale = numpyro.param("scale", jnp.array(1.1), constraint=constraints.positive)
    numpyro.sample("rate", dist.LogNormal(loc, scale))
    with numpyro.plate("items", 2):
        numpyro.sample("level", dist.Normal(numpyro.param("levels", jnp.zeros(2)), 1.1))
    numpyro.sample("weights", dist.Dirichlet(jnp.array([2.0, 2.5, 3.5])))
    shape = numpyro.param("shape", jnp.array(2.0), constraint=constraints.positive)
    with numpyro.plate("rows", y.shape[0]):
        rates = numpyro.param("rates", jnp.ones(y.shape[0]), constraint=constraints.positive)
        numpyro.sample("a", dist.Gamma(shape, rates))


@pytest.mark.parametrize("name", tiers([*FACTORIES, "function"], "function"))
def test_densities_of_globals_belong_to_their_draws(name):
    """E_q[p / q] = 1 for the prior p, which is normalised: each Jacobian counts once. Within 4.5 standard errors."""
    split = split_model(positive, SILOS, check=False)
    guide = GUIDE if name == "function" else StructuredNormal(global_guide=FACTORIES[name])
    bound = as_guide(guide).bind(split)
    params, base = bound.start_global(jax.random.key(0), split)

    def ratio(key):
        z, log_q = bound.rsample_with_log_prob(params, base, bound.noise(key, split.dim))
        return jnp.exp(split.log_prior(z, {}) - log_q)

    ratios = np.asarray(jax.jit(jax.vmap(ratio))(jax.random.split(jax.random.key(1), 20_000)))
    assert abs(ratios.mean() - 1) < 4.5 * ratios.std() / len(ratios) ** 0.5
    assert ratios.std() < 20


GUIDE = positive_guide


@pytest.mark.slow
def test_densities_of_locals_belong_to_their_draws(x64):
    """A guide function's local sites, row by row, against the density written out; padded rows count nothing."""
    silos = nf.Silos([dict(y=np.arange(n) / 3.0) for n in (3, 5)])
    split = split_model(positive, silos, check=False)
    data = silo_data(silos, "0", split.spec, split.partition.axes, {"rows": 5})
    bound = as_guide(positive_guide).bind(split)
    assert bound.at_silo == ("rates",) and bound.sent == ("shape",)
    assert set(bound.at_server) == {"loc", "scale", "levels", "shape"}
    server, base = bound.start_global(jax.random.key(0), split)
    local, _ = bound.start_local(jax.random.key(0), split, data)
    local = {"rates": local["rates"] + jnp.arange(5) / 10}
    z = jnp.arange(split.dim) / 10.0
    drawn, log_q = bound.draw_with_density(
        jax.random.key(2), split, local, (), z, bound.context(server, base), {}, data
    )
    u = drawn["rows"][:, 0]
    expected = dist.Gamma(2.0, jnp.exp(local["rates"])).log_prob(jnp.exp(u)) + u
    np.testing.assert_allclose(log_q["rows"], jnp.where(data.mask["rows"], expected, 0.0), rtol=1e-8)


# --- posteriors -----------------------------------------------------------------------------------------------------


def groups(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 3.0))
    with numpyro.plate("rows", y.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(a, 0.5), obs=y)


def conjugate():
    rng = np.random.default_rng(0)
    silos = nf.Silos([dict(y=rng.normal(2.0, 1.1, n).astype("f")) for n in (20, 30)])
    y = np.concatenate([silos[name]["y"] for name in silos.names])
    precision = 1 / 9 + len(y) / 1.25
    return silos, y.sum() / 1.25 / precision, precision**-0.5


def check(fit, mean, sd, shift=0.1, ratio=0.1):
    draws = np.asarray(fit.sample(jax.random.key(9), 4000)["mu"])  # a Monte Carlo error of 0.016 sd, 1.1 % of the sd
    assert abs(draws.mean() - mean) < shift * sd
    assert abs(draws.std() / sd - 1) < ratio


@pytest.mark.slow
@pytest.mark.merge
def test_auto_guides_find_the_posterior():
    silos, mean, sd = conjugate()
    guide = StructuredNormal(global_guide=AutoMultivariateNormal)
    fit = nf.SFVI(groups, guide=guide, importance_samples=1).run(jax.random.key(0), silos, 3000, progress_bar=False)
    check(fit, mean, sd)
    assert fit.sample_local(jax.random.key(0), 5, silo="1")["a"].shape == (5, 30)


@pytest.mark.slow
def test_flows_find_the_posterior():
    """Two correlated coefficients, no locals; means within 0.1 sd, sds within 10 %."""

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, 0.5), obs=y)

    rng = np.random.default_rng(0)
    x = (rng.normal(size=(20, 2)) @ np.array([[1.0, 0.7], [0.0, 0.7]])).astype("f")
    y = (x @ np.array([1.0, 2.0]) + 0.5 * rng.normal(size=20)).astype("f")
    silos = nf.Silos([dict(x=x[:8], y=y[:8]), dict(x=x[8:], y=y[8:])])
    guide = StructuredNormal(global_guide=lambda model: AutoIAFNormal(model, num_flows=1, hidden_dims=[8, 8]))
    fit = nf.SFVI(model, guide=guide).run(jax.random.key(0), silos, 4000, progress_bar=False)
    covariance = np.linalg.inv(np.eye(2) / 9 + x.T @ x / 0.25)
    sd = np.sqrt(np.diag(covariance))
    draws = np.asarray(fit.sample(jax.random.key(9), 4000)["beta"])
    np.testing.assert_array_less(np.abs(draws.mean(axis=0) - covariance @ x.T @ y / 0.25), 0.1 * sd)
    np.testing.assert_allclose(draws.std(axis=0), sd, rtol=0.1)


@pytest.mark.slow
def test_auto_delta_is_the_mode():
    """As in NumPyro, of the constrained density: a LogNormal-like posterior of one positive global, by hand."""

    def model(y):
        rate = numpyro.sample("rate", dist.Gamma(3.0, 2.0))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    silos = nf.Silos([dict(y=np.array([1, 4, 2])), dict(y=np.array([3, 0]))])
    guide = StructuredNormal(global_guide=AutoDelta)
    fit = nf.SFVI(model, guide=guide).run(jax.random.key(0), silos, 1500, progress_bar=False)
    mode = (3 + 10 - 1) / (2 + 5)  # of Gamma(3 + sum y, 2 + n)
    np.testing.assert_allclose(fit.sample(jax.random.key(0), 2)["rate"], mode, rtol=1e-3)


def test_auto_instance_without_locals():
    """An AutoGuide that was built on the pooled model works where nothing lives in the silos."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 3.0))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    silos, *_ = conjugate()
    y = np.concatenate([silos[name]["y"] for name in silos.names])
    fit = nf.SFVI(model, guide=AutoNormal(model)).run(jax.random.key(0), silos, 2000, progress_bar=False)
    precision = 1 / 9 + len(y)
    check(fit, y.sum() / precision, precision**-0.5)


def groups_guide(y):
    """The exact family: a row's mean given mu is linear in the row's y and in mu."""
    loc, scale = numpyro.param("loc", 0.0), numpyro.param("scale", 0.3, constraint=constraints.positive)
    mu = numpyro.sample("mu", dist.Normal(loc, scale))
    slope, pull = numpyro.param("slope", 0.5), numpyro.param("pull", 0.5)
    with numpyro.plate("rows", y.shape[0]):
        own = numpyro.param("own", lambda key: jnp.zeros(y.shape[0]))
        width = numpyro.param("width", jnp.full(y.shape[0], 0.3), constraint=constraints.positive)
        numpyro.sample("a", dist.Normal(slope * y + pull * mu + own, width))


@pytest.mark.slow
def test_guide_functions_find_the_posterior():
    silos, mean, sd = conjugate()
    fit = nf.SFVI(groups, guide=groups_guide, importance_samples=1).run(
        jax.random.key(0), silos, 4000, progress_bar=False
    )
    check(fit, mean, sd)
    a = np.asarray(fit.sample_local(jax.random.key(0), 2000, silo="0")["a"])
    expected = (silos["0"]["y"] * 4 + mean) / 5
    np.testing.assert_allclose(a.mean(axis=0), expected, atol=0.06)
    np.testing.assert_allclose(a.std(axis=0), (1 / 5 + (sd / 5) ** 2) ** 0.5, rtol=0.15)


@pytest.fixture(scope="module")
def amortised():
    """A linear encoder that sees y and mu: the exact family. It can take longer steps than a network."""
    silos, mean, sd = conjugate()
    guide = Amortized(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), inputs="y", use_globals=True)
    method = nf.SFVI(groups, guide=guide, importance_samples=1, silo_optim=optim.DEFAULT)
    return method.run(jax.random.key(0), silos, 5000, progress_bar=False), mean, sd


@pytest.mark.slow
def test_encoders_find_the_posterior(amortised):
    check(*amortised, shift=0.05, ratio=0.05)


@pytest.mark.merge
def test_encoders_know_units_that_nobody_has_seen(amortised):
    """Latents of new units by their closed form, given mu: (4 y + mu) / 5, sd 1 / sqrt(5); no fitting."""
    fit, mean, sd = amortised
    y = np.array([-1.0, 2.0, 6.0], "f")
    draws = fit.sample_local(jax.random.key(0), 4000, data=dict(y=y))
    np.testing.assert_allclose(draws["a"].mean(axis=0), (4 * y + mean) / 5, atol=0.05)
    np.testing.assert_allclose(draws["a"].std(axis=0), (1 / 5 + (sd / 5) ** 2) ** 0.5, rtol=0.05)
    np.testing.assert_array_equal(draws["mu"], fit.sample(jax.random.key(0), 4000)["mu"])
    again = fit.predict(jax.random.key(0), dict(y=y), num_samples=4000)["y"]
    np.testing.assert_allclose(again.mean(axis=0), (4 * y + mean) / 5, atol=0.05)
    np.testing.assert_allclose(again.std(axis=0), (1 / 5 + (sd / 5) ** 2 + 0.25) ** 0.5, rtol=0.05)
    own = fit.predict(jax.random.key(0), silo="1", num_samples=50)["y"]
    assert own.shape == (50, 30)


@pytest.mark.merge
def test_only_encoders_know_new_units(amortised):
    silos, *_ = conjugate()
    plain = nf.SFVI(groups, importance_samples=1).run(jax.random.key(0), silos, 2, progress_bar=False)
    with pytest.raises(ValueError, match=r"nf.guides.Amortized.*another guide.*from their prior"):
        plain.sample_local(jax.random.key(0), 5, data=dict(y=np.ones(2, "f")))
    with pytest.raises(TypeError, match="needs a silo, silo='york', or the data of new units"):
        amortised[0].sample_local(jax.random.key(0), 5)


def test_encoders_are_saved_without_data(amortised, tmp_path):
    fit, *_ = amortised
    path = fit.save(tmp_path / "fit")
    again = nf.load(path, nf.SFVI(groups, guide=fit.posterior.family))
    y = np.array([-1.0, 2.0], "f")
    one, other = (f.sample_local(jax.random.key(0), 5, data=dict(y=y))["a"] for f in (fit, again))
    np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="need the silos' data"):
        again.sample_local(jax.random.key(0), 5, silo="0")


@pytest.mark.merge
@pytest.mark.parametrize("kind", ["pair", "stax"])
def test_any_pair_is_an_encoder(kind):
    """With minibatches and averaging, too: the weights are the server's, and nothing stays in a silo."""
    silos, *_ = conjugate()
    pair = (
        (lambda key, x: {"w": jnp.zeros((x.shape[0], 2))}, lambda w, x: x @ w["w"])
        if kind == "pair"
        else stax.serial(stax.Dense(4), stax.Tanh, stax.Dense(2))
    )
    guide = Amortized(pair)
    method = nf.SFVI if kind == "pair" else nf.SFVIAvg
    fit = method(groups, guide=guide, batch_size=8, importance_samples=5).run(
        jax.random.key(0), silos, 20, progress_bar=False
    )
    assert np.all(np.isfinite(fit.history["loss"]))
    state, _ = fit.state.silo("0")
    assert not jax.tree.leaves(getattr(state, "local", state).params)
    first = guide.bind(fit.split).init_context(jax.random.key(0), fit.split)
    size = lambda tree: np.sum([np.sum(np.square(v)) for v in jax.tree.leaves(tree)])
    start, end = size(first), size(fit.state.server.params["encoder"])
    assert start != end


# --- errors ---------------------------------------------------------------------------------------------------------


def run(**settings):
    return nf.SFVI(groups, **settings).run(jax.random.key(0), conjugate()[0], 2, progress_bar=False)


def without_a(y):
    numpyro.sample("mu", dist.Normal(numpyro.param("m", 0.0), 1.0))


def with_b(y):
    groups_guide(y)
    numpyro.sample("b", dist.Normal(0.0, 1.0))


def no_plate(y):
    numpyro.sample("mu", dist.Normal(0.0, 1.0))
    numpyro.sample("a", dist.Normal(0.0, 1.0))


def peeks(y):
    numpyro.sample("mu", dist.Normal(y.mean(), 1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("a", dist.Normal(0.0, 1.0))


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.linear = nnx.BatchNorm(1, rngs=rngs), nnx.Linear(1, 2, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.norm(x))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            dict(guide=AutoNormal),
            r"is the class AutoNormal: write guide=nf.guides.StructuredNormal\(global_gui",
        ),
        (
            dict(guide=AutoNormal(groups)),
            r"but a live in the silos.*Write guide=nf.guides.StructuredNormal\(glob",
        ),
        (dict(guide=without_a), r"lacks the latent site 'a' of the model: add numpyro.sample\('a', ...\). It has mu"),
        (dict(guide=with_b), r"samples 'b', which is no latent site of the model \(mu, a\)"),
        (dict(guide=no_plate), r"site 'a' needs numpyro.plate\('rows', ...\) around it in the guide"),
        (dict(guide=peeks), r"site 'mu' is global but depends on the silo's own 'y'"),
        (dict(guide=groups_guide, batch_size=5), r"a guide function does not tell. Use nf.guides.StructuredNormal"),
    ],
)
def test_bad_guides(settings, words):
    with pytest.raises((TypeError, ValueError), match=words):
        run(**settings)


def shared_guide(y):
    """No parameter belongs to a row: minibatches are fine."""
    numpyro.sample("mu", dist.Normal(numpyro.param("m", 0.0), 0.2))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("a", dist.Normal(numpyro.param("slope", 0.5) * y, 0.3))


def test_guide_functions_take_minibatches_where_no_row_has_parameters():
    fit = run(guide=shared_guide, batch_size=5)
    assert np.all(np.isfinite(fit.history["loss"]))


def test_bad_encoders():
    with pytest.raises(ValueError, match=r"output of shape \(3,\) where \(2,\) is needed: a mean and a log-scale"):
        run(guide=Amortized(nnx.Linear(1, 3, rngs=nnx.Rngs(0))))
    with pytest.raises(ValueError, match="inputs= names 'x', but the arguments with a row for each of 'rows' are y"):
        run(guide=Amortized(nnx.Linear(1, 2, rngs=nnx.Rngs(0)), inputs=["x"]))
    with pytest.raises(ValueError, match="the encoder cannot read a row of 1 numbers"):
        run(guide=Amortized(nnx.Linear(3, 2, rngs=nnx.Rngs(0))))
    with pytest.raises(TypeError, match=r"has state besides its weights \(BatchStat\)"):
        Amortized(Normed(nnx.Rngs(0)))
    with pytest.raises(TypeError, match=r"encoder is the class Linear: make it, as in Linear\(..., rngs="):
        Amortized(nnx.Linear)
    with pytest.raises(TypeError, match=r"pass the class, global_guide=AutoNormal"):
        StructuredNormal(global_guide=AutoNormal(groups))
