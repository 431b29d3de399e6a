"""Solvers for very many dimensions: right where the answer is known, and linear in d."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from programs import compiled
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed.data.padding import silo_data
from numpyro_fed.engines.base import sent_to
from numpyro_fed.local.integrate import Marginal, plain_factor, silo_factor, start_frame
from numpyro_fed.model.build import split_model
from numpyro_fed.normal import prior
from numpyro_fed.normal.families import Family, Natural
from numpyro_fed.precision import in_user_precision
from numpyro_fed.solvers.base import Tilted

DIAGONAL, IDENTITY = Family("diagonal"), Family("identity")

NAMES = ("iasg", "fisher", "ngvi", "identity")
SD, NOISE = 2.0, 0.5  # of the prior, of an observation
NONE = Marginal("none")
MARGINAL = Marginal("quadrature", 5, "aligned")  # exact where locals are normal


def linear(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0.0, SD).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, NOISE), obs=y)


def logistic(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)
    return beta


@lru_cache
def orthogonal():
    """Two silos whose designs have orthogonal columns, so that the posterior has no correlations."""
    rng, hadamard = np.random.default_rng(0), np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    data = {}
    for name, times in (("a", 3), ("b", 5)):
        x = np.tile(hadamard, (times, 1)) * np.array([0.3, 1.0, 2.0, 5.0])
        y = x @ np.array([1.0, -1.0, 0.5, 0.2]) + NOISE * rng.normal(size=len(x))
        data[name] = dict(x=x.astype(np.float32), y=y.astype(np.float32))
    return nf.Silos(data)


@lru_cache
def regression(d=200, sizes=(300, 500, 400, 350, 450), seed=0):
    """A logistic regression, and rows that no silo has seen."""
    rng = np.random.default_rng(seed)
    beta = 2 * rng.normal(size=d) / np.sqrt(d)

    def rows(n):
        x = rng.normal(size=(n, d))
        return dict(x=x.astype(np.float32), y=(rng.random(n) < 1 / (1 + np.exp(-x @ beta))).astype(np.int32))

    return nf.Silos({f"s{i}": rows(n) for i, n in enumerate(sizes)}), rows(2000)


def pooled(silos):
    return tuple(np.concatenate([np.asarray(silos[n][k], np.float64) for n in silos.names]) for k in ("x", "y"))


def flat(d, precision):
    with jax.enable_x64(True):
        return Natural(jnp.full(d, precision, jnp.float64), jnp.zeros(d, jnp.float64))


def solved(solver, silos, name, lengths=None, model=linear, family=DIAGONAL, marginal=NONE):
    """The solver's answer for one silo with q = the prior and a flat site, its data padded to ``lengths``."""
    split = split_model(model, silos, check=False)
    data = silo_data(silos, name, split.spec, split.partition.axes, lengths)
    q, site = flat(split.dim, 1 / SD**2), flat(split.dim, 0.0)
    if family.kind == "identity":
        q, site = (Natural(n.precision[0], n.shift) for n in (q, site))

    def run(key, data, q, site):
        factor = silo_factor(split, marginal, data, None)
        return solver.solve(key, Tilted(family, q, site, jnp.ones((), bool)), factor, start_frame(split, data), ())

    found = jax.jit(run)(jax.random.key(0), data, q, site)
    assert bool(found.ok) and np.isfinite(found.value) and found.natural.shift.dtype == np.float64
    return found._replace(natural=jax.tree.map(np.asarray, found.natural))


def exact(silos, name):
    x, y = (np.asarray(silos[name][k], np.float64) for k in ("x", "y"))
    precision = x.T @ x / NOISE**2 + np.eye(4) / SD**2
    assert np.allclose(precision, np.diag(np.diag(precision)))
    mean = np.linalg.solve(precision, x.T @ y / NOISE**2)
    covariance = np.eye(len(y)) * NOISE**2 + SD**2 * x @ x.T
    evidence = dist.MultivariateNormal(np.zeros(len(y)), covariance).log_prob(y)
    return mean, np.diag(precision), float(evidence)


# Each Fisher draw is chi-squared: R of them have a relative error of sqrt(2 / R), and four of those are allowed.
MANY = {
    "fisher": (nf.solvers.Fisher(num_draws=2048), 0.01, 4 * np.sqrt(2 / 2048)),
    "ngvi": (nf.solvers.NGVI(num_updates=512, beta=0.999), 0.01, 4 * np.sqrt(2 / 1024)),
    "iasg": (nf.solvers.IASG(num_chains=16, num_samples=100), 4 / np.sqrt(1600), 4 * np.sqrt(2 / 1600)),
    "identity": (nf.solvers.Identity(scale=0.7), 0.01, None),
}


