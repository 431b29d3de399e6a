"""Leave-one-out cross-validation against closed forms, quadrature and refits; what leaves; models compared."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from given import Given, given_fit
from models import MODELS
from numpyro import handlers
from scipy import stats
from scipy.special import logsumexp
from sealed import sealed
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed.data.silos import at_silo
from numpyro_fed.local.integrate import silo_factor, start_frame
from numpyro_fed.local.units import find_units, log_likelihoods, sizes
from numpyro_fed.model.rows import components_of
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.importance import pareto_smoothed, smoothed_sets
from numpyro_fed.results.loo import BINS, LooMessage, integrated, paired, standard_error, unheard

KEY = jax.random.key(2)
NUM = 2000


def level(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def children(y):
    """Two visits of each child, and the child's own level."""
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("children", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(b[:, None], 1).to_event(1), obs=y)


def long_children(y, child, num_children):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("children", num_children):
        b = numpyro.sample("b", dist.Normal(mu, 1))
    with numpyro.plate("visits", y.shape[0]):
        numpyro.sample("y", dist.Normal(b[child], 1), obs=y)


def long_level(y, child):
    """The same observations, and no child has a level of its own."""
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("visits", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 2.0**0.5), obs=y)


RNG = np.random.default_rng(4)
ROWS = {"leeds": 5, "york": 9, "hull": 3}
Y = {name: (2 + RNG.normal(size=n)).astype("f") for name, n in ROWS.items()}
VISITS = {name: (2 + RNG.normal(size=(n, 1)) + RNG.normal(size=(n, 2))).astype("f") for name, n in ROWS.items()}


def long_silos(**more: Any) -> nf.Silos:
    """In long format; ``more`` are functions of how many children there are."""
    child = lambda v: np.repeat(np.arange(len(v), dtype=np.int32), 2)
    rest = lambda v: {name: make(len(v)) for name, make in more.items()}
    return nf.Silos({name: dict(y=v.reshape(-1), child=child(v)) | rest(v) for name, v in VISITS.items()})


def exact_fit(model: Any, silos: nf.Silos, mean: float, sd: float) -> Fit:
    """A fit whose posterior of mu is this normal."""
    fit = given_fit(model, silos, loc=mean, scale=sd)
    return replace(fit, survey=Given(model).prepare(silos).survey)


def posterior(precisions: np.ndarray, sums: np.ndarray) -> tuple[float, float]:
    """Of mu, from units' precisions and precision-weighted means; the prior is N(0, 100)."""
    precision = 0.01 + precisions.sum()
    return float(sums.sum() / precision), float(precision**-0.5)


def left_out_exactly(units: list[np.ndarray], shared: float, own: float) -> np.ndarray:
    """log p(y_i | y without i) of units y_i ~ N(mu, own I + shared 11')."""
    cov = [own * np.eye(len(u)) + shared for u in units]
    weight = np.array([np.linalg.solve(c, np.ones(len(u))).sum() for c, u in zip(cov, units, strict=True)])
    total = np.array([np.linalg.solve(c, u).sum() for c, u in zip(cov, units, strict=True)])
    out = []
    for i, unit in enumerate(units):
        keep = np.arange(len(units)) != i
        mean, sd = posterior(weight[keep], total[keep])
        out.append(stats.multivariate_normal.logpdf(unit, np.full(len(unit), mean), cov[i] + sd**2))
    return np.array(out)


def check(found: Any, units: dict[str, list[np.ndarray]], shared: float, own: float) -> None:
    """By silo and in all, within five Monte Carlo errors, which are below .05 nats a unit."""
    exact = left_out_exactly([unit for one in units.values() for unit in one], shared, own)
    assert found.num_units == len(exact)
    assert abs(found.elpd - exact.sum()) < max(5 * found.monte_carlo_error, 1e-3) < 0.05 * len(exact)
    assert found.se == pytest.approx(np.std(exact, ddof=1) * len(exact) ** 0.5, rel=0.05)
    start = 0
    for silo, one in units.items():
        own_units, _ = found.in_silo(silo)
        np.testing.assert_allclose(own_units, exact[start : start + len(one)], atol=0.05)
        assert found.table.loc[silo, "elpd"] == pytest.approx(own_units.sum())
        start += len(one)


def test_rows_of_a_normal_model() -> None:
    silos = nf.Silos({name: dict(y=y) for name, y in Y.items()})
    everything = np.concatenate(list(Y.values()))
    fit = exact_fit(level, silos, *posterior(np.ones(len(everything)), everything))
    found = fit.loo(KEY, NUM)
    check(found, {name: [y[i : i + 1] for i in range(len(y))] for name, y in Y.items()}, 0.0, 1.0)
    assert 0.5 < found.p_loo < 1.5  # one parameter
    assert found.pareto_k["k > 1"] == 0 and found.table["above"].sum() == 0
    by_silo = fit.loo(KEY, NUM, by="silo")
    check(by_silo, {name: [y] for name, y in Y.items()}, 0.0, 1.0)


