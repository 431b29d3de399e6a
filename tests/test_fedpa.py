"""FedPA and FedAvg: closed forms, laws, errors; every figure of the paper is in test_fedpa_paper.py."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import init_to_value

import numpyro_fed as nf

D = 3


def regression(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([D]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)


def logistic(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([D]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def random_effects(x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        alpha = numpyro.sample("alpha", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(alpha, 1.0), obs=y)


def learned(x, y=None):
    """Its slopes are params: a flax network would be, too."""
    b = numpyro.param("b", jnp.zeros(D))
    c = numpyro.sample("c", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ b + c, 1.0), obs=y)


def unlike(sizes=(30, 50, 20), seed=0, classes=False):
    """Silos with covariates and coefficients of their own."""
    rng = np.random.default_rng(seed)
    dtype = np.asarray(jnp.zeros(())).dtype
    b, silos = rng.normal(size=D), {}
    for j, n in enumerate(sizes):
        x = rng.normal(size=(n, D)) * rng.uniform(0.5, 1.5, D)
        scores = x @ (b + 0.4 * rng.normal(size=D))
        y = (rng.uniform(size=n) < 1 / (1 + np.exp(-scores))).astype(int) if classes else scores + rng.normal(size=n)
        silos[f"silo {j}"] = dict(x=x.astype(dtype), y=y if classes else y.astype(dtype))
    return nf.Silos(silos)


def normal_posterior(silos, prior=True):
    x, y = (np.concatenate([silos[name][part] for name in silos.names]).astype(float) for part in ("x", "y"))
    cov = np.linalg.inv(x.T @ x + (np.eye(D) / 4 if prior else 0))
    return cov @ x.T @ y, cov


def run(method, silos, num_rounds=60, seed=0, **options):
    return method.run(jax.random.key(seed), silos, num_rounds, progress_bar=False, **options)


@pytest.fixture(scope="module")
def linear():
    silos = unlike()
    return silos, run(nf.FedPA(regression, start_rounds=0), silos)


def shift(fit, silos, prior=True):
    """Of the mode, in posterior sds."""
    mean, cov = normal_posterior(silos, prior)
    return np.max(np.abs(np.asarray(fit.state.server.z) - mean) / np.sqrt(np.diag(cov)))


# --- what it targets --------------------------------------------------------------------------------------------------


def test_posterior_averaging_finds_the_mode_and_the_posterior(linear):
    silos, fit = linear
    _, cov = normal_posterior(silos)
    assert shift(fit, silos) < 0.01  # float32: the gradient of 100 rows is right to 1e-6 of its terms
    found = fit.normal().covariance
    np.testing.assert_allclose(found, cov, rtol=0.02, atol=1e-5)
    draws = np.asarray(fit.sample(jax.random.key(1), 4000)["b"])
    np.testing.assert_allclose(np.std(draws, axis=0), np.sqrt(np.diag(cov)), rtol=4 / np.sqrt(2 * 4000))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["laplace", "nuts"])
def test_other_samplers_find_the_mode(sampler):
    silos, settings = unlike(), dict(num_samples=40, shrinkage=math.inf, start_rounds=0)
    assert shift(run(nf.FedPA(regression, sampler=sampler, **settings), silos), silos) < 0.01


def test_a_sampler_of_ones_own_sees_the_silos_log_density():
    """Exact draws from the density's gradient and Hessian at the start, without Stein's correction."""

    def exact(rng_key, start, log_density, num_samples):
        a = -jax.hessian(log_density)(start)
        mean = start + jnp.linalg.solve(a, jax.grad(log_density)(start))
        eps = jax.random.normal(rng_key, (num_samples, start.shape[0]))
        return mean + eps @ jnp.linalg.inv(jnp.linalg.cholesky(a))

    silos = unlike()
    settings = dict(num_samples=200, shrinkage=math.inf, stein=False, start_rounds=0)
    fit = run(nf.FedPA(regression, sampler=exact, **settings), silos)
    assert shift(fit, silos) < 0.5  # noise: each silo's slope is known to sqrt(3 / 200), silos are several sds apart


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["iasg", "nuts"])
def test_the_samples_themselves_have_the_posteriors_covariance(sampler):
    """Without gradients to correct them: Langevin's noise, the scale of a sum over observations."""
    silos = unlike()
    settings = dict(num_samples=400, shrinkage=math.inf, stein=False, closing="samples")
    fit = run(nf.FedPA(regression, sampler=sampler, **settings), silos, 30)
    _, cov = normal_posterior(silos)
    found = fit.normal().covariance
    # an inverse covariance of 400 draws is right to sqrt(2 / 400) in each direction, draws correlate a little
    np.testing.assert_allclose(np.sqrt(np.diag(found)), np.sqrt(np.diag(cov)), rtol=0.15)


