"""A run that was stopped and gone on with is the run that was not, bit for bit."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import HALF, Runs, another_program, before_a_merge, same

import numpyro_fed as nf
from numpyro_fed import memo
from numpyro_fed.run import checkpoint

pytestmark = pytest.mark.usefixtures("x64")
TOLD = ("bytes_up", "bytes_down", "loss", "start")


def written(runs: Runs, patch: pytest.MonkeyPatch, path: Path, **options: Any) -> tuple[nf.Fit, list[bytes]]:
    """A run, and the file after each of its writes."""
    files: list[bytes] = []
    write = checkpoint.replace_file

    def watched(path: Path, *parts: Any) -> None:
        write(path, *parts)
        files.append(path.read_bytes())

    with patch.context() as patched:
        patched.setattr(checkpoint, "replace_file", watched)
        fit = runs.run(runs.silos, checkpoint=path, checkpoint_every=1, **options)
    return fit, files


def agree(fit: nf.Fit, whole: nf.Fit) -> None:
    same((fit.state.server, fit.state.silos), (whole.state.server, whole.state.silos))
    same({name: fit.history[name] for name in TOLD}, {name: whole.history[name] for name in TOLD})
    assert (fit.records, fit.state.round, fit.reasons) == (whole.records, whole.state.round, whole.reasons)
    assert fit.ledger().equals(whole.ledger())


@before_a_merge
def test_a_run_goes_on_where_it_was(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing changes nothing, and the file in the middle of the rounds is enough."""
    path = tmp_path / "run"
    fit, files = written(runs, monkeypatch, path)
    agree(fit, runs.whole)
    assert len(files) >= 2 * HALF
    path.write_bytes(files[len(files) // 2])
    agree(runs.run(runs.silos, checkpoint=path, checkpoint_every=1), runs.whole)
    again, nothing = written(runs, monkeypatch, path)  # the finished run is read, and nothing done
    agree(again, runs.whole)
    assert nothing == []


@pytest.mark.slow
def test_checkpoints_of_a_longer_run(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the check at the end: at the beginning, in the middle (as in a fresh process) and near the end.

    With ``NUMPYRO_FED_EVERY=1`` from every file that was written, each as in a fresh process.
    """
    path, all_ = tmp_path / "run", bool(os.environ.get("NUMPYRO_FED_EVERY"))
    options = dict(num_rounds=20, check=True)
    whole, files = written(runs, monkeypatch, path, **options)
    assert len(files) >= 20
    middle = len(files) // 2
    for i in range(len(files)) if all_ else (1, middle, len(files) - 2):
        if all_ or i == middle:
            jax.clear_caches()
            memo.forget()
        path.write_bytes(files[i])
        fit = runs.run(runs.silos, checkpoint=path, checkpoint_every=1, **options)
        agree(fit, whole)
        assert fit.verdict.status == whole.verdict.status
        if not isinstance(whole.evidence, str):
            same(fit.evidence.log_target, whole.evidence.log_target)


@pytest.mark.merge
@pytest.mark.xdist_group("EP")
def test_a_check_of_several_rounds_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for other modes have states in their silos: without them steps are others, and so is their number."""
    runs, path, options = Runs("EP"), tmp_path / "run", dict(num_rounds=20, check=True)
    whole, files = written(runs, monkeypatch, path, **options)
    (rounds,) = (record.rounds for record in whole.records if record.phase == "modes")
    assert rounds > 2
    for file in files[-rounds:-1]:  # they are the last of a run
        path.write_bytes(file)
        fit = runs.run(runs.silos, checkpoint=path, checkpoint_every=1, **options)
        agree(fit, whole)
        same(fit.evidence.looks.modes.log_mass, whole.evidence.looks.modes.log_mass)


@another_program
@pytest.mark.parametrize("schedule", ["sequential", nf.schedules.sampled(2)])
def test_on_the_plain_engine_and_with_cohorts(
    runs: Runs, schedule: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, options = tmp_path / "run", dict(schedule=schedule, engine=nf.engines.Loopback())
    whole, files = written(runs, monkeypatch, path, **options)
    for file in (files[1], files[-2]):
        path.write_bytes(file)
        agree(runs.run(runs.silos, checkpoint=path, checkpoint_every=1, **options), whole)


@before_a_merge
def test_what_leaves_is_what_is_counted(runs: Runs) -> None:
    """Round by round, silo by silo, from the shapes and from the bytes that crossed."""
    for fit in (runs.whole, runs.plain):
        sent = fit.ledger().groupby(["round", "direction"], observed=True)["bytes"].sum().unstack(fill_value=0)
        same(sent["up"].to_numpy(), np.asarray(fit.history["bytes_up"]))
        same(sent["down"].to_numpy(), np.asarray(fit.history["bytes_down"]))
    assert set(runs.whole.ledger("york")["silo"]) == {"york"}
