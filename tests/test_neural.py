"""Networks in the model: flax nnx modules through NumPyro's random_nnx_module and nnx_module.

That the split is exact for them is in test_split_model.py; here they meet the methods and what a fit can do.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree
from models import MODELS, NETWORK, Network, last_layer, learned_network, random_network
from numpyro.contrib.module import nnx_module, random_nnx_module
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed.data.padding import silo_data
from numpyro_fed.model.build import split_model
from numpyro_fed.model.trace import PartitionError

WEIGHTS = ("net/hidden.bias", "net/hidden.kernel", "net/out.bias", "net/out.kernel")
DIAGONAL = dict(guide=nf.guides.StructuredNormal(global_cov="diagonal"))


def silos():
    return MODELS["random network"].silos()


def linear(solver):
    return dict(family="diagonal", solver=solver)


METHODS = {
    "SFVI": nf.SFVI(random_network, **DIAGONAL),
    "SFVIAvg": nf.SFVIAvg(random_network, local_steps=2, **DIAGONAL),
    "EP": nf.EP(random_network, **linear(nf.solvers.NGVI(num_steps=2, num_updates=2))),
    "SEP, Fisher": nf.SEP(random_network, **linear(nf.solvers.Fisher(num_steps=2))),
    "SEP, Identity": nf.SEP(random_network, **linear(nf.solvers.Identity(num_steps=2))),
    "SEP, IASG": nf.SEP(
        random_network, **linear(nf.solvers.IASG(num_steps=2, num_chains=2, num_samples=3, num_warmup=1))
    ),
    "PVI": nf.PVI(random_network, **linear(nf.solvers.Gradient(num_steps=2, batch_size=3))),
    "FedAvg": nf.FedAvg(random_network, local_steps=2),
    "FedPA": nf.FedPA(random_network, num_samples=3, num_warmup=2, thinning=2, averaging_rounds=1),
}


@pytest.mark.parametrize("name", tiers(METHODS, "SFVI"))
def test_every_method_takes_a_random_network(name):
    fit = METHODS[name].run(jax.random.key(0), silos(), 2, progress_bar=False)
    draws = fit.sample(jax.random.key(1), 3)
    assert {site: value.shape for site, value in draws.items()} == dict(
        zip(WEIGHTS, [(3, 2), (3, 2, 2), (3, 1), (3, 2, 1)], strict=True)
    )
    assert all(np.all(np.isfinite(value)) for value in draws.values())
    assert fit.params == {}


@pytest.mark.slow
def test_what_a_fit_can_do_with_a_random_network(tmp_path):
    method = METHODS["SFVI"]
    fit = method.run(jax.random.key(0), silos(), 2, progress_bar=False)
    new = fit.predict(jax.random.key(1), dict(x=np.zeros((4, 2), "f")), num_samples=5)
    assert new["y"].shape == (5, 4)
    assert len(fit.summary(num_samples=10)) == fit.split.dim == 9
    found = fit.to_arviz(num_samples=5, log_likelihood=True)
    assert set(found.posterior.data_vars) == set(WEIGHTS)
    again = nf.load(fit.save(tmp_path / "fit"), method)
    for name, value in fit.sample(jax.random.key(1), 3).items():
        np.testing.assert_array_equal(again.sample(jax.random.key(1), 3)[name], value)


@pytest.mark.slow
def test_nuts_samples_a_random_network():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hidden units may change places: chains disagree
        found = nf.nuts(random_network, silos(), rng_key=jax.random.key(0), num_warmup=20, num_samples=20, num_chains=1)
    assert set(found.get_samples()) == set(WEIGHTS)


# --- where a network is made, and what of it is random ----------------------------------------------------------------


def log_silo(model, z):
    data = silos()
    split = split_model(model, data)
    return split.log_silo(z, {}, split.theta, silo_data(data, "0", split.spec, split.partition.axes))


def by_callable(x, y):
    net = random_nnx_module("net", Network(), lambda name, shape: dist.Normal(0, 2.0 if "bias" in name else 1.0), ".")
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=net(x)), obs=y)


def test_a_network_may_be_made_inside_or_outside_of_the_model():
    """And a prior may be a function; the likelihood is the same."""
    z = np.linspace(-1, 1, 9, dtype="f")
    np.testing.assert_allclose(log_silo(random_network, z), log_silo(by_callable, z), rtol=1e-6)
    assert nf.partition(by_callable, silos()).global_sites == tuple(name.replace("/", ".") for name in WEIGHTS)
    kept = jax.tree.leaves(nnx.to_pure_dict(nnx.state(NETWORK)))
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in kept)  # NumPyro puts draws into a copy


def test_weights_with_a_prior_are_not_theta():
    data = MODELS["last layer"].silos()
    assert not jax.tree.leaves(split_model(random_network, silos(), check=False).theta)
    split = split_model(last_layer, data)
    flat, unravel = ravel_pytree(split.theta)
    assert flat.shape == (6,)  # the hidden layer's
    assert split.dim == 3
    one = silo_data(data, "s0", split.spec, split.partition.axes)
    log_silo = lambda theta: split.log_silo(jnp.ones(3), {}, unravel(theta), one)
    assert np.all(np.asarray(jax.jit(jax.grad(log_silo))(flat)) != 0)
    assert "(6,)" in str(split.partition)


def test_theta_of_a_network_is_a_pytree_that_evaluation_leaves_alone():
    data = MODELS["learned network"].silos()
    split = split_model(learned_network, data)
    start = jax.tree.map(np.array, split.theta)
    assert jax.tree.map(np.shape, start) == {
        "net$params": {"hidden": {"bias": (2,), "kernel": (2, 2)}, "out": {"bias": (1,), "kernel": (2, 1)}}
    }
    one = silo_data(data, "s0", split.spec, split.partition.axes)
    jax.jit(lambda theta: split.log_silo(jnp.zeros(1), split.zeros_local(one.mask), theta, one))(split.theta)
    jax.tree.map(np.testing.assert_array_equal, split.theta, start)
    jax.tree.map(np.testing.assert_array_equal, split.constrain_theta(split.theta), start)


def test_averaging_learns_a_network_and_shows_its_weights():
    """The last layer has a prior, the others are params."""
    case = MODELS["last layer"]
    fit = nf.FedAvg(case.model).run(jax.random.key(0), case.silos(), 3, progress_bar=False)
    assert np.all(ravel_pytree(fit.params)[0] != ravel_pytree(fit.split.theta)[0])
    table = fit.summary(num_samples=2)
    assert list(table.role).count("param") == 6 and list(table.role).count("global") == 3
    assert "net$params.hidden.kernel[0, 1]" in table.index


@pytest.mark.slow
@pytest.mark.parametrize("name", ["learned network", "last layer"])
def test_sfvi_learns_a_network_and_keeps_it_in_a_file(name, tmp_path):
    case = MODELS[name]
    method = nf.SFVI(case.model, **DIAGONAL)
    fit = method.run(jax.random.key(0), case.silos(), 30, progress_bar=False)
    start = ravel_pytree(fit.split.theta)[0]
    learned = ravel_pytree(fit.params)[0]
    assert np.all(learned != start)
    np.testing.assert_array_equal(ravel_pytree(nf.load(fit.save(tmp_path / "fit"), method).params)[0], learned)
    assert fit.predict(jax.random.key(1), dict(x=np.zeros((4, 2), "f")), num_samples=5)["y"].shape == (5, 4)


@pytest.mark.slow
def test_a_network_is_learned_in_the_precision_of_the_moment(x64):
    """Though flax makes weights in float32."""
    fit = nf.SFVI(learned_network, **DIAGONAL).run(
        jax.random.key(0), MODELS["learned network"].silos(), 2, progress_bar=False
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(fit.params)} == {np.dtype("float64")}


def test_ep_says_that_it_does_not_learn_a_network():
    with pytest.raises(PartitionError, match=r"net\$params.*prior"):
        nf.EP(learned_network, family="diagonal").run(jax.random.key(0), MODELS["learned network"].silos())


# --- state ------------------------------------------------------------------------------------------------------------


class Stateful(nnx.Module):
    def __init__(self, layer):
        self.first, self.layer = Network(), layer

    def __call__(self, x):
        return self.first(self.layer(x))


def with_state(module, call=random_nnx_module, **options):
    def model(x, y):
        net = call("net", module, **options)
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(net(x), sigma), obs=y)

    return model


LAYERS = {
    "batch statistics": lambda: nnx.BatchNorm(2, rngs=nnx.Rngs(0)),
    "dropout": lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_state_that_changes_is_refused_and_state_that_does_not_is_a_constant(name):
    data = MODELS["last layer"].silos()
    module = Stateful(LAYERS[name]())
    for call, options in ((random_nnx_module, dict(prior=dist.Normal(0, 1))), (nnx_module, {})):
        with pytest.raises(PartitionError, match=r"'net\$state'.*nnx\.LayerNorm.*module\.eval\(\)"):
            nf.partition(with_state(module, call, **options), data)
    module.eval()
    split = split_model(with_state(module, prior=dist.Normal(0, 1)), data)
    assert "net$state" not in str(split.partition)
    other = Stateful(nnx.LayerNorm(2, rngs=nnx.Rngs(0)))
    assert split_model(with_state(other, prior=dist.Normal(0, 1)), data).dim == 14


# --- size -------------------------------------------------------------------------------------------------------------


class Large(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(784, 200, rngs=rngs), nnx.Linear(200, 200, rngs=rngs)
        self.out = nnx.Linear(200, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.second(nnx.relu(self.first(x)))))


@pytest.mark.slow
def test_time_and_memory_are_linear_in_the_weights():
    """Two hundred thousand: anything quadratic would need 160 GB."""
    module = Large(nnx.Rngs(0))

    def model(x, y=None):
        net = random_nnx_module("net", module, prior=dist.Normal(0, 0.1))
        with numpyro.plate("images", x.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=net(x)), obs=y)

    draws = np.random.default_rng(0)
    data = nf.Silos([dict(x=draws.random((8, 784), "f"), y=draws.integers(0, 10, 8).astype("i")) for _ in range(2)])
    method = nf.SEP(model, **linear(nf.solvers.Identity(num_steps=2)))
    fit = method.run(jax.random.key(0), data, 1, progress_bar=False)
    assert fit.split.dim == 199_210
    sent = fit.history["bytes_up"][0] - fit.records[0].bytes_up  # without the survey
    assert sent < 2 * (2 * 8 * fit.split.dim + 100)  # a precision and a shift, two silos
    assert np.isfinite(fit.sample(jax.random.key(1), 2)["net/first.kernel"]).all()
