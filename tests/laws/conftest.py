"""Each method's runs, shared by all laws: its tests stay in one process."""

import pytest
from runs import Runs, every_method


@pytest.fixture(scope="session", params=every_method())
def runs(request: pytest.FixtureRequest) -> Runs:
    return Runs(request.param)
