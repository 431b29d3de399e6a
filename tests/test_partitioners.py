"""Pooled data cut into silos: laws of all partitioners, then what each of them promises."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import numpyro_fed as nf
from numpyro_fed.data import partitioners

N, J = 600, 6
Y = np.random.default_rng(0).permutation(np.repeat([0, 1], [420, 180]))

PARTITIONERS: dict[str, Any] = {
    "homogeneous": lambda seed=0: partitioners.homogeneous(N, J, seed=seed),
    "by label": lambda seed=0: partitioners.by_label(Y, J, seed=seed),
    "by label, skewed": lambda seed=0: partitioners.by_label(Y, J, concentration=1e-3, min_rows=5, seed=seed),
    "by quantity": lambda seed=0: partitioners.by_quantity(N, J, seed=seed),
    "by quantity, skewed": lambda seed=0: partitioners.by_quantity(N, J, concentration=1e-3, min_rows=5, seed=seed),
    "inhomogeneous": lambda seed=0: partitioners.inhomogeneous(Y, J, kappa=0.9, beta=0.95, seed=seed),
    "inhomogeneous, code": lambda seed=0: partitioners.inhomogeneous(Y, J, 0.5, 0.5, seed=seed, scheme="code"),
}

every_partitioner = pytest.mark.parametrize("make", PARTITIONERS.values(), ids=PARTITIONERS)


def table(silo: np.ndarray, y: np.ndarray, num_silos: int = J) -> np.ndarray:
    """Rows by silo and class, (num_silos, classes)."""
    return np.array([np.bincount(y[silo == j], minlength=y.max() + 1) for j in range(num_silos)])


# --- laws -------------------------------------------------------------------------------------------------------------


@every_partitioner
def test_every_row_has_a_silo_and_every_silo_a_row(make: Any) -> None:
    silo = make()
    assert silo.shape == (N,) and np.issubdtype(silo.dtype, np.integer)
    assert np.unique(silo).tolist() == list(range(J))


@every_partitioner
def test_the_seed_decides(make: Any) -> None:
    np.testing.assert_array_equal(make(seed=3), make(seed=3))
    assert not np.array_equal(make(seed=3), make(seed=4))


@every_partitioner
def test_split_takes_it(make: Any) -> None:
    rows = np.arange(N, dtype=np.int32)
    silos = nf.split(make(), row=rows, y=Y)
    assert sorted(silos.names) == [str(j) for j in range(J)]
    np.testing.assert_array_equal(np.sort(np.concatenate([silos[name]["row"] for name in silos.names])), rows)
    for name in silos.names:
        np.testing.assert_array_equal(silos[name]["y"], Y[silos[name]["row"]])


@every_partitioner
def test_which_rows_of_a_class_go_where_is_random(make: Any) -> None:
    """Row numbers know nothing of the silo, given the class: their means differ by chance alone."""
    silo = make()
    for label in (0, 1):
        rows = np.flatnonzero(Y == label)
        rank = (np.arange(len(rows)) + 0.5) / len(rows)  # mean 1/2, sd sqrt(1/12)
        for j in range(J):
            own = rank[silo[rows] == j]
            if len(own):
                assert abs(own.mean() - 0.5) < 4.5 * np.sqrt(1 / 12 / len(own))


# --- one by one -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [6, 7, 11, 600])
def test_homogeneous_sizes_differ_by_one_at_most(num_rows: int) -> None:
    assert np.ptp(np.bincount(partitioners.homogeneous(num_rows, J))) <= 1


def test_a_large_concentration_gives_every_silo_the_pooled_shares() -> None:
    """A Dirichlet(a, ..., a) share has variance (1/J)(1 - 1/J) / (J a + 1): nothing beside the rounding, half a row at
    each end of a class's piece."""
    found = table(partitioners.by_label(Y, J, concentration=1e8), Y)
    assert np.max(np.abs(found - np.array([420, 180]) / J)) <= 1
    assert np.max(np.abs(np.bincount(partitioners.by_quantity(N, J, concentration=1e8)) - N / J)) <= 1


