"""The server never reads a silo; every method's runs are in the table of laws."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from sealed import sealed
from table import counties, homes, silos_for

import numpyro_fed as nf
from numpyro_fed.data.silos import inside
from numpyro_fed.model import certificate

KEY = jax.random.key(0)


def test_a_seal_can_break() -> None:
    with pytest.raises(AssertionError, match="an array of york was read in the server"):
        np.asarray(sealed(silos_for(counties))["york"]["x"])


@pytest.mark.slow
def test_independent_silos_are_sealed_from_one_another() -> None:
    method, silos = nf.Independent(counties, start_rounds=1), silos_for(counties)
    fits = method.run(KEY, sealed(silos), 2, engine=nf.engines.Loopback(), progress_bar=False)
    assert np.all(np.isfinite(fits["york"].sample(KEY, 5)["beta"]))


@pytest.mark.slow
def test_what_is_made_of_a_fit_is_made_in_the_silos_rooms() -> None:
    fit = nf.EP(counties).run(KEY, sealed(silos_for(counties)), 2, progress_bar=False)
    assert fit.sample_local(KEY, 3, silo="york")["alpha"].shape == (3, 4)
    assert fit.predict(KEY, silo="york", num_samples=3)["y"].shape == (3, 24)
    assert np.isfinite(fit.correct(KEY, 64).correction.ess)


def test_only_a_room_that_somebody_opened_can_be_read() -> None:
    """An engine opens it; data that anybody else asks for are refused."""
    prepared = nf.EP(counties).prepare(sealed(silos_for(counties)), nf.engines.Loopback())
    with pytest.raises(AssertionError, match="an array of york was read in the server"):
        prepared.stack.data("york")


@pytest.mark.slow
def test_silos_join_and_leave_unread() -> None:
    fit = nf.EP(homes).run(KEY, sealed(silos_for(homes, "leeds", "york")), 2, progress_bar=False)
    joined = fit.add(KEY, sealed(silos_for(homes, "hull")), 1)
    assert joined.state.names == ("leeds", "york", "hull")
    assert np.all(np.isfinite(joined.without("york").normal().mean))


def covered(slope, county, num_counties, x, y=None):
    """A covariate of each county, which belongs to the silo and not to its units."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("counties", num_counties):
        alpha = numpyro.sample("alpha", dist.Normal(mu + slope, 1))
    with numpyro.plate("homes", x.shape[0]):
        numpyro.sample("y", dist.Normal(alpha[county] + x, 0.5), obs=y)


@pytest.mark.slow
def test_new_units_of_a_silo_are_predicted_in_its_room() -> None:
    data = {
        name: dict(**args, slope=np.linspace(0, 1, args["num_counties"]).astype("f"))
        for name, args in silos_for(counties).items()
    }
    fit = nf.EP(covered).run(KEY, sealed(nf.Silos(data)), 2, progress_bar=False)
    new = dict(x=np.zeros(2, "f"), county=np.zeros(2, np.int32))
    assert fit.predict(KEY, new, silo="york", num_samples=3)["y"].shape == (3, 2)


def test_a_store_is_read_in_its_silos_rooms() -> None:
    rooms = []
    closed = {name: args for name, args in silos_for(homes).items()}
    names = list(closed)

    def read(index: int) -> dict:
        rooms.append((names[index], inside()))
        return closed[names[index]]

    store = nf.SiloStore.from_function(read, 3, names=names)
    fit = nf.SEP(homes, family="diagonal", solver="identity").run(KEY, store, 3, progress_bar=False)
    fit.predict(KEY, silo="york", num_samples=3)
    assert {name for name, _ in rooms} == set(names)
    assert all(name == room for name, room in rooms)


def test_the_certificate_is_looked_at_in_its_silo_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms, original = [], certificate._differs

    def looked_at(split, name, arguments, seed):
        rooms.append((name, inside()))
        return original(split, name, arguments, seed)

    monkeypatch.setattr(certificate, "_differs", looked_at)
    prepared = nf.EP(counties).prepare(sealed(silos_for(counties)))
    assert sorted(rooms) == [(name, name) for name in sorted(prepared.stack.names)]
    assert prepared.survey.certified == 3


def scaled(scale, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, scale), obs=y)


def test_a_certificate_is_of_the_data_at_hand() -> None:
    """Other data of the same shapes share programs, and neither a failure nor a success."""
    good, bad = (nf.Silos([dict(y=np.ones(3, "f"), scale=np.full(3, s, "f"))] * 2) for s in (1.0, 0.0))
    for _ in range(2):
        with pytest.raises(nf.PartitionError, match="log density is"):
            nf.EP(scaled).prepare(bad)
        assert nf.EP(scaled).prepare(good).survey.sizes == (3, 3)
