"""How the package is built: rooms in an order, small files, no knowledge of another room's classes."""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

import numpyro_fed

ROOT = Path(numpyro_fed.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))

# Stations of the pipeline (docs/design.md): a file imports from its own room and from those before it.
GROUND = (
    "algorithm",
    "schedules",
    "optim",
    "precision",
    "checks",
    "ahead",
    "equations",
    "keys",
    "memo",
    "pieces",
    "gi",
    "host",
    "cache",
    "files",
    "threads",
)
ROOMS = (
    "data",
    "model",
    "normal",
    "local",
    "guides",
    "solvers",
    "engines",
    "prepare",
    "results",
    "run",
    "methods",
    "judge",
    "remote",
)

# Rooms whose classes nobody else asks for by name: a thing is asked what it can do.
PRIVATE = ("engines", "schedules", "solvers", "data.store")


def module(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {module(path): ast.parse(path.read_text()) for path in FILES}


def room(name: str) -> int:
    """The place of a module's room in the order; the package itself, which only shows names, stands last."""
    parts = name.split(".")
    if len(parts) == 1:
        return len(ROOMS) + 1
    return 0 if parts[1] in GROUND else 1 + ROOMS.index(parts[1])


def imported(name: str) -> Iterator[str]:
    """The package's modules that a module imports, wherever in the file and for whatever purpose."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for one in found:
            while one and one not in TREES:
                one = one.rpartition(".")[0]
            if one:
                yield one


GRAPH = {name: set(imported(name)) - {name} for name in TREES}


@pytest.mark.parametrize("name", [name for name in TREES if "." in name])
def test_imports_go_to_rooms_before(name: str) -> None:
    later = sorted(other for other in GRAPH[name] if room(other) > room(name))
    assert not later
    assert "numpyro_fed" not in GRAPH[name], "the public names are for users"


def test_no_cycle() -> None:
    """TYPE_CHECKING and imports inside of functions counted."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in GRAPH[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in GRAPH:
        visit(name, ())


def test_files_are_small() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert [name for name, number in lines.items() if number > 350] == []
    assert statistics.median(lines.values()) < 150


def asked_for(tree: ast.AST) -> Iterator[str]:
    """Names of classes in ``isinstance`` and ``issubclass``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            for part in ast.walk(node.args[1]):
                if isinstance(part, ast.Name):
                    yield part.id
                elif isinstance(part, ast.Attribute):
                    yield part.attr


@pytest.mark.parametrize("own", PRIVATE)
def test_no_room_asks_for_anothers_classes(own: str) -> None:
    inside = lambda name: name.startswith(f"numpyro_fed.{own}")
    classes = {
        node.name for name in TREES if inside(name) for node in ast.walk(TREES[name]) if isinstance(node, ast.ClassDef)
    }
    assert classes
    for name, tree in TREES.items():
        if not inside(name):
            assert not classes & set(asked_for(tree)), name
