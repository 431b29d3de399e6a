"""SFVI's laws: it is centralised structured variational inference, and it is right where the answer is known."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer.util import potential_energy
from programs import compiled

import numpyro_fed as nf
from numpyro_fed.keys import SERVER, START, fold_in_name, identity


def groups(y):
    """Known answer: everything is normal."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 3.0))
    with numpyro.plate("rows", y.shape[0]):
        theta = numpyro.sample("theta", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(theta, 0.5), obs=y)


def logistic(x, y=None):
    """No closed form: a random intercept per row, with four visits."""
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    omega = numpyro.sample("omega", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(0.0, jnp.exp(omega)))
        logits = beta[0] + beta[1] * x[:, None] + b[:, None] + jnp.zeros(4)
        numpyro.sample("y", dist.Bernoulli(logits=logits).to_event(1), obs=y)


def logistic_silos(sizes, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    data = {}
    for i, n in enumerate(sizes):
        x = rng.normal(size=n).astype(dtype)
        y = (rng.random((n, 4)) < 1 / (1 + np.exp(-0.5 - x - rng.normal(size=n)))[:, None]).astype(np.int32)
        data[f"silo {i}"] = dict(x=x, y=y)
    return nf.Silos(data)


def normal_silos(num_silos, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 30, num_silos)
    return nf.Silos({f"s{i}": dict(y=rng.normal(2.0, 1.1, n).astype(np.float32)) for i, n in enumerate(sizes)})


@pytest.mark.parametrize(
    "sizes", [pytest.param((7,), marks=pytest.mark.slow), (5, 3, 8)], ids=["one silo", "three silos"]
)
def test_path_is_that_of_centralised_structured_inference(x64, sizes):
    """100 steps from the same start with the same draws: the parameters agree to 1e-10.

    The centralised method is written out here: NumPyro's density of the pooled model, gradients by autodiff through
    all draws with the parameters inside log q held fixed, one Adam over everything.
    """
    silos = logistic_silos(sizes, np.float64)
    key, rounds = jax.random.key(3), 100
    guide = nf.guides.StructuredNormal()
    method = nf.SFVI(logistic, guide=guide, optim=optax.adam(0.05), importance_samples=1, start_rounds=0)
    fit = method.run(key, silos, rounds, progress_bar=False)

    pooled = {k: np.concatenate([silos[n][k] for n in silos.names]) for k in ("x", "y")}
    ends = np.cumsum(sizes)
    n, d = ends[-1], 3

    def normal(round_, name, shape):
        at = jax.random.fold_in(key, round_)
        own = jax.random.fold_in(at, SERVER) if name is None else fold_in_name(at, identity(name))
        return jax.random.normal(own, shape)

    def negative_elbo(params, eps_global, eps_local):
        fixed = jax.lax.stop_gradient(params)
        unit = lambda p: jnp.tril(p["tril"], -1) + jnp.eye(d)
        z = params["loc"] + jnp.exp(params["log_scale"]) * (unit(params) @ eps_global)
        shift = lambda p: z - p["loc"]
        b = 0.5 * (params["b"] + params["C"] @ shift(params) + jnp.exp(params["b_log_scale"]) * eps_local)
        values = {"beta": z[:2], "omega": z[2], "b": b}
        log_p = -potential_energy(logistic, (), pooled, values)
        scale_tril = jnp.exp(fixed["log_scale"])[:, None] * unit(fixed)
        log_q = dist.MultivariateNormal(fixed["loc"], scale_tril=scale_tril).log_prob(z)
        loc = 0.5 * (fixed["b"] + fixed["C"] @ shift(fixed))
        log_q += dist.Normal(loc, 0.5 * jnp.exp(fixed["b_log_scale"])).log_prob(b).sum()
        return log_q - log_p

    begin = jax.random.fold_in(jax.random.fold_in(key, START), SERVER)  # where there is no start, a random location
    params = {
        "loc": 0.05 * jax.random.normal(begin, (d,)), "log_scale": jnp.full(d, np.log(0.05)), "tril": jnp.zeros((d, d)),
        "b": jnp.zeros(n), "b_log_scale": jnp.zeros(n), "C": jnp.zeros((n, d)),
    }  # fmt: skip
    optim = optax.adam(0.05)

    def step(carry, t):
        params, state = carry
        eps_local = jnp.concatenate(
            [normal(t, name, (m, 1, 1))[:, 0, 0] for name, m in zip(silos.names, sizes, strict=True)]
        )
        loss, gradient = jax.value_and_grad(negative_elbo)(params, normal(t, None, (d,)), eps_local)
        updates, state = optim.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), loss

    (params, _), losses = jax.lax.scan(step, (params, optim.init(params)), jnp.arange(rounds))

    assert guide.global_cov == "full"
    np.testing.assert_allclose(fit.history["loss"], losses, rtol=1e-10)
    for name in ("loc", "log_scale"):
        np.testing.assert_allclose(fit.state.server.params[name], params[name], atol=1e-10)
    np.testing.assert_allclose(np.tril(fit.state.server.params["tril"], -1), np.tril(params["tril"], -1), atol=1e-10)
    for i, name in enumerate(silos.names):
        own = fit.state.silo(name)[0].params["rows"]
        rows = slice(ends[i] - sizes[i], ends[i])
        np.testing.assert_allclose(own["loc"][: sizes[i], 0], params["b"][rows], atol=1e-10)
        np.testing.assert_allclose(own["log_scale"][: sizes[i], 0], params["b_log_scale"][rows], atol=1e-10)
        np.testing.assert_allclose(own["coupling"][: sizes[i], 0], params["C"][rows], atol=1e-10)


