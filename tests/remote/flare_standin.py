"""Stand-ins without inference: what FLARE does with bytes, jobs and processes is tested apart from what is in them."""

import hashlib
import json
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from nvflare.collab import collab

from numpyro_fed.files import replace_file
from numpyro_fed.remote.flare import CHECKPOINT, FIT, FlareServer, FlareSilo, FlareTransport
from numpyro_fed.remote.flare_jobs import Job
from numpyro_fed.remote.flare_kits import CLASSES

STAND_INS = (*CLASSES, "flare_standin.Server", "flare_standin.Silo")
ROUNDS = 40


class Site:
    """Chains what it is asked: a reply depends on all requests of the run, so that one lost or done twice would show.

    Its state lies on disk, as a silo's does: a request that is asked again gets the same reply.
    """

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        data = path.with_name("data.csv").read_text()
        if "broken" in data:
            raise ValueError(f"could not convert {data!r} to float")

    def handle(self, request: bytes) -> bytes:
        path = self.folder / f"{request.split()[0].decode()}.json"
        before = json.loads(path.read_text()) if path.exists() else ["", ""]
        after = chained(before, request)
        if after != before:
            replace_file(path, json.dumps(after).encode())
        return reply(after, request)


def chained(state: list[str], request: bytes) -> list[str]:
    """The request last asked, and the digest of all."""
    asked = hashlib.sha256(request).hexdigest()
    return state if asked == state[0] else [asked, hashlib.sha256((state[1] + asked).encode()).hexdigest()]


def reply(state: list[str], request: bytes) -> bytes:
    return (state[1].encode() * (1 + len(request) // 64))[: max(64, len(request))]


def request(run: str, name: str, state: dict, size: int) -> bytes:
    return (f"{run} {name} {state['round']} {state['chain']} ".encode() * size)[:size]


def undisturbed(run: str, silos: tuple[str, ...], size: int = 128) -> str:
    """How the run ends when nothing happens on the way."""
    sites, state = {name: ["", ""] for name in silos}, {"round": 0, "chain": ""}
    while state["round"] < ROUNDS:
        asked = {name: request(run, name, state, size) for name in silos}
        sites = {name: chained(sites[name], asked[name]) for name in silos}
        told = b"".join(reply(sites[name], asked[name]) for name in silos)
        state = {"round": state["round"] + 1, "chain": hashlib.sha256(told).hexdigest()}
    return state["chain"]


class Silo(FlareSilo):
    def open(self, path: Path) -> Site:
        path.with_name("pid").write_text(str(os.getpid()))
        return Site(path)

    @collab.publish
    def gossip(self, other: str) -> str:
        """A silo that turns on another: what does it get?"""
        return repr(collab.get_clients([other])[0].ask(b"tell me"))


class Server(FlareServer):
    """Rounds in which each reply goes into the next request; ``num_rounds`` is the number of bytes."""

    def infer(self, folder: Path, transport: FlareTransport) -> None:
        path, silos, size = folder / CHECKPOINT.format(""), list(self.silos), self.num_rounds or 128
        state = json.loads(path.read_text()) if path.exists() else {"round": 0, "chain": "", "seconds": []}
        state |= dict(began=time.time(), gossip="")
        if self.method == "gossip":
            state["gossip"] = collab.get_clients([silos[0]])[0].gossip(silos[1])
        while state["round"] < ROUNDS:
            begun, used = time.perf_counter(), sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            replies = transport.ask({name: request(self.run, name, state, size) for name in silos}, self.timeout)
            state["seconds"].append(time.perf_counter() - begun)
            state["cpu"] = sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - used
            failed = {name: reply for name, reply in replies.items() if not isinstance(reply, bytes)}
            if failed:
                raise RuntimeError(", ".join(f"{name}: {reply.kind}, {reply.told}" for name, reply in failed.items()))
            state["chain"] = hashlib.sha256(b"".join(replies[name] for name in silos)).hexdigest()
            state["round"] += 1
            replace_file(path, json.dumps(state).encode())
        (folder / FIT).write_text(json.dumps(state))


class Unlisted(Silo):
    """No silo allows it."""


@dataclass(frozen=True)
class StandIn(Job):
    def server(self) -> Server:
        return Server(**{**self.__dict__, "silos": list(self.silos)})

    def silo(self) -> Silo:
        return Silo()


@dataclass(frozen=True)
class NotAllowed(StandIn):
    def silo(self) -> Unlisted:
        return Unlisted()
