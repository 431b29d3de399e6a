"""What all tests share."""

import os

os.environ.setdefault("MPLBACKEND", "Agg")  # before anything imports matplotlib: no test opens a window

import jax
import pytest


@pytest.fixture
def x64():
    """Float64 for one test; the default, float32, is tested as well."""
    with jax.enable_x64(True):
        yield
