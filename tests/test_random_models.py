"""Models at random: the partition is right or asks, the split is NumPyro's density, padding and order change nothing.

The same programs every time: fifty small ones, and among the slow tests fifty of any size. More of them:
``make random-models N=1000``.
"""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, seed, settings
from random_models.description import Program
from random_models.drawing import drawn, programs
from random_models.judging import DISCRETE, judge
from random_models.verdicts import METHODS, STATUSES, conclude
from random_models.writing import write

SERIES = settings(max_examples=10, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@cache
def small() -> list[Program]:
    """The fifty shortest of 120; few with params, whose starts take long to find."""
    found = sorted(drawn(120), key=lambda program: len(write(program).source))[:50]
    return [replace(program, param=program.param and i % 5 == 0) for i, program in enumerate(found)]


def law(program: Program) -> None:
    found = judge(program)
    right = found.kind in ("right", "asked") or (found.kind == "refused" and found.why in (program.flaw, DISCRETE))
    assert right, f"{found.kind}: {found.why}\n{write(program)}"


@pytest.mark.parametrize("part", range(5))
def test_small_models(part: int, x64: None) -> None:
    for program in small()[part::5]:
        law(program)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(5))
def test_models_of_any_size(start: int, x64: None) -> None:
    """Ten programs; one that fails is made as small as it goes and shown as text to paste and run."""
    seed(start)(SERIES(given(programs())(law)))()


@pytest.mark.slow
@pytest.mark.parametrize("method", [pytest.param(one, marks=[pytest.mark.merge] * (one == "EP")) for one in METHODS])
def test_runs_end_with_a_verdict(method: str) -> None:
    for program in [one for one in small() if not one.flaw][:50:10]:
        found = conclude(program, method)
        assert found.kind in STATUSES, f"{found.kind}: {found.why}\n{write(program)}"
