"""Silos in processes of their own: what a round costs, how soon a silo is ready, and what kill -9 changes.

    python -m benchmarks.federation rounds     # milliseconds a round over TCP, SFVI on six cities
    python -m benchmarks.federation ready      # CPU seconds until a silo that was started again has answered
    python -m benchmarks.federation kills      # silos, then the server, killed at random rounds: bit for bit?

All of it runs ``examples/federation/demo.py``'s three silos and a server, as processes of the command ``numpyro-fed``.
"""

import argparse
import importlib.util
import random
import resource
import shutil
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import numpyro_fed as nf
from numpyro_fed.remote.study import Study

_found: Any = importlib.util.spec_from_file_location(
    "demo", Path(__file__).parent.parent / "examples" / "federation" / "demo.py"
)
demo = importlib.util.module_from_spec(_found)
_found.loader.exec_module(demo)


class Federation:
    """Three silos and a server in a folder, not started yet."""

    def __init__(self, folder: Path, method: str, rounds: int, check: bool, every: int = 1) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        demo.write_folders(folder, port)
        self.folder, self.method = folder, method
        words = ["run", "study.py", "--method", method, "--seed", "0", "--rounds", str(rounds), "--out", "fit.npz"]
        words += ["--checkpoint-every", str(every)] + ["--no-check"] * (not check)
        self.words = {name: ("silo", "--site", "site.toml") for name in demo.SILOS} | {"server": tuple(words)}
        self.running: dict[str, subprocess.Popen] = {}

    def start(self, who: str) -> None:
        self.running[who] = demo.command(self.folder, who, *self.words[who])

    def kill(self, who: str) -> None:
        self.running[who].send_signal(signal.SIGKILL)
        self.running[who].wait()

    def answers(self) -> list[dict]:
        """Of york, in the method's rounds."""
        return [line for line in demo.audit(self.folder, "york") if line["phase"] == "rounds"]

    def reached(self, number: int) -> bool:
        """So many answers, or the end."""
        return len(self.answers()) >= number or self.running["server"].poll() is not None

    def finished(self, seconds: float = 3600.0) -> nf.Fit:
        code = self.running["server"].wait(seconds)
        self.stop()
        if code:
            raise RuntimeError(f"the server ended with {code}: see {self.folder / 'server' / 'said.txt'}")
        method = Study.load(self.folder / "server" / "study.py").method(self.method)
        return nf.load(self.folder / "server" / "fit.npz", method)

    def stop(self) -> None:
        for one in self.running.values():
            if one.poll() is None:
                one.kill()
                one.wait()


def undisturbed(folder: Path, method: str, rounds: int, check: bool = False, every: int = 1) -> tuple[Federation, Any]:
    run = Federation(folder, method, rounds, check, every)
    try:
        for who in run.words:
            run.start(who)
        return run, run.finished()
    finally:
        run.stop()


def bits(fit: nf.Fit) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(fit.state.server)]


def rounds(args: argparse.Namespace) -> None:
    """From the times in york's audit log: the middle half of the rounds, as the median between two answers."""
    run, _ = undisturbed(args.out / "rounds", "SFVI", args.rounds, every=1000)
    when = [np.datetime64(line["time"].rstrip("Z"), "us") for line in run.answers()]
    gaps = np.diff(np.array(when)).astype(float) / 1e3
    gaps = gaps[len(gaps) // 4 : 3 * len(gaps) // 4]
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"SFVI over TCP, three silos, states saved: {np.median(gaps):.2f} ms a round (median of {len(gaps)}; tenth "
        f"percentile {np.quantile(gaps, 0.1):.2f}); {used.ru_utime + used.ru_stime:.0f} CPU s in all processes"
    )


def ready(args: argparse.Namespace) -> None:
    """A silo is killed in the rounds and started again: CPU seconds of the new process when it has answered twice."""
    run = Federation(args.out / "ready", "EP", 40, False)
    try:
        for who in run.words:
            run.start(who)
        _wait(lambda: len(run.answers()) >= 3)
        run.kill("york")
        number, began = len(run.answers()), time.perf_counter()
        run.start("york")
        _wait(lambda: len(run.answers()) >= number + 1)
        seconds = time.perf_counter() - began
        told = Path(f"/proc/{run.running['york'].pid}/stat").read_text().rsplit(")", 1)[1].split()
        cpu = (int(told[11]) + int(told[12])) / 100
        print(f"EP: a silo that was started again has answered after {cpu:.1f} CPU s, {seconds:.1f} s")
    finally:
        run.stop()


def kills(args: argparse.Namespace) -> None:
    """The same run with so many kills on the way; the fits are compared bit by bit."""
    _, whole = undisturbed(args.out / "whole", "SFVI", args.rounds)
    draws = random.Random(args.seed)
    for victims in (list(demo.SILOS), ["server"]):
        run = Federation(args.out / "killed", "SFVI", args.rounds, False)
        at = sorted(draws.sample(range(2, args.rounds - 20), args.kills))
        done = []
        try:
            for who in run.words:
                run.start(who)
            for number in at:
                _wait(partial(run.reached, number))
                if run.running["server"].poll() is not None:
                    break
                who = draws.choice(victims)
                run.kill(who)
                done.append(len(run.answers()))
                run.start(who)
            fit = run.finished()
        finally:
            run.stop()
        same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(bits(fit), bits(whole), strict=True))
        print(f"{' or '.join(victims)} killed {len(done)} times, at answers {done}: bit for bit {same}", flush=True)


def _wait(ready: Any, seconds: float = 1800.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError("it takes too long: see said.txt in the folders")
        time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["rounds", "ready", "kills"])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/federation_bench"))
    args = parser.parse_args()
    args.out = args.out.absolute()
    {"rounds": rounds, "ready": ready, "kills": kills}[args.what](args)


if __name__ == "__main__":
    main()
