"""The correction round: it leaves an exact posterior alone, repairs a wrong one, and says when it could not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.autoguide import AutoIAFNormal
from programs import compiled
from scipy import stats
from scipy.special import logsumexp
from test_influence import METHOD, make_silos, model, moments, posterior

import numpyro_fed as nf
from numpyro_fed.algorithm import Left
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.local.start import WarmStart
from numpyro_fed.results import correction, importance
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.state import State
from numpyro_fed.run import target

KEY = jax.random.key(4)
NUM = 4000  # draws, always as many: another number is another program


@pytest.fixture(scope="module")
def silos() -> nf.Silos:
    with jax.enable_x64(True):
        return make_silos()


def given(method: Any, silos: nf.Silos, mean: Any, covariance: Any, theta: dict | None = None) -> Fit:
    """A fit with this posterior of the globals and this theta; no round was run."""
    split, survey, stack, phase, posterior = compiled(method, silos)
    fresh, states = Vmap().start(phase.algorithm, KEY, stack)
    root = np.linalg.cholesky(covariance)
    dtype = jnp.zeros(()).dtype
    unit = jax.tree.map(jnp.ones_like, theta or {})
    warm = WarmStart(jnp.asarray(mean, dtype), jnp.asarray(root, dtype), jnp.ones(len(mean)), theta or {}, unit)
    server, given = phase.begin(Left(warm=warm), fresh)
    states = Vmap().in_silos(phase.begin_silo, given, stack, states, None)
    buckets = tuple(bucket.names for bucket in stack.buckets)
    padded = tuple(bucket.lengths for bucket in stack.buckets)
    state = State(type(method).__name__, silos.names, buckets, server, states, 0)
    history = {"loss": np.array([1.0]), "bytes_up": np.array([10]), "bytes_down": np.array([20])}
    return Fit(posterior, split, state, history, 0.1, padded, silos, survey=survey, again=method.again())


def test_in_a_notebook() -> None:
    shown = correction.Correction(correction.Corrected(None, np.zeros((4, 1)), np.full(4, np.log(0.25)), 0.9, -12.34))
    html = shown._repr_html_()
    assert "4 of 4" in html and "0.90" in html and "-12.34" in html and "do not trust" in html


@pytest.fixture(scope="module")
def exact(silos: nf.Silos) -> Fit:
    with jax.enable_x64(True):
        return given(METHOD, silos, *posterior(silos, *silos.names))


@pytest.fixture(scope="module")
def wrong(silos: nf.Silos) -> Fit:
    """Off by a sd in the mean, with sds too small by a quarter and a wrong correlation."""
    with jax.enable_x64(True):
        mean, cov = posterior(silos, *silos.names)
        return given(METHOD, silos, mean + np.sqrt(np.diagonal(cov)) * [1, -1], 0.56 * np.diag(np.diagonal(cov)))


@pytest.fixture(scope="module")
def corrected(wrong: Fit) -> Fit:
    with jax.enable_x64(True):
        return wrong.correct(KEY, num_points=2048)


def errors(fit: Fit, silos: nf.Silos) -> tuple[float, float]:
    """Largest error of a mean, in sds, and of a log sd."""
    assert fit.correction is not None
    mean, cov = posterior(silos, *silos.names)
    found, spread = fit.correction.moments()
    sd = np.sqrt(np.diagonal(cov))
    return np.max(np.abs(found - mean) / sd), np.max(np.abs(np.log(np.sqrt(np.diagonal(spread)) / sd)))


@pytest.mark.merge
@pytest.mark.usefixtures("x64")
def test_an_exact_posterior_stays(exact: Fit, silos: nf.Silos) -> None:
    fit = exact.correct(KEY, num_points=1500)
    found = fit.correction
    assert found is not None and found.points.shape == (2048, 2)  # rounded up to a power of two
    shift, log_sd = errors(fit, silos)
    assert shift < 0.005 and log_sd < 0.005  # plain Monte Carlo would have errors of 0.02
    # the share of a normal in points of the t: 1 / E_t[(p / t)^2], over the radius
    radius = np.linspace(1e-3, 12, 20_000)
    scale = radius / np.sqrt(importance.INFLATION)
    normal = np.exp(-0.5 * radius**2) / (2 * np.pi)
    t = (1 + scale**2 / 3) ** -2.5 / (2 * np.pi * importance.INFLATION)  # (nu + d) / 2; its constant is 1 / (2 pi)
    ideal = 1 / np.trapezoid(normal**2 / t * 2 * np.pi * radius, radius)
    assert found.ess_share == pytest.approx(ideal, abs=0.01) and found.pareto_k < 0.5 and found.trusted
    x = np.concatenate([silos[name]["x"] for name in silos.names])
    y = np.concatenate([silos[name]["y"] for name in silos.names])
    marginal = stats.multivariate_normal(np.zeros(len(y)), 4 * x @ x.T + (0.25 + 0.49) * np.eye(len(y)))
    assert found.log_evidence == pytest.approx(marginal.logpdf(y), abs=0.01)
    assert fit.history["loss"][-1] == -found.log_evidence


@pytest.mark.usefixtures("x64")
def test_a_wrong_posterior_is_repaired(wrong: Fit, corrected: Fit, silos: nf.Silos) -> None:
    shift, log_sd = errors(corrected, silos)
    assert shift < 0.05 and log_sd < 0.05
    again = corrected.correct(jax.random.key(5))
    assert again.correction.ess > corrected.correction.ess  # from around the weighted points
    shift, log_sd = errors(again, silos)
    assert shift < 0.01 and log_sd < 0.01
    assert isinstance(again.posterior, correction.CorrectedPosterior) and again.posterior.inner is wrong.posterior
    assert again.num_rounds == 3


@pytest.mark.merge
@pytest.mark.usefixtures("x64")
def test_draws_come_from_the_weighted_points(corrected: Fit, silos: nf.Silos, tmp_path: Path) -> None:
    draws = corrected.sample(KEY, NUM)["beta"]
    mean, cov = posterior(silos, *silos.names)
    np.testing.assert_allclose(draws.mean(0), mean, atol=0.1 * np.sqrt(cov.max()))
    joint = corrected.sample_local(KEY, NUM, silo="york")
    assert np.array_equal(joint["beta"], draws) and joint["b"].shape == (NUM, 5)
    np.testing.assert_allclose(corrected.summary(num_samples=NUM)["sd"], np.sqrt(np.diagonal(cov)), rtol=0.1)
    reference = {"beta": np.random.default_rng(0).multivariate_normal(mean, cov, NUM)}
    cmp = nf.compare({"corrected": corrected}, reference, num_samples=NUM)
    assert cmp.table["mean_shift"].abs().max() < 0.1
    tree = corrected.to_arviz(KEY, NUM, local=False)
    assert np.array_equal(tree["posterior"]["beta"][0], draws)
    assert corrected.predict(KEY, silo="york", num_samples=4)["y"].shape == (4, 5)
    loaded = nf.load(corrected.save(tmp_path / "fit"), METHOD)
    assert np.array_equal(loaded.sample(KEY, NUM)["beta"], draws) and repr(loaded) == repr(corrected)
    assert loaded.correction.pareto_k == corrected.correction.pareto_k and loaded.uncorrected.state.method == "EP"


@pytest.mark.usefixtures("x64")
def test_it_goes_through_bytes(wrong: Fit, corrected: Fit) -> None:
    plain = wrong.correct(KEY, num_points=2048, engine=nf.engines.Loopback())
    for name, rows in corrected.history.items():
        np.testing.assert_allclose(plain.history[name], rows, rtol=1e-9)
    np.testing.assert_allclose(plain.correction.log_weights, corrected.correction.log_weights, atol=1e-8)
    up, down = corrected.history["bytes_up"][-1], corrected.history["bytes_down"][-1]
    # in eight blocks: its likelihood at the points, at 16 of each with more nodes, and little around it
    assert 3 * 8 * 2048 < up < 3 * 8 * (8 * (256 + 16) + 50)
    assert 3 * 8 * 2048 * 2 < down < 3 * 8 * (8 * (256 + 1) * 2 + 120)


@pytest.mark.usefixtures("x64")
def test_what_it_says(wrong: Fit, corrected: Fit) -> None:
    assert repr(corrected).startswith("Fit by EP: ") and "correction ess" in repr(corrected)
    assert "correction" not in repr(corrected.uncorrected)
    assert wrong.correction is None and wrong.uncorrected is wrong
    assert corrected.uncorrected.sample(KEY, 3)["beta"].tolist() == wrong.sample(KEY, 3)["beta"].tolist()
    server = corrected.state.server
    told = lambda **changes: repr(correction.Correction(server._replace(**changes)))
    one = np.full(2048, -30.0)
    one[0] = 0.0
    assert "to be trusted" in told(pareto_k=0.1)
    assert "do not trust its tails" in told(pareto_k=0.9, log_weights=np.full(2048, -np.log(2048)))
    assert "do not trust it" in told(pareto_k=0.9, log_weights=one - logsumexp(one))
    assert "too few effective points" in told(pareto_k=0.1, log_weights=one - logsumexp(one))


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
def test_runs_go_on_from_it(corrected: Fit, silos: nf.Silos) -> None:
    with pytest.raises(ValueError, match=r"of a corrected fit of EP: pass the Fit.*fit\.uncorrected\.state"):
        METHOD.run(KEY, silos, 1, init_state=corrected.state)
    found = corrected.posterior.to_warm_start(corrected.state.server)
    mean, cov = corrected.correction.moments()
    np.testing.assert_allclose(found.loc, mean)
    np.testing.assert_allclose(found.chol @ found.chol.T, cov)
    on = METHOD.run(KEY, silos, 2, init_state=corrected, progress_bar=False)
    for a, b in zip(moments(on), posterior(silos, *silos.names), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    lonely = corrected.state.server._replace(log_weights=jnp.full(2048, -jnp.inf).at[3].set(0.0))
    with pytest.raises(ValueError, match=r"effective sample size of 1\.0, too few .*fit\.uncorrected"):
        corrected.posterior.to_warm_start(lonely)


@pytest.mark.merge
@pytest.mark.usefixtures("x64")
def test_errors_teach(exact: Fit, corrected: Fit, silos: nf.Silos, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_points must be an int of at least 16, got 4"):
        exact.correct(KEY, 4)
    with pytest.raises(TypeError, match="rng_key must be a JAX key"):
        exact.correct(0)
    with pytest.raises(ValueError, match=r"points need the silos' data.*pass silos= to nf\.load"):
        nf.load(exact.save(tmp_path / "fit"), METHOD).correct(KEY)
    guide = nf.guides.StructuredNormal(global_guide=AutoIAFNormal, coupling=False)
    sfvi = nf.SFVI(model, guide=guide)
    server = sfvi.again().prepare(KEY, silos).state.server
    guided = sfvi.posterior_of(exact.split, exact.survey)
    flow = replace(exact, posterior=guided, state=exact.state._replace(method="SFVI", server=server))
    with pytest.raises(ValueError, match=r"nf\.SFVI with .*AutoIAFNormal.* has no normal posterior.*nf\.EP"):
        flow.normal()
    with pytest.raises(TypeError, match=r"starts from a normal.*nf\.SFVI with .*AutoIAFNormal.*fit with nf\.EP"):
        flow.correct(KEY)
    far = given(METHOD, silos, np.full(2, 1e200), np.eye(2))
    with pytest.raises(ValueError, match="not finite at any of 2048 points"):
        far.correct(KEY)
    for ask in (corrected.influence, lambda: corrected.without("york")):
        with pytest.raises(TypeError, match=r"a corrected posterior has no sites: use fit\.uncorrected\."):
            ask()


def test_points_are_a_student_t() -> None:
    with jax.enable_x64(True):
        mean, cov = np.array([1.0, -2.0]), np.array([[4.0, 0.6], [0.6, 0.25]])
        points, log_density = importance.proposal(importance.scrambling(KEY), mean, cov, 4096)
        expected = stats.multivariate_t(mean, 1.1 * cov, df=3).logpdf(points)
    np.testing.assert_allclose(log_density, expected, rtol=1e-10)
    white = np.linalg.solve(np.linalg.cholesky(1.1 * cov), (points - mean).T)
    assert stats.kstest(white[0], stats.t(3).cdf).statistic < 0.005  # of random points: about 0.014
    with jax.enable_x64(True):
        other = importance.proposal(importance.scrambling(jax.random.key(5)), mean, cov, 4096)[0]
        assert np.array_equal(
            importance.proposal(importance.scrambling(KEY), mean, cov, 4096)[0], points
        ) and not np.array_equal(other, points)


def test_weights_are_smoothed() -> None:
    draws = np.random.default_rng(0)
    equal, pareto_k = importance.pareto_smoothed(np.full(100, -7.0))
    assert pareto_k == -np.inf and np.allclose(equal, -np.log(100))
    for shape in (0.2, 0.9):
        given = np.log(stats.genpareto(shape).rvs(4000, random_state=draws) + 1)
        smoothed, pareto_k = importance.pareto_smoothed(given)
        assert pareto_k == pytest.approx(shape, abs=0.2) and logsumexp(smoothed) == pytest.approx(0)
        assert np.corrcoef(smoothed, given)[0, 1] > 0.99
    given[:10] = -np.inf
    assert np.all(np.isneginf(importance.pareto_smoothed(given)[0][:10]))


@pytest.mark.parametrize("num", [30, 256, 2048])
def test_smoothed_weights_are_those_of_arviz(num: int) -> None:
    arviz = pytest.importorskip("arviz")
    if not hasattr(arviz, "psislw"):
        pytest.skip("ArviZ 1 has it elsewhere")
    given = np.random.default_rng(num).standard_t(3, size=num)
    smoothed, pareto_k = importance.pareto_smoothed(given)
    expected, k = arviz.psislw(given - given.max())
    np.testing.assert_allclose(smoothed, expected - logsumexp(expected), rtol=0, atol=1e-10)  # the same in float64
    assert pareto_k == pytest.approx(float(k), abs=1e-10)


# --- posteriors that are not normal, and locals that need draws, in the default precision -----------------------------


def schools(sigma, y):
    """Rubin's eight schools, non-centred."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", sigma.shape[0]):
        theta = numpyro.sample("theta", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + tau * theta, sigma), obs=y)


