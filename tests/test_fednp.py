"""Federated neural propagation: its moments, its sites, and that it is federated averaging where it says so."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from scipy.special import expit, log_expit
from tiers import tiers

import numpyro_fed as nf
from benchmarks import fednp as benchmark
from numpyro_fed.local.features import features_of, head_of
from numpyro_fed.local.walk import flat
from numpyro_fed.methods.fednp import PropagationMessage, accepted
from numpyro_fed.normal import propagation
from numpyro_fed.normal.propagation import LatentSite, Moments

KEY = jax.random.key(0)
SGD = optax.sgd(0.02)


# --- moments ----------------------------------------------------------------------------------------------------------


def dense(cavity: Moments, slope: np.ndarray) -> Moments:
    """By a trapezoid of 40,001 points over 40 sds each way, which for functions like these is exact to rounding."""
    t = np.linspace(-40, 40, 40_001)
    sd = np.sqrt(cavity.variance)[:, None]
    log_density = -0.5 * t**2 + log_expit(slope[:, None] * (np.asarray(cavity.mean)[:, None] + sd * t))
    weights = np.exp(log_density - log_density.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    mean = weights @ t
    return Moments(cavity.mean + sd[:, 0] * mean, cavity.variance * ((weights * (t - mean[:, None]) ** 2).sum(axis=1)))


def random_cases(number: int, seed: int = 0) -> tuple[Moments, np.ndarray]:
    """m from -3 to 3, v from .1 to 3, f from -2 to 2, uniform."""
    draws = np.random.default_rng(seed)
    m, v, f = (draws.uniform(a, b, number) for a, b in ((-3, 3), (0.1, 3.0), (-2, 2)))
    return Moments(jnp.asarray(m), jnp.asarray(v)), f


@pytest.mark.usefixtures("x64", "strict_ranks")
def test_moments_are_those_of_the_hybrid() -> None:
    """With sds of C = f z up to 2.5; of the cavity at most 1, as the server's are, or narrower."""
    spread, centre = np.meshgrid([0.01, 0.3, 1.0, 1.7, 2.5], [-8.0, -3.0, -1.0, 0.0, 0.4, 2.0, 8.0])
    for sign, sd in ((1, 1.0), (-1, 0.3)):
        f = sign * spread.ravel() / sd
        cavity = Moments(jnp.asarray(centre.ravel() / f), jnp.full(f.shape, sd**2))
        found, exact = propagation.hybrid(cavity, jnp.asarray(f)), dense(cavity, f)
        np.testing.assert_allclose((found.mean - exact.mean) / sd, 0, atol=1e-10)
        np.testing.assert_allclose(found.variance / sd**2, exact.variance / sd**2, atol=1e-10, rtol=0)


