"""The silo's end: bytes in, bytes out. Nothing is done before it was checked, nothing leaves before it was noted.

    request -> form and size -> recipient, study, software -> policy -> the worker -> counts, audit log -> reply

A worker computes (:mod:`numpyro_fed.remote.worker`); what it may be asked is decided here, by the silo's own copy of
the study and its owner's policy. Whatever happens, the reply is a message of the protocol. Of an error the name of its
class leaves; its text and where it was raised may hold data, and are written to the silo's own log.
"""

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

from numpyro_fed.remote import envelope
from numpyro_fed.remote.audit import Audit, Log
from numpyro_fed.remote.counts import Counts
from numpyro_fed.remote.envelope import MOST_PAYLOAD, NO_RUN, SERVER, Envelope
from numpyro_fed.remote.errors import (
    Malformed,
    NotForThisSilo,
    NotWritten,
    OtherSoftware,
    PolicyRefused,
    ToldError,
    WrongStudy,
)
from numpyro_fed.remote.policy import Policy
from numpyro_fed.remote.policy import Purpose as Purpose

# Requests before the first and after the last that asks for work; all others have a purpose.
HANDSHAKE = ("hello", "open", "agree", "end")
MOST_KIND, MOST_TOLD = 60, 700  # characters of the name of an error, of its text: a server may be quoted in it
_NAME = re.compile(r"[A-Za-z][A-Za-z_]*")
# What may be said of errors that are nobody's data.
PLAIN = {
    MemoryError: "it ran out of memory",
    NotImplementedError: "it cannot do this",
    OSError: "it cannot use its files",
}


