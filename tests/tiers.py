"""Which instances of a law run each time, and which among the slow tests."""

from collections.abc import Iterable
from typing import Any

import pytest


def tiers(cases: Iterable[Any], *quick: Any, others: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """All cases, as values of a parameter; those that are not ``quick`` are slow tests (or what ``others`` says)."""
    cases = list(cases)
    assert set(quick) <= set(cases), "a quick case is one of them"
    return [case if case in quick else pytest.param(case, marks=others) for case in cases]