@pytest.mark.parametrize(("num_silos", "rounds"), [(3, 600), pytest.param(20, None, marks=pytest.mark.slow)])
def test_conjugate_hierarchy_is_exact(num_silos, rounds):
    """Mean within 0.01 sd, sd within 1 %, with the default settings; read off the guide, so no Monte Carlo error."""
    silos = normal_silos(num_silos)
    fit = nf.SFVI(groups).run(jax.random.key(0), silos, rounds, progress_bar=False)
    y = np.concatenate([silos[name]["y"] for name in silos.names]).astype(np.float64)
    precision = 1 / 9 + len(y) / 1.25
    mean, sd = y.sum() / 1.25 / precision, precision**-0.5
    assert abs(float(fit.normal().mean[0]) - mean) < 0.01 * sd
    assert abs(float(fit.normal().covariance[0, 0]) ** 0.5 / sd - 1) < 0.01


@pytest.mark.parametrize(("num_silos", "rounds"), [(1, 600), pytest.param(20, None, marks=pytest.mark.slow)])
def test_conjugate_regression_is_exact(num_silos, rounds):
    """No locals, three correlated coefficients, against the closed form."""

    def regression(x, y):
        beta = numpyro.sample("beta", dist.Normal(0.0, 10.0).expand([3]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ beta, 0.7), obs=y)

    rng = np.random.default_rng(num_silos)
    x = rng.normal(size=(100, 3)) @ np.array([[1.0, 0.9, 0.0], [0.0, 0.3, 0.0], [5.0, 0.0, 0.2]])
    y = x @ np.array([30.0, -2.0, 0.5]) + 0.7 * rng.normal(size=100)
    silos = nf.split(np.arange(100) % num_silos, x=x.astype(np.float32), y=y.astype(np.float32))
    fit = nf.SFVI(regression).run(jax.random.key(0), silos, rounds, progress_bar=False)
    covariance = np.linalg.inv(x.T @ x / 0.49 + np.eye(3) / 100)
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_array_less(np.abs(fit.normal().mean - covariance @ x.T @ y / 0.49), 0.01 * sd)
    np.testing.assert_allclose(fit.normal().sds, sd, rtol=0.01)