@pytest.mark.parametrize("name", NAMES)
def test_normal_posterior_is_found(name):
    """Means in posterior sds (of an optimiser's end, or a sampler's standard error), and precisions."""
    solver, shift, error = MANY[name]
    found = solved(solver, orthogonal(), "a")
    mean, precision, evidence = exact(orthogonal(), "a")
    got = np.asarray(DIAGONAL.mean(found.natural))
    assert np.max(np.abs(got - mean) * np.sqrt(precision)) < shift
    if error is None:  # n c_0 + the cavity's
        assert np.allclose(found.natural.precision, 12 * 0.7 + 1 / SD**2, rtol=1e-5)
        return
    assert np.max(np.abs(found.natural.precision / precision - 1)) < error
    # the value is a Laplace approximation: exact but for the precision's error, half a sum of logs
    assert abs(float(found.value) - evidence) < 4 * 0.5 * error + 0.02


def test_in_float64(x64):
    """The mode of a normal tilted distribution is found to the last step's size."""
    found = solved(nf.solvers.Identity(num_steps=400), orthogonal(), "a")
    mean, precision, _ = exact(orthogonal(), "a")
    assert np.max(np.abs(np.asarray(DIAGONAL.mean(found.natural)) - mean) * np.sqrt(precision)) < 1e-3
    assert found.value.dtype == np.float64


def test_one_variance():
    found = solved(nf.solvers.Fisher(num_draws=2048), orthogonal(), "a", family=IDENTITY)
    _, precision, _ = exact(orthogonal(), "a")
    assert found.natural.precision.shape == ()
    assert abs(float(found.natural.precision) * np.mean(1 / precision) - 1) < MANY["fisher"][2]


@pytest.mark.parametrize("name", NAMES)
def test_a_prior_that_is_not_normal(name):
    """The server's own factor, a logistic density: nothing can be redrawn, so its Hessian stands for the information.

    With N(0, 1) its mode is 0, with curvature 1 + 1/2; the moments are by quadrature.
    """
    factor = plain_factor(lambda z: jnp.sum(z - 2 * jax.nn.softplus(z)))
    solver, (q, site) = MANY[name][0], (flat(3, 1.0), flat(3, 0.0))
    found = jax.jit(
        lambda key, q, site: solver.solve(key, Tilted(DIAGONAL, q, site, jnp.zeros((), bool)), factor, (), ())
    )(jax.random.key(0), q, site)
    z = np.linspace(-8, 8, 2001)
    weight = np.exp(-0.5 * z**2 + z - 2 * np.log1p(np.exp(z)))
    expected = {"iasg": np.sum(weight) / np.sum(weight * z**2), "fisher": 1.5, "identity": 1.5}
    error = MANY["iasg"][2] if name in ("iasg", "ngvi") else 1e-4
    assert bool(found.ok) and np.max(np.abs(DIAGONAL.mean(found.natural))) < 0.1
    # a variational variance is between the mode's and the distribution's
    assert np.max(np.abs(np.asarray(found.natural.precision) / expected.get(name, 1.45) - 1)) < error


# --- Fisher information by redrawing --------------------------------------------------------------------------------


def squares(model, silos, z, num=4000):
    """Mean and standard error of the squared scores at z, all observations redrawn, with padded rows."""
    split = split_model(model, silos, check=False)
    name = silos.names[0]
    lengths = {axis.name: axis.lengths[name] + 3 for axis in split.partition.axes}
    data = silo_data(silos, name, split.spec, split.partition.axes, lengths)
    factor = silo_factor(split, NONE, data, None)
    scores = jax.jit(jax.vmap(lambda key: factor.redrawn(key, z, ())))(jax.random.split(jax.random.key(1), num))
    assert np.all(np.abs(np.mean(scores, axis=0)) < 5 * np.std(scores, axis=0) / np.sqrt(num))  # scores have mean zero
    return np.mean(scores**2, axis=0), np.std(scores**2, axis=0) / np.sqrt(num)


