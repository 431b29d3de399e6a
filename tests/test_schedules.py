"""Who takes part, and what a silo works from: the laws of schedules and of stale broadcasts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_fed as nf
from numpyro_fed import schedules
from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.axis import Axis
from numpyro_fed.data.padding import call_spec
from numpyro_fed.data.stack import Bucket, Stack
from numpyro_fed.engines.base import sent, sent_to
from numpyro_fed.engines.stale import StaleState, held, stale
from numpyro_fed.keys import SERVER, START, fold_in_name, identity
from numpyro_fed.precision import stacked

NAMES = ("leeds", "york", "hull", "bath")
KEY = jax.random.key(0)
SCHEDULES = {
    "synchronous": schedules.as_schedule("synchronous"),
    "sequential": schedules.as_schedule("sequential"),
    "asynchronous": schedules.as_schedule("asynchronous"),
    "with speeds": nf.schedules.asynchronous({"york": 3, "bath": 0.5}, spread=1.0),
    "in turns": nf.schedules.asynchronous(spread=0),
    "sampled": nf.schedules.sampled(3),
    "fixed": nf.schedules.fixed([["leeds", "york"], ["hull", "leeds"], ["leeds", "bath"]]),
}
ASYNCHRONOUS = {name: one for name, one in SCHEDULES.items() if schedules.stale(one)}

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
every_asynchronous = pytest.mark.parametrize("schedule", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS)


# --- who takes part ------------------------------------------------------------------------------------------------


@every_schedule
def test_cohorts_do_not_depend_on_the_chunks_they_are_asked_in(schedule: Any) -> None:
    whole = schedule.cohorts(KEY, NAMES, 0, 300)  # beyond the first horizon of an asynchronous run
    parts = [schedule.cohorts(KEY, NAMES, first, 50) for first in (0, 50, 100, 150, 200, 250)]
    if whole is None:
        assert all(part is None for part in parts)
    else:
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@every_schedule
def test_a_schedule_is_a_value(schedule: Any) -> None:
    assert schedules.as_schedule(schedule) is schedule
    assert hash(schedule) == hash(schedule) and {schedule: 1}[schedule] == 1


@every_asynchronous
def test_a_round_is_one_silo_finishing(schedule: Any) -> None:
    cohorts = schedule.cohorts(KEY, NAMES, 3, 7)
    assert cohorts.shape == (7, 1) and cohorts.dtype == np.int32
    assert schedule.cohorts(KEY, NAMES, 0, 0).shape == (0, 1)
    cohorts[:] = -1  # whoever is given cohorts owns them
    assert schedule.cohorts(KEY, NAMES, 3, 7).min() >= 0


@every_asynchronous
def test_the_order_of_silos_does_not_matter(schedule: Any) -> None:
    finishers = lambda names: [names[j] for j in schedule.cohorts(KEY, names, 0, 100)[:, 0]]
    assert finishers(NAMES) == finishers(NAMES[::-1]) == finishers(("hull", "leeds", "bath", "york"))


def test_ties_go_to_the_name_that_comes_first() -> None:
    order = sorted(range(len(NAMES)), key=NAMES.__getitem__)
    assert SCHEDULES["in turns"].cohorts(KEY, NAMES, 0, 12)[:, 0].tolist() == 3 * order  # type: ignore[index]


def test_another_key_is_another_order() -> None:
    first, second = (SCHEDULES["asynchronous"].cohorts(jax.random.key(seed), NAMES, 0, 100) for seed in (0, 1))
    assert not np.array_equal(first, second)  # type: ignore[arg-type]


def test_a_silo_finishes_as_often_as_its_speed_says() -> None:
    """Renewals: n finishes of a silo have sd close to sqrt(n) * the durations' coefficient of variation."""
    schedule = nf.schedules.asynchronous({"york": 3.0}, spread=0.5)
    counts = np.bincount(schedule.cohorts(KEY, NAMES, 0, 6000)[:, 0], minlength=4)
    expected = 6000 * np.array([1, 3, 1, 1]) / 6
    sd = np.sqrt(expected * np.expm1(0.5**2))
    assert np.all(np.abs(counts - expected) < 4 * sd)


