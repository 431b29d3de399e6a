"""A study: the file that the server and every silo hold, each its own copy of the same bytes.

    import numpyro
    import numpyro.distributions as dist
    import numpyro_fed as nf

    def model(x, y=None): ...

    name = "asthma"                                    # by default the file's
    shared = dict(knots=[0.0, 0.5, 1.0])               # arguments that are the same everywhere
    methods = {"EP": nf.EP(model, family="diagonal")}  # beside those that need no settings
    columns = {"x": ["age", "dose"], "y": "fev1"}      # how arguments come from a table (numpyro_fed.remote.tables)

It is Python and is executed, so whoever runs a silo reads it first; it never comes over the wire. What is compared
between machines is its digest. It holds no data. A study is one file: what it imports is installed on every machine.
"""

import hashlib
import inspect
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pandas as pd

from numpyro_fed.checks import is_number
from numpyro_fed.data.inputs import checked_arguments
from numpyro_fed.judge.messages import METHODS
from numpyro_fed.methods.base import Method
from numpyro_fed.model.trace import Model
from numpyro_fed.remote.tables import Columns, check_known, plan

MOST_NUMBERS = 1000  # of an array in the study file that is no shared argument: beyond, it may well be data


class StudyError(ValueError):
    """The study file is not one; the message says what to write."""


@dataclass(frozen=True)
class Study:
    """What a study file says."""

    path: Path
    digest: str  # sha256 of the file's bytes, hex
    name: str
    model: Model
    shared: dict[str, Any]
    methods: dict[str, Method]
    columns: Columns

    @staticmethod
    def load(path: str | Path) -> "Study":
        """Execute this machine's own copy of a study file.

        Raises:
            StudyError: it cannot be run, or is no study; the message says where and what to write.
        """
        path = Path(path)
        try:
            source = path.read_bytes()
        except OSError as error:
            raise StudyError(f"the study file {path} cannot be read ({error.strerror}): name a study.py") from None
        digest = hashlib.sha256(source).hexdigest()
        return _study(path, digest, _executed(path, source, digest))

    @cached_property
    def own_counts(self) -> frozenset[str]:
        """Arguments that count a silo's own groups."""
        return frozenset(column.number for column in self.columns if column.number is not None)

    @cached_property
    def renumbered(self) -> frozenset[str]:
        """Arguments that number a silo's own groups from 0."""
        return frozenset(column.argument for column in self.columns if column.groups)

    def method(self, name: str) -> Method:
        """One of the study's methods, or an error that names the nearest."""
        check_known(name, self.methods, f"the study {self.name!r}: methods")
        return self.methods[name]


def _executed(path: Path, source: bytes, digest: str) -> dict[str, Any]:
    """The names a study file defines, in a module of their own."""
    module = ModuleType(f"numpyro_fed_study_{digest[:16]}")
    module.__file__ = str(path)
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module  # dataclasses in it look there
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        if before is None:
            del sys.modules[module.__name__]
        raise StudyError(_told(path, error)) from error
    return dict(module.__dict__)


def _told(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"{path}, line {error.lineno}: {error.msg}"
    line = next(
        (frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)), "?"
    )
    told = f"{path}, line {line}: {type(error).__name__}: {error}"
    if isinstance(error, ImportError):
        told += ". A study is one file: what it imports must be installed on every machine"
    return told


def _study(path: Path, digest: str, names: dict[str, Any]) -> Study:
    model = names.get("model")
    if model is None:
        raise StudyError(f"{path} has no model: define def model(x, y=None): ... with NumPyro")
    if not callable(model):
        raise StudyError(f"{path}: model must be a NumPyro model (a function), got a {type(model).__name__}")
    name = names.get("name", path.stem)
    if not isinstance(name, str) or not name:
        raise StudyError(f"{path}: name must be a string, got {name!r}")
    shared = _shared(path, names.get("shared", {}), model)
    _check_no_data(path, names)
    return Study(path, digest, name, model, shared, _methods(path, names, model), _columns(path, names, model, shared))


