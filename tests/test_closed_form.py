"""Rows that are normal given the globals are integrated in closed form; whether they are is told from equations."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.data.padding import silo_data
from numpyro_fed.host import real_dtype
from numpyro_fed.local.closed_form import normal_rows
from numpyro_fed.local.integrate import choose, silo_factor, start_frame
from numpyro_fed.model.build import split_model
from numpyro_fed.model.degree import degree
from numpyro_fed.model.rows import components_of

KNOWN = np.arange(3.0)


@pytest.mark.parametrize(
    "function, found",
    {
        "a constant": (lambda x, y: jnp.exp(y), 0),
        "linear": (lambda x, y: y * x[0] / jnp.exp(y) - jnp.cumsum(x)[1], 1),
        "a normal": (lambda x, y: dist.Normal(x[:2], jnp.exp(y)).log_prob(x[1:]), 2),
        "many normals": (lambda x, y: dist.MultivariateNormal(x, jnp.eye(3) * jnp.exp(y)).log_prob(KNOWN), 2),
        "a looked-up normal": (lambda x, y: dist.Normal(x[jnp.array([0, 0, 2])], 1).log_prob(KNOWN), 2),
        "the larger, by what is known": (lambda x, y: jnp.where(y > 0, x @ x, x[0]), 2),
        "a product of three": (lambda x, y: x[0] * x[1] * x[2], 3),
        "a logit": (lambda x, y: dist.Bernoulli(logits=x).log_prob(1), np.inf),
        "a Laplace": (lambda x, y: dist.Laplace(x, 1).log_prob(KNOWN), np.inf),
        "a scale": (lambda x, y: dist.Normal(0, jnp.exp(x)).log_prob(KNOWN), np.inf),
        "divided by": (lambda x, y: y / x[0], np.inf),
        "the larger": (lambda x, y: jnp.maximum(x[0], x[1]), np.inf),
        "the larger, chosen": (lambda x, y: jnp.where(x[0] > 0, x[0], 0.0), np.inf),
        "rounded": (lambda x, y: x.astype(jnp.int32).astype(jnp.float32), np.inf),
        "looked up by": (lambda x, y: KNOWN @ jnp.ones(3) + jnp.asarray(KNOWN)[x[0].astype(jnp.int32)], np.inf),
        "a loop": (lambda x, y: jax.lax.fori_loop(0, 3, lambda i, t: t * x[0], y), np.inf),
        "a function with a derivative of its own": (lambda x, y: jax.nn.relu(x), np.inf),
    }.values(),
)
def test_degrees(function, found):
    assert degree(function, jnp.ones(3), jnp.float32(0.3)) == found


def mixed(k, noise=dist.Normal):
    """k coefficients for every group, in long format or one row a group."""

    def model(x, y=None):
        beta = numpyro.sample("beta", dist.Normal(0, 2))
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with numpyro.plate("groups", x.shape[0]):
            u = numpyro.sample("u", dist.Normal(0, tau).expand([k]).to_event(1))
            mean = beta + jnp.einsum("nrk,nk->nr", x, u)
            numpyro.sample("y", noise(mean, sigma).to_event(1), obs=y)

    return model


def mixed_silos(k, sizes=(5, 3), rows=6):
    draws, dtype = np.random.default_rng(k), real_dtype()

    def silo(n):
        x = draws.normal(size=(n, rows, k))
        u = draws.normal(size=(n, k))
        y = 0.5 + np.einsum("nrk,nk->nr", x, u) + 0.7 * draws.normal(size=(n, rows))
        return dict(x=x.astype(dtype), y=y.astype(dtype))

    return nf.Silos({f"s{j}": silo(n) for j, n in enumerate(sizes)})


def log_marginal(z, x, y):
    """log p(y | z) of all groups, the effects integrated out by hand."""
    beta, tau, sigma = z
    total = 0.0
    for own, seen in zip(x, y, strict=True):
        covariance = tau**2 * own @ own.T + sigma**2 * jnp.eye(len(seen))
        total += dist.MultivariateNormal(jnp.full(len(seen), beta), covariance).log_prob(seen)
    return total


def factor_of(k, name="s0", marginal=None):
    model, silos = mixed(k), mixed_silos(k)
    split = split_model(model, silos)
    survey = nf.EP(model).prepare(silos).survey
    marginal = choose(split, survey) if marginal is None else marginal
    data = silo_data(silos, name, split.spec, split.partition.axes)
    components = components_of(split, data) if marginal.rows == "indexed" else None
    factor = silo_factor(split, marginal, data, components)
    return split, marginal, factor, factor.refit(jnp.zeros(split.dim), start_frame(split, data), 3), silos[name]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_integral_is_exact_wherever_the_frame_is(x64, k):
    """Four sds of the scales away from where locals were looked for, gradient and Hessian too."""
    split, marginal, factor, frame, data = factor_of(k)
    assert marginal.kind == "normal"

    def exact(z):
        sites = split.constrain_global(z, {})
        return log_marginal([sites[name] for name in ("beta", "tau", "sigma")], data["x"], data["y"])

    ours = jax.jit(lambda z: factor.log_f(z, frame, factor.nodes(None)))
    for z in np.random.default_rng(0).normal(scale=1.5, size=(3, 3)):
        np.testing.assert_allclose(ours(z), exact(z), rtol=1e-9)
        np.testing.assert_allclose(jax.grad(ours)(z), jax.grad(exact)(z), rtol=1e-6, atol=1e-8)
        found = jax.jit(factor.derivatives)(z, frame, factor.nodes(None))
        np.testing.assert_allclose(found[2], -jax.hessian(exact)(z), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("k", [1, 2])
def test_far_away_rounding_is_no_density(k):
    """In float32, scales of e^-8 to e^8: a difference of large numbers would be hundreds of nats too many."""
    split, _, factor, frame, data = factor_of(k)
    ours = jax.jit(jax.vmap(lambda z: factor.log_f(z, frame, factor.nodes(None))))
    points = np.random.default_rng(0).uniform(-8, 8, size=(200, 3)).astype("f")
    with jax.enable_x64(True):
        sites = jax.vmap(lambda z: split.constrain_global(z, {}))(points.astype(float))
        x, y = (np.asarray(data[name], np.float64) for name in ("x", "y"))
        exact = jax.vmap(lambda *z: log_marginal(z, x, y))(*(sites[name] for name in ("beta", "tau", "sigma")))
    found, exact = np.asarray(ours(points), np.float64), np.asarray(exact)
    likely = exact > exact.max() - 60  # of other points the density need not be known, but it must not be large
    np.testing.assert_allclose(found[likely], exact[likely], atol=0.05)
    assert likely.sum() > 10 and not np.any(found[~likely] > exact.max() - 50)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_locals_moments_are_exact(x64, k):
    split, _, factor, frame, data = factor_of(k)
    z = jnp.array([0.3, -0.4, 0.2])
    found = jax.jit(factor.moments)(z, frame._replace(centre=z), factor.nodes(None))
    sites = split.constrain_global(z, {})
    for i, (x, y) in enumerate(zip(data["x"], data["y"], strict=True)):
        precision = x.T @ x / sites["sigma"] ** 2 + np.eye(k) / sites["tau"] ** 2
        mean = np.linalg.solve(precision, x.T @ (y - sites["beta"])) / sites["sigma"] ** 2
        (group,) = found.loc
        np.testing.assert_allclose(found.loc[group][i], mean, rtol=1e-3, atol=1e-4)  # a ten-thousandth of ridge
        root = found.root[group][i]
        np.testing.assert_allclose(root @ root.T, np.linalg.inv(precision), rtol=1e-3, atol=1e-6)


def test_quadrature_is_taken_where_it_is_asked_for_or_needed():
    silos = mixed_silos(2)
    kinds = {}
    for name, noise in dict(normal=dist.Normal, heavy=lambda mean, scale: dist.StudentT(4, mean, scale)).items():
        model = mixed(2, noise)
        split, survey = split_model(model, silos), nf.EP(model).prepare(silos).survey
        kinds[name] = choose(split, survey).kind, choose(split, survey, num=9).kind, normal_rows(split)
    assert kinds == dict(normal=("normal", "quadrature", True), heavy=("quadrature", "quadrature", False))
    with pytest.raises(ValueError, match="the log density is quadratic: leave marginal= out"):
        nf.EP(mixed(2, dist.Laplace), solver=nf.solvers.Importance(marginal="normal")).run(
            jax.random.key(0), silos, progress_bar=False
        )


def test_rows_of_three_are_fitted_without_a_sampler():
    """Against a grid over the three globals, the effects integrated by hand."""
    k, silos = 3, mixed_silos(3, (12, 7, 5))
    fit = nf.EP(mixed(k)).run(jax.random.key(0), silos, progress_bar=False, check=True)
    assert fit.verdict.status == "trusted", fit.verdict
    normal = fit.normal()
    mean, sd = np.asarray(normal.mean), np.sqrt(np.diagonal(np.asarray(normal.covariance)))
    x = np.concatenate([silos[name]["x"] for name in silos.names])
    y = np.concatenate([silos[name]["y"] for name in silos.names])

    def log_p(z):
        tau, sigma = jnp.exp(z[1]), jnp.exp(z[2])
        prior = dist.Normal(0, 2).log_prob(z[0]) + z[1] + z[2]
        prior += dist.HalfNormal(1).log_prob(tau) + dist.HalfNormal(1).log_prob(sigma)
        return prior + log_marginal((z[0], tau, sigma), jnp.asarray(x), jnp.asarray(y))

    # importance sampling from a wide normal: an effective thousand of points or more leaves .03 sd
    points = mean + 1.3 * sd * np.random.default_rng(1).normal(size=(20_000, 3))
    log_q = -0.5 * np.sum(((points - mean) / sd / 1.3) ** 2, axis=1)
    log_w = np.asarray(jax.lax.map(log_p, jnp.asarray(points, jnp.float32), batch_size=500)) - log_q
    weight = np.exp(log_w - log_w.max())
    weight /= weight.sum()
    assert 1 / np.sum(weight**2) > 1000
    exact = weight @ points
    np.testing.assert_allclose((mean - exact) / sd, 0, atol=0.1)
    np.testing.assert_allclose(sd / np.sqrt(weight @ (points - exact) ** 2), 1, atol=0.07)