def test_every_silo_finishes_and_finishes_are_worked_out_few_times() -> None:
    names = tuple(f"silo {j}" for j in range(1000))
    schedules._finishers.cache_clear()
    chunks = [SCHEDULES["asynchronous"].cohorts(KEY, names, first, 500) for first in range(0, 10_000, 500)]
    assert schedules._finishers.cache_info().misses == 6  # twice as many each time: 512, 1024, ..., 16384
    counts = np.bincount(np.concatenate(chunks)[:, 0], minlength=1000)  # type: ignore[arg-type]
    assert counts.min() > 0 and counts.max() < 30


@pytest.mark.parametrize(
    ("make", "error", "told"),
    [
        (lambda: nf.schedules.asynchronous(["york"]), TypeError, "speeds is a list; give a dict"),  # type: ignore[arg-type]
        (lambda: nf.schedules.asynchronous({3: 1.0}), TypeError, r"names are strings: speeds=\{'3': 1.0\}"),  # type: ignore[dict-item]
        (
            lambda: nf.schedules.asynchronous({"york": 0}),
            ValueError,
            "speed of 'york' must be a positive number, got 0",
        ),
        (lambda: nf.schedules.asynchronous({"york": np.nan}), ValueError, "positive number, got nan"),
        (lambda: nf.schedules.asynchronous({"york": np.inf}), ValueError, "positive number, got inf"),
        (lambda: nf.schedules.asynchronous({"york": True}), ValueError, "positive number, got True"),
        (lambda: nf.schedules.asynchronous({"york": "fast"}), ValueError, "positive number, got 'fast'"),  # type: ignore[dict-item]
        (lambda: nf.schedules.asynchronous(spread=-1), ValueError, "spread must be a number from 0 to 5, got -1"),
        (lambda: nf.schedules.asynchronous(spread=np.nan), ValueError, "spread must be .*, got nan"),
        (
            lambda: nf.schedules.asynchronous({"paris": 2}).cohorts(KEY, NAMES, 0, 1),
            ValueError,
            "names 'paris'; the silos are 'leeds', 'york'",
        ),
        (lambda: schedules.as_schedule("random"), ValueError, "'asynchronous', nf.schedules.sampled"),
    ],
)
def test_errors_say_what_to_type(make: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        make()


# --- what else a schedule says --------------------------------------------------------------------------------------


def test_only_asynchronous_silos_work_from_stale_broadcasts() -> None:
    assert {name for name, one in SCHEDULES.items() if schedules.stale(one)} == set(ASYNCHRONOUS)
    assert all(schedules.stale(one) == one.stale for one in SCHEDULES.values())


def test_sweeps() -> None:
    sweeps = {name: schedules.sweep(one, NAMES) for name, one in SCHEDULES.items()}
    assert sweeps == {
        "synchronous": 1,
        "sequential": 4,
        "asynchronous": 4,
        "with speeds": 4,
        "in turns": 4,
        "sampled": 2,
        "fixed": 3,
    }
    early = nf.schedules.fixed([["york", "leeds"], ["hull", "leeds"], ["york", "leeds"]])
    assert schedules.sweep(early, NAMES) == 2  # 'bath' never takes part


class Pairs:
    """A user's own schedule, which says who takes part and no more."""

    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> np.ndarray:
        return np.tile(np.array([0, 1], np.int32), (count, 1))


class Everyone:
    def cohorts(self, key: Any, names: tuple[str, ...], first: int, count: int) -> None:
        return None


def test_a_schedule_of_ones_own_need_not_say_more() -> None:
    assert not schedules.stale(Pairs()) and not schedules.stale(Everyone())
    assert schedules.sweep(Pairs(), NAMES) == 2 and schedules.sweep(Everyone(), NAMES) == 1
    assert schedules.sweep(Pairs(), NAMES[:3]) == 2


# --- stale broadcasts -----------------------------------------------------------------------------------------------


class Server(NamedTuple):
    total: Any  # () sum of the sites
    sites: Any  # (J,) what each silo has contributed


def damped_mean(num_silos: int, damping: float = 0.3) -> FederatedAlgorithm:
    """Sites as in EP: a silo is told the total and its own site, and replies how its site should change."""

    def silo_step(key: Any, broadcast: Broadcast, silo: Any, data: Any) -> tuple[Any, Any]:
        cavity = broadcast.common["total"] - broadcast.each
        noise = 0.01 * jax.random.normal(key)
        change = jnp.sum(data.args[0]) - 0.2 * cavity - broadcast.each + noise
        return {"change": change}, (silo[0] + 1, broadcast.common["total"])

    def server_step(key: Any, server: Server, aggregate: Any) -> tuple[Server, dict]:
        changes, index = aggregate
        sites = server.sites.at[index].add(damping * changes["change"])
        total = server.total + damping * jnp.sum(changes["change"])
        return Server(total, sites), {"loss": total + jax.random.normal(key)}

    return FederatedAlgorithm(
        init=lambda key: Server(jnp.asarray(0.5, jnp.zeros(()).dtype), jnp.zeros(num_silos)),
        init_silo=lambda key, broadcast, data: (jnp.int32(0), broadcast.common["total"]),
        broadcast=lambda key, server: Broadcast({"total": server.total, "steps": 7}, server.sites),
        silo_step=silo_step,
        aggregate=lambda messages, cohort: (messages, cohort.index),
        server_step=server_step,
    )


J = len(NAMES)
INNER = damped_mean(J)
ENGINES = {"vmap": nf.engines.Vmap(), "loopback": nf.engines.Loopback()}
every_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


def data() -> Stack:
    """Two buckets that do not follow the order of the names."""
    rows = {"leeds": [1.0, 2.0], "york": [3.0, -1.0, 0.5], "hull": [-2.0, 0.25], "bath": [0.1, 0.2, 4.0]}
    silos = nf.Silos({name: dict(x=np.array(rows[name], jnp.result_type(float))) for name in NAMES})
    axes = (Axis("rows", ("x",), (), {name: len(rows[name]) for name in NAMES}),)
    buckets = Bucket(("hull", "leeds"), {"rows": 2}), Bucket(("york", "bath"), {"rows": 3})
    return Stack(NAMES, buckets, call_spec(silos, axes), axes, silos, None)


def cohorts_of(count: int) -> np.ndarray:
    return schedules.asynchronous(spread=1.0).cohorts(KEY, NAMES, 0, count)


def run(engine: Any, algorithm: FederatedAlgorithm, cohorts: Any, count: int) -> tuple[Any, tuple, dict]:
    server, silos = engine.start(algorithm, KEY, data())
    return engine.rounds(algorithm, KEY, data(), server, silos, 0, cohorts, count)


def simulated(algorithm: FederatedAlgorithm, cohorts: np.ndarray) -> tuple[Any, dict, list]:
    """Stale messages in plain Python: a dict of what each silo last received."""
    stack, start = data(), jax.random.fold_in(KEY, START)
    key = jax.random.fold_in(start, SERVER)
    server = algorithm.init(key)
    mail = {name: sent_to(algorithm.broadcast(key, server), j) for j, name in enumerate(NAMES)}
    silos = {n: algorithm.init_silo(fold_in_name(start, identity(n)), mail[n], stack.data(n)) for n in NAMES}
    losses = []
    for r, cohort in enumerate(cohorts):
        key, messages = jax.random.fold_in(KEY, r), []
        for name in (NAMES[j] for j in cohort):
            key_j = fold_in_name(key, identity(name))
            message, silos[name] = algorithm.silo_step(key_j, mail[name], silos[name], stack.data(name))
            messages.append(message)
        gathered = algorithm.aggregate(stacked(messages), Cohort(jnp.asarray(cohort), J))
        server, info = algorithm.server_step(jax.random.fold_in(key, SERVER), server, gathered)
        losses.append(float(info["loss"]))
        for j in cohort:
            mail[NAMES[j]] = sent_to(algorithm.broadcast(None, server), j)
    return server, silos, losses


def assert_trees_equal(got: Any, expected: Any, atol: float = 1e-12) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)  # type: ignore[operator]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol)


