"""The server never reads a silo: with arrays that can be touched in their own silo's room alone, every method runs."""

from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.data.silos import inside

KEY = jax.random.key(0)
pytestmark = pytest.mark.filterwarnings("ignore:the posterior still moves", "ignore:silo .* was not asked")


class Sealed:
    """An array of which the server may know shape and type."""

    def __init__(self, silo: str, array: np.ndarray) -> None:
        self._silo, self._array = silo, array
        self.shape, self.dtype, self.ndim, self.size = array.shape, array.dtype, array.ndim, array.size

    def _opened(self) -> np.ndarray:
        assert inside() == self._silo, f"an array of {self._silo} was read in {inside() or 'the server'}"
        return self._array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self._opened(), dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._opened()[index]

    def __len__(self) -> int:
        return self.shape[0]


def sealed(silos: nf.Silos) -> nf.Silos:
    closed = silos.only(*silos.names)
    closed._data = {
        name: {k: v if isinstance(v, int) else Sealed(name, v) for k, v in silos.own(name).items()} for name in silos
    }
    return closed


def counties(county, num_counties, x, y):
    """Long format, with minibatches of groups: all that a survey can be asked."""
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    with numpyro.plate("counties", num_counties):
        alpha = numpyro.sample("alpha", dist.Normal(0, 1))
    with numpyro.plate("homes", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=alpha[county] + beta * x), obs=y)


def regression(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    with numpyro.plate("homes", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=beta * x), obs=y)


def homes(*sizes: int) -> nf.Silos:
    draws = np.random.default_rng(0)
    data = {}
    for name, n in zip(("north", "south", "west"), sizes, strict=False):
        x, county = draws.normal(size=n).astype("f"), np.sort(draws.integers(0, 2, n)).astype("i4")
        county[:2] = 0, 1
        data[name] = dict(county=county, num_counties=2, x=x, y=(x + draws.normal(size=n) > 0).astype("i4"))
    silos = nf.Silos(data)
    silos.own_counts = frozenset(["num_counties"])
    return silos


def without_counties(silos: nf.Silos) -> nf.Silos:
    return nf.Silos({name: {k: silos[name][k] for k in ("x", "y")} for name in silos})


METHODS = {
    "SFVI": (nf.SFVI(counties, start_rounds=2), {}),
    "SFVI, minibatches": (nf.SFVI(counties, start_rounds=0, batch_size=1, importance_samples=2), {}),
    "SFVIAvg": (nf.SFVIAvg(counties, local_steps=2, start_rounds=1), {}),
    "EP": (nf.EP(counties), {}),
    "PVI": (nf.PVI(counties), {"schedule": "asynchronous"}),
    "SEP": (nf.SEP(regression), {}),
    "FedPA": (nf.FedPA(regression, num_samples=10, num_warmup=5, thinning=2, averaging_rounds=1), {}),
    "FedAvg": (nf.FedAvg(regression, batch_size=3), {"schedule": nf.schedules.sampled(1)}),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_on_sealed_silos(name):
    method, options = METHODS[name]
    silos = homes(7, 5) if method.model is counties else without_counties(homes(7, 5))
    run = lambda silos: method.run(KEY, silos, 2, engine=nf.engines.Loopback(), progress_bar=False, **options)
    closed, opened = run(sealed(silos)), run(silos)
    for a, b in zip(jax.tree.leaves(closed.state.server), jax.tree.leaves(opened.state.server), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(closed.history["bytes_up"], opened.history["bytes_up"])


def test_independent_silos_are_sealed_from_one_another():
    method, silos = nf.Independent(counties, start_rounds=1), homes(7, 5)
    fits = method.run(KEY, sealed(silos), 2, engine=nf.engines.Loopback(), progress_bar=False)
    assert np.all(np.isfinite(fits["south"].sample(KEY, 5)["beta"]))


def test_a_seal_can_break():
    with pytest.raises(AssertionError, match="an array of north was read in the server"):
        np.asarray(sealed(homes(3))["north"]["x"])


def test_draws_of_a_silo_are_made_in_its_room():
    closed = sealed(homes(7, 5))
    fit = nf.EP(counties).run(KEY, closed, 2, progress_bar=False)
    assert fit.sample_local(KEY, 3, silo="south")["alpha"].shape == (3, 2)
    assert fit.predict(KEY, silo="south", num_samples=3)["y"].shape == (3, 5)
    assert np.isfinite(fit.correct(KEY, 64).correction.ess)