def test_start_finds_an_answer_far_from_the_prior():
    """An intercept of 242 under N(0, 100): no tuning, and few rounds."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 100.0))
        sigma = numpyro.sample("sigma", dist.HalfNormal(50.0))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, sigma), obs=y)

    rng = np.random.default_rng(0)
    silos = nf.Silos([dict(y=rng.normal(242, 3, n).astype(np.float32)) for n in (20, 35)])
    fit = nf.SFVI(model).run(jax.random.key(0), silos, 500, progress_bar=False)
    y = np.concatenate([silos[n]["y"] for n in silos.names])
    draws = fit.sample(jax.random.key(1), 4000)
    assert abs(draws["mu"].mean() - y.mean()) < 0.1 * 3 / np.sqrt(55) + 0.05
    assert 0.9 < float(draws["mu"].std()) / (y.std() / np.sqrt(55)) < 1.1
    assert fit.history["start"].sum() <= 30 and not fit.history["start"][-500:].any()


@pytest.mark.slow
@pytest.mark.merge
def test_theta_is_learned():
    """Empirical Bayes: theta maximises the marginal likelihood, which is known here."""

    def model(y):
        scale = numpyro.param("scale", jnp.array(0.3), constraint=dist.constraints.positive)
        with numpyro.plate("rows", y.shape[0]):
            theta = numpyro.sample("theta", dist.Normal(0.0, scale))
            numpyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    rng = np.random.default_rng(1)
    silos = nf.Silos([dict(y=rng.normal(0, 5**0.5, n).astype(np.float32)) for n in (60, 140)])
    fit = nf.SFVI(model).run(jax.random.key(0), silos, 2000, progress_bar=False)
    y = np.concatenate([silos[n]["y"] for n in silos.names])
    assert float(fit.params["scale"]) == pytest.approx(np.sqrt(np.mean(y**2) - 1), rel=0.01)


# --- engines and schedules -----------------------------------------------------------------------------------------


def close(a, b, **tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


@pytest.mark.slow
def test_one_float32_step_agrees_between_engines_after_a_start():
    """The start searches along lines and accepts or rejects: near a tie, rounding decides. Hence one short step."""
    silos = logistic_silos((3, 6))
    method = nf.SFVI(logistic, start_rounds=1)
    run = lambda engine: method.run(jax.random.key(0), silos, 1, engine=engine, progress_bar=False)
    fast, plain = run(nf.engines.Vmap()), run(nf.engines.Loopback())
    close(fast.state.server, plain.state.server, rtol=1e-5, atol=1e-6)
    close(fast.state.silos, plain.state.silos, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_sampled_cohorts_reach_the_same_answer():
    silos = normal_silos(8)
    fit = nf.SFVI(groups).run(jax.random.key(0), silos, 6000, schedule=nf.schedules.sampled(3), progress_bar=False)
    y = np.concatenate([silos[name]["y"] for name in silos.names]).astype(np.float64)
    precision = 1 / 9 + len(y) / 1.25
    # a cohort's gradient is noisy even at the optimum: the tolerance is that of the step size, not of exactness
    assert abs(float(fit.normal().mean[0]) - y.sum() / 1.25 / precision) < 0.15 * precision**-0.5
    everyone = nf.SFVI(groups).run(jax.random.key(0), silos, 1, progress_bar=False)
    np.testing.assert_array_equal(fit.history["bytes_up"][-6000:] * 8, everyone.history["bytes_up"][-1] * 3)


@pytest.mark.slow
def test_nothing_compiles_twice():
    """A second run with the same shapes, other data and another number of rounds reuses every program."""
    method = nf.SFVI(logistic)
    method.run(jax.random.key(0), logistic_silos((3, 6)), 600, progress_bar=False)
    from numpyro_fed.engines import vmap

    before = vmap._rounds("most")._cache_size(), vmap._start._cache_size()
    method.run(jax.random.key(1), logistic_silos((3, 6), seed=1), 700, progress_bar=False)
    assert (vmap._rounds("most")._cache_size(), vmap._start._cache_size()) == before


def test_other_indices_of_the_same_shape_are_noticed():
    """Which term belongs to which row is read from the data, so it is read again for other data."""

    def model(y, row):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(b[row], 1.0), obs=y)

    silos = lambda row: nf.Silos([dict(y=np.arange(3.0, dtype="f"), row=np.array(row))] * 2)
    method = nf.SFVI(model)
    found = [compiled(method, silos(row)).posterior.weighting.rows for row in ([0, 1, 2], [2, 1, 0], [0, 1, 2])]
    assert found == ["aligned", "indexed", "aligned"]


@pytest.mark.slow
def test_a_fit_starts_another_method():
    """Other draws, guide and optimiser: the posterior found is the start, and the round counter begins anew."""
    silos = normal_silos(3)
    first = nf.SFVI(groups).run(jax.random.key(0), silos, 2000, progress_bar=False)
    guide = nf.guides.StructuredNormal(global_cov="diagonal", coupling=False)
    method = nf.SFVI(groups, guide=guide, importance_samples=1, optim=optax.sgd(1e-6))
    second = method.run(jax.random.key(1), silos, 1, init_state=first, progress_bar=False)
    assert second.state.round == 1 and not second.history["start"].any()
    np.testing.assert_allclose(first.normal().mean, second.normal().mean, rtol=1e-4)
    with pytest.raises(ValueError, match="init_state is of another model or data"):
        other = nf.Silos({name: dict(y=np.ones(50, "f")) for name in silos.names})
        method.run(jax.random.key(1), other, 1, init_state=first, progress_bar=False)


@pytest.mark.slow
def test_memory_does_not_grow_with_rounds():
    silos = normal_silos(3)
    method = nf.SFVI(groups)
    fit = method.run(jax.random.key(0), silos, 600, progress_bar=False)
    held = lambda: sum(array.nbytes for array in jax.live_arrays())
    before = held()
    again = method.run(jax.random.key(0), silos, 6000, init_state=fit.state, progress_bar=False)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves((f.state.server, f.state.silos))) for f in (fit, again)]
    assert sizes[0] == sizes[1] and held() - before < 2 * sizes[0] + 1_000_000


@pytest.mark.slow
def test_message_is_linear_in_the_globals():
    """What leaves a silo: gradients at the draw, at the centre, of theta, and the bound. No local latent, no rows."""
    silos = logistic_silos((30, 60))
    method = nf.SFVI(logistic)
    fit = method.run(jax.random.key(0), silos, 2, progress_bar=False)
    made, key = compiled(method, silos), jax.random.key(0)
    state, _ = fit.state.silo("silo 0")
    sent = made.algorithm.broadcast(key, fit.state.server)
    message, _ = jax.eval_shape(made.algorithm.silo_step, key, sent, state, made.stack.data("silo 0"))
    d = 3
    assert message._fields == ("z", "context", "theta", "value")
    assert sum(leaf.size for leaf in jax.tree.leaves(message)) == 2 * d + 1


# --- bad inputs ----------------------------------------------------------------------------------------------------

SILOS = logistic_silos((3, 4))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(rng_key=0), r"pass jax.random.key\(0\)"),
        (dict(rng_key=np.random.default_rng(0)), r"pass jax.random.key\(0\)"),
        (dict(num_rounds=0), "num_rounds must be an int of at least 1, got 0"),
        (dict(num_rounds=-3), "got -3"),
        (dict(num_rounds=10.0), "got 10.0"),
        (dict(schedule="async"), "schedule is 'async'"),
        (dict(schedule=nf.schedules.sampled(5)), "cohort_size is 5, but there are 2 silos"),
        (dict(schedule=nf.schedules.fixed([["paris"]])), "names 'paris'; the silos are 'silo 0', 'silo 1'"),
        (dict(silos={"a": {}}), "must be an nf.Silos"),
        (dict(init_state=3), "fit.state"),
    ],
)
def test_bad_run_arguments(arguments, words):
    call = dict(rng_key=jax.random.key(0), silos=SILOS, num_rounds=5) | arguments
    with pytest.raises((TypeError, ValueError), match=words):
        nf.SFVI(logistic).run(call.pop("rng_key"), call.pop("silos"), progress_bar=False, **call)


@pytest.mark.slow
def test_resuming_with_other_silos_says_which():
    fit = nf.SFVI(logistic).run(jax.random.key(0), SILOS, 2, progress_bar=False)
    other = nf.Silos({"silo 0": SILOS.own("silo 0"), "york": SILOS.own("silo 1")})
    with pytest.raises(ValueError, match="missing now: silo 1; not in the state: york"):
        nf.SFVI(logistic).run(jax.random.key(0), other, 2, init_state=fit.state, progress_bar=False)
