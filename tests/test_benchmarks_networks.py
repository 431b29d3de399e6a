"""The benchmark of Bayesian networks across silos: its parts, its table, and a tiny run."""

import json

import numpy as np
import pytest

from benchmarks import networks


def numbered(n=500):
    """Rows whose last column is their number."""
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(3, 2, size=(n, 7)), np.arange(n)[:, None]], axis=1).astype(np.float32)
    return networks.Rows(x, rng.integers(0, 2, n).astype(np.int32))


def test_the_test_part_is_never_validated_on():
    """To validate, both parts come from the training part; columns are standardised by what is trained on."""
    rows = numbered()
    data, inner = (networks.divided("bank", rows, 3, validate) for validate in (False, True))
    number = lambda part: set(part.x[:, -1].astype(int).tolist())
    assert len(data.train.y) == 400 and len(data.test.y) == 100 and not number(data.train) & number(data.test)
    assert number(inner.train) | number(inner.test) == number(data.train) and len(inner.test.y) == 80
    np.testing.assert_allclose(inner.train.x[:, :7].mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(inner.train.x[:, :7].std(axis=0), 1, atol=1e-5)
    assert np.all(rows.x[:, 7] == np.arange(500))  # the rows themselves are as they were


@pytest.mark.parametrize("split", ["one", "A", "B", "text"])
def test_every_training_row_is_in_a_silo(split):
    train = networks.Rows(numbered(1000).x, np.repeat([0, 1], [750, 250]).astype(np.int32))
    silos = networks.cut(train, split, seed=0)
    assert silos.num_silos == (1 if split == "one" else 10)
    found = np.concatenate([silos[name]["x"][:, -1] for name in silos.names])
    assert sorted(found.tolist()) == list(range(1000))
    if split in ("B", "text"):  # the small ones come first
        assert [len(silos[name]["y"]) for name in silos.names][:5] == [10] * 5
        assert sum(int(silos[name]["y"].sum()) for name in silos.names[:5]) == {"B": 5, "text": 25}[split]


def row(seed, value):
    scores = networks.Row(value, value + 0.01, 0.8, 0.02, 1_000_000, 2_000_000, 1.5, 20)
    what = dict(data="adult", split="A", method="mean field, sequential", seed=seed, validate=False, quick=False)
    return {**what, "settings": networks.Settings()._asdict(), **scores._asdict(), "cpu_minutes": 2.5}


def test_the_table_has_medians_and_what_the_thesis_has(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row(seed, value)) + "\n" for seed, value in enumerate((-0.4, -0.33, -0.32))))
    networks.main(networks.parse(["--table", str(path), str(tmp_path / "none")]))
    found = capsys.readouterr().out
    assert "| -0.331 | -0.3300 (-0.4000 to -0.3200) | -0.3200 (-0.3900 to -0.3100) |" in found
    assert "| 1.0 | 2.0 | 1.5 (1.5 to 1.5) | 2.5 (2.5 to 2.5) | 3 |" in found


@pytest.mark.slow
def test_a_quick_run_goes_on_where_it_stopped(tmp_path, capsys, monkeypatch):
    """Rows are kept as they come; those of a file are not run again."""
    monkeypatch.delenv("NUMPYRO_FED_DATA", raising=False)
    path = str(tmp_path / "rows.jsonl")
    words = ["--quick", "--data", "bank", "--split", "B", "--out", path]
    first = networks.main(networks.parse([*words, "--method", "mean field, synchronous"]))
    assert len(first) == 1 and first[0]["rounds"] == 2 and first[0]["bytes_up"] > 0
    assert -1 < first[0]["mean_log_likelihood"] <= first[0]["log_likelihood"] < 0
    capsys.readouterr()
    networks.main(networks.parse([*words, "--method", "mean field, synchronous", "mean field, sequential"]))
    assert capsys.readouterr().out.count(" seed 0: ") == 1
    assert [one["method"] for one in networks.read([path])] == ["mean field, synchronous", "mean field, sequential"]
