"""compare(): known shifts come out as they went in, and errors name both sides."""

from types import SimpleNamespace

import jax
import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from scipy.stats import norm, wasserstein_distance

from numpyro_fed.judge.compare import compare
from numpyro_fed.judge.joint import _blocks, _cost, _costs, _floor, _solver, _squared
from numpyro_fed.judge.plot import density

matplotlib.use("Agg")

COLUMNS = ["method", "parameter", "mean_shift", "sd_ratio", "w1", "rounds", "bytes_up", "bytes_down", "seconds"]


class FakeFit:
    """What compare asks of a fit: the draws of N(loc, scale) in `mu` and in the two elements of `beta`."""

    seconds, num_rounds = 1.5, 3

    def __init__(self, loc, scale):
        self.loc, self.scale = loc, scale
        self.history = {"loss": np.zeros(3), "bytes_up": np.array([100, 100, 50]), "bytes_down": np.array([8, 8, 4])}

    def sample(self, rng_key, num_samples):
        draws = self.loc + self.scale * jax.random.normal(rng_key, (num_samples, 3))
        return {"mu": draws[:, 0], "beta": draws[:, 1:]}


def quantiles(loc, scale, num=4000):
    """Draws without Monte Carlo error: the normal's own quantiles."""
    return norm.ppf((np.arange(num) + 0.5) / num, loc, scale)


@pytest.fixture
def close_figures():
    yield
    plt.close("all")


def test_known_shift_and_ratio():
    cmp = compare({"off": {"mu": quantiles(10.5, 2)}}, {"mu": quantiles(10, 1)})
    assert list(cmp.table.columns) == COLUMNS
    (row,) = cmp.table.to_dict("records")
    assert (row["method"], row["parameter"]) == ("off", "mu")
    assert row["mean_shift"] == pytest.approx(0.5, abs=2e-3)  # the quantiles' own sd is 1 - 4e-4
    assert row["sd_ratio"] == pytest.approx(2, abs=1e-6)
    # quantiles lie |0.5 + z| apart: the mean of a folded normal
    folded = np.sqrt(2 / np.pi) * np.exp(-0.125) + 0.5 * (1 - 2 * norm.cdf(-0.5))
    assert row["w1"] == pytest.approx(folded, abs=3e-3)
    assert all(np.isnan(row[name]) for name in ("rounds", "bytes_up", "bytes_down", "seconds"))


@pytest.mark.parametrize("num", [50, 64, 1000])
def test_w1_is_scipys(num):
    rng = np.random.default_rng(num)
    x, y = rng.gamma(2, size=num), rng.normal(size=1000)
    expected = wasserstein_distance(x, y) / y.std(ddof=1)
    assert compare({"x": {"a": x}}, {"a": y}).table["w1"][0] == pytest.approx(expected, abs=1e-12)


def test_fits_are_sampled_and_their_costs_summed():
    reference = FakeFit(0.0, 1.0)
    cmp = compare({"a": FakeFit(0.0, 1.0), "b": FakeFit(1.0, 0.5)}, reference, rng_key=jax.random.key(1))
    assert list(cmp.table["parameter"]) == ["mu", "beta[0]", "beta[1]"] * 2
    a, b = (cmp.table[cmp.table["method"] == name] for name in "ab")
    # both means have standard error 1 / sqrt(4000) of a reference sd or less: five of their difference's
    bound = 5 * np.sqrt(2 / 4000)
    assert np.all(np.abs(a["mean_shift"]) < bound) and np.all(a["mean_shift"] != 0)
    assert np.all(np.abs(b["mean_shift"] - 1) < bound)
    assert np.all(np.abs(b["sd_ratio"] - 0.5) < bound)
    assert set(a["rounds"]) == {3} and set(a["bytes_up"]) == {250} and set(a["bytes_down"]) == {20}
    assert set(a["seconds"]) == {1.5}
    assert np.allclose(cmp.monte_carlo_error, 4000**-0.5)


def test_one_fit_needs_no_label():
    assert set(compare(FakeFit(0.0, 1.0), FakeFit(0.0, 1.0)).table["method"]) == {"fit"}
    assert set(compare({"mu": quantiles(0, 1)}, {"mu": quantiles(0, 1)}).table["method"]) == {"fit"}
    assert set(compare({"mu": pd.Series(quantiles(0, 1))}, {"mu": quantiles(0, 1)}).table["method"]) == {"fit"}


