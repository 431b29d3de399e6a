"""What all tests share."""

import jax
import pytest

import numpyro_fed as nf
from numpyro_fed.data import stack

# Tests that share nothing: any worker may take one. Those of other files stay together, and share compiled programs.
FREE = (
    "test_split_model",
    "test_partition",
    "test_survey",
    "test_enumeration",
    "test_bad_inputs",
    "test_random_models",
    "test_docs",
    "test_notebooks",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("merge"):
            item.add_marker(pytest.mark.slow)
        if item.path.stem not in FREE and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


# The check at the end of a run compiles a program of its own; tests that are about it ask for it.
assert nf.Method.run.__kwdefaults__ is not None
nf.Method.run.__kwdefaults__["check"] = False

# Silos of tests have few rows, which would all be of one size; what has several sizes is to be tested, too.
LITTLE_ROWS, stack.LITTLE_ROWS = stack.LITTLE_ROWS, 0


@pytest.fixture
def x64():
    """Float64 for one test; the default, float32, is tested as well."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict_ranks():
    """Silent broadcasting raises: for tests of our own algebra, NumPyro's code does not survive it."""
    with jax.numpy_rank_promotion("raise"):
        yield
