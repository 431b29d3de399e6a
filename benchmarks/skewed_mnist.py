r"""An MLP on MNIST whose labels are skewed over 100 silos, ten of which take part in a round.

.. math::

    h_i = \mathrm{relu}(x_i W_1 + b_1), \quad c_i \sim \mathrm{Categorical}(\mathrm{softmax}(h_i W_2 + b_2)), \quad
    w \sim N(w_0, 0.3^2)

with :math:`w_0` He's initialisation, where all methods start. Every digit is spread over the silos by a Dirichlet(0.3)
draw. Federated averaging, FedProx and posterior averaging take the same stochastic gradient steps, with momentum, in
the silos; stochastic expectation propagation (FedEP's I and V) takes as many, of Adam, to the mode of a silo's tilted
distribution. An epoch is one of a silo of average size.

Test accuracy by round is that of the point estimate. At the end: accuracy, log likelihood and calibration, at the
point and marginalised over ten draws.

Run it with ``python -m benchmarks.skewed_mnist``, or with ``--quick`` for a minute.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import init_to_median

import numpyro_fed as nf
from benchmarks import common, mnist


class Model:
    """The network, its prior centred at He's initialisation: hidden units could change places, and this says which."""

    def __init__(self, hidden, spread, seed):
        rng = np.random.default_rng(seed)
        draw = lambda *shape: (rng.normal(size=shape) * np.sqrt(2 / shape[0])).astype(np.float32)
        zeros = lambda n: np.zeros(n, np.float32)
        self.centre = {"w1": draw(784, hidden), "b1": zeros(hidden), "w2": draw(hidden, 10), "b2": zeros(10)}
        self.spread = spread

    def __call__(self, image, digit=None):
        normal = lambda centre: dist.Normal(jnp.asarray(centre), self.spread).to_event(centre.ndim)
        w1, b1, w2, b2 = (numpyro.sample(name, normal(centre)) for name, centre in self.centre.items())
        with numpyro.plate("images", image.shape[0]):
            scores = jax.nn.relu(image @ w1 + b1) @ w2 + b2
            numpyro.sample("digit", dist.Categorical(logits=scores), obs=digit)


class Curve(NamedTuple):
    rounds: list
    accuracy: list
    fit: nf.Fit
    seconds: float


