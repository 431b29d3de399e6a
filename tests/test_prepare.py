"""Preparation without pooling: what pooled NumPy would give, from counted sums, with every silo's door shut."""

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from sealed import sealed

import numpyro_fed as nf
from numpyro_fed.engines import wire
from numpyro_fed.prepare.coding import hide_small
from numpyro_fed.prepare.knots import rounded_counts

RNG = np.random.default_rng(0)
START = RNG.bit_generator.state
SIZES = {"ragged": (40, 7, 120), "one silo": (30,), "one row": (1, 25, 6)}
PROBS = [0.1, 0.275, 0.5, 0.725, 0.9]


@pytest.fixture(autouse=True)
def _same_numbers_for_each_test() -> None:
    RNG.bit_generator.state = START


def cut(sizes: tuple[int, ...], **arguments: np.ndarray) -> nf.Silos:
    return nf.split(np.repeat([f"s{j}" for j in range(len(sizes))], sizes), **arguments)


def pooled(silos: nf.Silos, name: str) -> np.ndarray:
    return np.concatenate([silos[silo][name] for silo in silos.names])


def columns(sizes: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    n = sum(sizes)
    return RNG.normal(50, 12, n).astype("f"), (RNG.normal(size=(n, 3)) * [1, 10, 1e-3] + [0, 5, 2]).astype("f")


# --- standardize ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_columns_are_scaled_as_pooled_numpy_scales_them(sizes: tuple[int, ...]) -> None:
    age, x = columns(sizes)
    silos, scaling = nf.prepare.standardize(cut(sizes, age=age, x=x), ["age", "x"], threshold=1)
    for name, raw in dict(age=age, x=x).items():
        raw = raw.astype(np.float64)
        # both are float64 sums of about a hundred numbers of one size: 1e-12 is a thousand roundings
        np.testing.assert_allclose(scaling.mean[name], raw.mean(0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(scaling.sd[name], raw.std(0), rtol=1e-12)
        found = pooled(silos, name)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, ((raw - scaling.mean[name]) / scaling.sd[name]).astype("f"))


def test_digits_survive_far_from_zero() -> None:
    """Raw sums of squares of 242,000 would lose an sd of 5 in float32, and seven digits of it in float64."""
    y = RNG.normal(242_000, 5, 900).astype("f")
    silos, scaling = nf.prepare.standardize(cut((300, 600), y=y), "y")
    assert abs(float(scaling.sd["y"]) - y.astype(np.float64).std()) < 1e-9
    z = pooled(silos, "y").astype(np.float64)
    assert abs(z.mean()) < 1e-7 and abs(z.std() - 1) < 1e-7  # float32's rounding, averaged over 900 rows
    np.testing.assert_allclose(scaling.undo(dict(y=z))["y"], y, rtol=1e-9)


def test_small_silos_are_scaled_and_not_counted() -> None:
    age, _ = columns((40, 4, 30))
    silos, scaling = nf.prepare.standardize(cut((40, 4, 30), age=age), "age")
    told = np.delete(age, np.arange(40, 44)).astype(np.float64)
    assert scaling.left_out == ("s1",) and scaling.num_rows == {"age": 70}
    np.testing.assert_allclose(scaling.mean["age"], told.mean(), rtol=1e-12)
    np.testing.assert_allclose(silos["s1"]["age"], (age[40:44] - told.mean()) / told.std(), rtol=1e-5)
    assert "70 rows of 2 silos, without 's1' (too few)" in repr(scaling)


def test_a_small_silo_says_nothing_at_all() -> None:
    """Whatever its rows are, what the server computes is the same."""
    age, _ = columns((40, 4))
    other = np.where(np.arange(44) < 40, age, -1e6).astype("f")
    first, second = (nf.prepare.standardize(cut((40, 4), age=x), "age")[1] for x in (age, other))
    assert first.mean == second.mean and first.sd == second.sd


def test_everything_else_stays() -> None:
    county = np.repeat(np.arange(6), 5)
    given = dict(
        y=RNG.normal(size=30).astype("f"), county=county, J=6, degree=3, uranium=RNG.normal(size=6).astype("f")
    )
    silos = nf.split(np.repeat(["a", "b"], [10, 20]), groups=dict(county="J"), **given)
    new, scaling = nf.prepare.standardize(silos, "uranium", threshold=1)
    assert scaling.num_rows == {"uranium": 6}  # over counties, not over houses
    assert (
        new.names == silos.names and new.own_counts == silos.own_counts and new.shared == silos.shared == {"degree": 3}
    )
    for name in silos.names:
        assert new[name]["y"] is silos[name]["y"] and new[name]["J"] == silos[name]["J"]
    np.testing.assert_allclose(pooled(new, "uranium").mean(), 0, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, bool, np.float32, np.float64])
def test_types_in_a_float32_program(dtype: Any) -> None:
    x = np.round(RNG.normal(size=30)).astype(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nf.Silos says that float64 will be computed in float32
        silos = cut((10, 20), x=x)
    new, scaling = nf.prepare.standardize(silos, "x")
    assert new["s0"]["x"].dtype == np.float32
    assert scaling.apply(dict(x=x))["x"].dtype == np.float32


@pytest.mark.parametrize(("given", "found"), [("f4", "f4"), ("f8", "f8"), ("i8", "f8")])
def test_types_in_a_float64_program(x64: None, given: str, found: str) -> None:
    silos = cut((10, 20), x=(RNG.normal(size=30) * 3).astype(given))
    new, _ = nf.prepare.standardize(silos, "x")
    assert new["s0"]["x"].dtype == np.dtype(found)
    assert nf.prepare.quantiles(silos, "x", [0.5])[0]["s0"]["knots"].dtype == np.float64


def test_new_data_are_scaled_as_the_silos_were() -> None:
    age, x = columns((20, 30))
    silos = cut((20, 30), age=age, x=x)
    new, scaling = nf.prepare.standardize(silos, ["age", "x"])
    applied = scaling.apply(dict(age=age[:20], b=3))
    np.testing.assert_array_equal(applied["age"], new["s0"]["age"])
    assert applied["b"] == 3
    again = scaling.apply(sealed(silos))  # held-out silos: each in its own room
    np.testing.assert_array_equal(again.own("s1")["x"], new["s1"]["x"])
    back = scaling.undo(dict(x=np.stack([new["s0"]["x"]] * 4)))["x"]  # draws in front
    np.testing.assert_allclose(back[2], x[:20], rtol=1e-5, atol=1e-5)
    assert scaling.apply(dict(age=[50.0, 60.0]))["age"].shape == (2,)


# --- levels -----------------------------------------------------------------------------------------------------------

DRUGS = {
    "leeds": dict(drug=["statin"] * 6 + ["none"] * 8, y=np.ones(14, "f")),
    "york": dict(drug=["none"] * 9 + ["novel"] * 2 + ["statin"], y=np.ones(12, "f")),
    "hull": dict(drug=["aspirin"] * 7, y=np.ones(7, "f")),
}


def test_codes_are_the_same_everywhere() -> None:
    silos, levels = nf.prepare.levels(DRUGS, dict(drug="num_drugs"))
    assert levels.labels == {"drug": ("aspirin", "none", "statin", "other")}
    assert silos["leeds"]["drug"].tolist() == [2] * 6 + [1] * 8
    assert silos["york"]["drug"].tolist() == [1] * 9 + [3] * 2 + [2]  # rare in york, and known from leeds
    assert silos["hull"]["drug"].tolist() == [0] * 7
    assert silos["hull"]["drug"].dtype == np.int32
    assert silos.shared == {"num_drugs": 4} and levels.num_levels("drug") == 4
    np.testing.assert_array_equal(silos["york"]["y"], DRUGS["york"]["y"])


def test_every_level_is_kept_with_threshold_one() -> None:
    silos, levels = nf.prepare.levels(DRUGS, ["drug"], threshold=1)
    assert levels.labels == {"drug": ("aspirin", "none", "novel", "statin")}
    assert levels.table["rows"].tolist() == [7, 17, 2, 7] and not levels.table["hidden_in"].any()
    for name, own in DRUGS.items():
        assert levels.undo(silos[name])["drug"].tolist() == own["drug"]


def test_small_counts_do_not_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that crosses names a rare level, or has a count of 1 to 4."""
    crossed, encode = [], wire.encode
    monkeypatch.setattr(wire, "encode", lambda tree: crossed.append(tree) or encode(tree))
    _, levels = nf.prepare.levels(DRUGS, "drug")
    leaves = jax.tree.leaves(crossed)
    assert not any(b"novel" in bytes(leaf) for leaf in leaves if leaf.dtype == np.uint8)
    counts = np.concatenate([leaf for leaf in leaves if leaf.dtype == np.int64 and leaf.ndim])
    assert len(counts) == 3 * 4 and not np.any((counts > 0) & (counts < 5))
    assert levels.table["hidden_in"].tolist() == [0, 1, 1, 1]  # york: 3 rows hidden are too few, the 9 are too


@pytest.mark.parametrize("counts", [[40, 2, 0, 9], [3], [4, 4], [0, 0], [5, 6], [1, 100], [2, 7, 7, 50]])
def test_no_small_count_can_be_worked_out(counts: list[int]) -> None:
    found, counts = hide_small(np.array(counts), 5), np.array(counts)
    hidden = found == -1
    assert not np.any((found > 0) & (found < 5))
    np.testing.assert_array_equal(found[~hidden], counts[~hidden])
    # the number of rows is known, so the sum of the hidden ones is: they are none, five or more, or all rows there are
    assert counts[hidden].sum() not in range(1, 5) or not np.any(found > 0)


@pytest.mark.parametrize(
    "make",
    [np.array, pd.Series, pd.Categorical, lambda x: pd.Series(x, dtype="string"), lambda x: np.array(x, object)],
)
def test_levels_of_any_make(make: Any) -> None:
    silos, _ = nf.prepare.levels({name: own | dict(drug=make(own["drug"])) for name, own in DRUGS.items()}, "drug")
    assert silos["leeds"]["drug"].tolist() == [2] * 6 + [1] * 8


def test_levels_that_are_ints_and_bools() -> None:
    silos = cut((9, 8), site=np.array([30] * 9 + [7] * 8), sick=np.array([True] * 6 + [False] * 11))
    new, levels = nf.prepare.levels(sealed(silos), ["site", "sick"])
    assert levels.labels == {"site": (7, 30), "sick": (False, True)}
    assert new.own("s0")["site"].tolist() == [1] * 9 and new.own("s1")["sick"].tolist() == [0] * 8


def test_new_levels_are_other_or_refused() -> None:
    _, levels = nf.prepare.levels(DRUGS, "drug")
    applied = levels.apply(dict(drug=["unheard of", "none"], x=1))
    assert applied["drug"].tolist() == [3, 1] and applied["x"] == 1
    _, levels = nf.prepare.levels(DRUGS, "drug", threshold=1)
    with pytest.raises(ValueError, match=r"the new data has 'unheard of' in row 1, .*'aspirin', 'none', 'novel'"):
        levels.apply(dict(drug=["none", "unheard of"]))


def test_a_level_called_other_takes_the_rare_ones() -> None:
    data = {"a": dict(drug=["x"] * 6 + ["other"] * 5 + ["rare"]), "b": dict(drug=["x"] * 6)}
    silos, levels = nf.prepare.levels(data, "drug")
    assert levels.labels == {"drug": ("other", "x")}
    assert silos["a"]["drug"].tolist() == [1] * 6 + [0] * 6


# --- quantiles --------------------------------------------------------------------------------------------------------

SHAPES = {
    "normal": lambda n: RNG.normal(size=n),
    "far from zero": lambda n: RNG.normal(242_000, 5, n),
    "heavy tails": lambda n: RNG.standard_cauchy(n),
    "an outlier": lambda n: np.where(np.arange(n) == 3, 1e6, RNG.normal(size=n)),
    "whole numbers": lambda n: RNG.integers(18, 90, n).astype(float),
    "many zeros": lambda n: np.where(RNG.random(n) < 0.4, 0.0, RNG.exponential(size=n)),
    "two values": lambda n: (np.arange(n) % 10 == 0).astype(float),
}


def rank_error(x: np.ndarray, value: float, prob: float) -> float:
    """How many rows lie between a value and the quantile; none where the value is one of its ties."""
    below, upto = np.sum(x < value), np.sum(x <= value)
    return max(0.0, below - prob * len(x), prob * len(x) - upto)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_quantiles_of_pooled_rows(shape: Any) -> None:
    sizes = (300, 41, 659)
    x = shape(1000).astype("f")
    silos, found = nf.prepare.quantiles(cut(sizes, x=x), "x", PROBS, threshold=1)
    # an interval of one row is not divided: a row on either side of where the count passes p n
    assert max(rank_error(x, value, prob) for value, prob in zip(found.values, PROBS, strict=True)) <= 1
    assert np.all(np.diff(found.values) >= 0)
    np.testing.assert_allclose(silos["s1"]["knots"], found.values, rtol=1e-6)
    assert found.num_rounds <= 7


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_quantiles_of_small_ragged_silos(sizes: tuple[int, ...]) -> None:
    x = RNG.normal(size=sum(sizes)).astype("f")
    _, found = nf.prepare.quantiles(cut(sizes, x=x), "x", PROBS, threshold=1)
    ranks = np.arange(len(x)) / len(x)
    for value, prob in zip(found.values, PROBS, strict=True):
        near = np.sort(x)[np.abs(ranks - prob) <= 2 / len(x)]  # NumPy's quantile interpolates between two of these
        assert near.min() <= value <= near.max()


def test_rounded_counts_move_quantiles_as_little_as_is_said() -> None:
    """100 data sets: errors have no bias and the sd that the steps give them, half of one for each silo at most."""
    errors = []
    for seed in range(100):
        x = np.random.default_rng(seed).normal(size=400).astype("f")
        _, found = nf.prepare.quantiles(cut((40,) * 10, x=x), "x", [0.2, 0.5])
        errors.append([np.sum(x <= value) - prob * 400 for value, prob in zip(found.values, [0.2, 0.5], strict=True)])
    bound = np.sqrt(10 * 2.5**2 + 9**2 / 12)  # steps of 5 rows; and the last interval, of fewer than 10
    assert np.std(errors, axis=0).max() < bound * 1.2  # 1.2: three standard errors of an sd from 100 draws
    assert np.abs(np.mean(errors, axis=0)).max() < 3.5 * bound / np.sqrt(100) + 0.5  # 0.5: a value is at or below a row


@pytest.mark.parametrize("threshold", [1, 4, 5, 9])
def test_rounded_counts_rise_in_steps_from_none_to_all(threshold: int) -> None:
    x = RNG.normal(size=47)
    found = rounded_counts(x, np.sort(np.append(x, [-9.0, 9.0])), threshold)
    assert found[0] == 0 and found[-1] == 47 and np.all(np.diff(found) >= 0)
    assert np.diff(found)[np.diff(found) > 0].min() >= threshold - 1e-9
    if threshold == 1:
        np.testing.assert_allclose(found, [*range(48), 47])


def test_rounding_has_no_bias() -> None:
    """Over data sets: the mean of 2,000 rounded counts, whose sd is half a step at most."""
    counts = [(rounded_counts(x, np.zeros(1), 5)[0], np.sum(x <= 0)) for x in RNG.normal(size=(2000, 12))]
    rounded, exact = np.mean(counts, axis=0)
    assert abs(rounded - exact) < 4 * 3 / np.sqrt(2000)


def test_ties_are_found_themselves_and_single_rows_are_not() -> None:
    x = np.append(np.full(300, 0.25), RNG.normal(5, 1, 300)).astype("f")
    _, found = nf.prepare.quantiles(cut((200, 400), x=x), "x", [0.1, 0.2, 0.75])
    assert found.values[:2].tolist() == [0.25, 0.25]
    # an interval of fewer than 10 rows is not divided: about 2 sds of the upper rows over 300, times 5 or so
    assert (found.table["high"] - found.table["low"]).iloc[2] > 1e-3


def test_small_silos_say_nothing_of_quantiles() -> None:
    x = RNG.normal(size=104).astype("f")
    other = np.where(np.arange(104) < 100, x, 50).astype("f")
    (_, first), (_, second) = (nf.prepare.quantiles(cut((100, 4), x=one), "x", [0.5]) for one in (x, other))
    assert first.left_out == ("s1",) and first.num_rows == 100
    np.testing.assert_array_equal(first.values, second.values)


def test_new_data_get_the_knots() -> None:
    silos, knots = nf.prepare.quantiles(cut((50, 50), x=RNG.normal(size=100).astype("f")), "x", [0.5], argument="at")
    np.testing.assert_array_equal(knots.apply(dict(x=np.zeros(2)))["at"], silos.shared["at"])
    assert knots.table.index.name == "x"


# --- all three --------------------------------------------------------------------------------------------------------

DO = {
    "standardize": lambda silos: nf.prepare.standardize(silos, ["x", "k"]),
    "levels": lambda silos: nf.prepare.levels(silos, dict(k="num")),
    "quantiles": lambda silos: nf.prepare.quantiles(silos, "x"),
}


def both() -> nf.Silos:
    x, k = RNG.normal(size=200), RNG.integers(0, 4, 200)
    return cut((50, 30, 120), x=x.astype("f"), k=k)


@pytest.mark.parametrize("do", DO.values(), ids=DO)
def test_silos_stay_sealed(do: Any) -> None:
    silos = both()
    (plain, first), (closed, second) = do(silos), do(sealed(silos))
    assert repr(first) == repr(second)
    for name in silos.names:
        assert type(closed.own(name)["x"]).__name__ == ("ndarray" if do is DO["standardize"] else "Sealed")
        for argument in ("x", "k"):
            with nf.data.silos.at_silo(name):
                np.testing.assert_array_equal(plain[name][argument], np.asarray(closed[name][argument]))


@pytest.mark.parametrize("do", DO.values(), ids=DO)
def test_bytes_are_those_of_the_messages(do: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    crossed, encode = [], wire.encode
    monkeypatch.setattr(wire, "encode", lambda tree: crossed.append(len(encode(tree))) or encode(tree))
    _, found = do(both())
    assert found.bytes_up == sum(crossed[1::2])  # a question, its answer, a question, ...
    answer = found.bytes_down - sum(crossed[0::2])  # what is told in the end, to each of three silos
    assert answer > 0 and answer % 3 == 0
    assert f"{found.bytes_up} bytes up, {found.bytes_down} down" in repr(found)


def test_bytes_do_not_grow_with_the_rows() -> None:
    few, many = (cut((n, n), x=RNG.normal(size=2 * n).astype("f")) for n in (50, 5000))
    few, many = (nf.prepare.standardize(silos, "x")[1] for silos in (few, many))
    assert few.bytes_up == many.bytes_up == 2 * 54  # 12 bytes, 3 headers of 6, 3 numbers of 8


@pytest.mark.parametrize("do", DO.values(), ids=DO)
def test_a_store_is_prepared_as_silos_are(do: Any) -> None:
    silos = both()
    store = nf.SiloStore.from_function(lambda j: silos.own(silos.names[j]), 3, names=silos.names)
    (plain, first), (stored, second) = do(silos), do(store)
    assert repr(first) == repr(second) and stored.lazy
    for name in silos.names:
        jax.tree.map(np.testing.assert_array_equal, plain[name], stored[name])


def test_order_of_silos_does_not_matter() -> None:
    silos = both()
    turned = silos.only(*reversed(silos.names))
    np.testing.assert_allclose(*(nf.prepare.standardize(s, "x")[1].mean["x"] for s in (silos, turned)), rtol=1e-12)
    np.testing.assert_allclose(*(nf.prepare.quantiles(s, "x")[1].values for s in (silos, turned)), rtol=1e-9)
    assert nf.prepare.levels(silos, "k")[1].labels == nf.prepare.levels(turned, "k")[1].labels


@pytest.mark.slow
def test_a_model_of_prepared_silos() -> None:
    """Levels, a scale and knots together: the federated posterior is the one of the pooled, prepared rows."""

    def model(x: Any, drug: Any, num: int, knots: Any, y: Any = None) -> None:
        effect = numpyro.sample("effect", dist.Normal(0, 1).expand([num]).to_event(1))
        slope = numpyro.sample("slope", dist.Normal(0, 1).expand([1 + knots.shape[0]]).to_event(1))
        basis = x * slope[0] + jax.nn.relu(x[:, None] - knots) @ slope[1:]
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(effect[drug] + basis, 1), obs=y)

    raw = {
        name: dict(x=RNG.normal(50, 10, n).astype("f"), drug=RNG.choice(kinds, n), y=RNG.normal(size=n).astype("f"))
        for name, n, kinds in (("a", 40, ["p", "q"]), ("b", 60, ["q", "r"]))
    }
    silos, levels = nf.prepare.levels(raw, dict(drug="num"))
    silos, scaling = nf.prepare.standardize(silos, "x")
    silos, knots = nf.prepare.quantiles(silos, "x", [0.25, 0.75])
    fit = nf.EP(model, solver="laplace").run(jax.random.key(0), silos, progress_bar=False)
    design = np.zeros((100, 6))
    x, drug = pooled(silos, "x"), pooled(silos, "drug")
    design[np.arange(100), drug] = 1
    design[:, 3:] = np.column_stack([x, *np.maximum(x[:, None] - silos.shared["knots"], 0).T])
    mean = np.linalg.solve(design.T @ design + np.eye(6), design.T @ pooled(silos, "y"))
    np.testing.assert_allclose(fit.normal().mean, mean, atol=1e-3)  # exact for normals, up to float32 in the model
    new = knots.apply(scaling.apply(levels.apply(dict(x=np.array([40.0, 70.0]), drug=["p", "r"]))))
    assert fit.predict(jax.random.key(1), new, num_samples=5)["y"].shape[-1] == 2


def test_the_guides_example_runs() -> None:
    text = (Path(__file__).parent.parent / "docs" / "guide.md").read_text()
    section = text[text.index("### Preparation without pooling") :]
    names: dict[str, Any] = {}
    exec(section[section.index("```python") + 9 : section.index("```\n\n")], names)
    assert names["silos"]["york"]["num_drugs"] == names["new"]["num_drugs"] == 3
    assert names["new"]["knots"].shape == (5,) and names["new"]["drug"].tolist() == [2]


# --- what is refused --------------------------------------------------------------------------------------------------


def bad() -> nf.Silos:
    rows = lambda n: dict(x=RNG.normal(size=(n, 2)).astype("f"), one=np.ones(n, "f"), z=np.arange(n, dtype="f"), n=n)
    return nf.Silos({"leeds": rows(12), "york": rows(20)}, shared=dict(k=np.ones(2, "f")))


def with_constant(n: int) -> np.ndarray:
    return np.column_stack([np.arange(n), np.full(n, 0.1)]).astype("f")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: nf.prepare.standardize(s, "age"), r"no argument 'age'; the silos have n, one, x, z"),
        (lambda s: nf.prepare.standardize(s, ["z", "z"]), r"names must name each argument once, got \['z', 'z'\]"),
        (lambda s: nf.prepare.standardize(s, []), r"names must name each argument once, got \[\]"),
        (lambda s: nf.prepare.standardize(s, "k"), r"'k' is shared, the same in all silos: prepare it yourself"),
        (lambda s: nf.prepare.standardize(s, "n"), r"argument 'n' of silo 'leeds' is a int: only arrays with rows"),
        (
            lambda s: nf.prepare.standardize(s, "one"),
            r"'one' is 1 in all 32 rows, it has no scale: leave it out of names",
        ),
        (lambda s: nf.prepare.standardize(s, "z", threshold=0), r"threshold must be an int of at least 1, got 0"),
        (
            lambda s: nf.prepare.standardize(s, "z", threshold=50),
            r"every silo has fewer than 50 rows of 'z'.*threshold=1",
        ),
        (lambda s: nf.prepare.standardize({"a": {}}, "z"), r"silos must be an nf.Silos, got a dict: pass nf.Silos"),
        (
            lambda s: nf.prepare.standardize(nf.Silos([dict(x=with_constant(9)), dict(x=with_constant(7))]), "x"),
            r"'x', column 1, is 0.1 in all 16 rows, .* give the other columns as an argument of their own",
        ),
        (lambda s: nf.prepare.standardize(s, "x")[1].apply(dict(x=np.ones(3))), r"shape \[3\], expected \[rows, 2\]"),
        (lambda s: nf.prepare.standardize(s, "z")[1].apply(dict(q=1)), r"none of z is given, got q"),
        (lambda s: nf.prepare.standardize(s, "z")[1].apply([1]), r"expected a dict of model arguments"),
        (
            lambda s: nf.prepare.standardize(s, "z")[1].apply(dict(z=np.array([1.0, np.nan]))),
            r"'z' of the new data has NaN or Inf, first in row 1",
        ),
        (lambda s: nf.prepare.levels(s, "z"), r"'z' of silo 'leeds' holds float: levels are strings or ints"),
        (lambda s: nf.prepare.levels(s, "x"), r"'x' of silo 'leeds' has the shape \[12, 2\]: give one level per row"),
        (lambda s: nf.prepare.levels({"a": dict(d=["p", None])}, "d"), r"of silo 'a' has no level in row 1 \(None\)"),
        (lambda s: nf.prepare.levels({"a": dict(d=["p", 3])}, "d"), r"holds int and str: .* pass d.astype\(str\)"),
        (lambda s: nf.prepare.levels({"a": dict(d=["p", "q"])}, "d"), r"no level of 'd' has 5 rows in any silo"),
        (
            lambda s: nf.prepare.levels({"a": dict(d=["p"] * 9), "b": dict(d=[1] * 9)}, "d"),
            r"'d' holds str in silo 'a' and int in silo 'b'",
        ),
        (
            lambda s: nf.prepare.levels({"a": dict(d=["p"] * 9), "b": dict(e=["p"] * 9)}, "d"),
            r"'d' of silo 'b' is missing; it has e",
        ),
        (
            lambda s: nf.prepare.levels({"a": dict(d=["p"] * 9, n=1)}, dict(d="n")),
            r"names\['d'\] .* 'n', which the silos",
        ),
        (lambda s: nf.prepare.quantiles(s, "x"), r"'x' has columns: give one of them as an argument of its own"),
        (
            lambda s: nf.prepare.quantiles(s, "z", [0.5, 1.0]),
            r"probs must rise and lie between 0 and 1, got \[0.5, 1.0\]",
        ),
        (lambda s: nf.prepare.quantiles(s, "z", [0.5, 0.2]), r"probs must rise"),
        (
            lambda s: nf.prepare.quantiles(s, "z", [0.01, 0.5]),
            r"the 0.01 quantile of 32 rows .* between 0.156 and 0.844",
        ),
        (lambda s: nf.prepare.quantiles(s, "z", [0.5], argument="k"), r"argument names .* 'k', which the silos have"),
        (lambda s: nf.prepare.quantiles(s, "one", [0.5]), r"'one' is 1 in all 32 rows"),
        (lambda s: nf.Silos([dict(drug=np.array(["p", "q"]))]), r"holds strings: .* nf.prepare.levels\(.*'drug'\)"),
        (lambda s: s.sharing(z=1), r"'z' is given by silo 'leeds' and in shared="),
    ],
)
def test_refused(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call(bad())
