"""SFVI on models of every structure: a finite loss that does not rise, and draws of the right shapes."""

import jax
import numpy as np
import pytest
from models import MODELS
from numpyro import handlers
from tiers import tiers

import numpyro_fed as nf

STRUCTURES = ["nested plates", "silo level", "pairs", "mask", "obs_mask", "constrained locals", "theta", "scan"]


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers(STRUCTURES, "pairs"))
def test_every_structure_can_be_fitted(name):
    case = MODELS[name]
    silos = case.silos()
    fit = nf.SFVI(case.model, **case.options).run(jax.random.key(0), silos, 200, progress_bar=False)
    loss = fit.history["loss"][~fit.history["start"]]
    assert np.all(np.isfinite(loss))
    assert loss[-50:].mean() < loss[:50].mean() + 0.5  # a draw a round: half a unit of noise
    for silo in silos.names:
        draws = fit.sample_local(jax.random.key(1), 3, silo=silo)
        expected = handlers.trace(handlers.seed(case.model, 0)).get_trace(**silos[silo])
        for site in case.local_sites:
            assert draws[site].shape == (3, *expected[site]["value"].shape)
            assert np.all(np.isfinite(draws[site]))
