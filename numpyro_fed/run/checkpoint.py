"""A run on disk: written on the way, and gone on with in another process, bit for bit.

A run is a few loops of rounds, one after the other, and a little host code between them. A file holds where each loop
ended and where the last one is; to go on, the same program is run again, and loops that are in the file are read
instead of done. States cross as messages do, by the wire codec: both ends know their structure.

The file is written whole under another name, flushed to the disk and then renamed, so there is always a good one. It
begins with the letters ``NFCP``, a version and the SHA-256 of the rest, an ``.npz`` without pickled objects.
"""

import hashlib
import io
import json
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Phase, PyTree
from numpyro_fed.checks import check_count, warn_user
from numpyro_fed.engines import wire
from numpyro_fed.files import replace_file
from numpyro_fed.results import codec
from numpyro_fed.run.books import Books
from numpyro_fed.run.identity import difference, versions

MAGIC, VERSION = b"NFCP", 1
_PREAMBLE = struct.Struct("<4sI32s")  # magic, version, SHA-256 of all that follows
SECONDS = 10.0  # between two writes, where the user does not say


class Loop(NamedTuple):
    """Where the rounds of one phase are, or where they ended."""

    server: PyTree
    states: tuple
    info: dict[str, np.ndarray]  # one row a round
    done: int = 0
    since: int = 0  # rounds before the chunk that these are in
    shortened: int = 0  # so many times steps were made shorter
    finished: bool = False
    round: int = 0  # of the method's own rounds


class Unsaved:
    """Nothing is written."""

    seconds = 0.0  # of earlier processes
    run = ""  # what the run is called in silos that are elsewhere
    # (silos' states) -> their names in silos that are elsewhere, as JSON: written beside them
    names_of: Callable[[tuple], Any] | None = None

    @property
    def kept(self) -> list[Any]:
        """The names of the states that the file holds."""
        return []

    def entered(self, phase: Phase, server: PyTree, states: tuple, books: Books) -> Loop | None:
        return None

    def until(self, done: int, end: int) -> int:
        return end

    def reached(self, loop: Loop, rows: list[dict[str, np.ndarray]], books: Books) -> None:
        pass

    def interrupted(self) -> None:
        pass


