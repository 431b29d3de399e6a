"""The same model as pooled, or a question: what silos would do in silence is asked, noted or refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from models import MODELS
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed.data.stack import stack_of
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.model import fingerprint, indices, mixing
from numpyro_fed.model.build import split_model
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.run import survey
from numpyro_fed.run.prepare import prepare

KEY = jax.random.key(0)


def three(*columns: str, rows: int = 40, **more: Any) -> nf.Silos:
    """Three silos of equal size."""
    rng = np.random.default_rng(0)
    data = {name: (rng.normal(size=3 * rows) + np.repeat([0, 2, 4], rows)).astype("f") for name in columns}
    return nf.split(np.repeat(list("abc"), rows), **data, **more)


# --- rows that look at all others of their silo -----------------------------------------------------------------------


def regression(scaled: Callable[[Any], Any]) -> Callable[..., None]:
    def model(x, y):
        b = numpyro.sample("b", dist.Normal(0, 5).expand([2]))
        s = numpyro.sample("s", dist.Exponential(1.0))
        with numpyro.plate("n", x.shape[0]):
            numpyro.sample("y", dist.Normal(b[0] + b[1] * scaled(x), s), obs=y)

    return model


def risk_sets(x, y):
    """Cox's partial likelihood, y the times."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    at_risk = y[None, :] >= y[:, None]
    numpyro.factor("y", b * x - jax.nn.logsumexp(jnp.where(at_risk, b * x, -jnp.inf), axis=1))


def process(x, y):
    """A Gaussian process within a silo."""
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    kernel = scale * jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-3 * jnp.eye(x.shape[0])
    with numpyro.plate("n", x.shape[0]):
        e = numpyro.sample("e", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(jnp.linalg.cholesky(kernel) @ e, 1.0), obs=y)


def group_level(x, y):
    """The prior of a local latent, in place of a likelihood."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("n", x.shape[0]):
        level = numpyro.sample("level", dist.Normal(b * (x - x.mean()), 1.0))
        numpyro.sample("y", dist.Normal(level, 1.0), obs=y)


LOOK_AROUND = {
    "centred": (regression(lambda x: x - x.mean()), "y"),
    "standardised": (regression(lambda x: (x - x.mean()) / x.std()), "y"),
    "ranks": (regression(lambda x: jnp.argsort(jnp.argsort(x)) / 40), "y"),
    "largest": (regression(lambda x: x / x.max()), "y"),
    "median": (regression(lambda x: x - jnp.median(x)), "y"),
    "risk sets": (risk_sets, "y"),
    "process": (process, "y"),
    "prior of locals": (group_level, "level"),
}


@pytest.mark.parametrize("name", LOOK_AROUND)
def test_rows_that_look_at_all_others_are_found(name: str) -> None:
    model, site = LOOK_AROUND[name]
    silos = three("x", "y")
    assert prepare(model, silos).survey.around == (site,)


def test_what_is_meant_is_not_asked() -> None:
    model, silos = LOOK_AROUND["standardised"][0], three("x", "y")
    assert prepare(model, silos, local=("y",)).survey.around == ()
    assert prepare(model, silos.only("a")).survey.around == ()  # one silo's mean is that of all data


def test_rows_that_look_at_all_others_are_found_in_float64(x64: None) -> None:
    assert prepare(LOOK_AROUND["standardised"][0], three("x", "y", rows=400)).survey.around == ("y",)


def test_integers_are_moved_too() -> None:
    silos = three("y", x=np.random.default_rng(1).integers(0, 9, 120))
    assert prepare(regression(lambda x: x - x.mean()), silos).survey.around == ("y",)


def autoregression(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    before = jnp.concatenate([jnp.zeros(1), y[:-1]])
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(a * before, 1.0), obs=y)


def matched_pairs(x, y):
    b = numpyro.sample("b", dist.Normal(0, 1))
    difference = (x.reshape(-1, 2) - x.reshape(-1, 2)[:, ::-1]).reshape(-1)
    with numpyro.plate("n", x.shape[0]):
        numpyro.sample("y", dist.Normal(b * difference, 1.0), obs=y)


NEIGHBOURS = {
    "no others": regression(lambda x: x),
    "autoregression": autoregression,
    "matched pairs": matched_pairs,
    "households of eight": regression(lambda x: (x.reshape(-1, 8) - x.reshape(-1, 8).mean(1)[:, None]).reshape(-1)),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
@pytest.mark.filterwarnings("error")
def test_neighbours_are_not_all_others(name: str) -> None:
    silos = three("y") if name == "autoregression" else three("x", "y")
    assert prepare(NEIGHBOURS[name], silos).survey.around == ()


FEW = [
    "glmm",
    "classes of counties",
    "long format",
    "crossed own plates of equal sizes",
    "pairs",
    "obs_mask",
    "reshape",
    "class of silo",
]


@pytest.mark.parametrize("name", tiers(MODELS, *FEW))
def test_ordinary_models_do_not_look_around(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "FEWEST", 1)  # their silos are small
    case = MODELS[name]
    split = split_model(case.model, case.silos(), **case.options, check=False)
    stack = stack_of(case.silos(), case.silos(), split.spec, split.partition.axes)
    for silo in stack.names:
        found = jax.device_get(mixing.rows_look_around(split, stack.data(silo)))
        assert 1 not in found.values(), (silo, found)


def test_a_run_warns_and_the_table_notes_it(tmp_path: Any) -> None:
    """Silos of equal size, whose pooled slope is .91: each silo's own mean would give .36."""
    rng = np.random.default_rng(0)
    x = (rng.normal(size=120) + np.repeat([0, 2, 4], 40)).astype("f")
    silos = nf.split(np.repeat(list("abc"), 40), x=x, y=(1 + 0.5 * x + rng.normal(size=120)).astype("f"))
    model = regression(lambda x: (x - x.mean()) / x.std())
    method = nf.FedAvg(model)
    words = r"'y' depends on the data of nearly all other rows.*standardize.*local=\['y']"
    with pytest.warns(UserWarning, match=words) as found:
        fit = method.run(KEY, silos, 1, progress_bar=False)
    assert found[0].filename == __file__
    assert "note: the log density of a row of site 'y'" in str(fit.partition)
    assert "note" in fit.partition._repr_html_()
    assert "note" in str(nf.load(fit.save(tmp_path / "fit"), method).partition)