@pytest.mark.usefixtures("x64")
def test_moments_of_a_sigmoid_are_those_of_a_dense_grid() -> None:
    mean, sd = (part.ravel() for part in np.meshgrid(np.linspace(-6, 6, 9), [0.05, 0.5, 1.0, 2.0]))
    t = np.linspace(-12, 12, 20_001)
    weights = np.exp(-0.5 * t**2) / np.exp(-0.5 * t**2).sum()
    values = expit(mean[:, None] + sd[:, None] * t)
    found = propagation.activated(Moments(jnp.asarray(mean), jnp.asarray(sd**2)))
    np.testing.assert_allclose(found.mean, values @ weights, atol=1e-12)
    np.testing.assert_allclose(found.variance, values**2 @ weights - (values @ weights) ** 2, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_what_the_closed_forms_give() -> None:
    """N(z; 0, 1) sigma(z): the figures of the appendix's constants, and of quadrature."""
    one = Moments(jnp.zeros(()), jnp.ones(()))
    round4 = lambda found: (round(float(found.mean), 4), round(float(found.variance), 4))
    assert round4(propagation.hybrid(one, jnp.ones(()))) == (0.4132, 0.8292)
    assert round4(propagation.hybrid(one, jnp.ones(()), "closed")) == (0.3937, 0.8708)


@pytest.mark.merge
@pytest.mark.usefixtures("x64")
def test_how_wrong_the_closed_forms_are() -> None:
    """In 4,000 random cases: the printed one has negative variances in most, and hardly ever a possible one."""
    cavity, f = random_cases(4000)
    exact, closed, printed = (propagation.hybrid(cavity, jnp.asarray(f), kind) for kind in propagation.KINDS)
    assert 0.69 < float(jnp.mean(printed.variance < 0)) < 0.77  # a share of .73 has a standard error of .007
    possible = lambda found: 1 - float(jnp.mean(propagation.bounded(found, cavity, jnp.asarray(f))[1]))
    assert possible(exact) == possible(closed) == 1
    assert possible(printed) < 0.01
    off = jnp.abs(closed.mean - exact.mean) / jnp.sqrt(cavity.variance)
    assert 0.4 < float(jnp.max(off)) < 0.8 and float(jnp.median(off)) < 0.05


@pytest.mark.usefixtures("x64", "strict_ranks")
def test_a_true_hybrid_is_within_its_bounds() -> None:
    """log sigma is concave: a site's precision is between 0 and f^2 / 4, whatever the cavity."""
    cavity, f = random_cases(2000, seed=1)
    found = propagation.hybrid(cavity, jnp.asarray(f))
    natural = LatentSite(cavity.mean / cavity.variance, 1 / cavity.variance)
    site = propagation.site_between(natural, found)
    assert np.all(site.tau > 0) and np.all(site.tau <= f**2 / 4 + 1e-9)
    assert not np.any(propagation.bounded(found, cavity, jnp.asarray(f))[1])
    again = propagation.moments_of(LatentSite(natural.eta + site.eta, natural.tau + site.tau))
    np.testing.assert_allclose(again.mean, found.mean, atol=1e-9)
    np.testing.assert_allclose(again.variance, found.variance, rtol=1e-9)


@pytest.mark.merge
@pytest.mark.parametrize("kind", propagation.KINDS)
def test_moments_and_their_gradients_are_finite(kind: str) -> None:
    """In float32, at slopes of zero and far in either tail; and the bounded variance is positive."""
    m, f = (jnp.asarray(part.ravel(), jnp.float32) for part in np.meshgrid([-300.0, -1, 0, 2, 300], [0, 1e-9, -2, 30]))
    cavity = Moments(m, jnp.full_like(m, 0.7))

    def site(m: jax.Array, f: jax.Array) -> tuple[jax.Array, Moments]:
        before = Moments(m, cavity.variance)
        found, _ = propagation.bounded(propagation.hybrid(before, f, kind), before, f)
        return jnp.sum(found.mean) + jnp.sum(jnp.log(found.variance)), found

    gradients, found = jax.grad(site, argnums=(0, 1), has_aux=True)(m, f)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((gradients, found)))
    assert np.all(found.variance > 0)


@pytest.mark.usefixtures("x64")
def test_a_network_of_normals_is_that_of_draws() -> None:
    """Mean and variance after two layers and sigmoids, with independent units as the network has it."""
    networks = propagation.fresh(KEY, 3, 2, 4, jnp.arange(5.0), 0.5)
    networks = networks._replace(second=networks.second._replace(weight=jax.random.normal(KEY, (4, 5))))
    z = Moments(jnp.array([0.3, -1.0]), jnp.array([0.5, 1.5]))
    hidden = propagation.linear(networks.first, z)
    draws = np.random.default_rng(0).normal(size=(200_000, 4)) * np.sqrt(hidden.variance) + hidden.mean
    values = expit(draws) @ np.asarray(networks.second.weight) + np.asarray(networks.second.bias)
    found = propagation.predicted(networks, z)
    error = values.std(axis=0) / np.sqrt(len(values))
    np.testing.assert_array_less(np.abs(values.mean(axis=0) - found.mean), 4 * error)
    np.testing.assert_allclose(values.var(axis=0) + 0.5, found.variance, rtol=4 * np.sqrt(2 / len(values)))


@pytest.mark.usefixtures("x64")
def test_the_divergence_is_numpyros() -> None:
    mean, variance, point = jnp.array([0.1, -2.0]), jnp.array([0.3, 0.01]), jnp.array([0.5, 0.5])
    expected = dist.kl_divergence(dist.Normal(mean, jnp.sqrt(variance)), dist.Normal(point, jnp.sqrt(0.2)))
    assert float(propagation.kl_to_point(Moments(mean, variance), point, 0.2)) == pytest.approx(float(expected.sum()))


def test_cavities_are_proper_whatever_is_sent() -> None:
    """A server that hears infinities, or takes precision away again and again, sends standard normals at least."""
    sites = LatentSite(jnp.zeros((3, 2)), jnp.zeros((3, 2)))
    bad = LatentSite(jnp.array([[jnp.nan, 1.0], [1.0, -jnp.inf]]), jnp.array([[1.0, -5.0], [2e7, 3.0]]))
    sites, refused = accepted(sites, bad, jnp.array([2, 0]))
    assert int(refused) == 3
    np.testing.assert_array_equal(sites.tau, [[2e7, 0.0], [0.0, 0.0], [0.0, 0.0]])
    cavities = propagation.cavities(sites)
    assert np.all(cavities.tau >= 1) and np.all(np.isfinite(cavities.eta))


