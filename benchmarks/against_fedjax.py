r"""Federated averaging beside FedJAX: rounds per second, the same task on the same machine.

FedJAX 0.0.17 needs an older JAX, so it runs in an environment of its own (``benchmarks/fedjax_peer.py`` says how to
make it). Two tasks: (a) a multinomial logistic regression, 1,000 silos of 60 rows, 100 features; (b) an MLP with two
hidden layers of 200, 100 silos of 600 rows, 784 features. Ten classes, cohorts of ten silos, 50 steps of SGD with
batches of 20.

Ours is timed twice: with its data in memory, and from a store that is read while the device works. Rounds per second
are those of a run without its beginning: two runs, warm, of which one has ``--more`` rounds more. For (b), which takes
about a third of a second a round, ``--tasks b --rounds 10 --more 30`` will do.

``python -m benchmarks.against_fedjax --python fedjax-env/bin/python``
"""

import argparse
import itertools
import json
import subprocess
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import init_to_value

import numpyro_fed as nf
from benchmarks import common

PEER = Path(__file__).with_name("fedjax_peer.py")


class Network:
    """An MLP (``hidden`` 0: a linear model) with a flat prior, its start that of FedJAX's."""

    def __init__(self, num_features, hidden, num_classes=10, seed=0):
        rng = np.random.default_rng(seed)
        sizes = [num_features, *([hidden, hidden] if hidden else []), num_classes]
        scale = lambda n: np.sqrt(2 / n) if hidden else 0.0
        self.start = {}
        for i, (n, m) in enumerate(itertools.pairwise(sizes)):
            self.start[f"w{i}"] = (scale(n) * rng.normal(size=(n, m))).astype(np.float32)
            self.start[f"b{i}"] = np.zeros(m, np.float32)
        self.num_layers = len(sizes) - 1

    def __call__(self, x, y):
        for i in range(self.num_layers):
            w = numpyro.sample(f"w{i}", dist.Normal(0, 1).expand(self.start[f"w{i}"].shape).to_event(2))
            b = numpyro.sample(f"b{i}", dist.Normal(0, 1).expand(self.start[f"b{i}"].shape).to_event(1))
            x = x @ w + b
            x = jax.nn.relu(x) if i < self.num_layers - 1 else x
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=x), obs=y)


def make_task(num_silos, rows, num_features, seed=0):
    """Classes by a random linear rule, silos whose features are shifted."""
    rng = np.random.default_rng(seed)
    silo = np.repeat(np.arange(num_silos), rows)
    x = rng.normal(size=(num_silos * rows, num_features)) + 0.3 * rng.normal(size=(num_silos, num_features))[silo]
    scores = x @ rng.normal(size=(num_features, 10)) / np.sqrt(num_features) + 0.5 * rng.gumbel(size=(len(x), 10))
    return dict(x=x.astype(np.float32), y=np.argmax(scores, axis=1).astype(np.int32), silo=silo.astype(np.int32))


def ours(task, hidden, args, stored):
    """Rounds per second, and accuracy on all rows after ``--rounds`` rounds."""
    network = Network(task["x"].shape[1], hidden)
    method = nf.FedAvg(
        network,
        optim=optax.sgd(args.learning_rate),
        batch_size=args.batch_size,
        local_steps=args.local_steps,
        prior=False,
        init_loc_fn=init_to_value(values=network.start),
    )
    if stored:
        silos = nf.SiloStore.from_arrays(task["silo"], x=task["x"], y=task["y"])
    else:
        silos = nf.split(task["silo"], x=task["x"], y=task["y"])

    def seconds(num_rounds):
        began = time.perf_counter()
        fit = method.run(
            jax.random.key(0), silos, num_rounds, schedule=nf.schedules.sampled(args.cohort), progress_bar=False
        )
        jax.block_until_ready(fit.state.server.z)
        return time.perf_counter() - began, fit

    _, fit = seconds(args.rounds)  # compiles
    data = dict(x=task["x"], y=task["y"])
    accuracy = float(nf.evaluate(fit, data, num_samples=1).loc["point", "accuracy"])
    rates = []
    for _ in range(args.repeats):
        few, many = seconds(args.rounds)[0], seconds(args.rounds + args.more)[0]
        rates.append(args.more / (many - few))
    return max(rates), accuracy


def theirs(path, hidden, args):
    """FedJAX's, from its own environment; None without one."""
    if args.python is None:
        return None
    command = [args.python, str(PEER), str(path), "--hidden", str(hidden), "--rounds", str(args.rounds)]
    for name in ("cohort", "local_steps", "batch_size", "learning_rate", "repeats"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(out.strip().splitlines()[-1])


TASKS = {"a": dict(num_silos=1000, rows=60, num_features=100), "b": dict(num_silos=100, rows=600, num_features=784)}
HIDDEN = {"a": 0, "b": 200}


def parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="of the environment with FedJAX")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS))
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--local-steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--more", type=int, default=100, help="rounds that are timed of ours")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts, on both sides")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    return parser


def main(args):
    rows = []
    for name in args.tasks:
        task = make_task(**TASKS[name])
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "task.npz"
            np.savez(path, **task)
            peer = theirs(path, HIDDEN[name], args)
        if peer is not None:
            versions = peer["versions"]
            label = f"FedJAX {versions['fedjax']}, JAX {versions['jax']}{' (patched)' if peer['patched'] else ''}"
            rows.append([name, label, f"{peer['rounds_per_second']:.1f}", "1", f"{peer['accuracy']:.3f}"])
        for stored in (False, True):
            rate, accuracy = ours(task, HIDDEN[name], args, stored)
            ratio = "" if peer is None else f"{rate / peer['rounds_per_second']:.2f}"
            where = "from a store" if stored else "in memory"
            rows.append([name, f"nf.FedAvg, {where}, JAX {jax.__version__}", f"{rate:.1f}", ratio, f"{accuracy:.3f}"])
    print(common.table(["task", "", "rounds a second", "ratio", "accuracy"], rows))
    if args.python is None:
        print("FedJAX was not run: pass --python, the interpreter of its environment (benchmarks/fedjax_peer.py)")


if __name__ == "__main__":
    main(parser().parse_args())
