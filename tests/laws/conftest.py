"""Each method's runs, shared by all laws: its tests stay in one process."""

import pytest
from runs import Runs
from table import METHODS


@pytest.fixture(scope="session", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in METHODS])
def runs(request: pytest.FixtureRequest) -> Runs:
    return Runs(request.param)
