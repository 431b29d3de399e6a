"""A silo that computes nothing, behind the guards that a real one has."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from numpyro_fed.engines import wire
from numpyro_fed.remote import envelope
from numpyro_fed.remote.envelope import PREAMBLE, Envelope
from numpyro_fed.remote.policy import Policy, Purpose
from numpyro_fed.remote.site import Site

STUDY = envelope.digest(b"model = ...")
RUN = "00112233aabbccdd"
SOFTWARE = "numpyro_fed 0.2.0, jax 0.10.2, numpyro 0.22.0, float32"
NUMBERS = wire.encode({"gradient": np.arange(19, dtype=np.float32)})  # 102 bytes


class StandIn:
    """A worker that answers with the round it was asked, and what it was brought."""

    fields = ("['gradient']",)

    def __init__(self, name: str = "york", rows: int = 100, fails: Callable[[], None] = lambda: None) -> None:
        self.name, self.rows, self.fails, self.asked = name, rows, fails, 0

    def purpose(self, body: dict[str, Any]) -> Purpose:
        return Purpose(body["phase"], body["round"], body.get("points", 0))

    def answer(self, type: str, body: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        self.asked += 1
        self.fails()
        return {"round": body.get("round")}, payload


def site(folder: Path, worker: Any = None, policy: Policy | None = None, **settings: Any) -> Site:
    worker = StandIn() if worker is None else worker
    return Site(worker, STUDY, "asthma", folder / "york", policy, **{"software": SOFTWARE, **settings})


def request(type: str = "work", phase: str = "rounds", round: int = 1, **changed: Any) -> Envelope:
    body = {"phase": phase, "round": round} if type == "work" else {}
    whole = Envelope(type, RUN, round, "server", "york", STUDY, SOFTWARE, "", body, NUMBERS)
    return whole._replace(**changed)


def ask(site: Site, **asked: Any) -> Envelope:
    """The reply to a request, read."""
    return envelope.unpack(site.handle(envelope.pack(request(**asked))))


def raw(header: bytes | dict, payload: bytes = b"") -> bytes:
    """A message with any header, whose lengths and checksum are right."""
    if isinstance(header, dict):
        header = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    checksum = zlib.crc32(payload, zlib.crc32(header))
    return PREAMBLE.pack(envelope.MAGIC, len(header), len(payload), checksum) + header + payload


def header(message: Envelope, **changed: Any) -> dict[str, Any]:
    fields = message._asdict()
    del fields["payload"]
    return {**fields, **changed}
