"""Silos on one device or two: SFVI's rounds with 64 silos of 200 rows and 9 globals, ten draws for each row.

Three processes stand ready, and do the same rounds in turns; the fastest turn of each counts.

==========================  ===========================================================================================
Vmap, one thread            one device, and one thread for it: what a second device is compared with
Vmap, all threads           one device as a user has it: XLA divides large operations among the cores by itself
Sharded, two devices        half of the silos on each
==========================  ===========================================================================================

By the clock this needs two idle cores. On a busy machine read the processor seconds: two devices should take as many
as one, for what they take beyond is the cost of dividing.

Run it with ``python -m benchmarks.sharded``; ``--quick`` for a look, ``--silos 65`` for silos that do not divide.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.common import table

ROOT = Path(__file__).parent.parent
BAR = 1.6
VISITS = 2
ONE_THREAD = {"PJRT_NPROC": "1"}  # read by XLA where it makes its pool of threads
TWO_DEVICES = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"}
WORKERS = {  # engine, environment
    "Vmap, one thread": ("vmap", ONE_THREAD),
    "Vmap, all threads": ("vmap", {}),
    "Sharded, two devices": ("sharded", TWO_DEVICES),
}


# --- a process that does rounds when it is told -----------------------------------------------------------------------


def rounds_of(engine_name, num_silos, num_rows, num_globals, samples):
    """Warm rounds of SFVI on an engine: a function of their number."""
    import jax
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    import optax

    import numpyro_fed as nf
    from numpyro_fed.algorithm import Plan

    def model(x, y=None):
        """Rows with an intercept of their own, each seen a few times."""
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1))
        mu, scale = numpyro.sample("mu", dist.Normal(0, 1)), numpyro.sample("scale", dist.LogNormal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            own = numpyro.sample("own", dist.Normal(0, 1))
            numpyro.sample("y", dist.Bernoulli(logits=x @ beta + (mu + scale * own)[:, None]).to_event(1), obs=y)

    draws, data, slopes = np.random.default_rng(0), {}, np.linspace(-1, 1, num_globals - 2)
    for j in range(num_silos):
        x = draws.normal(size=(num_rows, VISITS, num_globals - 2)).astype("f")
        y = draws.random((num_rows, VISITS)) < 1 / (1 + np.exp(-x @ slopes - draws.normal(size=(num_rows, 1))))
        data[f"silo {j}"] = dict(x=x, y=y.astype("f"))
    engine = {"vmap": nf.engines.Vmap, "sharded": nf.engines.Sharded}[engine_name]()
    method, key = nf.SFVI(model, optim=optax.adam(1e-2), importance_samples=samples, local=["own"]), jax.random.key(0)
    silos = nf.Silos(data)
    split, survey, stack, _ = method.prepare(silos, engine)
    phase = next(one for one in method.compile(split, survey, Plan(names=silos.names)).phases if one.role == "rounds")
    server, states = engine.start(phase.algorithm, key, stack)

    def run(count):
        after = engine.rounds(phase.algorithm, key, stack, server, states, 0, None, count)
        return float(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(after[0]) if leaf.dtype.kind == "f"))

    run(1)
    return run


def worker(args):
    run = rounds_of(args.worker, args.silos, args.rows, args.globals, args.samples)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        clock, cpu = time.perf_counter(), time.process_time()
        total = run(int(line))
        print(json.dumps([time.perf_counter() - clock, time.process_time() - cpu, total]), flush=True)


# --- the comparison ---------------------------------------------------------------------------------------------------


def started(name, args, stack):
    """A worker, and a function that lets it do rounds: seconds by the clock, of processors, and a sum to compare."""
    engine, more = WORKERS[name]
    command = [sys.executable, "-m", "benchmarks.sharded", "--worker", engine]
    for option in ("silos", "rows", "globals", "samples"):
        command += [f"--{option}", str(getattr(args, option))]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process = stack.enter_context(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **more}, **pipes))
    stack.callback(process.stdin.close)  # it ends when there is nothing more to read

    def told():
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name}: the process ended")
        return json.loads(line)

    def ask(count):
        process.stdin.write(f"{count}\n")
        process.stdin.flush()
        return told()

    told()
    return ask


def measured(args):
    """Of each worker: milliseconds a round by the clock, and of processors."""
    found = {name: [] for name in WORKERS}
    with ExitStack() as stack:
        ask = {name: started(name, args, stack) for name in WORKERS}
        for _ in range(args.turns):
            for name in WORKERS:
                found[name].append(ask[name](args.rounds))
    sums = [turns[0][2] for turns in found.values()]
    np.testing.assert_allclose(sums, sums[0], rtol=1e-3)  # float32, after all rounds
    return {name: np.min(np.array(turns)[:, :2], axis=0) / args.rounds * 1e3 for name, turns in found.items()}


def main(args):
    best = measured(args)
    one = best["Vmap, one thread"]
    rows = [
        [name, f"{clock:.3f}", f"{cpu:.3f}", f"{one[0] / clock:.2f}", f"{cpu / one[1]:.2f}"]
        for name, (clock, cpu) in best.items()
    ]
    print(table(["engine", "ms a round", "processor ms a round", "times as fast", "processor, of one thread"], rows))
    times = one[0] / best["Sharded, two devices"][0]
    print(f"\ntwo devices: {times:.2f} times as fast as one; the bar on two idle cores is {BAR}")


def parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--silos", type=int, default=64)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--globals", type=int, default=9)
    parser.add_argument("--samples", type=int, default=10, help="of a row's intercept, to weigh")
    parser.add_argument("--rounds", type=int, default=64, help="of a turn")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--worker", choices=["vmap", "sharded"], help="be one of the processes")
    return parser


if __name__ == "__main__":
    options = parser().parse_args()
    if options.quick:
        options.rounds, options.turns = min(options.rounds, 16), min(options.turns, 2)
    worker(options) if options.worker else main(options)
