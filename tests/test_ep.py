"""EP and PVI: what they must reach, and what must always hold."""

import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed.model.build import split_model
from numpyro_fed.normal.families import Family
from numpyro_fed.normal.points import enough_points, largest_eigenvalue, normal_points
from numpyro_fed.normal.prior import normal_prior
from numpyro_fed.solvers import Laplace

FULL = Family("full")

NOISE = 0.7


def regression(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([3]).to_event(1))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, NOISE), obs=y)


def regression_silos(num, dtype=np.float64):
    rng = np.random.default_rng(0)
    out = {}
    for j in range(num):
        n = int(rng.integers(5, 40))
        x = rng.normal(size=(n, 3))
        y = x @ np.array([1.0, -2.0, 0.5]) + NOISE * rng.normal(size=n)
        out[f"s{j}"] = dict(x=x.astype(dtype), y=y.astype(dtype))
    return nf.Silos(out)


def closed_form(silos, names=None):
    """Mean and covariance of the regression's posterior."""
    precision, shift = np.eye(3) / 100, np.zeros(3)
    for name in names or silos.names:
        x, y = (np.asarray(silos[name][arg], np.float64) for arg in ("x", "y"))
        precision, shift = precision + x.T @ x / NOISE**2, shift + x.T @ y / NOISE**2
    cov = np.linalg.inv(precision)
    return cov @ shift, cov


def worst(fit, mean, cov):
    """The largest error of a mean in sds, and of a covariance in units of the sds."""
    sd = np.sqrt(np.diag(cov))
    got_mean, got_cov = np.asarray(fit.normal().mean), fit.normal().covariance
    return max(np.max(np.abs(got_mean - mean) / sd), np.max(np.abs(got_cov - cov) / np.outer(sd, sd)))


def run(method, silos, rounds=None, **options):
    return method.run(jax.random.key(0), silos, rounds, progress_bar=False, **options)


# --- conjugate models: the closed form --------------------------------------------------------------------------------


