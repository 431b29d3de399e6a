"""Silos that no network reaches: requests and replies as signed files, carried by hand.

The server's run is a sequence of short processes. Each runs the method from its beginning: requests are a function of
the study, the run's name, its key and the replies so far, so what was asked before is asked in the same bytes, and its
reply is read from the run's folder. At the first reply that is not there yet the process writes what it would ask, and
stops with :class:`Waiting`. The next begins with the replies that were brought in the meantime (:meth:`Files.absorb`).

A reply that says nothing but "done" is not waited for: it is presumed, its request goes with the next one, and silos
answer in the order of the files' names. Should one turn out to be an error, the run is told so at that very place.

In the folder of a run: ``asked/`` and ``replies/``, a file for each request, named by its SHA-256.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from numpyro_fed.checks import format_names
from numpyro_fed.files import replace_file
from numpyro_fed.remote import envelope
from numpyro_fed.remote.envelope import MOST_HEADER, MOST_PAYLOAD, SERVER, Envelope
from numpyro_fed.remote.errors import ToldError
from numpyro_fed.remote.transport import Failure

REQUEST, REPLY = ".request", ".reply"
MOST = MOST_HEADER + MOST_PAYLOAD + 1024  # bytes of a file
# Work whose reply is empty: states are made, nothing leaves.
SILENT = ("start", "begin_silo", "leave_silo", "shorten")

Sign = Callable[[bytes], bytes]  # a message, signed
Open = Callable[[bytes], bytes]  # the message in signed bytes, or an error


class Waiting(Exception):
    """A run that goes on when replies have been brought."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(f"waiting for replies of {format_names(names)}")
        self.names = names


class NotAReply(ToldError, ValueError):
    """A file that answers nothing that was asked."""


class Queued(NamedTuple):
    """A request that was not answered yet."""

    number: int  # of all requests of the run, in their order
    silo: str
    digest: str  # SHA-256 of the request
    data: bytes


