"""SFVI-Avg on six cities under both scalings: does averaging a few times reach the posterior?

The paper's Algorithm 2 multiplies log p(z_L, y | z_G) by N / N_j and leaves log q(z_L | z_G) alone, which tempers the
random effects' posterior: omega runs away ("failed to converge", section 4.3). Multiplying the silo's whole bound does
not. The reference integrates the random effects by quadrature (see :mod:`benchmarks.accuracy`).

Run it with ``python -m benchmarks.six_cities_avg``, or with ``--quick``.
"""

import argparse
import time
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np

import numpyro_fed as nf
from benchmarks import common
from benchmarks.accuracy import MEAN, SD
from examples.six_cities import model, six_cities_silos

NAMES = ("beta0", "beta1", "beta2", "beta3", "omega")


def cases(args):
    """{label: method}."""
    make = lambda num, **settings: nf.SFVIAvg(model, local_steps=args.local_steps, importance_samples=num, **settings)
    if args.quick:
        return {"whole bound, K = 1": make(1), "paper's scaling, K = 1": make(1, scaling="paper")}
    return {
        "whole bound, K = 10": make(10),
        "whole bound, K = 10, equal weights": make(10, weights="equal"),
        "whole bound, K = 1": make(1),
        "paper's scaling, K = 10": make(10, scaling="paper"),
        "paper's scaling, K = 1": make(1, scaling="paper"),
    }


def main(args):
    silos, lines, fits = six_cities_silos(), [], {}
    for label, method in cases(args).items():
        for seed in range(args.seeds):
            began = time.perf_counter()
            fit = method.run(jax.random.key(seed), silos, args.rounds, progress_bar=False)
            seconds = time.perf_counter() - began
            shift = (np.asarray(fit.normal().mean) - MEAN) / SD
            ratio = np.asarray(fit.normal().sds) / SD
            apart = np.nanmax(fit.history["disagreement"])
            text = lambda values: " ".join(f"{value:.2f}" for value in values)
            lines.append([label, seed, text(shift), text(ratio), f"{apart:.1f}", f"{seconds:.0f}"])
            print(lines[-1], flush=True)
            fits.setdefault(label, fit)
    columns = ["scaling", "seed", f"shift of {', '.join(NAMES)}", "sd ratios", "largest distance of a silo", "seconds"]
    common.write(args.out, "six_cities_avg.md", common.table(columns, lines))
    figure(fits, args)
    return lines


def figure(fits, args):
    """Shifts of all five globals, on a scale that shows both."""
    fig, axis = plt.subplots(figsize=(7, 3.2), layout="constrained")
    width = 0.8 / len(fits)
    for i, (label, fit) in enumerate(fits.items()):
        shift = np.abs((np.asarray(fit.normal().mean) - MEAN) / SD)
        axis.bar(np.arange(5) + (i - (len(fits) - 1) / 2) * width, shift, width, label=label)
    axis.axhline(0.4, color="0.4", linewidth=0.8, linestyle=":")
    axis.set(yscale="symlog", ylabel="distance from the exact mean, in sds", ylim=(0, None))
    axis.set_yscale("symlog", linthresh=1.0)
    axis.set_yticks([0, 0.5, 1, 5, 10, 30], ["0", "0.5", "1", "5", "10", "30"])
    axis.set_xticks(np.arange(5), NAMES)
    axis.legend(frameon=False, fontsize="small")
    axis.spines[["top", "right"]].set_visible(False)
    path = Path(args.out) / "six_cities_avg.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)
    plt.close(fig)
    print(f"figure: {path}")


def parse(given=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few steps: does it run?")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--local-steps", type=int, default=200)
    parser.add_argument("--out", default="out", help="folder for the table and the figure")
    args = parser.parse_args(given)
    if args.quick:
        args.seeds, args.rounds, args.local_steps = 1, 2, 3
    return args


if __name__ == "__main__":
    main(parse())