def test_a_small_concentration_leaves_a_class_to_one_silo() -> None:
    """At a = 0.001 the largest of six shares is above 0.98 in 98 % of draws, so in more than 80 % of 50."""
    largest = [table(partitioners.by_label(Y, J, concentration=1e-3, seed=s), Y).max(axis=0) for s in range(25)]
    assert np.mean(np.array(largest) >= 0.97 * np.array([420, 180])) > 0.8
    sizes = [np.bincount(partitioners.by_quantity(N, J, concentration=1e-3, seed=s)).max() for s in range(50)]
    assert np.mean(np.array(sizes) >= 0.97 * N) > 0.8


@pytest.mark.parametrize("concentration", [0.3, 2.0])
def test_shares_of_a_class_have_the_moments_of_the_dirichlet(concentration: float) -> None:
    """Mean 1/J and variance (1/J)(1 - 1/J) / (J a + 1), of 400 draws. A share's excess kurtosis is below 2, so their
    variance is known to 4 sqrt((2 + 2) / 400) = 0.4 of itself (less: each draw has J shares)."""
    shares = [table(partitioners.by_label(Y, J, concentration, seed=s), Y) / [420, 180] for s in range(200)]
    variance = (1 / J) * (1 - 1 / J) / (J * concentration + 1)
    assert abs(np.var(shares) / variance - 1) < 0.4
    assert abs(np.mean(np.array(shares)[:, 0]) - 1 / J) < 4 * np.sqrt(variance / 400)


def test_silos_by_quantity_differ_in_size_alone() -> None:
    """The positives of a silo are a sample without replacement: hypergeometric, within 4.5 sds."""
    found = table(partitioners.by_quantity(N, J, seed=1), Y)
    sizes = found.sum(axis=1)
    assert np.ptp(sizes) > 50
    sd = np.sqrt(sizes * 0.3 * 0.7 * (N - sizes) / (N - 1))
    assert np.all(np.abs(found[:, 1] - 0.3 * sizes) <= 4.5 * sd)


@pytest.mark.parametrize("min_rows", [1, 20, 100])
def test_every_silo_has_min_rows(min_rows: int) -> None:
    for concentration in (1e-3, 0.3):
        for silo in (
            partitioners.by_label(Y, J, concentration, min_rows),
            partitioners.by_quantity(N, J, concentration, min_rows),
        ):
            assert np.bincount(silo, minlength=J).min() >= min_rows


def test_labels_may_be_words() -> None:
    words = np.where(Y == 1, "yes", "no")
    np.testing.assert_array_equal(partitioners.by_label(words, J), partitioners.by_label(Y, J))


# --- small and large silos --------------------------------------------------------------------------------------------


def test_split_b() -> None:
    """Bronckers, section 5.2: of ten silos, five hold 0.95 of the data with 0.9 of the positives."""
    y = np.random.default_rng(0).permutation(np.repeat([0, 1], [1500, 500]))
    found = table(partitioners.inhomogeneous(y, 10, kappa=0.9, beta=0.95), y, 10)
    assert found.sum(axis=1).tolist() == [20] * 5 + [380] * 5
    assert found[:, 1].tolist() == [10] * 5 + [90] * 5


@pytest.mark.parametrize("num_silos", [2, 4, 10])
@pytest.mark.parametrize(("kappa", "beta"), [(0.5, 0.5), (0.9, 0.95), (1.0, 0.7), (0.3, 0.5), (0.77, 0.83)])
def test_halves_hold_their_shares_up_to_rounding(num_silos: int, kappa: float, beta: float) -> None:
    found = table(partitioners.inhomogeneous(Y, num_silos, kappa, beta), Y, num_silos)
    half = num_silos // 2
    for share, small, large in zip(
        (beta, kappa), *(_totals(part) for part in (found[:half], found[half:])), strict=True
    ):
        total = small.sum() + large.sum()
        assert abs(large.sum() - share * total) <= 0.5 + 1e-9
        assert np.ptp(small) <= 1 and np.ptp(large) <= 1


