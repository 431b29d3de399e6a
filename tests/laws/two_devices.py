"""Laws of the engine over devices. They need two, so tests/test_sharded.py runs them in a process that has them."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from runs import KEY, close, same
from table import METHODS, silos_for
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed import ahead
from numpyro_fed.algorithm import Broadcast, FederatedAlgorithm
from numpyro_fed.data.axis import Axis
from numpyro_fed.data.padding import call_spec
from numpyro_fed.data.stack import Bucket, Stack
from numpyro_fed.engines import vmap
from numpyro_fed.run import checkpoint

Sharded, Vmap = nf.engines.Sharded, nf.engines.Vmap
ROWS = 37  # of the longest silo: a number that is in no message
pytestmark = pytest.mark.filterwarnings("ignore:silo .* was not asked")


def test_two_devices() -> None:
    assert len(jax.devices()) == len(Sharded().devices) == 2


# --- the programs -----------------------------------------------------------------------------------------------------


def sums(num_silos: int) -> FederatedAlgorithm:
    """Everything that an engine carries: a part of the broadcast for each silo, a state, numbers drawn, a cohort."""

    def silo_step(key: Any, sent: Broadcast, state: Any, data: Any) -> tuple[Any, Any]:
        x = jnp.sum(jnp.where(data.mask["rows"], data.args[0], 0.0))
        message = sent.common + 0.1 * sent.each + 0.5 * state + 0.1 * x + jax.random.normal(key)
        return message, state + jnp.stack([1.0, 0.0]) + 0.1 * message

    def server_step(key: Any, server: Any, heard: tuple) -> tuple[Any, dict]:
        mean, messages, index = heard
        return server.at[index].set(0.5 * messages + 0.1 * mean), {"loss": mean[0]}

    return FederatedAlgorithm(
        init=lambda key: jnp.zeros((num_silos, 2)),
        init_silo=lambda key, sent, data: jax.random.normal(key, (2,)) + sent.each,
        broadcast=lambda key, server: Broadcast(jnp.mean(server, axis=0), server),
        silo_step=silo_step,
        aggregate=lambda messages, cohort: (jnp.mean(messages, axis=0), messages, jnp.asarray(cohort.index)),
        server_step=server_step,
    )


def stack_of(num_silos: int, lengths: tuple[int, ...]) -> Stack:
    """Silos of these lengths in turn, a bucket for each length: their order is not that of the buckets."""
    size = {f"silo {j}": lengths[j % len(lengths)] for j in range(num_silos)}
    draws = np.random.default_rng(0)
    silos = nf.Silos({name: dict(x=draws.normal(size=n).astype("f")) for name, n in size.items()})
    axes = (Axis("rows", ("x",), (), size),)
    buckets = [Bucket(tuple(name for name in size if size[name] == n), {"rows": n}) for n in lengths]
    return Stack(silos.names, tuple(buckets), call_spec(silos, axes), axes, silos, None)


def after(engine: Any, num_silos: int, lengths: tuple[int, ...], cohort: int | None) -> tuple[Any, Stack]:
    """Two chunks of rounds."""
    stack, algorithm = stack_of(num_silos, lengths), sums(num_silos)
    draws = np.random.default_rng(1)
    who = [draws.choice(num_silos, cohort, replace=False).astype(np.int32) for _ in range(5)] if cohort else None
    server, states = engine.start(algorithm, KEY, stack)
    for first, count in ((0, 3), (3, 2)):
        chosen = None if who is None else np.stack(who[first : first + count])
        server, states, info = engine.rounds(algorithm, KEY, stack, server, states, first, chosen, count)
    return (server, states, info), stack


CROSSES = re.compile(r"= (\S.*?) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def crossing(patch: pytest.MonkeyPatch, run: Any) -> list[list[tuple[str, str]]]:
    """Of each program of rounds that a run uses: what devices tell each other, its kind and shapes."""
    found: list[list[tuple[str, str]]] = []
    rounds = vmap._rounds

    def watched(effort: str, across: Any) -> Any:
        program = rounds(effort, across)

        def call(*args: Any) -> Any:
            text = program.lower(*args).compile().as_text()
            found.append([(kind, shapes) for shapes, kind in CROSSES.findall(text)])
            return program(*args)

        return call

    with patch.context() as patched:
        patched.setattr(vmap, "_rounds", watched)
        patched.setattr(ahead, "worthwhile", lambda: False)
        run()
    return found


def sizes(shapes: str) -> list[int]:
    """The lengths of all axes."""
    return [int(n) for part in re.findall(r"\[([\d,]*)\]", shapes) for n in part.split(",") if n]


PROGRAMS = {
    "all, 64": (64, (5,), None),
    "all, 65": (65, (ROWS,), None),
    "all, two buckets": (65, (5, ROWS), None),
    "some, two buckets": (65, (5, ROWS), 7),
    "more than a device holds": (65, (ROWS,), 40),
    "one at a time": (65, (5, ROWS), 1),
    "a single silo": (1, (ROWS,), None),
}


@pytest.mark.parametrize("name", tiers(PROGRAMS, "all, 65", "some, two buckets"))
def test_programs_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everyone is computed on the device where it is: messages cross, and rows do not."""
    found: list[Any] = []
    crossed, *_ = crossing(monkeypatch, lambda: found.extend(after(Sharded(), *PROGRAMS[name])))
    results, stack = found
    close(results, after(Vmap(), *PROGRAMS[name])[0], rtol=1e-5, atol=1e-6)  # float32, after five rounds
    assert [len(state) for state in results[1]] == [len(bucket.names) for bucket in stack.buckets], "no copies"
    assert "arrays" not in vars(stack), "nothing lies on one device alone"
    assert 1 <= len(crossed) <= 4, "of each bucket messages, gathered or summed, and who sent them"
    assert all(ROWS not in sizes(shapes) for _, shapes in crossed)


