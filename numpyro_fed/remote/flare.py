"""NVIDIA FLARE as a transport: what runs inside of a FLARE job, in each silo and at the server.

A job carries no code. It names two classes of this package, which every machine has installed, and a few settings:

- :class:`FlareSilo`, in each silo: one function that takes bytes and gives bytes. Where data, study, state and policy
  lie is told by the silo's own ``site.toml``, which the environment variable ``NUMPYRO_FED_SITE`` names.
- :class:`FlareServer`, at the server: runs a study's method over a :class:`FlareTransport`. Where studies lie and
  results go is told by the folder that ``NUMPYRO_FED_SERVER`` names.

The names of the silos are those in their certificates, so FLARE vouches for them. Jobs are made, sent and watched by
:mod:`numpyro_fed.remote.flare_jobs`; docs/flare.md is for those who run the machines.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from numpyro_fed.remote.audit import append
from numpyro_fed.remote.transport import Failure

try:
    from nvflare.collab import collab
    from nvflare.collab.api.exceptions import CollabCallError, RunAborted
except ImportError as error:
    raise ImportError("numpyro_fed.remote.flare needs nvflare 2.9: pip install 'numpyro-fed[flare]'") from error

SITE, SERVER = "NUMPYRO_FED_SITE", "NUMPYRO_FED_SERVER"  # environment variables of the two ends
CHECKPOINT, FIT, OUTCOME = "checkpoint{}.nfc", "fit.npz", "outcome.json"  # files of a run at the server
PAUSE = 0.5  # seconds before a silo that could not be reached is tried again
# A name that may be part of a path: jobs name studies and runs, never files.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


# --- in a silo --------------------------------------------------------------------------------------------------------


class Handler(Protocol):
    """What answers in a silo: :class:`numpyro_fed.remote.site.Site`."""

    def handle(self, request: bytes) -> bytes: ...


class FlareSilo:
    """A silo's end. Its one published function answers the server, and nobody else.

    The silo is opened (study executed, data read) at the first request and kept until the job ends. Nothing is ever
    raised, since FLARE would send the text and the traceback to the server: of an error only its kind leaves, as a
    string in the place of a reply. The text goes into a file beside the silo's ``site.toml``, which FLARE knows nothing
    of: it may send its own logs to the server.
    """

    def __init__(self) -> None:
        self._site: Handler | None = None
        self._one = threading.Lock()  # a request that is sent again waits for the first

    def open(self, path: Path) -> Handler:
        """The silo that ``site.toml`` describes."""
        from numpyro_fed.remote.config import open_site, read_site

        return open_site(read_site(path))

    @collab.publish  # type: ignore[untyped-decorator]
    def ask(self, request: bytes) -> bytes | str:
        """A reply; as a string, why there is none.

        Other silos are members of the job and could call this, too.
        """
        if collab.caller != "server":
            return "NotTheServer"
        if not isinstance(request, bytes):
            return "NotBytes"
        with self._one:
            try:
                if self._site is None:
                    self._site = self.open(site_file(collab.site_name))
                return self._site.handle(request)
            except Exception as error:
                _keep(error, collab.site_name)
                return type(error).__name__


def site_file(name: str) -> Path:
    """The ``site.toml`` of this machine; where one machine plays several silos, that of the silo ``name``."""
    if not os.environ.get(SITE):
        raise KeyError(f"{SITE} is not set: name this silo's site.toml in the environment that FLARE is started from")
    path = Path(os.environ[SITE]).expanduser()
    return path / name / "site.toml" if path.is_dir() else path


def _keep(error: Exception, name: str) -> None:
    """Write an error's text where only the silo's owner looks."""
    if not os.environ.get(SITE):  # nothing was opened
        logging.getLogger(__name__).error("%s", error)
        return
    text = time.strftime("%Y-%m-%d %H:%M:%S ") + "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):
        append(site_file(name).with_suffix(".log"), text.encode(errors="backslashreplace"))


# --- at the server ----------------------------------------------------------------------------------------------------


class FlareTransport:
    """Takes bytes to the silos of the running job; made and used inside of it.

    Each silo gets a request of its own. One that cannot be reached is tried again until the time is over. When FLARE
    ends the job (a worker died, or somebody aborted it) that is no silo's failure: ``RunAborted`` is raised, the run
    stops where its checkpoint is, and another job goes on from there.

    Args:
        names: the silos, by the names in their certificates.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._context = collab.context  # of this thread: others have none
        self._clients = {client.name: client for client in collab.clients}
        self.connected = tuple(name for name in self.names if name in self._clients)
        self._threads = ThreadPoolExecutor(max(1, len(self.names)), thread_name_prefix="numpyro_fed")

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """As :meth:`numpyro_fed.remote.transport.Transport.ask`."""
        going = {name: self._threads.submit(self._one, name, data, timeout) for name, data in requests.items()}
        return {name: future.result() for name, future in going.items()}

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _one(self, name: str, request: bytes, timeout: float) -> bytes | Failure:
        client = self._clients.get(name)
        if client is None:
            return Failure("lost", "it was not connected when the job began")
        end = time.monotonic() + timeout
        told = Failure("timeout", f"no answer within {timeout:g} s")
        while (left := end - time.monotonic()) > 0:
            try:
                return _read(client(timeout=left).ask(request))
            except CollabCallError as error:
                if self._context.is_aborted():  # FLARE then calls it a timeout
                    raise RunAborted("the job was ended") from None
                # a silo of this package raises nothing: it could not be reached, or did not answer in time
                if error.cause_type != TimeoutError.__name__:
                    told = Failure("lost", f"it could not be reached for {timeout:g} s")
            time.sleep(min(PAUSE, max(0.0, end - time.monotonic())))
        return told


