"""One message of the protocol: who asks or answers whom, in which run of which study, and the numbers that cross.

=================  ==========================================================================================
bytes              what
=================  ==========================================================================================
4                  the letters ``NFE1``
4                  length of the header, at most 1 MiB
8                  length of the payload
4                  CRC-32 of all that follows: of accidents; signatures and transports guard against adversaries
the header         JSON in ASCII, keys sorted, without spaces: the fields of :class:`Envelope`
the payload        bytes of the wire codec (:mod:`numpyro_fed.engines.wire`), or none
=================  ==========================================================================================

Integers are little-endian. Nothing is parsed or copied before the lengths have been compared with the limits and with
the bytes at hand. There is one way to write an envelope, and no other is read:

Law: ``unpack(pack(envelope)) == envelope``, and where ``unpack(data)`` is read, ``pack(unpack(data)) == data``.

    >>> request = Envelope(
    ...     type="work", run="00112233aabbccdd", sequence=3, sender="server", recipient="york", study=64 * "0",
    ...     software="numpyro_fed 0.2.0", answers="", body={"round": 3}, payload=b"numbers",
    ... )
    >>> data = pack(request)
    >>> unpack(data) == request
    True
    >>> unpack(data[:-1])
    Traceback (most recent call last):
    ...
    numpyro_fed.remote.errors.Malformed: the message is truncated: got 254 bytes, expected 255
"""

import hashlib
import json
import re
import struct
import zlib
from typing import Any, NamedTuple

import jax

from numpyro_fed.remote.errors import Malformed
from numpyro_fed.run.identity import versions

MAGIC = b"NFE1"
PREAMBLE = struct.Struct("<4sIQI")  # magic, lengths of header and payload, checksum of both
MOST_HEADER = 1 << 20
MOST_PAYLOAD = 1 << 28  # 256 MiB: the parameters of a network of 60 million weights
MOST_BRACKETS = 1 << 16  # in a header: each may be a list, of 56 bytes at least, for the one byte that it takes there
MOST_NAME = 200  # characters of a name, or of versions
SERVER = "server"  # what the server is called; silos have names of their own
NO_RUN = 16 * "0"  # of a reply to bytes that tell no run

