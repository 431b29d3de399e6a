"""Processes that are killed (-9) at random rounds: the run ends by itself, with the same bits."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pandas as pd
import pytest

import numpyro_fed as nf
from numpyro_fed.remote.cli import main
from numpyro_fed.remote.study import Study

KILLS = int(os.environ.get("NUMPYRO_FED_KILLS", "3"))
ROUNDS = 1200  # of a few milliseconds: there is time to kill somebody

STUDY = """
import numpyro
import numpyro.distributions as dist
import numpyro_fed as nf

def model(x, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Normal(b * x, 1.0), obs=y)

methods = {"SFVI": nf.SFVI(model)}
"""

SITE = """
name = "{name}"
study = "study.py"
data = "{name}.csv"
folder = "state"
[server]
address = "127.0.0.1:{port}"
key = "{name}.key"
"""
NAMES = ("leeds", "york")
COMMAND = ("run", "study.py", "--method", "SFVI", "--rounds", str(ROUNDS), "--no-check", "--checkpoint-every", "10")


def prepared(folder, programs):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    rng = np.random.default_rng(1)
    for who in (*NAMES, "server"):
        (folder / who).mkdir(parents=True)
        (folder / who / "study.py").write_text(STUDY)
    for name, rows in zip(NAMES, (12, 9), strict=True):
        table = pd.DataFrame({"x": rng.normal(size=rows), "y": rng.normal(size=rows)})
        table.to_csv(folder / name / f"{name}.csv", index=False)
        (folder / name / "site.toml").write_text(SITE.format(name=name, port=port))
        assert main(["keygen", name, "--out", str(folder / "server")]) == 0
        shutil.copy(folder / "server" / f"{name}.key", folder / name)
    keys = "\n".join(f'{name} = "{name}.key"' for name in NAMES)
    listen = f'[listen]\naddress = "127.0.0.1:{port}"\n[silos]\n{keys}\n'
    (folder / "server" / "server.toml").write_text(listen)
    for who in (*NAMES, "server"):  # what the run before has compiled
        if (programs / who).exists():
            shutil.copytree(programs / who, kept(folder, who))


def kept(folder, who):
    return folder / who / ("run" if who == "server" else "state") / "programs"


def start(folder, who):
    words = COMMAND if who == "server" else ("silo", "--site", "site.toml")
    with open(folder / who / "said.txt", "a") as said:
        args = [sys.executable, "-m", "numpyro_fed.remote.cli", *words]
        return subprocess.Popen(args, cwd=folder / who, stdout=said, stderr=said)


def rounds_of(folder, name):
    path = folder / name / "state" / "audit.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["round"] for line in lines if '"phase": "rounds"' in line), default=0)


def run(folder, kills):
    """Run it to its end; at each of the rounds kill somebody and start him again."""
    running, killed = {who: start(folder, who) for who in (*NAMES, "server")}, []
    try:
        end = time.monotonic() + 300 + 60 * len(kills)
        for target, victim in kills:
            while rounds_of(folder, "york") < target and running["server"].poll() is None:
                assert time.monotonic() < end
                time.sleep(0.01)
            if running["server"].poll() is not None:  # the run was faster
                break
            killed.append(victim)
            running[victim].send_signal(signal.SIGKILL)
            running[victim].wait()
            running[victim] = start(folder, victim)
        assert running["server"].wait(end - time.monotonic()) == 0, (folder / "server" / "said.txt").read_text()
        assert len(killed) >= min(len(kills), 2)
    finally:
        for one in running.values():
            one.kill()
            one.wait()
    study = Study.load(folder / "server" / "study.py")
    return nf.load(folder / "server" / "fit.npz", study.method("SFVI"))


@pytest.mark.slow
def test_killed_processes_change_no_bit(tmp_path):
    prepared(tmp_path / "quiet", tmp_path)
    quiet = run(tmp_path / "quiet", [])
    for who in (*NAMES, "server"):
        shutil.copytree(kept(tmp_path / "quiet", who), tmp_path / "programs" / who)
    prepared(tmp_path / "killed", tmp_path / "programs")
    rng = np.random.default_rng(2)
    targets = np.sort(rng.choice(np.arange(5, ROUNDS - 20), KILLS, replace=False)).tolist()
    victims = [("server", *NAMES)[i % 3] for i in range(KILLS)]
    killed = run(tmp_path / "killed", list(zip(targets, victims, strict=True)))
    for one, other in zip(jax.tree.leaves(quiet.state.server), jax.tree.leaves(killed.state.server), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(quiet.history["loss"], killed.history["loss"])
    for silo in NAMES:  # what was sent twice is not counted twice
        assert quiet.ledger(silo)["bytes"].sum() == killed.ledger(silo)["bytes"].sum()