# --- the method -------------------------------------------------------------------------------------------------------


def classes(x, y=None):
    """Two classes, a backbone of tanh units and a head; a param, too."""
    scale = numpyro.param("scale", jnp.ones(()))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    head = numpyro.sample("head", dist.Normal(0, 2).expand([3]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        h = numpyro.deterministic("h", jnp.tanh(x @ w))
        numpyro.sample("y", dist.Bernoulli(logits=scale * h @ head), obs=y)


@cache
def skewed() -> nf.Silos:
    """Three silos that lie apart, of different sizes; one program."""
    draws, found = np.random.default_rng(0), {}
    for name, number, centre in (("a", 9, -1.0), ("b", 12, 0.5), ("c", 8, 1.5)):
        x = draws.normal(centre, 1, (number, 2)).astype(np.float32)
        found[name] = dict(x=x, y=(x.sum(axis=1) + draws.logistic(size=number) > 0).astype(np.int32))
    return nf.Silos(found)


WALK: dict[str, Any] = dict(start_rounds=0, local_steps=3, last_look=False)
FEDNP = nf.FedNP(classes, head="head", features="h", latent=2, hidden=3, optim=SGD, batch_size=4, weight=0.1, **WALK)


def run(method: nf.Method, num_rounds: int = 3, silos: nf.Silos | None = None, **options: Any) -> nf.Fit:
    return method.run(KEY, skewed() if silos is None else silos, num_rounds, progress_bar=False, **options)


SETTINGS: dict[str, dict[str, Any]] = {
    "minibatches": dict(optim=SGD, batch_size=4),
    "defaults": {},
    "FedProx, server's momentum": dict(proximal=0.5, server_optim=optax.sgd(0.5, momentum=0.9)),
}


@pytest.mark.parametrize("settings", tiers(SETTINGS, "minibatches"))
def test_without_weight_it_is_federated_averaging(settings: str) -> None:
    """Bit for bit: point, params, optimiser and losses."""
    given = {**WALK, **SETTINGS[settings]}
    plain, fit = run(nf.FedAvg(classes, **given)), run(nf.FedNP(classes, weight=0, **given))
    for one, other in zip(jax.tree.leaves(plain.state.server), jax.tree.leaves(fit.state.server), strict=True):
        np.testing.assert_array_equal(one, other)
    for name in ("loss", "bytes_up", "bytes_down"):
        np.testing.assert_array_equal(plain.history[name], fit.history[name])


@pytest.mark.slow
def test_a_little_weight_is_nearly_federated_averaging() -> None:
    """The same minibatches: the point moves with the weight, and is FedAvg's in the limit."""
    plain, *fits = (run(replace(FEDNP, weight=weight)) for weight in (0, 1e-6, FEDNP.weight))
    off = [float(jnp.max(jnp.abs(fit.state.server.z - plain.state.server.z))) for fit in fits]
    assert off[0] < 1e-5 < 1e-4 < off[1]


@pytest.mark.merge
def test_the_networks_learn_and_sites_are_proper() -> None:
    fit = run(FEDNP, 60)
    kept = fit.state.server.beside
    assert np.all(kept.sites.tau >= 0) and np.all(kept.sites.tau > 1e-6)
    assert fit.history["clipped"].sum() == 0
    # the head has walked away from where the networks first predicted it, and they have followed
    first = FEDNP.run(KEY, skewed(), 1, progress_bar=False).state.server
    moved = float(jnp.linalg.norm(fit.state.server.z[6:9] - first.z[6:9]))
    at = propagation.predicted(kept.networks, Moments(jnp.zeros(2), jnp.ones(2))).mean
    assert float(jnp.linalg.norm(at - fit.state.server.z[6:9])) < 0.5 * moved


@pytest.mark.parametrize("kind", tiers(propagation.KINDS))
def test_every_kind_of_moments_runs(kind: str) -> None:
    fit = run(replace(FEDNP, moments=kind), 5)
    clipped = fit.history["clipped"].sum()
    assert np.all(np.isfinite(fit.history["loss"])) and np.all(np.isfinite(jax.tree.leaves(fit.state.server)[0]))
    assert clipped > 0 if kind == "printed" else clipped == 0


def test_what_leaves_a_silo() -> None:
    """One NamedTuple, whose sizes do not depend on the rows; and no array is as long as the data."""
    prepared = FEDNP.prepare(skewed())
    algorithm = FEDNP.compile(prepared.split, prepared.survey, nf.algorithm.Plan()).phases[-1].algorithm
    server = jax.eval_shape(algorithm.init, KEY)
    sent = jax.eval_shape(algorithm.broadcast, KEY, server)
    own = nf.algorithm.Broadcast(
        sent.common, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), sent.each)
    )
    message, _ = jax.eval_shape(algorithm.silo_step, KEY, own, (), prepared.split.dummy())
    assert isinstance(message, PropagationMessage)
    numbers = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(message))
    d, hidden, latent, head, features = 10, 3, 2, 3, 3
    networks = (features + 1) * hidden + (hidden + 1) * latent + (latent + 2) * hidden + (hidden + 2) * head
    assert numbers == (d + 3) + networks + 2 * latent + 2