# --- one number for all silos, or each its own? -----------------------------------------------------------------------


def site_effect(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    theta = numpyro.sample("theta", dist.Normal(mu, tau))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(theta, 1), obs=y)


def test_a_number_with_a_populations_prior_is_asked_about() -> None:
    silos = three("y")
    part = nf.partition(site_effect, silos)
    assert part.global_sites == ("mu", "tau", "theta")
    (note,) = part.notes
    for word in ("'theta' is one number", "'mu' and 'tau'", "local=['theta']", "shared=['theta']"):
        assert word in note
    assert note in str(part)
    assert nf.partition(site_effect, silos, local="theta").notes == ()
    assert nf.partition(site_effect, silos, shared="theta").notes == ()
    assert nf.partition(site_effect, silos.only("a")).notes == ()


def level_of_levels(y):
    """A hierarchy of globals: each has another global below it, but the last, which has a row for each of its items."""
    top = numpyro.sample("top", dist.Normal(0, 1))
    middle = numpyro.sample("middle", dist.Normal(top, 1))
    items = numpyro.sample("items", dist.Normal(middle, 1).expand([2]))
    numpyro.sample("y", dist.Normal(items, 1), obs=y)


def test_other_globals_are_not_asked_about() -> None:
    silos = nf.Silos([dict(y=np.ones((n, 2), "f")) for n in (3, 4)])
    assert nf.partition(level_of_levels, silos).notes == ()
    assert nf.partition(regression(lambda x: x), three("x", "y")).notes == ()


# --- indices that point beyond their array ----------------------------------------------------------------------------


def regions(region, y):
    """A global for each of three regions."""
    with numpyro.plate("regions", 3):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(a[region], 1), obs=y)


def counties(county, num, y):
    """A local for each of the silo's counties; looked up twice."""
    tau = numpyro.sample("tau", dist.HalfNormal(jnp.ones(2)))
    with numpyro.plate("counties", num):
        a = numpyro.sample("a", dist.Normal(0, tau[0]))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(a[county], tau[1]), obs=y)


def levels(uranium, county, y):
    """A covariate of the silo's counties, no latents."""
    b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(b * uranium[county], 1), obs=y)


def coded(x, y):
    """A column of codes among others."""
    a = numpyro.sample("a", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(a[x[:, 1].astype(int)], 1), obs=y)


