"""What a fit says of a posterior that is given: draws, summaries and ArviZ groups."""

from typing import Any

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from given import given_fit
from models import MODELS, glmm, normal
from scipy.stats import bernoulli
from tiers import tiers

from numpyro_fed.data.silos import Silos
from numpyro_fed.results.fit import Fit

KEY = jax.random.key(7)
SIZES = {"leeds": 3, "york": 7, "hull": 4}


def centred(x: Any, y: Any) -> None:
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    numpyro.deterministic("odds", jnp.exp(beta))
    scale = numpyro.param("scale", 2.0, constraint=dist.constraints.positive)
    with numpyro.plate("children", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, scale))
        mean = numpyro.deterministic("mean", x @ beta + b)
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)
    numpyro.deterministic("centre", b.mean())


@pytest.fixture(scope="module")
def silos() -> Silos:
    return Silos({name: dict(x=normal(n, n, 2), y=np.arange(n) % 2) for name, n in SIZES.items()})


@pytest.fixture(scope="module")
def fit(silos: Silos) -> Fit:
    return given_fit(glmm, silos, scale=0.2, silo=dict(scale=0.2))


@pytest.fixture(scope="module")
def computed() -> Fit:
    return given_fit(centred, Silos({name: dict(x=normal(n, n, 2), y=normal(n, n)) for name, n in SIZES.items()}))


@pytest.fixture(scope="module")
def tree(fit: Fit) -> Any:
    return fit.to_arviz(KEY, 200, log_likelihood=True, posterior_predictive=True)


# --- draws ------------------------------------------------------------------------------------------------------------


def test_one_key_gives_the_same_globals_with_every_silo(fit: Fit) -> None:
    draws = fit.sample(KEY, 5)
    assert {name: value.shape for name, value in draws.items()} == {"beta": (5, 2), "omega": (5,)}
    for silo, rows in SIZES.items():
        joint = fit.sample_local(KEY, 5, silo=silo)
        assert joint["b"].shape == (5, rows)
        for name, value in draws.items():
            np.testing.assert_allclose(joint[name], value, rtol=1e-6)
    assert not np.allclose(draws["beta"], fit.sample(jax.random.key(8), 5)["beta"])


def test_silos_are_independent_given_the_globals(fit: Fit) -> None:
    """Their draws of one key are one joint draw: the same numbers in two silos would be one silo's noise twice."""
    b = np.stack([fit.sample_local(KEY, 2000, silo=silo)["b"][:, 0] for silo in SIZES])
    y = np.stack([fit.predict(KEY, silo=silo, num_samples=2000)["y"][:, 0] for silo in SIZES])
    for draws in (b, y):  # here the posterior's locals do not depend on the globals; y does, a little
        assert np.max(np.abs(np.corrcoef(draws) - np.eye(3))) < 0.1


