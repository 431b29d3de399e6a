"""SFVI-Avg and Independent: against SFVI, closed forms, and the average written out."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from programs import compiled
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed.keys import fold_in_name, identity
from numpyro_fed.normal.barycenter import barycenter, w2


def groups(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 3.0))
    with numpyro.plate("rows", y.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(a, 0.5), obs=y)


def regression(x, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
    drift = numpyro.param("drift", jnp.array(0.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta + drift, 0.7), obs=y)


def regression_silos(sizes, slope=0.0, seed=0):
    """Silos whose slopes differ by ``slope``."""
    rng = np.random.default_rng(seed)
    data = []
    for i, n in enumerate(sizes):
        x = rng.normal(size=(n, 2)) @ np.array([[1.0, 0.5], [0.0, 0.6]])
        y = x @ np.array([1.0 + i * slope, -0.5]) + 0.7 * rng.normal(size=n)
        data.append(dict(x=x.astype("f"), y=y.astype("f")))
    return nf.Silos(data)


def exact(silos, powers=None):
    """Mean and covariance of beta, each silo's likelihood to a power (prior N(0, 10^2), no drift)."""
    precision, shift = np.eye(2) / 100, np.zeros(2)
    for name, power in zip(silos.names, powers or [1.0] * silos.num_silos, strict=True):
        x, y = (silos[name][k].astype(float) for k in ("x", "y"))
        precision, shift = precision + power * x.T @ x / 0.49, shift + power * x.T @ y / 0.49
    return np.linalg.solve(precision, shift), np.linalg.inv(precision)


def plain(x, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 0.7), obs=y)


def posterior(fit):
    return np.asarray(fit.normal().mean), fit.normal().covariance


# --- what a round does ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("weights", tiers(["equal", "size"], "size"))
def test_a_round_is_local_steps_and_a_barycenter(x64, weights):
    """One round against SFVI run in each silo by itself, whose bound is scaled by handlers.scale, and the average."""
    rng = np.random.default_rng(1)
    sizes = (6, 4)
    silos = nf.Silos([dict(x=rng.normal(size=(n, 2)), y=rng.normal(size=n)) for n in sizes])
    settings = dict(optim=optax.adam(0.05), start_rounds=0)
    method = nf.SFVIAvg(regression, local_steps=7, weights=weights, **settings)
    fit = method.run(jax.random.key(3), silos, 1, progress_bar=False)
    made = compiled(method, silos)
    stack = made.stack
    begin, _ = nf.engines.Vmap().start(made.algorithm, jax.random.key(3), stack)
    own = compiled(nf.SFVI(regression, **settings), silos).algorithm
    found = []
    for name, n in zip(silos.names, sizes, strict=True):
        server = begin._replace(opt_state=optax.adam(0.05).init((begin.params, begin.theta)))
        state = own.init_silo(jax.random.key(0), own.broadcast(jax.random.key(0), server), stack.data(name))
        key = fold_in_name(jax.random.fold_in(jax.random.key(3), 0), identity(name))
        for step in jax.random.split(key, 7):
            at_server, in_silo = jax.random.split(step)
            message, state = own.silo_step(in_silo, own.broadcast(at_server, server), state, stack.data(name))
            scaled = jax.tree.map(lambda leaf, n=n: sum(sizes) / n * leaf, message)
            server, _ = own.server_step(at_server, server, scaled)
        found.append(server)
    share = np.array(sizes) / sum(sizes) if weights == "size" else np.full(2, 0.5)
    guide = method.family
    means = jnp.stack([s.params["loc"] for s in found])
    covariances = jnp.stack([guide.covariance(s.params, s.base) for s in found])  # the base is the identity
    expected = barycenter(means, covariances, jnp.asarray(share))
    mean, covariance = posterior(fit)
    np.testing.assert_allclose(mean, expected.mean, atol=1e-10)
    np.testing.assert_allclose(covariance, expected.covariance, atol=1e-10)
    drift = sum(w * s.theta["drift"] for w, s in zip(share, found, strict=True))
    np.testing.assert_allclose(fit.params["drift"], drift, atol=1e-10)
    distance = [w2(m, c, expected.mean, expected.covariance) for m, c in zip(means, covariances, strict=True)]
    np.testing.assert_allclose(fit.history["disagreement"][-1], distance, atol=1e-8)
    assert fit.history["residual"][-1] < 1e-6


