"""What holds for every method."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import HALF, KEY, Runs, close, same
from table import counties

import numpyro_fed as nf
from numpyro_fed.run.warm_start import warm_start

pytestmark = [pytest.mark.usefixtures("x64"), pytest.mark.filterwarnings("ignore:silo .* was not asked")]
BYTES = ("bytes_up", "bytes_down")


def own_states(runs: Runs, fit: nf.Fit) -> dict:
    return {name: fit.state.silo(name)[0] for name in runs.silos.names}


def sites_apart(runs: Runs, fit: nf.Fit) -> tuple:
    """The server's state without what it holds for each silo, and that by name."""
    server, names = fit.state.server, fit.state.names
    if not runs.row.sites:
        return server, {}
    held, own = (server.sites.each, server.visits, server.moving), {}
    for j, name in enumerate(names):
        own[name] = jax.tree.map(lambda leaf, j=j: leaf[j], held)
    return server._replace(sites=server.sites._replace(each=()), visits=(), moving=()), own


def test_engines_agree(runs: Runs) -> None:
    """All silos at once in one program, or one by one through bytes; with everyone, and with a cohort."""
    assert len(runs.whole.padded) > 1, "with several buckets"
    for fast, plain in ((runs.whole, runs.plain), (runs.cohort, runs.plain_cohort)):
        close(fast.state.server, plain.state.server)
        close(fast.state.silos, plain.state.silos)
        close(fast.history, plain.history)


def test_nothing_is_read_outside_of_its_silo(runs: Runs) -> None:
    """Before the first round and in every one; and draws of a silo's locals are made in its room."""
    fit = runs.plain
    same([fit.history[name] for name in BYTES], [runs.whole.history[name] for name in BYTES])
    if runs.method.model is counties:
        assert fit.sample_local(KEY, 3, silo="york")["alpha"].shape == (3, 4)


def test_the_order_of_silos_changes_nothing(runs: Runs) -> None:
    (one, held), (other, held_other) = (sites_apart(runs, fit) for fit in (runs.whole, runs.turned))
    close(one, other)
    close(held, held_other)
    close(own_states(runs, runs.whole), own_states(runs, runs.turned))


def test_padding_changes_nothing(runs: Runs) -> None:
    assert len(runs.padded.padded) == 1 < len(runs.plain.padded)
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
    _, held = sites_apart(runs, runs.whole)
    _, held_after = sites_apart(runs, runs.cohort)
    for name in ("leeds", "hull"):
        same(before[name], after[name])
        if runs.row.sites:
            same(held[name][0], held_after[name][0])
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
        hubs[method] = method.run(KEY, runs.silos, 500, progress_bar=False)
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
    assert np.all(np.abs(mean_and_sd(fit)[0] - mean) < sd)
    assert fit.state.round == 1 and not fit.history["start"].any()


def test_another_method_starts_from_its_fit(runs: Runs, hubs: dict) -> None:
    """What it hands on is the mean of its draws; steps of the other method are a fiftieth of its sds."""
    mean, sd = mean_and_sd(runs.whole)
    keys = jax.random.split(KEY, 400)
    draws = jax.vmap(lambda key: runs.whole.posterior.sample(key, runs.whole.state.server))(keys)
    np.testing.assert_array_less(np.abs(jnp.mean(draws, axis=0) - mean), 4 * sd / 20)  # standard error 1 / 20
    method, _ = hub(hubs, runs)
    fit = method.run(KEY, runs.silos, 1, init_state=runs.whole, progress_bar=False)
    np.testing.assert_array_less(np.abs(mean_and_sd(fit)[0] - mean), 0.1 * sd)