class Worker(Protocol):
    """What a silo computes. It may have ``fields``: names of leaves of its messages, for the audit log."""

    @property
    def name(self) -> str: ...

    @property
    def rows(self) -> int:
        """Of the silo's data: the largest of its own axes."""
        ...

    def purpose(self, body: dict[str, Any]) -> Purpose:
        """What a request for work is for, worked out in the silo, not believed."""
        ...

    def answer(self, type: str, body: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        """The body and the payload of the reply; the same for the same request. It may raise anything."""
        ...


class Site:
    """A silo, as those see it who bring it bytes.

    Args:
        worker: what computes.
        study: SHA-256 of the silo's copy of the study file, in hexadecimal digits.
        study_name: the name by which the policy knows the study.
        folder: the silo's own; made where there is none, readable by its owner only.
        policy: what the owner allows.
        software: versions and precision; by default those of this process.
        most_payload: bytes that a request may bring.
    """

    def __init__(
        self,
        worker: Worker,
        study: str,
        study_name: str,
        folder: Path,
        policy: Policy | None = None,
        *,
        software: str | None = None,
        most_payload: int = MOST_PAYLOAD,
    ) -> None:
        self.worker, self.study, self.study_name = worker, study, study_name
        self.policy = Policy() if policy is None else policy
        self.software = envelope.software() if software is None else software
        self.most_payload = most_payload
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fields: Callable[[], Collection[str]] = lambda: getattr(worker, "fields", ())
        self.audit = Audit(self.folder, fields, self.policy.copies)
        self.log = Log(self.folder)
        self.counts = Counts(self.folder)
        with self.counts.held():  # a damaged file is told to the owner, before anything is asked
            pass

    def handle(self, request: bytes) -> bytes:
        """The reply to a request, whatever it is.

        The owner's interruption alone (Ctrl-C, or the end of the process) is raised again, without a text or a trace of
        where it came: nothing leaves then, and nothing is counted.
        """
        answers = envelope.digest(request)
        run, sequence = NO_RUN, 0
        try:
            asked = envelope.unpack(request, self.most_payload)
            run, sequence = asked.run, asked.sequence
            self._check(asked)
            return self._answered(asked, answers)
        except (KeyboardInterrupt, SystemExit) as error:
            self.log.note(f"run {run}: interrupted", error)
            interruption = KeyboardInterrupt() if isinstance(error, KeyboardInterrupt) else SystemExit(1)
        except BaseException as error:
            self._note(f"run {run}: refused", error)
            return envelope.pack(self._error(error, run, sequence, answers))
        raise interruption

    def _check(self, asked: Envelope) -> None:
        """Whether the two ends fit; what is told here holds no data."""
        name = self.worker.name
        if asked.answers or asked.sender != SERVER:
            raise NotForThisSilo(f"this is no request of the server: it is {asked.sender!r} that sends it")
        if asked.recipient != name:
            raise NotForThisSilo(f"this is for the silo {asked.recipient!r}, and was brought to {name!r}")
        if asked.body.get("run", asked.run) != asked.run:  # the log would tell another run than was worked on
            raise Malformed(f"the message is of the run {asked.run}, and asks for another")
        if asked.study != self.study:
            raise WrongStudy(
                f"the study files differ: the server's has the SHA-256 {asked.study[:12]}..., that of {name!r} "
                f"{self.study[:12]}...: give both the same file"
            )
        if asked.software != self.software:
            raise OtherSoftware(
                f"other software: the server has {_difference(asked.software, self.software)}, {name!r} has "
                f"{_difference(self.software, asked.software)}: install the same at both ends"
            )

    def _answered(self, asked: Envelope, answers: str) -> bytes:
        """The worker's reply, if the policy allows it, counted and noted."""
        self.policy.admit(self.study_name, self.worker.rows)
        request = envelope.content(asked)
        with self.counts.held():
            again = self.counts.knows(asked.run, request)
            before = self.counts.of(self.study_name)
            spent = before if again else self.policy.spend(before, None)
            purpose = None
            try:
                if asked.type == "open":
                    self.policy.open(asked.body.get("method"))
                if asked.type not in HANDSHAKE:
                    purpose = _checked(self.worker.purpose(asked.body))
                    self.policy.allow(purpose, self.worker.rows)
                    spent = before if again else self.policy.spend(before, purpose)
                body, payload = self.worker.answer(asked.type, asked.body, asked.payload)
                reply = self._envelope(asked.type, asked.run, asked.sequence, answers, body, payload)
                data = envelope.pack(reply)
            except (PolicyRefused, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                # That it failed, and how, is an answer that may depend on the data: it counts, every time.
                self._note(f"run {asked.run}, {asked.type}, {purpose}: failed", error)
                spent, request = self.policy.spend(before, purpose), ""
                reply = self._error(error, asked.run, asked.sequence, answers)
                data = envelope.pack(reply)
            try:
                self.counts.note(self.study_name, spent, asked.run, request)
                self.audit.note(reply, data, purpose, again)
            except OSError as error:
                raise NotWritten("its audit log cannot be written, so that nothing leaves it", str(error)) from error
            return data

    def _envelope(
        self, type: str, run: str, sequence: int, answers: str, body: dict[str, Any], payload: bytes = b""
    ) -> Envelope:
        if not isinstance(body, dict) or not isinstance(payload, bytes):
            got = f"{type!r} with {body.__class__.__name__} and {payload.__class__.__name__}"
            raise TypeError(f"a worker answers with a dict and bytes, got {got}")
        name = self.worker.name
        return Envelope(type, run, sequence, name, SERVER, self.study, self.software, answers, body, payload)

    def _error(self, error: BaseException, run: str, sequence: int, answers: str) -> Envelope:
        """What may leave of an error: its kind, and a text where the text is nobody's data."""
        told = error.told[:MOST_TOLD] if isinstance(error, ToldError) else ""
        plain = (text for kind, text in PLAIN.items() if isinstance(error, kind))
        body = {"kind": _kind(error), "why": told or next(plain, "")}
        return self._envelope("error", run, sequence, answers, body)

    def _note(self, what: str, error: BaseException) -> None:
        """In the silo's own log: all of it; of what is refused as a matter of course the text alone."""
        if isinstance(error, ToldError):
            self.log.note(f"{what}: {_kind(error)}: {error.told}. {error.stays}")
        else:
            self.log.note(what, error)


def _checked(purpose: Purpose) -> Purpose:
    """A purpose is made from what a server sent: what would be counted must be numbers."""
    phase, round, points = purpose
    if not (isinstance(phase, str) and type(round) is int and type(points) is int and points >= 0):
        raise TypeError(f"a purpose has a phase, a round and a number of points, got {purpose}")
    return purpose


def _kind(error: BaseException) -> str:
    """The name of an error's class; of a class that was named at run time, maybe by data, its parent's."""
    for kind in type(error).__mro__:
        if len(kind.__name__) <= MOST_KIND and _NAME.fullmatch(kind.__name__):
            return kind.__name__
    return Exception.__name__


def _difference(one: str, other: str) -> str:
    """The parts of ``one`` that ``other`` has not.

    >>> _difference("numpyro_fed 0.2.0, jax 0.10.2, float32", "numpyro_fed 0.2.0, jax 0.10.3, float32")
    'jax 0.10.2'
    """
    return ", ".join(sorted(set(one.split(", ")) - set(other.split(", ")))) or "nothing else"
