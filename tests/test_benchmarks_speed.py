"""The table of speed: its ratios, bars and errors are what they say, and its fresh processes run."""

import numpy as np
import pytest

from benchmarks import bench, conjugate
from benchmarks.bench import Line, Process

PROCESSES = ("cold", "cache", "models", "dimension", "adult")  # groups whose every line is of fresh processes


def test_a_line_is_judged_by_its_ratio_or_by_itself():
    assert Line("", 2.0, 2.0, bar=1.0).met and not Line("", 2.1, 2.0, bar=1.0).met
    assert Line("", 14.0, 26.0, bar=20, of="ours").met and not Line("", 21.0, 26.0, bar=20, of="ours").met
    assert Line("", 2.0, 1.0).met is None
    assert not Line("", float("inf"), 10.0, bar=1.0).met, "what was not done meets nothing"
    assert Line("what", float("inf"), 10.0, bar=1.0).cells() == (
        *("what", "not done", "10", "not done", "s", "ratio <= 1", "no"),
    )
    assert Line("alone", 0.01234, unit="sds").cells() == ("alone", "0.0123", "", "", "sds", "", "")


def test_errors_are_those_beyond_the_judges_own():
    ours = Process(mean=(1.0, 0.5), sd=(1.0, 2.2))
    exact = Process(mean=(0.9, 0.5), sd=(1.0, 2.0))
    np.testing.assert_allclose(bench.apart(ours, exact), (0.1, 0.1), rtol=1e-12)
    # 10,000 draws: a mean is known within .02 sd, an sd within .02 / sqrt(2)
    by_nuts = exact._replace(n_eff=(1e4, 1e4))
    np.testing.assert_allclose(bench.apart(ours, by_nuts), (0.08, 0.1 - 0.02 / np.sqrt(2)), rtol=1e-12)
    assert bench.apart(exact, exact) == (0.0, 0.0)
    assert bench.apart(Process(), exact) == (np.inf, np.inf)


def test_the_table_is_printed_and_written(monkeypatch, tmp_path, capsys):
    """With costs that are known, and one process that was not done."""
    costs = {"EP": (6.0, 12), "PVI": (20.0, 30), "SFVI": (9.0, 25), "nuts": (10.0, 26), "SVI": (4.0, 9)}

    def fresh(method, study, *_):
        return Process() if study == "horseshoe" else Process(costs[method][0], 500.0, *(2 * [costs[method][1]]))

    monkeypatch.setattr(bench, "fresh", fresh)
    monkeypatch.setattr(bench, "measured", fresh)
    path = tmp_path / "table.md"
    lines = bench.main(bench.parser().parse_args(["--only", *PROCESSES, "--out", str(path)]))
    found = {line.what: line for line in lines}
    ep = found["first run, six cities: EP, check included, against NUTS"]
    assert ep.ratio == 0.6 and ep.met and found["programs of EP, against NUTS"].met
    assert not found["first run, six cities: SFVI, start included, against SVI"].met  # 9 s are more than twice 4
    assert not found["first run, horseshoe, 28 globals: EP against NUTS"].met
    assert not found["EP, adult, 109 coefficients: largest shift beyond NUTS's error"].met  # there are no means
    written = path.read_text()
    assert written in capsys.readouterr().out.replace("\n\n", "\n")
    rows = written.splitlines()
    assert len(rows) == len(lines) + 2 and len({len(row) for row in rows}) == 1, "columns stand under one another"


@pytest.mark.slow
def test_every_group_of_the_quick_table_gives_lines():
    for name in bench.QUICK:
        lines = list(bench.GROUPS[name](bench.parser().parse_args(["--quick"])))
        assert lines and all(np.isfinite(line.ours) for line in lines), name


@pytest.mark.slow
def test_a_fresh_process_tells_what_it_found():
    """Means and sds are those of the closed form, beyond NUTS's Monte Carlo error; 5 sds have no larger."""
    process = bench.measured("nuts", "normal:3", 600, True, 1, "--rounds", "300")
    _, mean, sd = conjugate.simulated(3)
    z = np.subtract(process.mean, mean) / sd * np.sqrt(process.n_eff)
    assert np.max(np.abs(z)) < 5
    assert process.seconds < 600 and process.memory > 50 and process.programs == process.made > 0