def test_redrawn_scores_have_fisher_information():
    rng = np.random.default_rng(3)
    x, z = rng.normal(size=(9, 3)).astype(np.float32), jnp.array([0.5, -1.0, 2.0])
    p = 1 / (1 + np.exp(-x @ np.asarray(z)))
    silos = lambda y: nf.Silos([dict(x=x, y=y), dict(x=x[:5], y=y[:5])])

    def tempered(x, y=None):
        """Counts 0.3 times; and a term of its own, from which nothing can be drawn, is left out."""
        with handlers.scale(scale=0.3):
            beta = logistic(x, y)
        numpyro.factor("more", 5 * x @ beta)

    expected = {
        linear: x.T @ x / NOISE**2,
        logistic: (x.T * p * (1 - p)) @ x,
        tempered: 0.3 * (x.T * p * (1 - p)) @ x,
    }
    for model, information in expected.items():
        y = np.ones(9, np.float32 if model is linear else np.int32)
        mean, error = squares(model, silos(y), z)
        assert np.all(np.abs(mean - np.diag(information)) < 4 * error), model.__name__


def test_locals_are_drawn_and_integrated_out():
    """y ~ N(mu, 1 + 0.5^2) without the locals."""

    def groups(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 3.0))
        with numpyro.plate("rows", y.shape[0]):
            theta = numpyro.sample("theta", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(theta, 0.5), obs=y)

    silos = nf.Silos([dict(y=np.arange(n, dtype=np.float32)) for n in (6, 4)])
    found = solved(nf.solvers.Fisher(num_draws=512), silos, "0", model=groups, marginal=MARGINAL)
    precision = 6 / 1.25 + 1 / SD**2
    assert abs(float(DIAGONAL.mean(found.natural)[0]) - 15 / 1.25 / precision) < 0.01 / np.sqrt(precision)
    assert abs(found.natural.precision[0] / precision - 1) < 4 * np.sqrt(2 / 512)


# --- EP and SEP -----------------------------------------------------------------------------------------------------


def likelihood(draws, rows):
    """Mean log predictive density of rows, by draws of beta."""
    logits = np.asarray(draws) @ np.asarray(rows["x"], np.float64).T
    p = np.mean(1 / (1 + np.exp(-logits)), axis=0)
    return float(np.mean(np.log(np.where(rows["y"] == 1, p, 1 - p))))


def laplace(silos, num=500):
    """Draws from Laplace's approximation of the pooled logistic regression's posterior."""
    x, y = pooled(silos)
    z = np.zeros(x.shape[1])
    for _ in range(30):
        p = 1 / (1 + np.exp(-x @ z))
        hessian = (x.T * p * (1 - p)) @ x + np.eye(len(z))
        z = z + np.linalg.solve(hessian, x.T @ (y - p) - z)
    root = np.linalg.cholesky(np.linalg.inv(hessian))
    return z + np.random.default_rng(0).normal(size=(num, len(z))) @ root.T


METHODS = {
    "EP, fisher": (nf.EP, dict(solver="fisher"), 8),
    "SEP, ngvi": (nf.SEP, dict(solver="ngvi"), 8),
    "EP, ngvi": (nf.EP, dict(solver="ngvi"), 8),
    "EP, iasg": (nf.EP, dict(solver="iasg"), 8),
    "EP, identity": (nf.EP, dict(solver=nf.solvers.Identity(scale=0.25), damping=1.0), 16),
    "SEP, fisher": (nf.SEP, dict(solver="fisher"), 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", tiers(METHODS, "EP, fisher"))
def test_predictions_in_200_dimensions(which):
    """As good for rows that no silo has seen as the pooled posterior, but for .03 nats (guessing costs .16 more)."""
    (method, settings, rounds), (silos, new) = METHODS[which], regression()
    fit = method(logistic, family="diagonal", **settings).run(jax.random.key(0), silos, rounds, progress_bar=False)
    assert np.all(np.isfinite(fit.normal().sds)) and not np.any(fit.history["skipped"])
    ours, best = likelihood(fit.sample(jax.random.key(1), 500)["beta"], new), likelihood(laplace(silos), new)
    assert ours > best - 0.03 and best > np.log(0.5) + 0.15
    assert np.all(np.isfinite(fit.history["loss"]))


def subjaxprs(value):
    if hasattr(value, "jaxpr"):
        yield from subjaxprs(value.jaxpr)
    elif hasattr(value, "eqns"):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from subjaxprs(one)


def arrays(jaxpr):
    """Shapes of all that a program makes."""
    for eqn in jaxpr.eqns:
        yield from (v.aval.shape for v in eqn.outvars)
        for value in eqn.params.values():
            for sub in subjaxprs(value):
                yield from arrays(sub)


@pytest.mark.parametrize("name", (*NAMES, "gradient"))
def test_no_array_has_d_squared_elements(name):
    d = 2000
    silos, _ = regression(d, (6, 4))
    made_of = dict(gradient=(nf.PVI, nf.solvers.Gradient(num_steps=3, batch_size=2)))
    kind, solver = made_of.get(name, (nf.EP, name))
    method = kind(logistic, family="diagonal", solver=solver)
    made, key = compiled(method, silos), jax.random.key(0)
    server, states = nf.engines.Vmap().start(made.algorithm, key, made.stack)
    algorithm, data = in_user_precision(made.algorithm, False), made.stack.data("s0")

    def round_(server, state):
        message, _ = algorithm.silo_step(key, sent_to(algorithm.broadcast(key, server), 0), state, data)
        messages = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), message)
        return algorithm.server_step(key, server, (messages, jnp.arange(2, dtype=jnp.int32)))

    with jax.enable_x64(True):  # as engines do
        jaxpr = jax.make_jaxpr(round_)(server, jax.tree.map(lambda leaf: leaf[0], states[0]))
    shapes = list(arrays(jaxpr.jaxpr))
    assert len(shapes) > 100 and max(int(np.prod(shape)) for shape in shapes) < d * d / 20


