"""The data sets are the published ones."""

import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from numpyro_fed.data.datasets import radon, six_cities

DATA = Path(os.environ.get("NUMPYRO_FED_DATA") or "no such directory")


def needs(name: str):
    return pytest.mark.skipif(not (DATA / name).is_file(), reason=f"NUMPYRO_FED_DATA has no {name}")


def as_rows(smoke, wheeze) -> Counter:
    return Counter((int(s), *map(int, w)) for s, w in zip(smoke, wheeze, strict=True))


def test_six_cities_shapes_and_dtypes():
    children = six_cities()
    assert children.wheeze.shape == (537, 4) and children.wheeze.dtype == np.int32
    assert children.smoke.shape == (537,) and children.smoke.dtype == np.float32
    assert children.age.dtype == np.float32
    np.testing.assert_array_equal(children.age, [-2, -1, 0, 1])
    assert Counter(children.silo.tolist()) == {"A": 300, "B": 237}


def test_six_cities_totals():
    children = six_cities()
    assert set(np.unique(children.wheeze)) == {0, 1}
    assert children.wheeze.sum() == 326
    assert Counter(children.smoke.tolist()) == {0.0: 350, 1.0: 187}
    rows = as_rows(children.smoke, children.wheeze)
    assert rows[0, 0, 0, 0, 1] == 10  # wheezed at ten only
    assert rows[1, 1, 0, 0, 0] == 7  # wheezed at seven only


@needs("six_cities.npz")
def test_six_cities_equals_the_published_rows():
    published = np.load(DATA / "six_cities.npz")
    children = six_cities()
    assert as_rows(children.smoke, children.wheeze) == as_rows(published["smoke"], published["y"])


def test_six_cities_is_the_same_every_time():
    first, second = six_cities(), six_cities()
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    first.wheeze[:] = 0  # a caller's copy is the caller's own
    assert six_cities().wheeze.sum() == 326


def test_six_cities_silos_differ_no_more_than_by_chance():
    children = six_cities()
    in_a = children.silo == "A"
    for value in (children.smoke, children.wheeze.mean(axis=1)):
        # Drawn without replacement, the mean of silo A has this standard error.
        # In the table's own order smoking would be 19 of them off.
        standard_error = value.std() * np.sqrt((1 / 300) * (237 / 536))
        assert abs(value[in_a].mean() - value.mean()) < 3 * standard_error


@needs("radon_mn.csv.gz")
def test_radon():
    houses = radon()
    for value in (houses.log_radon, houses.floor, houses.uranium):
        assert value.shape == (919,) and value.dtype == np.float32
    assert houses.county.shape == (919,) and houses.county.dtype == np.int32
    assert len(houses.county_names) == 85 and houses.county_names[0] == "AITKIN"
    np.testing.assert_array_equal(np.unique(houses.county), np.arange(85))
    assert set(np.unique(houses.floor)) == {0, 1}
    # Uranium is measured by county, and radon is lower on the first floor than in the basement.
    assert all(len(np.unique(houses.uranium[houses.county == county])) == 1 for county in range(85))
    assert houses.log_radon[houses.floor == 1].mean() < houses.log_radon[houses.floor == 0].mean()


@pytest.mark.parametrize("directory", [None, "", "empty"])
def test_radon_missing_says_what_to_do(directory, tmp_path, monkeypatch):
    if directory is None:
        monkeypatch.delenv("NUMPYRO_FED_DATA", raising=False)
    else:
        monkeypatch.setenv("NUMPYRO_FED_DATA", str(tmp_path) if directory else "")
    with pytest.raises(FileNotFoundError, match=r"radon_mn\.csv\.gz .* NUMPYRO_FED_DATA .* HLMdiag"):
        radon()
