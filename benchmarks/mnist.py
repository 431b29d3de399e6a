r"""Multinomial regression on MNIST in silos: Table 1 and Figure 3 of the SFVI paper.

.. math::

    W_{jk} \sim N(0, \sigma_W^2), \quad b_j \sim N(0, \sigma_b^2), \quad
    c_i \sim \mathrm{Categorical}(\mathrm{softmax}(W x_i + b))

with :math:`\theta = (\sigma_W, \sigma_b)` learned and independent normals for the 7,850 globals. Four ways of fitting
are compared: every silo on its own, averaged once (SFVI-Avg with one round), averaged 50 times, and SFVI.

Accuracy has two readings, and the paper does not say which is its own: of the class with the highest posterior
predictive probability (softmax averaged over draws), and of single draws of (W, b), averaged. Both are printed.

Figure 3: five rounds of SFVI-Avg as the start of SFVI, against SFVI from scratch.

Run it with ``python -m benchmarks.mnist``, or with ``--quick`` for seconds instead of an hour.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

import numpyro_fed as nf
from benchmarks import common

SOURCE = (
    "mnist.npz holds the arrays x_train, y_train, x_test, y_test (uint8) of the usual 60,000 and 10,000 images, as in "
    "https://storage.googleapis.com/tensorflow/tf-keras-datasets/mnist.npz"
)
WINDOW = 200  # steps over which minibatch losses are averaged, where the level of a loss matters


def model(image, digit=None):
    sigma_w = numpyro.param("sigma_W", 0.1, constraint=dist.constraints.positive)
    sigma_b = numpyro.param("sigma_b", 0.1, constraint=dist.constraints.positive)
    w = numpyro.sample("W", dist.Normal(0, sigma_w).expand([10, image.shape[1]]).to_event(2))
    b = numpyro.sample("b", dist.Normal(0, sigma_b).expand([10]).to_event(1))
    with numpyro.plate("images", image.shape[0]):
        numpyro.sample("digit", dist.Categorical(logits=image @ w.T + b), obs=digit)


# --- data -------------------------------------------------------------------------------------------------------------


class Images(NamedTuple):
    image: np.ndarray  # (n, 784) float32 in [0, 1]
    digit: np.ndarray  # (n,) int32


def load():
    """Training and test images."""
    with np.load(common.find("mnist.npz", SOURCE)) as file:
        flat = lambda x: x.reshape(len(x), -1).astype(np.float32) / 255
        return tuple(Images(flat(file[f"x_{part}"]), file[f"y_{part}"].astype(np.int32)) for part in ("train", "test"))


def make_silos(train, num_silos, num_images, seed):
    """``num_images`` images for each silo, at random and without overlap."""
    chosen = np.random.default_rng(seed).permutation(len(train.digit))[: num_silos * num_images]
    names = np.repeat([f"silo {j:02d}" for j in range(num_silos)], num_images)
    return nf.split(names, image=train.image[chosen], digit=train.digit[chosen])


def pooled(silos):
    """The images of all silos."""
    return Images(*(np.concatenate([silos[name][part] for name in silos.names]) for part in Images._fields))


# --- accuracy ---------------------------------------------------------------------------------------------------------


class Accuracy(NamedTuple):
    averaged: float  # % right by the softmax averaged over draws
    single: float  # % right by one draw, mean over draws


@jax.jit
def _accuracies(w, b, image, digit):
    def one(total, draw):
        probability = jax.nn.softmax(image @ draw[0].T + draw[1])
        return total + probability, jnp.mean(jnp.argmax(probability, axis=1) == digit)

    total, single = jax.lax.scan(one, jnp.zeros((image.shape[0], 10)), (w, b))
    return jnp.mean(jnp.argmax(total, axis=1) == digit), jnp.mean(single)


def accuracy(draws, images):
    """Both readings of the accuracy of draws {"W": (S, 10, 784), "b": (S, 10)}, in %."""
    return Accuracy(*(100 * float(value) for value in _accuracies(draws["W"], draws["b"], *images)))


# --- the four methods -------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    num_silos: int
    num_images: int  # in each
    batch_size: int


SIZES = (Size(25, 200, 50), Size(5, 10_000, 100))
METHODS = ("Independent", "SFVI-Avg, one round", "SFVI-Avg", "SFVI")
# Test accuracies of the paper's Table 1, in %.
PAPER = {
    size: dict(zip(METHODS, row, strict=True))
    for size, row in zip(SIZES, ((51.5, 63.9, 69.3, 84.0), (86.8, 90.4, 90.2, 90.8)), strict=True)
}


def methods(size, args, optim):
    """{name: (method, rounds)}. All take the same minibatches and Adam.

    SFVI's steps fall to a hundredth: its last q is its answer, whereas the others average over silos.
    """
    settings = dict(guide=nf.guides.StructuredNormal(global_cov="diagonal"), optim=optim, batch_size=size.batch_size)
    falling = optax.adam(optax.cosine_decay_schedule(args.step, args.steps, 0.01))
    averaging = lambda steps: nf.SFVIAvg(model, local_steps=steps, **settings)
    made = (
        (nf.Independent(model, **settings), args.steps_alone),
        (averaging(args.steps_alone), 1),
        (averaging(args.local_steps), args.rounds),
        (nf.SFVI(model, **{**settings, "optim": falling}), args.steps),
    )
    return dict(zip(METHODS, made, strict=True))


class Row(NamedTuple):
    """One method on one seed; of silos on their own, averages over the silos."""

    test: Accuracy
    train: Accuracy
    sigma_w: float
    sigma_b: float
    megabytes_up: float
    seconds: float


def measure(fit, silos, test, seed, num_samples):
    draws = fit.sample(jax.random.key(seed + 1000), num_samples)
    sigmas = (float(fit.params[name]) for name in ("sigma_W", "sigma_b"))
    return Row(accuracy(draws, test), accuracy(draws, pooled(silos)), *sigmas, common.megabytes_up(fit), fit.seconds)


def average(rows):
    return jax.tree.map(lambda *values: float(np.mean(values)), *rows)


def run(name, method, rounds, silos, test, seed, num_samples):
    """A method's row of the table."""
    began = time.perf_counter()
    fit = method.run(jax.random.key(seed), silos, rounds, progress_bar=False)
    seconds = time.perf_counter() - began
    if name != "Independent":
        return measure(fit, silos, test, seed, num_samples)._replace(seconds=seconds)
    own = {one: nf.Silos({one: silos[one]}) for one in silos.names}  # trained on, and judged by, its own images
    rows = [measure(fit[one], own[one], test, seed, num_samples) for one in silos.names]
    return average(rows)._replace(megabytes_up=0.0, seconds=seconds)


