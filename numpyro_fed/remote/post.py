"""The server's end: asks silos through a transport, and takes no answer that is not one.

A reply is read only if it comes from the silo that was asked, in this run, of this study, and answers this very
request, by its SHA-256: a reply that is kept and sent again, to another question or from another silo, is none.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from numpyro_fed.remote import envelope
from numpyro_fed.remote.envelope import MOST_PAYLOAD, SERVER, Envelope
from numpyro_fed.remote.errors import MISMATCHES, Malformed, PolicyRefused
from numpyro_fed.remote.transport import Failure, Transport

MOST_TOLD = 400  # characters of what a silo says of a failure

Request = tuple[str, dict[str, Any], bytes]  # type, body, payload
Answer = tuple[dict[str, Any], bytes]  # body, payload


class Traffic(NamedTuple):
    """Bytes of messages, their envelopes included, between the server and one silo."""

    up: int = 0  # from the silo
    down: int = 0  # to it


class Post:
    """What a server asks, and hears.

    Args:
        transport: takes the bytes.
        study: SHA-256 of the server's study file, in hexadecimal digits.
        run: 16 hexadecimal digits, the same in all processes of a run.
        software: versions and precision; by default those of this process.
        most_payload: bytes that a reply may bring.

    A request depends on nothing but its type, body and payload, the run and the study: a server that was restarted
    asks in the same bytes, and a reply that came in the meantime still answers.
    """

    def __init__(
        self,
        transport: Transport,
        study: str,
        run: str,
        *,
        software: str | None = None,
        most_payload: int = MOST_PAYLOAD,
    ) -> None:
        self.transport, self.study, self.run = transport, study, run
        self.software = envelope.software() if software is None else software
        self.most_payload = most_payload
        self.traffic: dict[str, Traffic] = {}

    def ask(self, requests: Mapping[str, Request], timeout: float, sequence: int = 0) -> dict[str, Answer | Failure]:
        """The silos' answers, by name, in the order of the requests; or why there is none.

        Args:
            requests: of each silo the type, the body and the payload of what it is asked.
            timeout: seconds for all of them together.
            sequence: a number for the reader of a message, the round's.
        """
        sent = {name: self._packed(name, *request, sequence) for name, request in requests.items()}
        replies = self.transport.ask(sent, timeout)
        return {name: self._heard(name, requests[name][0], sent[name], replies.get(name)) for name in sent}

    def _packed(self, name: str, type: str, body: dict[str, Any], payload: bytes, sequence: int) -> bytes:
        return envelope.pack(
            Envelope(type, self.run, sequence, SERVER, name, self.study, self.software, "", body, payload)
        )

    def _heard(self, name: str, type: str, request: bytes, reply: bytes | Failure | None) -> Answer | Failure:
        before = self.traffic.get(name, Traffic())
        heard = len(reply) if isinstance(reply, bytes) else 0
        self.traffic[name] = Traffic(before.up + heard, before.down + len(request))
        if reply is None:
            return Failure("lost", "the transport brought nothing of it")
        if not isinstance(reply, bytes):
            return reply
        try:
            found = envelope.unpack(reply, self.most_payload)
        except Malformed as error:
            return Failure("malformed", f"its reply cannot be read: {error.told}")
        wrong = self._wrong(name, type, request, found)
        if wrong:
            return Failure("malformed", wrong)
        return _failure(found.body) if found.type == "error" else (found.body, found.payload)

    def _wrong(self, name: str, type: str, request: bytes, reply: Envelope) -> str:
        """Why this is no reply to that request, or ""."""
        if reply.sender != name:
            return f"this reply is of {reply.sender!r}"
        if reply.recipient != SERVER or not reply.answers:
            return "this is a request, not a reply"
        if reply.answers != envelope.digest(request):
            if reply.run not in (self.run, envelope.NO_RUN):
                return f"its reply belongs to the run {reply.run}, and this is {self.run}"
            return "its reply answers another request: it was sent before, or the request was changed on the way"
        if reply.type == "error":  # maybe just that the studies differ
            return ""
        if reply.run != self.run:
            return f"its reply belongs to the run {reply.run}, and this is {self.run}"
        if reply.study != self.study:
            return f"its reply is of the study {reply.study[:12]}..., and this is {self.study[:12]}..."
        if reply.software != self.software:
            return f"its reply was made with {reply.software}, and this is {self.software}"
        if reply.type != type:
            return f"its reply is of type {reply.type!r}, and it was asked {type!r}"
        return ""


def _failure(body: dict[str, Any]) -> Failure:
    """What a silo tells of its failure, cut to what a log may hold: a silo could say anything.

    >>> _failure({"kind": "PolicyRefused", "why": "its policy allows no check"})
    Failure(kind='refused', told='its policy allows no check')
    >>> _failure({"kind": "FloatingPointError", "why": ""})
    Failure(kind='error', told='FloatingPointError')
    """
    kind, why = (_printable(body.get(field)) for field in ("kind", "why"))
    if kind == PolicyRefused.__name__:
        return Failure("refused", why)
    if kind in MISMATCHES:
        return Failure("mismatch", why)
    return Failure("error", f"{kind}: {why}" if why else kind or "it does not say why")


def _printable(text: Any) -> str:
    shown = text[:MOST_TOLD] if isinstance(text, str) else ""
    return "".join(one if one.isprintable() else "?" for one in shown)