def test_prior_in_many_dimensions_is_checked_without_a_matrix(x64):
    d, sds = 600, jnp.linspace(0.5, 3.0, 600)
    normal = lambda z: jnp.sum(dist.Normal(1.0, sds).log_prob(z))

    def precision(log_prior, family):
        """From Hessians times probes at three places."""
        along = jax.jit(lambda z: prior._along(log_prior, prior._probes(d), z))
        return prior._diagonal(np.stack([along(z) for z in prior._places(d)]), family)

    assert np.allclose(precision(normal, DIAGONAL), sds**-2)
    assert precision(normal, IDENTITY) is None
    assert np.allclose(precision(lambda z: -0.5 * z @ z, IDENTITY), 1.0)
    assert precision(lambda z: jnp.sum(dist.Cauchy(0.0, 1.0).log_prob(z)), DIAGONAL) is None
    assert precision(lambda z: -0.5 * z @ z + 0.1 * z[0] * z[1], DIAGONAL) is None  # correlated


@pytest.mark.slow
@pytest.mark.parametrize("tied", (False, True), ids=("EP", "SEP"))
def test_server_optimiser_moves_sites_not_the_prior(tied):
    """q = prior x sites after every round; gradient descent with a rate of 1 is no optimiser at all."""
    silos, family = orthogonal(), nf.SEP if tied else nf.EP
    settings = dict(family="diagonal", solver=nf.solvers.Identity(scale=8.0, num_steps=50), damping=1.0)

    def states(optim):
        method, fit = family(linear, server_optim=optim, **settings), None
        for _ in range(3):
            state = None if fit is None else fit.state
            fit = method.run(jax.random.key(0), silos, 1, init_state=state, progress_bar=False)
            yield fit.posterior.q(fit.state.server), fit.state.server.sites

    plain = list(states(None))
    for optim, tolerance in ((optax.sgd(1.0), 1e-10), (optax.adam(0.1), None)):
        for (q, sites), (expected, _) in zip(states(optim), plain, strict=True):
            each = sites.each if tied else jax.tree.map(lambda leaf: np.asarray(leaf).sum(axis=0), sites.each)
            assert np.allclose(sites.prior.precision, 1 / SD**2, rtol=1e-10) and np.allclose(sites.prior.shift, 0.0)
            for total, a, b in zip(q, sites.prior, each, strict=True):
                assert np.allclose(total, np.asarray(a) + np.asarray(b), rtol=1e-10)
            assert bool(DIAGONAL.proper(q))
            if tolerance is not None:
                assert all(np.allclose(a, b, rtol=tolerance) for a, b in zip(q, expected, strict=True))


def test_errors_teach():
    with pytest.raises(ValueError, match="family='diagonal'"):
        nf.EP(linear, solver="fisher").run(jax.random.key(0), orthogonal(), 1, progress_bar=False)
    with pytest.raises(ValueError, match="scale is the precision"):
        nf.solvers.Identity(scale=0.0)
    with pytest.raises(ValueError, match="num_steps"):
        nf.solvers.IASG(num_steps=0)

    def unnormalised(x):
        beta = numpyro.sample("beta", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.factor("y", -((x - beta) ** 2))

    silos = nf.Silos([dict(x=np.arange(n, dtype=np.float32)) for n in (3, 4)])
    with pytest.raises(ValueError, match="solver='iasg'"):
        nf.EP(unnormalised, family="diagonal", solver="fisher").run(jax.random.key(0), silos, 1, progress_bar=False)