def site_of_silo(site, y):
    """One number for a whole silo."""
    a = numpyro.sample("a", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("n", y.shape[0]):
        numpyro.sample("y", dist.Normal(a[site], 1), obs=y)


y = lambda n: np.ones(n, "f")
i = lambda *values: np.array(values)
INDEXED: dict[str, tuple[Callable[..., None], dict[str, dict[str, Any]], dict[str, Any], tuple[str, ...]]] = {
    "one-based": (
        regions,
        {"a": dict(region=i(0, 1, 2), y=y(3)), "b": dict(region=i(1, 2), y=y(2))},
        dict(region=i(3, 1), y=y(2)),
        ("by region", "row 3", "3 rows (0 to 2", "'a'", "region - 1", "groups=dict(region="),
    ),
    "an own plate, padded": (
        counties,
        {"a": dict(county=i(0, 1, 4), num=5, y=y(3)), "b": dict(county=i(1, 2), num=3, y=y(2))},
        dict(county=i(3, 1), num=3, y=y(2)),
        ("by county", "row 3", "3 rows"),
    ),
    "an own array": (
        levels,
        {"a": dict(county=i(0, 2), uranium=y(3), y=y(2)), "b": dict(county=i(1, 2, 1), uranium=y(3), y=y(3))},
        dict(county=i(2, 7), uranium=y(3), y=y(2)),
        ("by county", "row 7", "'uranium'"),
    ),
    "a column of codes": (
        coded,
        {"a": dict(x=np.zeros((3, 2), "f"), y=y(3)), "b": dict(x=np.zeros((2, 2), "f"), y=y(2))},
        dict(x=np.full((2, 2), 5, "f"), y=y(2)),
        ("by x", "row 5"),
    ),
    "a number of the silo": (
        site_of_silo,
        {"a": dict(site=np.array(0), y=y(3)), "b": dict(site=np.array(2), y=y(2))},
        dict(site=np.array(-4), y=y(2)),
        ("by site", "row -1"),
    ),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_beyond_their_array_are_refused(name: str) -> None:
    model, good, bad, words = INDEXED[name]
    assert all(np.all(fine) for fine in answers(model, nf.Silos(good)).in_range.values())
    with pytest.raises(PartitionError) as error:
        prepare(model, nf.Silos(good | {"b": bad}))
    for word in ("silo 'b'", *words):
        assert word in str(error.value)


def answers(model: Callable[..., None], silos: nf.Silos, **options: Any) -> survey.Answer:
    split = split_model(model, silos, **options, check=False)
    return survey.take(split, stack_of(silos, silos, split.spec, split.partition.axes), Vmap(), None)[0]


LOOKED_UP = {
    "long format": {"county"},
    "county covariates": {"county"},
    "nested plates": {"district"},
    "crossed own plates": {"teacher", "pupil"},
    "crossed own plates of equal sizes": {"teacher", "pupil"},
    "pairs": {"receiver", "sender"},
    "hospital plate": {"hospital"},
    "classes of counties": {"county"},
}


@pytest.mark.parametrize("name", tiers(MODELS, *FEW))
def test_indices_of_ordinary_models_are_there(name: str) -> None:
    case = MODELS[name]
    split = split_model(case.model, case.silos(), **case.options, check=False)
    stack = stack_of(case.silos(), case.silos(), split.spec, split.partition.axes)
    for silo in stack.names:
        found = indices.in_range(split, stack.data(silo))
        assert all(bool(fine) for fine in found.values()), (silo, found)
        assert set(found) == LOOKED_UP.get(name, set())


def test_from_the_end_is_meant() -> None:
    """Python's -1; of an array of the silo's own that is padded it would be a padded row."""
    silos = {"a": dict(region=i(0, -1, -3), y=y(3)), "b": dict(region=i(1, 2), y=y(2))}
    assert bool(np.all(answers(regions, nf.Silos(silos)).in_range["region"]))
    own = {"a": dict(county=i(0, 1, 4), num=5, y=y(3)), "b": dict(county=i(-1, 2), num=3, y=y(2))}
    with pytest.raises(PartitionError, match="county has negative numbers, which count from the end"):
        prepare(counties, nf.Silos(own))


def clipped(region, y):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.take(a, region, mode="clip") + a.at[region].get(mode="fill"), 1), obs=y)


def test_who_says_what_becomes_of_an_index_is_left_alone() -> None:
    assert answers(clipped, nf.Silos([dict(region=i(0, 7), y=y(2))])).in_range == {}


def classes(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2, 3]).to_event(2))
    log_p = jax.nn.log_softmax(x @ w)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.factor("chosen", log_p[jnp.arange(y.shape[0]), y])


def cells(y, at, num_items):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    items, rows = numpyro.plate("items", num_items, dim=-2), numpyro.plate("rows", y.shape[0], dim=-1)
    with items, rows:
        cell = numpyro.sample("cell", dist.Normal(mu, 1))
    with rows:
        numpyro.sample("y", dist.Normal(cell[at, jnp.arange(y.shape[0])], 1), obs=y)


