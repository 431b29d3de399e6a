"""FLARE as it is deployed: certificates, mTLS, a server and three silos in processes of their own; no code travels.

One deployment serves all tests, in the order in which they stand. It ends after the last, whatever happened.
"""

import io
import json
import os
import signal
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="needs the extra flare: make test-flare")

import flare_study
from flare_deployment import Deployment
from flare_standin import STAND_INS, NotAllowed, StandIn, undisturbed
from flare_study import SILOS
from nvflare.apis.job_def import RunStatus
from nvflare.collab import CollabRecipe
from nvflare.fuel.flare_api.flare_api import new_secure_session

import numpyro_fed as nf
from numpyro_fed.remote.flare import CHECKPOINT
from numpyro_fed.remote.flare_jobs import Job, run
from numpyro_fed.remote.study import Study

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("flare"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # FLARE's own, of aiohttp: as errors they end connections
]

CANARY = "58131-canary"


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("flare")
    flare_study.write(folder)
    for name in SILOS:
        (folder / "silos" / name / "data.csv").write_text(f"{CANARY} {name}")
    with Deployment(folder, SILOS, STAND_INS) as deployment:
        yield deployment
    assert deployment.processes() == []


def fit(deployed: Deployment, job: StandIn, told: list[str] | None = None, **options: float) -> dict:
    said = [] if told is None else told
    out = deployed.folder / f"{job.run}.json"
    return json.loads(run(job, deployed.lead, deployed.user, out, told=said.append, **options).read_text())


def test_a_fit_with_killed_workers_is_the_fit(deployed: Deployment, tmp_path: Path) -> None:
    """SFVI; kill -9 of a silo's worker, then of the server's: it goes on by itself, and ends to the last bit where one
    process ends in which nothing happens."""
    job = Job("trial", "SFVI", "fit", SILOS, num_rounds=300, checkpoint_every=10, check=False)
    told: list[str] = []
    path = deployed.folder / "server" / "runs" / "fit" / CHECKPOINT.format("")
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(run, job, deployed.lead, deployed.user, tmp_path / "fit.npz", told=told.append)
        for who in ("york", "localhost"):
            seen: set[int] = set()
            while not going.done() and len(seen) < 6:  # a checkpoint is written five times on the way
                if path.exists():
                    seen.add(path.stat().st_mtime_ns)
                time.sleep(0.02)
            assert not going.done(), going.exception()
            os.kill(deployed.worker(who), signal.SIGKILL)
        found = going.result()
    assert sum("goes on from the checkpoint" in line for line in told) == 2, told
    study = deployed.folder / "server" / "studies" / "trial.py"
    assert flare_study.same(found, flare_study.direct(tmp_path / "direct", "SFVI", 300, check=False), study, "SFVI")


def test_silos_do_not_answer_each_other(deployed: Deployment) -> None:
    found = fit(deployed, StandIn("none", "gossip", "gossip", SILOS))
    assert found["gossip"] == repr("NotTheServer")
    assert found["chain"] == undisturbed("gossip", SILOS)


def test_a_job_with_code_is_refused(deployed: Deployment, tmp_path: Path) -> None:
    """FLARE's own recipe, which ships the sources of the very classes that sites allow."""
    job = StandIn("none", "fast", "code", SILOS)
    CollabRecipe(job.run, server=job.server(), client=job.silo(), min_clients=3).export(str(tmp_path))
    assert list(tmp_path.rglob("custom"))
    session = new_secure_session(deployed.user, str(deployed.lead))
    try:
        identity = session.submit_job(str(tmp_path / job.run))
        meta, end = session.get_job_meta(identity), time.monotonic() + 60
        while not meta["status"].startswith("FINISHED") and time.monotonic() < end:
            time.sleep(1.0)
            meta = session.get_job_meta(identity)
    finally:
        session.close()
    assert meta["status"] == RunStatus.FAILED_TO_RUN, meta
    for name in SILOS:
        assert "BYOC not permitted" in next(line for line in meta["job_deploy_detail"] if line.startswith(name))
    assert not (deployed.folder / "server" / "runs" / "code").exists()


def test_a_class_that_is_not_listed_is_refused(deployed: Deployment) -> None:
    with pytest.raises(RuntimeError, match="1 jobs of the run 'unlisted' ended without a step forward"):
        fit(deployed, NotAllowed("none", "fast", "unlisted", SILOS), patience=0)
    for name in SILOS:
        log = (deployed.folder / f"{name}.out").read_text()
        assert "flare_standin.Unlisted' at config path" in log and "is not in allow_list" in log, name


def test_of_an_error_in_a_silo_the_kind_is_told(deployed: Deployment) -> None:
    data = deployed.folder / "silos" / "york" / "data.csv"
    good = data.read_text()
    data.write_text(f"broken {CANARY}")
    try:
        with pytest.raises(RuntimeError, match=r"failed at the server: RuntimeError: york: error, ValueError$"):
            fit(deployed, StandIn("none", "fast", "broken", SILOS))
    finally:
        data.write_text(good)
    assert CANARY in (deployed.folder / "silos" / "york" / "site.log").read_text()


def test_a_silo_that_is_gone(deployed: Deployment) -> None:
    """Below the quorum nothing is begun; above it the fit is that of the others, and says so."""
    for pid in deployed.processes(str(deployed.kits / "hull") + "\0"):
        os.kill(pid, signal.SIGKILL)
    session = new_secure_session(deployed.user, str(deployed.lead))
    try:
        end = time.monotonic() + 150  # GONE, and FLARE looks now and then
        while "hull" in {client.name for client in session.get_connected_client_list()} and time.monotonic() < end:
            time.sleep(2.0)
    finally:
        session.close()
    with pytest.raises(RuntimeError, match="hull not connected for 2 s; 2 of 3 silos are there, 3 are needed"):
        fit(deployed, StandIn("none", "fast", "gone", SILOS), wait=2.0)
    job = Job("trial", "EP", "gone", SILOS, quorum=2)
    with pytest.warns(UserWarning, match="the fit is without hull, not connected"):
        path = run(job, deployed.lead, deployed.user, deployed.folder / "gone.npz", wait=2.0, told=print)
    study = Study.load(deployed.folder / "server" / "studies" / "trial.py")
    assert nf.load(path, study.method("EP")).state.names == ("leeds", "york")


def test_no_value_of_a_silo_is_elsewhere(deployed: Deployment) -> None:
    """In no file of the server's, the lead's or FLARE's, archives of jobs opened; after all that went on above."""
    looked, secrets = (
        0,
        [CANARY.encode(), *(one for name in SILOS for one in flare_study.values(deployed.folder, name))],
    )
    for path in deployed.folder.rglob("*"):
        if path.is_file() and (deployed.folder / "silos") not in path.parents:
            looked += 1
            data = unpacked(path.read_bytes())
            assert not [one for one in secrets if one in data], path
    assert looked > 50
    own = [path.read_bytes() for path in (deployed.folder / "silos" / "york").rglob("*") if path.is_file()]
    assert any(CANARY.encode() in data for data in own), "it can be found"


def unpacked(data: bytes) -> bytes:
    if not zipfile.is_zipfile(io.BytesIO(data)):
        return data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return b"".join(unpacked(archive.read(name)) for name in archive.namelist())
