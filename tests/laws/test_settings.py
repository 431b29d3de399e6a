"""What is wrong with settings is said when they are made, whatever the method."""

from functools import partial
from typing import Any

import optax
import pytest
from numpyro.infer.autoguide import AutoNormal
from table import METHODS, counties, homes

import numpyro_fed as nf

SFVI, SFVIAvg = partial(nf.SFVI, counties), partial(nf.SFVIAvg, counties)
EP, PVI, FedPA, FedAvg, FedNP = (partial(m, homes) for m in (nf.EP, nf.PVI, nf.FedPA, nf.FedAvg, nf.FedNP))
Structured = nf.guides.StructuredNormal

WRONG: list[tuple[Any, dict[str, Any], str]] = [
    (SFVI, dict(optim="adam"), r"optax.adam\(1e-2\)"),
    (SFVI, dict(optim=optax.adam), r"got adam: pass optax.adam\(1e-2\)"),
    (SFVI, dict(optim=optax.lbfgs()), "needs more than gradients"),
    (SFVI, dict(optim=optax.adam(-1e-2)), "learning rate positive"),
    (SFVI, dict(optim=optax.adam(float("nan"))), "learning rate positive"),
    (SFVI, dict(optim=optax.sgd(0.0)), "learning rate positive"),
    (SFVI, dict(silo_optim="sgd"), "silo_optim must be"),
    (SFVI, dict(importance_samples=0), "importance_samples must be an int of at least 1, got 0"),
    (SFVI, dict(num_particles=1.5), "num_particles must be an int of at least 1, got 1.5"),
    (SFVI, dict(guide="full"), "StructuredNormal"),
    (SFVI, dict(batch_size=0), "batch_size must be an int of at least 1, got 0"),
    (SFVIAvg, dict(local_steps=0), "local_steps must be an int of at least 1, got 0"),
    (SFVIAvg, dict(scaling="half"), "scaling is 'half'; use 'whole' or 'paper'"),
    (SFVIAvg, dict(weights="rows"), "weights is 'rows'"),
    (SFVIAvg, dict(guide=Structured(global_cov="low_rank")), r'full or diagonal covariance.*global_cov="diagonal"'),
    (SFVIAvg, dict(guide=Structured(global_guide=AutoNormal)), "or use nf.SFVI with this guide"),
    (EP, dict(family="banded"), "family must be 'full'"),
    (EP, dict(damping=1.5), "damping is the share"),
    (EP, dict(damping=True), "damping is the share"),
    (EP, dict(solver="magic"), "solver must be one of 'importance'"),
    (EP, dict(tolerance=-1), "tolerance"),
    (EP, dict(tolerance=float("nan")), "tolerance"),
    (EP, dict(server_optim="adam"), "server_optim"),
    (PVI, dict(solver="importance"), "nf.PVI's solver is 'natural' or 'gradient'"),
    (nf.solvers.Gradient, dict(num_particles=3), "num_particles must be even"),
    (nf.solvers.HMC, dict(marginal="quadratur"), "marginal must be one of 'normal', 'quadrature'"),
    (nf.solvers.Importance, dict(num_nodes=0), "num_nodes must be an int"),
    (nf.solvers.Importance, dict(num_points=2.5), "num_points must be an int of at least 1, got 2.5"),
    (nf.solvers.HMC, dict(num_chains=0), "num_chains must be an int of at least 1, got 0"),
    (nf.solvers.NUTS, dict(num_warmup=-1), "num_warmup must be an int of at least 0, got -1"),
    (nf.solvers.NaturalGradient, dict(rate=0), "rate must be a number above 0"),
    (nf.solvers.IASG, dict(thinning=0), "thinning must be an int of at least 1, got 0"),
    (nf.solvers.IASG, dict(step_size=2), "step_size must be a number between 0 and 2"),
    (nf.solvers.IASG, dict(shrinkage=1.5), "shrinkage must be a number from 0 to 1"),
    (nf.solvers.NGVI, dict(beta=1.0), "beta must be a number from 0 to below 1"),
    (nf.solvers.Fisher, dict(num_draws=True), "num_draws must be an int of at least 1, got True"),
    (FedPA, dict(sampler="gibbs"), "use 'iasg', 'laplace', 'nuts', or a function"),
    (FedPA, dict(shrinkage=-1), "shrinkage is -1"),
    (FedPA, dict(num_samples=1), "num_samples must be an int of at least 2"),
    (FedPA, dict(optim=optax.sgd(0.1)), "pass batch_size=20"),
    (FedAvg, dict(local_steps=0), "local_steps must be an int of at least 1"),
    (FedAvg, dict(proximal=-1.0), "proximal must be a number of at least 0"),
    (FedAvg, dict(optim="adam"), "optim must be an optax optimiser"),
    (FedAvg, dict(prior=1), "prior is True"),
    (FedAvg, dict(init_loc_fn=3), "init_loc_fn is a NumPyro initialisation strategy"),
    (FedNP, dict(weight=-1), "weight must be a number of at least 0, got -1"),
    (FedNP, dict(weight=float("nan")), "weight must be a number of at least 0, got nan"),
    (FedNP, dict(epsilon=0.0), "epsilon must be a number above 0, got 0.0"),
    (FedNP, dict(latent=0), "latent must be an int of at least 1, got 0"),
    (FedNP, dict(moments="exact"), "moments is 'exact': use 'quadrature', 'closed', 'printed'"),
    (FedNP, dict(head=3), 'head is a name, or some of them, got 3: pass head="beta"'),
    (FedNP, dict(features=()), "features is a name, or some of them"),
    (FedNP, dict(network_optim="adam"), "network_optim must be an optax optimiser"),
    (FedNP, dict(local_steps=0), "local_steps must be an int of at least 1"),
]


def label(case: Any) -> str:
    make, settings, _ = case
    return f"{getattr(make, 'func', make).__name__}, {next(iter(settings))}={next(iter(settings.values()))!r:.20}"


@pytest.mark.parametrize(("make", "settings", "words"), WRONG, ids=map(label, WRONG))
def test_wrong_settings_are_told(make: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        make(**settings)


@pytest.mark.parametrize("method", dict.fromkeys(map(type, METHODS.values())), ids=lambda kind: kind.__name__)
def test_a_model_is_a_function(method: Any) -> None:
    with pytest.raises(TypeError, match="model must be a NumPyro model"):
        method("homes")


@pytest.mark.parametrize("name", METHODS)
def test_settings_are_a_value(name: str) -> None:
    """Equal settings are one key, and nothing can be set on a method after it is made."""
    method = METHODS[name]
    assert hash(method) == hash(method) and method in {method}
    with pytest.raises(AttributeError):
        method.model = None
