"""Saved and loaded, a fit is the same fit, without the data."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from given import Given, given_fit
from models import MODELS, glmm, normal

from numpyro_fed import guides
from numpyro_fed.data.silos import Silos
from numpyro_fed.methods import SFVI
from numpyro_fed.results.codec import decode, encode, keep_in, read_from
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.load import load
from numpyro_fed.results.save import HEADER, VERSION

KEY = jax.random.key(5)


def counties(county, num_counties, y, scale):
    mu = numpyro.sample("mu", dist.Normal(0, scale))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    sigma = numpyro.param("sigma", 1.5, constraint=dist.constraints.positive)
    with numpyro.plate("counties", num_counties):
        alpha = numpyro.sample("alpha", dist.Normal(mu, tau))
    with numpyro.plate("rows", y.shape[0]):
        mean = numpyro.deterministic("mean", alpha[county])
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


def rough(county, num_counties, y, scale):
    """The same sites, another distribution."""
    mu = numpyro.sample("mu", dist.Cauchy(0, scale))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    sigma = numpyro.param("sigma", 1.5, constraint=dist.constraints.positive)
    with numpyro.plate("counties", num_counties):
        alpha = numpyro.sample("alpha", dist.Normal(mu, tau))
    with numpyro.plate("rows", y.shape[0]):
        mean = numpyro.deterministic("mean", alpha[county])
        numpyro.sample("y", dist.Normal(mean, sigma), obs=y)


@pytest.fixture(scope="module")
def silos() -> Silos:
    data = {
        name: dict(county=np.arange(n, dtype=np.int32) % g, num_counties=g, y=normal(n, n) + 1234.5)
        for name, n, g in (("s", 4, 2), ("n", 7, 3))
    }
    return Silos(data, shared=dict(scale=np.float32(2.5)))


@pytest.fixture(scope="module")
def method() -> SFVI:
    return SFVI(counties, start_rounds=0, optim=optax.adam(1e-2))


@pytest.fixture(scope="module")
def fit(method: SFVI, silos: Silos) -> Fit:
    return method.run(KEY, silos, 3, progress_bar=False)


@pytest.fixture(scope="module")
def path(fit: Fit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit.save(tmp_path_factory.mktemp("fits") / "radon")


def same(a: Any, b: Any) -> None:
    """Bit by bit, in the same structure and types."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y) and x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_round_trip(fit: Fit, path: Path, method: SFVI, silos: Silos, tmp_path: Path) -> None:
    assert path.name == "radon.npz"
    loaded = load(path.with_suffix(""), method)  # with or without its suffix
    assert loaded.silos is None
    same((loaded.state.server, loaded.state.silos), (fit.state.server, fit.state.silos))
    assert loaded.state[:3] == fit.state[:3] and loaded.state.round == fit.state.round
    assert loaded.padded == fit.padded and loaded.seconds == fit.seconds and loaded.num_rounds == fit.num_rounds
    same(loaded.history, fit.history)
    same(loaded.params, fit.params)
    same(loaded.sample(KEY, 5), fit.sample(KEY, 5))
    again = load(loaded.save(tmp_path / "again.v2.npz"), method)
    assert again.silos is None
    same(again.state.silos, fit.state.silos)


@pytest.mark.merge
def test_without_data_it_knows_all_but_the_data(fit: Fit, path: Path, method: SFVI) -> None:
    loaded = load(path, method)
    local = fit.sample_local(KEY, 5, silo="s")
    assert set(local) == {"mu", "tau", "alpha", "mean"}
    # `mean` is computed from the silo's indices
    same(loaded.sample_local(KEY, 5, silo="s"), {name: local[name] for name in ("mu", "tau", "alpha")})
    for data, silo in ((dict(county=[0, 1]), "s"), (dict(county=[0, 3], num_counties=4), None)):
        same(loaded.predict(KEY, data, silo=silo, num_samples=5), fit.predict(KEY, data, silo=silo, num_samples=5))
    assert loaded.summary(num_samples=50).equals(fit.summary(num_samples=50))
    tree = loaded.to_arviz(KEY, 5)
    assert list(tree["posterior"]["counties"].values) == ["s[0]", "s[1]", "n[0]", "n[1]", "n[2]"]
    with pytest.raises(ValueError, match=r"the units of 's' need the silos' data.*pass silos= to nf\.load"):
        loaded.predict(KEY, silo="s")
    with pytest.raises(ValueError, match=r"pass silos= to nf\.load"):
        loaded.to_arviz(log_likelihood=True)


def test_with_silos_it_is_whole(fit: Fit, path: Path, method: SFVI, silos: Silos) -> None:
    turned = Silos({name: silos.own(name) for name in reversed(silos.names)}, shared=silos.shared)
    loaded = load(path, method, turned)
    same(loaded.predict(KEY, silo="s", num_samples=5), fit.predict(KEY, silo="s", num_samples=5))
    same(loaded.sample_local(KEY, 5, silo="n"), fit.sample_local(KEY, 5, silo="n"))


