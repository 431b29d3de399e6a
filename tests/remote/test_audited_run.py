"""A whole run through the guarded ends: the audit logs, the ledger and the server's account are of the same bytes."""

import copy
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.remote import audit, envelope
from numpyro_fed.remote.policy import Count, Policy
from numpyro_fed.remote.silos import connect
from numpyro_fed.remote.site import Site
from numpyro_fed.remote.transport import Direct
from numpyro_fed.remote.worker import Worker


def model(x: jax.Array, y: jax.Array) -> None:
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=slope * x), obs=y)


STUDY = SimpleNamespace(shared={}, methods={"EP": nf.EP(model)}, digest=envelope.digest(b"study"))


def made(folder: Path, **policies: Policy) -> dict[str, Site]:
    draw, sites = np.random.default_rng(0), {}
    for name, policy in policies.items():
        rows = 40 if name == "york" else 30
        x = draw.normal(size=rows).astype(np.float32)
        own = {"x": x, "y": (draw.uniform(size=rows) < 0.5).astype(np.int32)}
        sites[name] = Site(Worker(name, own, STUDY, folder / name), STUDY.digest, "slopes", folder / name, policy)
    return sites


def run(transport: Direct) -> nf.Fit:
    return STUDY.methods["EP"].run(jax.random.key(0), connect(STUDY, transport), num_rounds=3, check=True)


@pytest.mark.slow
def test_what_left_is_what_the_ledger_says_and_has_names(tmp_path: Path) -> None:
    sites = made(tmp_path, york=Policy(copies=True), leeds=Policy(check_rows=31))
    fit = run(Direct({name: site.handle for name, site in sites.items()}))
    assert not fit.verdict.ok
    assert "leeds" in str(fit.verdict) and "its policy allows no check" in str(fit.verdict)

    ledger = fit.ledger()
    ups = ledger[ledger["direction"] == "up"]
    for name, site in sites.items():
        lines = audit.lines(site.audit.path)
        fields = [field for line in lines for field in line["fields"]]
        assert fields and not [field for field in fields if field.startswith("#")]
        numbers = [line for line in lines if line["phase"] in ("start", "rounds", "closing")]
        of_silo = ups[(ups["silo"] == name) & ~ups["phase"].isin(["survey", "check", "modes", "theta", "locals"])]
        assert sum(line["payload_bytes"] for line in numbers) == of_silo["bytes"].sum()
        with site.counts.held():
            count = site.counts.of("slopes")
        assert count.messages == len(lines)
        assert count.rounds == len(numbers)
    assert {line["phase"] for line in audit.lines(sites["leeds"].audit.path)} == {None, "survey", "start", "rounds"}
    with sites["leeds"].counts.held():
        assert sites["leeds"].counts.of("slopes") == Count(count.rounds, count.messages, 0)
    copies = [envelope.unpack(path.read_bytes()) for path in (tmp_path / "york" / "copies").iterdir()]
    kept = [line for line in audit.lines(sites["york"].audit.path)]
    assert len(copies) == len({line["sha256"] for line in kept})
    for number in sites["york"].worker.own["x"]:
        assert not any(np.float32(number).tobytes() in copy.payload for copy in copies), "no row left as it is"


class Recorded(Direct):
    """Remembers what it took, and brought."""

    def ask(self, requests: Any, timeout: float) -> dict[str, Any]:
        replies = super().ask(requests, timeout)
        self.taken = [*getattr(self, "taken", []), *((name, requests[name], replies[name]) for name in requests)]
        return replies


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value: what holds it, and its key there."""
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield node, key
        yield from places(node[key])


HOSTILE = [None, True, -1, 2**40, 2**70, 1e300, "", "../../../etc", "sys:exit", 3000 * "x", [], [[]], {}, {"named": 1}]
LARGE = json.dumps({"shape": [2**28], "dtype": "float64"})  # 2 GiB


@pytest.mark.slow
def test_hostile_words_in_an_honest_envelope_change_nothing(tmp_path: Path) -> None:
    """One word of a real request changed: an error or an answer, no memory, and the honest run is still there."""
    site = made(tmp_path, york=Policy(least_rows=1))["york"]
    transport = Recorded({"york": site.handle})
    run(transport)
    draw, kinds = random.Random(0), set()
    asked = [envelope.unpack(request) for _, request, _ in transport.taken]
    fresh = made(tmp_path / "fresh", york=Policy())["york"]
    hostile = []
    for number in range(150):
        one = asked[number % len(asked)]
        body = copy.deepcopy(one.body)
        found = list(places(body))
        if found:
            holder, key = draw.choice(found)
            holder[key] = draw.choice(HOSTILE)
        run_id = draw.choice([one.run, 16 * "1"])
        hostile.append(one._replace(body=body, run=run_id, payload=draw.choice([one.payload, b"", one.payload[:-1]])))
    tracemalloc.start()
    for one in asked:  # what need not be sent is made in the silo: not of any size that a server says
        large = one.body.get("do") == "start"
        changed = one._replace(body={**one.body, "like": LARGE}, payload=b"") if large else one
        reply = envelope.unpack(fresh.handle(envelope.pack(changed)))
        if large:
            assert reply.body == {"kind": "ValueError", "why": ""}
            break
    for one in hostile:
        reply = envelope.unpack(site.handle(envelope.pack(one)))
        assert reply.sender == "york"
        kinds.add(reply.body["kind"] if reply.type == "error" else "answered")
    assert tracemalloc.get_traced_memory()[1] < 100e6  # programs are traced on the way
    tracemalloc.stop()
    assert {"answered", "ValueError"} <= kinds
    for name, request, before in transport.taken:
        again = envelope.unpack(site.handle(request))
        assert (again.type, again.payload) == (envelope.unpack(before).type, envelope.unpack(before).payload), name
