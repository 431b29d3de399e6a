"""Small real data that ship with the package, and loaders for those that do not.

>>> children = six_cities()
>>> children.wheeze.shape
(537, 4)
"""

import csv
import gzip
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Numbers of children by their wheeze at ages 7, 8, 9 and 10, from 0000, 0001, 0010, ... to 1111.
_SIX_CITIES_COUNTS = (
    (237, 10, 15, 4, 16, 2, 7, 3, 24, 3, 3, 2, 6, 2, 5, 11),  # the mother does not smoke
    (118, 6, 8, 2, 11, 1, 6, 4, 7, 3, 3, 1, 4, 2, 4, 7),  # the mother smokes
)
_SIX_CITIES_SEED = 1993
_SIX_CITIES_SILO_A = 300
_RADON_FILE = "radon_mn.csv.gz"


class SixCities(NamedTuple):
    """Wheeze of children in Ohio, one row a child."""

    wheeze: np.ndarray  # (537, 4) int32: 1 when the child wheezed at age 7, 8, 9, 10
    smoke: np.ndarray  # (537,) float32: 1 when the mother smoked
    age: np.ndarray  # (4,) float32: age in years, centred at nine
    silo: np.ndarray  # (537,) str: "A" or "B"


class Radon(NamedTuple):
    """Radon in houses of Minnesota, one row a house."""

    log_radon: np.ndarray  # (919,) float32
    floor: np.ndarray  # (919,) float32: 0 when measured in the basement, 1 on the first floor
    county: np.ndarray  # (919,) int32: place in county_names
    county_names: tuple[str, ...]  # 85 of them
    uranium: np.ndarray  # (919,) float32: log uranium of the county


def six_cities() -> SixCities:
    """The six cities data: 537 children of Ohio, seen yearly from age seven to ten.

    The published table of 32 counts (mother's smoking by the pattern of wheeze) is written out, one row a child. The
    children come in a random order, the same one each time (``numpy.random.default_rng(1993)``); the first 300 are silo
    "A" and the other 237 silo "B". These are the sizes of the random split in Hassan et al. (2023), who do not say
    which child went where.

    Example:
        >>> children = six_cities()
        >>> children.wheeze.sum(axis=0)  # at ages 7, 8, 9, 10
        array([87, 91, 85, 63])
        >>> [int((children.silo == name).sum()) for name in ("A", "B")]
        [300, 237]
        >>> children.age
        array([-2., -1.,  0.,  1.], dtype=float32)

    References:
        Fitzmaurice, G. M. and Laird, N. M. (1993). A likelihood-based method for analysing longitudinal binary
        responses. Biometrika 80(1), 141-151.
    """
    patterns = (np.arange(16)[:, None] >> np.array([3, 2, 1, 0])) & 1  # (16, 4): the binary digits of 0 to 15
    counts = np.array(_SIX_CITIES_COUNTS)
    wheeze = np.repeat(np.concatenate([patterns, patterns]), counts.ravel(), axis=0)
    smoke = np.repeat([0, 1], counts.sum(axis=1))
    num_children = len(smoke)
    order = np.random.default_rng(_SIX_CITIES_SEED).permutation(num_children)
    return SixCities(
        wheeze=wheeze[order].astype(np.int32),
        smoke=smoke[order].astype(np.float32),
        age=np.array([-2, -1, 0, 1], np.float32),
        silo=np.where(np.arange(num_children) < _SIX_CITIES_SILO_A, "A", "B"),
    )


def radon() -> Radon:
    """Radon in 919 houses of the 85 counties of Minnesota, read from ``radon_mn.csv.gz``.

    The file is not shipped. It is looked for in the directory that the environment variable ``NUMPYRO_FED_DATA`` names,
    and is the item ``radon`` of the R package HLMdiag as comma-separated values, compressed with gzip.

    Raises:
        FileNotFoundError: when the variable is not set or the file is not there.

    References:
        Gelman, A. and Hill, J. (2007). Data Analysis Using Regression and Multilevel/Hierarchical Models, chapter 12.
        Cambridge University Press.
    """
    with gzip.open(_find(_RADON_FILE, source="the item 'radon' of the R package HLMdiag"), "rt", newline="") as file:
        houses = list(csv.DictReader(file))
    county = np.array([int(house["county"]) for house in houses], np.int32) - 1
    names = {int(number): house["county.name"] for number, house in zip(county, houses, strict=True)}
    return Radon(
        log_radon=np.array([float(house["log.radon"]) for house in houses], np.float32),
        floor=np.array([float(house["basement"]) for house in houses], np.float32),  # 1 is the first floor, as here
        county=county,
        county_names=tuple(names[number] for number in sorted(names)),
        uranium=np.array([float(house["uranium"]) for house in houses], np.float32),
    )


def _find(name: str, source: str) -> Path:
    """The path of a data file, or an error that says how to get it."""
    directory = os.environ.get("NUMPYRO_FED_DATA")
    path = Path(directory or "", name)
    if not directory or not path.is_file():
        got = f"NUMPYRO_FED_DATA is {directory!r}, where there is no such file" if directory else "it is not set"
        raise FileNotFoundError(
            f"{name} was not found: set the environment variable NUMPYRO_FED_DATA to the directory that holds it "
            f"({got}). The data are public: {source}, as comma-separated values compressed with gzip."
        )
    return path
