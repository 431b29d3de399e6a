"""Real data: the posterior against an exact reference and against NUTS."""

import os

import jax
import numpy as np
import optax
import pytest

import numpyro_fed as nf
from benchmarks import hierarchical, mnist
from examples.six_cities import model as six_cities_model
from examples.six_cities import parser, six_cities_silos

# beta[0..3] and omega: random effects by quadrature, importance sampling with an effective sample size of 33,500
EXACT_MEAN = np.array([-3.1613, 0.4636, -0.2191, 0.1074, -0.7871])
EXACT_SD = np.array([0.2282, 0.2910, 0.0869, 0.1395, 0.0858])


@pytest.mark.slow
def test_six_cities_matches_the_exact_posterior_for_three_seeds():
    """At the demo's settings: every |mean_shift| <= 0.10 and every sd ratio in [0.90, 1.10]."""
    settings = parser().parse_args([])
    silos = six_cities_silos()
    method = nf.SFVI(six_cities_model, importance_samples=settings.importance_samples)
    for seed in range(3):
        fit = method.run(jax.random.key(seed), silos, settings.num_rounds, progress_bar=False)
        server, guide = fit.state.server, method.family  # z_G is (beta, omega), unconstrained: no Monte Carlo error
        shift = (np.asarray(guide.mean_global(server.params, server.base)) - EXACT_MEAN) / EXACT_SD
        ratio = np.sqrt(np.diag(guide.covariance(server.params, server.base))) / EXACT_SD
        assert np.all(np.abs(shift) <= 0.10), (seed, shift)
        assert np.all((ratio >= 0.90) & (ratio <= 1.10)), (seed, ratio)


@pytest.mark.slow
@pytest.mark.merge
def test_plain_bound_misses_as_documented():
    """K = 1 is off by more than a sd in omega: the reason for importance weighting, and not to be forgotten."""
    fit = nf.SFVI(six_cities_model, importance_samples=1).run(
        jax.random.key(0), six_cities_silos(), 3000, progress_bar=False
    )
    shift = (fit.normal().mean - EXACT_MEAN) / EXACT_SD
    assert 0.8 < shift[4] < 1.6 and 0.4 < shift[0] < 1.0


def averaged_shift(seed, **settings):
    """Twenty rounds of SFVI-Avg, 200 steps each: shifts of all globals in exact sds."""
    method = nf.SFVIAvg(six_cities_model, local_steps=200, **settings)
    fit = method.run(jax.random.key(seed), six_cities_silos(), 20, progress_bar=False)
    server, guide = fit.state.server, method.family
    assert np.nanmax(fit.history["residual"]) < 1e-4
    return (np.asarray(guide.mean_global(server.params, server.base)) - EXACT_MEAN) / EXACT_SD


@pytest.mark.slow
def test_averaging_the_whole_bound_reaches_six_cities():
    """Every beta within 0.4 sd in 20 rounds."""
    for seed in range(2):
        shift = averaged_shift(seed, importance_samples=10)
        assert np.all(np.abs(shift[:4]) < 0.4), (seed, shift)


@pytest.mark.slow
@pytest.mark.merge
def test_the_papers_scaling_diverges_as_documented():
    """Without the entropy's share omega runs away, by many sds."""
    assert averaged_shift(0, importance_samples=1, scaling="paper")[4] > 5


@pytest.mark.slow
@pytest.mark.skipif("NUMPYRO_FED_DATA" not in os.environ, reason="MNIST: set NUMPYRO_FED_DATA")
def test_mnist_in_25_silos():
    """Minibatches, theta learned, 7,850 dimensions: 1,000 rounds of SFVI are above 88 % right (the paper: 84.0)."""
    train, test = mnist.load()
    size = mnist.SIZES[0]
    silos = mnist.make_silos(train, size.num_silos, size.num_images, seed=0)
    method, _ = mnist.methods(size, mnist.parse([]), optax.adam(1e-2))["SFVI"]
    fit = method.run(jax.random.key(0), silos, 1000, progress_bar=False)
    assert mnist.accuracy(fit.sample(jax.random.key(1), 50), test).averaged > 88


@pytest.mark.slow
@pytest.mark.skipif("NUMPYRO_FED_DATA" not in os.environ, reason="radon data: set NUMPYRO_FED_DATA")
def test_radon_in_long_format_matches_nuts():
    """Five silos of whole counties: |mean_shift| <= 0.10 for all globals, counties' means correlate above 0.99."""
    silos = hierarchical.radon_silos()
    fit = nf.SFVI(hierarchical.radon).run(jax.random.key(0), silos, 3000, progress_bar=False)
    reference = nf.nuts(
        hierarchical.radon, silos, rng_key=jax.random.key(1), num_warmup=500, num_samples=3000, progress_bar=False
    )
    table = nf.compare({"SFVI": fit}, reference=reference).table
    assert np.all(np.abs(table["mean_shift"]) <= 0.10), table
    ours = [fit.sample_local(jax.random.key(2), 2000, silo=name)["alpha"].mean(axis=0) for name in silos.names]
    theirs = [reference.sample_local(name)["alpha"].mean(axis=0) for name in silos.names]
    assert np.corrcoef(np.concatenate(ours), np.concatenate(theirs))[0, 1] > 0.99
