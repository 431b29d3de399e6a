"""A factor a silo: silos that leave and join, their influence and conflicts, against closed forms."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from matplotlib import pyplot as plt
from scipy.stats import chi2, kstest, norm

import numpyro_fed as nf
from benchmarks import conflict as conflicts
from numpyro_fed.normal.families import Natural
from numpyro_fed.results.conflict import disagreement
from numpyro_fed.results.plots import own_evidence

KEY = jax.random.key(3)
PRIOR_SD, GROUP_SD, NOISE = 2.0, 0.5, 0.7
# the largest silo sets the padding: without it the others' rows are padded otherwise
SIZES = {"leeds": 13, "york": 5, "hull": 7}


def model(x, y):
    """Linear regression in which every row has a local intercept: all factors are normal."""
    beta = numpyro.sample("beta", dist.Normal(0, PRIOR_SD).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, GROUP_SD))
        numpyro.sample("y", dist.Normal(x @ beta + b, NOISE), obs=y)


def make_silos() -> nf.Silos:
    draws = np.random.default_rng(0)
    data = {}
    for name, n in SIZES.items():
        x = draws.normal(size=(n, 2))
        sd = np.hypot(GROUP_SD, NOISE)
        data[name] = dict(x=x, y=x @ np.array([1.0, -0.5]) + (name == "hull") + sd * draws.normal(size=n))
    return nf.Silos(data)


def site(data: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """A silo's factor: precision and shift."""
    x, variance = data["x"], GROUP_SD**2 + NOISE**2
    return x.T @ x / variance, x.T @ data["y"] / variance


