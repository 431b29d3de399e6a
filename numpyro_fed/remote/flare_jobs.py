"""Jobs of NVIDIA FLARE: made without code, sent, watched, and sent again when a worker dies.

FLARE ends a whole job when one of its workers dies. The silos keep their states and the server its checkpoint, so
another job of the same run goes on from there, and ends bit for bit where the first would have ended. :func:`run` does
that unattended.
"""

import json
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# isort: off
# numpyro_fed.remote.flare first: where nvflare is missing, its error says what to install
from numpyro_fed.checks import warn_user
from numpyro_fed.remote.flare import FIT, OUTCOME, FlareServer, FlareSilo
from numpyro_fed.remote.flare_kits import CLASSES

from nvflare.apis.job_def import RunStatus
from nvflare.collab import CollabRecipe
from nvflare.fuel.flare_api.api_spec import AuthenticationError, AuthorizationError
from nvflare.fuel.flare_api.flare_api import new_secure_session
from nvflare.recipe import SimEnv
# isort: on

SYNC = 300.0  # seconds for a silo's worker to start and to say that it is there
POLL = 1.0  # seconds between two looks at a job


@dataclass(frozen=True)
class Job:
    """What a job tells the server: names and numbers. See :class:`numpyro_fed.remote.flare.FlareServer`."""

    study: str
    method: str
    run: str
    silos: tuple[str, ...]
    seed: int = 0
    num_rounds: int = 0
    timeout: float = 600.0
    quorum: int = 0
    checkpoint_every: int = 0
    check: bool = True

    def __post_init__(self) -> None:
        self.server()  # raises where a name is none
        if not 0 <= self.quorum <= len(self.silos):
            raise ValueError(f"quorum must be at most the number of silos, {len(self.silos)}, got {self.quorum}")

    def server(self) -> FlareServer:
        """The server's end."""
        return FlareServer(**asdict(self) | dict(silos=list(self.silos)))

    def silo(self) -> FlareSilo:
        """A silo's end."""
        return FlareSilo()

    @property
    def least(self) -> int:
        """As few silos will do."""
        return self.quorum or len(self.silos)


class InstalledRecipe(CollabRecipe):
    """A job that carries no code: its classes are those that every machine has installed.

    FLARE's own recipe copies the sources of its classes, and what they import, into the job. A site whose policy says
    ``byoc: none`` refuses such a job; elsewhere the copies would hide the installed package.
    """

    def __init__(self, name: str, server: Any, client: Any, sites: Sequence[str]) -> None:
        super().__init__(name, server=server, client=client, min_clients=len(sites), sync_task_timeout=SYNC)
        self._job.set_app_packages(sorted({type(end).__module__.split(".")[0] for end in (server, client)}))
        self.set_per_site_config({site: {} for site in sites})
        self.add_server_config(
            {"dead_client_grace_period": 0}
        )  # a dead worker ends the job at once: the next one waits

    @staticmethod
    def _user_source_entries(objs: Any) -> list:
        """FLARE's hook (2.9; no public one): which sources to copy into the job."""
        return []

    def export(self, job_dir: str, *args: Any, **options: Any) -> None:
        """Write the job into a folder.

        Raises:
            RuntimeError: there is code in it, as FLARE's hook no longer works.
        """
        super().export(job_dir, *args, **options)
        code = [path for path in Path(job_dir).rglob("*") if path.name == "custom" or path.suffix == ".py"]
        if code:
            raise RuntimeError(f"FLARE put code into the job ({code[0].name}): this package needs nvflare>=2.9,<2.10")


def recipe(job: Job, sites: Sequence[str] | None = None) -> InstalledRecipe:
    """The job as FLARE knows it, for the silos that take part in it (by default all)."""
    return InstalledRecipe(job.run, job.server(), job.silo(), sites or job.silos)


# --- simulated --------------------------------------------------------------------------------------------------------


def simulate(job: Job, workspace: str | Path, classes: Sequence[str] = CLASSES) -> Path:
    """Run a job in FLARE's simulator: the same code, all processes on this machine, no certificates.

    ``NUMPYRO_FED_SITE`` names a folder with ``<silo>/site.toml`` for each silo.

    Returns:
        The fit's file.
    """
    workspace = Path(workspace)
    local = workspace / job.run / "local"
    local.mkdir(parents=True, exist_ok=True)
    (local / "resources.json").write_text(json.dumps(dict(format_version=2, class_allow_list=list(classes))))
    try:
        recipe(job).run(SimEnv(clients=list(job.silos), workspace_root=str(workspace)))
    except RuntimeError as error:
        raise RuntimeError(_told(job, _outcome(workspace / job.run).get("failed", str(error)))) from error
    return _results(workspace / job.run, job)


# --- deployed ---------------------------------------------------------------------------------------------------------


