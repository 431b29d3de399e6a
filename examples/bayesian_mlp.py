"""A Bayesian network of ten silos, most of which have hardly seen more than one class.

Two classes of points lie like two half moons, and ten silos hold some of them each. Labels are skewed: most silos have
next to nothing of one class, so none of them could learn alone where the border runs, and networks that are trained
apart and averaged pull in ten directions. A posterior over the weights helps twice. The silos' factors multiply, so
that what one silo knows well, the others do not undo; and where nobody has data near the border, networks drawn from
the posterior disagree, so that a user sees a probability near 1/2 in place of a confident guess.

The network is a flax nnx module; NumPyro's ``random_nnx_module`` puts a prior on its weights, and the methods take it
like any other model. Hidden units can change places, so a posterior has many modes that say the same. The prior is
centred at random weights rather than at zero: that picks one of them, the same for all silos.

The example prints where every site lives and a table of test scores, and draws for every method the probability of the
second class over the plane, and how far networks drawn from the posterior disagree about it. The first column is what
a silo would learn on its own.

Run it with ``python examples/bayesian_mlp.py``; ``--help`` lists the arguments. It needs flax: ``pip install
'numpyro_fed[flax]'``.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pandas as pd
from numpyro.contrib.module import random_nnx_module
from numpyro.infer import init_to_median

import numpyro_fed as nf
from numpyro_fed.judge.evaluate import evaluate

try:
    from flax import nnx
except ImportError as error:
    raise ImportError("this example's network is a flax module: pip install 'numpyro_fed[flax]'") from error

HIDDEN = 16
SPREAD = 1.0  # sd of every weight around its centre


class MLP(nnx.Module):
    """Two hidden layers of tanh units; returns the second class's log odds."""

    def __init__(self, rngs):
        self.first = nnx.Linear(2, HIDDEN, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, HIDDEN, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.tanh(self.second(jnp.tanh(self.first(x)))))[..., 0]


NETWORK = MLP(nnx.Rngs(0))
LAYERS = nnx.to_pure_dict(nnx.state(NETWORK, nnx.Param))
CENTRE = {f"{layer}.{name}": value for layer, weights in LAYERS.items() for name, value in weights.items()}


def model(x, label=None):
    prior = {name: dist.Normal(value, SPREAD) for name, value in CENTRE.items()}
    network = random_nnx_module("mlp", NETWORK, prior=prior)
    log_odds = network(x)
    numpyro.deterministic("probability", jax.nn.sigmoid(log_odds))
    with numpyro.plate("points", x.shape[0]):
        numpyro.sample("label", dist.Bernoulli(logits=log_odds), obs=label)


# --- methods ----------------------------------------------------------------------------------------------------------


def methods(args):
    """{name: (method, rounds)}. Another method joins by a line."""
    diagonal = nf.guides.StructuredNormal(global_cov="diagonal")
    falling = optax.adam(optax.cosine_decay_schedule(0.02, args.sfvi_rounds, 0.01))
    return {
        "SEP": (nf.SEP(model, family="diagonal", solver=nf.solvers.NGVI(num_steps=args.num_steps)), args.num_rounds),
        "SFVI": (nf.SFVI(model, guide=diagonal, optim=falling), args.sfvi_rounds),
        "FedPA": (nf.FedPA(model, batch_size=10, init_loc_fn=init_to_median), args.num_rounds),
        "FedAvg": (nf.FedAvg(model, batch_size=10, init_loc_fn=init_to_median), args.num_rounds),
    }


ALONE = "SFVI"  # the method of the silo on its own


# --- data -------------------------------------------------------------------------------------------------------------


def moons(draws, label):
    """Points of two half moons, one above and one below, with noise."""
    angle = draws.uniform(0, np.pi, len(label))
    x = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    x = np.where(label[:, None] == 1, [1.0, 0.5] - x, x) - [0.5, 0.25]
    return (2 * x + 0.3 * draws.normal(size=x.shape)).astype(np.float32)


def skewed_silos(draws, num_silos, num_points, concentration=0.3):
    """Every silo has as many points; its share of the second class is a draw of a Beta(c, c), near 0 or 1."""
    data = {}
    for j in range(num_silos):
        share = np.clip(draws.beta(concentration, concentration), 0.02, 0.98)
        label = draws.binomial(1, share, num_points).astype(np.int32)
        data[f"silo {j}"] = dict(x=moons(draws, label), label=label)
    return nf.Silos(data)