def test_constants_are_left_out_and_matrices_indexed():
    rng = np.random.default_rng(0)
    r = rng.uniform(-0.9, 0.9, 200).astype(np.float32)
    rows = [np.ones_like(r), np.zeros_like(r), r, np.sqrt(1 - r**2)]
    draws = {"L": np.stack(rows, axis=1).reshape(200, 2, 2)}
    assert list(compare({"same": draws}, draws).table["parameter"]) == ["L[1, 0]", "L[1, 1]"]
    with pytest.raises(ValueError, match="L are constant"):
        compare({"same": {"L": np.ones(10)}}, {"L": np.ones(10)})


class FakeMCMC:
    """What compare asks of a NumPyro MCMC object: two chains, slow in mu, with a local site."""

    def get_samples(self, group_by_chain=False):
        rng = np.random.default_rng(0)
        mu = np.zeros((2, 1000))
        for t in range(1, 1000):
            mu[:, t] = 0.8 * mu[:, t - 1] + 0.6 * rng.normal(size=2)
        draws = {"mu": mu, "beta": rng.normal(size=(2, 1000, 2)), "local": rng.normal(size=(2, 1000, 7))}
        return draws if group_by_chain else {name: x.reshape(2000, *x.shape[2:]) for name, x in draws.items()}


def test_chains_with_local_sites_as_reference():
    cmp = compare({"fit": FakeFit(0.0, 1.0)}, FakeMCMC())
    assert list(cmp.table["parameter"]) == ["mu", "beta[0]", "beta[1]"]
    # an autoregression with coefficient 0.8 has (1 + 0.8) / (1 - 0.8) = 9 times the variance of independent draws
    assert cmp.monte_carlo_error["mu"] == pytest.approx(3 / np.sqrt(2000), rel=0.2)
    assert np.allclose(cmp.monte_carlo_error[1:], 1 / np.sqrt(2000), rtol=0.2)
    assert "Monte Carlo error of the reference's means: up to 0.0" in repr(cmp) and "(mu, n_eff" in repr(cmp)
    draws = FakeMCMC().get_samples()
    assert list(compare({"fit": FakeFit(0.0, 1.0)}, draws).table["parameter"]) == list(cmp.table["parameter"])


def test_shown():
    cmp = compare(
        {"a<b": FakeFit(0.0, 1.0), "draws": {"mu": quantiles(0, 1), "beta": np.zeros((2, 2))}}, FakeFit(0.0, 1.0)
    )
    assert "a<b: largest shift" in repr(cmp) and "sd ratios" in repr(cmp)
    assert "a&lt;b" in cmp._repr_html_() and "<b:" not in cmp._repr_html_()
    broken = compare({"x": {"mu": np.full(9, np.nan)}}, {"mu": quantiles(0, 1)})
    assert "draws of mu are not finite" in repr(broken)
    assert "nan" in repr(broken)