@pytest.mark.parametrize("num", tiers([4, 20], 4))
@pytest.mark.parametrize("method", tiers([nf.EP, nf.PVI], nf.EP, others=pytest.mark.merge))
def test_conjugate_regression_is_exact_in_a_sweep(x64, method, num):
    silos = regression_silos(num)
    exact = closed_form(silos)
    fixed = method(regression, tolerance=0)
    assert worst(run(fixed, silos, num, schedule="sequential"), *exact) < 1e-6
    together = run(fixed, silos, 1)
    assert worst(together, *exact) < 1e-6
    # every site is its silo's likelihood
    each = together.state.server.sites.each
    for j, name in enumerate(silos.names):
        x, y = silos[name]["x"], silos[name]["y"]
        np.testing.assert_allclose(each.precision[j], x.T @ x / NOISE**2, rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(each.shift[j], x.T @ y / NOISE**2, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("method", tiers([nf.EP, nf.PVI], nf.PVI, others=pytest.mark.merge))
def test_conjugate_regression_from_stale_broadcasts(x64, method):
    silos = regression_silos(4)
    fit = run(method(regression, tolerance=0), silos, 40, schedule="asynchronous")
    assert worst(fit, *closed_form(silos)) < 1e-3


@pytest.mark.filterwarnings("ignore:.*obody asked silo")
def test_the_posterior_is_the_product_of_its_factors_after_every_round(x64):
    """Under damping and random cohorts: a silo heard moves its site by the damped change, the others' stay."""
    silos, method = regression_silos(4), nf.EP(regression, solver="laplace", tolerance=0, damping=0.3)
    seen = run(method, silos, 1, schedule=nf.schedules.sampled(2))
    for _ in range(4):
        before = seen.state.server
        seen = run(method, silos, 1, schedule=nf.schedules.sampled(2), init_state=seen.state)
        after = seen.state.server
        moved = [j for j in range(4) if np.any(after.sites.each.precision[j] != before.sites.each.precision[j])]
        assert len(moved) <= 2, "a silo that did not take part has the site it had"
        for j in moved:  # it proposes its likelihood for its site
            x = silos[silos.names[j]]["x"]
            was = np.asarray(before.sites.each.precision[j])
            expected = was + 0.3 * (x.T @ x / NOISE**2 - was)
            np.testing.assert_allclose(after.sites.each.precision[j], expected, rtol=1e-10, atol=1e-10)
        q = seen.posterior.q(after)
        total = after.sites.prior.precision + np.sum(after.sites.each.precision, axis=0)
        np.testing.assert_allclose(q.precision, total, rtol=1e-10)
        normal = seen.normal()
        np.testing.assert_allclose(normal.covariance @ np.asarray(q.shift), normal.mean, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_float32_programs_keep_natural_parameters_in_float64():
    silos = regression_silos(4, np.float32)
    fit = run(nf.EP(regression), silos)
    server = fit.state.server
    assert server.sites.each.precision.dtype == np.float64
    assert worst(fit, *closed_form(silos)) < 1e-5
    assert fit.sample(jax.random.key(0), 3)["beta"].dtype == np.float32
    # what a silo sends: 6 + 3 float64, and a value, an effective share and a flag
    assert fit.history["bytes_up"][~fit.history["start"]][1] < 4 * (9 * 8 + 9 + 80)


@pytest.mark.merge
def test_tied_sites_reach_the_closed_form_of_a_normal_model(x64):
    """At SEP's fixed point the changes of all silos add up to zero: for normal factors that is the posterior."""
    silos = regression_silos(4)
    fit = run(nf.SEP(regression, solver="laplace", tolerance=0), silos, 40)
    assert worst(fit, *closed_form(silos)) < 1e-6
    assert fit.state.server.sites.each.precision.shape == (3, 3), "one site, whatever the number of silos"


# --- the diagonal family ----------------------------------------------------------------------------------------------


def located(mean, precision):
    """A silo knows its own normal likelihood of two numbers; the prior is flat."""
    z = numpyro.sample("z", dist.ImproperUniform(dist.constraints.real_vector, (), (2,)))
    numpyro.factor("likelihood", -0.5 * (z - mean) @ precision @ (z - mean))


@pytest.mark.merge
def test_diagonal_family_finds_the_pooled_mean_from_a_flat_prior(x64):
    """FedEP's toy: the diagonal family's fixed point has the exact mean; its first round is FedPA's answer."""
    rng = np.random.default_rng(3)
    silos, total, shift = {}, np.zeros((2, 2)), np.zeros(2)
    for j in range(3):
        root = rng.normal(size=(2, 2))
        precision, mean = root @ root.T + 0.5 * np.eye(2), rng.normal(size=2)
        silos[f"s{j}"] = dict(mean=mean, precision=precision)
        total, shift = total + precision, shift + precision @ mean
    method = nf.EP(located, family="diagonal", solver="laplace", tolerance=0)
    fit = run(method, nf.Silos(silos), 60)
    np.testing.assert_allclose(fit.normal().mean, np.linalg.solve(total, shift), atol=1e-8)


# --- priors that are not normal ---------------------------------------------------------------------------------------


def heavy(x, y=None):
    z = numpyro.sample("z", dist.StudentT(3.0, 0.0, 1.0))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(z * x, 2.0), obs=y)


def wide_regression(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)


def wide_regression_silos(d, num, rows):
    """Silos, and mean and covariance of the posterior."""
    rng, dtype = np.random.default_rng(0), np.asarray(jnp.zeros(())).dtype
    beta, precision, shift, out = rng.normal(size=d), np.eye(d), np.zeros(d), {}
    for j in range(num):
        x = rng.normal(size=(rows, d)).astype(dtype)
        y = (x @ beta + rng.normal(size=rows)).astype(dtype)
        out[f"s{j}"] = dict(x=x, y=y)
        precision, shift = precision + x.T.astype(float) @ x, shift + x.T.astype(float) @ y
    cov = np.linalg.inv(precision)
    return nf.Silos(out), cov @ shift, cov


@pytest.mark.slow
def test_draws_of_a_normal_give_its_moments_exactly(x64):
    """Four draws a dimension, whose own covariance is off by half: what gradients say of it is not."""
    silos, mean, cov = wide_regression_silos(25, 2, 60)
    solver = nf.solvers.HMC(num_chains=10, num_samples=10, num_warmup=2)
    fit = run(nf.EP(wide_regression, solver=solver), silos, 2)
    assert worst(fit, mean, cov) < 1e-6
    assert fit.reasons == ()


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("d", [50, 100])
def test_draws_of_a_normal_in_many_dimensions(d, x64):
    """The default solver there. 1,000 draws say sds to 2 % and, in 100 dimensions, some direction's to 30 %."""
    with jax.enable_x64(x64):
        silos, mean, cov = wide_regression_silos(d, 10, 300)
        fit = run(nf.EP(wide_regression), silos)
        assert worst(fit, mean, cov) < 1e-3  # float32
        assert fit.reasons == ()


@pytest.mark.slow
def test_a_prior_that_is_not_normal_is_the_users_prior_all_the_same(x64):
    """With one factor that is not normal EP's moments are exact."""
    rng = np.random.default_rng(0)
    silos = nf.Silos({str(j): dict(x=np.ones(3), y=rng.normal(size=3) + 3.0) for j in range(3)})
    fit = run(nf.EP(heavy, tolerance=0), silos, 15)
    grid = np.linspace(-15, 15, 40_001)
    log_density = np.asarray(dist.StudentT(3.0).log_prob(grid))
    for name in silos.names:
        log_density = log_density - 0.5 * np.sum((silos[name]["y"][:, None] - grid) ** 2, axis=0) / 4
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    mean = weight @ grid
    sd = np.sqrt(weight @ (grid - mean) ** 2)
    got_mean, got_cov = np.asarray(fit.normal().mean), fit.normal().covariance
    # 128 fixed points integrate a smooth function of one number to about this
    assert abs(got_mean[0] - mean) < 0.01 * sd
    assert abs(np.sqrt(got_cov[0, 0]) / sd - 1) < 0.01


# --- guards -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Noisy(Laplace):
    """Moments with an error that often makes sites indefinite and sometimes would make the posterior so."""

    name = "noisy"

    def solve(self, key, tilted, factor, frame, solver_state):
        found = super().solve(key, tilted, factor, frame, solver_state)
        draws = jax.random.normal(key, (5, 3))  # five draws for a covariance in three dimensions
        mean, root = FULL.moments(found.natural)
        with jax.enable_x64(True):
            draws = draws.astype(jnp.float64)
            spread = (draws - draws.mean(axis=0)) @ root.T
            noisy = FULL.project(mean + root @ draws[0], spread.T @ spread / 4)
        return found._replace(natural=noisy)


@pytest.mark.slow
@pytest.mark.parametrize(("runs", "rounds"), [(5, 300), (20, 1000)])
def test_many_noisy_rounds_leave_a_proper_posterior(runs, rounds):
    silos = regression_silos(4, np.float32)
    method = nf.EP(regression, solver=Noisy(), tolerance=0, damping=1.0)
    improper = 0
    for seed in range(runs):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*obody asked silo")
            fit = method.run(jax.random.key(seed), silos, rounds, progress_bar=False)
        # a movement is infinite from or to a posterior that is not proper
        assert np.all(np.isfinite(fit.history["shift"])) and np.all(np.isfinite(fit.history["loss"]))
        assert all(np.all(np.isfinite(draws)) for draws in fit.sample(jax.random.key(0), 100).values())
        improper += np.sum(np.linalg.eigvalsh(fit.state.server.sites.each.precision) < 0)
    assert improper > runs, "the noise is such that sites are indefinite"


@pytest.mark.slow
def test_a_silo_whose_factor_breaks_down_is_skipped_and_counted():
    @dataclass(frozen=True)
    class Broken(Laplace):
        name = "broken"

        def solve(self, key, tilted, factor, frame, solver_state):
            found = super().solve(key, tilted, factor, frame, solver_state)
            with jax.enable_x64(True):
                return found._replace(natural=jax.tree.map(lambda leaf: leaf * np.nan, found.natural))

    silos = regression_silos(4, np.float32)
    with pytest.warns(UserWarning, match="obody asked silos 's0', 's1', 's2', 's3', or nothing could be accepted"):
        fit = run(nf.EP(regression, solver=Broken(), tolerance=0), silos, 2)
    np.testing.assert_array_equal(fit.history["skipped"], 4)
    np.testing.assert_allclose(
        fit.normal().covariance, 100 * np.eye(3), rtol=1e-6, err_msg="nothing was accepted: the prior"
    )


# --- stopping, starts, storage ----------------------------------------------------------------------------------------


def test_a_run_stops_when_nothing_moves_and_a_silo_unheard_keeps_it_going(x64):
    silos = regression_silos(4)
    fit = run(nf.EP(regression), silos, 50)
    rounds = ~fit.history["start"]
    assert rounds.sum() == 1, "the start is exact, and one round shows it"
    assert (~rounds).sum() == 2, "Newton's first step is exact, and a second look shows it"
    lottery = run(nf.EP(regression), silos, 50, schedule=nf.schedules.sampled(1))
    assert worst(lottery, *closed_form(silos)) < 1e-3
    assert (~run(nf.EP(regression, tolerance=0), silos, 5).history["start"]).sum() == 5


# --- errors that teach ------------------------------------------------------------------------------------------------


def test_params_have_no_prior_to_be_updated():
    def model(x, y=None):
        sigma = numpyro.param("sigma", 1.0, constraint=dist.constraints.positive)
        beta = numpyro.sample("beta", dist.Normal(0, 1))
        with numpyro.plate("n", x.shape[0]):
            numpyro.sample("y", dist.Normal(beta * x, sigma), obs=y)

    silos = nf.Silos({str(j): dict(x=np.ones(4 + j, np.float32), y=np.ones(4 + j, np.float32)) for j in range(2)})
    with pytest.raises(nf.PartitionError, match=r"no way to learn numpyro.param 'sigma'.*nf.SFVI"):
        run(nf.EP(model), silos, 1)


def test_sfvi_is_not_asynchronous():
    silos = regression_silos(4, np.float32)
    with pytest.raises(ValueError, match=r"no asynchronous schedule: use nf.PVI or nf.EP"):
        run(nf.SFVI(regression), silos, 1, schedule="asynchronous")


# --- points -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 5, 10])
def test_points_are_white_and_enough_of_them_are_stable(d):
    num = enough_points(d)
    e = normal_points(d, num)
    np.testing.assert_allclose(e.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(e.T @ e / num, np.eye(d), atol=1e-12)
    assert largest_eigenvalue(d, num) < 1.8
    assert d < 5 or largest_eigenvalue(d, num // 4) > 1.8, "not many more than are needed"


# --- fixed points of PVI ----------------------------------------------------------------------------------------------


def logistic(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([3]).to_event(1))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", tiers(["synchronous", "asynchronous"], "synchronous"))
def test_fixed_points_are_those_of_variational_inference_on_the_pooled_data(schedule):
    """Silos skewed by label: one has ones only. Both solve the same equations with the same points."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    y = (rng.uniform(size=60) < 1 / (1 + np.exp(-x @ [1.0, -1.0, 0.5]))).astype(np.int32)
    order = np.argsort(-y, kind="stable")
    label = np.repeat(["a", "b", "c"], [15, 25, 20])
    silos = nf.split(label, x=x[order], y=y[order])
    method = nf.PVI(logistic, tolerance=1e-4)
    pooled = run(method, nf.Silos({"all": dict(x=x, y=y)}), 20)
    apart = run(method, silos, 60, schedule=schedule)
    (mean, cov), (other, other_cov) = ((f.normal().mean, f.normal().covariance) for f in (pooled, apart))
    sd = np.sqrt(np.diag(cov))
    np.testing.assert_allclose(other / sd, mean / sd, atol=2e-3)
    np.testing.assert_allclose(other_cov / np.outer(sd, sd), cov / np.outer(sd, sd), atol=2e-3)


# --- easily missed ----------------------------------------------------------------------------------------------------


def lasso(x, y=None):
    b = numpyro.sample("b", dist.Laplace(0.0, 1.0))
    t = numpyro.sample("t", dist.HalfCauchy(1.0))
    tight = numpyro.sample("tight", dist.Normal(0, 0.002))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(b * x + tight, t), obs=y)


def test_a_prior_is_normal_only_if_every_coordinate_is(x64):
    """A Laplace density's Hessian is constant (zero), and a tight normal's precision hides what others do."""
    silos = nf.Silos({str(j): dict(x=np.ones(4 + j), y=np.ones(4 + j)) for j in range(2)})
    exact = lambda model, silos: normal_prior(split_model(model, silos), FULL).exact
    assert not exact(lasso, silos)
    assert exact(regression, regression_silos(4))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*obody asked silo")
def test_a_run_goes_on_with_silos_in_another_order(x64):
    """Sites belong to names: a single visit after turning the silos around changes nothing that is already exact."""
    silos = regression_silos(4)
    turned = nf.Silos({name: silos[name] for name in reversed(silos.names)})
    method = nf.EP(regression, tolerance=0)
    exact = run(method, silos, 1)
    again = run(method, turned, 1, schedule=nf.schedules.sampled(1), init_state=exact.state)
    assert worst(again, *closed_form(silos)) < 1e-6