@pytest.mark.slow
def test_averages_of_minibatch_steps_have_the_posteriors_covariance():
    """K iterates with batches of B: the posterior of K B observations, rescaled. One silo whose model is right."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, D)).astype("f")
    y = (x @ np.array([1.0, -1.0, 0.5]) + rng.normal(size=400)).astype("f")
    silos = nf.split(np.repeat([0, 1], 200), x=x, y=y)
    method = nf.FedPA(
        regression, batch_size=8, thinning=100, num_warmup=200, num_samples=100, stein=False, shrinkage=math.inf,
        averaging_rounds=2, closing="samples",
    )  # fmt: skip
    fit = run(method, silos, 5)
    found = fit.normal().covariance
    _, cov = normal_posterior(silos)
    # 100 draws: 7 %; residuals of 200 rows: 10 %; the walk of 100 steps of a fifth: a few
    np.testing.assert_allclose(np.sqrt(np.diag(found)), np.sqrt(np.diag(cov)), rtol=0.25)


def scales(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    sigma = numpyro.sample("sigma", dist.HalfNormal(10))
    numpyro.deterministic("ratio", mu / sigma)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def counts(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(mu)), obs=y)


@pytest.mark.slow
def test_curvatures_that_change_along_the_way_do_not_make_it_diverge():
    """A scale far below one, and a logarithm of counts: at the start curvatures are hundreds of times smaller."""
    rng = np.random.default_rng(0)
    small = nf.Silos([dict(y=(1 + 0.1 * rng.normal(size=n)).astype("f")) for n in (30, 40)])
    fit = run(nf.FedPA(scales, start_rounds=0), small, 60)
    y = np.concatenate([small[name]["y"] for name in small.names])
    draws = fit.sample(jax.random.key(0), 4000)
    # the prior is flat here: the posterior's mode in mu is the mean; of 4,000 draws the mean is right to .016 sds
    assert abs(np.mean(draws["mu"]) - y.mean()) < 0.1 * y.std() / np.sqrt(len(y))
    assert np.mean(draws["sigma"]) == pytest.approx(y.std(), rel=0.03)  # half a posterior sd: mode against mean
    assert set(draws) == {"mu", "sigma", "ratio"}
    many = nf.Silos([dict(y=rng.poisson(20, n)) for n in (30, 40)])
    fit = run(nf.FedAvg(counts, local_steps=30, start_rounds=0), many, 20)
    total = np.mean(np.concatenate([many[name]["y"] for name in many.names]))
    assert np.exp(fit.sample(jax.random.key(0), 1)["mu"])[0] == pytest.approx(total, rel=1e-3)


@pytest.mark.merge
def test_a_steep_silo_that_joins_late_does_not_make_it_diverge():
    rng = np.random.default_rng(0)
    silos = nf.Silos(
        [dict(x=(s * rng.normal(size=(30, D))).astype("f"), y=rng.normal(size=30).astype("f")) for s in (1, 1, 5)]
    )
    fit = run(nf.FedAvg(regression), silos, 30, schedule=nf.schedules.sampled(1))
    assert np.max(fit.history["loss"]) < 3 * fit.history["loss"][0]


@pytest.mark.merge
def test_one_silo_is_told_that_there_is_nothing_to_average():
    with pytest.warns(UserWarning, match="nothing to average"):
        run(nf.FedAvg(regression, local_steps=2), unlike(sizes=(10,)), 2)


@pytest.mark.slow
def test_posterior_averaging_goes_on_where_it_was():
    """Steps fall over the rounds that are left, and burn-in is not counted twice."""
    silos = unlike()
    first = run(nf.FedPA(regression, start_rounds=0), silos, 30)
    rest = run(nf.FedPA(regression, start_rounds=0), silos, 20, init_state=first.state)
    assert rest.state.round == 50 and shift(rest, silos) < min(0.01, shift(first, silos))


def test_without_the_prior_the_target_is_the_likelihood():
    silos = unlike(sizes=(8, 9, 7))
    fit = run(nf.FedPA(regression, prior=False, posterior=False, sampler="laplace", start_rounds=0), silos)
    assert shift(fit, silos, prior=False) < 0.01
    assert shift(fit, silos) > 0.02


def test_one_local_step_is_gradient_descent_and_many_stop_elsewhere():
    silos = unlike()
    one, many = (run(nf.FedAvg(regression, local_steps=steps, start_rounds=0), silos, 200) for steps in (1, 50))
    assert shift(one, silos) < 0.01
    assert shift(many, silos) > 1
    assert one.reasons == () and one.verdict.status == "not checked"
    # the posterior is normal, so the distance in sds is known
    mean, cov = normal_posterior(silos)
    away = np.asarray(many.state.server.z) - mean
    assert many.verdict.status == "not to be trusted" and "50 steps pull it there" in many.reasons[0]
    assert f"{np.sqrt(away @ np.linalg.solve(cov, away)):.2g} posterior sds away" in many.reasons[0]
    short = run(nf.FedAvg(regression, local_steps=1, start_rounds=0), silos, 3)
    assert short.verdict.status == "still moving" and "run more rounds" in short.reasons[0]


def test_a_step_of_federated_averaging_by_hand(x64):
    silos = unlike()
    rate, begin = 0.1, np.full(D, 0.5)
    method = nf.FedAvg(
        regression, optim=optax.sgd(rate), local_steps=2, proximal=0.3, init_loc_fn=init_to_value(values={"b": begin})
    )
    fit = run(method, silos, 1)
    total = sum(len(silos[name]["y"]) for name in silos.names)
    expected = np.zeros(D)
    for name in silos.names:
        x, y = silos[name]["x"], silos[name]["y"]
        w = begin.copy()
        for _ in range(2):
            w = w - rate * (-x.T @ (y - x @ w) / len(y) + w / 4 / total + 0.3 * (w - begin))
        expected += len(y) / total * w
    np.testing.assert_allclose(fit.state.server.z, expected, rtol=1e-10)


@pytest.mark.merge
def test_weights_that_stay_apart_take_the_steps_of_one_vector(x64):
    """Globals of two shapes and a param, with momentum and minibatches; a clip that never acts keeps them together."""

    def model(x, y=None):
        a = numpyro.sample("a", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([D, 2]).to_event(2))
        c = numpyro.param("c", jnp.zeros(2))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(a + jnp.sum(jnp.tanh(x @ b) + c, axis=1), 1.0), obs=y)

    optims = optax.adam(0.1), optax.chain(optax.clip_by_global_norm(1e9), optax.adam(0.1))
    settings = dict(local_steps=4, batch_size=5, start_rounds=0)
    fits = [run(nf.FedAvg(model, optim=optim, **settings), unlike(), 2) for optim in optims]
    apart, together = (np.concatenate([fit.state.server.z, fit.state.server.theta["c"]]) for fit in fits)
    # the same operations on the same numbers, up to the order of sums
    np.testing.assert_allclose(apart, together, rtol=1e-9)
    assert np.std(apart) > 0.01  # it moved


def test_rho_zero_is_federated_averaging_of_averaged_iterates(x64):
    """One sample's worth of steps twice, deterministic: Delta is the distance to the mean of the samples."""
    silos = unlike()
    begin = init_to_value(values={"b": np.full(D, 0.5)})

    def iterates(rng_key, start, log_density, num_samples):
        step = lambda x, _: (x + 0.01 * jax.grad(log_density)(x),) * 2
        return jax.lax.scan(step, start, None, num_samples)[1]

    method = nf.FedPA(
        regression, sampler=iterates, num_samples=4, shrinkage=0.0, stein=False, prior=False, averaging_rounds=0,
        server_optim=optax.sgd(1.0), posterior=False, init_loc_fn=begin,
    )  # fmt: skip
    fit = run(method, silos, 1)
    total = sum(len(silos[name]["y"]) for name in silos.names)
    expected = np.zeros(D)
    for name in silos.names:
        x, y = silos[name]["x"], silos[name]["y"]
        w, mean = np.full(D, 0.5), np.zeros(D)
        for _ in range(4):
            w = w + 0.01 * x.T @ (y - x @ w)
            mean += w / 4
        expected += len(y) / total * mean
    np.testing.assert_allclose(fit.state.server.z, expected, rtol=1e-10)


