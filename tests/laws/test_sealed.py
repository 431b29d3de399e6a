"""The server never reads a silo; every method's runs are in the table of laws."""

import jax
import numpy as np
import pytest
from sealed import sealed
from table import counties, silos_for

import numpyro_fed as nf

KEY = jax.random.key(0)


def test_a_seal_can_break() -> None:
    with pytest.raises(AssertionError, match="an array of york was read in the server"):
        np.asarray(sealed(silos_for(counties))["york"]["x"])


def test_independent_silos_are_sealed_from_one_another() -> None:
    method, silos = nf.Independent(counties, start_rounds=1), silos_for(counties)
    fits = method.run(KEY, sealed(silos), 2, engine=nf.engines.Loopback(), progress_bar=False)
    assert np.all(np.isfinite(fits["york"].sample(KEY, 5)["beta"]))


def test_what_is_made_of_a_fit_is_made_in_the_silos_rooms() -> None:
    fit = nf.EP(counties).run(KEY, sealed(silos_for(counties)), 2, progress_bar=False)
    assert fit.sample_local(KEY, 3, silo="york")["alpha"].shape == (3, 4)
    assert fit.predict(KEY, silo="york", num_samples=3)["y"].shape == (3, 24)
    assert np.isfinite(fit.correct(KEY, 64).correction.ess)
