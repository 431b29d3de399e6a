"""FedPA's and FedAvg's last rounds: the posterior's own mode, what they say where they are not there, and starts."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import init_to_value

import numpyro_fed as nf
from numpyro_fed.algorithm import Left
from numpyro_fed.methods.averaging import AveragingServer
from numpyro_fed.methods.closing import Ascent, Curved, arrived, ascent_from, onward
from numpyro_fed.normal import moments
from numpyro_fed.normal.newton import derivatives

KEY = jax.random.key(0)
SHORT = dict(averaging_rounds=1, num_samples=6, num_warmup=2, thinning=2)  # the rounds matter little here


def logistic(x, y=None):
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def scales(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1000))
    sigma = numpyro.sample("sigma", dist.HalfNormal(100))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sigma), obs=y)


def point(y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(w, 1.0).to_event(1), obs=y)


@pytest.fixture(scope="module")
def unlike() -> nf.Silos:
    """Ten silos of twenty rows, whose coefficients differ by one."""
    rng = np.random.default_rng(0)
    b, silos = rng.normal(size=2), []
    for _ in range(10):
        x = rng.normal(size=(20, 2))
        chance = 1 / (1 + np.exp(-x @ (b + rng.normal(size=2))))
        silos.append(dict(x=x.astype("f"), y=(rng.uniform(size=20) < chance).astype(int)))
    return nf.Silos(silos)


@pytest.fixture(scope="module")
def moments_on_a_grid(unlike: nf.Silos) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sds of the posterior."""
    x, y = (np.concatenate([unlike[name][part] for name in unlike.names]).astype(float) for part in ("x", "y"))
    axis = np.linspace(-4, 4, 401)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    scores = grid @ x.T
    log_p = scores @ y - np.logaddexp(0, scores).sum(axis=1) - np.sum(grid**2, axis=1) / 8
    p = np.exp(log_p - log_p.max())
    mean = p @ grid / p.sum()
    return mean, np.sqrt(p @ (grid - mean) ** 2 / p.sum())


# --- where it ends ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_silos_that_differ_and_are_not_normal_meet_at_the_posteriors_mode(unlike, moments_on_a_grid):
    fit = nf.FedPA(logistic, start_rounds=0, **SHORT).run(KEY, unlike, 3, progress_bar=False, check=True)
    mean, sds = moments_on_a_grid
    # Laplace on 200 rows: measured .05 sds and 1 %
    np.testing.assert_allclose((fit.normal().mean - mean) / sds, 0, atol=0.15)
    np.testing.assert_allclose(fit.normal().sds / sds, 1, atol=0.05)
    assert fit.verdict.ok and fit.reasons == ()
    assert np.any(np.abs(np.asarray(fit.state.server.z) - fit.normal().mean) > 0.1 * sds), "three rounds are too few"


@pytest.mark.slow
def test_the_papers_own_algorithm_ends_elsewhere_and_says_so(unlike, moments_on_a_grid):
    method = nf.FedPA(logistic, start_rounds=0, closing="samples")
    fit = method.run(KEY, unlike, progress_bar=False, check=True)
    mean, sds = moments_on_a_grid
    assert np.max(np.abs(fit.normal().mean - mean) / sds) > 0.5
    assert not fit.verdict.ok and "posterior sds away from where the gradient is zero" in fit.reasons[0]
    assert "closing='newton'" in fit.reasons[0]


@pytest.mark.slow
def test_data_that_are_not_standardised_are_no_trouble():
    """Averages of y around 242 with an sd of 5: from near zero, 105 rounds ended several sds off."""
    rng = np.random.default_rng(0)
    silos = nf.Silos([dict(y=rng.normal(242, 5, n).astype("f")) for n in (30, 40, 50)])
    y = np.concatenate([silos[name]["y"] for name in silos.names])
    fit = nf.FedPA(scales, **SHORT).run(KEY, silos, 3, progress_bar=False, check=True)
    assert fit.history["start"].any() and fit.verdict.ok
    mean, sds = fit.normal().mean, fit.normal().sds
    assert abs(mean[0] - y.mean()) < 0.02 * sds[0]  # the mode in mu is the mean
    np.testing.assert_allclose(sds, [y.std() / np.sqrt(120), 1 / np.sqrt(240)], rtol=0.02)


