"""The silo's bound: its gradients against finite differences, and which term belongs to which row."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.data.padding import silo_data
from numpyro_fed.guides import StructuredNormal
from numpyro_fed.local.bound import Weighting, silo_bound
from numpyro_fed.model.build import split_model
from numpyro_fed.model.rows import find_components, how_rows_lie


def poisson(y, num_groups, group):
    """Long format, skewed local posteriors, a learned parameter."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.5))
    drift = numpyro.param("drift", jnp.array(0.1))
    with numpyro.plate("groups", num_groups):
        a = numpyro.sample("a", dist.Normal(mu, tau))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(a[group] + drift)), obs=y)


@pytest.fixture
def case(x64):
    silos = nf.Silos(
        {
            "a": dict(y=np.array([0, 3, 1, 7]), num_groups=2, group=np.array([1, 0, 1, 1])),
            "b": dict(y=np.array([2, 2, 5]), num_groups=3, group=np.array([2, 0, 1])),
        }
    )
    split = split_model(poisson, silos, check=False)
    data = silo_data(silos, "a", split.spec, split.partition.axes, {"groups": 3, "rows": 5})
    return split, data


def components(split, data):
    z = 0.1 * jnp.arange(1.0, split.dim + 1)
    return jax.jit(lambda data: find_components(split, data, z, split.theta))(data)


def one_bound(split, data, guide, weighting):
    """The bound of silo a as a function of everything that it depends on, at parameters away from the start."""
    zeros = split.zeros_local(data.mask)
    rng = np.random.default_rng(0)
    noise = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.3, size=leaf.shape)), tree)
    coupling = {g: jnp.zeros((*v.shape, split.dim)) for g, v in zeros.items()}
    valid = {g.name: split.row_mask(g, data.mask) for g in split.groups}
    params, base = guide.init_local(
        split.groups, zeros, jax.tree.map(jnp.ones_like, zeros), coupling, jnp.ones(2), valid
    )
    params = noise(params)
    found = components(split, data)

    def bound(key, params, z, mean, theta):
        return silo_bound(split, guide, weighting, key, params, base, z, mean, theta, data, found)

    return jax.jit(bound), (params, jnp.array([0.4, -0.2]), jnp.array([0.1, 0.1]), split.theta), found


@pytest.mark.merge
@pytest.mark.parametrize("num", [1, 5])
def test_gradients_of_globals_are_the_bounds_own(case, num):
    """At fixed draws the gradients of z_G and theta are derivatives: central differences agree to 1e-7."""
    split, data = case
    bound, (params, z, mean, theta), _ = one_bound(
        split, data, StructuredNormal(scale_coupling=True), Weighting(num, "indexed")
    )
    found = bound(jax.random.key(0), params, z, mean, theta)
    step = 1e-5
    for i in range(2):
        move = step * jnp.eye(2)[i]
        value = lambda z: bound(jax.random.key(0), params, z, mean, theta).value
        np.testing.assert_allclose(found.z[i], (value(z + move) - value(z - move)) / (2 * step), rtol=1e-6, atol=1e-7)
    value = lambda drift: bound(jax.random.key(0), params, z, mean, {"drift": drift}).value
    drift = theta["drift"]
    np.testing.assert_allclose(
        found.theta["drift"], (value(drift + step) - value(drift - step)) / (2 * step), rtol=1e-6
    )


@pytest.mark.merge
@pytest.mark.parametrize("num", [1, 5])
def test_gradients_of_the_guide_are_unbiased(case, num):
    """Mean over many draws against differences of the mean bound with common draws: within 4.5 standard errors.

    (Holding the parameters of log q fixed without squaring the weights fails this by far at num = 5.)
    """
    split, data = case
    bound, (params, z, mean, theta), _ = one_bound(split, data, StructuredNormal(), Weighting(num, "indexed"))
    keys = jax.random.split(jax.random.key(1), 40_000)
    flat, unravel = jax.flatten_util.ravel_pytree((params, mean))

    def both(key):
        found = bound(key, params, z, mean, theta)
        ours = jax.flatten_util.ravel_pytree((found.params, found.context))[0]
        value = lambda flat: bound(key, unravel(flat)[0], z, unravel(flat)[1], theta).value
        steps = 1e-4 * jnp.eye(flat.size)
        differences = jax.lax.map(lambda s: (value(flat + s) - value(flat - s)) / 2e-4, steps)
        return ours - differences

    gaps = jax.jit(lambda keys: jax.lax.map(both, keys, batch_size=2000))(keys)
    error = gaps.std(axis=0) / np.sqrt(len(keys))
    assert np.all(np.abs(gaps.mean(axis=0)) <= 4.5 * error + 1e-7)
    assert np.max(error) < 0.05


