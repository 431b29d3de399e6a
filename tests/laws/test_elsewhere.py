"""Silos elsewhere: what is said of a run in one process holds of one over bytes."""

from pathlib import Path

import numpy as np
import pytest
from elsewhere import elsewhere
from runs import COHORT, Runs, another_program, close, every_method, same

import numpyro_fed as nf

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.filterwarnings("ignore:silo .* was not asked")]


# a method of each kind: with locals and sites, with locals and gradients, with averages
some = pytest.mark.parametrize(
    "runs",
    [one for one in every_method("EP", "SFVI", "FedAvg", "SEP") if one.values[0] in ("EP", "SFVI", "FedAvg", "SEP")],
    indirect=True,
    scope="session",
)


def agree(there: nf.Fit, here: nf.Fit) -> None:
    """Server states and every column of the history, bytes among them; padding differs, and with it rounding."""
    close(there.state.server, here.state.server, 1e-6, 1e-7)
    for name, rows in here.history.items():
        close(there.history[name], rows, 1e-6, 1e-7)


@another_program
def test_elsewhere_is_here(runs: Runs, tmp_path: Path) -> None:
    """And the bytes that are counted are those that were sent."""
    silos = elsewhere(runs.method, runs.silos, tmp_path)
    there = runs.run(silos)
    agree(there, runs.whole)
    told = there.ledger().groupby("direction")["bytes"].sum()
    assert told["up"] == there.history["bytes_up"].sum()


@some
def test_a_new_process_for_every_request(runs: Runs, tmp_path: Path) -> None:
    """Bit for bit the same: all that a silo needs is in its folder."""
    first = runs.run(elsewhere(runs.method, runs.silos, tmp_path / "one"))
    again = runs.run(elsewhere(runs.method, runs.silos, tmp_path / "other", fresh=True))
    same(first.state.server, again.state.server)
    for name, rows in first.history.items():
        np.testing.assert_array_equal(rows, again.history[name])


@some
def test_cohorts_elsewhere(runs: Runs, tmp_path: Path) -> None:
    there = runs.run(elsewhere(runs.method, runs.silos, tmp_path), 3, schedule=COHORT)
    here = runs.run(runs.silos, 3, schedule=COHORT)
    agree(there, here)