class Checkpoint(Unsaved):
    """The file of one run.

    Args:
        path: of the file. One that is there is of this very run, or refused.
        every: rounds between two writes; None: about ten seconds.
        identity: what makes this run this one (:mod:`numpyro_fed.run.identity`).
    """

    def __init__(self, path: str | Path, every: int | None, identity: dict[str, dict[str, str]]) -> None:
        self.path, self.every, self.identity = Path(path), every, identity
        if every is not None:
            check_count("checkpoint_every", every)
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"checkpoint={str(path)!r}: there is no folder {str(self.path.parent)!r}, make it")
        self.began, self.wrote = time.perf_counter(), time.perf_counter()
        self.seconds, self.run = 0.0, ""
        self.loops: list[tuple[dict[str, Any], dict[str, np.ndarray]]] = []  # each one's header and arrays
        self.books: Any = None
        self.at = -1  # the loop that goes on
        self.phase: Phase  # its phase
        self.point: tuple[Loop, list[dict], Any] | None = None  # its last chunk's end, infos and books then
        if self.path.exists():
            self._read()

    @property
    def kept(self) -> list[Any]:
        return [header["kept"] for header, _ in self.loops if "kept" in header]

    @property
    def elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.began

    # --- what the loop asks -------------------------------------------------------------------------------------------

    def entered(self, phase: Phase, server: PyTree, states: tuple, books: Books) -> Loop | None:
        """Where this loop is; None: at its beginning. With the last one the books are put back."""
        self.phase, self.at, self.point = phase, self.at + 1, None
        if self.at == len(self.loops):
            self.loops.append(({}, {}))
            return None
        header, arrays = self.loops[self.at]
        if header["phase"] != phase.name:
            raise self._refused(f"its phase {self.at} is {header['phase']!r}, where this run has {phase.name!r}")
        try:
            server = _decoded(arrays["server"], server)
            states = _decoded(arrays["states"], states) if "states" in arrays else states
        except ValueError as error:
            raise self._refused(f"its states are others. {error}") from None
        info = {name.removeprefix("info."): rows for name, rows in arrays.items() if name.startswith("info.")}
        loop = Loop(server, states, info, *(header[name] for name in Loop._fields[3:]))
        if self.at == len(self.loops) - 1:
            books.put_back(self.books)
        return loop

    def until(self, done: int, end: int) -> int:
        """Where to look next, on the way to ``end``."""
        return end if self.every is None else min(end, done + self.every - done % self.every)

    def reached(self, loop: Loop, rows: list[dict[str, np.ndarray]], books: Books) -> None:
        """After a chunk: written where it is time to. ``rows`` are the infos of the chunks so far."""
        self.point = loop, rows, books.kept()
        late = time.perf_counter() - self.wrote >= SECONDS
        if loop.finished or (late if self.every is None else loop.done % self.every == 0):
            self._write(*self.point)

    def interrupted(self) -> None:
        """The last chunk's end, where that was not written."""
        if self.point is not None:
            self._write(*self.point)

    # --- the file -----------------------------------------------------------------------------------------------------

    def _write(self, loop: Loop, rows: list[dict[str, np.ndarray]], books: Any) -> None:
        header: dict[str, Any] = {"phase": self.phase.name, **{name: getattr(loop, name) for name in Loop._fields[3:]}}
        arrays = {"server": _encoded(loop.server)}
        if self.phase.role != "check" or self.phase.num_rounds > 1:  # a single look leaves silos' states as they are
            arrays["states"] = _encoded(loop.states)
            if self.names_of is not None:
                header["kept"] = self.names_of(loop.states)
        arrays |= {f"info.{name}": np.concatenate([one[name] for one in rows]) for name in rows[0]}
        self.loops[self.at] = (header, arrays)
        whole: dict[str, Any] = {}
        for i, (_, own) in enumerate(self.loops):
            whole |= {f"{i}.{name}": array for name, array in own.items()}
        kept: dict[str, np.ndarray] = {}
        told = {
            "identity": self.identity,
            "versions": versions(),
            "seconds": self.elapsed,
            "run": self.run,
            "loops": [header for header, _ in self.loops],
            "books": codec.encode(books, codec.keep_in(kept)),
        }
        whole |= {f"books.{name}": array for name, array in kept.items()}
        body = io.BytesIO()
        text: Any = np.frombuffer(json.dumps(told).encode(), np.uint8)
        np.savez(body, header=text, **whole)
        contents = body.getbuffer()
        replace_file(self.path, _PREAMBLE.pack(MAGIC, VERSION, hashlib.sha256(contents).digest()), contents)
        self.wrote = time.perf_counter()

    def _read(self) -> None:
        data = self.path.read_bytes()
        if len(data) < _PREAMBLE.size or data[:4] != MAGIC:
            raise self._refused("it is no checkpoint of numpyro_fed")
        _, version, digest = _PREAMBLE.unpack_from(data)
        if version != VERSION:
            newer = "upgrade numpyro_fed" if version > VERSION else "finish it with the version that began it"
            raise self._refused(f"it has version {version} of the format, and this one reads {VERSION}: {newer}")
        body = memoryview(data)[_PREAMBLE.size :]
        if hashlib.sha256(body).digest() != digest:
            raise self._refused("it is damaged: its digest is another")
        with np.load(io.BytesIO(body), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        told = json.loads(arrays.pop("header").tobytes())
        other = difference(told["identity"], self.identity)
        if other is not None:
            raise self._refused(other)
        for name, now in versions().items():
            if told["versions"].get(name) != now:
                warn_user(
                    f"the checkpoint {str(self.path)!r} was written with {name} {told['versions'].get(name)}, this is "
                    f"{now}: the run goes on, but need not be the same to the last bit"
                )
        own = lambda prefix: {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
        self.loops = [(header, own(f"{i}.")) for i, header in enumerate(told["loops"])]
        self.books = codec.decode(told["books"], codec.read_from(own("books.")))
        self.seconds, self.run = told["seconds"], told.get("run", "")

    def _refused(self, why: str) -> ValueError:
        return ValueError(
            f"checkpoint={str(self.path)!r} is not of this run: {why}. Take another path, or remove the file to begin "
            "anew"
        )


def _encoded(tree: PyTree) -> np.ndarray:
    return np.frombuffer(wire.encode(tree), np.uint8)


def _decoded(data: np.ndarray, like: PyTree) -> PyTree:
    with jax.enable_x64(True):  # naturals are float64 in a float32 program, too
        return jax.tree.map(jnp.asarray, wire.decode(data.tobytes(), like))
