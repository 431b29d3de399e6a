"""nuts(): the pooled posterior, whatever the padding. Tolerances are multiples of the Monte Carlo standard error."""

import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from given import given_fit
from models import no_locals, regression
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS

from numpyro_fed.data.silos import Silos
from numpyro_fed.judge.compare import compare
from numpyro_fed.judge.effective import num_effective
from numpyro_fed.judge.nuts import _fixed_theta, _warn, nuts
from numpyro_fed.judge.pooled import start

SHORT = dict(num_warmup=300, num_samples=500, num_chains=2, progress_bar=False)


def standard_error(chains):
    """Of the mean of (chains, draws, ...)."""
    chains = np.asarray(chains, np.float64)
    return chains.std(axis=(0, 1)) / np.sqrt(effective_sample_size(chains))


def agrees(chains, mean, sd, errors=4.5):
    """Whether mean and variance of (chains, draws, ...) are the given ones, within Monte Carlo standard errors."""
    chains = np.asarray(chains, np.float64)
    square = (chains - mean) ** 2
    return np.all(np.abs(chains.mean(axis=(0, 1)) - mean) < errors * standard_error(chains)) and np.all(
        np.abs(square.mean(axis=(0, 1)) - sd**2) < errors * standard_error(square)
    )


def normal_groups(y):
    """mu ~ N(0, 10²), b_i ~ N(mu, 1), y_i1, y_i2 ~ N(b_i, 1): everything is Gaussian."""
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    numpyro.deterministic("twice", 2 * mu)
    with numpyro.plate("groups", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.deterministic("offset", b - mu)
        numpyro.sample("y", dist.Normal(b[:, None], 1).to_event(1), obs=y)


@pytest.fixture(scope="module")
def gaussian():
    """Two buckets, the first of them padded; posterior means and sds of mu and of each b in closed form."""
    rng = np.random.default_rng(0)
    sizes = {"a": 1, "b": 2, "big": 30, "c": 1, "d": 2, "e": 1}
    y = {name: (3 + rng.normal(size=(n, 1)) + rng.normal(size=(n, 2))).astype(np.float32) for name, n in sizes.items()}
    reference = nuts(
        normal_groups, Silos({name: dict(y=rows) for name, rows in y.items()}), rng_key=jax.random.key(3), **SHORT
    )
    # given mu, the mean of a group's two observations is N(mu, 1 + 1/2)
    means = np.concatenate([rows.mean(axis=1) for rows in y.values()])
    precision = 1 / 100 + len(means) / 1.5
    mu = (means.sum() / 1.5 / precision, precision**-0.5)
    # given mu and y, b is N((mu + 2 ybar) / 3, 1/3)
    b = {name: ((mu[0] + 2 * rows.mean(axis=1)) / 3, np.sqrt(1 / 3 + mu[1] ** 2 / 9)) for name, rows in y.items()}
    return reference, mu, b


def test_closed_form_of_a_ragged_gaussian_hierarchy(gaussian):
    reference, (mean, sd), local = gaussian
    assert len(reference.data.buckets) == 2 and len(reference.data.buckets[0].names) == 5
    assert agrees(reference.get_samples(group_by_chain=True)["mu"], mean, sd)
    for name, (means, sd) in local.items():  # 37 groups in all
        b = reference.sample_local(name, group_by_chain=True)["b"]
        assert b.shape == (2, 500, len(means))
        assert agrees(b, means, sd)


def test_local_draws_go_with_the_global_ones(gaussian):
    reference, _, _ = gaussian
    samples, local = reference.get_samples(), reference.sample_local("b")
    assert set(samples) == {"mu", "twice"} and set(local) == {"b", "offset"}
    assert samples["mu"].shape == (1000,) and local["b"].shape == (1000, 2)
    assert np.allclose(samples["twice"], 2 * samples["mu"])
    assert np.allclose(local["offset"], local["b"] - samples["mu"][:, None], atol=1e-5)


def test_diagnostics_and_repr(gaussian):
    reference, _, _ = gaussian
    table = reference.diagnostics()
    assert list(table.index) == ["mu", "twice"] and {"r_hat", "n_eff"} <= set(table.columns)
    assert table["r_hat"]["mu"] < 1.05 and 100 < table["n_eff"]["mu"] < 3000
    assert table["mean"]["twice"] == pytest.approx(2 * table["mean"]["mu"], rel=1e-5)
    assert reference.num_chains == 2 and reference.divergences == 0 and reference.seconds > 0
    assert repr(reference).startswith("Reference: NUTS, 2 chains of 500 draws") and len(repr(reference)) < 200


def test_compare_takes_it(gaussian):
    reference, _, _ = gaussian
    cmp = compare({"itself": reference}, reference)
    assert np.all(cmp.table["w1"] == 0) and set(cmp.table["seconds"]) == {reference.seconds}
    assert np.allclose(cmp.monte_carlo_error**-2, reference.diagnostics()["n_eff"])


def test_a_silos_locals_are_compared(gaussian):
    """Against draws of their closed form: shifts within four standard errors of both sides."""
    reference, _, local = gaussian
    means, sds = local["b"]
    exact = means + sds * np.random.default_rng(0).normal(size=(4000, len(means)))
    silos = Silos({"b": dict(y=np.zeros((2, 2), "f"))})
    fit = given_fit(normal_groups, silos, silo=dict(loc=means[0], scale=float(sds)))
    cmp = compare({"itself": reference, "exact": {"b": exact}, "fit": fit}, reference, silo="b", sites=["b"])
    assert list(cmp.table["parameter"]) == 3 * ["b[0]", "b[1]"]
    by_method = cmp.table.groupby("method")["mean_shift"].apply(lambda x: x.abs().max())
    assert by_method["itself"] == 0 and by_method["exact"] < 4 * np.hypot(cmp.monte_carlo_error.max(), 4000**-0.5)
    assert abs(cmp.table[cmp.table["method"] == "fit"]["mean_shift"].iloc[0]) < 4 * cmp.monte_carlo_error.max()
    n_eff = num_effective(reference.sample_local("b", group_by_chain=True)["b"][..., 0])
    assert np.isclose(cmp.monte_carlo_error["b[0]"], n_eff**-0.5)
    everything = compare({"itself": reference}, reference, silo="b")
    assert set(everything.table["parameter"]) == {"b[0]", "b[1]", "offset[0]", "offset[1]"}
    with pytest.raises(KeyError, match="no silo is named 'york'"):
        compare({"itself": reference}, reference, silo="york")
    plain = given_fit(no_locals, regression(3, 2)())
    with pytest.raises(ValueError, match="silo 's0' has no local sites to compare: leave silo= out"):
        compare(plain, plain, silo="s0")


def test_in_a_notebook(gaussian):
    reference, _, _ = gaussian
    shown = reference._repr_html_()
    assert "2 chains of 500 draws" in shown and "0 divergences" in shown and shown.count("<tr") == 4


def test_what_it_warns_of(gaussian):
    reference, _, _ = gaussian
    _warn(reference)
    with pytest.warns(UserWarning, match="1000 of 1000 draws diverged.*target_accept_prob=0.95"):
        _warn(replace(reference, diverging=np.ones((2, 500), bool)))
    apart = {"mu": np.stack([np.linspace(0, 1, 500), np.linspace(5, 6, 500)])}
    with pytest.warns(UserWarning, match=r"disagree about mu \(r_hat .*longer chains"):
        _warn(replace(reference, draws=apart))


def test_errors(gaussian):
    reference, _, _ = gaussian
    with pytest.raises(KeyError, match="no silo is named 'york'; the silos are 'a'"):
        reference.sample_local("york")
    silos = Silos([dict(y=np.ones((2, 2), np.float32))])
    with pytest.raises(TypeError, match=r"pass jax.random.key\(0\)"):
        nuts(normal_groups, silos, rng_key=0)
    with pytest.raises(ValueError, match="theta= names 'tau'; the model's params are none"):
        nuts(normal_groups, silos, theta={"tau": 1.0})

    def no_latents(y):
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(0, 1).expand([2]).to_event(1), obs=y)

    with pytest.raises(ValueError, match="no latent sites"):
        nuts(no_latents, silos)