class Files:
    """The server's end of files: a :class:`numpyro_fed.remote.transport.Transport`.

    Args:
        names: of the silos.
        folder: of the run, the server's own.
        out: where requests are written to.
        sign: signs with the server's key.
        open: believes silos' keys.
        lost: silos that are waited for no longer: what they have not answered is told as lost, for good.
    """

    def __init__(
        self, names: tuple[str, ...], folder: Path, out: Path, sign: Sign, open: Open, lost: tuple[str, ...] = ()
    ) -> None:
        self.names, self.folder, self.out, self.lost = tuple(names), Path(folder), Path(out), lost
        self._sign, self._open = sign, open
        self._queue: list[Queued] = []
        self._number = 0
        self.traffic: dict[str, tuple[int, int]] = dict.fromkeys(self.names, (0, 0))  # bytes of files, up and down
        for part in ("asked", "replies"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)

    # --- the run asks -------------------------------------------------------------------------------------------------

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Replies from the run's folder; where one is missing, write requests and stop.

        Raises:
            Waiting: names whose replies are needed before the run can go on.
        """
        found: dict[str, bytes | Failure] = {}
        missing = []
        for name, data in requests.items():
            reply = self._reply(name, data)
            if reply is None:
                missing.append(name)
            else:
                found[name] = reply
        if missing:
            self.close()
            raise Waiting(tuple(missing))
        return found

    def _reply(self, name: str, data: bytes) -> bytes | Failure | None:
        """What is known of the answer; None: nothing."""
        digest, number = envelope.digest(data), self._number
        self._number += 1
        path = self.folder / "replies" / digest
        if path.exists():
            reply = path.read_bytes()
            up, down = self.traffic[name]
            self.traffic[name] = up + len(reply), down + len(data)
            return reply or Failure("lost", "its replies are waited for no longer")
        if name in self.lost:
            self._note(digest, name, number)
            replace_file(path, b"")  # it stays so when the run is read again
            return Failure("lost", "its replies are waited for no longer")
        self._queue.append(Queued(number, name, digest, data))
        asked = envelope.unpack(data)
        return presumed(asked, digest) if says_nothing(asked) else None

    def close(self) -> None:
        """Write the requests that have not been answered."""
        self.out.mkdir(parents=True, exist_ok=True)
        for number, silo, digest, data in self._queue:
            self._note(digest, silo, number)
            replace_file(self.out / f"{number:05d}-{silo}-{digest[:8]}{REQUEST}", self._sign(data))
        self.written = len(self._queue)
        self._queue = []

    def _note(self, digest: str, silo: str, number: int) -> None:
        replace_file(self.folder / "asked" / digest, json.dumps({"silo": silo, "number": number}).encode())

    # --- replies are brought ------------------------------------------------------------------------------------------

    def absorb(self, path: Path) -> str:
        """Take a reply; a file that was taken before is no error.

        Returns:
            the silo's name.

        Raises:
            ValueError: why the file is not believed, or answers nothing.
        """
        data = self._open(read_limited(path))
        reply = envelope.unpack(data)
        if not reply.answers:
            raise NotAReply("this is a request, not a reply: bring what numpyro-fed silo-step has written")
        asked = self.folder / "asked" / reply.answers
        if not asked.exists():
            raise NotAReply("it answers nothing that was asked in this run: it is of another run, or of another study")
        silo = json.loads(asked.read_bytes())["silo"]
        if reply.sender != silo:
            raise NotAReply(f"it is of {reply.sender!r}, and answers a request to {silo!r}")
        kept = self.folder / "replies" / reply.answers
        before = kept.read_bytes() if kept.exists() else data
        if not before:
            raise NotAReply(f"{silo} is waited for no longer: numpyro-fed round --again {silo!r} asks it again")
        if before != data:
            raise NotAReply(f"{silo} has answered this request before, and otherwise: do not believe both")
        replace_file(kept, data)
        return silo

    def forget_errors(self, silo: str) -> int:
        """Ask a silo again what it answered with an error, or was lost at. Returns how many requests these are."""
        number = 0
        for kept in (self.folder / "replies").iterdir():
            asked = self.folder / "asked" / kept.name
            if not asked.exists() or json.loads(asked.read_bytes())["silo"] != silo:
                continue
            data = kept.read_bytes()
            if not data or envelope.unpack(data).type == "error":
                kept.unlink()
                number += 1
        return number


def says_nothing(asked: Envelope) -> bool:
    """Whether the reply, if it is no error, is empty whatever the data are."""
    return asked.type in ("agree", "end") or (asked.type == "work" and asked.body.get("do") in SILENT)


def presumed(asked: Envelope, digest: str) -> bytes:
    """That reply."""
    reply = asked._replace(sender=asked.recipient, recipient=SERVER, answers=digest, body={}, payload=b"")
    return envelope.pack(reply)


def answer(handle: Callable[[bytes], bytes], request: Path, reply: Path, sign: Sign, open: Open) -> Envelope:
    """In the silo: the reply to one file, written to another.

    Args:
        handle: :meth:`numpyro_fed.remote.site.Site.handle`.
        request: a file of the server's.
        reply: where to write.
        sign: signs with the silo's key.
        open: believes the server's key.

    Returns:
        what was written.

    Raises:
        ValueError: the request is not believed; nothing was done.
    """
    answered = handle(open(read_limited(request)))
    reply.parent.mkdir(parents=True, exist_ok=True)
    replace_file(reply, sign(answered))
    return envelope.unpack(answered)


def waiting_for(folder: Path, silo: str) -> list[Path]:
    """Requests to a silo in a folder, in the order in which they are to be answered."""
    return sorted(path for path in folder.glob(f"*{REQUEST}") if silo_of(path) == silo)


def silo_of(path: Path) -> str:
    """Whose request it is, by its name: of 00012-york-0a1b2c3d.request, york."""
    return path.name.removesuffix(REQUEST).partition("-")[2].rpartition("-")[0]


def read_limited(path: Path) -> bytes:
    """A file's bytes, if it is no longer than a message can be."""
    size = path.stat().st_size
    if size > MOST:
        raise NotAReply(f"it has {size} bytes, and a message at most {MOST}")
    return path.read_bytes()


def signer(private: Path) -> Sign:
    """Signs with the private key in a file."""
    from numpyro_fed.remote import signing

    key = signing.private_key(private)
    return lambda data: signing.signed(data, key)


def believer(public_keys: Mapping[str, str]) -> Open:
    """Believes these names and public keys, written "ed25519:..."."""
    from numpyro_fed.remote import signing

    known: dict[str, Any] = dict(public_keys)
    for key in known.values():
        signing.public_key(key)
    return lambda data: signing.opened(data, known)