@pytest.mark.slow
def test_children_in_float64(x64: None) -> None:
    test_children_with_a_level_of_their_own("wide")


@pytest.mark.parametrize("form", tiers(["wide", "long"], "wide"))
def test_children_with_a_level_of_their_own(form: str) -> None:
    """The unit is the child with both visits, its level integrated out; by the closed form of its two visits."""
    units = {name: list(v.astype(float)) for name, v in VISITS.items()}
    flat = [u for one in units.values() for u in one]
    weight = 2 / 3  # of a child: 1' (I + 11')^-1 1
    moments = posterior(np.full(len(flat), weight), np.array([weight * u.mean() for u in flat]))
    wide = nf.Silos({name: dict(y=v) for name, v in VISITS.items()})
    fit = exact_fit(*((children, wide) if form == "wide" else (long_children, long_silos(num_children=int))), *moments)
    check(fit.loo(KEY, NUM), units, 1.0, 1.0)
    if form == "long":  # a child is a unit by itself: to name it changes nothing
        np.testing.assert_allclose(fit.loo(KEY, NUM, by="child").elpd, fit.loo(KEY, NUM).elpd, rtol=1e-6)


@pytest.mark.slow
def test_rows_are_left_out_together_by_an_argument() -> None:
    units = {name: list(v.astype(float)) for name, v in VISITS.items()}
    flat = np.concatenate([v.ravel() for v in VISITS.values()]).astype(float)
    fit = exact_fit(long_level, long_silos(), *posterior(np.full(len(flat), 0.5), flat / 2))
    check(fit.loo(KEY, NUM, by="child"), units, 0.0, 2.0)
    assert fit.loo(KEY, NUM).num_units == len(flat)
    for by in ("y", "nobody"):
        with pytest.raises(ValueError, match=f"by='{by}' must be 'silo', or .* whole number for each row.*'child'"):
            fit.loo(by=by)


def test_smoothed_weights_are_those_of_the_host() -> None:
    """Two implementations of one estimator: float64's rounding, but for the grid's sums."""
    draws = np.random.default_rng(0)
    sets = np.stack([draws.normal(size=500) * scale for scale in (0.1, 1.0, 3.0)], axis=1)
    log_weights, k = jax.tree.map(np.asarray, smoothed_sets(sets))
    for j in range(3):
        expected, expected_k = pareto_smoothed(sets[:, j])
        np.testing.assert_allclose(k[j], expected_k, atol=1e-8)
        np.testing.assert_allclose(log_weights[:, j], expected, atol=1e-8)
    assert np.allclose(logsumexp(log_weights, axis=0), 0)


@pytest.mark.slow
def test_what_leaves_are_six_sums() -> None:
    """The message's size does not depend on the rows; elpd by unit is in the silo's state alone."""
    assert LooMessage._fields == ("units", "elpd", "elpd_squared", "lpd", "noise", "pareto_k")
    assert [leaf.shape for leaf in unheard(3)] == [(3,)] * 5 + [(3, len(BINS))]
    silos = nf.Silos({name: dict(y=y) for name, y in Y.items()})
    fit = exact_fit(level, silos, 2.0, 0.25)
    vmap, loopback = (fit.loo(KEY, 256, engine=engine) for engine in (nf.engines.Vmap(), nf.engines.Loopback()))
    np.testing.assert_allclose(vmap.elpd, loopback.elpd, rtol=1e-5)
    assert vmap.bytes_up == loopback.bytes_up > 0
    closed = replace(fit, silos=sealed(silos))  # arrays that can be read in their own room alone
    assert closed.loo(KEY, 256).elpd == vmap.elpd
    assert closed.ppc("mean", KEY, 20).table.equals(fit.ppc("mean", KEY, 20).table)
    assert len(closed.ppc("mean", KEY, 20, redraw_locals=True).table) == 3


@pytest.mark.slow
def test_a_row_that_the_model_cannot_believe_has_a_large_k() -> None:
    y = np.concatenate([RNG.normal(size=30), [15.0]]).astype("f")  # 2.6 sds of the log ratio: few draws have all weight
    fit = exact_fit(level, nf.Silos({"a": dict(y=y)}), *posterior(np.ones(31), y.astype(float)))
    found = fit.loo(KEY, 500)
    assert found.pareto_k["0.7 < k <= 1"] + found.pareto_k["k > 1"] == 1
    assert "1 of 31 have a Pareto k above 0.7" in repr(found) and "fit.correct" in repr(found)


