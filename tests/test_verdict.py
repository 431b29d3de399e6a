"""A verdict with every fit: a right posterior is trusted, a wrong one is not, and what could not be checked is said."""

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoIAFNormal
from sealed import sealed

import numpyro_fed as nf
from benchmarks.verdict import SPOILED, Given, along, asked, intercepts, intercepts_data, regression, regression_data
from numpyro_fed.results.verdict import Evidence, change, judged

KEY = jax.random.key(0)


@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", SPOILED)
def test_right_from_wrong(kind: str, x64: bool) -> None:
    """An exact posterior changes by rounding alone; one that is off in a coordinate is seen, and in which."""
    with jax.enable_x64(x64):
        for seed in range(3):
            rng = np.random.default_rng(seed)
            silos, mean, covariance = regression_data(3, rng)
            found = asked(regression, silos, along(mean, covariance, *SPOILED[kind], rng), jax.random.key(seed))
            assert found.ok is (kind == "right"), found
            if kind == "right":  # log densities of a few hundred are rounded in their seventh digit
                assert np.all(np.abs(found.table["shift"]) < 1e-3) and np.all(
                    np.abs(found.table["sd_ratio"] - 1) < 1e-3
                )
            else:
                assert found.status == "correct it" and "fit.correct(" in found.reasons[0]


def test_what_a_correction_would_change_is_what_it_changes() -> None:
    rng = np.random.default_rng(0)
    silos, mean, covariance = regression_data(3, rng)
    wrong = nf.Normal(mean + 0.5 * np.sqrt(np.diagonal(covariance)), np.linalg.cholesky(1.5 * covariance))
    table = asked(regression, silos, wrong, KEY).table
    assert np.all(np.abs(table["shift"] + 0.5 / np.sqrt(1.5)) < 4 * table["shift_error"])
    assert np.all(np.abs(table["sd_ratio"] - 1 / np.sqrt(1.5)) < 4 * table["sd_ratio_error"])


def test_pairs_are_exact_where_both_agree() -> None:
    """Whatever the points: their noise is the same in both."""
    rng = np.random.default_rng(0)
    values, log_p, log_t = rng.normal(size=(16, 2)), rng.normal(size=16), rng.normal(size=16)
    found = change(values, log_p - log_t, log_p - log_t + 3.0)
    np.testing.assert_allclose(found.shift, 0, atol=1e-12)
    np.testing.assert_allclose(found.ratio, 1, rtol=1e-12)
    np.testing.assert_allclose([found.shift_error, found.ratio_error], 0, atol=1e-12)


@pytest.mark.slow
def test_locals_are_integrated_out() -> None:
    """A mixed model: EP's own fit is trusted, and is not when it is spoiled."""
    rng = np.random.default_rng(1)
    silos = intercepts_data(rng)
    fit = nf.EP(intercepts).run(KEY, silos, progress_bar=False, check=True)
    assert fit.verdict.ok, fit.verdict
    for shift, factor in list(SPOILED.values())[1:]:
        normal = along(fit.normal().mean, fit.normal().covariance, shift, factor, rng)
        assert not asked(intercepts, silos, normal, KEY).ok


# --- with a run -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def silos() -> nf.Silos:
    return regression_data(2, np.random.default_rng(0))[0]


@pytest.fixture(scope="module")
def fit(silos: nf.Silos) -> nf.Fit:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return nf.EP(regression).run(KEY, silos, progress_bar=False, check=True)


def test_a_right_fit_is_trusted_in_silence(fit: nf.Fit) -> None:
    assert fit.verdict.ok and fit.verdict.status == "trusted" and fit.verdict.reasons == ()
    assert fit.verdict.table.index.tolist() == ["beta[0]", "beta[1]"]
    assert "verdict trusted" in repr(fit) and "not about whether the model fits" in repr(fit.verdict)


def test_the_check_is_counted(silos: nf.Silos, fit: nf.Fit) -> None:
    """256 points of two numbers go down to each silo, and 256 densities come up; then searches for other modes."""
    check = next(record for record in fit.records if record.phase == "check")
    assert 256 * 4 * 3 < check.bytes_up < 256 * 4 * 3 + 300
    assert 256 * 8 * 3 < check.bytes_down < 256 * 8 * 3 + 600
    plain = nf.EP(regression).run(KEY, silos, progress_bar=False)
    asked = sum(record.bytes_up for record in fit.records if record.phase in ("check", "modes"))
    assert np.sum(fit.history["bytes_up"]) - np.sum(plain.history["bytes_up"]) == asked > check.bytes_up


@pytest.mark.merge
def test_a_correction_only_adds_points(fit: nf.Fit) -> None:
    corrected = fit.correct(jax.random.key(7), 1024)
    np.testing.assert_array_equal(corrected.correction.points[:256], fit.evidence.points)
    before, after = (next(r for r in corrected.records if r.phase == name) for name in ("check", "correct"))
    assert after.rounds == 3 and after.bytes_up == 3 * before.bytes_up
    assert corrected.verdict.ok
    few = fit.correct(KEY, 128)
    assert few.records[-1].bytes_up == 0 and len(few.correction.points) == 128


def test_a_file_keeps_the_verdict(fit: nf.Fit, tmp_path: Path) -> None:
    loaded = nf.load(fit.save(tmp_path / "fit"), nf.EP(regression))
    assert loaded.verdict.ok
    np.testing.assert_array_equal(loaded.verdict.table["shift"], fit.verdict.table["shift"])