ERRORS = {
    "no common site": (
        {"SFVI": {"b": np.arange(9.0)}},
        {"a": np.arange(9.0)},
        ValueError,
        "reference has a; SFVI has b",
    ),
    "shape": (
        {"SFVI": {"a": np.zeros((9, 3))}},
        {"a": np.zeros((9, 2))},
        ValueError,
        r"reference \(2,\), SFVI \(3,\)",
    ),
    "one site under two names": (
        {"SFVI": {"mu": np.arange(9.0), "omega": np.arange(9.0)}},
        {"mu": np.arange(9.0), "Omega": np.arange(9.0)},
        ValueError,
        "reference has mu, Omega; SFVI has mu, omega",
    ),
    "a fit's site that the reference lacks": (
        {"SFVI": FakeFit(0.0, 1.0)},
        {"mu": np.arange(9.0)},
        ValueError,
        r"'beta' is missing: reference has mu; SFVI has mu, beta.*sites=\[",
    ),
    "methods disagree": (
        {"A": {"mu": np.arange(9.0), "nu": np.arange(9.0)}, "B": {"mu": np.arange(9.0)}},
        {"mu": np.arange(9.0), "nu": np.arange(9.0)},
        ValueError,
        "'nu' is missing.*B has mu",
    ),
    "not a fit": ({"A": SimpleNamespace()}, {"mu": np.arange(9.0)}, (TypeError, ValueError), "A"),
    "empty": ({}, {"mu": np.arange(9.0)}, ValueError, "empty"),
    "one draw": ({"A": {"mu": np.zeros(1)}}, {"mu": np.arange(9.0)}, ValueError, "A: site 'mu' has 1 draws"),
    "label": ({"reference": FakeFit(0.0, 1.0)}, FakeFit(0.0, 1.0), ValueError, "labelled 'reference'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    fits, reference, kind, message = ERRORS[name]
    with pytest.raises(kind, match=message):
        compare(fits, reference)


def test_sites_can_be_chosen():
    cmp = compare({"SFVI": FakeFit(0.0, 1.0)}, {"mu": quantiles(0, 1)}, sites=["mu"])
    assert list(cmp.table["parameter"]) == ["mu"]
    with pytest.raises(TypeError, match=r"pass jax.random.key\(0\)"):
        compare({"SFVI": FakeFit(0.0, 1.0)}, FakeFit(0.0, 1.0), rng_key=0)


# --- all parameters together ------------------------------------------------------------------------------------------


def divergence(mean, sds):
    """The Sinkhorn divergence of N(mean, diag(sds²)) and N(0, I) at the epsilon of `_cost`.

    Janati, Muzellec, Peyré and Cuturi (2020), Entropic optimal transport between unbalanced Gaussian measures has a
    closed form, eq. 9, with epsilon = 2 sigma²; a sum over dimensions, for both are products.
    """
    sigma2 = max(0.5, 0.1 * len(sds)) / 2

    def cost(a, b):
        root = np.sqrt(4 * a**2 * b**2 + sigma2**2)
        return a**2 + b**2 - root + sigma2 * np.log(root + sigma2)

    return np.sum(np.square(mean)) + np.sum(cost(sds, 1) - (cost(sds, sds) + cost(1, 1)) / 2)


NORMALS = {
    "shift and sds": ([0.6, 0.0], [0.5, 1.5]),
    "point": ([0.0, 1.0], [1e-9, 1e-9]),
    "narrow": ([0.0, 0.0], [0.5, 0.5]),
    "same": ([0.0, 0.0], [1.0, 1.0]),
    "far": ([300.0, 400.0], [1.0, 1.0]),
}


@pytest.mark.parametrize("name", NORMALS)
def test_joint_distance_of_normals(name):
    """Five independent estimates, whose own spread is the tolerance, against the closed form."""
    mean, sds = (np.array(x) for x in NORMALS[name])
    found = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        reference = _blocks(rng.normal(size=(2000, 2)), 8, 250)
        ours = _blocks(mean + sds * rng.normal(size=(1000, 2)), 4, 250)
        found.append(_squared(ours, reference, _costs(reference)))
    expected = divergence(mean, sds)
    assert abs(np.mean(found) - expected) < 5 * np.std(found, ddof=1) / np.sqrt(5)
    assert np.std(found) < 0.1 * max(expected, 0.1)  # or the line above would say nothing
    wasserstein = np.hypot(np.linalg.norm(mean), np.linalg.norm(sds - 1))
    if name != "point":  # whose own distance is seen as 0.83 of a reference sd in each dimension
        assert np.sqrt(expected) == pytest.approx(wasserstein, rel=0.02)


def test_cost_is_exact_transport_where_that_is_known():
    """Far-apart pairs of points: epsilon does not matter, and float32 loses nothing to the means."""
    points = 1000.0 * np.arange(20.0)[:, None] * np.ones((1, 3))
    moved = points[::-1] + np.array([1e4, 0.0, 0.5])
    assert _cost(points, moved) == pytest.approx(1e8 + 0.25 + 0.5 * np.log(20), rel=1e-9)


def sites(x):
    return {"a": x[:, 0], "b": x[:, 1:]}


def test_joint_distance_sees_lost_correlations_and_no_units():
    rng = np.random.default_rng(0)
    r = 0.95
    root = np.linalg.cholesky(np.array([[1, r, 0], [r, 1, 0], [0, 0, 1]]))
    reference, right = rng.normal(size=(4000, 3)) @ root.T, rng.normal(size=(4000, 3)) @ root.T
    apart = rng.normal(size=(4000, 3))  # its marginals are right
    cmp = compare({"right": sites(right), "apart": sites(apart)}, sites(reference))
    assert list(cmp.joint.columns) == ["method", "distance", "floor", "num_draws"]
    assert np.all(cmp.table["w1"] < 0.08) and set(cmp.joint["num_draws"]) == {1000}
    right_, apart_ = cmp.joint.to_dict("records")
    assert right_["distance"] < 2 * right_["floor"] < 0.3
    # whitened, the independent ones have the variances 1 / (1 + r), 1 / (1 - r) and 1
    expected = np.sqrt(divergence(np.zeros(3), np.array([1 + r, 1 - r, 1]) ** -0.5))
    assert apart_["distance"] == pytest.approx(expected, rel=0.05)

    mix, offset = rng.normal(size=(3, 3)) * [[1e-3], [1], [1e3]], np.array([1, 0, -5])
    mixed = lambda x: sites(x @ mix.T + offset)
    again = compare({"right": mixed(right), "apart": mixed(apart)}, mixed(reference)).joint
    np.testing.assert_allclose(again["distance"] ** 2, cmp.joint["distance"] ** 2, atol=2e-3)
    np.testing.assert_allclose(again["floor"], cmp.joint["floor"], rtol=1e-2)


def test_narrow_draws_are_not_nearer_than_the_floor():
    """With a set's transport to itself in the divergence they are, in 50 dimensions."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(3, 2000, 50))
    table = compare({"narrow": {"x": 0.7 * draws[1]}, "right": {"x": draws[2]}}, {"x": draws[0]}).joint
    assert table["distance"][0] > 3 * table["floor"][0] and table["distance"][1] < 2 * table["floor"][1]


def test_floor_is_what_independent_draws_have():
    """The root mean square of the estimate where both are the same normal; slow chains raise the floor."""
    rng = np.random.default_rng(0)
    null, floors = [], []
    for _ in range(12):
        blocks = _blocks(rng.normal(size=(400, 3)), 8, 50)
        costs = _costs(blocks)
        floors.append(_floor(costs) ** 4)
        null.append(_squared(_blocks(rng.normal(size=(200, 3)), 4, 50), blocks, costs))
    x = np.zeros((4000, 3))
    for t in range(1, 4000):
        x[t] = 0.98 * x[t - 1] + np.sqrt(1 - 0.98**2) * rng.normal(size=3)  # a tenth of x is 4 effective draws
    slow = _floor(_costs(_blocks(x, 8, 50)))
    assert abs(np.mean(null)) < 4 * np.std(null) / np.sqrt(12)
    # the reference's halves are half of it: a little farther from one another than a fit from all of it
    assert 0.7 < (np.mean(floors) / np.mean(np.square(null))) ** 0.25 < 1.7
    assert slow > 1.5 * np.mean(floors) ** 0.25


def test_joint_distance_of_odd_draws():
    rng = np.random.default_rng(0)
    simplex = lambda num: {"w": rng.dirichlet(np.ones(4), num).astype(np.float32), "one": np.ones(num)}
    mixed = simplex(200) | {"one": np.ones(100)}
    fits = {
        "right": simplex(2000),
        "point": {"w": np.full((1000, 4), 0.25, np.float32), "one": np.ones(1000)},
        "few": simplex(30),
        "broken": {"w": np.full((200, 4), np.nan), "one": np.ones(200)},
        "<mixed>": mixed,
    }
    cmp = compare(fits, simplex(2000))
    right, point, *without = cmp.joint.to_dict("records")
    assert right["distance"] < 2 * right["floor"] and right["num_draws"] == 1000
    assert 0.8 * np.sqrt(3) * 0.83 < point["distance"] < np.sqrt(3)  # three directions: the fourth is a sum
    # `one` is constant and left out, so the last has as many draws as it needs
    assert [np.isnan(row["distance"]) for row in without] == [True, True, False]
    for shown in (
        "few: no joint distance: it has 30 draws, at least 50",
        "broken: no joint distance: it has draws that",
    ):
        assert shown in repr(cmp) and shown in cmp._repr_html_()
    assert "floor" in repr(cmp) and "no finding" in cmp._repr_html_() and "<mixed>" not in cmp._repr_html_()

    uneven = {"a": rng.normal(size=300), "b": rng.normal(size=200)}
    assert "x: no joint distance: it has sites with different" in repr(compare({"x": uneven}, sites_of(rng, 300)))
    assert "no joint distance: the reference has 60 draws" in repr(
        compare({"x": sites_of(rng, 300)}, sites_of(rng, 60))
    )


def sites_of(rng, num):
    return {"a": rng.normal(size=num), "b": rng.normal(size=num)}


def test_joint_distance_with_more_parameters_than_draws_tell():
    rng = np.random.default_rng(0)
    draws = {"x": rng.normal(size=(400, 60))}
    cmp = compare({"moved": {"x": rng.normal(size=(400, 60)) + np.eye(60)[0]}}, draws)
    assert "in sds of single parameters: 400 effective reference draws are too few" in repr(cmp)
    assert cmp.joint["distance"][0] == pytest.approx(1, abs=0.3)


def test_joint_distance_is_found_when_asked_for_by_one_program():
    _solver.cache_clear()
    cmp = compare({"a": FakeFit(0.0, 1.0), "b": FakeFit(1.0, 1.0)}, FakeFit(0.0, 1.0), joint=False)
    assert "joint" not in repr(cmp) and "joint" not in cmp._repr_html_() and _solver.cache_info().currsize == 0
    assert cmp.joint["distance"][1] == pytest.approx(np.sqrt(3), rel=0.05)  # a sd in each of three parameters
    assert _solver()._cache_size() == 1


# --- plots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num, visible", [(1, 1), (5, 5), (16, 16), (40, 16)])
def test_one_panel_a_parameter(num, visible, close_figures):
    rng = np.random.default_rng(0)
    draws = {"w": rng.normal(size=(100, num))}
    moved = {"w": draws["w"] + (np.arange(num) >= num - 16)}  # in all or the last sixteen
    shown = compare({"moved": moved, "same": draws}, draws).plot()
    figure = shown[0].figure
    assert len(shown) == visible
    assert [ax.get_title() for ax in shown] == [f"w[{i}]" for i in range(num)][-visible:]
    assert len(figure.legends) == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["reference", "moved", "same"]
    figure.canvas.draw()


def test_parameters_chosen_by_name_or_site(close_figures):
    cmp = compare({"fit": FakeFit(0.0, 1.0)}, FakeFit(0.0, 1.0))
    titles = lambda parameters: [ax.get_title() for ax in cmp.plot(parameters)]
    assert titles("beta") == ["beta[0]", "beta[1]"]
    assert titles(["beta[1]", "mu"]) == ["beta[1]", "mu"]
    with pytest.raises(ValueError, match="'gamma'; the parameters are mu, beta"):
        cmp.plot("gamma")


def test_methods_far_away_or_broken_leave_the_panel_readable(close_figures):
    reference = {"mu": quantiles(0, 1)}
    fits = {"far": {"mu": quantiles(1000, 1)}, "thin": {"mu": quantiles(0, 1e-9)}, "broken": {"mu": np.full(9, np.nan)}}
    (ax,) = compare(fits, reference).plot()
    low, high = ax.get_xlim()
    assert -5 < low < -3 and 3 < high < 5
    assert ax.get_ylim()[1] < 3 * norm.pdf(0)
    assert [text.get_text() for text in ax.texts] == ["1e+03 sd ▸"]


def test_density_of_a_normal_and_of_a_half_normal():
    grid = np.linspace(-4, 4, 401)
    x = quantiles(0, 1)
    # Silverman's bandwidth at n = 4000 is 0.2: it widens a unit normal to sqrt(1.04)
    assert np.allclose(density(x, grid), norm.pdf(grid, scale=np.sqrt(1.04)), atol=3e-3)
    half = density(np.abs(x), grid, edges=(0.0,))
    assert np.all(half[grid < 0] == 0)
    assert np.trapezoid(half[grid >= 0], grid[grid >= 0]) == pytest.approx(1, abs=2e-3)
    assert half[200] == pytest.approx(2 * norm.pdf(0), rel=0.05)  # not halved, as without reflection
