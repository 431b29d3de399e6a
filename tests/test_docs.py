"""What the documentation shows runs, and what is public is in it."""

import ast
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from docs_scenes import SCENES

import numpyro_fed as nf

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "_build" not in path.parts
}


class Block(NamedTuple):
    line: int
    heading: str  # of its section
    text: str


def blocks(page: str) -> Iterator[Block]:
    """The page's Python, fence by fence; fences in a list are indented."""
    for found in re.finditer(r"^( *)```python\n(.*?)^\1```$", PAGES[page], re.MULTILINE | re.DOTALL):
        text = "".join(line.removeprefix(found[1]) for line in found[2].splitlines(keepends=True))
        above = PAGES[page][: found.start()]
        heading = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", above, flags=re.DOTALL), re.MULTILINE)
        yield Block(above.count("\n") + 2, heading[-1], text)


WITH_CODE = [page for page in PAGES if any(blocks(page))]


# --- what is shown exists ---------------------------------------------------------------------------------------------


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
    for line, _, text in blocks(page):
        for node in ast.walk(ast.parse(text)):
            where = f"{page}, line {line + getattr(node, 'lineno', 1) - 1}"
            if parts := chain(node):
                assert hasattr(found(parts[:-1]), parts[-1]), f"{where}: nf.{'.'.join(parts)}"
            if isinstance(node, ast.Call) and (parts := chain(node.func)):
                known = inspect.signature(found(parts)).parameters
                if not any(one.kind is one.VAR_KEYWORD for one in known.values()):
                    unknown = {one.arg for one in node.keywords if one.arg} - set(known)
                    assert not unknown, f"{where}: nf.{'.'.join(parts)} takes no {sorted(unknown)}"


# --- and runs ---------------------------------------------------------------------------------------------------------

# A method of one's own is that test's code; a deployment's is in many files and processes.
ELSEWHERE = {"docs/extending.md": "tests/test_extending.py", "docs/federation.md": "tests/remote"}


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rounds and a few draws: that code runs is asked here, what it finds in other tests."""
    run, nuts, sbc, quiet = nf.Method.run, nf.nuts, nf.sbc, dict(progress_bar=False)
    few = dict(num_warmup=20, num_samples=20, num_chains=1)

    def three_rounds(self: Any, rng_key: Any, silos: Any, num_rounds: int | None = None, **options: Any) -> Any:
        return run(self, rng_key, silos, min(num_rounds or 3, 3), **quiet | options)

    monkeypatch.setattr(nf.Method, "run", three_rounds)
    monkeypatch.setattr(nf, "nuts", lambda *args, **options: nuts(*args, **options | few | quiet))
    monkeypatch.setattr(nf, "sbc", lambda *args, **options: sbc(*args, **options | quiet | dict(num_simulations=3)))
    monkeypatch.setattr(nf, "enable_cache", lambda: None)  # the tests have one


def scene_of(page: str, heading: str) -> Any:
    """Where names come from that a page takes for given; methods go on from the front page."""
    if page.startswith("docs/methods/"):
        return front_page
    scene = SCENES.get(page, dict)
    return scene[heading] if isinstance(scene, dict) else scene


def front_page() -> dict[str, Any]:
    """Its model and silos, of every eighth child."""
    names: dict[str, Any] = {}
    setup, five_lines = blocks("docs/index.md")
    exec(setup.text, names)
    data = names["data"]
    names["data"] = data._replace(silo=data.silo[::8], smoke=data.smoke[::8], wheeze=data.wheeze[::8])
    exec(five_lines.text.splitlines()[0], names)
    return names


@pytest.mark.slow
@pytest.mark.merge
@pytest.mark.usefixtures("short_runs")
@pytest.mark.filterwarnings("ignore:.*diverged:UserWarning")  # NUTS has hardly warmed up, and makes twenty draws
@pytest.mark.filterwarnings("ignore:the chains disagree:UserWarning")
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.xdist_group(page)) for page in WITH_CODE if page not in ELSEWHERE]
)
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scenes: dict[Any, dict[str, Any]] = {}
    for line, heading, text in blocks(page):
        scene = scene_of(page, heading)
        if scene not in scenes:
            scenes[scene] = scene()
        # A failure shows the page's own line.
        exec(compile("\n" * (line - 1) + text, str(ROOT / page), "exec"), scenes[scene])


# --- the reference has every name -------------------------------------------------------------------------------------


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
    shown = re.findall(r"^ *\.\. auto\w+:: (\S+)", PAGES["docs/api.md"], re.MULTILINE)
    extras = ("numpyro_fed.remote.flare",)  # import what is not installed with the rest
    objects = {id(pkgutil.resolve_name(name)) for name in shown if not name.startswith(extras)}
    missing = [name for name in public() if id(reduce(getattr, name.split("."), nf)) not in objects]
    assert not missing, f"not in docs/api.md: {missing}"
