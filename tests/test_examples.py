"""Examples and benchmarks run, with tiny settings."""

import warnings

import pytest

from examples import bayesian_mlp, six_cities


@pytest.mark.slow
@pytest.mark.merge
def test_six_cities_demo(tmp_path, capsys):
    args = ["--num-rounds", "30", "--importance-samples", "2", "--num-warmup", "20", "--num-samples", "20"]
    settings = six_cities.parser().parse_args([*args, "--num-chains", "1", "--out", str(tmp_path)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so short a chain has not converged, and says so
        comparison = six_cities.main(settings)
    printed = capsys.readouterr().out
    assert set(comparison.table["parameter"]) == {"beta[0]", "beta[1]", "beta[2]", "beta[3]", "omega"}
    assert list(comparison.table["method"].unique()) == ["EP", "SFVI"]
    assert "children" in printed and "b " in printed and f"figure: {tmp_path / 'six_cities.png'}" in printed
    assert (tmp_path / "six_cities.png").stat().st_size > 10_000


@pytest.mark.slow
def test_bayesian_mlp(tmp_path, capsys):
    args = ["--num-silos", "3", "--num-points", "8", "--num-rounds", "2", "--num-steps", "2", "--sfvi-rounds", "20"]
    table = bayesian_mlp.main(bayesian_mlp.parser().parse_args([*args, "--num-samples", "5", "--out", str(tmp_path)]))
    assert list(table.index) == ["silo 0 alone", *bayesian_mlp.methods(bayesian_mlp.parser().parse_args([]))]
    assert table["accuracy"].between(0, 1).all() and table["log likelihood"].lt(0).all()
    assert f"figure: {tmp_path / 'bayesian_mlp.png'}" in capsys.readouterr().out
    assert (tmp_path / "bayesian_mlp.png").stat().st_size > 10_000