def _read(reply: Any) -> bytes | Failure:
    if isinstance(reply, bytes):
        return reply
    if isinstance(reply, str) and NAME.fullmatch(reply):
        return Failure("error", reply)
    return Failure("malformed", f"its answer is neither bytes nor the name of an error but a {type(reply).__name__}")


class FlareServer:
    """The server's end: a study's method, run over the silos of this job.

    The folder ``NUMPYRO_FED_SERVER`` holds ``studies/<study>.py`` and, for each run, ``runs/<run>/``: checkpoint and
    fit. A job of a run that has a checkpoint goes on from there. The fit goes into the job's results, too, from where
    whoever submitted the job can download it.

    Where silos are not connected, and the quorum allows it, the run is one of the others alone, with a checkpoint of
    its own: its target is their posterior, and the verdict and the outcome name who is missing.

    Args:
        study: the name of the server's own copy of the study file.
        method: the name of one of its methods.
        run: a name for the run: the same for every job that goes on with it.
        silos: who takes part; those of them that are not in this job are lost to it.
        seed: of the run's key.
        num_rounds: as for the method's ``run``; 0 for its default.
        timeout: seconds to wait for a silo.
        quorum: so few silos will do; 0: all are needed.
        checkpoint_every: rounds between two checkpoints; 0: about ten seconds.
        check: whether silos are asked for densities to judge the fit by.
    """

    def __init__(
        self,
        study: str,
        method: str,
        run: str,
        silos: list[str],
        seed: int = 0,
        num_rounds: int = 0,
        timeout: float = 600.0,
        quorum: int = 0,
        checkpoint_every: int = 0,
        check: bool = True,
    ) -> None:
        for what, name in (("study", study), ("run", run)):
            if not NAME.fullmatch(name):
                raise ValueError(f"{what} must be letters, digits, - and _ (a name, not a path), got {name!r}")
        self.study, self.method, self.run, self.silos = study, method, run, silos
        self.seed, self.num_rounds, self.timeout, self.quorum = seed, num_rounds, timeout, quorum
        self.checkpoint_every, self.check = checkpoint_every, check

    @collab.main  # type: ignore[untyped-decorator]
    def main(self) -> None:
        """What FLARE calls."""
        folder = server_folder() / "runs" / self.run
        results = Path(collab.workspace.get_result_root(collab.fl_ctx.get_job_id()))
        folder.mkdir(parents=True, exist_ok=True)
        results.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            transport = FlareTransport(self.silos)
            missing = [name for name in self.silos if name not in transport.connected]
            outcome: dict[str, Any] = dict(began=_digest(folder), missing=missing)
            _write(results / OUTCOME, outcome)  # now: this process may be killed
            try:
                if len(transport.connected) < (self.quorum or len(self.silos)):
                    raise RuntimeError(f"not connected: {', '.join(missing)}")
                self.infer(folder, transport)
            except RunAborted:
                raise
            except Exception as error:
                _write(results / OUTCOME, outcome | dict(failed=f"{type(error).__name__}: {error}"))
                raise
            finally:
                transport.close()
            shutil.copyfile(folder / FIT, results / FIT)
            _write(results / OUTCOME, outcome | dict(done=True))

    def infer(self, folder: Path, transport: FlareTransport) -> None:
        """Run the method, from the checkpoint if there is one, and write the fit."""
        import jax

        from numpyro_fed.cache import enable_cache
        from numpyro_fed.remote.silos import connect
        from numpyro_fed.remote.study import Study

        study = Study.load(server_folder() / "studies" / f"{self.study}.py")  # first: it may choose 64 bits
        enable_cache(server_folder() / "programs")
        missing = [name for name in self.silos if name not in transport.connected]
        without = "".join(f"-without-{name}" for name in missing)
        doubts = tuple(
            f"silo {name!r} was not connected when the run began: this is the posterior of the "
            f"{len(transport.connected)} others. Once it is back, run again with all of them, under another name"
            for name in missing
        )
        silos = connect(study, transport, names=transport.connected, timeout=self.timeout, quorum=self.quorum or None)
        silos.engine = replace(silos.engine, doubts=doubts)  # silos are told, too
        fit = study.method(self.method).run(
            jax.random.key(self.seed),
            silos,
            self.num_rounds or None,
            check=self.check,
            checkpoint=folder / CHECKPOINT.format(without),
            checkpoint_every=self.checkpoint_every or None,
            progress_bar=False,
        )
        replace(fit, reasons=(*fit.reasons, *doubts)).save(folder / FIT)


def server_folder() -> Path:
    """Where this server's studies and runs lie."""
    folder = os.environ.get(SERVER)
    if not folder:
        raise KeyError(
            f"{SERVER} is not set: name a folder with studies/ in the environment that FLARE is started from"
        )
    return Path(folder).expanduser()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Two jobs of one run would write over each other; a lock goes with its process, however that ends."""
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another job is at the run {folder.name!r}: wait for it, or abort it") from None
        yield


def _digest(folder: Path) -> str:
    """Of all that a job can go on from."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(folder.glob("*.nfc")))).hexdigest()


def _write(path: Path, what: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(what))
