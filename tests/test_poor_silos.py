"""Silos without observations, without a level of a factor, or that cannot identify a global: what each method does."""

from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import numpyro_fed as nf

KEY = jax.random.key(0)
PRIOR = 5.0


def treatment(level, y, present):
    a = numpyro.sample("a", dist.Normal(0, PRIOR))
    b = numpyro.sample("b", dist.Normal(0, PRIOR))
    with numpyro.plate("rows", y.shape[0]), handlers.mask(mask=present):
        numpyro.sample("y", dist.Normal(a + b * level, 1), obs=y)


def silo(seed: int, level: list[int], present: bool = True) -> dict[str, np.ndarray]:
    treated = np.array(level, "f")
    y = 1 + 2 * treated + np.random.default_rng(seed).normal(size=len(level))
    return dict(level=treated, y=y.astype("f"), present=np.full(len(level), present))


BOTH = dict(full=silo(0, [0, 1, 0, 1, 0, 1]), other=silo(1, [0, 1, 1, 0, 1]))
CASES = {
    "no observations": BOTH | dict(none=silo(2, [0, 1, 0, 1], present=False)),
    "a level is missing": BOTH | dict(one=silo(3, [0, 0, 0, 0, 0])),
    "nobody alone": dict(left=silo(4, [0] * 5), right=silo(5, [1] * 5)),
}
EXACT = {"EP": nf.EP, "SEP": nf.SEP, "PVI": nf.PVI, "FedPA": nf.FedPA, "SFVI": nf.SFVI}
POINTS = {"FedAvg": nf.FedAvg, "FedNP": nf.FedNP}


def posterior(silos: dict[str, dict[str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sds of a and b."""
    precision, total = np.eye(2) / PRIOR**2, np.zeros(2)
    for own in silos.values():
        x = np.stack([np.ones(len(own["y"])), own["level"]], axis=1)[own["present"]]
        precision, total = precision + x.T @ x, total + x.T @ own["y"][own["present"]]
    covariance = np.linalg.inv(precision)
    return covariance @ total, np.sqrt(np.diagonal(covariance))


def fitted(method: Any, case: str, num_rounds: int | None = None, **options: Any) -> Any:
    return method(treatment).run(KEY, nf.Silos(CASES[case]), num_rounds, progress_bar=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", EXACT)
def test_methods_that_add_up_are_exact(name: str, case: str) -> None:
    """Everything is normal. .02 sd and 2 %: importance points and stopping rules; SFVI's last steps leave .05."""
    mean, sd = posterior(CASES[case])
    found = fitted(EXACT[name], case, 2000 if name == "SFVI" else None).normal()
    tolerance = 0.05 if name == "SFVI" else 0.02
    np.testing.assert_allclose((found.mean - mean) / sd, 0, atol=tolerance)
    np.testing.assert_allclose(found.sds / sd, 1, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_averages_are_too_wide_and_say_so(case: str) -> None:
    mean, sd = posterior(CASES[case])
    fit = fitted(nf.SFVIAvg, case, check=True)
    assert np.all(np.abs(fit.normal().mean - mean) < 0.2 * sd)
    ratio = fit.normal().sds / sd
    if case == "no observations":
        assert np.all(np.abs(ratio - 1) < 0.1)
    assert np.all(ratio > 0.95) and (fit.verdict.ok or np.any(ratio > 1.2))  # it is told where it matters
    if case == "nobody alone":
        assert any("silos 'left', 'right' cannot tell some direction" in reason for reason in fit.verdict.reasons)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", POINTS)
def test_points_are_right_or_say_that_they_are_not(name: str, case: str) -> None:
    """A fifth of a posterior sd off is told."""
    mean, sd = posterior(CASES[case])
    fit = fitted(POINTS[name], case)
    point = np.array([float(fit.sample(KEY, 1)[site][0]) for site in ("a", "b")])
    assert np.all(np.abs(point - mean) < 0.2 * sd) or "posterior sds away" in " ".join(fit.verdict.reasons)


@pytest.mark.slow
def test_silos_alone_keep_their_prior() -> None:
    fits = nf.Independent(treatment).run(KEY, nf.Silos(CASES["no observations"]), 2000, progress_bar=False)
    _, sd = posterior({"none": CASES["no observations"]["none"]})
    np.testing.assert_allclose(fits["none"].normal().sds / sd, 1, atol=0.05)


@pytest.mark.slow
def test_what_is_asked_of_a_silo_without_observations() -> None:
    fit = fitted(nf.EP, "no observations", check=True)
    assert fit.verdict.ok
    shifts = fit.influence().table
    assert np.all(shifts[shifts["silo"] == "none"]["shift"].abs() < 1e-6)
    np.testing.assert_allclose(fit.without("none").normal().mean, fit.normal().mean, atol=1e-6)
    assert fit.loo().table["units"].to_dict() == {"full": 6, "other": 5, "none": 0}
    assert fit.loo(by="silo").num_units == 2
    values = fit.ppc(["mean", "sd"], num_samples=50).table
    assert values["p_value"].isna().sum() == 2 and set(values[values["p_value"].isna()]["silo"]) == {"none"}
    assert fit.predict(KEY, silo="none", num_samples=3)["y"].shape == (3, 4)


def test_a_silo_without_rows_is_refused() -> None:
    empty = {name: value[:0] for name, value in BOTH["full"].items()}
    with pytest.raises(ValueError, match=r"silo 'empty', argument .* has 0 rows: remove silo 'empty'"):
        nf.Silos(BOTH | dict(empty=empty))
