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
from numpyro_fed.remote.flare_jobs import CLASSES, Job

STAND_INS = (*CLASSES, "flare_standin.Server", "flare_standin.Silo")
ROUNDS = 40


class Site:
    """Chains what it is asked: a reply depends on all requests before, so that one lost or done twice would show.

    Its state lies on disk, as a silo's does: a request that is asked again gets the same reply.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.with_name("state.json")
        self.secret = path.with_name("data.csv").read_text()
        if "broken" in self.secret:
            raise ValueError(f"could not convert {self.secret!r} to float")

    def handle(self, request: bytes) -> bytes:
        state = json.loads(self.path.read_text()) if self.path.exists() else {"last": "", "chain": ""}
        asked = hashlib.sha256(request).hexdigest()
        if asked != state["last"]:
            chain = hashlib.sha256((state["chain"] + asked).encode()).hexdigest()
            state = {"last": asked, "chain": chain}
            replace_file(self.path, json.dumps(state).encode())
        if request.startswith(b"slow"):
            time.sleep(2.0)
        return (state["chain"].encode() * (1 + len(request) // 64))[: max(64, len(request))]


class Silo(FlareSilo):
    def open(self, path: Path) -> Site:
        path.with_name("pid").write_text(str(os.getpid()))
        return Site(path)

    @collab.publish
    def gossip(self, other: str) -> str:
        """A silo that turns on another: what does it get?"""
        return repr(collab.get_clients([other])[0].ask(b"tell me"))


class Server(FlareServer):
    """Rounds of as many bytes as ``num_rounds`` says; each reply goes into the next request."""

    def infer(self, folder: Path, transport: FlareTransport) -> None:
        path = folder / CHECKPOINT
        state = json.loads(path.read_text()) if path.exists() else {"round": 0, "chain": "", "gossip": "", "seconds": []}
        if self.method == "gossip":
            state["gossip"] = collab.get_clients([self.silos[0]])[0].gossip(self.silos[1])
        if self.method == "broken":
            told = transport.ask({name: b"hello" for name in self.silos}, self.timeout)
            raise RuntimeError("; ".join(f"{name}: {reply}" for name, reply in told.items()))
        size, state["began"] = max(64, self.num_rounds), time.time()
        while state["round"] < ROUNDS:
            begun = time.perf_counter()
            asked = {
                name: (f"{name} {state['round']} {state['chain']}".encode() * size)[:size] for name in self.silos
            }
            replies = transport.ask(asked, self.timeout)
            state["seconds"].append(time.perf_counter() - begun)
            failed = {name: reply for name, reply in replies.items() if not isinstance(reply, bytes)}
            if failed:
                raise RuntimeError(str(failed))
            state["chain"] = hashlib.sha256(b"".join(replies[name] for name in self.silos)).hexdigest()
            state["round"] += 1
            state["cpu"] = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            replace_file(path, json.dumps(state).encode())
            if self.method == "slow":
                time.sleep(0.25)
        (folder / FIT).write_text(json.dumps(state))


@dataclass(frozen=True)
class StandIn(Job):
    def server(self) -> Server:
        return Server(**{**self.__dict__, "silos": list(self.silos)})

    def silo(self) -> Silo:
        return Silo()
