"""Posterior predictive checks against closed forms, and what leaves a silo."""

from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from given import given_fit
from numpyro import handlers
from scipy import stats

import numpyro_fed as nf
from numpyro_fed.results.ppc import PpcMessage

KEY = jax.random.key(3)
NUM = 2000
MEAN, SD = 1.0, 0.3  # of the posterior of mu


def level(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def children(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("children", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(b[:, None], 1).expand(y.shape).to_event(1), obs=y)


def silos(**sizes: int) -> nf.Silos:
    draws = np.random.default_rng(1)
    return nf.Silos({name: dict(y=(1.4 + draws.normal(size=n)).astype("f")) for name, n in sizes.items()})


def agrees(share: Any, exact: float) -> bool:
    return abs(share - exact) < 4 * (exact * (1 - exact) / NUM) ** 0.5


def test_the_mean_of_a_normal_model() -> None:
    """The mean of n replicates is N(MEAN, SD^2 + 1/n): p and z in closed form, in silos that are padded."""
    data = silos(leeds=4, york=11)
    found = given_fit(level, data, loc=MEAN, scale=SD).ppc("mean", KEY, NUM).table.set_index("silo")
    for name in data.names:
        y = data[name]["y"]
        sd = (SD**2 + 1 / len(y)) ** 0.5
        assert agrees(found.loc[name, "p_value"], stats.norm.sf(y.mean(), MEAN, sd))
        # z's error: that of the replicates' mean, 1 / sqrt(NUM), and of their sd
        assert found.loc[name, "z"] == pytest.approx((y.mean() - MEAN) / sd, abs=4 * 1.5 / NUM**0.5)


def test_locals_of_replicates_are_the_silos_own_or_redrawn() -> None:
    """Means over children with two visits: own levels N(2, .1^2), from their prior they are N(MEAN, SD^2 + 1)."""
    y = (2 + np.random.default_rng(0).normal(size=(6, 2))).astype("f")
    fit = given_fit(children, nf.Silos({"a": dict(y=y)}), loc=MEAN, scale=SD, silo=dict(loc=2.0, scale=0.1))
    (own,), (new,) = (fit.ppc(np.mean, KEY, NUM, redraw_locals=redraw).table["p_value"] for redraw in (False, True))
    assert "redraw_locals=True" in repr(fit.ppc(np.mean, KEY, 20))
    assert agrees(own, stats.norm.sf(y.mean(), 2.0, ((0.01 + 0.5) / 6) ** 0.5))
    assert agrees(new, stats.norm.sf(y.mean(), MEAN, (SD**2 + 1.5 / 6) ** 0.5))


def test_a_silo_with_too_much_spread_is_named() -> None:
    data = silos(leeds=30, york=30)
    wide = nf.Silos({"leeds": data.own("leeds"), "hull": dict(y=3 * data["york"]["y"])})
    found = given_fit(level, wide, loc=MEAN, scale=SD).ppc({"spread": np.std, "largest": "max"}, KEY, 500)
    assert set(found.surprising["silo"]) == {"hull"} and len(found.table) == 4
    assert "silo 'hull': spread of y is larger than the model would have it" in repr(found)
    assert "hull" in found._repr_html_() and "redraw_locals" not in repr(found)


def test_what_leaves_and_what_does_not_count() -> None:
    assert PpcMessage._fields == ("above", "equal", "z")

    def masked(y, present):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", y.shape[0]), handlers.mask(mask=present):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    y, present = np.array([1.0, 500.0, 1.2], "f"), np.array([True, False, True])
    sizes: list[int] = []
    largest = lambda values: sizes.append(len(values)) or np.max(values)
    fit = given_fit(masked, nf.Silos({"a": dict(y=y, present=present)}), loc=MEAN, scale=SD)
    found = fit.ppc(largest, KEY, 100)
    assert set(sizes) == {2} and 0.02 < found.table["p_value"][0] < 0.98


def test_bad_statistics() -> None:
    def one_draw(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1).expand([y.shape[0], 1]).to_event(1), obs=y)

    with pytest.raises(ValueError, match=r"observes values of shape \(3, 2\) in silo 'a', .* draws \(3, 1\).*expand"):
        given_fit(one_draw, nf.Silos({"a": dict(y=np.ones((3, 2), "f"))})).ppc("mean", num_samples=4)
    fit = given_fit(level, silos(leeds=4), loc=MEAN, scale=SD)
    with pytest.raises(ValueError, match=r"statistic 'median' is not known: give a function.*'mean', 'sd'"):
        fit.ppc("median")
    with pytest.raises(ValueError, match=r"array of shape \(4,\) for silo 'leeds'.*one finite number"):
        fit.ppc(lambda y: y, num_samples=4)
    with pytest.raises(ValueError, match="site 'z' is not observed in the silos; those that are: 'y'"):
        fit.ppc("mean", site="z")
    with pytest.raises(ValueError, match="no statistic is given"):
        fit.ppc([])
