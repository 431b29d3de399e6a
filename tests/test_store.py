"""Very many silos: the store, lazy names and cohorts, and the engine that reads while the device works."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed import schedules
from numpyro_fed.algorithm import Begun, Broadcast, FederatedAlgorithm, Phase
from numpyro_fed.data.names import LazyNames
from numpyro_fed.data.stack import pad_and_stack, stack_of
from numpyro_fed.data.store import SiloStore
from numpyro_fed.methods.fedpa import MOST_ASKED
from numpyro_fed.model.build import split_model

MANY = 342_477
KEY = jax.random.key(0)
COHORTS = nf.schedules.fixed([["0", "3", "11"], ["7", "2", "5"], ["6", "8", "1"], ["9", "10", "4"]])  # everyone


def regression(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def with_local(x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


def read(i: int) -> dict:
    """Silos of 1 to 6 rows."""
    draws = np.random.default_rng(i)
    x = draws.normal(size=(1 + i % 6, 2)).astype("f")
    return {"x": x, "y": (x @ [1.0, -1.0] + draws.normal(size=len(x))).astype("f")}


def in_memory(num: int) -> nf.Silos:
    return nf.Silos([read(i) for i in range(num)])


def sep() -> nf.SEP:
    return nf.SEP(regression, family="diagonal", solver="identity", tolerance=0)


def run(method, silos, num_rounds=5, **options):
    return method.run(KEY, silos, num_rounds, progress_bar=False, **options)


@pytest.fixture(scope="module")
def store() -> SiloStore:
    return SiloStore.from_function(read, 12)


@pytest.fixture(scope="module")
def fit(store):
    return run(sep(), store, 24, schedule=nf.schedules.sampled(3))


# --- the store --------------------------------------------------------------------------------------------------------


def pooled(order=range(4)):
    parts = [read(i) for i in order]
    labels = np.repeat([f"silo {i}" for i in order], [len(part["y"]) for part in parts])
    return labels, {name: np.concatenate([part[name] for part in parts]) for name in ("x", "y")}


def from_labels(tmp_path):
    labels, arrays = pooled([2, 0, 3, 1])
    return SiloStore.from_arrays(labels, **arrays)


def from_mapped_offsets(tmp_path):
    _, arrays = pooled()
    mapped = {}
    for name, array in arrays.items():
        np.save(tmp_path / name, array)
        mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    return SiloStore.from_arrays(offsets=np.cumsum([0, 1, 2, 3, 4]), **mapped)


def from_directory(tmp_path):
    for i in range(4):
        np.savez(tmp_path / f"silo {i}.npz", **read(i))
    (tmp_path / "notes.txt").write_text("not a silo")
    return SiloStore.from_directory(tmp_path)


def from_function(tmp_path):
    return SiloStore.from_function(read, 4, names=[f"silo {i}" for i in range(4)])


@pytest.mark.parametrize("make", [from_labels, from_mapped_offsets, from_directory, from_function])
def test_stores_hold_what_was_put_in(make, tmp_path):
    store = make(tmp_path)
    assert store.num_silos == len(store) == 4
    for i in range(4):
        name = str(i) if make is from_mapped_offsets else f"silo {i}"
        assert store.name(store.names.index(name)) == name
        for argument, value in read(i).items():
            np.testing.assert_array_equal(store[name][argument], value)
    assert isinstance(store.example(), nf.Silos)
    assert set(store.example().names) == set(store.names)


def test_pooled_arrays_are_not_copied():
    _, arrays = pooled()
    store = SiloStore.from_arrays(offsets=[0, 1, 3, 6, 10], **arrays)
    assert np.shares_memory(store["2"]["x"], arrays["x"])


def test_shared_arguments_and_numbers_go_to_every_silo(tmp_path):
    store = SiloStore.from_arrays(["a", "b"], y=np.ones(2, "f"), num=3, shared={"knots": np.ones(5, "f")})
    assert store["b"]["num"] == 3
    assert store["a"]["knots"].shape == (5,)
    np.savez(tmp_path / "a.npz", y=np.ones(2, "f"), num_groups=3)
    assert SiloStore.from_directory(tmp_path)["a"]["num_groups"] == 3


def broken(args_of):
    """Silo 5, which the example leaves out, has other arguments."""
    example = {0, 39}
    store = SiloStore.from_function(lambda i: args_of(read(i)) if i == 5 else read(i), 40)
    assert set(map(int, store.example(2).names)) == example
    assert "5" not in store.example().names
    return store


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "names": (lambda a: {"x": a["x"]}, ("'5'", "x, y")),
        "dtype": (lambda a: a | {"y": a["y"].astype("f8")}, ("'5'", "float64", "float32")),
        "columns": (lambda a: a | {"x": a["x"][:, :1]}, ("'5'", "rows, 1", "rows, 2")),
        "nan": (lambda a: a | {"y": a["y"] * np.nan}, ("'5'", "NaN")),
        "no rows": (lambda a: jax.tree.map(lambda leaf: leaf[:0], a), ("'5'", "0 rows")),
        "nothing": (lambda a: None, ("'5'", "NoneType")),
        "an error of the user's": (lambda a: a["z"], ("'5'", "KeyError")),
    }.values(),
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_bad_silo_is_named(change, words, prefetch):
    store = broken(change)
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        run(sep(), store, 1, schedule=nf.schedules.fixed([["1", "5"]]), engine=nf.engines.Streamed(prefetch))
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not readers()


def test_rows_that_do_not_match_are_noticed(store):
    split = split_model(regression, store.example())
    with pytest.raises(ValueError, match=r"silo 'a': argument 'y' has 2 rows where others of axis 'rows' have 3"):
        pad_and_stack([("a", {"x": np.ones((3, 2), "f"), "y": np.ones(2, "f")})], split.spec, split.partition.axes)


@pytest.mark.parametrize(
    ("make", "words"),
    {
        "labels apart": (lambda: SiloStore.from_arrays(["a", "b", "a"], y=np.ones(3)), ("argsort",)),
        "neither": (lambda: SiloStore.from_arrays(y=np.ones(3)), ("offsets=",)),
        "offsets fall": (lambda: SiloStore.from_arrays(offsets=[0, 2, 2], y=np.ones(2)), ("rise", "2")),
        "other rows": (lambda: SiloStore.from_arrays(["a", "b"], y=np.ones(3)), ("'y'", "3", "2", "shared=")),
        "two of a name": (lambda: SiloStore.from_function(read, 2, names=["a", "a"]), ("'a'",)),
        "half a silo": (lambda: SiloStore.from_function(read, 0.5), ("num_silos", "0.5")),
        "prefetch": (lambda: nf.engines.Streamed(prefetch=-1), ("prefetch", "-1")),
        "readers": (lambda: nf.engines.Streamed(readers=0), ("readers", "0")),
    }.values(),
)
def test_stores_say_what_they_need(make, words):
    with pytest.raises((ValueError, TypeError)) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_empty_directory(tmp_path):
    with pytest.raises(ValueError, match=r"no \.npz files"):
        SiloStore.from_directory(tmp_path)


# --- names and cohorts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [None, np.array([7, 3, 11]), np.array(["york", "leeds", "hull"])], ids=str)
def test_lazy_names_are_a_sequence(labels):
    names = LazyNames(3, labels)
    listed = ["0", "1", "2"] if labels is None else [str(label) for label in labels]
    assert list(names) == listed
    assert [names.index(name) for name in listed] == [0, 1, 2]
    assert all(name in names for name in listed)
    assert not any(name in names for name in ("nobody", "00", "-1", "3.0", "99"))
    assert names[-1] == listed[-1]
    assert names[:2] == tuple(listed[:2])
    assert names == LazyNames(3, None if labels is None else labels.copy())
    assert hash(names) == hash(LazyNames(3, labels))
    assert names != LazyNames(4)
    with pytest.raises(IndexError):
        names[3]
    with pytest.raises(ValueError, match="nobody"):
        names.index("nobody")


def test_cohorts_of_a_store_are_drawn_without_looking_at_every_silo():
    names, schedule = LazyNames(MANY), schedules.sampled(50)
    cohorts = schedule.cohorts(KEY, names, 0, 200)
    assert cohorts.shape == (200, 50)
    assert all(len(set(row)) == 50 for row in cohorts.tolist())
    assert cohorts.min() >= 0
    assert cohorts.max() < MANY
    np.testing.assert_array_equal(schedule.cohorts(KEY, names, 7, 2), cohorts[7:9])  # however the run is cut
    assert not np.array_equal(schedule.cohorts(jax.random.key(1), names, 0, 1), cohorts[:1])
    # 10,000 uniform draws: the mean's standard error is MANY / sqrt(12 * 10,000)
    assert abs(cohorts.mean() - MANY / 2) < 4 * MANY / np.sqrt(12 * cohorts.size)


def test_names_in_memory_draw_by_name_as_ever():
    names = ("a", "b", "c", "d")
    one, other = (schedules.sampled(2).cohorts(KEY, order, 0, 5) for order in (names, names[::-1]))
    for row, turned in zip(one, other, strict=True):
        assert {names[i] for i in row} == {names[::-1][i] for i in turned}


# --- the engine -------------------------------------------------------------------------------------------------------


def toy() -> FederatedAlgorithm:
    """A noisy mean: draws at the silo and at the server, something sent to each, and an order of messages."""
    return FederatedAlgorithm(
        init=lambda key: jax.random.normal(key, (2,)),
        init_silo=lambda key, broadcast, data: jax.random.normal(key),
        broadcast=lambda key, server: Broadcast(server, jnp.arange(12.0)),
        silo_step=lambda key, broadcast, silo, data: (
            {
                "sum": jnp.sum(jnp.where(data.mask["rows"][:, None], data.args[0] - broadcast.common, 0.0), axis=0),
                "own": broadcast.each + silo + jax.random.normal(key),
            },
            silo,
        ),
        aggregate=lambda messages, cohort: (
            jnp.mean(messages["sum"], axis=0) * cohort.num_silos,
            jnp.sum(messages["own"] * cohort.index),
        ),
        server_step=lambda key, server, found: (
            0.5 * server + 0.01 * found[0] + jax.random.normal(key, (2,)),
            {"loss": found[1], "server": server},
        ),
    )


@pytest.mark.parametrize("ahead", [{"prefetch": 0}, {}, {"prefetch": 3, "readers": 3}], ids=str)
@pytest.mark.parametrize("everyone", [False, True])
def test_streamed_equals_vmap_on_a_toy(store, ahead, everyone):
    silos = in_memory(12)
    split = split_model(regression, store.example())
    full = stack_of(silos, silos, split.spec, split_model(regression, silos).partition.axes)
    lazy = stack_of(store, store.example(), split.spec, split.partition.axes)
    cohorts = None if everyone else COHORTS.cohorts(KEY, silos.names, 0, 5)
    found = []
    for engine, data in ((nf.engines.Vmap(), full), (nf.engines.Streamed(**ahead), lazy)):
        algorithm = toy()
        server, states = engine.start(algorithm, KEY, data)
        server, _, info = engine.rounds(algorithm, KEY, data, server, states, 3, cohorts, 5)
        found.append((server, info))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-4), *found)
    assert not readers()


METHODS = {
    "SEP": sep(),
    "FedAvg": nf.FedAvg(regression, local_steps=3),
    "minibatches": nf.FedAvg(regression, batch_size=1),
}


@pytest.mark.parametrize("schedule", tiers([COHORTS, "sequential"], COHORTS), ids=["fixed", "sequential"])
@pytest.mark.parametrize("name", tiers(METHODS, "SEP"))
def test_streamed_equals_vmap_on_a_method(name, schedule):
    """A store does not know the number of all observations, which is guessed right where silos are of one size."""
    method, equal = METHODS[name], lambda i: jax.tree.map(lambda leaf: leaf[:2], read(6 * i + 5))
    streamed = run(method, SiloStore.from_function(equal, 12), 13, schedule=schedule)
    vmapped = run(method, nf.Silos([equal(i) for i in range(12)]), 13, schedule=schedule)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, streamed.sample(KEY, 3), vmapped.sample(KEY, 3))
    assert streamed.history.keys() == vmapped.history.keys()
    for name, column in streamed.history.items():
        told = name.startswith("bytes_")  # the first round has those of the survey, which asks a few of the store
        close(column[told:], vmapped.history[name][told:])


@pytest.mark.slow
def test_streamed_equals_vmap_in_float64(x64):
    double = lambda i: jax.tree.map(lambda leaf: leaf[:2].astype("f8"), read(6 * i + 5))
    method = nf.FedAvg(regression, local_steps=3)
    streamed = run(method, SiloStore.from_function(double, 12), 4, schedule=COHORTS)
    vmapped = run(method, nf.Silos([double(i) for i in range(12)]), 4, schedule=COHORTS)
    np.testing.assert_allclose(streamed.sample(KEY, 1)["beta"], vmapped.sample(KEY, 1)["beta"], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [nf.FedAvg(regression, local_steps=2), nf.FedPA(regression)], ids=["FedAvg", "FedPA"]
)
def test_no_more_is_read_than_cohorts_and_an_example(method):
    """Law: what a run reads does not depend on the number of silos."""
    asked = []

    def counted(i):
        asked.append(i)
        return read(i)

    fit = run(method, SiloStore.from_function(counted, MANY), 3, schedule=nf.schedules.sampled(4))
    assert np.isfinite(fit.history["loss"]).all()
    assert len(fit.state.names) == MANY
    closing = MOST_ASKED if isinstance(method, nf.FedPA) else 4
    assert len(set(asked)) <= 3 * 4 + closing + 8  # three rounds and a closing one, and the example
    assert len(asked) <= 3 * 4 + closing + 8 * 4  # which is read a few times: to split, to check, to count bytes


def test_reading_goes_on_while_the_device_works(store):
    """Round i ends only when round i + 1 is being read: without a reader ahead that would never be."""
    being_read = [threading.Event() for _ in range(5)]

    def slow(i):
        being_read[i].set()
        return read(i)

    def step(key, server, found):
        waited = lambda at: np.bool_(being_read[min(int(at) + 1, 4)].wait(20))
        overlapped = jax.pure_callback(waited, jax.ShapeDtypeStruct((), bool), server)
        return server + 1, {"loss": found[1], "overlapped": overlapped}

    algorithm = toy()._replace(init=lambda key: jnp.zeros((), jnp.int32), server_step=step)
    split = split_model(regression, store.example())
    lazy = SiloStore.from_function(slow, 12)
    lazy.__dict__["_expected"] = store._expected  # its own example would be read first
    stacked = stack_of(lazy, store.example(), split.spec, split.partition.axes)
    engine = nf.engines.Streamed(prefetch=1)
    server, _ = engine.start(algorithm, KEY, stacked)
    _, _, info = engine.rounds(algorithm, KEY, stacked, server, (), 0, np.arange(5)[:, None], 5)
    assert info["overlapped"].all()


def test_cohorts_of_similar_sizes_share_a_program(store):
    split = split_model(regression, store.example())
    source = stack_of(store, store.example(), split.spec, split.partition.axes)
    lengths = {source.cohort([i])[2]["rows"].shape[1] for i in range(12)}
    assert lengths == {1, 2, 4, 8}
    identities, args, mask = source.cohort([4, 0])
    assert identities.shape == (2, 2)
    np.testing.assert_array_equal(mask["rows"].sum(axis=1), [5, 1])
    np.testing.assert_array_equal(args[0][1], np.repeat(read(0)["x"], 8, axis=0))  # the last row, again and again


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("numpyro_fed-reader")]


def test_an_interrupted_run_returns_what_it_has_and_leaves_no_thread(monkeypatch):
    streamed = nf.engines.Streamed()
    monkeypatch.setattr(nf.engines.Streamed, "chunk", 2)
    waits = []

    def interrupt(info):
        waits.append(info)
        if len(waits) > 2:
            raise KeyboardInterrupt
        return info

    monkeypatch.setattr("numpyro_fed.engines.streamed.jax.block_until_ready", interrupt)
    fit = run(sep(), SiloStore.from_function(read, 12), 10, schedule=COHORTS, engine=streamed)
    assert 0 < fit.state.round < 10
    assert not readers()


# --- runs and fits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    {
        "silos with states": (lambda: (nf.EP(regression), many(), {}), ("nf.EP", "nf.Silos", "nf.FedAvg", "nf.SEP")),
        "local latents": (lambda: (nf.SEP(with_local), few(), {}), ("local latents (z)", "nf.Silos")),
        "everyone": (lambda: (sep(), many(), {}), ("342477", "schedule=nf.schedules.sampled(100)")),
        "stale": (lambda: (sep(), few(), {"schedule": "asynchronous"}), ("nf.schedules.sampled",)),
        "another engine": (lambda: (sep(), few(), {"engine": nf.engines.Vmap()}), ("Vmap", "nf.engines.Streamed()")),
        "silos in memory": (lambda: (sep(), in_memory(3), {"engine": nf.engines.Streamed()}), ("nf.Silos", "engine=")),
        "a large cohort": (lambda: (sep(), few(), {"schedule": nf.schedules.sampled(13)}), ("13", "12 silos")),
        "an unknown silo": (
            lambda: (sep(), many(), {"schedule": nf.schedules.fixed([["x"]])}),
            ("'x'", "..., '342476'"),
        ),
        "no silos": (lambda: (sep(), {}, {}), ("nf.Silos", "dict")),
    }.values(),
)
def test_runs_say_what_they_need(arguments, words):
    method, silos, options = arguments()
    with pytest.raises((ValueError, TypeError)) as error:
        run(method, silos, 1, **options)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert len(str(error.value)) < 500


def many() -> SiloStore:
    return SiloStore.from_function(read, MANY)


def few() -> SiloStore:
    return SiloStore.from_function(read, 12)


def test_a_fit_of_a_store(fit, store):
    assert fit.state.names == store.names
    assert fit.state.silos == ()
    assert fit.silos is store
    assert "silos 12" in repr(fit)
    assert fit.sample(KEY, 10)["beta"].shape == (10, 2)
    assert "beta[1]" in fit.summary().index
    assert fit.predict(KEY, {"x": np.ones((3, 2), "f")}, num_samples=4)["y"].shape == (4, 3)
    assert fit.predict(KEY, silo="4", num_samples=4)["y"].shape == (4, 5)  # read for it, not padded
    assert fit.sample_local(KEY, 4, silo="4")["beta"].shape == (4, 2)
    survey, *rounds = fit.records
    np.testing.assert_array_equal(fit.history["bytes_up"][1:], fit.history["bytes_up"][0] - survey.bytes_up)
    assert survey.phase == "survey" and survey.bytes_up > 0
    assert fit.history["bytes_up"].sum() == survey.bytes_up + sum(record.bytes_up for record in rounds)
    posterior = fit.to_arviz(KEY, 5)["posterior"]
    assert posterior["beta"].shape == (1, 5, 2)


@pytest.mark.parametrize(
    "ask",
    {
        "elbo": lambda fit: fit.elbo(),
        "correct": lambda fit: fit.correct(KEY),
        "log likelihood": lambda fit: fit.to_arviz(log_likelihood=True),
        "replicates": lambda fit: fit.to_arviz(posterior_predictive=True),
    }.values(),
)
def test_what_would_read_every_silo_says_so(fit, ask):
    with pytest.raises(ValueError, match="would read all 12 silos of the store"):
        ask(fit)


def test_new_units_are_of_no_silo(fit):
    with pytest.raises(ValueError, match=r"predict\(key, data\)"):
        fit.predict(KEY, {"x": np.ones((3, 2), "f")}, silo="4")
    with pytest.raises(KeyError, match="no silo is named 'x'"):
        fit.predict(KEY, silo="x")


@pytest.mark.parametrize(
    "names",
    [None, [f"silo {i}" for i in range(12)]],
    ids=["numbers", "names"],
)
@pytest.mark.slow
def test_a_fit_is_saved_without_data_and_goes_on(names, tmp_path):
    store = SiloStore.from_function(read, 12, names)
    schedule = nf.schedules.sampled(3)
    whole = run(sep(), store, 24, schedule=schedule)
    with pytest.warns(UserWarning, match="obody asked"):
        half = run(sep(), store, 1, schedule=schedule)
    path = half.save(tmp_path / "fit")
    for silos in (None, store):
        loaded = nf.load(path, sep(), silos)
        assert loaded.state.names == store.names
        assert "silos 12" in repr(loaded)
        jax.tree.map(np.testing.assert_array_equal, loaded.sample(KEY, 5), half.sample(KEY, 5))
        again = run(sep(), store, 23, schedule=schedule, init_state=loaded.state)
        assert again.state.round == 24
        jax.tree.map(np.testing.assert_array_equal, again.sample(KEY, 5), whole.sample(KEY, 5))
    name = store.name(4)
    assert loaded.predict(KEY, silo=name, num_samples=2)["y"].shape == (2, 5)
    with pytest.raises(ValueError, match=r"pass silos= to nf\.load"):
        nf.load(path, sep()).predict(KEY, silo=name)
    with pytest.raises(ValueError, match="12 silos"):
        nf.load(path, sep(), SiloStore.from_function(read, 11))
    with pytest.raises(TypeError, match=r"nf\.SiloStore"):
        nf.load(path, sep(), in_memory(12))
    with pytest.raises(ValueError, match="init_state has other silos"):
        run(sep(), SiloStore.from_function(read, 13), 1, schedule=schedule, init_state=half.state)


@pytest.mark.slow
def test_a_silo_that_breaks_the_loss_is_named():
    """Large numbers, in a silo that the example leaves out."""

    def explosive(x, y=None):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(x @ beta)), obs=y)

    counts = lambda i: {"x": read(i)["x"] * (1e20 if i == 5 else 1), "y": np.ones(1 + i % 6, np.int32)}
    store = SiloStore.from_function(counts, 40)
    method = nf.FedAvg(explosive, local_steps=2)
    with pytest.raises(nf.NonFiniteError, match="silo '5'") as error:
        run(method, store, 2, schedule=nf.schedules.fixed([["1", "2"], ["3", "5"]]))
    assert error.value.fit.state.round == 1


class Asked(nf.SEP):
    """Counts who is asked at the end."""

    def compile(self, split, survey, plan):
        program = super().compile(split, survey, plan)
        (rounds,) = program.phases

        def finish(left, server, info):
            assert np.isfinite(info["loss"]).all()
            assert int(jnp.sum(server.visits - left.server.visits)) == plan.cohort
            return left._replace(server=left.server._replace(visits=server.visits))

        check = Phase("asked", rounds.algorithm, lambda left, _: Begun(left.server), finish=finish, role="check")
        return program._replace(phases=(rounds, check))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*obody asked silo")
@pytest.mark.parametrize("make", [few, lambda: in_memory(12)], ids=["store", "memory"])
def test_a_closing_round_asks_the_next_cohort_and_may_keep_its_server(make):
    method = Asked(regression, family="diagonal", solver="identity", tolerance=0)
    fit = run(method, make(), 4, schedule=nf.schedules.sampled(3))
    assert int(jnp.sum(fit.state.server.visits)) == 5 * 3
    np.testing.assert_array_equal(fit.history["bytes_up"][-1], 2 * fit.history["bytes_up"][1])