_KIND = re.compile(r"[a-z][a-z_]{0,31}")
_RUN = re.compile(r"[0-9a-f]{16}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ENCODE = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


class Envelope(NamedTuple):
    """A request or a reply."""

    type: str  # "hello", "open", "agree", "work", "end", ...; of a reply the same, or "error"
    run: str  # 16 hexadecimal digits: of one run, all its processes and restarts
    sequence: int  # informative
    sender: str  # "server" or the silo's name
    recipient: str  # likewise
    study: str  # SHA-256 of the study file, in hexadecimal digits
    software: str  # of the sender, see software()
    answers: str  # of a reply: SHA-256 of the whole request; "" of a request
    body: dict[str, Any]  # JSON values
    payload: bytes


def pack(envelope: Envelope) -> bytes:
    """An envelope as bytes; the same envelope gives the same bytes.

    Raises:
        ValueError: when the body holds what JSON cannot (arrays, NaN, numbers of NumPy), or is too long.
    """
    *fields, payload = envelope
    try:
        header = _ENCODE(dict(zip(_FIELDS, fields, strict=True))).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the body of a {envelope.type!r} message cannot be written as JSON: {error}") from None
    if len(header) > MOST_HEADER:
        raise ValueError(
            f"the header of a {envelope.type!r} message has {len(header)} bytes, expected at most {MOST_HEADER}: "
            "send arrays in its payload"
        )
    checksum = zlib.crc32(payload, zlib.crc32(header))
    return PREAMBLE.pack(MAGIC, len(header), len(payload), checksum) + header + payload


def unpack(data: bytes | memoryview, most_payload: int = MOST_PAYLOAD) -> Envelope:
    """Read the bytes of :func:`pack`, whoever wrote them.

    Raises:
        Malformed: a ValueError whose text says what was got and what was expected. The text is short, and made of the
            bytes' lengths and the names of fields alone.
    """
    expected = total(data, most_payload)
    if len(data) != expected:
        which = "truncated" if len(data) < expected else "overlong"
        raise Malformed(f"the message is {which}: got {len(data)} bytes, expected {expected}")
    _, length, _, checksum = PREAMBLE.unpack_from(data)
    if zlib.crc32(memoryview(data)[PREAMBLE.size :]) != checksum:
        raise Malformed("the message is damaged: it has another checksum than it says")
    header = bytes(data[PREAMBLE.size : PREAMBLE.size + length])
    fields = _parsed(header)
    if fields.keys() != set(_FIELDS):
        raise Malformed("the header has other fields than the protocol's: use the same numpyro_fed at both ends")
    for name, check in _CHECKS.items():
        if not check(fields[name]):
            raise Malformed(f"the header's field {name!r} is not of its form")
    return Envelope(**fields, payload=bytes(data[PREAMBLE.size + length :]))


def total(preamble: bytes | memoryview, most_payload: int = MOST_PAYLOAD) -> int:
    """How long a message is, by its first 20 bytes: what a transport asks before it makes room for the rest.

    Raises:
        Malformed: when these are no message's, or of a longer one than is allowed.
    """
    if len(preamble) < PREAMBLE.size:
        raise Malformed(f"the message is truncated: got {len(preamble)} bytes, expected at least {PREAMBLE.size}")
    magic, header, payload, _ = PREAMBLE.unpack_from(preamble)
    if magic != MAGIC:
        raise Malformed("these bytes are no message of numpyro_fed: they do not begin with NFE1")
    if header > MOST_HEADER:
        raise Malformed(f"the header is too long: it says {header} bytes, expected at most {MOST_HEADER}")
    if payload > most_payload:
        raise Malformed(f"the payload is too long: it says {payload} bytes, expected at most {most_payload}")
    return PREAMBLE.size + header + payload


def digest(data: bytes | memoryview) -> str:
    """SHA-256, in hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def content(envelope: Envelope) -> str:
    """A digest of what a message asks for: its run, type, body and payload, whatever the rest of its header."""
    made = hashlib.sha256(_ENCODE([envelope.run, envelope.type, envelope.body]).encode("ascii"))
    made.update(b"\n")
    made.update(envelope.payload)
    return made.hexdigest()


def software() -> str:
    """What both ends must have in common for their numbers to agree.

    >>> software()
    'numpyro_fed ..., jax ..., numpyro ..., float32'
    """
    found = versions()
    parts = [f"{name} {found[name]}" for name in ("numpyro_fed", "jax", "numpyro")]
    return ", ".join([*parts, jax.dtypes.canonicalize_dtype("float64").name])


def _parsed(header: bytes) -> dict[str, Any]:
    """The header's fields, if these bytes are just what :func:`pack` would have written."""
    if header.count(b"[") + header.count(b"{") > MOST_BRACKETS:
        raise Malformed(f"the header has more than {MOST_BRACKETS} brackets")
    try:
        fields = json.loads(header.decode("ascii"))
        again = _ENCODE(fields).encode("ascii")
    except (ValueError, RecursionError):
        raise Malformed("the header is no JSON of the protocol") from None
    if not isinstance(fields, dict):
        raise Malformed("the header is no JSON object")
    if again != header:  # keys twice, in another order, spaces, other ways to write a number
        raise Malformed("the header is not written the protocol's way")
    return fields


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_NAME and value.isprintable()


def _matches(pattern: re.Pattern[str]) -> Any:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


_FIELDS = Envelope._fields[:-1]
_CHECKS = {
    "type": _matches(_KIND),
    "run": _matches(_RUN),
    "sequence": lambda value: type(value) is int and 0 <= value < 1 << 63,
    "sender": _is_name,
    "recipient": _is_name,
    "study": _matches(_DIGEST),
    "software": _is_name,
    "answers": lambda value: value == "" or _matches(_DIGEST)(value),
    "body": lambda value: isinstance(value, dict),
}