def test_deterministic_sites_see_the_silos_own_rows(computed: Fit) -> None:
    """A mean over a silo's rows must not include the rows that pad it."""
    assert set(computed.sample(KEY, 5)) == {"beta", "odds"}
    for silo, rows in SIZES.items():
        draws = computed.sample_local(KEY, 5, silo=silo)
        np.testing.assert_allclose(draws["centre"], draws["b"].mean(axis=1), rtol=1e-5, atol=1e-6)
        linear = draws["beta"] @ computed.silos[silo]["x"].T + draws["b"]
        assert linear.shape == (5, rows)
        np.testing.assert_allclose(draws["mean"], linear, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(computed.params["scale"], 2.0, rtol=1e-6)


def test_errors_say_what_to_type(fit: Fit) -> None:
    with pytest.raises(KeyError, match=r"'bath'.*'leeds', 'york', 'hull'"):
        fit.sample_local(KEY, silo="bath")
    with pytest.raises(TypeError, match=r"pass jax\.random\.key\(0\)"):
        fit.sample(0)
    for wrong in (0, 2.0, True):
        with pytest.raises(ValueError, match="num_samples must be an int of at least 1"):
            fit.sample(KEY, wrong)
        with pytest.raises(ValueError, match="num_samples must be an int of at least 1"):
            fit.to_arviz(KEY, wrong)
    with pytest.raises(ValueError, match="hdi_prob must lie between 0 and 1, got 90"):
        fit.summary(hdi_prob=90)


# --- what it says -----------------------------------------------------------------------------------------------------


def test_summary(fit: Fit, computed: Fit) -> None:
    table = fit.summary(num_samples=20_000)
    assert list(table.index) == ["beta[0]", "beta[1]", "omega"]
    assert list(table.columns) == ["role", "mean", "sd", "median", "hdi_5%", "hdi_95%"]
    beta = table.loc["beta[0]"]  # normal with sd 0.2; four standard errors of each, rounded up
    expected = [0, 0, -0.329, 0.329]
    np.testing.assert_allclose(beta[["mean", "median", "hdi_5%", "hdi_95%"]].astype(float), expected, atol=0.02)
    np.testing.assert_allclose(beta["sd"], 0.2, atol=0.006)
    joint = computed.summary(num_samples=50, silo="leeds")
    assert dict(joint["role"].loc[["beta[0]", "odds[1]", "b[2]", "mean[0]", "centre", "scale"]]) == {
        "beta[0]": "global",
        "odds[1]": "deterministic",
        "b[2]": "local",
        "mean[0]": "deterministic",
        "centre": "deterministic",
        "scale": "param",
    }
    assert joint.loc["scale", "mean"] == pytest.approx(2.0) and np.isnan(joint.loc["scale", "sd"])


def test_it_prints(fit: Fit) -> None:
    text = repr(fit)
    assert text.startswith("Fit by Given: silos 3; rounds 3; sent 3.0 kB; seconds 0.1; loss 1;")
    assert "global sites beta, omega; local sites b" in text
    page = fit._repr_html_()
    assert "<table" in page and "omega" in page and "silos 3" in page


# --- ArviZ ------------------------------------------------------------------------------------------------------------

DIMS: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {
    "long format": {
        "posterior": {"mu": (), "tau": (), "alpha": ("counties",)},
        "log_likelihood": {"y": ("rows",)},
        "posterior_predictive": {"y": ("rows",)},
        "observed_data": {"y": ("rows",)},
    },
    "visits": {
        "posterior": {"trend": ("visits",), "level": ("patients", "level_dim_1"), "noise": ("patients", "visits_")},
        "log_likelihood": {"y": ("patients", "visits_")},
    },
    "crossed own plates": {
        "posterior": {"skill": ("pupils",), "match": ("pupils_teachers", "match_dim_1")},
        "log_likelihood": {"y": ("marks",)},
    },
    "silo level": {
        "posterior": {"mu": (), "a": ("silo",), "s": ("silo", "s_dim_1")},
        "observed_data": {"y": ("rows",)},
    },
    "several plates of equal sizes": {"posterior": {"a": ("patients",), "b": ("nurses",)}},
    "without plate": {"posterior": {"beta": ("beta_dim_0",)}, "log_likelihood": {"y": ("x",)}},
    # what has no rows of its own, at the server, or no observation, is left out
    "soft constraint": {"log_likelihood": {"y": ("y_dim", "y_dim_1")}, "observed_data": {"y": ("y_dim", "y_dim_1")}},
    "censored": {"posterior": {"rate": (), "frailty": ("rows",)}},
    "residuals": {"log_likelihood": {"residual": ("rows",)}, "observed_data": {"residual": ("rows",)}},
    "scan": {
        "posterior": {"state": ("state_dim_0", "patients")},
        "posterior_predictive": {"y": ("y_dim_0", "patients")},
    },
    "obs_mask": {"posterior": {"y": ("rows",), "y_unobserved": ("rows",)}},
    "correlated": {
        "posterior": {"b": ("rows", "outcomes", "b_dim_2")},
        "posterior_predictive": {"y": ("rows_", "y_dim_1")},
    },
}


def groups(tree: Any) -> dict[str, Any]:
    """The datasets of an InferenceData or a DataTree."""
    if isinstance(tree.groups, tuple):
        return {name.strip("/"): tree[name].to_dataset() for name in tree.groups if name != "/"}
    return {name: tree[name] for name in tree.groups()}


@pytest.mark.parametrize("name", tiers(DIMS, *list(DIMS)[::3], others=pytest.mark.merge))
def test_dimensions_are_named_by_plates(name: str) -> None:
    case = MODELS[name]
    silos = case.silos()
    fit = given_fit(case.model, silos, **case.options)
    wanted = {group: group in DIMS[name] for group in ("log_likelihood", "posterior_predictive")}
    found = groups(fit.to_arviz(KEY, 3, **wanted))
    for group, variables in DIMS[name].items():
        lead = () if group == "observed_data" else ("chain", "draw")
        for variable, dims in variables.items():
            assert found[group][variable].dims == (*lead, *dims), (group, variable)
        if group in ("log_likelihood", "observed_data"):
            assert set(found[group].data_vars) == set(variables)
    if name == "censored":
        assert "observed_data" not in found
    if name == "silo level":
        assert list(found["posterior"].silo.values) == list(silos.names)


def test_rows_of_all_silos_are_labelled(fit: Fit, tree: Any) -> None:
    found = groups(tree)
    labels = [f"{silo}[{i}]" for silo, rows in SIZES.items() for i in range(rows)]
    owners = [silo for silo, rows in SIZES.items() for _ in range(rows)]
    owner = found["constant_data" if "constant_data" in found else "posterior"]["children_silo"]
    assert list(owner.values) == owners
    for group in ("posterior", "log_likelihood", "posterior_predictive", "observed_data"):
        assert list(found[group]["children"].values) == labels
    for name, value in fit.sample(KEY, 200).items():
        np.testing.assert_allclose(found["posterior"][name][0], value, rtol=1e-6)
    for silo, rows in SIZES.items():
        of_silo = {name: data.isel(children=owner.values == silo) for name, data in found.items()}
        assert of_silo["posterior"]["b"].shape == (1, 200, rows)
        np.testing.assert_array_equal(of_silo["posterior"]["b"][0], fit.sample_local(KEY, 200, silo=silo)["b"])
        np.testing.assert_array_equal(
            of_silo["posterior_predictive"]["y"][0], fit.predict(KEY, silo=silo, num_samples=200)["y"]
        )
        np.testing.assert_array_equal(of_silo["observed_data"]["y"], fit.silos[silo]["y"])


def test_log_likelihood_is_of_the_joint_draws(fit: Fit, tree: Any) -> None:
    found = groups(tree)
    b = found["posterior"]["b"].values[0]
    x = np.concatenate([fit.silos[silo]["x"] for silo in SIZES])
    y = np.concatenate([fit.silos[silo]["y"] for silo in SIZES])
    odds = found["posterior"]["beta"].values[0] @ x.T + b
    expected = bernoulli.logpmf(y, 1 / (1 + np.exp(-odds)))
    np.testing.assert_allclose(found["log_likelihood"]["y"][0], expected, rtol=1e-3, atol=1e-5)


def test_arviz_takes_it(tree: Any) -> None:
    assert az.loo(tree).n_data_points == sum(SIZES.values())
    assert {"b[york[0]]", "beta[1]", "omega"} <= set(az.summary(tree).index)


def test_masked_observations_are_left_out() -> None:
    case = MODELS["mask"]
    silos = case.silos()
    found = groups(given_fit(case.model, silos).to_arviz(KEY, 3, log_likelihood=True))
    present = [f"{silo}[{i}]" for silo in silos for i in np.flatnonzero(silos[silo]["present"])]
    assert list(found["log_likelihood"]["y_rows"].values) == present
    assert np.all(found["log_likelihood"]["y"] != 0)
    assert found["observed_data"]["y"].dims == ("rows",)


def test_local_sites_can_be_left_out(fit: Fit) -> None:
    assert set(groups(fit.to_arviz(KEY, 3, local=False))["posterior"].data_vars) == {"beta", "omega"}