# --- what comes out ---------------------------------------------------------------------------------------------------


def scores(fit, test, seconds, num_samples):
    found = evaluate(fit, test, num_samples=num_samples).loc["marginalised"]
    return {
        "accuracy": found["accuracy"],
        "log likelihood": found["log_likelihood"],
        "calibration error": found["ece"],
        "rounds": fit.num_rounds,
        "MB sent": (fit.history["bytes_up"].sum() + fit.history["bytes_down"].sum()) / 1e6,
        "seconds": seconds,
    }


def draw(fits, silos, num_samples):
    """A column a fit: the probability of the second class, and its sd over networks drawn from the posterior."""
    side = np.linspace(-4, 4, 81, dtype=np.float32)
    grid = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    figure, axes = plt.subplots(2, len(fits), figsize=(1 + 3.2 * len(fits), 6.4), squeeze=False, layout="constrained")
    for column, (name, fit) in zip(axes.T, fits.items(), strict=True):
        found = fit.predict(jax.random.key(2), dict(x=grid), num_samples=num_samples)["probability"]
        mean, sd = (np.asarray(part).reshape(81, 81) for part in (found.mean(axis=0), found.std(axis=0)))
        column[0].contourf(side, side, mean, np.linspace(0, 1, 21), cmap="RdBu_r")
        column[1].contourf(side, side, sd, np.linspace(0, 0.5, 21), cmap="Greys")
        seen = [silos[silo] for silo in fit.state.names]
        x, label = (np.concatenate([silo[part] for silo in seen]) for part in ("x", "label"))
        for axis in column:
            axis.contour(side, side, mean, [0.5], colors="black", linewidths=1)
            for k, colour in ((0, "tab:blue"), (1, "tab:red")):
                axis.scatter(*x[label == k].T, s=12, c=colour, edgecolors="white", linewidths=0.4)
            axis.set(aspect="equal", xticks=[], yticks=[])
        column[0].set_title(name)
    for row, text in zip(axes, ("probability of the second class", "its sd between networks"), strict=True):
        figure.colorbar(row[0].collections[0], ax=row, label=text, ticks=plt.MaxNLocator(5))
    return figure


def main(args):
    draws = np.random.default_rng(args.seed)
    silos = skewed_silos(draws, args.num_silos, args.num_points)
    label = draws.integers(0, 2, 2000)
    test = dict(x=moons(draws, label), label=label)
    shares = ", ".join(f"{np.mean(silos[name]['label']):.0%}" for name in silos.names)
    print(f"{silos.num_silos} silos of {args.num_points} points; of the second class: {shares}", end="\n\n")
    print(nf.partition(model, silos), end="\n\n")

    chosen = methods(args)
    alone = nf.Silos({silos.names[0]: silos[silos.names[0]]})
    runs = {f"{silos.names[0]} alone": (*chosen[ALONE], alone)}
    runs |= {name: (method, num_rounds, silos) for name, (method, num_rounds) in chosen.items()}
    fits, rows = {}, {}
    for name, (method, num_rounds, data) in runs.items():
        began = time.perf_counter()
        fits[name] = method.run(jax.random.key(args.seed), data, num_rounds)
        rows[name] = scores(fits[name], test, time.perf_counter() - began, args.num_samples)
    table = pd.DataFrame.from_dict(rows, orient="index")
    print(table.round(3).to_string(), end="\n\n")

    path = Path(args.out) / "bayesian_mlp.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(fits, silos, args.num_samples).savefig(path, dpi=150)
    print(f"figure: {path}")
    return table


def parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-silos", type=int, default=10)
    parser.add_argument("--num-points", type=int, default=40, help="in each silo")
    parser.add_argument("--num-rounds", type=int, default=60, help="of SEP")
    parser.add_argument("--num-steps", type=int, default=50, help="of SEP's optimiser in a silo, a round")
    parser.add_argument("--sfvi-rounds", type=int, default=3000)
    parser.add_argument("--num-samples", type=int, default=200, help="networks drawn from a posterior")
    parser.add_argument("--out", default="out", help="folder for the figure")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