def _totals(part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and positives of some silos."""
    return part.sum(axis=1), part[:, 1]


def test_equal_shares_are_a_stratified_split() -> None:
    found = table(partitioners.inhomogeneous(Y, J, kappa=0.5, beta=0.5), Y)
    assert np.all(found == [70, 30])


def test_factors_are_shares_in_other_words() -> None:
    """Size factor f, class balance factor g: a small silo has (1 - f) n / J rows, a share (1 - g) P / n positive."""
    f, g = 0.6, 0.5
    beta = (1 + f) / 2
    found = table(partitioners.inhomogeneous(Y, J, kappa=1 - (1 - g) * (1 - beta), beta=beta), Y)
    assert np.all(found[:3].sum(axis=1) == (1 - f) * N / J)
    assert np.all(found[:3, 1] == (1 - g) * 0.3 * 40)


def test_factors_by_name() -> None:
    """The same size factor and class balance factor, where nothing has to be rounded."""
    f, g = 0.6, 0.5
    shares = partitioners.inhomogeneous(Y, J, kappa=1 - (1 - g) * (1 - (1 + f) / 2), beta=(1 + f) / 2)
    np.testing.assert_array_equal(partitioners.inhomogeneous(Y, J, f, g, scheme="code"), shares)


def test_split_b_of_the_released_code() -> None:
    """Size factor .9, class factor .95, 2,007 rows, 501 positive: 20 rows in a small silo, and floor(20 (1 - .05 501 /
    2007)) = 19 negatives. The large ones have what is left, as evenly as can be."""
    y = np.random.default_rng(0).permutation(np.repeat([0, 1], [1506, 501]))
    found = table(partitioners.inhomogeneous(y, 10, scheme="code"), y, 10)
    assert found.sum(axis=1).tolist() == [20] * 5 + [382, 382, 381, 381, 381]
    assert found[:, 1].tolist() == [1] * 5 + [100, 99, 99, 99, 99]


@pytest.mark.parametrize(("beta", "positive"), [(1.0, 0), (0.0, 12), (-1.0, 24)])
def test_class_balance_factors(beta: float, positive: int) -> None:
    """Of 40 rows in a small silo, none, the pooled share of .3, or twice that are positive."""
    found = table(partitioners.inhomogeneous(Y, J, 0.6, beta, scheme="code"), Y)
    assert np.all(found[:3] == [40 - positive, positive])


@pytest.mark.parametrize(
    ("name", "scheme", "share", "held"),
    [("adult", "text", 0.48, 0.9), ("adult", "code", 0.013, 0.997), ("bank", "code", 0.0083, 0.9965)],
)
def test_split_b_of_real_data(name: str, scheme: str, share: float, held: float) -> None:
    """80 % of the rows in ten silos: the share of positives in small silos, and of all positives in the large ones, to
    half a unit of the last digit that is known of them (48 %, 1.3 %, 99.7 %)."""
    path = Path(os.environ.get("NUMPYRO_FED_DATA", ""), f"{name}.npz")
    if not path.is_file():
        pytest.skip(f"{name}.npz is not in NUMPYRO_FED_DATA")
    with np.load(path) as file:
        y = np.concatenate([file[key] for key in sorted(file.files) if key.startswith("y")]).astype(int)
    y = np.random.default_rng(0).permutation(y)[: int(0.8 * len(y))]
    found = table(partitioners.inhomogeneous(y, 10, kappa=0.9, beta=0.95, scheme=scheme), y, 10)
    small = found[:5].sum(axis=0)
    assert abs(small[1] / small.sum() - share) < (0.005 if scheme == "text" else 0.0005)
    assert abs(1 - small[1] / y.sum() - held) < 0.0005
    assert abs(small.sum() / len(y) - 0.05) < 0.0005


def test_a_silo_may_be_all_positive() -> None:
    """Seven positives among seven rows: sizes and positives are rounded alike."""
    y = np.array([1] * 14 + [0] * 6)
    found = table(partitioners.inhomogeneous(y, 4, kappa=0.5, beta=0.65), y, 4)
    assert found.tolist() == [[0, 4], [0, 3], [3, 4], [3, 3]]


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: partitioners.homogeneous(5, 6), "6 silos of at least 1 row need 6 rows, got 5: take fewer silos"),
        (lambda: partitioners.homogeneous(Y, 6), r"num_rows must be an int .* array of shape \(600,\): pass len\(y\)"),
        (lambda: partitioners.homogeneous(10, 2.0), "num_silos must be an int of at least 1, got 2.0"),
        (lambda: partitioners.homogeneous(10, 0), "num_silos must be an int of at least 1, got 0"),
        (lambda: partitioners.by_label(Y, 6, min_rows=101), "need 606 rows, got 600: .* or a smaller min_rows"),
        (lambda: partitioners.by_label(Y[:, None], 6), r"one label for each row, .* shape \(600, 1\)"),
        (lambda: partitioners.by_label([0.0, np.nan], 2), "NaN, first in row 1: drop these rows"),
        (lambda: partitioners.by_label(Y, 6, concentration=0), "positive number, got 0: concentration=0.3"),
        (lambda: partitioners.by_quantity(9, 3, concentration=np.inf), "positive number, got inf"),
        (lambda: partitioners.inhomogeneous(Y, 5, 0.9, 0.9), "num_silos must be even, got 5"),
        (lambda: partitioners.inhomogeneous(Y + 1, 4, 0.9, 0.9), r"must be 0 or 1, got 1, 2: .*y == 1"),
        (lambda: partitioners.inhomogeneous(Y, 4, scheme="paper"), "scheme must be 'text' or 'code' .*got 'paper'"),
        (
            lambda: partitioners.inhomogeneous(Y, 4, 1.0, 0.9, scheme="code"),
            "size factor .* below 1, got 1.0: kappa=0.9",
        ),
        (
            lambda: partitioners.inhomogeneous(Y, 4, 0.9, 1.1, scheme="code"),
            "class balance factor .* at most 1, got 1.1",
        ),
        (lambda: partitioners.inhomogeneous(Y, 4, 0.999, 0.5, scheme="code"), "leaves no row for a small silo"),
        (
            lambda: partitioners.inhomogeneous(Y, 4, 0.0, -2.0, scheme="code"),
            "asks for 135 positives in each small silo of 150 rows, with 180 .*: take a beta nearer to 0",
        ),
        (lambda: partitioners.inhomogeneous(Y, 4, 1.1, 0.9), "kappa is .* 0 to 1, got 1.1: kappa=0.9"),
        (lambda: partitioners.inhomogeneous(Y, 4, 0.9, 1.0), "beta is .* below 1, got 1.0: beta=0.95"),
        (lambda: partitioners.inhomogeneous(Y, 4, 0.9, 0.3), "beta is .* 0.5 to below 1, got 0.3"),
        (
            lambda: partitioners.inhomogeneous(Y, 10, 0.9, 0.995),
            "leaves 3 of 600 rows for 5 small silos",
        ),
        (
            lambda: partitioners.inhomogeneous(Y, 4, 0.5, 0.9),
            "small silos 90 of 180 positives, and beta=0.9 60 of 600 rows: take a larger kappa or a smaller beta",
        ),
        (
            lambda: partitioners.inhomogeneous(1 - Y, 4, 1.0, 0.6),
            "large silos 420 of 420 positives, and beta=0.6 360 of 600 rows: take a smaller kappa or a larger beta",
        ),
    ],
)
def test_errors_say_what_to_type(call: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()


@pytest.mark.parametrize("seed", [None, 1.0, -1, True])
def test_a_seed_is_an_int(seed: Any) -> None:
    with pytest.raises(ValueError, match="seed must be an int of at least 0"):
        partitioners.homogeneous(10, 2, seed=seed)
