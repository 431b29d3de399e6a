"""Arguments of a model from a silo's table."""

import numpy as np
import pandas as pd
import pytest

from numpyro_fed.remote.tables import plan, read, renamed

TABLE = pd.DataFrame(
    {
        "id": ["c", "a", "c", "b"],
        "score": [1.5, 2.0, 3.25, 4.0],
        "tries": [1, 2, 3, 4],
        "sex": ["male", "female", "female", "male"],
        "ill": [True, False, True, True],
        "funds": [3.0, 1.0, 3.0, 2.0],
    }
)


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "table.csv"
    TABLE.to_csv(path, index=False)
    return path


def test_every_form(csv):
    found = read(
        csv,
        {
            "y": "score",
            "n": "tries",
            "x": ["score", "tries"],
            "both": ["tries", "tries"],
            "dose": {"column": "tries", "as": "float"},
            "sex": {"column": "sex", "levels": ["female", "male"]},
            "ill": "ill",
            "child": {"groups": "id", "count": "num_children"},
            "funds": {"column": "funds", "per": "child"},
        },
    )
    expected = {
        "y": np.array([1.5, 2, 3.25, 4], np.float32),
        "n": np.array([1, 2, 3, 4], np.int32),
        "x": np.array([[1.5, 1], [2, 2], [3.25, 3], [4, 4]], np.float32),
        "both": np.array([[1, 1], [2, 2], [3, 3], [4, 4]], np.int32),
        "dose": np.array([1, 2, 3, 4], np.float32),
        "sex": np.array([1, 0, 0, 1], np.int32),
        "ill": np.array([True, False, True, True]),
        "child": np.array([2, 0, 2, 1], np.int32),
        "funds": np.array([1, 2, 3], np.float32),  # of a, b, c
    }
    assert found.pop("num_children") == 3
    assert set(found) == set(expected)
    for argument, value in expected.items():
        assert found[argument].dtype == value.dtype, argument
        np.testing.assert_array_equal(found[argument], value)


def test_as_wide_as_numpyro(csv, x64):
    found = read(csv, {"y": "score", "n": "tries"})
    assert found["y"].dtype == np.float64 and found["n"].dtype == np.int64


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators_and_marks_of_spreadsheets(tmp_path, separator):
    path = tmp_path / "table.csv"
    TABLE.to_csv(path, index=False, sep=separator, encoding="utf-8-sig")
    assert read(path, {"y": "score"})["y"].tolist() == TABLE["score"].tolist()


def test_npz(tmp_path):
    path = tmp_path / "table.npz"
    np.savez(path, x=np.ones((4, 2)), score=TABLE["score"].to_numpy(), size=np.array(7))
    found = read(path, {"x": "x", "y": "score", "n": "size"})
    assert found["x"].shape == (4, 2) and found["y"].dtype == np.float32 and found["n"] == 7
    np.savez(path, x=np.array([None, 1.0]))
    with pytest.raises(ValueError, match="allow_pickle"):
        read(path, {"x": "x"})


def test_parquet(tmp_path):
    path = tmp_path / "table.parquet"
    path.write_bytes(b"")
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"pip install pyarrow, or save as \.csv"):
            read(path, {"y": "score"})
        return
    TABLE.to_parquet(path)
    assert read(path, {"y": "score"})["y"].tolist() == TABLE["score"].tolist()


def test_only_named_columns_are_looked_at(tmp_path):
    """A gap in a column that nobody asked for is nobody's concern."""
    path = tmp_path / "table.csv"
    TABLE.assign(notes=[None, "x", None, None]).to_csv(path, index=False)
    assert read(path, {"y": "score"})["y"].shape == (4,)


def test_a_silos_own_names(csv):
    mine = renamed(
        plan({"y": {"column": "points", "as": "float"}, "x": ["a", "b"]}), {"y": "tries", "x": ["score", "funds"]}
    )
    found = read(csv, mine)
    assert found["y"].dtype == np.float32 and found["x"].shape == (4, 2)


GAPS = TABLE.assign(score=[1.5, None, None, 2.0], sex=["male", None, "male", "male"], big=[2**40, 1, 1, 1])
BAD_TABLES = {
    "no such column": ({"y": "scroe"}, "the table has no 'scroe': did you mean 'score'"),
    "gaps": ({"y": "score"}, "column 'score' of .*csv has 2 missing values of 4, first in row 1"),
    "gaps in words": ({"y": {"column": "sex", "levels": ["male", "female"]}}, "'sex' of .* has 1 missing value of 4"),
    "words": ({"y": "id"}, "column 'id' holds text or dates where numbers are expected"),
    "another level": (
        {"y": {"column": "id", "levels": ["a", "b"]}},
        "has 'c', and the study's levels are",
    ),
    "fractions": ({"y": {"column": "funds", "as": "bool"}}, "numbers beside 0 and 1"),
    "wide": ({"y": "big"}, "argument 'y' has whole numbers beyond 32 bits"),
    "not of the group": (
        {"i": {"groups": "id"}, "y": {"column": "tries", "per": "i"}},
        "'y' has a row per group of 'i', but differs within a group",
    ),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_tables(tmp_path, case):
    columns, told = BAD_TABLES[case]
    path = tmp_path / "table.csv"
    GAPS.to_csv(path, index=False)
    with pytest.raises((TypeError, ValueError), match=told):
        read(path, columns)


BAD_PLANS = {
    "no dict": (["y"], "must be a dict"),
    "unknown key": ({"y": {"colum": "a"}}, r"columns\['y'\] has no 'colum': did you mean 'column'"),
    "both": ({"y": {"column": "a", "groups": "b"}}, "needs one of column and groups"),
    "count of no groups": ({"y": {"column": "a", "count": "n"}}, "write groups in place of column"),
    "per nothing": ({"y": {"column": "a", "per": "i"}}, "which has no groups"),
    "no type": ({"y": {"column": "a", "as": "text"}}, "as must be one of float, int, bool"),
    "groups of two": ({"y": {"groups": ["a", "b"]}}, "numbers the groups of one column"),
    "levels twice": ({"y": {"column": "a", "levels": ["u", "u"]}}, "a level stands twice"),
    "count beside a column": ({"i": {"groups": "a", "count": "n"}, "n": "b"}, "has a column of its own"),
    "nothing": ({"y": []}, "must name columns"),
    "a number": ({"y": 3}, "must be a column's name"),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_bad_plans(case):
    columns, told = BAD_PLANS[case]
    with pytest.raises((TypeError, ValueError), match=told):
        plan(columns)


def test_a_silo_says_where_and_the_study_what():
    columns = plan({"y": "a", "x": ["b", "c"]})
    with pytest.raises(ValueError, match="has no 'z'"):
        renamed(columns, {"z": "a"})
    with pytest.raises(TypeError, match="x must be a list of names of columns, as in the study"):
        renamed(columns, {"x": "b"})
    with pytest.raises(TypeError, match="y must be the name of a column"):
        renamed(columns, {"y": {"column": "b", "as": "float"}})


def test_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not there"):
        read(tmp_path / "no.csv", {"y": "a"})
    (tmp_path / "table.xlsx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must be one of \.csv, \.parquet, \.npz, got \.xlsx"):
        read(tmp_path / "table.xlsx", {"y": "a"})
    (tmp_path / "table.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="has no rows"):
        read(tmp_path / "table.csv", {"y": "a"})