def posterior(silos: nf.Silos, *names: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean and covariance, in closed form."""
    each = [site(silos[name]) for name in names]
    precision = np.eye(2) / PRIOR_SD**2 + sum(p for p, _ in each)
    return np.linalg.solve(precision, sum(h for _, h in each)), np.linalg.inv(precision)


def moments(fit: nf.Fit) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(fit.normal().mean), fit.normal().covariance


def assert_posterior(fit: nf.Fit, silos: nf.Silos, *names: str) -> None:
    for found, expected in zip(moments(fit), posterior(silos, *names), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8)


METHOD = nf.EP(model, solver=nf.solvers.Laplace(num_nodes=1))  # exact here, and quick to compile


@pytest.fixture(scope="module")
def silos() -> nf.Silos:
    with jax.enable_x64(True):
        return make_silos()


@pytest.fixture(scope="module")
def fit(silos: nf.Silos) -> nf.Fit:
    with jax.enable_x64(True):
        return METHOD.run(jax.random.key(0), silos, 3, progress_bar=False)


def with_sites(fit: nf.Fit, prior: Natural, each: Natural, method: Any = METHOD) -> nf.Fit:
    """The fit with other factors."""
    server = fit.state.server
    new = server._replace(sites=server.sites._replace(prior=prior, each=each))
    return replace(fit, posterior=method.posterior_of(fit.split, fit.survey), state=fit.state._replace(server=new))


# --- silos that leave and join --------------------------------------------------------------------------------------


@pytest.mark.merge
@pytest.mark.usefixtures("x64")
def test_without_is_the_posterior_of_the_others(fit: nf.Fit, silos: nf.Silos) -> None:
    assert_posterior(fit, silos, *silos.names)
    for gone in silos.names:
        rest = [name for name in silos.names if name != gone]
        less = fit.without(gone)
        assert less.state.names == less.silos.names == tuple(rest)
        assert_posterior(less, silos, *rest)
        assert less.history == {} and "sent 0 bytes" in repr(less)
    alone = fit.without(["leeds", "hull"])
    assert_posterior(alone, silos, "york")
    assert (alone.survey.num_silos, alone.survey.sizes, alone.records) == (1, (SIZES["york"],), ())
    doubted = replace(fit, reasons=("silos 'leeds', 'york' say little", "silo 'york' says little", "it still moves"))
    assert doubted.without("leeds").reasons == ("silo 'york' says little", "it still moves")
    # the locals' own states are those that were there
    for name in ("frame", "local_posterior"):
        a, b = (getattr(one.state.silo("york")[0], name) for one in (alone, fit))
        assert all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    assert alone.sample_local(KEY, 5, silo="york")["b"].shape == (5, SIZES["york"])


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_rounds_among_the_others(fit: nf.Fit, silos: nf.Silos) -> None:
    """Without the largest silo rows are padded otherwise, and the frames go with them."""
    less = fit.without("leeds", 2, rng_key=KEY)
    assert less.padded != tuple(fit.padded) and less.state.round > fit.state.round
    assert_posterior(less, silos, "york", "hull")
    assert less.num_rounds == len(less.history["bytes_up"]) <= 2
    assert less.history["shift"][0] < 1e-6  # the sites were right from the start
    z = posterior(silos, "york", "hull")[0]
    local = [one.state.silo("york")[0].local_posterior.mean(z)["rows"][: SIZES["york"]] for one in (less, fit)]
    np.testing.assert_allclose(*local, atol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.slow
@pytest.mark.merge
def test_add_is_the_posterior_of_all(fit: nf.Fit, silos: nf.Silos) -> None:
    before = fit.without("hull")
    after = before.add(KEY, silos.only("hull"))
    assert after.state.names == ("leeds", "york", "hull")
    assert_posterior(after, silos, *silos.names)
    assert after.num_rounds == 1 and after.state.round == before.state.round + 1
    asked = [one.history["bytes_up"][0] - one.records[0].bytes_up for one in (after, fit)]  # without the survey's
    assert 3 * asked[0] == asked[1]  # one silo was asked, of three
    for name in ("leeds", "york"):
        old, new = (one.state.server.sites.each for one in (before, after))
        j = before.state.names.index(name)
        assert np.array_equal(old.precision[j], new.precision[after.state.names.index(name)])
    assert after.state.server.visits.tolist() == [*before.state.server.visits.tolist(), 1]
    on = before.add(KEY, silos.only("hull"), num_rounds=1)
    assert_posterior(on, silos, *silos.names)
    assert on.num_rounds == 2 and np.all(on.history["bytes_up"] > 0)


@pytest.mark.merge
@pytest.mark.usefixtures("x64")
def test_loaded_without_data_a_silo_can_leave(fit: nf.Fit, silos: nf.Silos, tmp_path: Path) -> None:
    loaded = nf.load(fit.save(tmp_path / "fit"), METHOD)
    assert_posterior(loaded.without("hull"), silos, "leeds", "york")
    again = nf.load(loaded.without("hull").save(tmp_path / "less"), METHOD)
    assert_posterior(again, silos, "leeds", "york")
    assert again.influence().table.shape == (4, 4)
    with pytest.raises(ValueError, match=r"further rounds need the silos' data.*pass silos= to nf\.load"):
        loaded.without("hull", 1)
    with pytest.raises(ValueError, match=r"pass silos= to nf\.load"):
        loaded.add(KEY, nf.Silos({"new": silos["york"]}))


@pytest.mark.usefixtures("x64")
def test_errors_teach(fit: nf.Fit, silos: nf.Silos) -> None:
    with pytest.raises(ValueError, match="no silo is named 'bath'; the silos are 'leeds', 'york', 'hull'"):
        fit.without("bath")
    with pytest.raises(ValueError, match="would leave nobody"):
        fit.without(list(silos.names))
    with pytest.raises(ValueError, match="would leave everybody"):
        fit.without([])
    with pytest.raises(ValueError, match="num_rounds must be an int of at least 0, got -1"):
        fit.without("hull", -1)
    with pytest.raises(ValueError, match=r"silo 'hull' is in the fit already.*fit\.without\('hull'\)"):
        fit.add(KEY, silos.only("hull"))
    with pytest.raises(TypeError, match=r"silos must be an nf\.Silos, got a dict"):
        fit.add(KEY, {"new": silos["hull"]})
    with pytest.raises(ValueError, match=r"other shared arguments \(k\) than the fit \(none\)"):
        fit.add(KEY, nf.Silos({"new": silos["hull"]}, shared=dict(k=np.ones(2))))
    with pytest.raises(ValueError, match="z"):
        fit.add(KEY, nf.Silos({"new": dict(x=silos["hull"]["x"], z=silos["hull"]["y"])}))
    tied = with_sites(fit, *fit.state.server.sites, method=nf.SEP(model))
    sfvi = nf.SFVI(model).posterior_of(fit.split, fit.survey)
    none = replace(fit, state=fit.state._replace(method="SFVI", server=()), posterior=sfvi)
    for other, has in ((tied, "one site for all silos"), (none, "no sites")):
        for ask in (other.influence, other.conflict, lambda other=other: other.without("hull")):
            with pytest.raises(TypeError, match=rf"has {has}: fit with nf\.EP\(model\) or nf\.PVI\(model\)"):
                ask()


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_the_others_may_not_determine_the_posterior(fit: nf.Fit, silos: nf.Silos) -> None:
    sites = fit.state.server.sites
    each = sites.each._replace(precision=sites.each.precision.at[0].add(-30 * jnp.eye(2)).at[1].add(30 * jnp.eye(2)))
    odd = with_sites(fit, sites.prior, each)
    np.testing.assert_allclose(moments(odd)[1], moments(fit)[1])  # q is what it was
    with pytest.raises(ValueError, match=r"without 'york' the posterior is improper.*without\(\.\.\., num_rounds=8\)"):
        odd.without("york")
    table = odd.influence().table.set_index("silo")
    assert (
        table.loc["york", ["shift", "sd_ratio"]].isna().all(axis=None) and np.isfinite(table.loc["hull", "shift"]).all()
    )
    assert "york: nothing to compare with" in repr(odd.influence()) and "york: nothing" in repr(odd.conflict())
    assert np.isnan(odd.conflict().table.set_index("silo").loc["york", "p_value"])
    odd.influence().plot(), odd.conflict().plot()
    # the same silos and padding as in `test_rounds_among_the_others`: sites that are no posterior begin anew
    broken = with_sites(fit, sites.prior, each._replace(precision=each.precision.at[2].add(-60 * jnp.eye(2))))
    assert_posterior(broken.without("leeds", 3, rng_key=KEY), silos, "york", "hull")


# --- influence and conflict -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
def test_influence_is_the_closed_form(fit: nf.Fit, silos: nf.Silos) -> None:
    found = fit.influence()
    mean, cov = posterior(silos, *silos.names)
    sd = np.sqrt(np.diagonal(cov))
    assert list(found.table.columns) == ["silo", "parameter", "shift", "sd_ratio"]
    for name in silos.names:
        rest, less = posterior(silos, *(other for other in silos.names if other != name))
        rows = found.table[found.table["silo"] == name]
        assert list(rows["parameter"]) == ["beta[0]", "beta[1]"]
        np.testing.assert_allclose(rows["shift"], (mean - rest) / sd, rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(rows["sd_ratio"], sd / np.sqrt(np.diagonal(less)), rtol=1e-6)
    assert "beta[1]" in repr(found) and "<table" in found._repr_html_()
    assert len(found.plot().figure.axes) == 2  # and a bar of colours


@pytest.mark.usefixtures("x64")
def test_forest_plot_shows_what_each_silo_adds(fit: nf.Fit, silos: nf.Silos) -> None:
    mean, cov = posterior(silos, *silos.names)
    found, reach = own_evidence(fit), norm.ppf(0.95)
    for name in silos.names:
        rest, less = posterior(silos, *(other for other in silos.names if other != name))
        for k in range(2):
            # the posterior of a parameter is that without the silo, times the silo's own factor
            precision = 1 / cov[k, k] - 1 / less[k, k]
            own = (mean[k] / cov[k, k] - rest[k] / less[k, k]) / precision
            expected = own + reach * precision**-0.5 * np.array([-1, 0, 1])
            np.testing.assert_allclose(found.alone[name][f"beta[{k}]"], expected, rtol=1e-5, atol=1e-6)
            whole = mean[k] + reach * np.sqrt(cov[k, k]) * np.array([-1, 0, 1])
            np.testing.assert_allclose(found.everyone[f"beta[{k}]"], whole, rtol=1e-5, atol=1e-6)
    axes = fit.plot_silos()
    labels = [label.get_text() for label in axes[0].get_yticklabels()]
    assert [ax.get_title() for ax in axes] == ["beta[0]", "beta[1]"] and labels == [*silos.names, "all silos"]
    assert len(fit.plot_silos("beta[1]", silos=["york"])) == 1
    for wrong in (dict(silos=["bath"]), dict(parameters="gamma")):
        with pytest.raises(ValueError, match=r"no (silo|parameter or site) is named"):
            fit.plot_silos(**wrong)
    plt.close("all")


def test_history_is_plotted_by_name(fit: nf.Fit) -> None:
    axes = fit.plot_history()
    assert [ax.get_title(loc="left") for ax in axes] == ["loss", "a whole step would move, sds", "sent so far, kB"]
    shown = axes[2].get_lines()[0].get_ydata()
    np.testing.assert_allclose(shown * 1e3, np.cumsum(fit.history["bytes_up"]))
    assert [ax.get_title(loc="left") for ax in fit.plot_history("ess")] == ["least effective share"]
    with pytest.raises(ValueError, match=r"the history has no 'luck'; it has .*sent"):
        fit.plot_history("luck")
    axes[0].figure.canvas.draw()
    plt.close("all")


@pytest.mark.usefixtures("x64")
def test_conflict_is_the_distance_of_silo_and_others(fit: nf.Fit, silos: nf.Silos) -> None:
    found = fit.conflict()
    mean, cov = posterior(silos, *silos.names)
    assert list(found.table.columns) == ["silo", "parameter", "z", "p_value", "family_wise"]
    distance = fit.conflict(normal_factors=True).table.set_index("silo")
    for name, parameter, largest, p_value, family_wise in found.table.itertuples(index=False):
        rest, less = posterior(silos, *(other for other in silos.names if other != name))
        z = (mean - rest) / np.sqrt(np.diagonal(less - cov))
        rows = found.by_parameter[found.by_parameter["silo"] == name]
        np.testing.assert_allclose(rows["z"], z, rtol=1e-5)
        # the larger of two widths: the silo's own, and that of its share of what all silos know
        alike = SIZES[name] / sum(SIZES.values()) * sum(site(silos[other])[0] for other in silos.names)
        left = np.linalg.inv(np.linalg.inv(less) + alike)
        cautious = (mean - rest) / np.sqrt(np.maximum(np.diagonal(less - cov), np.diagonal(less - left)))
        np.testing.assert_allclose(rows["cautious_z"], cautious, rtol=1e-5)
        first = np.argmax(np.abs(cautious))
        assert parameter == f"beta[{first}]" and largest == pytest.approx(cautious[first])
        assert p_value == pytest.approx(min(1, 2 * 2 * norm.sf(abs(largest))), rel=1e-5)  # two parameters
        assert family_wise == pytest.approx(min(1, 3 * p_value))  # three silos
        precision, shift = site(silos[name])
        apart = rest - np.linalg.solve(precision, shift)
        expected = apart @ np.linalg.solve(less + np.linalg.inv(precision), apart)
        assert distance.loc[name, "statistic"] == pytest.approx(expected, rel=1e-6) and distance.loc[name, "df"] == 2
        assert distance.loc[name, "p_value"] == pytest.approx(chi2.sf(expected, 2), rel=1e-5)
    assert re.search(r"The smallest p-value is \w+'s, in beta\[\d\], of 2 looked at: .*; with 3 silos", repr(found))
    assert "'s, over all directions: " in repr(fit.conflict(normal_factors=True)) and "<table" in found._repr_html_()
    assert "(p = " in found.plot().get_yticklabels()[0].get_text()


@pytest.mark.usefixtures("x64")
def test_families_without_correlations(fit: nf.Fit) -> None:
    """With variances alone, parameters are apart, and z^2 is each one's own statistic."""
    draws = np.random.default_rng(1)
    prior = Natural(jnp.full(2, 0.1), jnp.zeros(2))
    each = Natural(jnp.asarray(draws.uniform(1, 5, (3, 2))), jnp.asarray(draws.normal(size=(3, 2))))
    diagonal = with_sites(fit, prior, each, nf.EP(model, family="diagonal", solver="laplace"))
    found = diagonal.conflict(normal_factors=True)
    assert "keeps no correlations" in repr(found) and "keeps no correlations" not in repr(fit.conflict())
    squares = (found.by_parameter.set_index("silo")["z"] ** 2).groupby(level=0, sort=False).sum()
    np.testing.assert_allclose(squares, found.table["statistic"], rtol=1e-8)
    precision = np.asarray(prior.precision + each.precision.sum(0))
    shift = np.asarray(each.shift.sum(0)) / precision - np.asarray(each.shift[1:].sum(0)) / (
        precision - np.asarray(each.precision[0])
    )
    np.testing.assert_allclose(diagonal.influence().table["shift"][:2], shift * np.sqrt(precision), rtol=1e-8)


def test_p_values_are_uniform_where_silos_agree() -> None:
    """A silo with two rows in three dimensions: its site is singular, and it is tested in two directions."""
    draws = np.random.default_rng(2)
    truth = draws.normal(size=(400, 3)) * 2
    p_values = []
    for shift in (0.0, 12.0):
        found = []
        for z in truth:
            x, others = draws.normal(size=(2, 3)), draws.normal(size=(6, 3))
            precision = np.eye(3) / 4 + others.T @ others
            mean = np.linalg.solve(precision, others.T @ (others @ z + draws.normal(size=6)))
            y = x @ z + draws.normal(size=2) + shift
            statistic, df = disagreement(mean, np.linalg.inv(precision), x.T @ x, x.T @ y)
            assert df == 2
            found.append(chi2.sf(statistic, df))
        p_values.append(np.array(found))
    assert kstest(p_values[0], "uniform").pvalue > 0.01
    assert np.median(p_values[1]) < 1e-4
    flat = disagreement(np.zeros(2), np.eye(2), np.zeros((2, 2)), np.zeros(2))
    assert np.isnan(flat[0]) and flat[1] == 0


# --- false alarms ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_wide_site_is_no_conflict(x64: None) -> None:
    """Normal rows with an unknown sd, silos of 8 that agree: one whose residuals are large by chance has a wide site.

    30 data sets. With all silos and parameters counted 5 % are to be flagged, and six or more of 30 with probability
    .003; the chi-square flags most of them.
    """
    found = conflicts.measure(conflicts.CASES["normal, sd unknown, 5 of 8"], 30, shift=0.0)
    assert conflicts.flagged(found) < 6 / 30
    assert conflicts.flagged(found, "chi_square") > 10 / 30