def test_states_stay_on_their_devices() -> None:
    found, stack = after(Sharded(), 64, (5,), None)
    (state,) = found[1]
    assert [shard.data.shape for shard in state.addressable_shards] == [(32, 2), (32, 2)]
    assert found[0].sharding.device_set == {jax.devices()[0]}, "what the host looks at is the host's"
    assert Sharded().held(stack) is Sharded().held(stack), "data are placed once"
    (data,) = Sharded().gathered(found[1])
    assert data.sharding.device_set == {jax.devices()[0]}


@pytest.mark.slow
def test_runs_in_threads_take_turns() -> None:
    """Devices that wait for each other, each in another's program, would wait forever."""
    alone, _ = after(Sharded(), 65, (5, ROWS), None)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(after, Sharded(), 65, (5, ROWS), None) for _ in range(8)]
        for one in found:
            same(one.result(timeout=300)[0], alone)


def even() -> nf.Silos:
    """Four silos of one size."""
    draws = np.random.default_rng(0)
    rows = lambda: draws.normal(size=ROWS).astype("f")
    return nf.Silos({name: dict(x=rows(), y=rows()) for name in ("leeds", "york", "hull", "bath")})


@pytest.mark.slow
def test_a_round_of_sfvi_is_one_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    method = METHODS["SFVI, no locals"]
    run = lambda: method.run(KEY, even(), 2, progress_bar=False, engine=Sharded())
    *before, rounds = crossing(monkeypatch, run)
    assert [kind for kind, _ in rounds] == ["all-reduce"]
    assert all(len(crossed) <= 4 for crossed in before), "the survey, and the search for a start"
    assert all(ROWS not in sizes(shapes) for program in (*before, rounds) for _, shapes in program)


# --- methods ----------------------------------------------------------------------------------------------------------


def fit_of(name: str, num_rounds: int = 3, **options: Any) -> nf.Fit:
    method = METHODS[name]
    return method.run(KEY, silos_for(method.model), num_rounds, progress_bar=False, **options)


def agree(found: nf.Fit, expected: nf.Fit) -> None:
    """In float64: what differs is the order of sums, which a site's precision, a difference, enlarges."""
    close(found.state.server, expected.state.server)
    close(found.state.silos, expected.state.silos)
    close(found.history, expected.history)


@pytest.mark.parametrize("name", tiers(METHODS, "SFVI, no locals"))
def test_methods_agree(name: str, x64: None) -> None:
    """Three silos on two devices, in one bucket or two."""
    agree(fit_of(name, engine=Sharded()), fit_of(name))


SOME = nf.schedules.sampled(2)
COHORTS = [("SFVI", "sequential"), ("SFVIAvg", SOME), ("EP", "sequential"), ("PVI", SOME), ("SEP", "sequential")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), [*COHORTS, ("FedAvg", SOME), ("FedPA", "sequential")], ids=str)
def test_cohorts_agree(name: str, schedule: Any, x64: None) -> None:
    agree(fit_of(name, schedule=schedule, engine=Sharded()), fit_of(name, schedule=schedule))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EP", "PVI"])
def test_stale_broadcasts_agree(name: str, x64: None) -> None:
    options = dict(schedule="asynchronous", num_rounds=6)
    agree(fit_of(name, engine=Sharded(), **options), fit_of(name, **options))