@pytest.mark.slow
def test_masked_observations_and_points_without_a_posterior() -> None:
    def masked(y, present):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", y.shape[0]), handlers.mask(mask=present):
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    silos = nf.Silos({"a": dict(y=np.ones(4, "f"), present=np.array([1, 1, 0, 1], bool))})
    assert exact_fit(masked, silos, 1.0, 0.5).loo(KEY, 100).num_units == 3
    with pytest.raises(ValueError, match="has found a point, without a posterior"):
        exact_fit(masked, silos, 1.0, 0.0).loo(KEY, 100)


# --- models compared ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_models_are_compared_by_paired_differences() -> None:
    units = [u for v in VISITS.values() for u in v.astype(float)]
    moments = posterior(np.full(len(units), 2 / 3), np.array([2 / 3 * u.mean() for u in units]))
    flat = np.concatenate(units)
    fits = {
        "alike": exact_fit(long_level, long_silos(), *posterior(np.full(len(flat), 0.5), flat / 2)),
        "own": exact_fit(long_children, long_silos(num_children=int), *moments),
    }
    with pytest.raises(ValueError, match=r"leave out different units \(34 and 17|17 and 34.*by='silo'"):
        nf.compare_models(fits, KEY, 200)
    found = nf.compare_models(fits, KEY, NUM, by="child")
    off = left_out_exactly(units, 0.0, 2.0) - left_out_exactly(units, 1.0, 1.0)
    best = found.table.index[0]
    sign = 1 if best == "own" else -1
    row = found.table.iloc[1]
    assert row["elpd_diff"] == pytest.approx(sign * off.sum(), abs=0.2)
    assert row["diff_se"] == pytest.approx(np.std(off, ddof=1) * len(off) ** 0.5, rel=0.05)
    assert row["diff_se"] < found.table["se"].min()  # they predict the same children
    assert found.table["log_evidence"].isna().all() and "fit.correct(key)" in repr(found)
    message = paired(found.loos["own"], found.loos["alike"], "york")
    assert message._fields == ("same", "units", "total", "squared") and message.units == ROWS["york"]


def test_standard_error_of_a_sum() -> None:
    values = RNG.normal(size=20)
    expected = np.std(values, ddof=1) * 20**0.5
    assert standard_error(20, values.sum(), (values**2).sum()) == pytest.approx(expected)
    assert np.isnan(standard_error(1, 1.0, 1.0))


def test_models_of_other_data_are_refused() -> None:
    silos = nf.Silos({name: dict(y=y) for name, y in Y.items()})
    fit = exact_fit(level, silos, 2.0, 0.25)

    def renamed(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("log_y", dist.Normal(mu, 1), obs=y)

    with pytest.raises(ValueError, match=r"'a' observes y, 'b' observes log_y: .*Name the same ones alike"):
        nf.compare_models({"a": fit, "b": exact_fit(renamed, silos, 2.0, 0.25)})
    with pytest.raises(ValueError, match="models are compared on the same data"):
        nf.compare_models({"a": fit, "b": exact_fit(level, silos.only("york"), 2.0, 0.25)})
    with pytest.raises(TypeError, match="an empty one"):
        nf.compare_models({})
    with pytest.raises(TypeError, match="'a' must be a fit"):
        nf.compare_models({"a": silos})  # type: ignore[dict-item]


@pytest.mark.slow
def test_evidence_of_corrected_fits_and_refits() -> None:
    """EP's, of a logistic model: elpd against fits without each row, evidence against quadrature."""

    def logistic(x, y, scale):
        beta = numpyro.sample("beta", dist.Normal(0, scale))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=beta * x), obs=y)

    x = RNG.normal(size=10).astype("f")
    y = (x + RNG.logistic(size=10) > 0).astype(np.int32)
    silos = lambda keep, scale: nf.Silos(
        {name: dict(x=x[own & keep], y=y[own & keep]) for name, own in halves.items()}, shared=dict(scale=scale)
    )
    halves = {"a": np.arange(10) < 5, "b": np.arange(10) >= 5}
    grid = np.linspace(-30, 30, 20_001)

    def exact(keep: np.ndarray, scale: float) -> float:
        """log p(y of these rows)."""
        signs = np.where(y[keep] == 1, 1.0, -1.0)
        likelihood = -np.logaddexp(0, -signs * x[keep].astype(float) * grid[:, None]).sum(axis=1)
        return float(logsumexp(likelihood + stats.norm.logpdf(grid, 0, scale)) + np.log(grid[1] - grid[0]))

    every = np.ones(10, bool)
    run = lambda keep, scale: nf.EP(logistic).run(KEY, silos(keep, np.float32(scale)), progress_bar=False)
    fits = {str(scale): run(every, scale).correct(KEY, 1024) for scale in (0.3, 2.0)}
    found = nf.compare_models(fits, KEY)
    for scale in (0.3, 2.0):
        row = found.table.loc[str(scale)]
        assert row["log_evidence"] == pytest.approx(exact(every, scale), abs=5 * row["evidence_se"] + 1e-3)
        one_out = [exact(every, scale) - exact(np.arange(10) != i, scale) for i in range(10)]
        assert row["elpd"] == pytest.approx(np.sum(one_out), abs=5 * found.loos[str(scale)].monte_carlo_error + 0.01)
    # a refit without one row, and the row's predictive density under it
    keep = np.arange(10) != 3
    without = run(keep, 2.0).correct(KEY, 1024).sample(KEY, NUM)["beta"]
    sign = 1.0 if y[3] == 1 else -1.0
    refitted = logsumexp(-np.logaddexp(0, -sign * x[3] * np.asarray(without, float))) - np.log(NUM)
    assert found.loos["2.0"].in_silo("a")[0][3] == pytest.approx(refitted, abs=0.05)


