"""How much a silo has answered, across restarts and kills of its process.

``counts.json`` holds the counts; ``counts.journal`` a line for each answer since it was written. A line is appended
before the answer leaves (12 us; replacing a file takes a millisecond), and every few hundred lines the counts are
written anew, whole. What was counted is there after a kill at any moment.

An answer that is asked for again, since it was lost on the way, is the same answer, and is not counted again: the last
few requests of the last few runs are remembered by their digests.
"""

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from numpyro_fed.files import replace_file
from numpyro_fed.remote.audit import append
from numpyro_fed.remote.policy import Count

try:
    import fcntl
except ImportError:  # where there are no such locks, one process is to serve a folder
    fcntl = None  # type: ignore[assignment]

REMEMBERED = 8  # requests of a run, and runs
MOST_LINES = 256  # of the journal


class Counts:
    """The counts of one folder.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     counts = Counts(Path(folder))
    ...     with counts.held():
    ...         counts.note("study", Count(rounds=1, messages=1), "00112233aabbccdd", "digest")
    ...     again = Counts(Path(folder))  # another process
    ...     with again.held():
    ...         again.of("study"), again.knows("00112233aabbccdd", "digest")
    (Count(rounds=1, messages=1, points=0), True)
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.journal = folder / "counts.json", folder / "counts.journal"
        self._lock_path = folder / "counts.lock"
        self._thread = threading.Lock()
        self._seen: tuple[int, ...] | None = None  # how the files were when they were last read or written
        self._clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """For the time of one request: no other thread or process counts in the meantime."""
        with self._thread:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                if fcntl is not None:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if self._seen is None or self._seen != self._stamp():
                    self._read()
                yield
            finally:
                os.close(lock)  # which lets go of it

    def of(self, study: str) -> Count:
        """What was answered of a study."""
        return self._studies.get(study, Count())

    def knows(self, run: str, request: str) -> bool:
        """Whether this request of this run was answered lately."""
        return request in self._answered.get(run, ())

    def note(self, study: str, count: Count, run: str, request: str) -> None:
        """Count an answer that is about to leave; ``request`` is "" for one that need not be remembered."""
        line = (self._number + 1, study, *count, run, request)
        append(self.journal, json.dumps(line).encode() + b"\n")
        self._take(*line)
        self._lines += 1
        if self._lines >= MOST_LINES or self._seen is None or not self._seen[0]:  # the first makes the file
            self._write()
        self._seen = self._stamp()

    def _take(self, number: int, study: str, rounds: int, messages: int, points: int, run: str, request: str) -> None:
        self._number, self._studies[study] = number, Count(rounds, messages, points)
        if request:
            known = [one for one in self._answered.pop(run, []) if one != request]
            self._answered[run] = [*known, request][-REMEMBERED:]
            for old in list(self._answered)[:-REMEMBERED]:
                del self._answered[old]

    def _clear(self) -> None:
        self._number = self._lines = 0  # answers in all; lines of the journal
        self._studies: dict[str, Count] = {}
        self._answered: dict[str, list[str]] = {}  # of each run, the oldest first

    def _read(self) -> None:
        self._clear()
        if self.path.exists():
            try:
                told = json.loads(self.path.read_bytes())
                self._number, self._answered = int(told["number"]), dict(told["answered"])
                self._studies = {name: Count(**count) for name, count in told["studies"].items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"{str(self.path)!r} is damaged, so it is not known how much this silo has answered: put back a "
                    "copy of it, or remove it, and counts.journal beside it, to count from nothing"
                ) from None
        lines = self.journal.read_bytes().splitlines(keepends=True) if self.journal.exists() else []
        for line in lines:
            if line.endswith(b"\n"):  # the last may have been cut off by a loss of power
                self._replay(line)
        self._lines = len(lines)
        if lines and not lines[-1].endswith(b"\n"):
            self._write()
        self._seen = self._stamp()

    def _replay(self, line: bytes) -> None:
        try:
            number, study, rounds, messages, points, run, request = json.loads(line)
            if number > self._number:  # others were in the file already
                self._take(number, study, rounds, messages, points, run, request)
        except (ValueError, TypeError):
            raise ValueError(
                f"{str(self.journal)!r} is damaged, so it is not known how much this silo has answered: remove it to "
                f"go on from the counts of {self.path.name}, which are at most {MOST_LINES} answers old"
            ) from None

    def _write(self) -> None:
        told = {
            "number": self._number,
            "studies": {name: count._asdict() for name, count in self._studies.items()},
            "answered": self._answered,
        }
        replace_file(self.path, json.dumps(told, indent=1).encode())
        self.journal.write_bytes(b"")
        self._lines = 0

    def _stamp(self) -> tuple[int, ...]:
        stamp: tuple[int, ...] = ()
        for path in (self.path, self.journal):
            try:
                found = os.stat(path)
                stamp += (found.st_ino, found.st_mtime_ns, found.st_size)
            except FileNotFoundError:
                stamp += (0, 0, 0)
        return stamp
