"""What left a silo, line by line; and what must not leave it.

In the silo's folder:

==================  ==================================================================================================
``audit.jsonl``     a line for each answer that left: when, of which run, for what, digests, sizes, names of its fields
``copies/``         on request, the answers themselves, byte for byte, under their digests
``site.log``        the silo's own log: errors in full, refusals and their reasons. It may hold data, and is kept small
==================  ==================================================================================================

Files can be moved away at any time; they are made anew. All are readable by their owner only.
"""

import json
import os
import time
import traceback
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from numpyro_fed.engines import wire
from numpyro_fed.remote import envelope
from numpyro_fed.remote.envelope import Envelope
from numpyro_fed.remote.policy import Purpose

MOST_FIELDS = 100  # of a payload, named in a line
MOST_LOG = 5 << 20  # bytes of site.log, before it becomes site.log.1
MOST_TEXT = 20_000  # characters of one entry of the log


class Audit:
    """The audit log of one folder.

    Args:
        folder: the silo's own.
        names: tells names of leaves, as :func:`numpyro_fed.engines.wire.fields` gives them. A payload carries no names
            but their checksums, so that of a name that is not told the checksum is written.
        copies: whether what leaves is kept.
    """

    def __init__(self, folder: Path, names: Callable[[], Iterable[str]] = tuple, copies: bool = False) -> None:
        self.path, self.copies = folder / "audit.jsonl", folder / "copies"
        self.keeps_copies, self._names = copies, names
        self._known: dict[int, str] = {}  # name by checksum

    def note(self, reply: Envelope, data: bytes, purpose: Purpose | None, again: bool) -> None:
        """Write that ``data``, which are ``reply`` packed, are about to leave.

        Raises:
            OSError: when it cannot be written: then they must not leave.
        """
        packed = envelope.digest(data)
        line = {
            "time": _now(),
            "run": reply.run,
            "type": reply.type,
            "phase": purpose.phase if purpose else None,
            "round": purpose.round if purpose else None,
            "points": purpose.points if purpose else None,
            "again": again,
            "answers": reply.answers,
            "body": sorted(reply.body),
            "fields": self._fields(reply.payload),
            "payload_bytes": len(reply.payload),
            "payload_sha256": envelope.digest(reply.payload),
            "bytes": len(data),
            "sha256": packed,
        }
        if reply.type == "error":
            line["kind"] = reply.body["kind"]
        if self.keeps_copies:
            self.copies.mkdir(mode=0o700, exist_ok=True)
            append(self.copies / f"{packed}.nfe", data, os.O_TRUNC)
        append(self.path, json.dumps(line).encode() + b"\n")

    def _fields(self, payload: bytes) -> list[str]:
        """Names, types and shapes of a payload's leaves, read off the payload."""
        if not payload:
            return []
        try:
            count, leaves = wire.told(payload, MOST_FIELDS)
        except ValueError:
            return ["not of the wire codec"]
        if any(leaf.checksum not in self._known for leaf in leaves):
            # A path that is not a key begins with a dot, which a field's name leaves out; an only leaf has no path.
            for name in self._names():
                for path in (name, f".{name}", *([""] if name == "value" else [])):
                    self._known[zlib.crc32(path.encode())] = name
        found = [
            f"{self._known.get(leaf.checksum, f'#{leaf.checksum:08x}')} {leaf.dtype}{list(leaf.shape)}"
            for leaf in leaves
        ]
        return found if count <= len(found) else [*found, f"and {count - len(found)} more"]


class Log:
    """The silo's own log, which nobody else reads: two files of at most 5 MiB each."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "site.log"

    def note(self, what: str, error: BaseException | None = None) -> None:
        """Write an entry; of an error its text and where it was raised.

        It never raises: what cannot be logged is not a reason to say more to the server, nor less.
        """
        try:
            text = what if error is None else what + "\n" + "".join(traceback.format_exception(error))
            if len(text) > MOST_TEXT:
                text = text[: MOST_TEXT // 2] + "\n...\n" + text[-MOST_TEXT // 2 :]
            if self.path.exists() and self.path.stat().st_size > MOST_LOG:
                os.replace(self.path, self.path.with_name("site.log.1"))
            append(self.path, f"{_now()} {text.rstrip()}\n".encode(errors="backslashreplace"))
        except Exception:
            return


def append(path: Path, data: bytes, how: int = os.O_APPEND) -> None:
    """Write to the end of a file that is its owner's only; all of it, or an OSError."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file, rest) :]
    finally:
        os.close(file)


def _now() -> str:
    """The time, in UTC, to the millisecond.

    >>> len(_now()), _now()[-1]
    (24, 'Z')
    """
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now * 1000) % 1000:03d}Z"


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of an audit log, for those who look at it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     reply = Envelope("hello", envelope.NO_RUN, 0, "york", "server", 64 * "0", "0.1.0", "", {"rows": 12}, b"")
    ...     Audit(Path(folder)).note(reply, envelope.pack(reply), None, again=False)
    ...     [line["body"] for line in lines(Path(folder) / "audit.jsonl")]
    [['rows']]
    """
    return [json.loads(line) for line in path.read_text().splitlines()]
