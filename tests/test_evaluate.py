"""Predicted classes: the measures against hand-worked cases, a fit's probabilities against NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from given import given_fit
from models import MODELS, normal
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from scipy.special import expit, log_softmax, softmax

import numpyro_fed as nf
from numpyro_fed.judge.evaluate import evaluate
from numpyro_fed.judge.metrics import accuracy, ece, log_likelihood, reliability
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.results.fit import Fit

KEY = jax.random.key(5)
X = normal(1, 40, 2)
Y = np.random.default_rng(2).binomial(1, expit(2 * X[:, 0] - X[:, 1])).astype(np.int32)
LABELS = np.random.default_rng(3).integers(0, 3, 40).astype(np.int32)
SILO = np.repeat(["leeds", "york"], [25, 15])
NEW_X = normal(4, 30, 2)
NEW_Y = np.random.default_rng(5).integers(0, 2, 30)
NEW_LABELS = np.random.default_rng(6).integers(0, 3, 30)


# --- measures ---------------------------------------------------------------------------------------------------------


def by_hand(probs: np.ndarray, labels: np.ndarray, num_bins: int) -> float:
    """ECE as in Guo et al. (2017), one observation and one bin at a time."""
    total = 0.0
    for b in range(num_bins):
        inside = [i for i in range(len(labels)) if b / num_bins < max(probs[i]) <= (b + 1) / num_bins]
        if inside:
            right = sum(int(list(probs[i]).index(max(probs[i])) == labels[i]) for i in inside) / len(inside)
            confident = sum(max(probs[i]) for i in inside) / len(inside)
            total += len(inside) / len(labels) * abs(right - confident)
    return total


def test_a_case_worked_by_hand() -> None:
    """Five bins. (0.6, 0.8]: 0.65 and 0.75, one of them right; (0.8, 1]: 0.9, right; (0.2, 0.4]: 0.4, wrong."""
    probs = [[0.65, 0.35, 0.0], [0.2, 0.75, 0.05], [0.0, 0.1, 0.9], [0.4, 0.3, 0.3]]
    labels = [0, 0, 2, 1]
    assert accuracy(probs, labels) == 0.5
    assert np.isclose(log_likelihood(probs, labels), np.mean(np.log([0.65, 0.2, 0.9, 0.3])))
    assert np.isclose(ece(probs, labels, num_bins=5), (2 * abs(0.5 - 0.7) + abs(1 - 0.9) + abs(0 - 0.4)) / 4)
    found = reliability(probs, labels, num_bins=5)
    assert found["count"].tolist() == [0, 1, 0, 2, 1]
    np.testing.assert_allclose(found["confidence"], [np.nan, 0.4, np.nan, 0.7, 0.9])
    np.testing.assert_allclose(found["accuracy"], [np.nan, 0, np.nan, 0.5, 1])
    np.testing.assert_allclose(found[["lower", "upper"]], np.stack([np.arange(5), np.arange(1, 6)], axis=1) / 5)


@pytest.mark.parametrize("num_classes", [2, 3, 10])
@pytest.mark.parametrize("num_bins", [1, 7, 15])
def test_ece_is_that_of_a_plain_loop(num_classes: int, num_bins: int) -> None:
    rng = np.random.default_rng(num_classes)
    probs = rng.dirichlet(np.ones(num_classes), size=200)
    labels = rng.integers(0, num_classes, 200)
    assert np.isclose(ece(probs, labels, num_bins), by_hand(probs, labels, num_bins))


def test_labels_drawn_from_the_probabilities_are_calibrated() -> None:
    """With n_b observations in bin b, E|accuracy - confidence| is at most sqrt(1/4 / n_b), so E[ECE] is at most
    sqrt(num_bins / (4 n)) by Cauchy and Schwarz: 0.014. Its sd is smaller than that."""
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(3), size=20_000)
    labels = np.argmax(np.cumsum(probs, axis=1) > rng.random((20_000, 1)), axis=1)
    assert ece(probs, labels) < 3 * np.sqrt(15 / (4 * 20_000))
    assert ece(softmax(3 * np.log(probs), axis=1), labels) > 0.1  # too sure


def test_one_probability_is_that_of_label_one() -> None:
    p, labels = np.array([[0.2, 0.9], [0.6, 0.7]]), np.array([[0, 1], [0, 0]])
    both = np.stack([1 - p, p], axis=-1)
    for measure in (accuracy, log_likelihood, ece):
        assert measure(p, labels) == measure(both, labels)
    assert accuracy(p, labels) == 0.5


def test_an_impossible_label_has_log_likelihood_minus_infinity() -> None:
    assert log_likelihood([[1.0, 0.0]], [1]) == -np.inf


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            lambda: accuracy(np.ones((4, 2)) / 2, np.zeros(3, int)),
            r"shape \(4, 2\) and labels \(3,\): give probs one more",
        ),
        (lambda: accuracy([[0.5, 0.4]], [0]), r"add up to 1; of logits, pass jax.nn.softmax\(logits\)"),
        (lambda: log_likelihood([[1.5, -0.5]], [0]), "probs must be at least 0"),
        (lambda: ece([[0.5, 0.5]], [2]), "ints from 0 to 1, one for each class, got 2"),
        (lambda: ece([[0.5, 0.5]], [0.5]), "ints from 0 to 1, one for each class, got 0.5"),
        (lambda: ece([[0.5, 0.5]], [np.nan]), "ints from 0 to 1, one for each class, got nan"),
        (lambda: ece([[0.5, 0.5]], [0], num_bins=0), "num_bins must be an int of at least 1, got 0"),
        (lambda: accuracy(np.zeros((0, 2)), np.zeros(0)), "there are no labels"),
    ],
)
def test_measures_say_what_they_need(call: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()


# --- of a fit ---------------------------------------------------------------------------------------------------------


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def multinomial(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=x @ w), obs=y)


@pytest.fixture(scope="module")
def binary_fit() -> Fit:
    return nf.EP(logistic).run(KEY, nf.split(SILO, x=X, y=Y), num_rounds=2, progress_bar=False)


@pytest.fixture(scope="module")
def class_fit() -> Fit:
    return nf.SFVI(multinomial).run(KEY, nf.split(SILO, x=X, y=LABELS), num_rounds=50, progress_bar=False)


def check(row: Any, probs: np.ndarray, labels: np.ndarray) -> None:
    """A row of the table has the measures of these probabilities."""
    assert row["accuracy"] == accuracy(probs, labels)
    assert np.isclose(row["log_likelihood"], log_likelihood(probs, labels), rtol=1e-5)
    assert np.isclose(row["ece"], ece(probs, labels), atol=1e-5)
    assert row["num_observations"] == labels.size


@pytest.mark.slow
def test_of_labels_zero_and_one(binary_fit: Fit) -> None:
    found = evaluate(binary_fit, dict(x=NEW_X, y=NEW_Y), KEY)
    assert found.index.tolist() == ["point", "marginalised"]
    assert found.columns.tolist() == [
        "accuracy",
        "log_likelihood",
        "mean_log_likelihood",
        "ece",
        "num_observations",
    ]
    assert [str(dtype) for dtype in found.dtypes] == ["float64"] * 4 + ["int64"]
    beta = np.asarray(binary_fit.sample(KEY, 10)["beta"], np.float64)
    check(found.loc["marginalised"], expit(NEW_X @ beta.T).mean(axis=1), NEW_Y)


@pytest.mark.merge
def test_of_classes(class_fit: Fit) -> None:
    found = evaluate(class_fit, dict(x=NEW_X, y=NEW_LABELS), KEY, num_samples=7)
    w = np.asarray(class_fit.sample(KEY, 7)["w"], np.float64)
    check(found.loc["marginalised"], softmax(np.einsum("ni,sik->snk", NEW_X, w), axis=-1).mean(axis=0), NEW_LABELS)


def test_two_readings_of_the_log_likelihood(class_fit: Fit) -> None:
    """The mean of logarithms beside the logarithm of means, in float32; smaller by Jensen, and equal at a point."""
    found = evaluate(class_fit, dict(x=NEW_X, y=NEW_LABELS), KEY, num_samples=7)
    w = np.asarray(class_fit.sample(KEY, 7)["w"], np.float64)
    each = log_softmax(np.einsum("ni,sik->snk", NEW_X, w), axis=-1)[:, np.arange(30), NEW_LABELS]
    np.testing.assert_allclose(found.loc["marginalised", "mean_log_likelihood"], each.mean(), rtol=1e-5)
    assert found.loc["marginalised", "mean_log_likelihood"] < found.loc["marginalised", "log_likelihood"] - 1e-3
    np.testing.assert_allclose(*found.loc["point", ["log_likelihood", "mean_log_likelihood"]], rtol=1e-6)


@pytest.mark.merge
def test_the_point_is_the_mean_of_the_unconstrained_globals(binary_fit: Fit) -> None:
    """Known from 1,000 draws to sd / sqrt(1000); 5 of these move the mean log likelihood by at most that times the
    norm of x, as a log sigmoid's slope is at most one."""
    found = evaluate(binary_fit, dict(x=NEW_X, y=NEW_Y), KEY)
    draws = np.asarray(binary_fit.sample(jax.random.key(9), 20_000)["beta"], np.float64)
    probs = expit(NEW_X @ draws.mean(axis=0))
    error = np.mean(np.linalg.norm(NEW_X, axis=1)) * np.linalg.norm(draws.std(axis=0)) / np.sqrt(1000)
    assert abs(found.loc["point", "log_likelihood"] - log_likelihood(probs, NEW_Y)) < 5 * error