@pytest.mark.slow
def test_whole_scaling_is_a_power_of_the_likelihood(x64):
    """With locals, one silo's target is p(z_G) p(y_j | z_G)^(N / N_j): the locals are integrated, then powered."""
    rng = np.random.default_rng(0)
    silos = nf.Silos([dict(y=rng.normal(1.0, 1.1, n)) for n in (12, 24)])
    fit = nf.SFVIAvg(groups, local_steps=3000, weights="equal").run(jax.random.key(0), silos, 1, progress_bar=False)
    means, sds = [], []
    for name in silos.names:
        y = silos[name]["y"]
        precision = 1 / 9 + 36 / 1.25
        means.append(36 * y.mean() / 1.25 / precision)
        sds.append(precision**-0.5)
    mean, covariance = posterior(fit)
    assert abs(mean[0] - np.mean(means)) < 0.03 * sds[0]
    assert abs(covariance[0, 0] ** 0.5 / np.mean(sds) - 1) < 0.03


# --- where it goes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cov", tiers(["full", "diagonal"], "full"))
def test_homogeneous_silos_reach_the_exact_posterior(cov):
    """Equal silos of the same population, default settings: means within 0.05 sd, sds within 2 % of the exact ones."""
    silos = regression_silos((200, 200, 200))
    guide = nf.guides.StructuredNormal(global_cov=cov)
    fit = nf.SFVIAvg(plain, guide=guide).run(jax.random.key(0), silos, progress_bar=False)
    mean, covariance = exact(silos)
    sd = np.sqrt(np.diag(covariance)) if cov == "full" else 1 / np.sqrt(np.diag(np.linalg.inv(covariance)))
    ours, our_covariance = posterior(fit)
    np.testing.assert_array_less(np.abs(ours - mean), 0.05 * np.sqrt(np.diag(covariance)))
    np.testing.assert_allclose(np.sqrt(np.diag(our_covariance)), sd, rtol=0.02)


def test_silos_that_disagree_are_seen():
    """Slopes 1 apart are told by distances of many sds, in which homogeneous silos are a few apart."""
    alike = nf.SFVIAvg(plain).run(jax.random.key(0), regression_silos((200,) * 3), 10, progress_bar=False)
    apart = nf.SFVIAvg(plain).run(jax.random.key(0), regression_silos((200,) * 3, slope=1.0), 10, progress_bar=False)
    far = lambda fit: np.nanmax(fit.history["disagreement"])
    assert far(apart) > 3 and far(alike) < 3
    assert far(apart) > 1.5 * far(alike)
    assert fit_columns(apart) >= {"loss", "residual", "disagreement", "bytes_up", "bytes_down"}


def fit_columns(fit):
    return set(fit.history)


@pytest.mark.slow
def test_warm_start_and_back():
    """SFVI from an averaged fit starts at its q, and SFVIAvg from SFVI's; both know theta and the locals."""
    rng = np.random.default_rng(0)
    silos = nf.Silos([dict(y=rng.normal(1.0, 1.1, n).astype("f")) for n in (12, 24)])
    average = nf.SFVIAvg(groups, local_steps=50).run(jax.random.key(0), silos, 10, progress_bar=False)
    together = nf.SFVI(groups, optim=optax.sgd(1e-9)).run(
        jax.random.key(1), silos, 1, init_state=average, progress_bar=False
    )
    again = nf.SFVIAvg(groups, local_steps=1, optim=optax.sgd(1e-9)).run(
        jax.random.key(2), silos, 1, init_state=together, progress_bar=False
    )
    for fit in (together, again):
        for a, b in zip(posterior(fit), posterior(average), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4)
        ours = fit.sample_local(jax.random.key(5), 50, silo="1")["a"]
        np.testing.assert_allclose(ours, average.sample_local(jax.random.key(5), 50, silo="1")["a"], atol=1e-3)
    assert abs(together.elbo(num_samples=200) - average.elbo(num_samples=200)) < 0.05