def test_it_predicts_and_is_a_point() -> None:
    fit = run(FEDNP, check=True)
    draws = fit.sample(KEY, 3)
    assert np.ptp(draws["head"], axis=0).max() == 0
    assert fit.predict(KEY, dict(x=np.zeros((4, 2), np.float32)), num_samples=2)["y"].shape == (2, 4)
    assert set(fit.params) == {"scale"} and fit.verdict.status == "not checked"


@pytest.mark.slow
def test_a_store_is_no_different() -> None:
    names = skewed().names
    store = nf.SiloStore.from_function(lambda j: skewed()[names[j]], 3, names=list(names))
    inside, outside = run(FEDNP), run(FEDNP, silos=store)
    np.testing.assert_allclose(inside.state.server.z, outside.state.server.z, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(inside.state.server.beside.sites.tau, outside.state.server.beside.sites.tau, rtol=1e-4)


@pytest.mark.slow
def test_sites_of_others_stay() -> None:
    """Silos that were not heard have none, and do not count; then each keeps its own."""
    first = run(FEDNP, 1, schedule=nf.schedules.fixed([["b"]]))
    sites = jax.tree.map(np.asarray, first.state.server.beside.sites)
    assert np.all(sites.tau[1] > 0) and not np.any(sites.tau[[0, 2]]) and not np.any(sites.eta[[0, 2]])
    later = run(FEDNP, 1, schedule=nf.schedules.fixed([["c"]]), init_state=first.state).state.server.beside.sites
    np.testing.assert_array_equal(later.tau[:2], sites.tau[:2])
    assert np.all(later.tau[2] > 0)


@pytest.mark.slow
def test_on_the_papers_toy_expectation_propagation_is_least_squares() -> None:
    """To three decimals of the mean squared error, in at most four rounds (``benchmarks/fednp.py``)."""
    with jax.enable_x64(True):
        silos = benchmark.toy_silos(0)
        error, rounds, _ = benchmark.toy_end("EP", nf.EP(benchmark.polynomial), silos, 0)
        assert abs(error - benchmark.squared_error(silos, benchmark.least_squares(silos))) < 5e-4
    assert rounds <= 4


def test_it_needs_fresh_answers() -> None:
    with pytest.raises(ValueError, match=r"nf\.FedNP needs replies to its newest broadcast"):
        run(FEDNP, schedule="asynchronous")


def prepared_flat():
    return flat(FEDNP.prepare(skewed()).split)


def test_what_features_are() -> None:
    own = prepared_flat()
    w, data = jnp.linspace(-1, 1, own.size), own.split.dummy()
    assert features_of(own).size == 2  # x, and not the labels
    assert features_of(own, ("x", "h")).size == 5
    assert features_of(own, lambda x, y: jnp.concatenate([x, x**2, y[:, None]], axis=1)).size == 5
    data = data._replace(args=(jnp.ones_like(data.args[0]), data.args[1]))
    rows, real = features_of(own, ("h",)).read(w, data)
    z, _ = own.parts(w)
    np.testing.assert_allclose(rows[0], np.tanh(np.ones(2) @ own.split.unravel(z)["w"]), rtol=1e-5)
    assert rows.shape[0] == real.shape[0]


def test_what_the_head_is() -> None:
    split = prepared_flat().split
    assert head_of(split, ("head",)).runs == ((6, 9),)
    assert head_of(split, ("scale", "w")).runs == ((0, 6), (9, 10))
    assert head_of(split, None).size == 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(head="top"), "head names 'top', and this model's global sites and params are w, head, scale"),
        (dict(features="z"), "features names 'z'; arguments with rows are x, y, deterministic sites with rows h"),
        (dict(features=lambda x, y: x.T), r"features: the function has the shape \(2, "),
    ],
)
def test_wrong_names_are_told(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        run(replace(FEDNP, **settings))