@pytest.mark.slow
def test_padding_changes_neither_posterior_nor_trajectories():
    """Long format, two ragged axes, constrained global and local latents, against NumPyro's pooled NUTS."""

    def model(y, county, num_counties):
        mu = numpyro.sample("mu", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.LogNormal(-0.5, 0.3))
        with numpyro.plate("counties", num_counties):
            rate = numpyro.sample("rate", dist.LogNormal(mu, tau))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Poisson(rate[county]), obs=y)

    rng = np.random.default_rng(1)
    own, pooled_y, pooled_county, start = {}, [], [], 0
    for name, counties, rows in [("a", 2, 7), ("b", 9, 40), ("c", 3, 20)]:
        county = np.concatenate([np.arange(counties), rng.integers(counties, size=rows - counties)]).astype(np.int32)
        y = rng.poisson(rng.gamma(2, size=counties)[county]).astype(np.int32)
        own[name] = dict(y=y, county=county, num_counties=counties)
        pooled_y.append(y)
        pooled_county.append(county + start)
        start += counties
    reference = nuts(model, Silos(own), **SHORT)
    assert reference.data.buckets[0].names == ("a", "b", "c")  # 27 rows for 14 counties

    mcmc = MCMC(NUTS(model), chain_method="sequential", **SHORT)
    data = dict(y=np.concatenate(pooled_y), county=np.concatenate(pooled_county), num_counties=start)
    mcmc.run(jax.random.key(0), **data, extra_fields=("num_steps",))
    theirs = mcmc.get_samples(group_by_chain=True)
    ours = reference.get_samples(group_by_chain=True)
    local = [reference.sample_local(name, group_by_chain=True) for name in own]
    ours |= {site: np.concatenate([silo[site] for silo in local], axis=-1) for site in ("rate",)}
    for site, values in ours.items():
        error = np.hypot(standard_error(values), standard_error(theirs[site]))
        difference = values.mean(axis=(0, 1)) - np.asarray(theirs[site]).mean(axis=(0, 1))
        assert np.all(np.abs(difference) < 4.5 * error), site  # 16 scalars in all
    assert reference.num_steps.mean() < 2 * mcmc.get_extra_fields()["num_steps"].mean()

    # NumPyro's own object is a reference too: its local sites are left out
    cmp = compare({"ours": reference}, mcmc)
    assert list(cmp.table["parameter"]) == ["mu", "tau"]
    n_eff = {site: float(effective_sample_size(np.asarray(theirs[site]))) for site in ("mu", "tau")}
    assert dict(cmp.monte_carlo_error**-2) == pytest.approx(n_eff, rel=1e-3)


