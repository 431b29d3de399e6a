"""Predictions, where they have a closed form: the posterior is given, and the models are normal.

Tolerances are five standard errors of 20,000 draws: 0.035 sds of a mean, 0.025 of an sd relative to itself.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from given import given_fit
from models import MODELS, counties, glmm, normal
from scipy.stats import ks_2samp

from numpyro_fed.data.silos import Silos
from numpyro_fed.results.fit import Fit

KEY = jax.random.key(3)
NUM = 20_000
TAU, SIGMA = 2.0, 0.5
MU, MU_SD = 1.0, 0.3


def hierarchy(x, y, offset):
    """y_i ~ N(a + b_i + x_i + offset, SIGMA^2), b_i ~ N(mu, TAU^2); a belongs to the silo."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    a = numpyro.sample("a", dist.Normal(0, 3.0))
    with numpyro.plate("units", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, TAU))
        mean = numpyro.deterministic("mean", a + b + x + offset)
        numpyro.sample("y", dist.Normal(mean, SIGMA), obs=y)


@pytest.fixture(scope="module")
def fit() -> Fit:
    """z_L ~ N(0.7 mu, 0.2^2), for a and for every b."""
    silos = Silos(
        {name: dict(x=np.arange(n, dtype="f"), y=normal(n, n)) for name, n in (("leeds", 2), ("york", 3))},
        shared=dict(offset=np.float32(10.0)),
    )
    return given_fit(hierarchy, silos, loc=MU, scale=MU_SD, silo=dict(scale=0.2, coupling=0.7), local=["a"])


def agree(draws: Any, mean: Any, sd: float) -> None:
    np.testing.assert_allclose(np.mean(draws, axis=0), mean, atol=0.035 * sd)
    np.testing.assert_allclose(np.std(draws, axis=0), sd, rtol=0.025)


def test_own_units_have_the_silos_posterior(fit: Fit) -> None:
    draws = fit.predict(KEY, silo="york", num_samples=NUM)
    assert set(draws) == {"y", "mean"} and draws["y"].shape == (NUM, 3)
    # a + b = 1.4 mu + noise: both move with the same mu
    spread = np.hypot(1.4 * MU_SD, 0.2 * np.sqrt(2))
    agree(draws["mean"], 1.4 * MU + np.arange(3) + 10, spread)
    agree(draws["y"], 1.4 * MU + np.arange(3) + 10, np.hypot(spread, SIGMA))
    local = fit.sample_local(KEY, NUM, silo="york")
    np.testing.assert_allclose(draws["mean"], local["a"][:, None] + local["b"] + np.arange(3) + 10, rtol=1e-5)


def test_new_units_have_the_silos_part_of_it(fit: Fit) -> None:
    draws = fit.predict(KEY, dict(x=[0.0, 5.0]), silo="leeds", num_samples=NUM)
    # a = 0.7 mu + noise is the silo's, b ~ N(mu, TAU) is new
    spread = np.sqrt((1.7 * MU_SD) ** 2 + 0.2**2 + TAU**2)
    agree(draws["mean"], 1.7 * MU + np.array([0, 5]) + 10, spread)
    agree(draws["y"], 1.7 * MU + np.array([0, 5]) + 10, np.hypot(spread, SIGMA))
    assert abs(np.corrcoef(draws["y"].T)[0, 1] - ((1.7 * MU_SD) ** 2 + 0.2**2) / (spread**2 + SIGMA**2)) < 0.04


def test_a_new_silo_has_the_globals_alone(fit: Fit) -> None:
    draws = fit.predict(KEY, dict(x=np.zeros(2)), num_samples=NUM)
    spread = np.sqrt(MU_SD**2 + 3.0**2 + TAU**2)
    agree(draws["mean"], MU + 10, spread)
    agree(draws["y"], MU + 10, np.hypot(spread, SIGMA))
    own = fit.predict(KEY, silo="york", num_samples=NUM)["y"]
    assert np.min(np.std(draws["y"], axis=0)) > 2 * np.max(np.std(own, axis=0))


def test_a_new_silo_is_the_prior_given_the_globals() -> None:
    """A model with a random scale, against plain Monte Carlo on the globals' draws."""
    case = MODELS["long format"]
    fit = given_fit(case.model, case.silos(), scale=0.5)
    draws = fit.predict(KEY, dict(county=[0, 0, 1], num_counties=2), num_samples=4000)["y"]
    globals_ = fit.sample(jax.random.key(99), 4000)
    rng = np.random.default_rng(0)
    alpha = np.asarray(globals_["mu"])[:, None] + np.asarray(globals_["tau"])[:, None] * rng.normal(size=(4000, 2))
    direct = alpha[:, [0, 0, 1]] + rng.normal(size=(4000, 3))
    for ours, theirs in [(draws[:, i], direct[:, i]) for i in (0, 2)] + [
        (draws[:, 0] - draws[:, i], direct[:, 0] - direct[:, i]) for i in (1, 2)
    ]:
        assert ks_2samp(ours, theirs).pvalue > 0.001


def test_groups_are_the_silos_own_when_their_number_is() -> None:
    case = MODELS["long format"]
    silos = case.silos()
    fit = given_fit(case.model, silos, scale=0.1, silo=dict(loc=50.0, scale=0.1))
    assert silos["s"]["num_counties"] == 2
    for data in (dict(county=[0, 1, 1]), dict(county=[0, 1, 1], num_counties=2)):
        own = fit.predict(KEY, data, silo="s", num_samples=500)["y"]
        assert own.shape == (500, 3) and abs(own.mean() - 50) < 1
    new = fit.predict(KEY, dict(county=[0, 1, 1], num_counties=3), silo="s", num_samples=500)["y"]
    assert abs(new.mean()) < 1
    with pytest.raises(ValueError, match="lacks the arguments num_counties"):
        fit.predict(KEY, dict(county=[0, 1, 1]))