def methods(model, args):
    """By name."""
    steps = max(1, args.epochs * args.num_images // args.num_silos // args.batch_size)
    each = max(1, steps // args.epochs)
    walk = dict(
        optim=optax.sgd(args.rate, momentum=0.9),
        batch_size=args.batch_size,
        local_steps=steps,
        init_loc_fn=init_to_median,
    )
    falling = optax.adam(optax.cosine_decay_schedule(args.sep_rate, steps, 0.01))
    to_mode = dict(num_steps=steps, optim=falling, batch_size=args.batch_size)
    sep = dict(family="diagonal", tolerance=0.0, damping=args.damping)
    return {
        "FedAvg": nf.FedAvg(model, **walk),
        "FedProx": nf.FedAvg(model, proximal=args.proximal, **walk),
        "FedPA": nf.FedPA(
            model,
            num_samples=args.epochs,
            thinning=each,
            num_warmup=0,
            averaging_rounds=args.averaging_rounds,
            shrinkage=args.rho,
            server_optim=optax.sgd(args.pa_server),
            **walk,
        ),
        "SEP (I)": nf.SEP(model, solver=nf.solvers.Identity(scale=args.scale, **to_mode), **sep),
        "SEP (V)": nf.SEP(model, solver=nf.solvers.NGVI(num_updates=args.updates, num_draws=2, **to_mode), **sep),
    }


def stages(num_rounds):
    """Rounds after which accuracy is looked at: all at first, then fewer."""
    wanted = [1, 2, 3, 4, 5, 7, 10, 15, 20, 25, *range(30, num_rounds + 1, 10)]
    return [r for r in wanted if r < num_rounds] + [num_rounds]


def run(name, method, silos, test, args):
    """Accuracy by round, and the last fit."""
    rounds, accuracy, state, spent = [0], [], None, 0.0
    for stop in stages(args.num_rounds):
        began = time.perf_counter()
        last = stop == args.num_rounds
        now = replace(method, posterior=last) if isinstance(method, nf.FedPA) else method
        fit = now.run(
            jax.random.key(args.seed),
            silos,
            stop - rounds[-1],
            schedule=nf.schedules.sampled(args.cohort),
            init_state=state,
            progress_bar=False,
        )
        spent += time.perf_counter() - began
        state = fit.state
        rounds.append(stop)
        accuracy.append(float(nf.evaluate(fit, test._asdict(), num_samples=1).loc["point", "accuracy"]))
        print(f"{name}: round {stop}, accuracy {accuracy[-1]:.4f}", flush=True)
    return Curve(rounds[1:], accuracy, fit, spent)


def scores(name, curve, test, args):
    """A row of the table."""
    found = nf.evaluate(curve.fit, test._asdict(), num_samples=10)
    point, draws = found.loc["point"], found.loc["marginalised"]
    near = next(r for r, a in zip(curve.rounds, curve.accuracy, strict=True) if a >= 0.9 * curve.accuracy[-1])
    last = np.mean(curve.accuracy[-3:])
    return [
        name,
        near,
        f"{100 * curve.accuracy[-1]:.1f}",
        f"{100 * last:.1f}",
        f"{point['log_likelihood']:.3f}",
        f"{100 * point['ece']:.1f}",
        f"{100 * draws['accuracy']:.1f}",
        f"{draws['log_likelihood']:.3f}",
        f"{100 * draws['ece']:.1f}",
        f"{curve.seconds:.0f}",
    ]


COLUMNS = [
    "method", "rounds to 90 %", "accuracy", "last three", "log likelihood", "ECE", "accuracy, drawn",
    "log likelihood, drawn", "ECE, drawn", "seconds",
]  # fmt: skip


def draw(curves, out):
    figure, axis = plt.subplots(figsize=(6.4, 4), layout="constrained")
    for name, curve in curves.items():
        axis.plot(curve.rounds, np.array(curve.accuracy) * 100, label=name, marker="o", markersize=3)
    axis.set(xlabel="round", ylabel="test accuracy, %", xscale="log", ylim=(60, 100))
    axis.legend()
    axis.grid(alpha=0.3)
    figure.savefig(out, dpi=150)
    plt.close(figure)
    print(f"figure: {out}")


def make_store(train, args):
    """Silos whose digits are skewed, in a store."""
    chosen = np.random.default_rng(args.seed).permutation(len(train.digit))[: args.num_images]
    label = nf.partitioners.by_label(train.digit[chosen], args.num_silos, args.concentration, seed=args.seed)
    order = np.argsort(label, kind="stable")
    rows = chosen[order]
    return nf.SiloStore.from_arrays(label[order], image=train.image[rows], digit=train.digit[rows])


def parser():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few images and rounds")
    parser.add_argument("--only", nargs="*", help="names of methods")
    parser.add_argument("--num-silos", type=int, default=100)
    parser.add_argument("--num-images", type=int, default=60_000)
    parser.add_argument("--num-rounds", type=int, default=60)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--concentration", type=float, default=0.3)
    parser.add_argument("--hidden", type=int, default=100)
    parser.add_argument("--spread", type=float, default=0.3, help="prior sd of a weight")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--rate", type=float, default=0.02, help="of the silos' SGD with momentum")
    parser.add_argument("--proximal", type=float, default=0.01)
    parser.add_argument("--rho", type=float, default=6e-3)
    parser.add_argument("--averaging-rounds", type=int, default=10)
    parser.add_argument("--pa-server", type=float, default=1.17, help="server step of posterior averaging")
    parser.add_argument("--damping", type=float, default=0.1)
    parser.add_argument("--scale", type=float, default=5e-4, help="precision of an observation, SEP (I)")
    parser.add_argument("--sep-rate", type=float, default=0.03, help="of Adam, in sds")
    parser.add_argument("--updates", type=int, default=5, help="of natural gradients, SEP (V)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser


def main(args):
    if args.quick:
        args.num_silos, args.num_images, args.num_rounds, args.hidden, args.cohort = 10, 2_000, 6, 10, 5
        args.averaging_rounds = 3
    train, test = mnist.load()
    if args.quick:
        test = mnist.Images(test.image[:1000], test.digit[:1000])
    silos = make_store(train, args)
    chosen = {
        n: m for n, m in methods(Model(args.hidden, args.spread, args.seed), args).items() if n in (args.only or [n])
    }
    curves = {name: run(name, method, silos, test, args) for name, method in chosen.items()}
    print(common.table(COLUMNS, [scores(name, curve, test, args) for name, curve in curves.items()]))
    args.out.mkdir(parents=True, exist_ok=True)
    draw(curves, args.out / "skewed_mnist.png")
    return curves


if __name__ == "__main__":
    main(parser().parse_args())
