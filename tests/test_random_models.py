"""Models at random: the partition is right or asks, the split is NumPyro's density, padding and order change nothing.

The same programs every time. More of them: ``make random-models N=1000``.
"""

import pytest
from hypothesis import HealthCheck, given, seed, settings
from random_models.description import Program
from random_models.drawing import programs
from random_models.judging import DISCRETE, judge
from random_models.writing import write
from tiers import tiers

SERIES = settings(max_examples=10, database=None, deadline=None, suppress_health_check=list(HealthCheck))


def law(program: Program) -> None:
    found = judge(program)
    right = found.kind in ("right", "asked") or (found.kind == "refused" and found.why in (program.flaw, DISCRETE))
    assert right, f"{found.kind}: {found.why}\n{write(program)}"


@pytest.mark.parametrize("start", tiers(range(10), *range(5)))
def test_random_models(start: int, x64: None) -> None:
    """Ten programs; one that fails is made as small as it goes and shown as text to paste and run."""
    seed(start)(SERIES(given(programs())(law)))()
