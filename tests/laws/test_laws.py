"""What holds for every method."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import HALF, KEY, Runs, another_program, close, every_method, same
from table import counties

import numpyro_fed as nf
from numpyro_fed.run.warm_start import warm_start

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.filterwarnings("ignore:silo .* was not asked")]
BYTES = ("bytes_up", "bytes_down")


def own_states(runs: Runs, fit: nf.Fit) -> dict:
    return {name: fit.state.silo(name)[0] for name in runs.silos.names}


def in_order(runs: Runs, fit: nf.Fit) -> Any:
    """The server's state with the silos in the order of the table."""
    if not hasattr(fit.posterior, "reordered"):
        return fit.state.server
    return fit.posterior.reordered(fit.state.server, [fit.state.names.index(name) for name in runs.silos.names])


def site(fit: nf.Fit, name: str) -> Any:
    """The factor that the server holds for a silo; None of a method without."""
    factors = fit.posterior.sites(fit.state.server) if hasattr(fit.posterior, "sites") else None
    return None if factors is None else jax.tree.map(lambda leaf: leaf[fit.state.names.index(name)], factors.each)


def agree(fast: nf.Fit, plain: nf.Fit) -> None:
    close(fast.state.server, plain.state.server)
    close(fast.state.silos, plain.state.silos)
    close(fast.history, plain.history)


def test_engines_agree(runs: Runs) -> None:
    """All silos at once in one program, in several buckets if there are no locals, or one by one through bytes."""
    assert len(runs.whole.padded) == (1 if runs.method.model is counties else 2)
    agree(runs.whole, runs.plain)


@another_program
def test_engines_agree_on_a_cohort(runs: Runs) -> None:
    agree(runs.fast_cohort, runs.cohort)


def test_nothing_is_read_outside_of_its_silo(runs: Runs) -> None:
    """Before the first round and in every one; and draws of a silo's locals are made in its room."""
    fit = runs.plain
    same([fit.history[name] for name in BYTES], [runs.whole.history[name] for name in BYTES])
    if runs.method.model is counties:
        assert fit.sample_local(KEY, 3, silo="york")["alpha"].shape == (3, 4)


@another_program
def test_the_order_of_silos_changes_nothing(runs: Runs) -> None:
    close(in_order(runs, runs.whole), in_order(runs, runs.turned))
    close(own_states(runs, runs.whole), own_states(runs, runs.turned))


@pytest.mark.parametrize("runs", every_method("EP", "PVI", "SFVIAvg", "FedPA", "GIPVI"), indirect=True, scope="session")
def test_padding_changes_nothing(runs: Runs) -> None:
    assert runs.padded.padded != runs.plain.padded
    close(runs.plain.state.server, runs.padded.state.server)
    close(runs.plain.history["loss"], runs.padded.history["loss"])


def test_two_halves_are_one_run(runs: Runs) -> None:
    assert runs.second.state.round == runs.whole.state.round == 2 * HALF
    close(runs.second.state.server, runs.whole.state.server)
    close(runs.second.state.silos, runs.whole.state.silos)


def test_an_interrupted_run_is_a_shorter_one(runs: Runs) -> None:
    assert runs.interrupted.state.round == HALF
    same(runs.interrupted.history["loss"], runs.first.history["loss"])
    same(runs.interrupted.state.silos, runs.first.state.silos)
    assert all(np.all(np.isfinite(draws)) for draws in runs.interrupted.sample(KEY, 3).values())


def test_only_the_cohort_moves(runs: Runs) -> None:
    """Nobody else by a bit: neither parameters nor optimiser, nor the site that the server holds."""
    before, after = (own_states(runs, fit) for fit in (runs.whole, runs.cohort))
    for name in ("leeds", "hull"):
        same(before[name], after[name])
        same(site(runs.whole, name), site(runs.cohort, name))
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), runs.whole.state.server, runs.cohort.state.server)
    assert any(jax.tree.leaves(moved))


def test_a_file_keeps_a_fit(runs: Runs, tmp_path: Path) -> None:
    fit = runs.first
    loaded = nf.load(fit.save(tmp_path / "fit"), runs.method)
    same((loaded.state.server, loaded.state.silos), (fit.state.server, fit.state.silos))
    same(loaded.history, fit.history)
    same(loaded.sample(KEY, 3), fit.sample(KEY, 3))
    on = runs.run(runs.silos, HALF, init_state=loaded.state)
    same(on.state.server, runs.second.state.server)


@pytest.fixture(scope="session")
def hubs() -> dict:
    """Fits that others start from, and that start from others, by model."""
    return {}


def hub(hubs: dict, runs: Runs) -> tuple[nf.SFVI, nf.Fit]:
    method = Runs("SFVI" if runs.method.model is counties else "SFVI, no locals").method
    if method not in hubs:
        hubs[method] = method.run(KEY, runs.silos, 1000, progress_bar=False)
    return method, hubs[method]


def mean_and_sd(fit: nf.Fit) -> tuple[np.ndarray, np.ndarray]:
    """Of the globals, unconstrained."""
    found = warm_start(fit.posterior, fit.split, fit.state.server)
    return np.asarray(found.loc), np.asarray(found.unit)


def test_a_fit_of_another_method_is_a_start(runs: Runs, hubs: dict) -> None:
    """The first round begins where the other fit ended, without a search, and its rounds are counted anew."""
    _, start = hub(hubs, runs)
    fit = runs.run(runs.silos, 1, init_state=start)
    mean, sd = mean_and_sd(start)
    assert np.all(np.abs(mean) > 5 * sd), "a fresh start is far away"
    assert np.all(np.abs(mean_and_sd(fit)[0] - mean) < np.abs(mean) / 4)
    assert fit.state.round == 1 and not fit.history["start"].any()


def test_another_method_starts_from_its_fit(runs: Runs, hubs: dict) -> None:
    """What it hands on is the mean of its draws, and the other's first step is taken from there."""
    mean, sd = mean_and_sd(runs.whole)
    keys = jax.random.split(KEY, 400)
    draws = jax.vmap(lambda key: runs.whole.posterior.sample(key, runs.whole.state.server))(keys)
    np.testing.assert_array_less(np.abs(jnp.mean(draws, axis=0) - mean), 4 * sd / 20)  # standard error 1 / 20
    method, _ = hub(hubs, runs)
    fit = method.run(KEY, runs.silos, 1, init_state=runs.whole, progress_bar=False)
    # a step is a fiftieth of a unit: of the fit's sds, or of its own units if it has the same guide
    np.testing.assert_array_less(np.abs(mean_and_sd(fit)[0] - mean), np.maximum(0.1 * sd, 0.021))