@pytest.mark.slow
def test_a_last_round_that_diverges_is_told():
    """The loss is that of the round's beginning, so what the last round leaves is looked at by itself."""
    silos = regression_silos((20, 30))
    with pytest.raises(nf.NonFiniteError) as told:
        nf.SFVIAvg(plain, local_steps=50, optim=optax.sgd(1e3)).run(jax.random.key(0), silos, 1, progress_bar=False)
    assert np.all(np.isfinite(posterior(told.value.fit)[0]))


@pytest.mark.slow
def test_absent_silos_count_their_own_steps():
    """With one silo of three a round, a silo's steps fall over a third of all rounds."""
    silos = regression_silos((20, 30, 40))
    fit = nf.SFVIAvg(plain, local_steps=5).run(
        jax.random.key(0), silos, 6, schedule=nf.schedules.sampled(1), progress_bar=False
    )
    horizon = fit.state.silo("0")[0].opt_state[1].horizon
    assert int(horizon) == 10
    assert np.all(np.sum(np.isfinite(fit.history["disagreement"][-6:]), axis=1) == 1), "of the one that was asked"


def test_crossed_rows_are_counted_once():
    def crossed(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", y.shape[0], dim=-2), numpyro.plate("items", 4, dim=-1):
            numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)

    silos = nf.Silos([dict(y=np.ones((n, 4), "f")) for n in (3, 6)])
    assert nf.SFVIAvg(crossed).prepare(silos).survey.sizes == (12, 24)


@pytest.mark.slow
def test_one_silo_has_nothing_to_average():
    with pytest.warns(UserWarning, match="one silo, so there is nothing to average"):
        nf.SFVIAvg(groups).run(jax.random.key(0), nf.Silos([dict(y=np.ones(3, "f"))]), 1, progress_bar=False)


# --- each silo alone ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_independent_silos_have_their_own_posteriors():
    """Each against its closed form; mean within 0.02 sd, sd within 2 %. Nothing is sent."""
    silos = regression_silos((30, 60, 45), slope=0.5)
    fits = nf.Independent(plain).run(jax.random.key(0), silos, 3000, progress_bar=False)
    assert list(fits) == list(silos.names)
    for i, name in enumerate(silos.names):
        mean, covariance = exact(silos, [float(j == i) for j in range(3)])
        sd = np.sqrt(np.diag(covariance))
        ours, our_covariance = posterior(fits[name])
        np.testing.assert_array_less(np.abs(ours - mean), 0.02 * sd)
        np.testing.assert_allclose(np.sqrt(np.diag(our_covariance)), sd, rtol=0.02)
        assert fits[name].history["bytes_up"].sum() == 0
    table = nf.compare(dict(fits), reference=fits["1"]).table
    assert set(table["method"]) == set(silos.names)


@pytest.mark.slow
def test_independent_fits_are_ordinary_fits(tmp_path):
    rng = np.random.default_rng(0)
    silos = nf.Silos({n: dict(y=rng.normal(1.0, 1.1, k).astype("f")) for n, k in (("york", 5), ("leeds", 9))})
    fits = nf.Independent(groups, importance_samples=1).run(jax.random.key(0), silos, 20, progress_bar=False)
    fit = fits["york"]
    assert fit.sample_local(jax.random.key(0), 10, silo="york")["a"].shape == (10, 5)
    assert fit.predict(jax.random.key(0), silo="york", num_samples=3)["y"].shape == (3, 5)
    assert set(fit.summary().index) == {"mu"}
    assert abs(fit.elbo(num_samples=20) + fit.history["loss"][-5:].mean()) < 2  # of five rows, padded as in the run
    again = nf.load(fit.save(tmp_path / "york"), nf.SFVI(groups, importance_samples=1))
    np.testing.assert_array_equal(again.sample(jax.random.key(1), 5)["mu"], fit.sample(jax.random.key(1), 5)["mu"])
    with pytest.raises(KeyError, match="no silo is named 'hull'; the silos are 'york', 'leeds'"):
        fits["hull"]
    with pytest.raises(ValueError, match="takes no init_state"):
        nf.Independent(groups).run(jax.random.key(0), silos, 2, init_state=fit)
    assert repr(fits) == "Fits of 2 silos, each alone: york, leeds"
