"""FedJAX's half of a comparison of speed: how many rounds of FedAvg does FedJAX run in a second?

This script imports FedJAX, JAX and NumPy only, and is run by the Python of an environment of its own. FedJAX 0.0.17
calls ``jax.tree_map``, which JAX removed in 0.6.0: JAX 0.5.3 is the newest on which it runs as published.

    python3.11 -m venv fedjax-env
    fedjax-env/bin/pip install fedjax==0.0.17 jax==0.5.3 jaxlib==0.5.3 dm-haiku==0.0.17 optax==0.2.8 numpy==2.4.6
    fedjax-env/bin/python benchmarks/fedjax_peer.py task.npz --cohort 10 --local-steps 50 --batch-size 20 --rounds 50

On a newer JAX the script puts the one missing name back (``"patched": true`` in what it prints), and FedAvg runs with
the backend ``jit``; so both sides of a comparison can stand on the same JAX.

The file holds x (n, p) float32, y (n,) int32 labels from 0, and silo (n,) int. A round samples ``--cohort`` silos
uniformly without replacement; each takes ``--local-steps`` steps of SGD on the mean cross-entropy of shuffled batches,
and the server averages their models, weighted by the numbers of rows. The model is multinomial logistic regression, or
with ``--hidden`` a network of two hidden layers of that width, with ReLU.

Rounds are timed warm, from the initial model on, with all that FedJAX does in a round: sampling, shuffling, batching.
Of several ``--repeats`` the fastest counts. Printed is one line of JSON; loss and accuracy are those of the final model
on all rows. FedJAX shuffles by an unseeded generator, so they differ a little from run to run.

The backend ``jit``, FedJAX's default, runs silo after silo; ``pmap`` runs as many at a time as there are ``--devices``,
each a part of the CPU. What is fastest depends on the task and the machine: compare both, and these flags of XLA, which
bring back the CPU runtime of earlier versions and run operations on one thread:

    XLA_FLAGS="--xla_cpu_use_thunk_runtime=false --xla_cpu_multi_thread_eigen=false"
"""

import argparse
import json
import os
import time
import warnings
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np

warnings.filterwarnings("ignore", message="jax.tree_map is deprecated", category=DeprecationWarning)
PATCHED = not hasattr(jax, "tree_map")
if PATCHED:
    jax.tree_map = jax.tree_util.tree_map

import fedjax  # noqa: E402


def federated_data(x, y, silo):
    """The rows of every silo."""
    order = np.argsort(silo, kind="stable")
    labels, starts = np.unique(silo[order], return_index=True)
    parts = np.split(order, starts[1:])
    return fedjax.InMemoryFederatedData(
        {int(label): {"x": x[rows], "y": y[rows]} for label, rows in zip(labels, parts, strict=True)}
    )


def network(sizes):
    """Logistic regression when there are two sizes, else a network with ReLU between its layers."""

    def init(key):
        keys = jax.random.split(key, len(sizes) - 1)
        scales = [0.0] if len(sizes) == 2 else [(2 / size) ** 0.5 for size in sizes[:-1]]
        return [
            {"w": scale * jax.random.normal(key, (rows, columns)), "b": jnp.zeros(columns)}
            for key, scale, rows, columns in zip(keys, scales, sizes[:-1], sizes[1:], strict=True)
        ]

    def logits(params, batch, key=None):
        *hidden, last = params
        values = batch["x"]
        for layer in hidden:
            values = jax.nn.relu(values @ layer["w"] + layer["b"])
        return values @ last["w"] + last["b"]

    def cross_entropy(batch, logits):
        """One loss per row; FedJAX takes the mean over the batch."""
        return fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], logits)

    metrics = {"loss": fedjax.metrics.CrossEntropyLoss(), "accuracy": fedjax.metrics.Accuracy()}
    return fedjax.Model(init, logits, logits, cross_entropy, metrics)


def fed_avg(model, args):
    """FedJAX's FedAvg, with the chosen way of going over the silos of a round."""
    # Without num_epochs=None, FedJAX would stop after one pass over a silo's rows.
    batches = fedjax.ShuffleRepeatBatchHParams(batch_size=args.batch_size, num_epochs=None, num_steps=args.local_steps)
    with fedjax.for_each_client_backend(args.backend):
        return fedjax.algorithms.fed_avg.federated_averaging(
            grad_fn=fedjax.model_grad(model),
            client_optimizer=fedjax.optimizers.sgd(args.learning_rate),
            server_optimizer=fedjax.optimizers.sgd(1.0),
            client_batch_hparams=batches,
        )


def run(algorithm, params, data, args, rounds):
    """Some rounds from the given parameters. Returns (the parameters after them, seconds)."""
    state = algorithm.init(params)
    sampler = fedjax.client_samplers.UniformGetClientSampler(data, args.cohort, seed=args.seed)
    began = time.perf_counter()
    for _ in range(rounds):
        state, _ = algorithm.apply(state, sampler.sample())
    jax.block_until_ready(state.params)
    return state.params, time.perf_counter() - began


def main(args):
    if args.backend == "pmap":
        jax.config.update("jax_num_cpu_devices", args.devices)
        jax.config.update("jax_pmap_no_rank_reduction", False)  # FedJAX expects shards without the leading axis
    with np.load(args.path) as file:
        x, y, silo = file["x"].astype(np.float32), file["y"].astype(np.int32), file["silo"]
    data = federated_data(x, y, silo)
    hidden = [args.hidden] * 2 if args.hidden else []
    model = network([x.shape[1], *hidden, int(y.max()) + 1])
    algorithm = fed_avg(model, args)
    params = model.init(jax.random.PRNGKey(args.seed))
    run(algorithm, params, data, args, args.warmup)
    results = [run(algorithm, params, data, args, args.rounds) for _ in range(args.repeats)]
    fitted, seconds = min(results, key=lambda result: result[1])
    final = fedjax.evaluate_model(model, fitted, [{"x": x, "y": y}])
    print(
        json.dumps(
            {
                "rounds_per_second": args.rounds / seconds,
                "seconds": seconds,
                "loss": float(final["loss"]),
                "accuracy": float(final["accuracy"]),
                "backend": args.backend,
                "devices": jax.local_device_count(),
                "patched": PATCHED,
                "xla_flags": os.environ.get("XLA_FLAGS", ""),
                "versions": {name: version(name) for name in ("fedjax", "jax", "jaxlib", "numpy", "optax")},
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", help="an npz file with x, y and silo")
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--local-steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--backend", choices=("jit", "pmap"), default="jit")
    parser.add_argument("--devices", type=int, default=2, help="for the backend pmap")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before timing")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
