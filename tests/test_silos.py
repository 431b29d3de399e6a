"""Silos hold arguments as given; split cuts pooled arrays without losing a row."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from models import COUNTY, STATE, binary, normal

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.split import split


def test_silos_are_a_mapping_of_model_arguments() -> None:
    x = normal(0, 3, 2)
    silos = Silos({"leeds": dict(x=x), "york": dict(x=normal(1, 2, 2))}, shared=dict(knots=normal(2, 4), degree=3))
    assert silos.names == ("leeds", "york")
    assert silos.num_silos == len(silos) == 2
    assert list(silos) == ["leeds", "york"]
    assert set(silos["leeds"]) == {"x", "knots", "degree"}
    assert set(silos.own("leeds")) == {"x"}
    np.testing.assert_array_equal(silos["leeds"]["x"], x)
    assert silos["york"]["degree"] == 3


def test_a_list_is_named_by_position() -> None:
    assert Silos([dict(y=normal(0, 2)), dict(y=normal(1, 3))]).names == ("0", "1")


def test_pairs_are_named_silos() -> None:
    assert Silos([("a", dict(y=normal(0, 2))), ("b", dict(y=normal(1, 3)))]).names == ("a", "b")


def test_a_silo_may_be_named_shared() -> None:
    with pytest.raises(ValueError, match=r"silo 'shared', argument 'y' has 0 rows: remove silo 'shared'"):
        Silos({"shared": dict(y=normal(0, 0))})


def test_in_a_notebook_a_row_a_silo() -> None:
    silos = Silos({f"<s{j}>": dict(y=normal(0, j + 1), k=j) for j in range(12)}, shared=dict(knots=normal(2, 4)))
    shown = silos._repr_html_()
    assert shown.count("<tr>") == 11 and "... and 2 more" in shown and "knots float32[4]" in shown
    assert "&lt;s3&gt;" in shown and "<s3>" not in shown
    assert "float32[4]" in shown and "<th style='text-align:left'>k</th>" in shown


def test_repr_shows_every_argument() -> None:
    silos = Silos([dict(x=normal(0, 3, 2), n=4)] * 12, shared=dict(k=normal(0, 5)))
    lines = repr(silos).splitlines()
    assert lines[:2] == ["Silos: 12", "  0: n 4, x float32[3, 2]"]
    assert lines[-2:] == ["  ... and 2 more", "  shared: k float32[5]"]


@pytest.mark.parametrize(
    ("given", "dtype", "shape"),
    [
        ([1, 2, 3], np.int64, (3,)),
        ([1.0, 2.0], np.float32, (2,)),
        ([[1.0, 2.0], [3.0, 4.0]], np.float32, (2, 2)),
        ((True, False), np.bool_, (2,)),
        (jnp.ones(2), np.float32, (2,)),
        (pd.Series([1, 2]), np.int64, (2,)),
        (pd.DataFrame({"a": [1, 2], "b": [3, 4]}), np.int64, (2, 2)),
        (0.5, np.float32, ()),
    ],
)
def test_values_become_arrays(given: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    found = Silos([dict(x=given)])["0"]["x"]
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.shape) == (dtype, shape)


@pytest.mark.parametrize("given", [4, np.int64(4), np.int32(4)])
def test_ints_are_sizes(given: Any) -> None:
    found = Silos([dict(num_counties=given)])["0"]["num_counties"]
    assert type(found) is int


def test_numbers_are_float64_in_a_float64_program(x64: None) -> None:
    assert Silos([dict(x=[1.0], s=0.5)])["0"]["x"].dtype == np.float64
    assert Silos([dict(x=[1.0], s=0.5)])["0"]["s"].dtype == np.float64


def test_none_and_nested_arguments_stay() -> None:
    own = Silos([dict(x={"a": normal(0, 2), "b": (normal(1, 2), None)}, z=None)])["0"]
    assert own["z"] is None
    assert own["x"]["b"][1] is None
    assert own["x"]["b"][0].shape == (2,)


# --- split ----------------------------------------------------------------------------------------------------------


def test_split_keeps_every_row_once_and_in_order() -> None:
    y, x = normal(0, 11), normal(1, 11, 2)
    silos = split(STATE, y=y, x={"a": x}, scale=2.0, n=np.int64(3), flag=True, offset=np.asarray(1.0, "f"))
    assert silos.names == ("n", "s", "w")
    for name in silos.names:
        np.testing.assert_array_equal(silos[name]["y"], y[name == STATE])
        np.testing.assert_array_equal(silos[name]["x"]["a"], x[name == STATE])
    assert set(silos.shared) == {"scale", "n", "flag", "offset"}
    assert silos.shared["n"] == 3


@pytest.mark.parametrize("labels", [[2, 1, 2], np.array([2, 1, 2]), pd.Series([2, 1, 2]), pd.Categorical([2, 1, 2])])
def test_labels_of_any_kind_name_silos(labels: Any) -> None:
    silos = split(labels, y=[1.0, 2.0, 3.0])
    assert silos.names == ("2", "1")
    assert silos["2"]["y"].tolist() == [1, 3]


def test_groups_are_renumbered_and_their_arrays_follow() -> None:
    uranium = normal(0, 7)
    silos = split(
        STATE, groups=dict(county="num"), county=COUNTY, num=7, uranium=uranium, y=normal(1, 11), untouched=COUNTY
    )
    assert silos.own_counts == {"num"}
    for name in silos.names:
        own = silos[name]
        rows = name == STATE
        np.testing.assert_array_equal(own["uranium"][own["county"]], uranium[COUNTY[rows]])
        np.testing.assert_array_equal(own["untouched"], COUNTY[rows])
        assert own["num"] == len(np.unique(COUNTY[rows])) == len(own["uranium"])
        assert set(own["county"]) == set(range(own["num"]))


def test_a_group_level_array_may_stand_for_the_count() -> None:
    """Also when there are as many groups as rows, where its length alone does not tell what it follows."""
    county, uranium = np.array([2, 0, 1]), np.array([10, 11, 12])
    silos = split(["a", "b", "b"], groups=dict(county="uranium"), county=county, uranium=uranium, y=np.array([0, 1, 2]))
    assert silos["a"]["uranium"].tolist() == [12]
    assert silos["b"]["uranium"].tolist() == [10, 11]
    assert silos["b"]["county"].tolist() == [0, 1]
    assert silos["b"]["y"].tolist() == [1, 2]


def test_a_group_without_count() -> None:
    silos = split(["a", "a", "b"], groups=dict(county=None), county=np.array([0, 1, 2]), y=binary(0, 3))
    assert silos["b"]["county"].tolist() == [0]
    assert silos.own_counts == frozenset()


def test_two_groups_of_equal_size_that_agree_are_no_riddle() -> None:
    index = np.array([0, 1, 1])
    silos = split(["a", "b", "b"], groups=dict(c=None, d=None), c=index, d=index, u=np.array([5, 6]), y=binary(0, 3))
    assert silos["b"]["u"].tolist() == [6]
