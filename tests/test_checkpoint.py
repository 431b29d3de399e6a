"""Files of runs: which are refused and why, and processes that were killed."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from laws.table import METHODS

import numpyro_fed as nf
from numpyro_fed.run import checkpoint, identity
from numpyro_fed.run.digests import digest_of

KEY = jax.random.key(0)


def model(x, y):
    b = numpyro.sample("b", dist.Normal(0, 5))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(b * x, 1.0), obs=y)


def wider(x, y):
    b = numpyro.sample("b", dist.Normal(0, 6))
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(b * x, 1.0), obs=y)


def silos(*names: str, shift: float = 0.0) -> nf.Silos:
    draws = np.random.default_rng(0)
    rows = lambda: draws.normal(size=6).astype("f")
    return nf.Silos({name: dict(x=rows(), y=rows() + np.float32(shift)) for name in names or ("leeds", "york")})


def sfvi(program: Any = model, size: float = 0.01) -> nf.SFVI:
    return nf.SFVI(program, optim=optax.adam(size), start_rounds=0)


def run(path: Any, method: Any = None, data: nf.Silos | None = None, key: Any = KEY, rounds: int = 6, **options: Any):
    method, data = method or sfvi(), data or silos()
    return method.run(key, data, rounds, progress_bar=False, checkpoint=path, **options)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run.nfc"
    run(path, checkpoint_every=2)
    return path


OTHERS = {
    "it is of SFVI in float32, and this is EP in float32": lambda path: run(path, nf.EP(model)),
    "the model is another": lambda path: run(path, sfvi(wider)),
    "the setting optim is another": lambda path: run(path, sfvi(size=0.02)),
    "rng_key is another": lambda path: run(path, key=jax.random.key(1)),
    "num_rounds is another": lambda path: run(path, rounds=8),
    "schedule is another": lambda path: run(path, schedule="sequential"),
    "engine is another": lambda path: run(path, engine=nf.engines.Loopback()),
    "init_state is another": lambda path: run(path, init_state=run(None).state),
    "the data of silo 'leeds' are others now": lambda path: run(path, data=silos(shift=1.0)),
    "other silos (missing now: york; not in the file: hull)": lambda path: run(path, data=silos("leeds", "hull")),
}


@pytest.mark.parametrize("why", OTHERS)
def test_another_run_is_refused_with_the_reason(file: Path, why: str) -> None:
    with pytest.raises(ValueError) as error:
        OTHERS[why](file)
    assert why in str(error.value) and "Take another path, or remove the file to begin anew" in str(error.value)


def edited(file: Path, path: Path, edit: Any) -> Path:
    path.write_bytes(edit(bytearray(file.read_bytes())))
    return path


DAMAGES: dict[str, tuple[Any, str]] = {
    "empty": (lambda data: b"", "no checkpoint"),
    "foreign": (lambda data: b"PK\3\4" + data, "no checkpoint"),
    "truncated": (lambda data: data[:-7], "damaged"),
    "longer": (lambda data: data + b"x", "damaged"),
    "one bit": (lambda data: data[:99] + bytes([data[99] ^ 1]) + data[100:], "damaged"),
    "older": (lambda data: data[:4] + b"\0\0\0\0" + data[8:], "version 0 of the format, and this one reads 1: finish"),
    "newer": (lambda data: data[:4] + b"\2\0\0\0" + data[8:], "version 2 of the format, and this one reads 1: upgrade"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_is_refused(file: Path, tmp_path: Path, damage: str) -> None:
    edit, why = DAMAGES[damage]
    with pytest.raises(ValueError, match=why):
        run(edited(file, tmp_path / "run", edit))


def test_a_fit_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint of numpyro_fed"):
        run(run(None).save(tmp_path / "fit.npz"))


def test_what_is_asked_for_makes_sense(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        run(tmp_path / "nowhere" / "run")
    with pytest.raises(ValueError, match="say where"):
        run(None, checkpoint_every=3)
    with pytest.raises(ValueError, match="checkpoint_every"):
        run(tmp_path / "run", checkpoint_every=0)


def test_another_version_is_said(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "versions", lambda: identity.versions() | {"jax": "99"})
    with pytest.warns(UserWarning, match=r"written with jax .*, this is 99: the run goes on"):
        run(file)


def test_interrupted_runs_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it would be until the next write."""
    chunk, rounds = nf.engines.Vmap().chunk, nf.engines.Vmap.rounds
    path, whole = tmp_path / "run", run(None, rounds=2 * chunk)

    def stopped(self: Any, *args: Any, **options: Any) -> Any:
        if args[5] >= chunk:
            raise KeyboardInterrupt
        return rounds(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(nf.engines.Vmap, "rounds", stopped)
        half = run(path, rounds=2 * chunk)
    assert half.state.round == chunk
    on = run(path, rounds=2 * chunk)
    for a, b in zip(jax.tree.leaves(on.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert on.seconds > half.seconds


@dataclass
class Scaled:
    by: float

    def __call__(self, x):
        return self.by * x


SPREAD = {"sd": 1.0}


def spread(x, y):
    inner = lambda: SPREAD["sd"]
    b = numpyro.sample("b", dist.Normal(0, inner()))
    numpyro.sample("y", dist.Normal(b * x, 1.0).to_event(1), obs=y)


def test_what_a_model_reads_of_its_module_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within a function of its own."""
    before = digest_of(spread)
    assert digest_of(spread) == before
    monkeypatch.setitem(SPREAD, "sd", 2.0)
    assert digest_of(spread) != before


def test_silos_in_another_order_are_another_run(file: Path) -> None:
    """States are stacked in it."""
    data = silos()
    with pytest.raises(ValueError, match="the order of silos is another"):
        run(file, data=data.only("york", "leeds"))


def test_digests_tell_what_a_value_is_made_of() -> None:
    first, second = (lambda c: lambda x: c * x)(2.0), (lambda c: lambda x: c * x)(3.0)
    nested = [((1,), 2), ((1, 2),), {"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}}, [first, second, first]]
    values = [
        *nested,
        [first, second, second],
        numpyro.handlers.scale(model, scale=2.0),
        numpyro.handlers.scale(model, scale=3.0),
        jax.jit(first),
        jax.jit(second),
        Scaled(1.0),
        Scaled(2.0),
        np.random.default_rng,
        first,
        second,
        model,
        wider,
        optax.adam(0.1),
        optax.adam(0.2),
        nf.solvers.Laplace(),
        KEY,
        {"a": 1},
        {"a": 2},
    ]
    found = [digest_of(value) for value in values]
    assert len(set(found)) == len(values)
    assert found == [digest_of(value) for value in values]
    assert digest_of(optax.adam(0.1)) == digest_of(optax.adam(0.1))


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
import jax, numpyro, pytest
numpyro.enable_x64()
from table import METHODS, silos_for
from numpyro_fed.run import checkpoint
import numpy as np
method, path, out, when, where = METHODS[{name!r}], {path!r}, {out!r}, {when}, {where!r}
wrote, replace, fsync = 0, os.replace, os.fsync

def die(): os.kill(os.getpid(), signal.SIGKILL)

def replaced(a, b):
    global wrote
    wrote += 1
    if wrote == when and where == "before":
        with open(a, "r+b") as file: file.truncate(os.path.getsize(a) // 2)  # in the middle of a write
        die()
    replace(a, b)
    if wrote == when and where == "after": die()

os.replace = replaced
fit = method.run(jax.random.key(0), silos_for(method.model), 12, progress_bar=False, check=False,
                 checkpoint=path, checkpoint_every=1)
np.savez(out, *[np.asarray(leaf) for leaf in jax.tree.leaves((fit.state.server, fit.state.silos))
                if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)], loss=fit.history["loss"],
         up=fit.history["bytes_up"])
"""


def killed(name: str, path: Path, out: Path, when: int, where: str) -> int:
    here = Path(__file__).parent
    paths = [str(here), str(here / "laws"), str(here.parent)]
    script = KILLED.format(paths=paths, name=name, path=str(path), out=str(out), when=when, where=where)
    return subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True).returncode


MERGED = {"SFVI, no locals": pytest.mark.merge}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=MERGED.get(name, ())) for name in METHODS])
def test_killed_three_times(name: str, tmp_path: Path) -> None:
    """Processes that get no chance to say goodbye; the second in the middle of a write."""
    path, out, plain = tmp_path / "run", tmp_path / "out.npz", tmp_path / "plain.npz"
    for when, where in ((3, "after"), (3, "before"), (4, "after")):
        assert killed(name, path, out, when, where) == -signal.SIGKILL
    assert killed(name, path, out, 0, "") == 0
    assert killed(name, tmp_path / "other", plain, 0, "") == 0
    with np.load(out) as found, np.load(plain) as expected:
        assert found.files == expected.files
        for array in expected.files:
            np.testing.assert_array_equal(found[array], expected[array])