@pytest.mark.slow
def test_logistic_regression_comes_close_to_nuts():
    silos = unlike(sizes=(60, 80, 40), classes=True)
    fit = run(nf.FedPA(logistic), silos, 10)
    reference = nf.nuts(logistic, silos, rng_key=jax.random.key(1), num_samples=2000, num_chains=2, progress_bar=False)
    table = nf.compare({"FedPA": fit}, reference=reference).table
    # a mode where NUTS has a mean, of 180 rows: .1 sd; 4,000 draws know means to .02 and sds to 2 %
    assert np.max(np.abs(table.mean_shift)) < 0.2
    assert np.all((table.sd_ratio > 0.9) & (table.sd_ratio < 1.1))


@pytest.mark.slow
def test_minibatches_reach_the_neighbourhood():
    silos = unlike()
    fit = run(nf.FedPA(regression, batch_size=5, thinning=60, num_warmup=60, num_samples=30, start_rounds=0), silos)
    assert shift(fit, silos) < shift(run(nf.FedAvg(regression, local_steps=50), silos), silos)


# --- params, many dimensions ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", [nf.FedAvg(learned, local_steps=1), nf.FedPA(learned, sampler="laplace")])
def test_params_are_learned_with_the_globals(method):
    silos = unlike()
    fit = run(method, silos, 150)
    x, y = (np.concatenate([silos[name][part] for name in silos.names]).astype(float) for part in ("x", "y"))
    x = np.column_stack([np.ones(len(x)), x])
    expected = np.linalg.solve(x.T @ x + np.diag([1.0, 0, 0, 0]), x.T @ y)
    np.testing.assert_allclose(fit.params["b"], expected[1:], atol=2e-3)
    np.testing.assert_allclose(np.mean(fit.sample(jax.random.key(0), 2000)["c"]), expected[0], atol=0.02)