Y = np.array([28, 8, -3, 7, -1, 1, 18, 12], "f")
SIGMA = np.array([15, 10, 16, 11, 9, 11, 10, 18], "f")


def school_silos() -> nf.Silos:
    where = {"north": slice(0, 3), "south": slice(3, 6), "west": slice(6, 8)}
    return nf.Silos({name: dict(sigma=SIGMA[rows], y=Y[rows]) for name, rows in where.items()})


def school_truth() -> dict[str, tuple[float, float]]:
    """Means and sds of mu and tau, by a grid over mu and log tau."""
    mu, log_tau = np.meshgrid(np.linspace(-25, 35, 601), np.linspace(-12, 6, 1801), indexing="ij")
    tau = np.exp(log_tau)
    log_p = stats.norm(0, 5).logpdf(mu) + stats.halfcauchy(0, 5).logpdf(tau) + log_tau
    for y, sigma in zip(Y, SIGMA, strict=True):
        log_p += stats.norm.logpdf(y, mu, np.hypot(tau, sigma))
    weight = np.exp(log_p - logsumexp(log_p))
    moments = lambda x: (np.sum(weight * x), np.sqrt(np.sum(weight * x**2) - np.sum(weight * x) ** 2))
    return {"mu": moments(mu), "tau": moments(tau)}