def test_params_are_held_and_obs_mask_is_not_flat():
    """x_i ~ N(mu, theta²), some unseen; y_i ~ N(x_i, 1)."""

    def model(x, seen, y):
        theta = numpyro.param("theta", 1.0, constraint=dist.constraints.positive)
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", y.shape[0]):
            x = numpyro.sample("x", dist.Normal(mu, theta), obs=x, obs_mask=seen)
            numpyro.sample("y", dist.Normal(x, 1), obs=y)

    rng = np.random.default_rng(2)
    own = {}
    for name, n in [("a", 6), ("b", 11)]:
        x = rng.normal(2, 2, size=n).astype(np.float32)
        y = (x + rng.normal(size=n)).astype(np.float32)
        seen = np.arange(n) % 3 != 0
        own[name] = dict(x=np.where(seen, x, 0).astype(np.float32), seen=seen, y=y)
    reference = nuts(model, Silos(own), theta={"theta": 2.0}, **SHORT)
    with pytest.warns(UserWarning, match=r"NUTS does not learn theta.*theta=fit.params"):
        assert _fixed_theta(reference.split, None) == {"theta": 0.0}  # log 1, as in the model
    # where x is seen it tells of mu with variance 4, else y does with variance 4 + 1
    pooled = {key: np.concatenate([args[key] for args in own.values()]) for key in ("x", "seen", "y")}
    precision = np.where(pooled["seen"], 1 / 4, 1 / 5)
    total = 1 / 100 + precision.sum()
    mean = (precision * np.where(pooled["seen"], pooled["x"], pooled["y"])).sum() / total
    assert agrees(reference.get_samples(group_by_chain=True)["mu"], mean, total**-0.5)
    assert reference.num_steps.mean() < 16


def test_starts_are_tried_again_in_smaller_cubes():
    zeros = {"z": jnp.zeros(3), "local": ({"rows": jnp.zeros((2, 1))},)}

    def inside(bound, point):
        x = jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(point)])
        return jnp.where(jnp.max(jnp.abs(x)) < bound, jnp.sum(x**2), jnp.nan)

    for bound, finds in [(2.0, True), (0.05, True), (0.0, False)]:
        point, found = jax.jit(lambda key, bound=bound: start(lambda p: inside(bound, p), zeros, key))(
            jax.random.key(0)
        )
        assert bool(found) is finds
        assert jax.tree.map(jnp.shape, point) == jax.tree.map(jnp.shape, zeros)
        assert not finds or np.isfinite(inside(bound, point))


def test_deterministics_over_rows_see_no_padding():
    """A mean over a silo's rows, of silos of 2 and 9 rows: padded rows do not enter."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(b, 1.0), obs=y)
        numpyro.deterministic("mean", b.mean())

    silos = Silos({"small": dict(y=np.zeros(5, "f")), "large": dict(y=np.full(9, 3.0, "f"))})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a chain of ten draws has not converged
        reference = nuts(
            model, silos, rng_key=jax.random.key(0), num_warmup=10, num_samples=10, num_chains=1, progress_bar=False
        )
    for silo, rows in (("small", 5), ("large", 9)):
        draws = reference.sample_local(silo)
        assert draws["b"].shape == (10, rows)
        np.testing.assert_allclose(draws["mean"], draws["b"].mean(axis=1), rtol=1e-5, atol=1e-6)
