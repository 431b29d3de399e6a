"""EP and PVI on real data and on every kind of model: against exact references and NUTS."""

import os
import warnings

import jax
import numpy as np
import pytest
from models import MODELS

import numpyro_fed as nf
from benchmarks import hierarchical, toy_ep
from benchmarks.ep_six_cities import judged, reached, silos_of
from examples.six_cities import model as six_cities_model


def run(method, silos, rounds=None, **options):
    return method.run(jax.random.key(0), silos, rounds, progress_bar=False, **options)


@pytest.fixture(scope="module")
def five():
    """EP on five unequal silos of six cities, four rounds."""
    return run(nf.EP(six_cities_model), silos_of(5, seed=0), 4)


@pytest.mark.slow
@pytest.mark.merge
def test_six_cities_in_four_rounds(five):
    """Means within 0.06 sds of the exact posterior, sds within 5 %: in five unequal silos, and in two."""
    assert reached(*judged(five)), judged(five)
    for seed in (1, 2):  # who is in which silo; the method itself draws nothing
        fit = run(nf.EP(six_cities_model), silos_of(2, seed), 4)
        assert reached(*judged(fit)), (seed, judged(fit))


@pytest.mark.slow
def test_partitioned_variational_inference_on_the_exact_marginal_gets_there_too():
    fit = run(nf.PVI(six_cities_model), silos_of(2, 0), 4)
    assert reached(*judged(fit)), judged(fit)


@pytest.mark.slow
def test_a_silo_that_leaves_is_as_if_it_had_not_been_there(five):
    """After two rounds among the others: the fit that never knew it."""
    left = five.without("silo 3", num_rounds=2)
    fresh = run(nf.EP(six_cities_model), five.silos.only(*(n for n in five.silos.names if n != "silo 3")), 6)
    (mean, cov), (other, other_cov) = ((f.normal().mean, f.normal().covariance) for f in (left, fresh))
    sd = np.sqrt(np.diag(other_cov))
    # both are deterministic; what is left is how far two rounds are from the end
    np.testing.assert_allclose(mean / sd, other / sd, atol=0.02)
    np.testing.assert_allclose(np.sqrt(np.diag(cov)) / sd, 1, atol=0.02)


@pytest.mark.slow
def test_locals_stay_in_their_silo_and_can_be_drawn_there(five):
    """Random intercepts of a silo, against importance sampling of each child given draws of the globals."""
    name = "silo 4"
    draws = five.sample_local(jax.random.key(1), 2000, silo=name)
    own = five.silos[name]
    beta, omega, b = (np.asarray(draws[site], np.float64) for site in ("beta", "omega", "b"))
    smoke, age, wheeze = (np.asarray(own[arg], np.float64) for arg in ("smoke", "age", "wheeze"))
    assert b.shape == (2000, len(smoke))
    base = beta[:, :1] + beta[:, 1:2] * smoke  # (draws, children)
    slope = beta[:, 2:3] + beta[:, 3:4] * smoke
    eps = np.linspace(-5, 5, 201)
    scale = np.exp(-omega)[:, None, None]
    logits = (base[..., None, None] + slope[..., None, None] * age) + (scale * eps)[..., None]
    terms = wheeze[None, :, None, :] * logits - np.logaddexp(0, logits)
    log_weight = terms.sum(axis=-1) - 0.5 * eps**2
    weight = np.exp(log_weight - log_weight.max(axis=-1, keepdims=True))
    weight /= weight.sum(axis=-1, keepdims=True)
    first = (weight * scale * eps).sum(axis=-1)
    second = (weight * (scale * eps) ** 2).sum(axis=-1)
    mean = first.mean(axis=0)
    sd = np.sqrt(second.mean(axis=0) - mean**2)
    assert np.max(np.abs(b.mean(axis=0) - mean) / sd) < 0.15  # four Monte Carlo errors, and a normal for a skewed b
    assert np.all(np.abs(b.std(axis=0) / sd - 1) < 0.12)


@pytest.mark.slow
def test_too_few_nodes_are_noticed():
    method = nf.EP(six_cities_model, solver=nf.solvers.Importance(num_nodes=3, num_points=64))
    with pytest.warns(UserWarning, match=r"3 quadrature nodes a row are too few.*Importance\(num_nodes=7\)"):
        run(method, silos_of(2, 0), 4)


def test_the_toy_of_fedep():
    """Table 4: distances to the pooled mean, 200 problems; round by round as Guo et al. (2023) run."""
    found = toy_ep.distances()
    assert found["average of means"][0] == pytest.approx(5.33e-1, rel=0.1)
    assert found["fixed variance"][0] == pytest.approx(found["average of means"][0]), "FedAvg is its first round"
    assert found["diagonal"][0] == pytest.approx(2.59e-1, rel=0.1), "FedPA is its first round"
    by_round = dict(zip((2, 3, 5), found["diagonal"][[1, 2, 4]], strict=True))
    assert by_round == pytest.approx({2: 1.75e-2, 3: 8.9e-3, 5: 7.2e-4}, rel=0.3)  # the problems are other draws
    assert found["diagonal"][49] < 1e-10
    assert np.all(np.diff(found["diagonal"][:10]) < 0)


@pytest.mark.slow
@pytest.mark.skipif("NUMPYRO_FED_DATA" not in os.environ, reason="radon data: set NUMPYRO_FED_DATA")
def test_radon_is_corrected_to_nuts():
    silos = hierarchical.radon_silos()
    fit = run(nf.EP(hierarchical.radon), silos)
    corrected = fit.correct(jax.random.key(1), num_points=4096)
    reference = nf.nuts(
        hierarchical.radon, silos, rng_key=jax.random.key(2), num_warmup=500, num_samples=4000, progress_bar=False
    )
    table = nf.compare({"EP": corrected}, reference=reference, num_samples=20_000).table
    assert np.all(np.abs(table["mean_shift"]) <= 0.05), table
    assert np.all(np.abs(table["sd_ratio"] - 1) <= 0.05), table


COVERED = {  # a model of each kind that a solver treats differently
    "long format": "importance",  # rows found by their index
    "visits": "hmc",  # rows of five latents, sampled with the globals
    "mixture": "importance",  # discrete latents summed out
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COVERED if name in MODELS])
def test_every_structure_can_be_fitted(name):
    """Finite draws of globals and locals, and a posterior that comes to rest."""
    case = MODELS[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quadrature nodes")
        fit = run(nf.EP(case.model, **case.options), case.silos(), 12)
    draws = fit.sample_local(jax.random.key(1), 20, silo=fit.state.names[0])
    assert all(np.all(np.isfinite(value)) for value in draws.values())
    moving = fit.history["moving"][~fit.history["start"]]
    assert moving[-1] < max(0.3 * min(moving[0], 10.0), 0.01)  # 1e30 where a silo was not heard; at rest below 0.01