def misses(fit: Fit) -> tuple[float, float]:
    """The largest shift of a mean, in sds, and of an sd, relative."""
    draws = fit.sample(KEY, 40_000)
    pairs = [(np.asarray(draws[name], np.float64), truth) for name, truth in school_truth().items()]
    shift = max(abs(x.mean() - mean) / sd for x, (mean, sd) in pairs)
    return shift, max(abs(x.std() / sd - 1) for x, (_, sd) in pairs)


# EP's posterior of (mu, log tau), as `test_eight_schools` finds it
SCHOOLS = (np.array([4.424, 0.867]), np.diag([3.302**2, 0.954**2]))


@pytest.mark.slow
def test_a_skewed_posterior() -> None:
    fit = given(nf.EP(schools), school_silos(), *SCHOOLS)
    assert misses(fit)[1] > 0.3  # no normal in log tau has tau's sd
    corrected = fit.correct(KEY).correct(jax.random.key(5))
    shift, sd = misses(corrected)
    assert shift < 0.05 and sd < 0.05 and corrected.correction.trusted


@pytest.mark.slow
def test_eight_schools() -> None:
    fit = nf.EP(schools).run(jax.random.key(0), school_silos(), progress_bar=False)
    np.testing.assert_allclose(moments(fit)[0], SCHOOLS[0], atol=0.02)
    shift, sd = misses(fit.correct(KEY))
    assert shift < 0.05 and sd < 0.05