@pytest.mark.parametrize("last", [2, 3])
def test_a_column_that_is_chosen_for_every_row(last: int) -> None:
    """``log_p[jnp.arange(n), y]``: places of rows are nobody's numbers, and go on into the padding."""
    draws = np.random.default_rng(0)
    rows = lambda n: dict(x=draws.normal(size=(n, 2)).astype("f"), y=np.array([0, last] + [1] * (n - 2), np.int32))
    silos = nf.Silos({"leeds": rows(3), "york": rows(5)})
    if last == 2:
        assert nf.EP(classes).prepare(silos).split.dim == 6
        return
    with pytest.raises(PartitionError, match=r"silo 'leeds': by y the model looks up row 3 of an array of 3 rows"):
        nf.EP(classes).prepare(silos)


@pytest.mark.parametrize("num_items", [3, 4, 6])
def test_a_table_whose_sides_are_as_long_as_one_another(num_items: int) -> None:
    """Silos of two and three rows are padded to four: four items are no padded rows."""
    own = lambda n, *at: dict(y=np.ones(n, "f"), at=np.array(at, np.int32))
    method = nf.EP(cells, local=["items"])
    silos = lambda last: nf.Silos({"leeds": own(2, 0, last), "york": own(3, 1, 1, 1)}, shared=dict(num_items=num_items))
    assert method.prepare(silos(num_items - 1)).stack.buckets[0].lengths == {"rows": 4}
    with pytest.raises(
        PartitionError, match=rf"by at the model looks up row {num_items} of an array of {num_items} rows"
    ):
        method.prepare(silos(num_items))


def test_predictions_refuse_indices_beyond_their_array() -> None:
    _, good, _, _ = INDEXED["one-based"]
    fit = nf.FedAvg(regions).run(KEY, nf.Silos(good), 1, progress_bar=False)
    assert fit.predict(KEY, dict(region=i(0, 2)), num_samples=2)["y"].shape == (2, 2)
    with pytest.raises(ValueError, match=r"^data: by region the model looks up row 3 of an array of 3 rows"):
        fit.predict(KEY, dict(region=i(1, 3)), num_samples=2)


# --- groups that are renumbered within each silo ----------------------------------------------------------------------


def test_a_renumbered_index_of_a_plate_sized_in_the_model_is_refused() -> None:
    """Region 2 is b's first, and would be region 0 of all silos."""
    cut = lambda **groups: nf.split(list("aab"), groups=groups, region=i(0, 1, 2), y=y(3))
    assert nf.partition(regions, cut()).global_sites == ("a",)
    with pytest.raises(PartitionError) as error:
        nf.partition(regions, cut(region=None))
    for word in ("region", "renumbered from 0 within each silo", "'a'", "groups=dict(region='num_region')", "leave"):
        assert word in str(error.value)
    assert nf.partition(regions, cut(region=None).only("a")).global_sites == ("a",)  # one silo's numbers are its own


def test_a_renumbered_index_of_the_silos_own_rows_is_fine() -> None:
    silos = nf.split(list("aab"), groups=dict(county="num"), county=i(0, 1, 2), num=3, y=y(3))
    assert nf.partition(counties, silos).local_sites == ("a",)
    with pytest.raises(PartitionError, match="renumbered"):
        nf.partition(
            counties, nf.split(list("ab"), groups=dict(county="num"), county=i(0, 1), num=2, y=y(2)), shared="a"
        )
    own = nf.split(list("aabb"), groups=dict(county=None), county=i(0, 1, 2, 3), uranium=y(4), y=y(4))
    assert nf.partition(levels, own).global_sites == ("b",)


# --- numbers and rows that would become others ------------------------------------------------------------------------


def test_integers_beyond_32_bits_are_refused() -> None:
    silos = lambda a, b: nf.Silos({"a": dict(a=i(1, 2), b=i(3)), "b": dict(a=a, b=b)})
    silos(i(2**31 - 1, 0), i(-(2**31)))
    with pytest.raises(ValueError) as error:
        silos(i(0, 2**31), i(-(2**40)))
    for word in ("silo 'b'", "'a' has 2147483648", "'b' has -1099511627776", "enable_x64()"):
        assert word in str(error.value)
    with pytest.raises(ValueError, match="shared argument 'a' has 4294967296"):
        nf.Silos([dict(y=y(2))], shared=dict(a=np.array([2**32], np.uint64)))
    nf.Silos([dict(y=y(2))], shared=dict(a=np.array([2**32 - 1], np.uint32)))  # JAX has these
    with pytest.raises(ValueError, match="beyond 32 bits"):
        nf.split(["a", "b"], y=y(2), person=i(1, 10**10))