def test_a_normal_is_evaluated_at_its_own_mean() -> None:
    fit = given_fit(logistic, nf.split(SILO, x=X, y=Y), loc=0.5, scale=2.0)
    fit.posterior.normal = lambda server: Normal(jnp.array([1.0, -2.0]), jnp.ones(2))
    found = evaluate(fit, dict(x=NEW_X, y=NEW_Y), KEY)
    check(found.loc["point"], expit(NEW_X @ [1.0, -2.0]), NEW_Y)


@pytest.mark.merge
def test_the_key_decides_and_has_a_default(binary_fit: Fit) -> None:
    data = dict(x=NEW_X, y=NEW_Y)
    assert evaluate(binary_fit, data).equals(evaluate(binary_fit, data, jax.random.key(0)))
    assert not evaluate(binary_fit, data).equals(evaluate(binary_fit, data, KEY))


def test_of_a_silos_own_data(binary_fit: Fit) -> None:
    """Silos are padded in the run: york's 15 rows count once each."""
    own = dict(x=X[25:], y=Y[25:])
    assert evaluate(binary_fit, silo="york").equals(evaluate(binary_fit, own))
    assert evaluate(binary_fit, silo="york")["num_observations"].tolist() == [15, 15]
    assert evaluate(binary_fit, own, silo="leeds").equals(evaluate(binary_fit, own))


