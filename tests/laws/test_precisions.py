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
from table import METHODS, homes, line, silos_for
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
LOCAL = ("importance", "stein", "hmc", "laplace")  # integrals, draws of both together, and neither


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


def silos_of(*names: str) -> nf.Silos:
    """In the precision of the moment, of one size: one program."""
    rng = np.random.default_rng(0)
    return nf.Silos([{n: rng.normal(1, 1, 5).astype(jnp.zeros(()).dtype) for n in names} for _ in range(2)])


def with_solver(name: str, model: Any) -> nf.Method:
    family = "diagonal" if name in LINEAR else "full"
    return nf.EP(model, family=family, solver=SOLVERS[name](**SETTINGS.get(name, {})), tolerance=0)


# {name: () -> (the method, its silos)}: made in the precision of the test
CASES: dict[str, Callable[[], tuple[nf.Method, nf.Silos]]] = {
    **{f"solver {name}": lambda name=name: (with_solver(name, homes), silos_of("x", "y")) for name in SOLVERS},
    **{f"solver {name}, locals": lambda name=name: (with_solver(name, groups), silos_of("y")) for name in LOCAL},
    **{f"guide {n}": lambda n=n: (nf.SFVI(groups, guide=GUIDES[n](), start_rounds=2), silos_of("y")) for n in GUIDES},
    "FedPA": lambda: (nf.FedPA(homes, num_samples=5, start_rounds=2), silos_of("x", "y")),
    "FedPA, from samples": lambda: (nf.FedPA(homes, num_samples=5, closing="samples"), silos_of("x", "y")),
    "FedAvg": lambda: (nf.FedAvg(homes, start_rounds=2), silos_of("x", "y")),
    "FedNP": lambda: (nf.FedNP(homes, start_rounds=2, latent=2), silos_of("x", "y")),
    "GIPVI": lambda: (nf.GIPVI(line, [("w", "b")], num_inducing=3, local_steps=4), silos_of("x", "y")),
    "SFVIAvg": lambda: (nf.SFVIAvg(groups, local_steps=2, start_rounds=2), silos_of("y")),
    "PVI": lambda: (nf.PVI(groups, tolerance=0), silos_of("y")),
    "SEP": lambda: (nf.SEP(homes, tolerance=0), silos_of("x", "y")),
    "Independent": lambda: (nf.Independent(groups, start_rounds=2), silos_of("y")),
}
TABLE = {f"table: {n}": lambda n=n: (METHODS[n], silos_for(METHODS[n].model)) for n in METHODS}
# the other laws run the table's methods in float64, and tests of solvers and guides run these in float32
RUNS = [(name, True) for name in CASES] + [(name, False) for name in TABLE]
QUICK = (("solver hmc", True), ("FedAvg", True))


@pytest.mark.parametrize("case", tiers(RUNS, *QUICK), ids=lambda case: f"{case[0]}, float{64 if case[1] else 32}")
def test_two_rounds_in_either_precision(case: tuple[str, bool]) -> None:
    name, wide = case
    with jax.enable_x64(wide):
        method, silos = (CASES | TABLE)[name]()
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
    assert set(SETTINGS) | {"importance", "stein", "laplace"} == set(SOLVERS)


def test_every_method_is_among_them() -> None:
    kinds = {name: getattr(nf, name) for name in nf.__all__}
    methods = {name for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, nf.Method)}
    assert methods - {"Method", "SFVI", "EP"} <= set(CASES)  # these two are the guides' and the solvers'