WIDE = 300


def wide(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 0.1).expand([WIDE]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)


@pytest.fixture(scope="module")
def many_dimensions():
    rng = np.random.default_rng(0)
    silos = nf.Silos(
        [dict(x=rng.normal(size=(n, WIDE)).astype("f"), y=rng.normal(size=n).astype("f")) for n in (20, 30)]
    )
    return silos, run(nf.FedPA(wide, num_samples=8), silos, 10)


@pytest.mark.slow
def test_in_many_dimensions_the_posterior_is_low_rank_and_diagonal(many_dimensions):
    """Fewer observations than parameters: the prior's variances, less what the samples know."""
    _, fit = many_dimensions
    posterior = fit.state.server.posterior
    assert posterior.sds.shape == (WIDE,) and posterior.factor.shape == (16, WIDE)
    draws = np.asarray(fit.sample(jax.random.key(0), 2000)["b"])
    cov = fit.normal().covariance
    np.testing.assert_allclose(np.var(draws, axis=0), np.diag(cov), rtol=5 * np.sqrt(2 / 2000))
    assert np.all(np.diag(cov) <= 0.1**2 * 1.001) and np.all(np.diag(cov) > 0)


@pytest.mark.slow
def test_low_rank_and_dense_posteriors_agree(many_dimensions, monkeypatch):
    from numpyro_fed.methods import sampled_closing

    silos, low = many_dimensions
    monkeypatch.setattr(sampled_closing, "DENSE", 1000)
    dense = run(nf.FedPA(wide, num_samples=8), silos, 10)
    covariances = [fit.normal().covariance for fit in (low, dense)]
    np.testing.assert_allclose(*covariances, atol=2e-3 * 0.1**2)


