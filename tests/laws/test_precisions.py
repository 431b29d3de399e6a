"""Every solver, guide and method in both precisions: nothing is lost, nothing is mixed, nothing is not finite."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.example_libraries import stax
from numpyro.infer.autoguide import AutoIAFNormal, AutoLowRankMultivariateNormal, AutoNormal
from table import METHODS, counties, homes, silos_for
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed.guides import Amortized, StructuredNormal
from numpyro_fed.solvers import SOLVERS

KEY = jax.random.key(0)
SETTINGS: dict[str, dict[str, Any]] = {  # as little work as runs every line
    "hmc": dict(num_chains=4, num_samples=5, num_warmup=3),
    "nuts": dict(num_chains=2, num_samples=6, num_warmup=4),
    "natural": dict(num_points=16, num_steps=2),
    "gradient": dict(num_steps=5),
    "iasg": dict(num_chains=2, num_samples=4, num_warmup=2, thinning=2, num_steps=5),
    "fisher": dict(num_draws=4, num_steps=5),
    "ngvi": dict(num_updates=3, num_draws=2, num_steps=5),
    "identity": dict(num_steps=5),
}
LINEAR = ("iasg", "fisher", "ngvi", "identity")  # of a diagonal family, for models without locals


def groups(y):
    """A global on the whole line, a positive one, and a latent for each row."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("rows", y.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, sigma))
        numpyro.sample("y", dist.Normal(a, 0.5), obs=y)


def groups_guide(y):
    loc = numpyro.param("loc", jnp.zeros(()))
    numpyro.sample("mu", dist.Normal(loc, 0.5))
    numpyro.sample("sigma", dist.LogNormal(numpyro.param("log_sigma", jnp.zeros(())), 0.3))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("a", dist.Normal(numpyro.param("centres", jnp.zeros(y.shape[0])), 0.4))


GUIDES: dict[str, Callable[[], Any]] = {
    **{f"global {kind}": lambda kind=kind: StructuredNormal(global_cov=kind) for kind in ("diagonal", "low_rank")},
    **{f"local {kind}": lambda kind=kind: StructuredNormal(local_cov=kind) for kind in ("block", "diagonal", "full")},
    "uncoupled": lambda: StructuredNormal(coupling=False),
    "coupled scales": lambda: StructuredNormal(scale_coupling=True),
    "AutoNormal": lambda: StructuredNormal(global_guide=AutoNormal),
    "AutoLowRank": lambda: StructuredNormal(global_guide=lambda m: AutoLowRankMultivariateNormal(m, rank=1)),
    "flow": lambda: StructuredNormal(global_guide=lambda m: AutoIAFNormal(m, num_flows=1, hidden_dims=[4, 4])),
    "encoder": lambda: Amortized(stax.Dense(2), inputs="y"),
    "function": lambda: groups_guide,
}


def group_silos() -> nf.Silos:
    rng = np.random.default_rng(0)
    return nf.Silos([dict(y=rng.normal(1, 1, n).astype(jnp.zeros(()).dtype)) for n in (4, 6)])


def with_solver(name: str, model: Any) -> nf.Method:
    family = "diagonal" if name in LINEAR else "full"
    return nf.EP(model, family=family, solver=SOLVERS[name](**SETTINGS.get(name, {})), tolerance=0)


# {name: (the method, its silos)}, made in the precision of the test
CASES: dict[str, Callable[[], tuple[nf.Method, nf.Silos]]] = {
    **{f"solver {name}": lambda name=name: (with_solver(name, homes), silos_for(homes)) for name in SOLVERS},
    **{
        f"solver {name}, locals": lambda name=name: (with_solver(name, groups), group_silos())
        for name in SOLVERS
        if name not in LINEAR
    },
    **{f"guide {n}": lambda n=n: (nf.SFVI(groups, guide=GUIDES[n](), start_rounds=2), group_silos()) for n in GUIDES},
    **{f"method {n}": lambda n=n: (METHODS[n], silos_for(METHODS[n].model)) for n in METHODS},
    "method FedPA, all rows": lambda: (nf.FedPA(homes, num_samples=5, start_rounds=2), silos_for(homes)),
    "method FedPA, from samples": lambda: (nf.FedPA(homes, num_samples=5, closing="samples"), silos_for(homes)),
    "method FedAvg, all rows": lambda: (nf.FedAvg(homes, start_rounds=2), silos_for(homes)),
    "method SFVIAvg, start": lambda: (nf.SFVIAvg(groups, local_steps=2, start_rounds=2), group_silos()),
    "method PVI, locals": lambda: (nf.PVI(groups, tolerance=0), group_silos()),
    "method Independent": lambda: (nf.Independent(counties, start_rounds=2), silos_for(counties)),
}
RUNS = [(name, wide) for name in CASES for wide in (False, True)]
QUICK = (("solver hmc", True), ("method FedAvg, all rows", True))  # others run in float32 every day


@pytest.mark.parametrize("case", tiers(RUNS, *QUICK), ids=lambda case: f"{case[0]}, float{64 if case[1] else 32}")
def test_two_rounds_in_either_precision(case: tuple[str, bool]) -> None:
    name, wide = case
    with jax.enable_x64(wide):
        method, silos = CASES[name]()
        found = method.run(KEY, silos, 2, progress_bar=False)
        fits = list(found.values()) if isinstance(found, nf.Fits) else [found]
        expected = jnp.zeros(()).dtype
        for fit in fits:
            assert np.all(np.isfinite(fit.history["loss"]))
            draws = fit.sample(KEY, 3)
            silo = fit.state.names[0]
            for site, values in (draws | dict(fit.sample_local(KEY, 3, silo=silo))).items():
                assert np.all(np.isfinite(values)), site
                assert values.dtype == expected, (site, values.dtype)


def test_every_solver_is_among_them() -> None:
    assert set(SETTINGS) | {"importance", "laplace"} == set(SOLVERS)
    assert {type(method).__name__ for method in METHODS.values()} | {"Independent"} >= {
        name for name in nf.__all__ if isinstance(getattr(nf, name), type) and issubclass(getattr(nf, name), nf.Method)
    } - {"Method"}
