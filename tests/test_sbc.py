"""Simulation-based calibration: simulated data, ranks, tests of uniformity, files."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from matplotlib import pyplot as plt
from numpyro import handlers
from scipy.stats import kstest, norm

import numpyro_fed as nf
from numpyro_fed.judge import uniform
from numpyro_fed.judge.calibration import statistics
from numpyro_fed.judge.sbc_file import Done, SimulationFile, about
from numpyro_fed.model.build import split_model
from numpyro_fed.model.simulate import Simulated, Simulator

KEY = jax.random.key(0)


# --- a posterior that is known ----------------------------------------------------------------------------------------


class NormalMean:
    """A normal mean whose prior sd is ``ratio`` posterior sds, its posterior, and mistakes in it."""

    def __init__(self, ratio: float = 2.0, num_silos: int = 3, rows: int = 4) -> None:
        self.noise = float(np.sqrt(num_silos * rows / (ratio**2 - 1)))  # the prior's sd is 1
        self.silos = nf.Silos([dict(y=np.zeros(rows, "f")) for _ in range(num_silos)])
        self.calls = 0

    def model(self, y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, self.noise), obs=y)

    def method(self, priors: float = 1.0, left_out: tuple[str, ...] = (), num: int = 255) -> Any:
        def posterior(key, silos):
            self.calls += 1
            heard = [silos[name]["y"] for name in silos.names if name not in left_out]
            precision = priors + sum(map(len, heard)) / self.noise**2
            mean = sum(np.sum(y, dtype=float) for y in heard) / self.noise**2 / precision
            return {"mu": mean + np.asarray(jax.random.normal(key, (num,))) / np.sqrt(precision)}

        return posterior

    def sbc(self, num: int = 200, *, mistakes: dict | None = None, **options: Any) -> nf.Calibration:
        options = {"model": self.model, "progress_bar": False, "rng_key": KEY} | options
        return nf.sbc(self.method(**(mistakes or {})), self.silos, num, **options)


@pytest.mark.parametrize("ratio", [pytest.param(ratio, marks=pytest.mark.slow) for ratio in (1.25, 1.5, 2.0)])
def test_exact_posteriors_are_calibrated_and_a_prior_counted_twice_is_found(ratio):
    case = NormalMean(ratio)
    exact = case.sbc()
    # four tests of five quantities at a family-wise level of .05
    assert exact.ok and exact.num_done == 200 and not exact.failures
    row = exact.table.set_index("parameter").loc["mu"]
    assert abs(row["spread"] - 1) < 4 * np.sqrt(0.8 / 200) and row["spread_low"] < row["spread"] < row["spread_high"]
    # the score takes the truth's noise out: what is left is that of the draws' mean, 1 / sqrt(255 * 200) = .0044, and
    # of their covariance, about as much
    assert abs(row["bias"]) < 4 * 0.0044 * np.sqrt(2) and row["bias_high"] - row["bias_low"] < 4 * 2 * 0.0044
    twice = case.sbc(mistakes={"priors": 2.0})
    row = twice.table.set_index("parameter").loc["mu"]
    # posterior means are too close to zero wherever they are; over the prior that cancels, so no bias shows
    assert not twice.ok and row["family_wise"] < 0.01 and row["pull"] < -0.2 and abs(row["bias"]) < 0.1
    assert "as if it were counted twice" in repr(twice)


def test_a_silo_left_out_is_found_by_its_likelihood_alone():
    case = NormalMean(2.0, num_silos=2)
    found = case.sbc(80, mistakes={"left_out": ("1",)})
    table = found.table.set_index("parameter")
    assert list(table.index) == ["mu", "log p(all silos)", "log p(0)", "log p(1)"]
    # the posterior given a part of the data is calibrated: ranks of mu see nothing
    assert table.loc["mu", "family_wise"] > 0.05 and table.loc["log p(1)", "family_wise"] < 0.01
    assert not found.ok and "log p(1): the truth explains these data better than draws do" in repr(found)
    assert case.sbc(10, mistakes={"left_out": ("1",)}, likelihoods=False).kinds == {"mu": "global"}


@pytest.mark.slow
def test_posteriors_given_the_data():
    """Truths from the posterior of the silos' own data, fits to these and to simulated ones beside them."""
    case = NormalMean(2.0, num_silos=2)
    data = np.array([1.0, 0.5, 2.0, 1.5], "f")
    silos = case.silos.changed(lambda own: {"y": data})
    precision = 1 + 8 / case.noise**2
    draws = 2 * data.sum() / case.noise**2 / precision + np.random.default_rng(0).normal(size=4000) / np.sqrt(precision)
    split = split_model(case.model, silos, check=False)
    given = SimpleNamespace(split=split, unconstrained={"z": draws.reshape(1, -1, 1).astype("f")}, theta={})
    found = nf.sbc(case.method(), silos, 100, model=case.model, given=given, rng_key=KEY, progress_bar=False)
    assert found.ok and "log p(0, simulated)" in found.kinds
    # the truths are draws of the posterior, whose mean is 1.0: within five standard errors
    assert abs(found.truths["mu"].mean() - draws.mean()) < 5 / np.sqrt(100 * precision)
    with pytest.raises(TypeError, match="given must be a fit or a Reference of the same model"):
        nf.sbc(case.method(), silos, 3, model=case.model, given={"mu": draws})