@pytest.mark.parametrize("wide", [False, True])
def test_steps_uphill_from_far_away(wide: bool):
    """Counts of 50, and a logarithm that begins at -6: Newton's first step would be to e^2000."""
    with jax.enable_x64(wide):
        density = lambda x: 50.0 * x[0] - jnp.exp(x[0]) - 0.5 * (x[1] - 3.0 * x[0]) ** 2 * 1e4
        ascent, rest, rounds = ascent_from(jnp.array([-6.0, 5.0])), False, 0
        while not rest and rounds < 60:
            at = ascent.trial.astype(jnp.zeros(()).dtype)
            ascent, found = onward(ascent, Curved(*derivatives(density, at)), float(jnp.finfo(at.dtype).eps))
            rest, rounds = bool(found), rounds + 1
    assert rest and float(ascent.size) < 0.05
    np.testing.assert_allclose(ascent.x[0], np.log(50), atol=0.05 / np.sqrt(50))


def left_at(z: np.ndarray) -> Left:
    state = jnp.zeros(())
    return Left(server=AveragingServer(jnp.asarray(z), {}, (), state, state, state, state))


def test_a_gradient_that_is_not_small_is_a_reason():
    x = jnp.ones(2)
    ended = lambda size, sign: Ascent(x, x, jnp.zeros(()), x, sign * jnp.eye(2), jnp.ones(()), jnp.asarray(size))
    fine = arrived(left_at(np.zeros(2)), ended(0.01, 1))
    assert fine.reasons == () and not fine.moving
    far = arrived(left_at(np.zeros(2)), ended(0.7, 1))
    assert far.moving and "still 0.7 posterior sds from zero" in far.reasons[0]
    saddle = arrived(left_at(np.zeros(2)), ended(0.01, -1))
    assert "not at a mode" in saddle.reasons[0] and not saddle.moving


def test_newton_asks_everybody():
    silos = nf.Silos([dict(y=np.ones((3, 2), "f")), dict(y=np.zeros((3, 2), "f"))])
    with pytest.raises(ValueError, match=r"closing='newton' asks every silo.*leave closing= out"):
        nf.FedPA(point, closing="newton", **SHORT).run(KEY, silos, 1, schedule=nf.schedules.sampled(1))


# --- rho --------------------------------------------------------------------------------------------------------------


def test_an_estimate_of_narrower_draws(x64):
    draws, spread = jax.random.normal(KEY, (9, 3)), 20.0
    theta, rho = jnp.ones(3), 0.7
    wide = jnp.mean(draws, axis=0) + jnp.sqrt(spread) * (draws - jnp.mean(draws, axis=0))
    narrow = moments.of_narrower(moments.shrinkage(wide, rho), jnp.asarray(spread), restored=False)
    expected = moments.direct(theta, draws, rho)
    np.testing.assert_allclose(moments.delta(theta, wide, rho, narrow), expected, rtol=1e-10)
    restored = moments.of_narrower(moments.shrinkage(wide, rho), jnp.asarray(spread), restored=True)
    np.testing.assert_allclose(moments.delta(theta, wide, rho, restored), expected / spread, rtol=1e-10)


def test_rho_is_that_of_the_papers_code(x64):
    """Rows of a silo are all the same, so that minibatch steps have no noise and a round can be done by hand."""
    rate, rho, num, thinning, begin = 0.3, 0.5, 3, 2, np.array([0.5, -1.0])
    rows = {"a": np.array([2.0, 1.0]), "b": np.array([-1.0, 0.5])}
    silos = nf.Silos({name: dict(y=np.tile(row, (6, 1))) for name, row in rows.items()})
    method = nf.FedPA(
        point, optim=optax.sgd(rate), server_optim=optax.sgd(1.0), batch_size=2, num_samples=num, thinning=thinning,
        num_warmup=0, averaging_rounds=0, shrinkage=rho, stein=False, prior=False, posterior=False,
        init_loc_fn=init_to_value(values={"w": begin}),
    )  # fmt: skip
    fit = method.run(KEY, silos, 1, progress_bar=False)
    deltas = []
    for row in rows.values():
        w, samples = begin.copy(), []
        for _ in range(num):
            path = []
            for _ in range(thinning):
                w = w - rate * (w - row)
                path.append(w)
            samples.append(np.mean(path, axis=0))
        share = 1 / (1 + (num - 1) * rho)
        covariance = share * np.eye(2) + (1 - share) * np.cov(np.array(samples).T)
        deltas.append(np.linalg.solve(covariance, begin - np.mean(samples, axis=0)))
    np.testing.assert_allclose(fit.state.server.z, begin - np.mean(deltas, axis=0), rtol=1e-9)
