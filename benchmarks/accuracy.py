"""How close does SFVI come to the exact posterior of the six-cities model, and what do more draws per row buy?

The reference integrates the random effects by quadrature and samples the five globals by importance sampling (effective
sample size 33,500). Printed per number of draws K and seed: shift of every mean in reference sds, ratio of the sds.

Run it with ``python -m benchmarks.accuracy``.
"""

import argparse
import time

import jax
import numpy as np

import numpyro_fed as nf
from examples.six_cities import model, six_cities_silos

MEAN = np.array([-3.1613, 0.4636, -0.2191, 0.1074, -0.7871])
SD = np.array([0.2282, 0.2910, 0.0869, 0.1395, 0.0858])


def main(args):
    silos = six_cities_silos()
    print("| K | scale coupling | seed | shift of beta0 to beta3, omega | sd ratios | seconds a 1,000 rounds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for num in args.importance_samples:
        for scale_coupling in (False, True):
            guide = nf.guides.StructuredNormal(scale_coupling=scale_coupling)
            method = nf.SFVI(model, guide=guide, importance_samples=num)
            for seed in range(args.seeds):
                began = time.perf_counter()
                fit = method.run(jax.random.key(seed), silos, args.num_rounds, progress_bar=False)
                seconds = (time.perf_counter() - began) / args.num_rounds * 1000
                shift = (np.asarray(fit.normal().mean) - MEAN) / SD
                ratio = np.asarray(fit.normal().sds) / SD
                text = lambda values: " ".join(f"{value:.2f}" for value in values)
                cells = (num, "yes" if scale_coupling else "no", seed, text(shift), text(ratio), f"{seconds:.1f}")
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--importance-samples", type=int, nargs="+", default=[1, 10, 30, 50])
    parser.add_argument("--num-rounds", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=5)
    main(parser.parse_args())