def wheezing(smoke, age, wheeze, own):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([4]).to_event(1))
    omega = numpyro.sample("omega", dist.Normal(0, 10)) if own else 0.0
    with numpyro.plate("children", smoke.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, jnp.exp(-omega)))[:, None] if own else 0.0
        smoke = smoke[:, None]
        logits = beta[0] + beta[1] * smoke + beta[2] * age + beta[3] * smoke * age + b
        numpyro.sample("wheeze", dist.Bernoulli(logits=logits).to_event(1), obs=wheeze)


@pytest.mark.slow
def test_six_cities_with_and_without_childrens_intercepts() -> None:
    """Both leave out a child with its four years. p_loo is about the number of globals, as there are no others."""
    data = nf.datasets.six_cities()
    silos = nf.split(data.silo, shared=dict(age=data.age), smoke=data.smoke, wheeze=data.wheeze)
    fit = lambda own: nf.EP(partial(wheezing, own=own)).run(KEY, silos, progress_bar=False).correct(KEY, 1024)
    found = nf.compare_models({"pooled": fit(False), "intercepts": fit(True)}, KEY)
    print(found)
    assert found.table.index.tolist() == ["intercepts", "pooled"] and found.loos["pooled"].num_units == 537
    assert found.table.loc["pooled", "elpd_diff"] == pytest.approx(-112, abs=1)  # Monte Carlo error: .1
    assert 15 < found.table.loc["pooled", "diff_se"] < 25 < found.table["se"].min()
    assert found.table.loc["pooled", "evidence_diff"] == pytest.approx(-109.6, abs=0.2)
    assert found.table["p_loo"].between(4, 7).all() and not found.table["above"].any()
    assert found.loos["pooled"].bytes_up == 2 * 108


# --- a law of all models ----------------------------------------------------------------------------------------------


KINDS = [  # rows alone, aligned, by index, of two axes, of one silo's latent, that meet, masked, discrete, of no plate
    *("glmm", "several plates", "factors", "long format", "nested plates", "crossed own plates", "silo level"),
    *("pairs", "obs_mask", "class and intercept", "classes of counties", "without plate", "scan"),
]


@pytest.mark.parametrize("name", tiers(KINDS, "glmm"))
def test_units_add_up_to_the_silos_factor(name: str, x64: None) -> None:
    """Whatever is left out: the sum over units of log p(y_i | z) is log f_j(z), and no observation is lost."""
    case = MODELS[name]
    silos = case.silos()
    split, survey, stack, _ = Given(case.model, **case.options).prepare(silos)
    marginal = integrated(SimpleNamespace(split=split, survey=survey))
    marginal = marginal._replace(num=min(marginal.num, 5))
    rows = "none" if marginal.kind == "none" else marginal.rows
    z = np.linspace(-0.3, 0.4, split.dim)

    @jax.jit
    def both(data):
        components = components_of(split, data) if rows == "indexed" else None
        units = find_units(split, rows, None, data, components)
        factor = silo_factor(split, marginal, data, components)
        frame, nodes = factor.refit(z, start_frame(split, data), 20), factor.nodes(jax.random.key(0))
        each = log_likelihoods(split, units, factor, frame, split.theta, data)(z, nodes)
        return jnp.sum(each), factor.log_f(z, frame, nodes), sizes(split, units, data)[0]

    # sites that share discrete latents have one term, and numpyro.factor counts beside observations
    roles = {site.role for site in split.partition.sites if not site.at_server}
    plain = not split.enumeration.components and not {"observed", "factor"} <= roles
    for j, silo in enumerate(silos.names):
        with at_silo(silo):
            total, expected, count = both(stack.data(silo))
        np.testing.assert_allclose(total, expected, rtol=1e-9)
        observed = sum(counts[j] for _, counts in survey.observations)
        assert int(count.sum()) == observed if plain else int(count.sum()) > 0