def test_far_off_labels_have_a_finite_log_likelihood() -> None:
    """The probability of the other label, exp(-200), is zero in float32."""
    fit = given_fit(logistic, nf.split(SILO, x=X, y=Y), loc=1.0, scale=0.0)
    found = evaluate(fit, dict(x=np.full((1, 2), 100.0), y=[0]))
    np.testing.assert_allclose(found["log_likelihood"], -200)
    np.testing.assert_allclose(found["mean_log_likelihood"], -200)


# --- other ways to write it -------------------------------------------------------------------------------------------

Z = 0.7  # every global, exactly


def given(model: Any, **arguments: Any) -> Fit:
    return given_fit(model, nf.split(SILO, **arguments), loc=Z, scale=0.0)


def slope() -> Any:
    return numpyro.sample("b", dist.Normal(0, 1))


def probs_of_bernoulli(x, y):
    numpyro.sample("y", dist.Bernoulli(probs=jax.nn.sigmoid(slope() * x)), obs=y)


def one_for_all_rows(x, y):
    b = slope()
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b), obs=y)


@pytest.mark.parametrize(
    ("model", "logits"),
    [(probs_of_bernoulli, Z * NEW_X[:, 0]), (one_for_all_rows, np.full(30, Z))],
    ids=["probs", "one for all rows"],
)
def test_bernoullis(model: Any, logits: np.ndarray) -> None:
    found = evaluate(given(model, x=X[:, 0], y=Y), dict(x=NEW_X[:, 0], y=NEW_Y))
    for name in ("point", "marginalised"):
        check(found.loc[name], expit(logits), NEW_Y)


def probs_of_classes(x, y):
    b = slope()
    numpyro.sample("y", dist.Categorical(probs=jax.nn.softmax(b * x[:, None] * jnp.arange(3.0), axis=-1)), obs=y)


def test_categorical_probs() -> None:
    found = evaluate(given(probs_of_classes, x=X[:, 0], y=LABELS), dict(x=NEW_X[:, 0], y=NEW_LABELS))
    check(found.loc["point"], softmax(Z * NEW_X[:, :1] * np.arange(3), axis=-1), NEW_LABELS)