@pytest.mark.slow
def test_each_by_itself(x64: None) -> None:
    silos, method = silos_for(METHODS["SFVI, no locals"].model), nf.Independent(METHODS["SFVI, no locals"].model)
    found = method.run(KEY, silos, 3, progress_bar=False, engine=Sharded())
    for name, expected in method.run(KEY, silos, 3, progress_bar=False).items():
        agree(found[name], expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EP", "SFVI"])
def test_what_follows_a_fit_agrees(name: str, x64: None) -> None:
    """The check, which looks at the silos' own states, and what asks the silos again."""
    found, expected = fit_of(name, check=True, engine=Sharded()), fit_of(name, check=True)
    assert found.verdict.status == expected.verdict.status
    close(found.evidence.log_target, expected.evidence.log_target)
    close(found.evidence.looks.local, expected.evidence.looks.local)
    close(found.correct(KEY, 256).state.server, expected.correct(KEY, 256).state.server)
    close(found.loo(KEY, 64, engine=Sharded()).elpd, expected.loo(KEY, 64).elpd)


# --- states -----------------------------------------------------------------------------------------------------------


def test_a_fit_is_that_of_any_engine(tmp_path: Path, x64: None) -> None:
    """Saved and loaded; gone on with on one device, and on two; begun on one, and gone on with on two."""
    name = "SFVI, no locals"
    fit = fit_of(name, engine=Sharded())
    numbers = [{len(leaf) for leaf in jax.tree.leaves(state)} for state in fit.state.silos]
    assert all(number <= {len(names)} for number, names in zip(numbers, fit.state.buckets, strict=True)), "no copies"
    assert all(leaf.sharding.device_set == {jax.devices()[0]} for leaf in jax.tree.leaves(tuple(fit.state)[3:5]))
    fit.save(tmp_path / "fit.npz")
    again = nf.load(tmp_path / "fit.npz", METHODS[name])
    same((again.state.server, again.state.silos), (fit.state.server, fit.state.silos))
    one = fit_of(name, 2, init_state=fit.state)
    agree(fit_of(name, 2, init_state=again.state, engine=Sharded()), one)
    agree(fit_of(name, 2, init_state=fit_of(name).state, engine=Sharded()), one)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EP", "PVI"])
def test_silos_leave_and_join(name: str, x64: None) -> None:
    """Three silos, then two, then three: buckets lie otherwise each time."""
    silos = silos_for(METHODS[name].model)
    found, expected = fit_of(name, engine=Sharded()), fit_of(name)
    pd_close(found.influence().table, expected.influence().table)
    fewer = found.without("hull", 1, rng_key=KEY), expected.without("hull", 1, rng_key=KEY)
    agree(*fewer)
    more = [fit.add(KEY, silos.only("hull"), 1) for fit in fewer]
    agree(*more)
    assert set(more[0].state.names) == set(silos.names)


def pd_close(a: Any, b: Any) -> None:
    numbers = a.select_dtypes("number")
    np.testing.assert_allclose(numbers, b[numbers.columns], rtol=1e-7, atol=1e-9)  # of a difference of two posteriors


@pytest.mark.parametrize("name", tiers(("SFVI, no locals", "EP", "SFVI", "FedAvg"), "SFVI, no locals"))
def test_a_run_goes_on_bit_for_bit(name: str, tmp_path: Path, x64: None, monkeypatch: pytest.MonkeyPatch) -> None:
    path, files, write = tmp_path / "run", [], checkpoint.replace_file

    def kept(path: Path, *parts: Any) -> None:
        write(path, *parts)
        files.append(path.read_bytes())

    monkeypatch.setattr(checkpoint, "replace_file", kept)
    run = lambda **options: fit_of(name, 4, checkpoint=path, checkpoint_every=1, **options)
    whole = run(engine=Sharded())
    for file in (files[len(files) // 2], files[-2]):
        path.write_bytes(file)
        found = run(engine=Sharded(2))
        same((found.state.server, found.state.silos), (whole.state.server, whole.state.silos))
    with pytest.raises(ValueError, match="is not of this run: engine is another"):
        run(engine=Sharded(1))


# --- which devices ----------------------------------------------------------------------------------------------------


def test_which_devices() -> None:
    first, second = jax.devices()
    assert Sharded(1).devices == Sharded([first]).devices == (first,)
    assert Sharded(2) == Sharded() == Sharded((first, second)) != Sharded([second, first])
    assert len({Sharded(2), Sharded()}) == 1
    with pytest.raises(ValueError, match=r"devices=3, and JAX has 2 cpu devices.*device_count=3"):
        Sharded(3)
    with pytest.raises(ValueError, match="names 1 devices: each is used once"):
        Sharded([first, first])
    for wrong in ("2", 2.0, [], [0, 1], True):
        with pytest.raises((TypeError, ValueError), match=r"devices must be "):
            Sharded(wrong)


@pytest.mark.slow
def test_another_device_alone() -> None:
    """The silos are on the second device, and the fit is where all fits are."""
    found, _ = after(Sharded([jax.devices()[1]]), 5, (5,), None)
    close(found, after(Vmap(), 5, (5,), None)[0], rtol=1e-5, atol=1e-6)
