"""A whole run through the guarded ends: the audit logs, the ledger and the server's account are of the same bytes."""

from pathlib import Path
from types import SimpleNamespace

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


@pytest.mark.slow
def test_what_left_is_what_the_ledger_says_and_has_names(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    study = SimpleNamespace(shared={}, methods={"EP": nf.EP(model)}, digest=envelope.digest(b"study"))
    sites = {}
    for name, rows, policy in (("york", 40, Policy(copies=True)), ("leeds", 30, Policy(check_rows=31))):
        x = draw.normal(size=rows).astype(np.float32)
        own = {"x": x, "y": (draw.uniform(size=rows) < 0.5).astype(np.int32)}
        worker = Worker(name, own, study, tmp_path / name)
        sites[name] = Site(worker, study.digest, "slopes", tmp_path / name, policy)
    silos = connect(study, Direct({name: site.handle for name, site in sites.items()}))
    fit = study.methods["EP"].run(jax.random.key(0), silos, num_rounds=3, check=True)
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
