"""FLARE as a transport, without certificates: what a job holds, what becomes of failures, a job in the simulator."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs the extra flare: make test-flare")

import flare_study
from flare_study import SILOS
from nvflare.collab import CollabRecipe
from nvflare.collab.api.exceptions import CollabCallError, RunAborted

from numpyro_fed.remote import flare
from numpyro_fed.remote.flare_jobs import InstalledRecipe, Job, recipe
from numpyro_fed.remote.flare_kits import CLASSES
from numpyro_fed.remote.transport import Failure

HERE = Path(__file__).parent
JOB = Job("asthma", "EP", "asthma-1", SILOS, seed=3)


# --- what a job holds -------------------------------------------------------------------------------------------------


def test_a_job_holds_names_and_numbers_and_no_code(tmp_path: Path) -> None:
    recipe(JOB).export(str(tmp_path))
    files = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.suffix for path in files.values()} == {".json"}
    named = set()
    for path in files.values():
        text = path.read_text()
        named |= {word.split('"')[1] for word in text.split('"path": ')[1:]}
        assert str(HERE.parents[1]) not in text, "a path of this machine"
    assert named == set(CLASSES), "what sites must allow, no more and no less"
    meta = json.loads(files["asthma-1/meta.json"].read_text())
    assert meta["min_clients"] == 3
    assert {site for sites in meta["deploy_map"].values() for site in sites} == {"server", *SILOS}
    server = json.loads(
        next(path for name, path in files.items() if "server" in name and "fed_server" in name).read_text()
    )
    said = next(part for part in server["components"] if part["path"].endswith("FlareServer"))["args"]
    assert said == dict(study="asthma", method="EP", run="asthma-1", silos=list(SILOS), seed=3)


def test_the_hook_that_keeps_code_out_is_still_flares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a private one. Without it FLARE ships code, and the job is not written."""
    assert "_user_source_entries" in vars(CollabRecipe)
    monkeypatch.delattr(InstalledRecipe, "_user_source_entries")
    with pytest.raises(RuntimeError, match=r"FLARE put code into the job .*nvflare>=2.9,<2.10"):
        recipe(JOB).export(str(tmp_path))


@pytest.mark.parametrize("wrong", [dict(study="../../etc"), dict(run="a/b"), dict(run=""), dict(study="x.py")])
def test_a_job_names_no_paths(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="a name, not a path"):
        Job(**dict(study="asthma", method="EP", run="asthma-1", silos=SILOS) | wrong)


def test_a_quorum_is_of_the_silos() -> None:
    with pytest.raises(ValueError, match="at most the number of silos, 3, got 4"):
        Job("asthma", "EP", "asthma-1", SILOS, quorum=4)


# --- what becomes of failures -----------------------------------------------------------------------------------------


class Client:
    """A silo as FLARE's server sees it."""

    def __init__(self, name: str, answer: Callable[[bytes], Any]) -> None:
        self.name, self.ask, self.calls = name, self._count, 0
        self._answer = answer

    def __call__(self, timeout: float) -> "Client":
        self.timeout = timeout
        return self

    def _count(self, request: bytes) -> Any:
        self.calls += 1
        return self._answer(request)


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Callable[..., flare.FlareTransport]:
    def made(*clients: Client, names: tuple[str, ...] = (), aborted: bool = False) -> flare.FlareTransport:
        context = SimpleNamespace(is_aborted=lambda: aborted)
        monkeypatch.setattr(flare, "collab", SimpleNamespace(context=context, clients=clients))
        monkeypatch.setattr(flare, "PAUSE", 0.01)
        return flare.FlareTransport(names or tuple(client.name for client in clients))

    return made


def fails(cause: Any, **options: Any) -> Callable[[bytes], Any]:
    def answer(request: bytes) -> Any:
        raise CollabCallError("york", "ask", cause, **options)

    return answer


def test_each_silo_gets_its_own_request_at_the_same_time(transport: Callable[..., flare.FlareTransport]) -> None:
    both = threading.Barrier(2, timeout=10)  # broken, and so a failure, if one had to wait for the other

    def answer(request: bytes) -> bytes:
        both.wait()
        return request * 2

    silos = transport(Client("leeds", answer), Client("york", answer))
    assert silos.ask({"leeds": b"a", "york": b"b"}, 10.0) == {"leeds": b"aa", "york": b"bb"}


def test_a_silo_that_cannot_be_reached_is_tried_again(transport: Callable[..., flare.FlareTransport]) -> None:
    replies = iter([fails("remote call returned rc='target_unreachable'")] * 3 + [lambda request: b"there"])
    york = Client("york", lambda request: next(replies)(request))
    assert transport(york).ask({"york": b"a"}, 10.0) == {"york": b"there"}
    assert york.calls == 4


