"""The notebooks run, and what they say in words is what their cells compute."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.run_notebooks import HERE, cells, notebooks


def test_cells_know_their_lines():
    cell = "```{code-cell} ipython3\n:tags: [hide-input]\n\na = 1\n```\n"
    text = f"---\nkernelspec:\n---\nwords\n\n{cell}\n```python\nno = 0\n```\n"
    (cell,) = cells(text)
    assert cell[1].strip() == "a = 1" and text.split("\n")[cell[0]] == "a = 1"


def test_every_notebook_is_in_the_site():
    listed = Path(HERE.parent, "docs", "notebooks", "index.md").read_text()
    assert notebooks() and all(f"\n{path.stem}\n" in listed for path in notebooks())


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    """In a process of its own, in a user's settings. Its words are guarded by asserts in cells that the site hides."""
    command = [sys.executable, str(HERE / "run_notebooks.py"), path.stem, "--figures", str(tmp_path)]
    ran = subprocess.run(
        command, env=dict(os.environ, PYTHONPATH=str(HERE.parent)), capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    if f"{path.name} stopped" in ran.stdout:
        assert not os.environ.get("NUMPYRO_FED_DATA"), ran.stdout
        pytest.skip("the notebook's data are not here")
    assert list(tmp_path.glob("*.png")), "a plot worth looking at"
