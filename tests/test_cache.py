"""What a run compiles: few programs, the model traced few times, and nothing in a second process."""

import json
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed import ahead, host
from numpyro_fed.memo import forget

STUDY = """
import json, sys
import jax
import numpy as np
import numpyro_fed as nf
from tests.test_cache import Model, silos

counted = {"cache_hits": 0, "cache_misses": 0}
def listen(event, **_):
    name = event.rpartition("/")[2]
    counted[name] = counted.get(name, 0) + 1
jax.monitoring.register_event_listener(listen)
path = nf.enable_cache(sys.argv[1])
fit = nf.EP(Model()).run(jax.random.key(0), silos(), progress_bar=False, check=True)
mean = np.asarray(fit.normal().mean).tolist()
print(json.dumps({"path": str(path), "mean": mean, **{name: counted[name] for name in ("cache_hits", "cache_misses")}}))
"""


class Model:
    """Random intercepts, and how often they were traced."""

    def __init__(self) -> None:
        self.traced = 0

    def __call__(self, x, y):
        self.traced += 1
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            own = numpyro.sample("own", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(x @ beta + own, 1), obs=y)


def silos() -> nf.Silos:
    rng = np.random.default_rng(0)
    draw = lambda num: dict(x=rng.normal(size=(num, 2)).astype("f"), y=rng.normal(size=num).astype("f"))
    return nf.Silos({"york": draw(5), "leeds": draw(7)})


@pytest.fixture
def programs() -> Iterator[list[str]]:
    """Names of what was compiled, or taken from disk."""
    found: list[str] = []

    def listen(event: str, duration: float, **options: str) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(str(options.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.slow
@pytest.mark.merge
def test_a_first_run_compiles_few_programs(programs: list[str]) -> None:
    # 14: a phase each (survey, mode, rounds, points, locals, modes), two silos' certificates, the prior, three phases'
    # fresh states, the globals' values, what silos' locals are drawn at. An eager operation is one more
    model, data, key = Model(), silos(), jax.random.key(0)
    forget()
    jax.clear_caches()
    programs.clear()
    nf.EP(model).run(key, data, progress_bar=False, check=True)
    assert len(programs) <= 14, programs
    assert model.traced <= 16


@pytest.mark.merge
def test_preparing_compiles_the_certificate_and_the_survey(programs: list[str]) -> None:
    # all that comes before a method that does nothing meanwhile: two silos' certificates, one survey
    model, data = Model(), silos()
    forget()
    jax.clear_caches()
    programs.clear()
    nf.SFVI(model).prepare(data)
    assert len(programs) <= 3, programs
    assert model.traced <= 13


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    settings = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}

    def study() -> dict:
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", STUDY, str(tmp_path / "programs")],
            env={**settings, "PYTHONPATH": str(root)},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(ran.stdout.splitlines()[-1])

    first, second = study(), study()
    assert first["cache_misses"] > 5
    assert second["cache_misses"] == 0
    assert second["cache_hits"] >= first["cache_misses"]
    assert second["mean"] == first["mean"]


@pytest.mark.parametrize("given", [None, "base", "named"])
def test_where_programs_are_kept(given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = (
        "jax_enable_compilation_cache",
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if given == "base":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "base"))
    expected = {None: ".cache/numpyro_fed", "base": "base/numpyro_fed", "named": "mine"}[given]
    try:
        path = nf.enable_cache(tmp_path / "mine" if given == "named" else None)
        assert path == (tmp_path / expected).resolve()
        assert path.is_dir()
        assert jax.config.jax_compilation_cache_dir == str(path)
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_keys_on_the_host_are_those_of_jax() -> None:
    key = jax.random.key(3)
    for word in (0, 1, 2**31, 2**32 - 1, 123456789):
        assert host.key_of(word) == jax.random.key(np.uint32(word))
        assert host.folded(key, word) == jax.random.fold_in(key, np.uint32(word))
        key = host.folded(key, word)
    other = jax.random.key(0, impl="rbg")
    assert host.folded(other, 5) == jax.random.fold_in(other, 5)


def test_what_is_put_is_a_copy_of_the_programs_type() -> None:
    array = np.arange(3.0)
    put = host.put(array)
    array[0] = 9.0
    assert float(put[0]) == 0.0
    assert put.dtype == host.real_dtype()
    assert not put.weak_type


@pytest.mark.parametrize("method", [nf.EP, nf.PVI, nf.SFVI], ids=lambda method: method.__name__)
def test_what_is_compiled_ahead_is_what_is_asked_for(method: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is begun for other shapes than it is called with is work for nothing, and nobody would notice."""

    def everything(later: list) -> None:
        while later:
            later.pop(0)()

    monkeypatch.setattr(ahead, "beside", everything)  # whether there is time or not; and what is wrong is raised
    monkeypatch.setattr(ahead, "worthwhile", lambda: True)
    monkeypatch.setattr(ahead, "_begun", OrderedDict())
    forget()
    method(Model()).run(jax.random.key(0), silos(), 3, progress_bar=False, check=True)
    assert len(ahead._begun) > 5
    assert not [key[1] for key, compiled in ahead._begun.items() if compiled]  # [] once it was asked for
