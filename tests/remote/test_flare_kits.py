"""A site's rules for FLARE: what is written into a startup kit. Needs no FLARE."""

import json
from pathlib import Path

import pytest

from numpyro_fed.remote.cli import main
from numpyro_fed.remote.flare_kits import AUTHORIZATION, CLASSES, harden

STREAMER = dict(id="site_log_streamer", path="nvflare.app_common.logging.site_log_streamer.SiteLogStreamer")
LAUNCHER = dict(id="process_launcher", path="nvflare.app_common.job_launcher.client_process_launcher")


def kit(folder: Path, role: str) -> Path:
    """The part of a startup kit that matters, as FLARE 2.9 makes it."""
    resources = dict(class_allow_list=["nvflare.app_common."], class_list_enforcement_mode="warn")
    if role == "server":
        storage = dict(path="FilesystemStorage", args=dict(root_dir="/tmp/nvflare/snapshot-storage"))
        jobs = dict(id="job_manager", path="SimpleJobDefManager", args=dict(uri_root="/tmp/nvflare/jobs-storage"))
        resources |= dict(servers=[dict(heart_beat_timeout=600)], snapshot_persistor=dict(args=dict(storage=storage)))
        resources |= dict(components=[jobs])
    else:
        resources |= dict(allow_log_streaming=True, components=[LAUNCHER, STREAMER])
    for part in ("local", "startup"):
        (folder / part).mkdir(parents=True)
    (folder / "startup" / f"fed_{role}.json").write_text("{}")
    (folder / "local" / "resources.json.default").write_text(json.dumps(resources))
    (folder / "local" / "log_config.json.default").write_text(json.dumps(dict(loggers=dict(root=dict(level="INFO")))))
    return folder


def test_a_silo_runs_four_classes_and_keeps_its_logs(tmp_path: Path) -> None:
    assert main(["flare-kit", str(kit(tmp_path / "leeds", "client"))]) == 0
    said = json.loads((tmp_path / "leeds" / "local" / "resources.json").read_text())
    assert said["class_allow_list"] == list(CLASSES) and said["class_list_enforcement_mode"] == "enforce"
    assert said["allow_log_streaming"] is False and said["components"] == [LAUNCHER]
    assert json.loads((tmp_path / "leeds" / "local" / "authorization.json").read_text()) == AUTHORIZATION
    logs = json.loads((tmp_path / "leeds" / "local" / "log_config.json").read_text())
    assert logs["loggers"] == {"root": {"level": "INFO"}, "nvflare.collab": {"level": "WARNING"}}


def test_a_server_keeps_jobs_in_its_kit_and_sees_sooner_who_is_gone(tmp_path: Path) -> None:
    harden(kit(tmp_path / "server", "server"))
    text = (tmp_path / "server" / "local" / "resources.json").read_text()
    assert "/tmp/nvflare" not in text and str(tmp_path / "server" / "storage" / "jobs") in text
    assert json.loads(text)["servers"][0]["heart_beat_timeout"] == 60


def test_nobody_brings_code_or_runs_commands() -> None:
    for role, rights in AUTHORIZATION["permissions"].items():
        assert rights.get("byoc", "none") == rights.get("shell_commands", "none") == "none", role


def test_what_is_no_kit(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no startup kit .* no local/resources\.json\.default"):
        harden(tmp_path)
