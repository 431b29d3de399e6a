"""Every method, on two models and one set of silos. A new method is one more line.

The laws are in the test files beside this one. A method's optimiser is given where it has one: the default's steps
become smaller over all rounds of a run, so that two halves are not one run.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

import numpyro_fed as nf

ADAM, SGD = optax.adam(0.02), optax.sgd(0.01)
FISHER = nf.solvers.Fisher(num_draws=4, num_steps=5)


class NoMode(nf.solvers.Gradient):
    """As in many dimensions: no mode is looked for, and silos are told where to begin."""

    most_newton = 0


GRADIENT = NoMode(num_steps=5, num_particles=2, batch_size=3)
SAMPLES = dict(batch_size=2, num_samples=4, num_warmup=3, thinning=2)


def counties(county, num_counties, x, y=None):
    """Long format: a latent for each county of a silo, and homes that know the number of theirs."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    beta = numpyro.sample("beta", dist.Normal(0, 5))
    with numpyro.plate("counties", num_counties):
        alpha = numpyro.sample("alpha", dist.Normal(mu, 1))
    with numpyro.plate("homes", x.shape[0]):
        numpyro.sample("y", dist.Logistic(alpha[county] + beta * x, 0.5), obs=y)


def homes(x, y=None):
    """No locals."""
    beta = numpyro.sample("beta", dist.Normal(0, 5).expand([2]).to_event(1))
    with numpyro.plate("homes", x.shape[0]):
        numpyro.sample("y", dist.Logistic(beta[0] + beta[1] * x, 0.5), obs=y)


def line(x, y=None):
    """The same as a network of one layer."""
    w = numpyro.sample("w", dist.Normal(0, 5).expand([1, 1]).to_event(2))
    b = numpyro.sample("b", dist.Normal(0, 5).expand([1]).to_event(1))
    with numpyro.plate("homes", x.shape[0]):
        numpyro.sample("y", dist.Logistic((x[:, None] @ w + b)[:, 0], 0.5), obs=y)


# Homes of each county. Silos of 4, 24 and 6 homes are too unequal for one bucket, but with the counties they share one:
# what a bucket adds to a program is as long as the method's own part.
SIZES = {"leeds": (1, 3), "york": (9, 2, 6, 7), "hull": (4, 2)}


def silos_for(model: Any, *names: str) -> nf.Silos:
    """In the precision of the moment; the answers (5 and -4) are many posterior sds away from zero."""
    found = {}
    for seed, (name, sizes) in enumerate(SIZES.items()):
        draws = np.random.default_rng(seed)
        county = draws.permutation(np.repeat(np.arange(len(sizes)), sizes))
        x, noise = draws.normal(size=len(county)), 0.5 * draws.logistic(size=len(county))
        real = lambda values: np.asarray(values, jnp.result_type(float))
        found[name] = dict(x=real(x), y=real(5 + draws.normal(size=len(sizes))[county] - 4 * x + noise))
        if model is counties:
            found[name] |= dict(county=county.astype(np.int32), num_counties=len(sizes))
    return nf.Silos({name: found[name] for name in names or SIZES})


# Programs that take long to compile: laws that need another of them are slow tests; all laws, where another line has
# their kind.
LONG = ("EP", "PVI", "SFVI", "SFVI, no locals", "FedPA")
SLOW = ("SFVI, minibatches", "SFVIAvg", "PVI, minibatches", "FedNP", "GIPVI")
METHODS: dict[str, Any] = {
    "SFVI": nf.SFVI(counties, optim=ADAM, importance_samples=2, start_rounds=0),
    "SFVI, minibatches": nf.SFVI(counties, optim=ADAM, importance_samples=2, start_rounds=0, batch_size=1),
    "SFVI, no locals": nf.SFVI(homes, optim=ADAM, num_particles=2),
    "SFVIAvg": nf.SFVIAvg(counties, optim=ADAM, importance_samples=1, start_rounds=0, local_steps=3),
    "EP": nf.EP(counties, tolerance=0),
    "PVI": nf.PVI(homes, tolerance=0),
    "PVI, minibatches": nf.PVI(homes, family="diagonal", damping=0.5, solver=GRADIENT, tolerance=0),
    "EP, Fisher": nf.EP(homes, family="diagonal", solver=FISHER, tolerance=0),
    "SEP": nf.SEP(homes, family="diagonal", solver="identity", tolerance=0),
    "FedPA": nf.FedPA(homes, optim=SGD, server_optim=SGD, shrinkage=0.1, averaging_rounds=1, start_rounds=0, **SAMPLES),
    "FedAvg": nf.FedAvg(homes, optim=SGD, local_steps=2, batch_size=3, start_rounds=0),
    "FedNP": nf.FedNP(homes, optim=SGD, local_steps=2, batch_size=3, start_rounds=0, latent=2, hidden=3, weight=0.1),
    "GIPVI": nf.GIPVI(line, [("w", "b")], num_inducing=3, local_steps=4, batch_size=3, optim=ADAM),
}