def several_labels(x, y):
    b = slope()
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b * x).to_event(1), obs=y)


def test_several_labels_of_a_row_count_each() -> None:
    labels = np.random.default_rng(8).integers(0, 2, (30, 2))
    found = evaluate(given(several_labels, x=X, y=(X > 0).astype(np.int32)), dict(x=NEW_X, y=labels))
    check(found.loc["marginalised"], expit(Z * NEW_X), labels)
    assert found["num_observations"].tolist() == [60, 60]


def masked_rows(x, y, keep):
    b = slope()
    with numpyro.plate("rows", x.shape[0]), handlers.mask(mask=keep):
        numpyro.sample("y", dist.Bernoulli(logits=b * x).to_event(1), obs=y)


def masked_labels(x, y, keep):
    b = slope()
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b * x).mask(keep).to_event(1), obs=y)


@pytest.mark.parametrize("model", [masked_rows, masked_labels])
def test_masked_observations_do_not_count(model: Any) -> None:
    shape = (40,) if model is masked_rows else (40, 2)
    keep = np.random.default_rng(7).random(shape) < 0.5
    fit = given(model, x=X, y=(X > 0).astype(np.int32), keep=keep)
    labels = np.random.default_rng(8).integers(0, 2, (30, 2))
    new = keep[:30]
    found = evaluate(fit, dict(x=NEW_X, y=np.where(new.reshape(30, -1), labels, -9), keep=new))
    check(found.loc["point"], expit(Z * NEW_X[new]).ravel(), labels[new].ravel())
    with pytest.raises(ValueError, match="no observation counts"):
        evaluate(fit, dict(x=NEW_X, y=labels, keep=np.zeros_like(new)))


def partly_observed(x, y, present):
    b = slope()
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=b * x), obs=y, obs_mask=present)


def test_missing_labels_do_not_count() -> None:
    present = np.random.default_rng(7).random(40) < 0.5
    fit = given(partly_observed, x=X[:, 0], y=Y, present=present)
    found = evaluate(fit, dict(x=NEW_X[:, 0], y=NEW_Y, present=present[:30]))
    check(found.loc["point"], expit(Z * NEW_X[:, 0])[present[:30]], NEW_Y[present[:30]])


def in_a_row(x, y):
    """The second label depends on the first, which is observed."""
    b = slope()
    with numpyro.plate("rows", x.shape[0]):
        first = numpyro.sample("first", dist.Bernoulli(logits=b * x), obs=y)
        numpyro.sample("second", dist.Categorical(logits=jnp.stack([b * x, 3.0 * first], axis=-1)), obs=1 - y)


def test_other_observations_are_held() -> None:
    fit, data = given(in_a_row, x=X[:, 0], y=Y), dict(x=NEW_X[:, 0], y=NEW_Y)
    logits = np.stack([Z * NEW_X[:, 0], 3 * NEW_Y], axis=-1)
    check(evaluate(fit, data, site="second").loc["marginalised"], np.exp(log_softmax(logits, axis=-1)), 1 - NEW_Y)
    check(evaluate(fit, data, site="first").loc["marginalised"], expit(Z * NEW_X[:, 0]), NEW_Y)
    with pytest.raises(ValueError, match="several sites have classes, 'first', 'second': choose, site='first'"):
        evaluate(fit, data)
    with pytest.raises(ValueError, match=r"at 'third'; the observed sites are 'first' \(Bernoulli\), 'second'"):
        evaluate(fit, data, site="third")


# --- local latents ----------------------------------------------------------------------------------------------------


def intercepts(x, y):
    """logit p = a + b_i + x_i; a is the silo's, b_i the row's."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    a = numpyro.sample("a", dist.Normal(mu, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 2.0))
        numpyro.deterministic("logits", a + b + x)
        numpyro.sample("y", dist.Bernoulli(logits=a + b + x), obs=y)


@pytest.fixture(scope="module")
def local_fit() -> Fit:
    silos = nf.split(SILO, x=X[:, 0], y=Y)
    return given_fit(intercepts, silos, loc=Z, scale=0.5, silo=dict(loc=1.0, scale=0.3, coupling=0.5), local=["a"])


@pytest.mark.merge
@pytest.mark.parametrize("silo", [None, "york", "own"])
def test_local_latents_are_those_of_predict(local_fit: Fit, silo: str | None) -> None:
    """The model's own deterministic logits tell what predict has drawn with the same key."""
    where: dict[str, Any] = dict(data=dict(x=NEW_X[:, 0], y=NEW_Y), silo=silo)
    if silo == "own":
        where = dict(data=None, silo="york")
    labels = Y[25:] if silo == "own" else NEW_Y
    logits = np.asarray(local_fit.predict(KEY, num_samples=6, **where)["logits"], np.float64)
    found = evaluate(local_fit, rng_key=KEY, num_samples=6, **where)
    check(found.loc["marginalised"], expit(logits).mean(axis=0), labels)


