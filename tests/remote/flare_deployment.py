"""A FLARE deployment on this machine: certificates, a server and three silos in processes of their own."""

import json
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import flare_watchdog
from flare_study import environment
from flare_watchdog import MARK, end, marked

from numpyro_fed.remote.flare_kits import CLASSES, harden

LONGEST = 1200.0  # seconds for a deployment: then everything is ended, and whoever waits for it fails

PROJECT = """
api_version: 3
name: trial
description: a trial on one machine
participants:
  - {{name: localhost, type: server, org: coordinator, fed_learn_port: {port}}}
{clients}
  - {{name: lead@example.org, type: admin, org: coordinator, role: lead}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
    args: {{template_file: [master_template.yml]}}
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {{config_folder: config}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""


class Deployment:
    """Started on entering; no process is left on leaving, nor when the one who entered is killed.

    Args:
        folder: where all of it lies; ``folder/silos/<name>/site.toml`` is there already.
        silos: their names.
        classes: what silos allow. The server allows any class, and code: silos do not rely on it.
    """

    user = "lead@example.org"

    def __init__(
        self,
        folder: Path,
        silos: Sequence[str],
        classes: Sequence[str] = CLASSES,
    ) -> None:
        self.folder, self.silos, self.mark = folder, tuple(silos), uuid.uuid4().hex
        self.started: list[subprocess.Popen] = []
        self.watchdog: subprocess.Popen | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        clients = "\n".join(f"  - {{name: {name}, type: client, org: {name}}}" for name in silos)
        (folder / "project.yml").write_text(PROJECT.format(port=port, clients=clients))
        made = ["provision", "-p", str(folder / "project.yml"), "-w", str(folder / "kits")]
        tool = [sys.executable, "-c", "from nvflare.cli import main; main()"]
        subprocess.run([*tool, *made], check=True, capture_output=True, timeout=60)
        self.kits = folder / "kits" / "trial" / "prod_00"
        self.lead = self.kits / self.user
        harden(self.kits / "localhost", ["*"])
        local = self.kits / "localhost" / "local"
        rules = json.loads((local / "authorization.json").read_text())
        rules["permissions"]["lead"]["byoc"] = "any"
        (local / "authorization.json").write_text(json.dumps(rules))
        resources = json.loads((local / "resources.json").read_text())
        resources["servers"][0]["heart_beat_timeout"] = 20  # a test does not wait a minute
        (local / "resources.json").write_text(json.dumps(resources))
        for name in silos:
            harden(self.kits / name, classes)
        # the scripts of a kit call python3
        tools = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        self.environment = environment(PATH=tools) | {MARK: self.mark}

    def __enter__(self) -> "Deployment":
        self.watchdog = subprocess.Popen(
            [sys.executable, flare_watchdog.__file__, self.mark, str(LONGEST)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.start("localhost", NUMPYRO_FED_SERVER=str(self.folder / "server"))
            for name in self.silos:
                self.start(name)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self, name: str, **variables: str) -> None:
        """A server or silo, as one process."""
        own = variables or {"NUMPYRO_FED_SITE": str(self.folder / "silos" / name / "site.toml")}
        with open(self.folder / f"{name}.out", "ab") as out:
            process = subprocess.Popen(
                ["bash", str(self.kits / name / "startup" / "sub_start.sh"), "--once"],
                env=self.environment | own,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.started.append(process)

    def processes(self, word: str = "") -> list[int]:
        """Processes of this deployment, workers in sessions of their own included, whose command has a word."""
        return marked(self.mark, word)

    def worker(self, name: str) -> int | None:
        """The process that runs a silo's part of the job."""
        there = self.processes(str(self.kits / name) + "\0")
        jobs = set(self.processes("worker_process")) | set(self.processes("runner_process"))
        return next((pid for pid in there if pid in jobs), None)

    def end(self) -> None:
        end(self.mark)
        for process in self.started:
            process.wait(timeout=10)
        if self.watchdog is not None and self.watchdog.stdin is not None:
            self.watchdog.stdin.close()  # which it waits for
            self.watchdog.wait(timeout=10)
