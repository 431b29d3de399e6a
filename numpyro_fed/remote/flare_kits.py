"""A site's own rules for FLARE: written into the ``local`` folder of a startup kit by whoever owns the machine.

FLARE's defaults let a project administrator do anything, a lead bring code and run shell commands at sites of the same
organisation, and sites send their error logs to the server; jobs and snapshots lie in /tmp. After :func:`harden` a site
runs the four classes of :data:`CLASSES` and nothing else, and sends nothing but replies.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# All that a site must allow: two classes of FLARE's and two of this package.
CLASSES = (
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    "numpyro_fed.remote.flare.FlareServer",
    "numpyro_fed.remote.flare.FlareSilo",
)

GONE = 60  # seconds without a sign of life

# Who may do what here. Nobody brings code (byoc) or runs shell commands; only this site's organisation operates it.
_NOBODY = dict.fromkeys(("submit_job", "clone_job", "byoc", "shell_commands", "server-predeployed-flwr"), "none")
_OWN = _NOBODY | dict(operate="o:site", view="any")
AUTHORIZATION = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": _OWN | dict(manage_job="any", download_job="n:submitter"),
        "org_admin": _OWN | dict(manage_job="o:submitter", download_job="o:submitter"),
        "lead": _OWN | dict(submit_job="any", manage_job="n:submitter", download_job="n:submitter"),
        "member": {"view": "any"},
    },
}


def harden(kit: str | Path, classes: Sequence[str] = CLASSES) -> None:
    """Write this site's rules into its startup kit: before its first start, and again after another provisioning.

    Args:
        kit: the folder that holds ``startup`` and ``local``.
        classes: what a job may be made of.

    ============================  ======================================================================================
    ``local/resources.json``      ``class_allow_list``, enforced; ``allow_log_streaming`` false and no streamer; at a
                                  server, jobs and snapshots in the kit's own folder ``storage``, and a silo's machine
                                  is known to be gone after a minute (by default ten)
    ``local/authorization.json``  :data:`AUTHORIZATION`
    ``local/log_config.json``     two lines a call less
    ============================  ======================================================================================
    """
    local = Path(kit) / "local"
    if not (local / "resources.json.default").is_file():
        raise FileNotFoundError(
            f"{kit} is no startup kit of a server or a client: it has no local/resources.json.default"
        )
    resources = json.loads((local / "resources.json.default").read_text())
    resources |= dict(class_list_enforcement_mode="enforce", class_allow_list=list(classes))
    if (Path(kit) / "startup" / "fed_server.json").is_file():
        _store(resources, Path(kit).absolute() / "storage")
    else:
        resources["allow_log_streaming"] = False
        resources["components"] = [part for part in resources["components"] if "LogStreamer" not in part["path"]]
    logs = json.loads((local / "log_config.json.default").read_text())
    logs["loggers"]["nvflare.collab"] = {"level": "WARNING"}
    for name, said in (("resources", resources), ("authorization", AUTHORIZATION), ("log_config", logs)):
        (local / f"{name}.json").write_text(json.dumps(said, indent=2) + "\n")


def _store(resources: dict[str, Any], folder: Path) -> None:
    resources["servers"][0]["heart_beat_timeout"] = GONE
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(folder / "snapshots")
    for part in resources["components"]:
        if part["id"] == "job_manager":
            part["args"]["uri_root"] = str(folder / "jobs")