@every_engine
@pytest.mark.parametrize("size", [1, 2], ids=["one finishes", "two finish"])
def test_engines_run_stale_messages_as_plain_python_does(x64: None, engine: Any, size: int) -> None:
    cohorts = cohorts_of(24) if size == 1 else np.asarray(schedules.sampled(2).cohorts(KEY, NAMES, 0, 24))
    server, silos, info = run(engine, stale(INNER, J), cohorts, len(cohorts))
    expected, states, losses = simulated(INNER, cohorts)
    assert_trees_equal(server.server, expected)
    np.testing.assert_allclose(info["loss"], losses, atol=1e-12)
    for b, bucket in enumerate(data().buckets):
        for at, name in enumerate(bucket.names):
            assert_trees_equal(jax.tree.map(lambda leaf, at=at, b=b: leaf[at], silos[b]), states[name])
    fresh, *_ = run(engine, INNER, cohorts, len(cohorts))
    assert abs(float(fresh.total - expected.total)) > 1e-3  # staleness is not nothing


def test_engines_agree_in_float32() -> None:
    algorithm, cohorts = stale(INNER, J), cohorts_of(20)
    (server, silos, info), (server_, silos_, info_) = (run(e, algorithm, cohorts, 20) for e in ENGINES.values())
    assert_trees_equal((server, silos), (server_, silos_), atol=1e-5)
    np.testing.assert_allclose(info["loss"], info_["loss"], atol=1e-5)