def table_1(train, test, args, optim):
    lines = []
    for size in args.sizes:
        for name, (method, rounds) in methods(size, args, optim).items():
            rows = []
            for seed in range(args.seeds):
                silos = make_silos(train, size.num_silos, size.num_images, seed)
                rows.append(run(name, method, rounds, silos, test, seed, args.num_samples))
                print(f"J={size.num_silos} {name}, seed {seed}: {rows[-1]}", flush=True)
            several = lambda get, digits=1, rows=rows: common.over_seeds([get(row) for row in rows], digits)
            steps = getattr(method, "local_steps", None)
            lines.append(
                [
                    size.num_silos,
                    size.num_images,
                    name if steps is None else f"{name} ({steps:,} local steps)",
                    0 if name == "Independent" else f"{rounds:,}",
                    several(lambda row: row.test.averaged),
                    several(lambda row: row.test.single),
                    several(lambda row: row.train.averaged),
                    several(lambda row: row.train.single),
                    PAPER.get(size, {}).get(name, ""),
                    several(lambda row: row.sigma_w, 3),
                    several(lambda row: row.sigma_b, 3),
                    f"{np.mean([row.megabytes_up for row in rows]):.1f}",
                    f"{np.mean([row.seconds for row in rows]):.0f}",
                ]
            )
    columns = ["J", "images a silo", "method", "rounds", "test, averaged softmax", "test, single draws"]
    columns += [
        "train, averaged softmax",
        "train, single draws",
        "paper, test",
        "sigma_W",
        "sigma_b",
        "MB up",
        "seconds",
    ]
    common.write(args.out, "mnist_table.md", common.table(columns, lines))
    return lines


