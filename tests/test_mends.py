"""Mistakes that must not come back: each was a wrong posterior, or a run that failed."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed import keys


def prevalence(y):
    """Logits are exactly zero where globals and locals are: NumPyro's gradient is wrong there."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("villages", y.shape[0]):
        numpyro.sample("y", dist.Binomial(1000, logits=mu), obs=y)


def villages(y):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("villages", y.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(0, spread))
        numpyro.sample("y", dist.Binomial(1000, logits=effect), obs=y)


def scalar_trials(effect, error):
    """One trial a silo, its numbers without rows: nothing pads."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    theta = numpyro.sample("theta", dist.Normal(mu, 1))
    numpyro.sample("effect", dist.Normal(theta, error), obs=effect)


def regression(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def regression_silos(num=20):
    draws = np.random.default_rng(0)
    x = [draws.normal(size=(num, 2)).astype("f") for _ in range(2)]
    return nf.Silos([dict(x=one, y=(one[:, 0] > 0).astype("i4")) for one in x])


def rare() -> nf.Silos:
    return nf.Silos([dict(y=np.array([5, 8, 3], "i4")), dict(y=np.array([6, 4], "i4"))])


def grid_posterior(log_density, grid):
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    mean = weight @ grid
    return mean, np.sqrt(weight @ (grid - mean) ** 2)


def test_logits_that_start_at_zero(x64):
    """EP used to stop at mu = 0, where NumPyro's gradient has the wrong sign; the posterior lies near -5."""
    fit = nf.EP(prevalence).run(jax.random.key(0), rare(), progress_bar=False)
    grid = np.linspace(-7, -4, 4001)
    total = 26
    mean, sd = grid_posterior(total * grid - 5000 * np.logaddexp(0, grid) - 0.5 * grid**2, grid)
    draws = np.asarray(fit.sample(jax.random.key(1), 4000)["mu"])
    assert abs(draws.mean() - mean) < 4 * sd / np.sqrt(4000) + 0.02 * sd
    assert abs(draws.std() / sd - 1) < 0.05


@pytest.mark.slow
def test_locals_that_start_at_zero():
    fit = nf.EP(villages).run(jax.random.key(0), rare(), progress_bar=False)
    rates = jax.nn.sigmoid(fit.sample_local(jax.random.key(1), 500, silo="0")["effect"])
    assert np.all(np.asarray(rates).mean(axis=0) < 0.03)  # 5, 8 and 3 of 1000


def test_where_searches_begin_no_two_locals_are_alike():
    from numpyro_fed.model.build import split_model

    split = split_model(villages, rare())
    few, many = (split.near_zero_local({"villages": jnp.ones(n, bool)})["villages"] for n in (3, 8))
    assert np.all(np.asarray(many) != 0) and len(np.unique(many)) == 8
    np.testing.assert_array_equal(few, many[:3])  # padding moves nobody


def test_a_posterior_that_still_moves_says_so(tmp_path):
    settings = dict(solver=nf.solvers.Importance(num_points=64))
    with pytest.warns(nf.VerdictWarning, match=r"still moves by .* sds a sweep.*init_state=fit.state"):
        fit = nf.EP(regression, **settings).run(jax.random.key(0), regression_silos(), 1, progress_bar=False)
    assert "verdict still moving: the posterior still moves by" in repr(fit) and "still moves" in fit._repr_html_()
    assert len(fit.reasons) == 1 and nf.load(fit.save(tmp_path / "fit"), nf.EP(regression)).reasons == fit.reasons
    fit = nf.EP(regression, **settings).run(jax.random.key(0), regression_silos(), 20, progress_bar=False)
    assert "verdict not checked" in repr(fit) and fit.reasons == ()


def test_nuts_where_nothing_pads():
    trials = [dict(effect=np.float32(e), error=np.float32(1)) for e in (1.0, 2.0, 0.0)]
    silos = nf.Silos([{name: np.asarray(value) for name, value in one.items()} for one in trials])
    ref = nf.nuts(
        scalar_trials, silos, local=["theta"], num_warmup=300, num_samples=500, num_chains=2, progress_bar=False
    )
    # theta integrates out: effect ~ N(mu, 2), so mu given three of them is normal
    variance = 1 / (1 / 25 + 3 / 2)
    draws = np.asarray(ref.get_samples()["mu"])
    assert abs(draws.mean() - variance * 3.0 / 2) < 0.15 and abs(draws.std() / np.sqrt(variance) - 1) < 0.15


def test_identities_have_64_bits_and_must_differ(monkeypatch):
    names = [str(i) for i in range(100_000)]
    assert len(np.unique(keys.identities(names), axis=0)) == 100_000
    same = lambda name: np.array([1, 2], np.uint32)
    monkeypatch.setattr(keys, "identity", same)
    with pytest.raises(ValueError, match=r"silos 'a' and 'b' would draw the same random numbers.*rename"):
        keys.identities(["a", "b"])
