"""What the documentation shows runs, and what is public is in it."""

import ast
import inspect
import re
import types
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import numpyro_fed as nf

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_build" not in path.parts
}


class Block(NamedTuple):
    line: int
    text: str


def blocks(page: str) -> Iterator[Block]:
    """The page's Python, fence by fence; fences in a list are indented."""
    for found in re.finditer(r"^( *)```python\n(.*?)^\1```$", PAGES[page], re.MULTILINE | re.DOTALL):
        text = "".join(line.removeprefix(found[1]) for line in found[2].splitlines(keepends=True))
        yield Block(PAGES[page][: found.start()].count("\n") + 2, text)


WITH_CODE = [page for page in PAGES if any(blocks(page))]


# --- what is shown exists -----------------------------------------------------------------------------------------------


def chain(node: ast.AST) -> list[str]:
    """``nf.solvers.HMC`` as its parts, [] for anything that does not begin with ``nf``."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return parts[::-1] if isinstance(node, ast.Name) and node.id == "nf" else []


def found(parts: list[str]) -> Any:
    return reduce(getattr, parts, nf)


@pytest.mark.parametrize("page", WITH_CODE)
def test_names_and_arguments_exist(page: str) -> None:
    """Every ``nf.name`` of a page is there, and takes the keywords that are shown."""
    for line, text in blocks(page):
        for node in ast.walk(ast.parse(text)):
            where = f"{page}, line {line + getattr(node, 'lineno', 1) - 1}"
            if parts := chain(node):
                assert hasattr(found(parts[:-1]), parts[-1]), f"{where}: nf.{'.'.join(parts)}"
            if isinstance(node, ast.Call) and (parts := chain(node.func)):
                known = inspect.signature(found(parts)).parameters
                if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
                    unknown = {one.arg for one in node.keywords if one.arg} - set(known)
                    assert not unknown, f"{where}: nf.{'.'.join(parts)} takes no {sorted(unknown)}"


# --- and runs -------------------------------------------------------------------------------------------------------------

# Pages whose code others run, or that show files of a deployment.
ELSEWHERE = {
    "docs/extending.md": "tests/test_extending.py",
    "docs/faults.md": "tests/test_faults.py",
    "docs/federation.md": "tests/remote",
}


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds and a few draws: that code runs is asked here, what it finds in other tests."""
    run, nuts, few = nf.Method.run, nf.nuts, dict(num_warmup=20, num_samples=20, num_chains=1, progress_bar=False)

    def three_rounds(self: Any, rng_key: Any, silos: Any, num_rounds: int | None = None, **options: Any) -> Any:
        return run(self, rng_key, silos, min(num_rounds or 3, 3), **dict(check=False, progress_bar=False) | options)

    monkeypatch.setattr(nf.Method, "run", three_rounds)
    monkeypatch.setattr(nf, "nuts", lambda *args, **options: nuts(*args, **options | few))


def execute(page: str, names: dict[str, Any]) -> None:
    for line, text in blocks(page):
        code = compile("\n" * (line - 1) + text, str(ROOT / page), "exec")  # a failure shows the page's own line
        exec(code, names)


def front_page() -> dict[str, Any]:
    """The names that method pages go on from: the model, the data and the silos."""
    names: dict[str, Any] = {}
    setup, five_lines = blocks("docs/index.md")
    exec(setup.text + five_lines.text.splitlines()[0], names)
    return names


@pytest.mark.slow
@pytest.mark.usefixtures("short_runs")
@pytest.mark.parametrize("page", [page for page in WITH_CODE if page not in ELSEWHERE])
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    execute(page, front_page() if page.startswith("docs/methods/") else {})


# --- the reference has every name ---------------------------------------------------------------------------------------


def public() -> Iterator[str]:
    """``numpyro_fed.__all__``, and what its modules show: their own ``__all__``, or what they define."""
    for name in nf.__all__:
        value = getattr(nf, name)
        yield name
        if isinstance(value, types.ModuleType):
            defined = [k for k, v in vars(value).items() if k[0] != "_" and is_of(value.__name__, v)]
            yield from (f"{name}.{inner}" for inner in getattr(value, "__all__", defined))


def is_of(module: str, value: Any) -> bool:
    return getattr(value, "__module__", None) == module and (inspect.isclass(value) or inspect.isfunction(value))


def test_the_reference_has_every_public_name() -> None:
    shown = set(re.findall(r"^ *\.\. auto\w+:: (\S+)", PAGES["docs/api.md"], re.MULTILINE))
    missing = []
    for name in public():
        value = reduce(getattr, name.split("."), nf)
        aliases = {f"numpyro_fed.{name}", getattr(value, "__name__", "")}  # nf.datasets is numpyro_fed.data.datasets
        if not aliases & shown:
            missing.append(name)
    assert not missing