def test_observations_may_be_left_out(fit: Fit) -> None:
    x = np.arange(4.0)
    left_out = fit.predict(KEY, dict(x=x), num_samples=10)["y"]
    for y in (None, np.zeros(4), np.full(4, 1e6)):
        np.testing.assert_array_equal(fit.predict(KEY, dict(x=x, y=y), num_samples=10)["y"], left_out)
    full = fit.predict(KEY, fit.silos["york"], num_samples=10)["y"]  # with the shared argument in it
    np.testing.assert_array_equal(full, fit.predict(KEY, dict(x=np.arange(3)), num_samples=10)["y"])
    silos = Silos({name: dict(x=normal(n, n, 2), y=np.arange(n) % 2) for name, n in (("a", 3), ("b", 2))})
    y = given_fit(glmm, silos).predict(KEY, dict(x=np.ones((5, 2))), num_samples=100)["y"]
    assert y.shape == (100, 5) and set(np.unique(y)) == {0, 1}


def test_nested_arguments_are_filled_by_the_whole() -> None:
    case = MODELS["nested arguments"]
    fit = given_fit(case.model, case.silos())
    data = {"a": np.zeros(6), "b": (np.ones((6, 3)),)}
    assert fit.predict(KEY, dict(data=data), num_samples=5)["y"].shape == (5, 6)
    with pytest.raises(ValueError, match=r"nested as in the silos: data\['a'\], data\['b'\]\[0\]"):
        fit.predict(KEY, dict(data={"a": np.zeros(6)}))


def lagged(y):
    rho = numpyro.sample("rho", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(rho * y[:, 0], 1), obs=y[:, 1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((), TypeError, r"predict\(key, silo='york'\) for york's own units"),
        ((None, "bath"), KeyError, "'bath'; the silos are 'leeds', 'york'"),
        ((dict(x=[1.0]), "bath"), KeyError, "'bath'; the silos are 'leeds', 'york'"),
        ((np.zeros(3),), TypeError, "data must be a dict of model arguments, got a ndarray"),
        (
            (dict(z=[1.0]),),
            ValueError,
            "lacks the arguments x; the model has no arguments z. Got z; the model needs x ",
        ),
        ((dict(y=[1.0]),), ValueError, "lacks the arguments x. Got y; the model needs x "),
        ((dict(x=[1.0], y=[1.0, 2.0]),), ValueError, "'x' has 1 rows and 'y' has 2"),
        ((dict(x=np.ones((2, 2))),), ValueError, r"'x' has shape \(2, 2\); the silos have \(rows\)"),
        ((dict(x=[np.nan, 1.0]),), ValueError, "'x' has NaN, first in row 0"),
    ],
)
def test_errors_say_what_to_type(fit: Fit, arguments: tuple, error: type, message: str) -> None:
    data, silo = (*arguments, None, None)[:2]
    with pytest.raises(error, match=message):
        fit.predict(KEY, data, silo=silo)


def test_arguments_whose_values_matter_must_be_given() -> None:
    fit = given_fit(lagged, Silos([dict(y=normal(j, n, 2)) for j, n in enumerate((2, 3))]))
    with pytest.raises(ValueError, match="lacks the arguments y"):
        fit.predict(KEY, {})
    assert fit.predict(KEY, dict(y=np.ones((4, 2))), num_samples=5)["y"].shape == (5, 4)
    no_covariates = given_fit(MODELS["several plates"].model, MODELS["several plates"].silos())
    with pytest.raises(ValueError, match=r"how many units.*give patient_y"):
        no_covariates.predict(KEY, dict(nurse_y=[0.0]))
    county = given_fit(counties, MODELS["long format"].silos())
    with pytest.raises(TypeError, match="'county' is float32; the silos have int"):
        county.predict(KEY, dict(county=np.zeros(2, "f"), num_counties=1))
    with pytest.raises(TypeError, match="'num_counties' must be an int"):
        county.predict(KEY, dict(county=[0], num_counties=np.ones(1, "f")))


def test_observations_inside_a_scan_are_drawn_too() -> None:
    case = MODELS["scan"]
    silos = case.silos()
    fit = given_fit(case.model, silos, scale=0.1, silo=dict(loc=20.0, scale=0.1))
    y = fit.predict(KEY, silo="1", num_samples=500)["y"]
    assert y.shape == (500, 3, 4)
    np.testing.assert_allclose(y.mean(axis=0), 20, atol=0.3)
    with pytest.raises(ValueError, match="how many units"):  # the values of y do not matter
        fit.predict(KEY, {})
    new = fit.predict(KEY, dict(y=np.zeros((2, 3), "f")), num_samples=500)["y"]
    np.testing.assert_allclose(new.mean(axis=0), jnp.zeros((3, 2)), atol=0.5)


def test_rows_that_share_a_distribution_are_drawn_one_by_one() -> None:
    case = MODELS["soft constraint"]
    fit = given_fit(case.model, case.silos(), scale=0.01)
    y = fit.predict(KEY, silo="1", num_samples=500)["y"]
    assert y.shape == (500, 4, 3)
    assert abs(np.corrcoef(y[:, 0, 0], y[:, 1, 0])[0, 1]) < 0.2