# --- the statistics ---------------------------------------------------------------------------------------------------


def test_p_values_of_uniform_ranks_are_uniform_and_bands_hold():
    draws = np.random.default_rng(1)
    ranks = draws.integers(0, 256, (300, 100))
    p_values = np.array([uniform.p_value(row, 256) for row in ranks])
    assert kstest(p_values, "uniform").pvalue > 0.01
    band = uniform.band(100, 256)
    share = uniform.below(ranks, uniform.points(256, 100)) / 100
    outside = np.any((share < band.low - 1e-9) | (share > band.high + 1e-9), axis=1).mean()
    assert abs(outside - 0.05) < 4 * np.sqrt(0.05 * 0.95 / 300)
    # the band is the test: a set of ranks leaves it exactly where its p-value is below .05 (ties aside)
    assert np.mean((p_values < 0.05) == np.any((share < band.low) | (share > band.high), axis=1)) > 0.98


@pytest.mark.parametrize("sd, shift", [(1.0, 0.0), (0.7, 0.0), (1.0, 0.3)])
def test_bias_and_spread_of_normal_posteriors_are_the_closed_form(sd, shift):
    """Posteriors N(m + shift, sd^2) where N(m, 1) is right."""
    draws = np.random.default_rng(2)
    mean, num, num_draws = draws.normal(size=4000), 4000, 255
    truth = mean + draws.normal(size=num)
    ranks = draws.binomial(num_draws, norm.cdf((truth - mean - shift) / sd))
    found = statistics(ranks, mean + shift, np.full(num, sd), truth, np.full(num, np.nan), num_draws)
    assert found["bias"] == pytest.approx(shift / sd, abs=4 / sd / np.sqrt(num))
    if shift == 0:
        expected = np.arcsin(sd**-2 / (1 + sd**-2)) / (2 * np.pi) * 12  # the variance of Phi(x / sd), x standard normal
        assert found["spread"] == pytest.approx(expected, abs=4 * np.sqrt(0.8 / num))
    assert found["spread_low"] < found["spread"] < found["spread_high"]
    assert (found["p_value"] > 0.001) == (sd == 1.0 and shift == 0.0)  # one false alarm in a thousand seeds


def test_few_simulations_find_nothing(close_figures):
    found = NormalMean().sbc(3)
    assert not found.ok and "too few" in repr(found) and "<table" in found._repr_html_()
    axes = found.plot(["mu"])
    assert [ax.get_title() for ax in axes] == ["mu"] and len(axes[0].figure.legends) == 1
    axes[0].figure.canvas.draw()


@pytest.fixture
def close_figures():
    yield
    plt.close("all")


# --- simulated data ---------------------------------------------------------------------------------------------------