def test_at_a_point_of_the_globals_locals_are_averaged_over(local_fit: Fit) -> None:
    """Without spread in the globals, the point and the posterior are one."""
    fit = given_fit(intercepts, local_fit.silos, loc=Z, scale=0.0, local=["a"])
    found = evaluate(fit, dict(x=NEW_X[:, 0], y=NEW_Y), num_samples=6)
    np.testing.assert_allclose(*found.to_numpy(), rtol=1e-5)


def test_discrete_latents_of_own_units_have_their_posterior() -> None:
    """The classes are told beside the model, and change none of its densities."""
    case = MODELS["classes of items"]
    silos = case.silos()
    fit, name = given_fit(case.model, silos), silos.names[-1]
    draws = {site: np.asarray(value) for site, value in fit.sample_local(KEY, 6, silo=name).items()}
    probs = np.mean([p[kind.reshape(-1)] for p, kind in zip(draws["p"], draws["kind"], strict=True)], axis=0)
    check(evaluate(fit, rng_key=KEY, num_samples=6, silo=name).loc["marginalised"], probs, silos[name]["y"])


# --- errors -----------------------------------------------------------------------------------------------------------


def test_labels_are_needed(binary_fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"data lacks the arguments y\. Got x; the model needs x, y"):
        evaluate(binary_fit, dict(x=NEW_X))


def test_labels_are_classes(class_fit: Fit) -> None:
    with pytest.raises(ValueError, match="labels must be ints from 0 to 2, one for each class, got 3"):
        evaluate(class_fit, dict(x=NEW_X, y=NEW_LABELS + 1))


def test_a_site_with_classes_is_needed() -> None:
    def linear(x, y):
        numpyro.sample("y", dist.Normal(slope() * x, 1.0), obs=y)

    with pytest.raises(ValueError, match=r"needs an observed Bernoulli or Categorical; .* are 'y' \(Normal\)"):
        evaluate(given(linear, x=X[:, 0], y=X[:, 1]), dict(x=X[:, 0], y=X[:, 1]))


def test_probabilities_that_are_no_numbers() -> None:
    fit = given_fit(logistic, nf.split(SILO, x=X, y=Y), loc=np.nan)
    with pytest.raises(ValueError, match=r"class probabilities are NaN: .* See fit\.history"):
        evaluate(fit, dict(x=NEW_X, y=NEW_Y))


def test_a_scan_hides_its_distributions() -> None:
    def chained(y):
        b = slope()

        def step(carry, y):
            numpyro.sample("y", dist.Bernoulli(logits=b + carry), obs=y)
            return carry, None

        scan(step, jnp.zeros(()), y)

    labels = np.zeros((2, 4), np.int32)
    fit = given_fit(chained, nf.Silos([dict(y=one) for one in labels]), loc=Z, scale=0.0)
    with pytest.raises(ValueError, match="'y' cannot be read: it is observed inside a scan"):
        evaluate(fit, dict(y=labels[0]))


def test_what_to_type(binary_fit: Fit) -> None:
    with pytest.raises(TypeError, match="evaluate needs data, a silo, or both"):
        evaluate(binary_fit)
    with pytest.raises(TypeError, match=r"evaluate takes a fit .* got a dict"):
        evaluate({}, dict(x=NEW_X, y=NEW_Y))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_samples must be an int of at least 1, got 0"):
        evaluate(binary_fit, dict(x=NEW_X, y=NEW_Y), num_samples=0)
    with pytest.raises(TypeError, match="rng_key must be a JAX key"):
        evaluate(binary_fit, dict(x=NEW_X, y=NEW_Y), 3)
    with pytest.raises(KeyError, match="no silo is named 'hull'"):
        evaluate(binary_fit, silo="hull")
