"""Three silos and a server, each a process of its own: six cities by EP, with a silo that is killed on the way.

The children of the six-cities study are written to three csv files in three folders. Three processes each open their
own file; a fourth, the server, opens none. One silo is killed (kill -9) in the middle of the rounds and started again.
The end shows the posterior beside that of one process with all data, what left each silo, and which tables each
has opened.

Run it with ``make demo-federation``, or ``python examples/federation/demo.py --help``.
"""

import argparse
import collections
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pandas as pd

import numpyro_fed as nf
from numpyro_fed.remote import cli
from numpyro_fed.remote.study import Study
from numpyro_fed.remote.tables import read

HERE = Path(__file__).parent
SILOS = {"leeds": 200, "york": 180, "hull": 157}  # children

SITE = """name = "{name}"
study = "study.py"
data = "{name}.csv"
folder = "state"

[server]
address = "127.0.0.1:{port}"
key = "{name}.key"
"""

# The command, in a process that notes which files of the demo it opens.
NOTED = """
import os, sys
base, log = sys.argv.pop(1), sys.argv.pop(1)
seen = open(log, "a", buffering=1)
def note(event, args):
    if event == "open" and isinstance(args[0], str) and os.path.abspath(args[0]).startswith(base):
        seen.write(os.path.abspath(args[0])[len(base) + 1:] + "\\n")
sys.addaudithook(note)
from numpyro_fed.remote.cli import main
sys.exit(main())
"""


def write_folders(folder: Path, port: int) -> None:
    """A folder for each silo, with its rows alone, and one for the server, with none."""
    data = nf.datasets.six_cities()
    table = pd.DataFrame(data.wheeze, columns=[f"wheeze_{age}" for age in (7, 8, 9, 10)])
    table.insert(0, "smoke", data.smoke.astype(int))
    first = 0
    for name, children in SILOS.items():
        own = folder / name
        own.mkdir(parents=True)
        table.iloc[first : first + children].to_csv(own / f"{name}.csv", index=False)
        shutil.copy(HERE / "study.py", own)
        (own / "site.toml").write_text(SITE.format(name=name, port=port))
        first += children
    server = folder / "server"
    server.mkdir()
    shutil.copy(HERE / "study.py", server)
    for name in SILOS:  # whoever runs the server would send each silo its key
        cli.main(["keygen", name, "--out", str(server)])
        shutil.copy(server / f"{name}.key", folder / name)
    silos = "\n".join(f'{name} = "{name}.key"' for name in SILOS)
    (server / "server.toml").write_text(f'[listen]\naddress = "127.0.0.1:{port}"\n\n[silos]\n{silos}\n')


def command(folder: Path, who: str, *words: str) -> subprocess.Popen:
    """``numpyro-fed words`` in somebody's folder; what it says goes to said.txt there."""
    with open(folder / who / "said.txt", "a") as said:
        args = [sys.executable, "-c", NOTED, str(folder), str(folder / who / "opened.txt"), *words]
        return subprocess.Popen(args, cwd=folder / who, stdout=said, stderr=subprocess.STDOUT)


def audit(folder: Path, name: str) -> list[dict]:
    """What left a silo, as its own audit log tells it."""
    path = folder / name / "state" / "audit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(ready, running: list[subprocess.Popen], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end or any(one.poll() is not None for one in running):
            raise RuntimeError("a process ended early, or it takes too long: see said.txt in the folders")
        time.sleep(0.05)


def main(args: argparse.Namespace) -> tuple[float, float]:
    folder = Path(args.out).absolute() / "federation"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    write_folders(folder, port)
    print(f"folders: {folder}")

    words = ("run", "study.py", "--method", args.method, "--seed", str(args.seed), "--out", "fit.npz")
    rounds = ("--rounds", str(args.rounds)) if args.rounds else ()
    started = {name: ("silo", "--site", "site.toml") for name in SILOS}
    started["server"] = (*words, *rounds, "--checkpoint-every", "1")
    running = {who: command(folder, who, *words) for who, words in started.items()}
    try:
        in_rounds = lambda: sum(line["phase"] == "rounds" for line in audit(folder, "york")) >= 2
        wait_until(in_rounds, list(running.values()), args.patience)
        running[args.kill].send_signal(signal.SIGKILL)
        running[args.kill].wait()
        print(f"{args.kill} was killed (-9) after {len(audit(folder, 'york'))} answers of york", end="")
        running[args.kill] = command(folder, args.kill, *started[args.kill])
        print(" and started again")
        code = running["server"].wait(args.patience)
        if code:
            raise RuntimeError(f"the server ended with exit code {code}: see {folder / 'server' / 'said.txt'}")
    finally:
        for one in running.values():
            if one.poll() is None:
                one.terminate()
                one.wait()
    show_left(folder)
    show_opened(folder)
    return compare(folder, args)


def show_left(folder: Path) -> None:
    print("\nWhat left each silo (its own audit log):")
    for name in SILOS:
        phases = collections.defaultdict(lambda: [0, 0, set()])
        for line in audit(folder, name):
            one = phases[line["phase"] or line["type"]]
            one[0] += 1
            one[1] += line["bytes"]
            one[2].update(line["fields"])
        for phase, (number, size, fields) in phases.items():
            told = ", ".join(sorted(fields))
            print(f"  {name:6} {phase:8} {number:4} answers {size:7} bytes  {told[:90]}")


def show_opened(folder: Path) -> None:
    print("\nTables that each process has opened:")
    for who in (*SILOS, "server"):
        opened = {line for line in (folder / who / "opened.txt").read_text().split("\n") if line.endswith(".csv")}
        print(f"  {who:6} {', '.join(sorted(opened)) or 'none'}")


def compare(folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """The same method in one process that has all data, which nobody with real silos could run."""
    study = Study.load(folder / "server" / "study.py")
    method = study.method(args.method)
    fit = nf.load(folder / "server" / "fit.npz", method)
    pooled = nf.Silos({name: read(folder / name / f"{name}.csv", study.columns) for name in SILOS}, shared=study.shared)
    one = method.run(jax.random.key(args.seed), pooled, args.rounds, progress_bar=False)
    a, b = fit.normal(), one.normal()
    table = pd.DataFrame(
        {"silos: mean": a.mean, "sd": a.sds, "one process: mean": b.mean, "sd ": b.sds},
        index=list(fit.split.coordinate_names()),
    )
    means = float(np.max(np.abs(a.mean - b.mean) / b.sds))
    sds = float(np.max(np.abs(a.sds / b.sds - 1)))
    print(f"\nThe posterior, from silos and from one process with all data:\n{table.round(4).to_string()}")
    print(f"largest difference: {means:.1e} sd of a mean, {sds:.1e} of an sd\nverdict: {fit.verdict.status}")
    return means, sds


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--method", default="EP")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kill", default="york", choices=[*SILOS, "server"])
    parser.add_argument("--patience", type=float, default=900.0, help="seconds, for the run")
    parser.add_argument("--out", default="out", help="folder")
    return parser


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main(parser().parse_args())