def halfway(path: Path, go: Any, at: int) -> tuple[Any, Any]:
    """A run, and the same gone on with from its file after so many writes."""
    files: list[bytes] = []
    write = checkpoint.replace_file

    def watched(path: Path, *parts: Any) -> None:
        write(path, *parts)
        files.append(path.read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "replace_file", watched)
        whole = go(path)
    path.write_bytes(files[at])
    return whole, go(path)


def assert_same(a: Any, b: Any) -> None:
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.merge
def test_silos_at_their_own_pace(tmp_path: Path) -> None:
    """What each silo last received is a part of the state."""
    go = lambda path: run(path, nf.PVI(model, tolerance=0), schedule="asynchronous", checkpoint_every=1)
    whole, again = halfway(tmp_path / "run", go, at=-4)
    assert_same(again.state.server, whole.state.server)
    assert_same(again.history, whole.history)


def test_silos_of_a_store(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    rows = [dict(x=draws.normal(size=4).astype("f"), y=draws.normal(size=4).astype("f")) for _ in range(20)]
    store = nf.SiloStore.from_function(rows.__getitem__, 20)
    method = nf.FedAvg(model, optim=optax.sgd(0.01), local_steps=2, start_rounds=0)
    go = lambda path: run(path, method, store, schedule=nf.schedules.sampled(3), checkpoint_every=1)
    whole, again = halfway(tmp_path / "run", go, at=2)
    assert_same(again.state.server, whole.state.server)
    assert_same(again.history, whole.history)


def test_each_silo_alone(tmp_path: Path) -> None:
    method = nf.Independent(model, optim=optax.adam(0.01), start_rounds=0)
    whole, again = halfway(tmp_path / "run", lambda path: run(path, method, checkpoint_every=2), at=0)
    for name in whole:
        assert_same(again[name].state.server, whole[name].state.server)


def test_faults_strike_as_before(tmp_path: Path) -> None:
    """Who was heard, and what is held of whom, goes on, too."""
    faults = nf.engines.Faults([nf.engines.Fault("york", "drop", rounds=[2, 3])])
    engine = nf.engines.Loopback(faults=faults)
    whole, again = halfway(tmp_path / "run", lambda path: run(path, engine=engine, checkpoint_every=1), at=2)
    assert_same(again.state.server, whole.state.server)
    assert again.history["took_part"].tolist() == whole.history["took_part"].tolist()
    assert whole.history["took_part"][:, 1].tolist() == [True, True, False, False, True, True]
