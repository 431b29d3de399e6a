"""What tests and doctests share: how programs are compiled, and the names that every doctest knows."""

import importlib.util
import os
from importlib.metadata import version

os.environ.setdefault("MPLBACKEND", "Agg")  # before anything imports matplotlib: no test opens a window
# Before anything compiles: most of the time goes into compiling small programs that run for a moment. Without XLA's
# newer emitter of fused loops that takes half as long, and without optimisation a third of that. XLA_FLAGS="" in the
# environment compiles as for a user.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_cpu_parallel_codegen_split_count=1 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_use_fusion_emitters=false"
    * (tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 12)),
)

from functools import cache
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_fed as nf

# Modules that an extra is needed for: without it they cannot be looked into for doctests.
if importlib.util.find_spec("nvflare") is None:
    collect_ignore = ["numpyro_fed/remote/flare.py", "numpyro_fed/remote/flare_jobs.py"]


def pytest_configure(config: pytest.Config) -> None:
    """Compiled programs are kept between runs, and each worker finds what the others have compiled.

    A program is found by its text and by its compiler's version and options: a change of the library is a new program.
    ``rm -r .pytest_cache/jax`` forgets them; JAX_COMPILATION_CACHE_DIR names another place.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(config.rootpath / ".pytest_cache" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # Read while another worker writes it, a program is compiled again.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry:UserWarning")


# --- what doctests know -----------------------------------------------------------------------------------------------


def model(x: Any, y: Any = None) -> None:
    """Logistic regression."""
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=beta[0] + beta[1] * x), obs=y)


def rows(seed: int, number: int) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(seed)
    x = draws.normal(size=number).astype(np.float32)
    return dict(x=x, y=(0.5 + x + draws.logistic(size=number) > 0).astype(np.int32))


SILOS = nf.Silos({"leeds": rows(0, 20), "york": rows(1, 30)})


@cache
def ep_fit() -> nf.Fit:
    return nf.EP(model).run(jax.random.key(0), SILOS, progress_bar=False)


@pytest.fixture(autouse=True)
def _names_of_doctests(request: pytest.FixtureRequest) -> None:
    """A model, its silos and new rows ``x``, ``y``; a fit by EP and draws ``ref`` to compare with, where they occur."""
    if not isinstance(request.node, pytest.DoctestItem):
        return
    names: dict[str, Any] = request.getfixturevalue("doctest_namespace")
    names |= dict(nf=nf, jax=jax, np=np, optax=optax, model=model, silos=SILOS, key=jax.random.key(0), **rows(2, 10))
    written = " ".join(example.source for example in request.node.dtest.examples)
    if "fit" in written or "ref" in written:
        names |= dict(fit=ep_fit(), ref=ep_fit().sample(jax.random.key(1), 500))