def observes(how: Any) -> Any:
    """A model that observes a function of its argument."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        value = how(y)
        with numpyro.plate("rows", value.shape[0]):
            numpyro.sample("y", dist.Normal(mu, 1), obs=value)

    return model


def simulator(model: Any, *data: dict[str, Any], **options: Any) -> Simulator:
    silos = nf.Silos(list(data))
    return Simulator(split_model(model, silos, check=False, **options), silos, None)


WAYS = {
    "an argument": lambda y, order: (y[:, 0], np.arange(len(y)) * 2),
    "a column": lambda y, order: (y[:, 1], np.arange(len(y)) * 2 + 1),
    "rows looked up": lambda y, order: (y[order, 0], 2 * np.asarray(order)),
    "whole rows": lambda y, order: (y, np.arange(2 * len(y))),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_simulated_stands_where_it_is_observed(way):
    def model(y, order):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        value = WAYS[way](y, order)[0] if way != "rows looked up" else y[order, 0]
        with numpyro.plate("rows", y.shape[0], dim=-value.ndim):
            numpyro.sample("y", dist.Normal(mu, 1), obs=value)

    draws = np.random.default_rng(0)
    data = [dict(y=np.full((n, 2), 7.0, "f"), order=draws.permutation(n).astype("i4")) for n in (3, 5)]
    found = simulator(model, *data).draw(KEY, {})
    for name, before in zip(found.silos.names, data, strict=True):
        new, places = found.silos[name]["y"], WAYS[way](before["y"], before["order"])[1]
        assert sorted(np.flatnonzero(new.ravel() != 7.0)) == sorted(places)
        assert np.array_equal(found.silos[name]["order"], before["order"])
    assert np.array_equal(simulator(model, *data).draw(KEY, {}).z, found.z)


def test_simulated_data_have_the_models_distribution():
    """Hierarchical counts, ragged, beside NumPyro's own draws: means of the same globals."""

    def model(x, y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            b = numpyro.sample("b", dist.Gamma(4.0, 4.0))
            numpyro.sample("y", dist.Poisson(b * jnp.exp(mu + x)), obs=y)

    x = np.linspace(-1, 1, 400, dtype="f")
    made = simulator(model, dict(x=x, y=np.zeros(400, "i4")), dict(x=x[:5], y=np.zeros(5, "i4")))
    found = made.draw(KEY, {}, jnp.array([0.7], jnp.float32))
    y, rate = found.silos["0"]["y"], np.exp(0.7 + x)
    assert y.dtype == np.int32 and found.silos["1"]["y"].shape == (5,) and found.sites["mu"] == np.float32(0.7)
    # E y = rate and var y = rate + rate^2 / 4
    assert abs(np.sum(y - rate)) < 4 * np.sqrt(np.sum(rate + rate**2 / 4))
    assert not np.array_equal(y[:5], found.silos["1"]["y"])  # silos have random numbers of their own


def lagged(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a * y[:, 0], 1), obs=y[:, 1])


def constant(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    numpyro.sample("zero", dist.Normal(a, 0.1), obs=0.0)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a, 1), obs=y)


def twice(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("u", dist.Normal(a, 1), obs=y)
        numpyro.sample("v", dist.Normal(a, 2), obs=y)


def weighted(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]), handlers.scale(scale=2.0):
        numpyro.sample("y", dist.Normal(a, 1), obs=y)


def factor(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.factor("y", -((y - a) ** 2))


def improper(y):
    a = numpyro.sample("a", dist.ImproperUniform(dist.constraints.real, (), ()))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a, 1), obs=y)


REFUSED = {
    "log": (observes(jnp.log), 1, "computed from the silo's arguments"),
    "reversed": (observes(lambda y: 1 - y), 1, "computed from"),
    "squared": (observes(lambda y: y**2), 1, "computed from"),
    "indicator": (observes(lambda y: (y > 0) * 1.0), 1, "computed from"),
    "constant": (constant, 1, "'zero' depends on no silo's own arguments"),
    "lagged": (lagged, 2, "'y', which other draws of the model depend on"),
    "twice": (twice, 1, "observed twice"),
    "weighted": (weighted, 1, "weighted by handlers.scale"),
    "factor": (factor, 1, "'y' is a numpyro.factor"),
    "improper": (improper, 1, "'a' has an improper prior.*given=fit"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_simulated_says_why(case):
    model, ndim, message = REFUSED[case]
    data = [dict(y=np.ones((n, 2)[:ndim], "f")) for n in (3, 4)]
    with pytest.raises(nf.PartitionError, match=message):
        simulator(model, *data).draw(KEY, {})


# --- failures and files -----------------------------------------------------------------------------------------------


def test_failures_are_counted_with_their_reasons():
    case = NormalMean()
    right = case.method()

    def sometimes(key, silos):
        if silos["0"]["y"][0] > 0.5:
            raise nf.NonFiniteError("the loss is not finite")
        return right(key, silos)

    found = nf.sbc(sometimes, case.silos, 20, model=case.model, rng_key=KEY, progress_bar=False)
    assert found.failures and len(found.failures) + found.num_done == 20 and not found.ok
    assert set(found.failures) | set(found.ranks.index) == set(range(20))
    assert re.search(rf"{len(found.failures)} of 20 simulations failed .*the loss is not finite", repr(found))

    def overflows(y):
        mu = numpyro.sample("mu", dist.Normal(0, 100))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.exp(10 * jnp.abs(mu) + 100), 1), obs=y)

    with pytest.raises(ValueError, match=r"first 5 simulations all failed.*overflows, so narrow it.*given=fit"):
        nf.sbc(case.method(), case.silos, 20, model=overflows, progress_bar=False)