def test_integers_beyond_32_bits_are_fine_in_float64(x64: None) -> None:
    silos = nf.Silos([dict(a=i(1, 10**10))])
    assert silos["0"]["a"].dtype == np.int64


def test_float64_is_said_once_for_all_columns() -> None:
    columns = dict(a=np.ones(4), b=np.ones(4), c=np.ones((4, 2)))
    with pytest.warns(UserWarning) as found:
        nf.split(list("aabb"), **columns)
    (told,) = found
    assert "a, b, c are float64" in str(told.message)
    assert told.filename == __file__


def test_pandas_rows_that_do_not_belong_together_are_refused() -> None:
    frame = pd.DataFrame(dict(hospital=list("aabb"), x=y(4), y=y(4)), index=[3, 5, 8, 9])
    assert nf.split(frame.hospital, x=frame.x, y=frame.y, z=y(4)).num_silos == 2
    sorted_ = frame.y.sort_index(ascending=False)
    words = r"'x' and 'y' .* 4 rows whose indices differ, first in row 0 \(3 and 9\).*y.loc\[x.index].*y.to_numpy\(\)"
    with pytest.raises(ValueError, match=words):
        nf.split(frame.hospital.to_numpy(), x=frame.x, y=sorted_)
    with pytest.raises(ValueError, match="'labels' and 'y'"):
        nf.split(frame.hospital, y=sorted_)
    with pytest.raises(ValueError, match="silo 'leeds': 'x' and 'y'"):
        nf.Silos({"leeds": dict(x=frame.x, y=sorted_)})
    group_level = pd.Series(y(2), index=["n", "s"])  # other rows have another index
    nf.Silos([dict(x=frame[["x", "y"]], y=frame.y, u=group_level)])


# --- a file of another prior ------------------------------------------------------------------------------------------


def with_priors(mean: float = 0.0, sd: float = 1000.0, scale: float = 1.0, start: float = 1.0) -> Callable[..., None]:
    def model(y):
        width = numpyro.param("width", start, constraint=dist.constraints.positive)
        mu = numpyro.sample("mu", dist.Normal(mean, sd))
        tau = numpyro.sample("tau", dist.HalfNormal(scale * width))
        w = numpyro.sample("w", dist.Normal(0, tau).expand([3]).to_event(1))
        with numpyro.plate("n", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu + w.sum(), 1), obs=y)

    return model


def of(model: Callable[..., None]) -> fingerprint.Fingerprint:
    return fingerprint.fingerprint(split_model(model, nf.Silos([dict(y=y(3)), dict(y=y(2))]), check=False))


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_priors_are_told_apart(precision: str) -> None:
    with jax.enable_x64(precision == "float64"):
        first = of(with_priors())
        assert fingerprint.differing(first, of(with_priors())) is None
        assert fingerprint.differing(first, of(with_priors(start=2.0))) is None  # theta's start is no prior
        assert fingerprint.differing(first, of(with_priors(mean=1.0))) == "mu"  # log densities differ by 1e-6
        assert fingerprint.differing(first, of(with_priors(sd=900.0))) == "mu"
        assert fingerprint.differing(first, of(with_priors(scale=1.1))) == "tau"


def test_rounding_is_no_other_prior() -> None:
    single = of(with_priors())
    with jax.enable_x64(True):
        double = of(with_priors())
    assert fingerprint.differing(single, double) is None
    assert any(np.any(single["gradient"][name] != double["gradient"][name]) for name in single["gradient"])


def test_a_file_of_another_prior_is_refused(tmp_path: Any) -> None:
    silos = nf.Silos(INDEXED["one-based"][1])

    def wider(region, y):
        with numpyro.plate("regions", 3):
            a = numpyro.sample("a", dist.Normal(0, 2))
        with numpyro.plate("n", y.shape[0]):
            numpyro.sample("y", dist.Normal(a[region], 1), obs=y)

    path = nf.FedAvg(regions).run(KEY, silos, 1, progress_bar=False).save(tmp_path / "fit")
    assert nf.load(path, nf.FedAvg(regions)).state.round == 1
    with pytest.raises(ValueError, match=r"another model: the prior of site 'a' is another one .*fitted again"):
        nf.load(path, nf.FedAvg(wider))