def crowded(w, y):
    """Rows of three locals, which no quadrature takes; all factors are normal."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("y", dist.Normal(mu + jnp.sum(w * b, axis=-1), 0.5), obs=y)


@pytest.mark.slow
def test_locals_that_are_drawn() -> None:
    draws = np.random.default_rng(3)
    data, precision, total = {}, 0.25, 0.0
    for name, n in (("a", 6), ("b", 4)):
        w, y = draws.normal(size=(n, 3)), 1 + 2 * draws.normal(size=n)
        data[name] = dict(w=w.astype("f"), y=y.astype("f"))
        variance = np.sum(w**2, axis=1) + 0.25
        precision, total = precision + np.sum(1 / variance), total + np.sum(y / variance)
    silos = nf.Silos(data)
    fit = given(nf.EP(crowded), silos, [total / precision + 0.4 * precision**-0.5], [[0.7 / precision]])
    assert target.exact_marginal(fit.split, fit.survey, fit.posterior) == (
        "importance_weighted",
        target.DRAWS,
        "aligned",
    )
    found = fit.correct(KEY, 4096).correction
    mean, cov = found.moments()
    assert abs(mean[0] - total / precision) < 0.05 * precision**-0.5
    assert np.sqrt(cov[0, 0] * precision) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
def test_other_methods(silos: nf.Silos) -> None:
    """SFVI's guide; theta stays as it is, and the posterior is that given theta."""

    def offset(x, y):
        theta = numpyro.param("theta", 0.0)
        model(x, y - theta)

    single = lambda shift: {
        name: dict(x=silos[name]["x"].astype("f"), y=silos[name]["y"].astype("f") + np.float32(shift))
        for name in silos.names
    }
    mean, cov = posterior(silos, *silos.names)
    theta = {"theta": jnp.asarray(0.5)}
    fit = given(nf.SFVI(offset), nf.Silos(single(0.5)), mean + 0.5 * np.sqrt(np.diagonal(cov)), 0.7 * cov, theta)
    corrected = fit.correct(KEY)
    assert corrected.state.method == "SFVI" and corrected.params == {"theta": 0.5}
    shift, log_sd = errors(corrected, silos)
    assert shift < 0.03 and log_sd < 0.03