@pytest.mark.slow
def test_the_messages_are_as_long_as_the_parameters(many_dimensions):
    silos, fit = many_dimensions
    up = fit.history["bytes_up"] / silos.num_silos
    assert np.all(up[1:-1] < 4 * WIDE + 80)  # the first row has the survey's, too
    assert 4 * WIDE * 8 < up[-1] < 4 * WIDE * (8 + 3) + 300  # the closing round's is l vectors, a diagonal, a gradient


def test_closing_rounds_send_a_hessian(linear):
    silos, fit = linear
    closing = [record for record in fit.records if record.phase == "posterior"]
    assert 1 <= sum(record.rounds for record in closing) <= 4  # the rounds came close, and the posterior is normal
    for record in closing:
        numbers = silos.num_silos * 4 * (1 + D + D**2)
        assert numbers < record.bytes_up < numbers + 60 * silos.num_silos


def test_the_bound_is_the_evidence_where_the_posterior_is_normal(linear):
    silos, fit = linear
    x, y = (np.concatenate([silos[name][part] for name in silos.names]).astype(float) for part in ("x", "y"))
    evidence = dist.MultivariateNormal(jnp.zeros(len(y)), jnp.asarray(4 * x @ x.T + np.eye(len(y)))).log_prob(y)
    assert fit.elbo() == pytest.approx(float(evidence), abs=0.05)


# --- fits ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cohorts_and_sizes():
    """Half of the silos a round: what was asked in the closing round stands for all."""
    silos = unlike(sizes=(30, 30, 30, 30))
    fit = run(nf.FedPA(regression), silos, 40, schedule=nf.schedules.sampled(2))
    _, cov = normal_posterior(silos)
    sds = fit.normal().sds
    assert np.all((sds > 0.6 * np.sqrt(np.diag(cov))) & (sds < 1.6 * np.sqrt(np.diag(cov))))


def test_a_point_estimate_has_the_interface_of_a_fit(tmp_path):
    silos = unlike()
    fit = run(nf.FedAvg(regression), silos, 3)
    draws = np.asarray(fit.sample(jax.random.key(0), 7)["b"])
    assert draws.shape == (7, D) and np.ptp(draws, axis=0).max() == 0
    assert fit.summary().shape[0] == D and "FedAvg" in repr(fit)
    assert fit.predict(jax.random.key(0), silo="silo 1")["y"].shape == (1000, 50)
    with pytest.raises(ValueError, match="no evidence bound"):
        fit.elbo()
    with pytest.raises((TypeError, ValueError)):
        fit.correct(jax.random.key(0))


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [nf.FedAvg, nf.FedPA])
def test_local_latents_get_the_names_of_methods_that_take_them(method):
    with pytest.raises(nf.PartitionError, match=r"nf\.Fed\w+ .*local latents \('alpha'\).*nf\.SFVI, nf\.EP"):
        run(method(random_effects), unlike())


def test_plain_covariances_need_more_samples_than_dimensions():
    with pytest.raises(ValueError, match=r"num_samples=30, or shrinkage='oas'"):
        run(nf.FedPA(regression, shrinkage=math.inf, num_samples=3), unlike())
