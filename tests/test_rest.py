"""When rounds whose answers are noisy have come to rest."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.normal import rest

COORDINATES = 10


def walked(moves, steps, share=1.0):
    """What is known after rounds with these whole moves."""

    def one(now, given):
        move, step = given
        now = rest.after(now, step * move, step, share)
        return now, rest.restless(now)

    return jax.lax.scan(one, rest.unknown(COORDINATES), (moves, steps))


def falling(num):
    """Robbins and Monro's steps after a first visit."""
    return 1 / (1 + 0.5 * (1 + jnp.arange(num)))


def test_noise_comes_to_rest_at_its_own_size():
    """D is as large as sqrt(E) says: over 400 runs of 40 rounds, within four standard errors (5 % of a variance)."""
    noise = 0.3 * jax.random.normal(jax.random.key(0), (400, 40, COORDINATES))
    found, _ = jax.vmap(walked, (0, None))(noise, falling(40))
    assert abs(float(jnp.mean(found.drift**2) / jnp.mean(found.noise)) - 1) < 0.1
    # 0.3 sqrt(4 / (3 t)) = 0.055, the largest of ten somewhat larger; what is more counts as drift, in about 3 of 100
    moving = jax.vmap(rest.restless)(found)
    assert 0.05 < float(jnp.median(moving)) < 0.1
    assert float(jnp.mean(moving > 0.1)) < 0.06


def test_a_drift_under_noise_is_no_rest():
    moves = 0.3 + 0.3 * jax.random.normal(jax.random.key(0), (40, COORDINATES))
    _, moving = walked(moves, falling(40))
    assert float(moving[-1]) > 0.2  # though steps have fallen to a twentieth


def test_a_tenth_of_the_silos_a_round_is_a_tenth_of_a_sweep():
    """Ten rounds of one silo of ten count as one of all, whatever they do to one another."""
    moves = jax.random.normal(jax.random.key(0), (40, 10, COORDINATES))
    whole, _ = walked(jnp.sum(moves, axis=1), falling(40))
    parts, _ = walked(moves.reshape(400, COORDINATES), jnp.repeat(falling(40), 10), 0.1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), parts, whole)


def test_nothing_counts_before_every_silo_was_heard():
    one = rest.after(rest.unknown(2), jnp.ones(2), 1.0, settled=False)
    assert int(one.sweeps) == 0 and float(rest.restless(one)) == rest.FARTHEST


def scales(y):
    mu, sd = numpyro.sample("mu", dist.Normal(0, 10)), numpyro.sample("sd", dist.HalfNormal(5))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, sd), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("method", [nf.EP, nf.SEP])
@pytest.mark.parametrize("schedule", ["synchronous", "sequential"])
def test_noisy_rounds_stop_by_themselves(method, schedule):
    """With draws that Stein's identity does not help, and a Monte Carlo error that is what it is said to be."""
    y = np.random.default_rng(0).normal(3, 2, 90).astype("f")
    silos = nf.split(np.repeat(list("abc"), 30), y=y)
    solver = nf.solvers.HMC(stein=False, num_chains=100)
    fit = method(scales, solver=solver).run(jax.random.key(0), silos, schedule=schedule, progress_bar=False)
    sweeps = fit.num_rounds / (3 if schedule == "sequential" else 1)
    assert sweeps < 40 and not fit.reasons
    exact = method(scales).run(jax.random.key(0), silos, schedule=schedule, progress_bar=False)
    # the error is below .05 sds in every mean and log sd; a coordinate of four may be three times as far off
    shift = (fit.normal().mean - exact.normal().mean) / exact.normal().sds
    ratio = np.log(np.asarray(fit.normal().sds / exact.normal().sds))
    assert np.max(np.abs(shift)) < 0.15 and np.max(np.abs(ratio)) < 0.15