def _shared(path: Path, shared: Any, model: Model) -> dict[str, Any]:
    if not isinstance(shared, Mapping):
        raise StudyError(f"{path}: shared must be a dict of arguments, got a {type(shared).__name__}")
    known, anything = _arguments(model)
    try:
        for argument in () if anything else shared:
            check_known(argument, known, "the model")
        return checked_arguments(None, shared)
    except (TypeError, ValueError) as error:
        raise StudyError(f"{path}, shared: {error}") from None


def _arguments(model: Model) -> tuple[dict[str, inspect.Parameter], bool]:
    """The model's arguments by name, and whether it takes any others."""
    found = inspect.signature(model).parameters
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in found.values())
    return {name: one for name, one in found.items() if one.kind in named}, anything


def _methods(path: Path, names: dict[str, Any], model: Model) -> dict[str, Method]:
    given = names.get("methods", {})
    if not isinstance(given, Mapping):
        raise StudyError(f'{path}: methods must be a dict such as {{"EP": nf.EP(model)}}, got a {type(given).__name__}')
    for name, method in given.items():
        if isinstance(method, type) and issubclass(method, Method):
            raise StudyError(f"{path}: methods[{name!r}] is a class: write nf.{method.__name__}(model)")
        if not isinstance(method, Method):
            raise StudyError(f"{path}: methods[{name!r}] must be a method such as nf.EP(model), got {method!r}")
        if method.model is not model:
            raise StudyError(
                f"{path}: methods[{name!r}] is of another model than the study's: write "
                f"nf.{type(method).__name__}(model, ...)"
            )
    # settings that say which site lives where belong to the model: they hold for methods that are not listed, too
    first = next(iter(given.values()), None)
    where: dict[str, Any] = {key: getattr(first, key, None) for key in ("local", "shared")}
    return {kind.__name__: kind(model, **where) for kind in METHODS} | {str(name): given[name] for name in given}


def _columns(path: Path, names: dict[str, Any], model: Model, shared: Mapping[str, Any]) -> Columns:
    known, anything = _arguments(model)
    if "columns" not in names:  # each argument has a column of its name; an option has a value already
        own = [name for name, one in known.items() if name not in shared and one.default in (one.empty, None)]
        return plan({name: name for name in own})
    try:
        columns = plan(names["columns"])
        for column in columns:
            for argument in (column.argument, *([] if column.number is None else [column.number])):
                if not anything:
                    check_known(argument, known, "the model")
                if argument in shared:
                    raise ValueError(f"{argument!r} stands in columns and in shared: keep one of the two")
    except (TypeError, ValueError) as error:
        raise StudyError(f"{path}: {error}") from None
    made = {*shared, *(column.argument for column in columns), *(column.number for column in columns)}
    missing = [name for name, one in known.items() if one.default is one.empty and name not in made]
    if missing:
        raise StudyError(
            f"{path}: the model's argument {missing[0]!r} is neither in columns nor in shared: add it to one"
        )
    return columns


def _check_no_data(path: Path, names: Mapping[str, Any]) -> None:
    """A study goes to every silo: data of one must not lie in it."""
    shared = {id(leaf) for leaf in names.get("shared", {}).values()}
    for name, value in names.items():
        if name.startswith("__") or id(value) in shared or name in ("shared", "methods", "columns"):
            continue
        if isinstance(value, pd.DataFrame | pd.Series) or hasattr(value, "own_counts"):
            raise StudyError(
                f"{path}: {name!r} is a {type(value).__name__}: a study holds no data, each silo names its own file"
            )
        size = _numbers(value)
        if size > MOST_NUMBERS:
            raise StudyError(
                f"{path}: {name!r} holds {size} numbers. A study holds no data: each silo names its own file. What is "
                f"the same everywhere goes into shared = dict({name}={name})"
            )


def _numbers(value: Any) -> int:
    """How many numbers an array, or a list of lists of them, holds."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return int(np.size(value))
    if isinstance(value, Mapping):
        return sum(_numbers(part) for part in value.values())
    if isinstance(value, list | tuple | set):
        return sum(_numbers(part) for part in value)
    return int(is_number(value))
