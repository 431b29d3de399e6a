"""GI-PVI: the algebra of inducing points, what layers are accepted, what leaves a silo, and the method's laws."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_fed as nf
from benchmarks import networks
from numpyro_fed.methods.gi_rounds import damped, heard_rows, stacked_rows
from numpyro_fed.model.build import split_model
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.normal import inducing
from numpyro_fed.normal.inducing import Rows
from numpyro_fed.normal.network import read_network

KEY = jax.random.key(0)
SIZES = {"leeds": 5, "york": 9, "hull": 3}
NETWORK = nf.gi.mlp([2, 3, 1], "normal", scale=0.5)
QUICK = dict(num_inducing=4, local_steps=5, optim=optax.adam(0.05))


def data(seed: int = 0, **sizes: int) -> nf.Silos:
    draws, found = np.random.default_rng(seed), {}
    for name, size in (sizes or SIZES).items():
        x = draws.normal(size=(size, 2)) + [1, -2]
        y = np.sin(x[:, 0]) + x[:, 1] + 0.3 * draws.normal(size=size)
        found[name] = dict(x=np.asarray(x, jnp.result_type(float)), y=np.asarray(y, jnp.result_type(float)))
    return nf.Silos(found)


def network_of(model, layers, silos):
    split = split_model(model, silos)
    return split, read_network(split, nf.gi.as_layers(layers), None)


def random_rows(network, seed: int, num: int = 6, groups: str = "layer") -> Rows:
    draws = np.random.default_rng(seed)
    width = network.layers[0].mean.shape[0] - 1
    precisions = tuple(
        jnp.asarray(draws.gamma(2.0, size=(1 if groups == "layer" else layer.units, num))) for layer in network.layers
    )
    outputs = tuple(jnp.asarray(draws.normal(size=(num, layer.units))) for layer in network.layers)
    return Rows(jnp.asarray(draws.normal(size=(num, width))), outputs, precisions)


def joined(*tables: Rows) -> Rows:
    put = lambda axis: lambda *leaves: jnp.concatenate(leaves, axis)
    return Rows(
        put(0)(*(table.inputs for table in tables)),
        tuple(map(put(0), *(table.outputs for table in tables))),
        tuple(map(put(1), *(table.precisions for table in tables))),
    )


# --- the algebra ------------------------------------------------------------------------------------------------------


def linear(x, y=None):
    w = numpyro.sample("w", dist.Normal(0.5, jnp.array([[2.0], [1.0]])).to_event(2))
    b = numpyro.sample("b", dist.Normal(-1.0, 3.0).expand([1]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal((x @ w + b)[:, 0], 0.4), obs=y)


def exact(silos, *names):
    """Mean and covariance of (w, b), in closed form."""
    x = np.concatenate([silos[name]["x"] for name in names])
    x, y = np.c_[x, np.ones(len(x))], np.concatenate([silos[name]["y"] for name in names])
    prior = np.diag([1 / 4, 1.0, 1 / 9])
    precision = prior + x.T @ x / 0.16
    return np.linalg.solve(precision, prior @ [0.5, 0.5, -1.0] + x.T @ y / 0.16), np.linalg.inv(precision)


def test_one_linear_layer_is_exact_and_a_sweep_of_silos_is_the_pooled_posterior(x64):
    """U = X, V = y, precision 1 / sigma^2: the rows are the data. 1e-6, as nothing but rounding is left."""
    silos = data()
    method = nf.GIPVI(linear, [("w", "b")], num_inducing=9)
    split = method.prepare(silos).split
    network = read_network(split, method.layers, None)
    heard = []
    for name in silos.names:
        x, y = jnp.asarray(silos[name]["x"]), jnp.asarray(silos[name]["y"])
        heard.append(Rows(x, (y[:, None],), (jnp.full((1, len(y)), 1 / 0.16),)))
        table, (layer,) = joined(*heard), network.layers
        found = inducing.given(inducing.told(layer, table.inputs, table.outputs[0], table.precisions[0]))
        mean, covariance = exact(silos, *silos.names[: len(heard)])
        zero = jnp.zeros(layer.mean.shape)
        np.testing.assert_allclose(found.sample(layer, zero)[:, 0], mean, rtol=1e-6)
        root = np.stack([found.sample(layer, zero.at[i].set(1.0))[:, 0] - mean for i in range(3)], axis=1)
        np.testing.assert_allclose(root @ root.T, covariance, rtol=1e-6, atol=1e-9)


def test_inverse_root_has_the_gradient_of_a_finite_difference(x64):
    draws = np.random.default_rng(0)
    a, towards = draws.normal(size=(4, 4)), draws.normal(size=(4, 4))
    precision = jnp.asarray(a @ a.T + np.eye(4))
    value = lambda p: jnp.sum(jnp.asarray(towards) * inducing.inverse_root(p))
    direction = draws.normal(size=(4, 4))
    direction = jnp.asarray(direction + direction.T)
    step = 1e-5
    slope = (value(precision + step * direction) - value(precision - step * direction)) / (2 * step)
    np.testing.assert_allclose(jnp.sum(jax.grad(value)(precision) * direction), slope, rtol=1e-7)


@pytest.mark.merge
@pytest.mark.parametrize("groups", ["layer", "unit"])
def test_divergence_of_a_layer_is_its_monte_carlo_estimate(x64, groups):
    """Four standard errors of 20,000 draws of log q - log c."""
    _, network = network_of(*NETWORK, data())
    layer, (before, own) = network.layers[0], (random_rows(network, seed, groups=groups) for seed in (0, 1))
    said = [inducing.told(layer, one.inputs, one.outputs[0], one.precisions[0]) for one in (before, own)]
    cavity = inducing.given(said[0])
    q, divergence = inducing.given_also(cavity, said[1])
    both = inducing.given(inducing.together(*said))
    np.testing.assert_allclose(q.mean, both.mean, rtol=1e-9)
    noise = jax.random.normal(KEY, (20_000, *q.mean.shape))
    draws = q.mean + jnp.einsum("gij,ngik->ngjk", q.root, noise)

    def log_density(weights, at):  # up to constants that both have
        away = at - weights.mean
        precision = jnp.eye(away.shape[-2]) + weights.told.precision
        quadratic = jnp.einsum("ngik,gij,ngjk->n", away, precision, away)
        return 0.5 * (jnp.sum(jnp.linalg.slogdet(precision)[1]) * away.shape[-1] - quadratic)

    sampled = np.asarray(log_density(q, draws) - log_density(cavity, draws))
    assert abs(sampled.mean() - float(divergence)) < 4 * sampled.std() / np.sqrt(len(sampled))


@pytest.mark.merge
def test_one_silo_is_the_pooled_bound(x64):
    """Without others the tilted draw and its divergence are those of one table against the prior."""
    _, network = network_of(*NETWORK, data())
    own, noise = random_rows(network, 0), inducing.noise_for(network, KEY)
    nothing = random_rows(network, 1)
    nothing = nothing._replace(precisions=tuple(0 * one for one in nothing.precisions))
    pooled = inducing.sample(network, own, noise)
    alone = inducing.sample_tilted(network, inducing.cavity_of(network, nothing), own, noise)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), pooled, alone)


@pytest.mark.merge
def test_silos_in_turn_are_silos_at_once(x64):
    """Neither order nor rows of zero precision matter, and what is given in turn is what is given at once."""
    _, network = network_of(*NETWORK, data())
    a, b, noise = random_rows(network, 0), random_rows(network, 1), inducing.noise_for(network, KEY)
    weights, divergence = inducing.sample(network, joined(a, b), noise)
    silent = b._replace(precisions=tuple(0 * one for one in b.precisions))
    for table in (joined(b, a), joined(a, silent, b)):
        other, same = inducing.sample(network, table, noise)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12), other, weights)
        np.testing.assert_allclose(same, divergence, rtol=1e-9)
    tilted, _ = inducing.sample_tilted(network, inducing.cavity_of(network, a), b, noise)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-9), tilted, weights)


def test_precisions_of_units_agree_with_those_of_layers_where_they_are_equal(x64):
    _, network = network_of(*NETWORK, data())
    layers, noise = random_rows(network, 0), inducing.noise_for(network, KEY)
    repeat = lambda one, layer: jnp.broadcast_to(one, (layer.units, one.shape[1]))
    units = layers._replace(precisions=tuple(map(repeat, layers.precisions, network.layers)))
    pair = [inducing.sample(network, table, noise) for table in (layers, units)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), *pair)


# --- what layers are accepted -----------------------------------------------------------------------------------------


def deep(x, y=None, act=jax.nn.relu, scale=1.0, extra=False):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([3, 1]).to_event(2))
    s = numpyro.sample("s", dist.Normal(0, 1)) if extra else 0.0
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal((act(scale * x @ w) @ v)[:, 0] + s, 1.0), obs=y)


def correlated(x, y=None):
    w = numpyro.sample("w", dist.MultivariateNormal(jnp.zeros(2), jnp.array([[1, 0.5], [0.5, 1]])).to_event(0))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([2, 1]).to_event(2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal((x @ v)[:, 0] + w[0], 1.0), obs=y)


def tied(x, y=None):
    flat = numpyro.sample("w", dist.MultivariateNormal(jnp.zeros((2, 2)), jnp.array([[1, 0.5], [0.5, 1]])).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal((x @ flat)[:, 0], 1.0), obs=y)


def counts(x, exposure, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 1]).to_event(2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp((x @ w)[:, 0] + jnp.log(exposure))), obs=y)


def trials(x, n, seen, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 1]).to_event(2))
    with numpyro.plate("rows", x.shape[0]), numpyro.handlers.mask(mask=seen):
        numpyro.sample("y", dist.Binomial(n, logits=(x @ w)[:, 0]), obs=y)


def positive(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 1]).to_event(2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.LogNormal((x @ w)[:, 0], 1.0), obs=y)


def heavy(x, y=None):
    w = numpyro.sample("w", dist.StudentT(3, 0, 1).expand([2, 1]).to_event(2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal((x @ w)[:, 0], 1.0), obs=y)


def with_param(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 1]).to_event(2))
    s = numpyro.param("s", 1.0, constraint=dist.constraints.positive)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal((x @ w)[:, 0], s), obs=y)


def with_locals(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 1]).to_event(2))
    with numpyro.plate("rows", x.shape[0]):
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal((x @ w)[:, 0] + a, 1.0), obs=y)


RIGHT = [("w", None, "relu"), ("v",)]


@pytest.mark.parametrize(
    "model, layers, message",
    [
        (deep, [("w", None, "tanh"), ("v",)], "forward pass is not that of the model.*depends on 'w' in another way"),
        (deep, [("w",), ("v",)], "in another way"),
        (lambda x, y=None: deep(x, y, jnp.tanh, 2.0), [("w", None, "tanh"), ("v",)], "in another way"),
        (lambda x, y=None: deep(x, y, extra=True), RIGHT, "'s' is in none"),
        (deep, [("v",), ("w", None, "relu")], "kernel 'w' has shape"),
        (deep, [("w", None, "relu")], "'v' is in none"),
        (deep, [("w", "b", "relu"), ("v",)], "no global sample site 'b'"),
        (correlated, [("v",)], "'w' is in none"),
        (heavy, [("w",)], "normal and independent"),
        (tied, [("w",)], "normal and independent"),
        (with_param, [("w",)], "no way to learn numpyro.param 's'"),
        (with_locals, [("w",)], "local latents"),
    ],
)
def test_layers_that_do_not_fit_are_refused(model, layers, message):
    with pytest.raises(PartitionError, match=message):
        network_of(model, layers, data())


def test_layers_that_fit():
    for layers in (RIGHT, [nf.gi.Layer("w", None, jax.nn.relu), "v"]):
        _, network = network_of(deep, layers, data())
        assert network.inputs == "x"
    assert network_of(*nf.gi.mlp([2, 3, 4], "categorical"), data_classes())[1].inputs == "x"


@pytest.mark.parametrize(
    "model, more",
    [
        (counts, lambda n: dict(exposure=np.full(n, 2.0, "f"), y=np.arange(n))),
        (trials, lambda n: dict(n=np.full(n, 5), seen=np.arange(n) > 0, y=np.arange(n) % 3)),
        (positive, lambda n: dict(y=1 + np.arange(n, dtype="f"))),
    ],
)
def test_likelihoods_that_are_not_finite_everywhere_are_no_trouble(model, more):
    x = np.random.default_rng(0).normal(size=(6, 2)).astype("f")
    silos = nf.Silos([dict(x=x[:n], **more(n)) for n in (4, 6)])
    assert network_of(model, ["w"], silos)[1].inputs == "x"


def data_classes():
    draws = np.random.default_rng(0)
    return nf.Silos([dict(x=draws.normal(size=(n, 2)).astype("f"), y=draws.integers(4, size=n)) for n in (4, 6)])


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(layers=[]), "layers is a list"),
        (dict(layers=[("W1", "b1", "rleu")]), "activation is one of"),
        (dict(precision="row"), "precision is 'layer' or 'unit'"),
        (dict(init="zeros"), "init is 'normal' or 'data'"),
        (dict(damping=0), "in \\(0, 1\\]"),
        (dict(num_inducing=0), "num_inducing must be an int of at least 1"),
        (dict(start_precision=-1), "start_precision must be a positive number"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises((ValueError, TypeError), match=message):
        nf.GIPVI(NETWORK[0], **(dict(layers=NETWORK[1]) | settings))


def test_an_input_that_is_not_there_is_named():
    with pytest.raises(PartitionError, match="inputs='z' is not one; their arguments are x, y"):
        nf.GIPVI(*NETWORK, inputs="z", **QUICK).run(KEY, data(), 1, progress_bar=False)


# --- the method -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sequential():
    silos = data()
    with pytest.warns(nf.VerdictWarning, match="still"):
        return nf.GIPVI(*NETWORK, **QUICK).run(KEY, silos, 6, schedule="sequential", progress_bar=False)


def draws_of(fit, num=3):
    return fit.sample(jax.random.key(1), num)


def same_draws(a, b, **tolerance):
    for name, value in draws_of(a).items():
        np.testing.assert_allclose(draws_of(b)[name], value, **tolerance)


@pytest.mark.merge
def test_a_fit_draws_predicts_and_is_kept(sequential, tmp_path):
    fit = sequential
    assert {name: value.shape for name, value in draws_of(fit).items()} == {
        "W1": (3, 2, 3),
        "b1": (3, 3),
        "W2": (3, 3, 1),
        "b2": (3, 1),
    }
    assert fit.predict(KEY, dict(x=np.zeros((2, 2), "f")), num_samples=4)["y"].shape == (4, 2)
    again = nf.load(fit.save(tmp_path / "fit"), nf.GIPVI(*NETWORK, **QUICK))
    same_draws(fit, again, rtol=0)
    assert fit.verdict.status == "still moving" and not fit.verdict.ok


def test_bytes_down_grow_with_the_number_of_silos(sequential):
    """A table of J silos' rows goes down, a silo's own come up."""
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    table, names = sequential.state.server.table, 512  # of the wire's description of a message
    assert size(table) == 3 * 4 * 4 * (2 + 3 + 1 + 1 + 1)  # num_inducing x (U, V of two layers, Lambda of two)
    assert 0 <= sequential.history["bytes_up"][1] - size(table) / 3 < names
    assert 0 <= sequential.history["bytes_down"][1] - size(table) - 4 * sequential.split.dim < names


@pytest.mark.merge
def test_no_row_of_the_data_leaves(sequential):
    for place, name in enumerate(sequential.state.names):
        sent = np.asarray(sequential.state.server.table.inputs[place])
        assert np.min(np.linalg.norm(sent[:, None] - data()[name]["x"][None], axis=-1)) > 1e-3


@pytest.mark.slow
def test_where_pseudo_rows_begin():
    """At no row, unless users say so; a few rows have no part in it."""
    silos = data(leeds=1, york=19)
    with pytest.warns(nf.VerdictWarning):
        fit = nf.GIPVI(*NETWORK, num_inducing=4, local_steps=1, optim=optax.adam(1e-6)).run(
            KEY, silos, 1, progress_bar=False
        )
    for place, name in enumerate(silos.names):
        sent = np.asarray(fit.state.server.table.inputs[place])
        nearest = np.min(np.linalg.norm(sent[:, None] - silos[name]["x"][None], axis=-1))
        assert nearest > 1e-3
    single = np.asarray(fit.state.server.table.inputs[0])
    other = nf.Silos({"leeds": dict(x=silos["leeds"]["x"] + 50, y=silos["leeds"]["y"]), "york": dict(silos["york"])})
    with pytest.warns(nf.VerdictWarning):
        moved = nf.GIPVI(*NETWORK, num_inducing=4, local_steps=1, optim=optax.adam(1e-6)).run(
            KEY, other, 1, progress_bar=False
        )
    np.testing.assert_allclose(single, moved.state.server.table.inputs[0], atol=1e-4)  # two steps of 1e-6
    with pytest.warns(UserWarning, match="sends 4 rows of every silo's data"):
        fit = nf.GIPVI(*NETWORK, num_inducing=4, local_steps=1, optim=optax.adam(1e-6), init="data").run(
            KEY, silos, 1, progress_bar=False
        )
    sent = np.asarray(fit.state.server.table.inputs[1])
    assert np.max(np.min(np.linalg.norm(sent[:, None] - silos["york"]["x"][None], axis=-1), axis=1)) < 1e-5


@pytest.mark.merge
def test_a_silo_leaves_with_its_rows_and_another_joins(sequential):
    fit = sequential
    rest = fit.without("york")
    assert rest.state.names == ("leeds", "hull")
    heard = heard_rows(fit.state.server)
    kept = stacked_rows(fit.state.server.table, jnp.array([1.0, 0.0, 1.0]))
    assert heard.inputs.shape == kept.inputs.shape == (12, 2)
    network = fit.posterior.network
    noise = inducing.noise_for(network, KEY)
    left = inducing.sample(network, heard_rows(rest.state.server), noise)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        left,
        inducing.sample(network, kept, noise),
    )
    for what in ("influence", "conflict"):
        with pytest.raises(TypeError, match="only given the layers below"):
            getattr(fit, what)()
    with pytest.raises(TypeError, match="normal posterior of the globals"):
        fit.correct(KEY)


@pytest.mark.slow
def test_inputs_that_are_not_scaled_are_a_reason():
    silos = data(leeds=12, york=11)
    unscaled = nf.Silos({name: dict(x=1e4 * silos[name]["x"], y=silos[name]["y"]) for name in silos.names})
    with pytest.warns(nf.VerdictWarning, match=r"as large as .*nf.prepare.standardize|not finite, and was left out"):
        fit = nf.GIPVI(*NETWORK, **QUICK).run(KEY, unscaled, 2, schedule="sequential", progress_bar=False)
    assert not fit.verdict.ok


def test_unheard_silos_are_left_out_and_named():
    with pytest.warns(nf.VerdictWarning, match="obody asked silos 'york', 'hull'"):
        fit = nf.GIPVI(*NETWORK, **QUICK).run(KEY, data(), 1, schedule="sequential", progress_bar=False)
    assert fit.state.server.visits.tolist() == [1, 0, 0]
    assert int(fit.history["heard"][-1]) == 1


@pytest.mark.parametrize("damping", [0.3, 1.0])
def test_damping_is_a_power_of_factors(x64, damping):
    """One layer, inputs that stay: natural parameters are mixed. First rows, whose old precision is zero, as well."""
    _, network = network_of(linear, [("w", "b")], data())
    (layer,) = network.layers
    for old_precision in (1.0, 0.0):
        new = random_rows(network, 0)
        old = random_rows(network, 1)._replace(inputs=new.inputs)
        old = old._replace(precisions=tuple(old_precision * one for one in old.precisions))
        say = lambda rows: inducing.told(layer, rows.inputs, rows.outputs[0], rows.precisions[0])
        mixed = say(damped(old, new, jnp.asarray(damping)))
        expected = jax.tree.map(lambda a, b: (1 - damping) * a + damping * b, say(old), say(new))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9), mixed, expected)


@pytest.mark.slow
def test_late_answers_do_no_harm_and_minibatches_are_taken():
    with pytest.warns(nf.VerdictWarning):
        fit = nf.GIPVI(*NETWORK, batch_size=2, precision="unit", **QUICK).run(
            KEY, data(), 7, schedule="asynchronous", progress_bar=False
        )
    assert np.all(np.isfinite(fit.history["loss"])) and np.all(np.asarray(fit.state.server.visits) >= 1)


@pytest.mark.slow
@pytest.mark.merge
def test_a_linear_model_is_fitted_to_its_exact_posterior(x64):
    """One layer and enough rows: the family holds the posterior. Steps of Adam leave some noise: .1 sd, 10 %."""
    silos = data()
    method = nf.GIPVI(linear, [("w", "b")], num_inducing=6, local_steps=3000, num_particles=8)
    fit = method.run(KEY, silos, schedule="sequential", progress_bar=False)
    assert fit.num_rounds < 30, "it comes to rest"
    draws = fit.sample(jax.random.key(1), 4000)
    found = np.concatenate([np.asarray(draws["w"])[:, :, 0], np.asarray(draws["b"])], axis=1)
    mean, covariance = exact(silos, *silos.names)
    sd = np.sqrt(np.diag(covariance))
    np.testing.assert_allclose((found.mean(0) - mean) / sd, 0, atol=0.1)
    np.testing.assert_allclose(found.std(0) / sd, 1, atol=0.1)
    assert fit.verdict.status == "not checked"


@pytest.mark.slow
def test_the_networks_benchmark_runs(monkeypatch):
    """On made-up rows; every row of its table is a number."""
    monkeypatch.delenv("NUMPYRO_FED_DATA", raising=False)
    (row,) = networks.main(networks.parse(["--quick", "--data", "adult", "--split", "A", "--method", "GI, sequential"]))
    assert np.isfinite(row["mean_log_likelihood"]) and row["log_likelihood"] > -1
    assert row["mean_log_likelihood"] <= row["log_likelihood"]  # Jensen