def test_who_was_not_connected_is_in_the_verdict(
    transport: Callable[..., flare.FlareTransport], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit is that of the others, and says so wherever it is opened: at the server, and in the silos."""
    from numpyro_fed.remote.config import open_site, read_site
    from numpyro_fed.remote.own import own_fit

    flare_study.write(tmp_path)
    monkeypatch.setenv(flare.SERVER, str(tmp_path / "server"))
    sites = {name: open_site(read_site(tmp_path / "silos" / name / "site.toml")) for name in SILOS[:2]}
    silos = transport(*(Client(name, site.handle) for name, site in sites.items()), names=SILOS)
    server = flare.FlareServer("trial", "FedAvg", "run-1", list(SILOS), num_rounds=2, quorum=2, check=False)
    server.infer(tmp_path, silos)
    method = flare_study.Study.load(tmp_path / "server" / "studies" / "trial.py").method("FedAvg")
    for fit in (flare_study.nf.load(tmp_path / flare.FIT, method), own_fit(sites["leeds"].worker)):
        assert any("'hull' was not connected" in reason for reason in fit.reasons)
        assert fit.verdict.status != "trusted"


def test_failures_have_kinds(transport: Callable[..., flare.FlareTransport]) -> None:
    clients = (
        Client("away", fails("remote call returned rc='target_unreachable'")),
        Client("late", fails(TimeoutError("function ask timed out after 0.1 seconds"))),
        Client("broken", lambda request: "ValueError"),
        Client("odd", lambda request: {"rows": [1, 2, 3]}),
        Client("talkative", lambda request: "could not convert 'smoker' to float"),
    )
    names = (*(client.name for client in clients), "absent")
    told = transport(*clients, names=names).ask(dict.fromkeys(names, b"a"), 0.1)
    assert {name: failure.kind for name, failure in told.items()} == dict(
        away="lost", late="timeout", broken="error", odd="malformed", talkative="malformed", absent="lost"
    )
    assert told["broken"] == Failure("error", "ValueError")
    assert "smoker" not in str(told), "what a silo says beyond a kind goes nowhere"


def test_the_end_of_a_job_is_no_silos_failure(transport: Callable[..., flare.FlareTransport]) -> None:
    silos = transport(Client("york", fails(TimeoutError("timed out"))), aborted=True)
    with pytest.raises(RunAborted):
        silos.ask({"york": b"a"}, 10.0)


def test_a_silo_answers_the_server_alone_and_tells_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Silo(flare.FlareSilo):
        def open(self, path: Path) -> flare.Handler:
            raise ValueError("could not convert 'smoker' to float")

    monkeypatch.setenv("NUMPYRO_FED_SITE", str(tmp_path / "site.toml"))
    for caller, reply in (("leeds", "NotTheServer"), ("server", "ValueError")):
        monkeypatch.setattr(flare, "collab", SimpleNamespace(caller=caller, site_name="york"))
        assert Silo().ask(b"a") == reply
    assert "smoker" in (tmp_path / "site.log").read_text(), "the owner can read it"
    monkeypatch.delenv("NUMPYRO_FED_SITE")
    assert Silo().ask(b"a") == "KeyError"


def test_one_job_at_a_time_is_at_a_run(tmp_path: Path) -> None:
    with flare._alone(tmp_path), pytest.raises(RuntimeError, match="another job is at the run"), flare._alone(tmp_path):
        pass


# --- in the simulator -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def ended(process: subprocess.Popen) -> Iterator[None]:
    """Its whole session ends with it; the simulator's clients have none of their own."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_simulated(tmp_path: Path) -> None:
    """EP over FLARE is EP over bytes in one process, to the last bit. Each silo opens its own files, and tells none."""
    flare_study.write(tmp_path)
    fit, work = tmp_path / "fit.npz", tmp_path / "work"
    asked = ["flare-run", "trial", "--silos", ",".join(SILOS), "--simulate", str(work), "--out", str(fit)]
    own = dict(NUMPYRO_FED_SITE=str(tmp_path / "silos"), NUMPYRO_FED_SERVER=str(tmp_path / "server"))
    with open(tmp_path / "out", "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "numpyro_fed.remote.cli", *asked],
            env=flare_study.environment(**own),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        with ended(process):
            deadline = time.monotonic() + 300
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.2)
            told = (tmp_path / "out").read_text()
            assert process.returncode == 0, told[-4000:]
    study = tmp_path / "server" / "studies" / "trial.py"
    assert flare_study.same(fit, flare_study.direct(tmp_path / "direct", "EP", None), study, "EP")
    for name in SILOS:
        audit = (tmp_path / "silos" / name / "state" / "audit.jsonl").read_text()
        assert "rounds" in audit, "what left is noted"
        for path in (*work.rglob("*"), *(tmp_path / "server").rglob("*")):
            data = path.read_bytes() if path.is_file() else b""
            assert not [one for one in flare_study.values(tmp_path, name) if one in data], path
