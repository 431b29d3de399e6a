"""What a call costs over NVIDIA FLARE with certificates, on one machine; and a run whose workers are killed.

    make .venv/flare/.installed
    PYTHONPATH=tests/remote:.venv/flare .venv/bin/python -m benchmarks.flare 128 10000 1000000
    PYTHONPATH=tests/remote:.venv/flare .venv/bin/python -m benchmarks.flare --kills 10

Calls are those of tests/remote/flare_standin.py: as many bytes each way, to three silos at once, all states on disk.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flare_deployment
import flare_study
from flare_deployment import Deployment
from flare_standin import ROUNDS, STAND_INS, StandIn
from flare_study import SILOS

from numpyro_fed.remote.flare import CHECKPOINT
from numpyro_fed.remote.flare_jobs import Job, run


def say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


def processes(deployed: Deployment) -> dict[int, tuple[str, int, float]]:
    """Kind, MB and CPU seconds of each process."""
    found = {}
    for pid in deployed.processes("nvflare"):
        try:
            kind = re.search(rb"(\w+_train|\w+_process)", Path(f"/proc/{pid}/cmdline").read_bytes())
            memory = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
            ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
        except OSError:
            continue
        if kind and memory:
            seconds = sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
            found[pid] = kind[1].decode(), int(memory[1]) // 1024, seconds
    return found


def wire(port: str) -> dict[str, tuple[int, int]]:
    """Bytes up and down, so far, of each connection to the server's port."""
    lines = subprocess.run(["ss", "-tin"], capture_output=True, text=True, check=True).stdout.splitlines()[1:]
    found = {}
    for head, tail in zip(lines[::2], lines[1::2], strict=False):
        if head.split()[4].endswith(f":{port}"):
            numbers = [re.search(rf"{what}:(\d+)", tail) for what in ("bytes_sent", "bytes_received")]
            up, down = (int(number[1]) if number else 0 for number in numbers)
            found[head.split()[3]] = up, down
    return found


def calls(deployed: Deployment, size: int) -> None:
    """One job: milliseconds, CPU, memory and bytes of a round."""
    port = re.search(r"fed_learn_port: (\d+)", (deployed.folder / "project.yml").read_text())[1]  # type: ignore[index]
    path = deployed.folder / "server" / "runs" / f"calls-{size}" / CHECKPOINT.format("")
    looks: list[tuple[int, dict, dict]] = []

    def look() -> None:
        for at in (5, ROUNDS - 8):
            while (now := json.loads(path.read_text())["round"] if path.exists() else 0) < at:
                time.sleep(0.01)
            looks.append((now, processes(deployed), wire(port)))

    watching = threading.Thread(target=look, daemon=True)
    watching.start()
    began, job = time.time(), StandIn("none", "fast", f"calls-{size}", SILOS, num_rounds=size)
    out = run(job, deployed.lead, deployed.user, deployed.folder / "calls.json", told=lambda line: None)
    watching.join(timeout=10)
    told = json.loads(out.read_text())
    milliseconds = [1000 * second for second in told["seconds"][1:]]
    say(f"{size} bytes: {statistics.median(milliseconds):.1f} ms a round, least {min(milliseconds):.1f}")
    say(f"  first call {told['began'] - began:.0f} s after submission; load {os.getloadavg()[0]:.1f}")
    (first, before, sent), (last, after, then) = looks
    for pid, (kind, memory, cpu) in after.items():
        used = 1000 * (cpu - before.get(pid, (kind, memory, cpu))[2]) / (last - first)
        say(f"  {kind:16} {memory:5} MB {used:6.1f} ms CPU a round")
    both = then.keys() & sent.keys()
    up, down = (sum(then[one][i] - sent[one][i] for one in both) / (last - first) / len(SILOS) for i in (0, 1))
    say(f"  on the wire, a silo and round: {up:.0f} bytes up, {down:.0f} down")


def kills(deployed: Deployment, number: int) -> None:
    """SFVI of 600 rounds, with workers killed at random times: the posterior of an undisturbed run?"""
    draws, killed = random.Random(1), 0
    job = Job("trial", "SFVI", "kills", SILOS, num_rounds=600, checkpoint_every=10, check=False)
    path = deployed.folder / "server" / "runs" / job.run / CHECKPOINT.format("")
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(run, job, deployed.lead, deployed.user, deployed.folder / "kills.npz", told=say)
        while not going.done() and killed < number:
            who, seen, wanted = draws.choice(("localhost", *SILOS)), set[int](), draws.randint(2, 5)
            while not going.done() and len(seen) < wanted:
                seen |= {path.stat().st_mtime_ns} if path.exists() else set()
                time.sleep(0.01)
            worker = deployed.worker(who)
            if worker is not None and not going.done():
                os.kill(worker, signal.SIGKILL)
                killed += 1
                say(f"killed the worker of {who}")
                while deployed.worker(who) == worker:
                    time.sleep(0.05)
        found = going.result()
    other = flare_study.direct(deployed.folder / "direct", "SFVI", 600, check=False)
    same = flare_study.same(found, other, deployed.folder / "server" / "studies" / "trial.py", "SFVI")
    say(f"{killed} workers killed; the same to the last bit as in one process: {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", type=int, help="bytes of a call, each way")
    parser.add_argument("--kills", type=int, default=0, help="workers to kill in a run of SFVI")
    args = parser.parse_args()
    flare_deployment.LONGEST = 3600.0
    with tempfile.TemporaryDirectory() as folder:
        flare_study.write(Path(folder))
        for name in SILOS:
            (Path(folder) / "silos" / name / "data.csv").touch()
        with Deployment(Path(folder), SILOS, STAND_INS) as deployed:
            for size in args.sizes:
                calls(deployed, size)
            if args.kills:
                kills(deployed, args.kills)


if __name__ == "__main__":
    main()