@every_engine
def test_with_everyone_in_every_round_nothing_is_stale(x64: None, engine: Any) -> None:
    server, silos, info = run(engine, stale(INNER, J), None, 10)
    expected, silos_, info_ = run(engine, INNER, None, 10)
    assert_trees_equal((server.server, silos), (expected, silos_))
    np.testing.assert_allclose(info["loss"], info_["loss"], atol=1e-12)


@every_engine
def test_twice_in_a_row_is_from_the_newest_broadcast_and_others_keep_theirs(x64: None, engine: Any) -> None:
    algorithm = stale(INNER, J)
    received = lambda silos: float(silos[1][1][0])  # what york, first of its bucket, was told last
    once, silos, _ = run(engine, algorithm, np.array([[0], [1]]), 2)
    assert received(silos) == 0.5  # the broadcast before any round, although leeds has moved the server since
    twice, silos, _ = run(engine, algorithm, np.array([[0], [1], [1]]), 3)
    np.testing.assert_allclose(received(silos), once.server.total, atol=1e-12)
    np.testing.assert_allclose(twice.broadcast.common["total"][2:], 0.5)  # hull and bath have not been told anything
    np.testing.assert_allclose(twice.broadcast.common["total"][1], twice.server.total, atol=1e-12)
    np.testing.assert_allclose(twice.broadcast.each[:2], twice.server.sites[:2], atol=1e-12)


@every_engine
def test_a_run_goes_on_from_where_it_was(x64: None, engine: Any) -> None:
    algorithm, cohorts = stale(INNER, J), cohorts_of(12)
    whole, silos, _ = run(engine, algorithm, cohorts, 12)
    server, states, _ = run(engine, algorithm, cohorts, 5)
    again, states, _ = engine.rounds(algorithm, KEY, data(), server, states, 5, cohorts[5:], 7)
    assert_trees_equal((again, states), (whole, silos))