def test_the_file_has_no_data(path: Path) -> None:
    with np.load(path, allow_pickle=False) as file:
        header = json.loads(file[HEADER].tobytes())
        assert header["silos"]["s"]["dict"]["y"] == {"shape": [4], "dtype": "float32"}
        for name in file.files:
            if name != HEADER and file[name].dtype.kind == "f":
                assert not np.any(np.abs(file[name] - 1234.5) < 10)


def test_errors_say_which_differs(path: Path, method: SFVI, silos: Silos, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="another method: SFVI in the file, Given now"):
        load(path, Given(counties))
    with pytest.raises(ValueError, match=r"another variational family: .*'full'.* in the file, .*'diagonal'.* now"):
        load(path, SFVI(counties, guide=guides.StructuredNormal(global_cov="diagonal")))
    with pytest.raises(
        ValueError, match=r"another model: site 'mu' is .*Normal in the file and .*Cauchy in this model"
    ):
        load(path, SFVI(rough))
    with pytest.raises(ValueError, match=r"another model: .*takes \(x, y\), the silos give \(county, num_counties, y"):
        load(path, SFVI(glmm))
    with pytest.raises(TypeError, match=r"such as nf\.SFVI\(model\)"):
        load(path, SFVI)
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"float32 in the file, float64.*enable_x64\(False\)"):
        load(path, method)
    own = {name: silos.own(name) for name in silos.names}
    with pytest.raises(ValueError, match="has the silos s, n; silos= has s"):
        load(path, method, Silos({"s": own["s"]}, silos.shared))
    with pytest.raises(ValueError, match=r"silo 's' is .*y float32\[4\] in the file, .*y float32\[3\] now"):
        short = dict(county=own["s"]["county"][:3], num_counties=2, y=own["s"]["y"][:3])
        load(path, method, Silos(own | {"s": short}, silos.shared))
    with pytest.raises(ValueError, match="other shared arguments"):
        load(path, method, Silos(own, shared=dict(scale=np.float32(1.0))))


def test_files_that_are_not_ours(path: Path, method: SFVI, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.npz", method)
    other = tmp_path / "other.npz"
    np.savez(other, x=np.ones(3))
    text = tmp_path / "text.npz"
    text.write_text("hello")
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, **{HEADER: np.array([{"a": 1}], dtype=object)})
    for wrong in (other, text, pickled):
        with pytest.raises(ValueError, match=r"not a file of fit\.save"):
            load(wrong, method)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays[HEADER].tobytes())
    for change, message in (
        ({"version": VERSION + 1}, f"version {VERSION + 1}, this numpyro_fed reads version {VERSION}: upgrade"),
        ({"version": 2}, f"version 2, this numpyro_fed reads version {VERSION}: fit and save it again"),
        ({"format": "else"}, "its format is 'else'"),
    ):
        arrays[HEADER] = np.frombuffer(json.dumps(header | change).encode(), np.uint8)
        np.savez(other, **arrays)
        with pytest.raises(ValueError, match=message):
            load(other, method)


class Pair(NamedTuple):
    a: Any
    b: Any


def test_trees_come_back_as_they_were() -> None:
    with jax.enable_x64(True):
        double = jnp.arange(3, dtype=jnp.float64) / 3
    tree = {
        "named": Pair(double, (jnp.ones(2, jnp.bfloat16), [np.arange(2), None])),
        "empty": optax.EmptyState(),
        "numbers": (1, True, 0.1, float("inf"), "text"),
        "zero": jnp.zeros((0, 3)),
    }
    arrays: dict[str, np.ndarray] = {}
    read = lambda: decode(json.loads(json.dumps(encode(tree, keep_in(arrays)))), read_from(arrays))
    back = read()
    assert back["numbers"] == tree["numbers"] and isinstance(back["empty"], optax.EmptyState)
    same(back["named"], tree["named"])
    same(back["zero"], tree["zero"])
    key = decode(encode(KEY, keep_in(arrays)), read_from(arrays))
    assert jax.random.key_data(key).tolist() == jax.random.key_data(KEY).tolist() and key.dtype == KEY.dtype
    moved = decode({"named": "optax.gone:ScaleState", "fields": ["count"], "items": [3]}, read_from({}))
    assert moved.count == 3
    with pytest.raises(TypeError, match="cannot save a set"):
        encode({1, 2}, keep_in({}))


@pytest.mark.parametrize("name", ["nested arguments", "hospital plate", "reshape", "silo level"])
def test_any_arguments(name: str, tmp_path: Path) -> None:
    case = MODELS[name]
    fit = given_fit(case.model, case.silos(), **case.options)
    loaded = load(fit.save(tmp_path / "fit"), Given(case.model, **case.options))
    silo = fit.state.names[0]
    same(loaded.sample_local(KEY, 3, silo=silo), fit.sample_local(KEY, 3, silo=silo))