def test_simulations_go_on_from_a_file(tmp_path):
    case = NormalMean()
    path = tmp_path / "simulations"
    case.sbc(4, checkpoint=path)
    assert case.calls == 4
    longer = case.sbc(9, checkpoint=path)
    assert case.calls == 9  # the first four were read
    assert case.sbc(2, checkpoint=path).num_done == 2 and case.calls == 9
    assert case.sbc(9, checkpoint=path).num_done == 9 and case.calls == 9  # fewer do not forget the others
    at_once = case.sbc(9)
    for name in ("ranks", "means", "sds", "truths", "steps"):
        assert getattr(longer, name).equals(getattr(at_once, name))
    assert [file.name for file in tmp_path.iterdir()] == ["simulations.npz"]
    for options, reason in (
        (dict(num_draws=99), "another number of draws"),
        (dict(rng_key=jax.random.key(1)), "another key or precision"),
        (dict(model=NormalMean(3.0).model), "another model, prior"),
    ):
        with pytest.raises(ValueError, match=reason):
            case.sbc(5, checkpoint=path, **options)
    with pytest.raises(ValueError, match="another design"):
        nf.sbc(case.method(), NormalMean(rows=5).silos, 5, model=case.model, checkpoint=path, rng_key=KEY)
    (tmp_path / "broken.npz").write_bytes((tmp_path / "simulations.npz").read_bytes()[:400])
    with pytest.raises(ValueError, match=r"broken\.npz cannot be read"):
        case.sbc(5, checkpoint=tmp_path / "broken.npz")


def test_simulations_of_another_setting_are_refused(tmp_path):
    """Also of one that hides in a closure, as a learning rate does."""
    case, path = NormalMean(), tmp_path / "simulations"
    told = lambda size: about(nf.SFVI(case.model, optim=optax.adam(size)), {}, (), case.silos, simulated, KEY)
    simulated = Simulated(np.zeros(1), {}, {}, case.silos)
    SimulationFile(path, told(0.1)).write({0: Done(*[np.zeros(1)] * 5, "", "", 1.0)})
    assert list(SimulationFile(path, told(0.1)).read()) == [0]
    with pytest.raises(ValueError, match="of another method"):
        SimulationFile(path, told(0.2)).read()


def test_interrupted_simulations_are_kept(tmp_path):
    case = NormalMean()
    right = case.method()

    def stopped(key, silos):
        if case.calls == 3:
            case.calls += 1
            raise KeyboardInterrupt
        return right(key, silos)

    options = dict(model=case.model, rng_key=KEY, progress_bar=False, checkpoint=tmp_path / "kept")
    assert nf.sbc(stopped, case.silos, 6, **options).num_done == 3
    assert nf.sbc(stopped, case.silos, 6, **options).num_done == 6 and case.calls == 4 + 3


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(method=3), "does not say what to simulate from"),
        (dict(num_simulations=0), "num_simulations must be an int"),
        (dict(silo="hull"), "no silo is named 'hull'"),
        (dict(silos=[dict(y=np.zeros(3))]), "silos must be an nf.Silos"),
        (dict(theta={"t": 1.0}), "theta= names 't'"),
        (dict(method=lambda key, silos: {"nu": np.zeros(300)}, model=NormalMean().model), "of every global site"),
        (dict(method=lambda key, silos: 3, model=NormalMean().model), "returned a int"),
    ],
)
def test_wrong_arguments_say_what_to_type(wrong, message):
    arguments = dict(method=nf.EP(NormalMean().model), silos=NormalMean().silos, progress_bar=False) | wrong
    with pytest.raises((TypeError, ValueError, KeyError), match=message):
        nf.sbc(arguments.pop("method"), arguments.pop("silos"), **arguments)


# --- methods ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_method_is_compiled_for_the_first_simulation_alone():
    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 0.5))
            numpyro.sample("y", dist.Normal(beta * x + b, 1), obs=y)

    draws = np.random.default_rng(0)
    sizes = {"york": 12, "hull": 9}
    silos = nf.Silos({name: dict(x=draws.normal(size=n).astype("f"), y=np.zeros(n, "f")) for name, n in sizes.items()})
    programs: list[str] = []
    seen: list[int] = []

    def listen(name: str, duration: float, **told: Any) -> None:
        if "backend_compile" in name:
            programs.append(str(told.get("fun_name")))

    class Counting(nf.EP):
        def run(self, *args: Any, **options: Any) -> nf.Fit:
            seen.append(len(programs))
            return super().run(*args, **options)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = nf.sbc(Counting(model), silos, 60, silo="york", rng_key=KEY, progress_bar=False)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    # after the first simulation there is nothing to compile but what the method had not yet needed (more rounds)
    assert seen[0] > 0 and seen[-1] == seen[3], programs[seen[3] :]
    # all factors are normal, so EP is exact: five quantities and twelve locals at a family-wise .05
    assert found.ok and found.kinds["york: b[11]"] == "local" and found.num_done == 60