# --- the warm start ---------------------------------------------------------------------------------------------------


def levels(loss, shares=(0.05, 0.02, 0.01), window=WINDOW):
    """Losses from which so much of the way down is still to go."""
    smoothed = common.smooth(loss, window)
    bottom = float(np.mean(smoothed[-max(len(smoothed) // 20, 1) :]))
    return {share: bottom + share * (float(loss[0]) - bottom) for share in shares}


def figure_3(train, args, optim):
    """SFVI from scratch and from a few rounds of SFVI-Avg: curves, and steps until the same losses."""
    lines = []
    figure, axes = plt.subplots(1, len(args.sizes), figsize=(5 * len(args.sizes), 3.5), squeeze=False)
    for axis, size in zip(axes[0], args.sizes, strict=True):
        method, steps = methods(size, args, optim)["SFVI"]
        averaging, _ = methods(size, args, optim)["SFVI-Avg"]
        silos = make_silos(train, size.num_silos, size.num_images, 0)
        scratch = common.loss(method.run(jax.random.key(0), silos, steps, progress_bar=False))
        begun = averaging.run(jax.random.key(1), silos, args.warm_rounds, progress_bar=False)
        warm = common.loss(method.run(jax.random.key(0), silos, steps, init_state=begun, progress_bar=False))
        window = min(WINDOW, max(steps // 10, 1))
        for share, level in levels(scratch, window=window).items():
            counts = [common.steps_to(curve, level, window) for curve in (scratch, warm)]
            ratio = f"{counts[0] / counts[1]:.1f}" if None not in counts else ""
            lines.append([size.num_silos, f"{share:.0%}", f"{level:.4g}", *counts, ratio])
        for label, curve in (("from scratch", scratch), (f"after {args.warm_rounds} rounds of SFVI-Avg", warm)):
            axis.plot(np.arange(1, steps + 1), common.smooth(curve, window), label=label)
        axis.set(title=f"{size.num_silos} silos of {size.num_images:,} images", xlabel="SFVI steps", yscale="log")
        axis.set_ylabel("loss (negative evidence bound)")
        axis.legend()
    path = Path(args.out) / "mnist_warm_start.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    columns = ["J", "still to go", "loss", "steps from scratch", "steps after the warm start", "ratio"]
    common.write(args.out, "mnist_warm_start.md", common.table(columns, lines))
    print(f"figure: {path}")
    return lines


def main(args):
    train, test = load()
    test = Images(*(part[: args.num_test] for part in test))
    optim = optax.adam(args.step)
    if "table" in args.parts:
        table_1(train, test, args, optim)
    if "figure" in args.parts:
        figure_3(train, args, optim)


def parse(given=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--silos", type=int, nargs="+", choices=[25, 5], default=[25, 5], help="numbers of silos")
    parser.add_argument("--parts", nargs="+", choices=["table", "figure"], default=["table", "figure"])
    parser.add_argument("--steps", type=int, default=8000, help="SFVI's rounds")
    parser.add_argument("--rounds", type=int, default=50, help="SFVI-Avg's rounds")
    parser.add_argument("--local-steps", type=int, default=1000, help="SFVI-Avg's steps between two rounds")
    parser.add_argument("--steps-alone", type=int, default=10_000, help="steps of silos that meet once or never")
    parser.add_argument("--warm-rounds", type=int, default=5, help="SFVI-Avg's rounds before SFVI")
    parser.add_argument("--step", type=float, default=1e-2, help="Adam's step size")
    parser.add_argument("--num-samples", type=int, default=100, help="posterior draws for the accuracies")
    parser.add_argument("--num-test", type=int, default=10_000)
    parser.add_argument("--out", default="out", help="folder for tables and figures")
    args = parser.parse_args(given)
    args.sizes = tuple(size for size in SIZES if size.num_silos in args.silos)
    if args.quick:
        args.sizes, args.seeds, args.num_test, args.num_samples = (Size(5, 40, 20),), 1, 500, 10
        args.steps, args.rounds, args.local_steps, args.steps_alone, args.warm_rounds = 60, 3, 20, 60, 2
    return args


if __name__ == "__main__":
    main(parse())