@pytest.mark.slow
def test_more_draws_tighten_the_bound(case):
    split, data = case
    values = []
    for num in (1, 5, 50):
        bound, rest, _ = one_bound(split, data, StructuredNormal(), Weighting(num, "indexed"))
        keys = jax.random.split(jax.random.key(2), 4000)
        values.append(float(jnp.mean(jax.vmap(bound, in_axes=(0, None, None, None, None))(keys, *rest).value)))
    assert values[0] < values[1] < values[2]


def test_long_format_rows_are_found(case):
    """Rows 0..3 belong to groups 1, 0, 1, 1; the padded row and the padded group belong to nobody."""
    split, data = case
    _, _, found = one_bound(split, data, StructuredNormal(), Weighting(1))
    assert bool(found.separable)
    np.testing.assert_array_equal(found.terms["y"], [1, 0, 1, 1, 3])
    np.testing.assert_array_equal(found.terms["a"][:2], [0, 1])
    assert not how_rows_lie(split, data, found)[1]


@pytest.mark.slow
def test_indexed_and_aligned_agree(x64):
    """Where rows stand at their own place both ways of adding terms up give the same bound."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", y.shape[0]):
            a = numpyro.sample("a", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Poisson(jnp.exp(a)[:, None]).to_event(1), obs=y)

    silos = nf.Silos([dict(y=np.arange(6).reshape(3, 2)), dict(y=np.ones((2, 2), int))])
    split = split_model(model, silos, check=False)
    data = silo_data(silos, "1", split.spec, split.partition.axes, {"rows": 3})
    found = components(split, data)
    assert how_rows_lie(split, data, found)[1]
    guide = StructuredNormal()
    zeros = split.zeros_local(data.mask)
    params, base = guide.init_local(
        split.groups, zeros, jax.tree.map(jnp.ones_like, zeros), {"rows": jnp.zeros((3, 1, 1))}, jnp.ones(1),
        {"rows": data.mask["rows"]},
    )  # fmt: skip
    one, other = (
        silo_bound(
            split,
            guide,
            Weighting(4, rows),
            jax.random.key(0),
            params,
            base,
            jnp.ones(1),
            jnp.zeros(1),
            {},
            data,
            found,
        )
        for rows in ("aligned", "indexed")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), one, other)


def test_nested_rows_form_components(x64):
    """Patients in districts, both with latents: weights belong to the district with its patients."""

    def model(y, district, num_districts):
        with numpyro.plate("districts", num_districts):
            u = numpyro.sample("u", dist.Normal(0.0, 1.0))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("patients", y.shape[0]):
            v = numpyro.sample("v", dist.Normal(0.0, scale))
            numpyro.sample("y", dist.Normal(u[district] + v, 1.0), obs=y)

    silos = nf.Silos(
        [
            dict(y=np.arange(4.0), district=np.array([0, 1, 0, 1]), num_districts=2),
            dict(y=np.arange(3.0), district=np.array([2, 1, 0]), num_districts=3),
        ]
    )
    split = split_model(model, silos, check=False)
    data = silo_data(silos, "0", split.spec, split.partition.axes)
    found = components(split, data)
    assert bool(found.separable)
    u, v = np.asarray(found.rows["districts"]), np.asarray(found.rows["patients"])
    assert u[0] != u[1]
    np.testing.assert_array_equal(v, u[[0, 1, 0, 1]])
    np.testing.assert_array_equal(found.terms["y"], v)


@pytest.mark.slow
def test_chained_rows_are_not_separable(x64):
    """A random walk: neighbours meet in a term, so there is no weight per row."""

    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("times", y.shape[0]):
            steps = numpyro.sample("steps", dist.Normal(0.0, 1.0))
            numpyro.sample("y", dist.Normal(scale * jnp.cumsum(steps), 1.0), obs=y)

    silos = nf.Silos([dict(y=np.arange(4.0)), dict(y=np.arange(4.0) + 1)])
    split = split_model(model, silos, check=False)
    found = components(split, silo_data(silos, "0", split.spec, split.partition.axes))
    assert not bool(found.separable)
    fit = nf.SFVI(model).run(jax.random.key(0), silos, 5, progress_bar=False)
    assert np.all(np.isfinite(fit.history["loss"]))
