"""What a silo does: requests in, replies out, its data and states inside.

A worker holds one silo's data, the runs that were opened in it, their states and compiled programs. It is given trees
of numbers and a few words; no code crosses. It keeps in its folder all that it needs to go on in another process, so a
silo may be killed at any moment, and in an air-gapped study a new process answers each request.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from numpyro_fed.data.inputs import checked_arguments, leaves, shared_digest
from numpyro_fed.data.silos import at_silo
from numpyro_fed.engines import wire
from numpyro_fed.files import replace_file
from numpyro_fed.host import folded
from numpyro_fed.keys import START
from numpyro_fed.remote.errors import ToldError
from numpyro_fed.remote.opening import description
from numpyro_fed.remote.recipes import Recipe
from numpyro_fed.remote.runs import NotHere, Run, Studied, shared_of, silo_key
from numpyro_fed.remote.site import Purpose
from numpyro_fed.remote.states import Kept, States, name_of
from numpyro_fed.run.digests import digest_of

RUN = re.compile(r"[0-9a-f]{16}")
MOST_RUNS = 8  # of which states are kept; older ones are let go when a new one is opened
DOES = ("start", "step", "begin_silo", "leave_silo", "shorten")
EFFORTS = ("most", "some", "least")


class DataChanged(ToldError):
    """The data are not those that the run was opened with."""


class Worker:
    """One silo.

    Args:
        name: of the silo.
        own: its arguments of the model, ``{argument: array or int}``.
        study: model, shared arguments and methods.
        folder: where it keeps what it needs to go on; None: nowhere, and what is lost is lost.
        own_counts, renumbered: as of an :class:`~numpyro_fed.Silos`.
    """

    def __init__(
        self,
        name: str,
        own: Mapping[str, Any],
        study: Studied,
        folder: Path | str | None = None,
        own_counts: frozenset[str] = frozenset(),
        renumbered: frozenset[str] = frozenset(),
    ) -> None:
        self.name, self.study, self.folder = name, study, None if folder is None else Path(folder)
        self.own = checked_arguments(name, own)
        self.told = {"own_counts": sorted(own_counts), "renumbered": sorted(renumbered)}
        self.data_digest = digest_of(dict(self.own))
        if self.folder is not None:  # states hold latents: for their owner's eyes, whatever the folder's own mode
            (self.folder / "runs").mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.folder / "runs").chmod(0o700)
        self.runs: dict[str, Run] = {}
        self._message: Any = ()  # the last

    @property
    def rows(self) -> int:
        """Of the longest of its arrays; once a model has told which of them are observed, of those."""
        longest = max((leaf.shape[0] for _, leaf in leaves(self.own) if np.ndim(leaf)), default=1)
        return min([longest, *(run.rows for run in self.runs.values())])

    @property
    def fields(self) -> list[str]:
        """Names of the leaves of the last message, for the audit log: a payload has but their checksums."""
        return [field.name for field in wire.fields(self._message)]

    def purpose(self, body: dict[str, Any]) -> Purpose:
        """What a request for work is for, from its recipe."""
        recipe = _recipe(body)
        if recipe == ("survey",):
            return Purpose("survey", 0)
        found = self._run(body).made(recipe)
        return Purpose(found.purpose, _whole(body, "round"), found.points)

    def answer(self, type: str, body: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """The reply's body and payload."""
        answers: dict[str, Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]] = {
            "hello": self._hello,
            "open": self._open,
            "agree": self._agree,
            "work": self._work,
            "end": self._end,
        }
        if type not in answers:
            raise ValueError(f"no such request: {type!r}")
        return answers[type](body, payload)

    # --- before the rounds --------------------------------------------------------------------------------------------

    def _hello(self, body: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        return {"silo": description(self.own), "shared": shared_digest(shared_of(self.study)), **self.told}, b""

    def _open(self, body: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        run = _run_id(body)
        if run in self.runs or self._kept(run, "opening.json") is not None:
            found = self._run(body)
            if found.opening != body:
                raise ValueError("a run of that name was opened otherwise")
            return {"padded": found.opened.padded}, b""
        self._let_go()
        self.runs[run] = self._opened(body)
        self._keep(run, "opening.json", {"opening": body, "data": self.data_digest})
        return {"padded": self.runs[run].opened.padded}, b""

    def _agree(self, body: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        found = self._run(body)
        if found.agreement not in (None, body):
            raise ToldError("something else was agreed on in this run before")
        found.agree(body)
        self._keep(_run_id(body), "agreement.json", body)
        return {}, b""

    def _end(self, body: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """The fit, for draws of this silo's own latents."""
        self._run(body)
        if self.folder is not None and payload:
            replace_file(self._folder(_run_id(body)) / "fit.npz", payload)
        return {}, b""

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _work(self, body: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        run, name = self._run(body), name_of(body, payload)
        kept = run.states.get(name)
        if kept is not None:  # asked twice: answered twice, done once
            return {}, kept.reply
        do, recipe = body.get("do"), _recipe(body)
        if do not in DOES or body.get("effort") not in EFFORTS:
            raise ValueError("the server asks for something that this version does not do")
        given = run.received(do, recipe, body, payload)
        states = [None if one is None else self._state(run, one) for one in body["from"]]
        with at_silo(self.name):
            if do == "start":
                key = silo_key(folded(_key(body), START), self.name)
                reply, state = b"", run.compiled(do, recipe)(key, given, run.data)
            elif do == "step":
                before = states[0] if states else ()
                message, state = run.step(recipe, body["effort"], _key(body), _whole(body, "round"), given, before)
                reply, self._message = wire.encode(message), message
                if not states:  # it has none, and does not need to remember that it was asked
                    return {}, reply
            else:
                reply, state = b"", run.compiled(do, recipe)(given, *states)
        run.states.put(name, Kept(state, reply))
        if body.get("keep") is not None:
            run.states.keep_only({name, *body["keep"], *(one for one in body["from"] if one is not None)})
        return {}, reply

    def _state(self, run: "Run", name: str) -> Any:
        """A state of this run, or of an earlier one that it goes on with."""
        if re.fullmatch(r"[0-9a-f]{32}", name) is None:
            raise ValueError("a state's name is 32 hexadecimal digits")
        found = run.states.get(name)
        if found is None:
            for other in [*self.runs, *(self._on_disk() if self.folder is not None else ())]:
                found = self.runs[other].states.get(name) if other in self.runs else None
                if found is None and self.folder is not None and (self._folder(other) / "states" / name).exists():
                    found = States(self._folder(other) / "states").get(name)
                if found is not None:
                    self._used(other)
                    break
        if found is None:
            raise NotHere("the state that the request begins from is not here: an old request, or another silo's")
        return found.state

    # --- runs that have ended -----------------------------------------------------------------------------------------

    def ended(self) -> dict[str, Path]:
        """Runs whose fit the server has brought, the newest first, and where it is."""
        paths = {run: self._folder(run) / "fit.npz" for run in self._on_disk()} if self.folder is not None else {}
        return {run: path for run, path in paths.items() if path.exists()}

    def opened_run(self, run: str) -> Run:
        """A run as it was opened here, on the data of now, which must be those of then."""
        return self._run({"run": run})

    # --- runs, in memory and on disk ----------------------------------------------------------------------------------

    def _run(self, body: dict[str, Any]) -> "Run":
        run = _run_id(body)
        if run not in self.runs:
            told = self._kept(run, "opening.json")
            if told is None:
                raise NotHere("no such run was opened here")
            if told["data"] != self.data_digest:
                raise DataChanged("its data are not those that this run was opened with: begin another run")
            found = self._opened(told["opening"])
            agreement = self._kept(run, "agreement.json")
            if agreement is not None:
                found.agree(agreement)
            self.runs[run] = found
        self._used(run)
        return self.runs[run]

    def _used(self, run: str) -> None:
        """What was used last is let go of last."""
        if run in self.runs:
            self.runs[run] = self.runs.pop(run)
        if self.folder is not None and self._folder(run).exists():
            os.utime(self._folder(run))

    def _opened(self, opening: dict[str, Any]) -> Run:
        folder = None if self.folder is None else self._folder(_run_id(opening))
        return Run(self.name, self.own, self.study, opening, folder)

    def _folder(self, run: str) -> Path:
        assert self.folder is not None
        return self.folder / "runs" / run

    def _kept(self, run: str, what: str) -> Any:
        if self.folder is None or not (self._folder(run) / what).exists():
            return None
        return json.loads((self._folder(run) / what).read_text())

    def _keep(self, run: str, what: str, value: Any) -> None:
        if self.folder is not None:
            self._folder(run).mkdir(parents=True, exist_ok=True)
            replace_file(self._folder(run) / what, json.dumps(value).encode())

    def _on_disk(self) -> list[str]:
        """Runs, those first that were used last."""
        assert self.folder is not None
        found = [path for path in (self.folder / "runs").glob("*") if RUN.fullmatch(path.name)]
        return [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]

    def _let_go(self) -> None:
        """Of runs that were not used for long."""
        for old in list(self.runs)[: 1 - MOST_RUNS]:
            del self.runs[old]
        if self.folder is not None:
            for old in self._on_disk()[MOST_RUNS - 1 :]:
                shutil.rmtree(self._folder(old), ignore_errors=True)


def _key(body: dict[str, Any]) -> Any:
    return _wrapped(tuple(body["key"]), body["impl"])


@lru_cache(maxsize=64)
def _wrapped(key: tuple[int, ...], impl: str) -> Any:
    words: Any = np.array(key, np.uint32)
    return jax.random.wrap_key_data(words, impl=impl)


def _run_id(body: dict[str, Any]) -> str:
    run = body.get("run")
    if not isinstance(run, str) or RUN.fullmatch(run) is None:
        raise ValueError("a run's name is 16 hexadecimal digits")
    return run


def _recipe(body: dict[str, Any]) -> Recipe:
    recipe = body.get("phase")
    if not isinstance(recipe, list) or not all(type(word) in (str, int) for word in recipe):
        raise ValueError("a phase is told in words and numbers")
    return tuple(recipe)


def _whole(body: dict[str, Any], what: str) -> int:
    if type(body.get(what)) is not int or body[what] < 0:
        raise ValueError(f"{what} must be a whole number")
    return body[what]
