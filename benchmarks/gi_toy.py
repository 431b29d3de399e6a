r"""Uncertainty between the data: chapter 5.1 of the GI-PVI thesis (Bronckers 2022).

.. math:: y_i = x_i^3 + 3 \epsilon_i, \qquad x_i \in [-4, -2] \cup [2, 4]

40 rows, y divided by its sd; a network of two hidden layers of 20 units (ReLU), weights N(0, 1 / inputs), the sd of
the noise known. Ten silos of four rows at random, or one of all. Printed: the sd of the network's function at x = 0,
where there are no data, and at x = 3, over 1,000 draws; GI-PVI with one silo, sequential and synchronous, and a mean
field by ``nf.PVI`` on one silo. Each seed is another data set; medians over seeds, with the smallest and largest.

Run it with ``python -m benchmarks.gi_toy``, or with ``--quick`` for a minute; ``--figure`` draws the first seed.
"""

import argparse
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import numpyro_fed as nf
from benchmarks.common import table

GRID = np.linspace(-6, 6, 121, dtype=np.float32)[:, None]
AT = {0: 60, 3: 90}  # places in the grid
DRAWS = 1000


def problem(seed):
    """Inputs, outputs, the noise's sd, and the model with its layers."""
    rng = np.random.default_rng(seed)
    x = np.concatenate([rng.uniform(-4, -2, 20), rng.uniform(2, 4, 20)])
    y = x**3 + 3 * rng.normal(size=40)
    model, layers = nf.gi.mlp([1, 20, 20, 1], "normal", scale=3 / y.std())
    order = rng.permutation(40)
    return x[order, None].astype("f"), (y / y.std())[order].astype("f"), model, layers


def silos_of(x, y, num):
    return nf.Silos([dict(x=x[i], y=y[i]) for i in np.array_split(np.arange(len(y)), num)])


def function_draws(fit):
    """The network's function on the grid, (draws, grid)."""

    @jax.jit
    def of_one(weights):
        h = jax.nn.relu(GRID @ weights["W1"] + weights["b1"])
        h = jax.nn.relu(h @ weights["W2"] + weights["b2"])
        return (h @ weights["W3"] + weights["b3"])[:, 0]

    return np.asarray(jax.vmap(of_one)(jax.tree.map(jnp.asarray, fit.sample(jax.random.key(1), DRAWS))))


def methods(model, layers, steps):
    """{name: (method, silos, rounds, schedule)}"""
    mean_field = nf.solvers.Gradient(num_steps=steps, num_particles=8, optim=optax.adam(0.01))
    # as many rows for all silos as for one, and as many steps with each
    gi = nf.GIPVI(model, layers, num_inducing=40, local_steps=steps)
    return {
        "GI, one silo": (gi, 1, 10, None),
        "GI, sequential": (nf.GIPVI(model, layers, num_inducing=10, local_steps=steps), 10, 100, "sequential"),
        "GI, synchronous": (nf.GIPVI(model, layers, num_inducing=10, local_steps=steps), 10, 10, None),
        "mean field, one silo": (nf.PVI(model, family="diagonal", solver=mean_field, damping=1.0), 1, 4, None),
    }


def run(seed, steps):
    """{name: draws of the function}"""
    x, y, model, layers = problem(seed)
    found = {}
    for name, (method, num, rounds, schedule) in methods(model, layers, steps).items():
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit = method.run(
                jax.random.key(seed), silos_of(x, y, num), rounds, schedule=schedule, progress_bar=False, check=False
            )
        found[name] = function_draws(fit)
        sds = " ".join(f"sd at {at}: {found[name][:, place].std():.3f}" for at, place in AT.items())
        seconds = time.perf_counter() - began
        print(f"seed {seed} {name}: {sds} rounds {fit.state.round} {fit.verdict.status} {seconds:.0f} s", flush=True)
    return found


def figure(path, seed, found):
    x, y, _, _ = problem(seed)
    fig, axes = plt.subplots(1, len(found), figsize=(3 * len(found), 3), sharex=True, sharey=True, layout="constrained")
    for axis, (name, draws) in zip(axes, found.items(), strict=True):
        mean, sd = draws.mean(0), draws.std(0)
        for times, shade in ((2, 0.15), (1, 0.3)):
            axis.fill_between(GRID[:, 0], mean - times * sd, mean + times * sd, color="C0", alpha=shade, lw=0)
        axis.plot(GRID[:, 0], mean, color="C0")
        axis.plot(x[:, 0], y, "k.", ms=4)
        axis.set(title=name, xlabel="x", ylim=(-4, 4))
    axes[0].set_ylabel("y, in sds")
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main(args):
    steps, seeds = (300, 1) if args.quick else (args.steps, args.seeds)
    results = [run(seed, steps) for seed in range(seeds)]
    if args.figure:
        figure(args.figure, 0, results[0])
    rows, last = [], np.array([result["mean field, one silo"][:, AT[0]].std() for result in results])
    one = np.array([result["GI, one silo"][:, AT[0]].std() for result in results])
    for name in results[0]:
        sds = {at: np.array([result[name][:, place].std() for result in results]) for at, place in AT.items()}
        shown = lambda values: f"{np.median(values):.3f} ({values.min():.3f} to {values.max():.3f})"
        rows.append([name, *map(shown, sds.values()), shown(sds[0] / last), shown(sds[0] / one)])
    print(table(["", "sd at x = 0", "sd at x = 3", "sd at 0 over mean field's", "over one silo's"], rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=4000, help="of a silo in a visit")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--figure", type=Path)
    main(parser.parse_args())