def test_sealed_silos_are_checked_where_they_are(silos: nf.Silos, fit: nf.Fit) -> None:
    engine = nf.engines.Loopback()
    found = nf.EP(regression).run(KEY, sealed(silos), progress_bar=False, engine=engine, check=True)
    np.testing.assert_allclose(found.evidence.log_target, fit.evidence.log_target, rtol=1e-5)


def test_a_run_that_is_too_short_says_so(silos: nf.Silos) -> None:
    with pytest.warns(nf.VerdictWarning, match="the verdict is 'still moving'.*still fell") as told:
        short = nf.SFVI(regression, start_rounds=0).run(KEY, silos, 60, progress_bar=False, check=True)
    assert len(told) == 1 and told[0].filename == __file__
    assert short.verdict.status == "still moving" and not short.verdict.ok


def test_a_far_posterior_is_not_to_be_trusted(silos: nf.Silos) -> None:
    far = nf.Normal(np.full(2, 30.0), 0.1 * np.eye(2))
    found = asked(regression, silos, far, KEY)
    assert found.status == "not to be trusted" and found.pareto_k > 0.7 and "Pareto k" in found.reasons[0]


@pytest.mark.slow
def test_what_cannot_be_checked_is_said(silos: nf.Silos) -> None:
    run = dict(progress_bar=False, check=True)
    guide = nf.guides.StructuredNormal(global_guide=AutoIAFNormal, coupling=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        point = nf.FedAvg(regression, local_steps=1).run(KEY, silos, 3, **run)
        unasked = nf.EP(regression).run(KEY, silos, 4, progress_bar=False, check=False)
    flow = nf.SFVI(regression, guide=guide).run(KEY, silos, 30, **run)
    for fit, reason in ((point, "no normal posterior"), (flow, "no normal posterior"), (unasked, "check=True")):
        assert not fit.verdict.ok and fit.verdict.status == "not checked" and reason in fit.verdict.reasons[-1]


def test_reasons_of_the_rounds_stand_beside_the_check() -> None:
    found = judged("no points", None, {}, ("it swings",), True)
    assert found.status == "still moving" and found.reasons == ("it swings", "no points")
    assert judged("no points", None, {}, ("a silo is silent",), False).status == "not to be trusted"


def test_quadrature_counts_where_there_is_mass() -> None:
    """Nodes that are too few far out, where no mass is with few or with many, are no reason; in the middle they are."""
    points = np.linspace(-5, 5, 16)[:, None].astype(np.float32)
    evidence = Evidence(points, -0.5 * points[:, 0].astype(float) ** 2, np.zeros(16), np.zeros(2, np.uint32))
    normal, draws = nf.Normal(np.zeros(1), np.eye(1)), {"a": points[:, 0]}
    out, middle = np.zeros(16), np.zeros(16)
    out[0], middle[8] = 1.5, 0.5  # five sds out, a third of an sd
    told = lambda refined: judged(evidence._replace(refined=refined), normal, draws, (), False).reasons
    assert not any("quadrature" in reason for reason in told(out + 3.0))  # a constant changes nothing
    assert any("changes by up to 0.5" in reason for reason in told(middle))
    out[0] = 12.0  # with more nodes there is mass where there was none
    assert any("quadrature" in reason for reason in told(out))


def counts(y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 5))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(a)), obs=y)


@pytest.mark.slow
def test_constrained_scalars_are_what_is_compared() -> None:
    """A posterior that is skewed, in few rows: EP matches moments of the log rate, and the check looks at it."""
    silos = nf.Silos([dict(y=np.array([2, 3], np.int32)), dict(y=np.array([1, 4, 2], np.int32))])
    fit = nf.EP(counts).run(KEY, silos, progress_bar=False, check=True)
    assert fit.verdict.ok and abs(fit.verdict.table["shift"]["a"]) < 0.1


def test_a_given_posterior_has_the_four_functions() -> None:
    assert isinstance(Given(), nf.Posterior)


def test_what_does_not_vary_is_no_finding() -> None:
    """Numbers that are the same at all points, by construction or by rounding."""
    rng = np.random.default_rng(0)
    values = np.stack([rng.normal(size=64), np.full(64, 0.1), np.zeros(64)], axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        found = change(values, rng.normal(size=64), rng.normal(size=64))
        assert not np.any(found.outside[1:]) and found.outside.shape == (3,)
    np.testing.assert_allclose(found.ratio[1:], 1)
    np.testing.assert_allclose([*found.shift[1:], *found.shift_error[1:], *found.ratio_error[1:]], 0, atol=1e-12)


def correlated(y: Any) -> None:
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.MultivariateNormal(0.0, scale_tril=root), obs=y)


def test_a_matrix_with_fixed_elements_is_trusted() -> None:
    """A Cholesky factor of correlations begins with 1 and 0, whatever the data are."""
    rng = np.random.default_rng(0)
    rows = rng.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], size=60).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = nf.EP(correlated).run(KEY, nf.split(np.arange(60) % 2, y=rows), progress_bar=False, check=True)
    assert fit.verdict.status == "trusted", fit.verdict
    np.testing.assert_allclose(fit.verdict.table.loc[["root[0, 0]", "root[0, 1]"], "sd_ratio"].astype(float), 1)


def test_a_posterior_narrower_than_its_precision_is_not_trusted() -> None:
    """All points around it are one number in float32."""
    silos, mean, covariance = regression_data(3, np.random.default_rng(0))
    found = asked(regression, silos, nf.Normal(mean + 5, 1e-9 * np.linalg.cholesky(covariance)), KEY)
    assert found.status == "not to be trusted" and "the same number" in " ".join(found.reasons)