def run(
    job: Job,
    kit: str | Path,
    username: str,
    out: str | Path,
    *,
    wait: float = 300.0,
    patience: int = 5,
    told: Callable[[str], Any] = print,
) -> Path:
    """Submit a job, watch it, and submit it again from the checkpoint when it was ended on the way.

    Args:
        job: what to run.
        kit: the startup kit of the one who submits (the folder that holds ``startup/``).
        username: as in that kit.
        out: where the fit is written.
        wait: seconds to wait for silos that are not connected, and for a server that does not answer.
        patience: so many jobs one after the other may end without a step forward; the pauses between them grow.
        told: called with a line whenever something happens.

    Returns:
        ``out``.

    Raises:
        RuntimeError: the study failed at the server, too few silos are there, or no job gets on.
    """
    lead, began = Lead(kit, username, wait), list[str]()  # where jobs began, as digests of checkpoints
    while True:
        identity, status, outcome = _once(lead, job, Path(out), told)
        if status == RunStatus.FINISHED_COMPLETED and outcome.get("done"):
            told(f"job {identity} is done")
            if outcome["missing"]:
                missing = ", ".join(outcome["missing"])
                warn_user(f"the fit is without {missing}, not connected: it is the posterior of the other silos alone")
            return Path(out)
        if "failed" in outcome:
            raise RuntimeError(_told(job, outcome["failed"]))
        began.append(outcome.get("began", ""))
        idle = began.count(began[-1])  # jobs from the same point on
        if idle > patience:
            raise RuntimeError(
                f"{idle} jobs of the run {job.run!r} ended without a step forward, the last ({identity}) as {status}: "
                "see the logs of the server and of the silos"
            )
        told(f"job {identity} ended ({status}): the next one goes on from the checkpoint")
        time.sleep(min(60.0, 2.5 * 2**idle) if idle > 1 else 0.0)


@dataclass(frozen=True)
class Lead:
    """Who submits jobs, and how long FLARE's server is waited for."""

    kit: str | Path
    username: str
    wait: float

    def session(self) -> AbstractContextManager[Any]:
        """With FLARE's server, which may be about to start."""
        end = time.monotonic() + self.wait
        while True:
            try:
                return closing(new_secure_session(self.username, str(self.kit)))
            except (AuthenticationError, AuthorizationError):
                raise
            except Exception as error:
                if time.monotonic() > end:
                    told = f"FLARE's server did not answer for {self.wait:g} s ({type(error).__name__})"
                    raise RuntimeError(told) from error
                time.sleep(POLL)

    def does(self, what: Callable[[Any], Any]) -> Any:
        """Something in a session of its own; once more where the connection was lost on the way."""
        end = time.monotonic() + self.wait
        while True:
            try:
                with self.session() as session:
                    return what(session)
            except (ConnectionError, TimeoutError) as error:
                if time.monotonic() > end:
                    raise
                warn_user(f"FLARE's server: {type(error).__name__}, trying again")
                time.sleep(POLL)


def _once(lead: Lead, job: Job, out: Path, told: Callable[[str], Any]) -> tuple[str, str, dict[str, Any]]:
    """One job, from submission to its end: identity, status and outcome. The fit, where there is one, is written."""
    sites = lead.does(lambda session: _connected(session, job, lead.wait, told))
    token = uuid.uuid4().hex  # a submission that is sent twice is one job
    with tempfile.TemporaryDirectory() as folder:
        recipe(job, sites).export(folder)
        identity = lead.does(lambda session: session.submit_job(str(Path(folder) / job.run), token))
        told(f"job {identity} of the run {job.run!r} with {', '.join(sites)}")
        status = lead.does(lambda session: _ended(session, identity))
        found = Path(lead.does(lambda session: session.download_job_result(identity, folder)))
        outcome = _outcome(found)
        if outcome.get("done"):
            shutil.copyfile(_results(found, job), out)
    return identity, status, outcome


def _connected(session: Any, job: Job, wait: float, told: Callable[[str], Any]) -> list[str]:
    """The job's silos that are there: all, or enough of them when the time is over."""
    end, said = time.monotonic() + wait, False
    while True:
        there = {client.name for client in session.get_connected_client_list()}
        missing = [name for name in job.silos if name not in there]
        if not missing or time.monotonic() > end:
            break
        if not said:
            told(f"waiting for {', '.join(missing)}")
            said = True
        time.sleep(POLL)
    sites = [name for name in job.silos if name in there]
    if len(sites) < job.least:
        raise RuntimeError(
            f"{', '.join(missing)} not connected for {wait:g} s; {len(sites)} of {len(job.silos)} silos are there, "
            f"{job.least} are needed: start the others, or lower the quorum"
        )
    return sites


def _ended(session: Any, identity: str) -> str:
    """The status in which a job ended, when it has."""
    while not (status := str(session.get_job_meta(identity).get("status"))).startswith("FINISHED"):
        time.sleep(POLL)
    return status


def _outcome(folder: Path) -> dict[str, Any]:
    found = sorted(folder.rglob(OUTCOME))
    return dict(json.loads(found[0].read_text())) if found else {}


def _results(folder: Path, job: Job) -> Path:
    found = sorted(folder.rglob(FIT))
    if not found:
        why = _outcome(folder).get("failed", f"there is no {FIT} in {folder}: see the logs there")
        raise RuntimeError(_told(job, why))
    return found[0]


def _told(job: Job, why: str) -> str:
    return f"the run {job.run!r} failed at the server: {why}"