def test_no_more_bytes_than_without() -> None:
    algorithm, stack = stale(INNER, J), data()
    silo = (jnp.int32(0), jnp.zeros(()))
    plain = sent(INNER, INNER.init(KEY), silo, stack.data("york")).traffic
    assert sent(algorithm, algorithm.init(KEY), silo, stack.data("york")).traffic == plain
    _, _, info = run(ENGINES["loopback"], algorithm, cohorts_of(3), 3)
    assert info["bytes_down"].tolist() == [plain.down] * 3 and info["bytes_up"].tolist() == [plain.up] * 3


def test_the_same_algorithm_gives_the_same_stale_one() -> None:
    assert stale(INNER, J) is stale(INNER, J)
    assert stale(INNER, J) is not stale(damped_mean(J), J)


def test_held_is_everyone_up_to_date() -> None:
    server = Server(jnp.float32(2.0), jnp.arange(4.0))
    state = held(INNER, server, KEY, J)
    assert state.server is server
    assert_trees_equal(
        state.broadcast, Broadcast({"total": jnp.full(4, 2.0), "steps": jnp.full(4, 7)}, jnp.arange(4.0))
    )
    algorithm = stale(INNER, J)
    assert_trees_equal(algorithm.init(KEY), held(INNER, INNER.init(KEY), KEY, J))
    received = sent_to(algorithm.broadcast(KEY, state), 3)
    assert_trees_equal(received.each, sent_to(INNER.broadcast(KEY, server), 3))


def test_float64_leaves_survive_in_a_float32_program_and_the_users_functions_stay_in_theirs() -> None:
    """Natural parameters are float64 wherever they are kept; what the wrapper calls runs under the user's own flag."""
    tiny = 1e-12  # below float32's resolution at 1
    flags = []

    def server_step(key: Any, server: Any, aggregate: Any) -> tuple[Any, dict]:
        flags.append(jnp.zeros(()).dtype)
        with jax.enable_x64(True):
            return {"q": server["q"] + tiny, "sites": server["sites"] + tiny}, {}

    def init(key: Any) -> Any:
        with jax.enable_x64(True):
            return {"q": jnp.ones(2, jnp.float64), "sites": jnp.ones((J, 2), jnp.float64)}

    def broadcast(key: Any, server: Any) -> Broadcast:
        flags.append(jnp.zeros(()).dtype)
        return Broadcast({"q": server["q"], "step": 0.5, "n": jnp.int32(3), "key": jax.random.key(1)}, server["sites"])

    algorithm = stale(
        FederatedAlgorithm(
            init=init,
            init_silo=lambda key, broadcast, data: (),
            broadcast=broadcast,
            silo_step=lambda key, broadcast, silo, data: ((), silo),
            aggregate=lambda messages, cohort: messages,
            server_step=server_step,
        ),
        J,
    )
    step = jax.jit(lambda state, index: algorithm.server_step(KEY, state, algorithm.aggregate((), Cohort(index, J)))[0])
    state = jax.jit(algorithm.init)(KEY)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), state)
    assert shapes.broadcast.common == {
        "q": ((4, 2), "float64"),
        "step": ((4,), "float32"),
        "n": ((4,), "int32"),
        "key": ((4,), "key<fry>"),
    }
    assert isinstance(state, StaleState)
    state = step(step(state, jnp.array([1])), jnp.array([3]))
    assert jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), state) == shapes
    for leaf in (state.broadcast.common["q"], state.broadcast.each):
        increments = (np.asarray(leaf)[:, 0] - 1) / tiny
        np.testing.assert_allclose(increments, [0, 1, 0, 2], atol=1e-3)
    assert set(flags) == {np.dtype(np.float32)}
