"""Milliseconds of a local iteration: inducing points, one or many precisions a layer, beside a mean field.

The sizes of Adult in the thesis' chapter 5.2, made-up data: 39,000 rows of 108 columns in ten silos, two hidden layers
of 50 units, 100 inducing points a silo, minibatches of 256, two draws. A silo's visit of many steps minus one of few,
both compiled and run before, over the difference in steps; the least of three. Run it on one core for figures that can
be compared::

    taskset -c 0 python -m benchmarks.gi_speed
"""

import argparse
import time
import warnings

import jax
import numpy as np

import numpyro_fed as nf
from benchmarks.common import table

FEW = 20


def silos(num, rows, columns):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num, rows // num, columns)).astype("f")
    y = (x[..., 0] + rng.normal(size=x.shape[:2]) > 0).astype("f")
    return nf.Silos([dict(x=x[j], y=y[j]) for j in range(num)])


def seconds(method, data, schedule):
    """Of one round, warm."""
    run = lambda state: method.run(
        jax.random.key(0), data, 1, schedule=schedule, progress_bar=False, check=False, init_state=state
    )
    fit, found = run(None), []
    for _ in range(3):
        began = time.perf_counter()
        fit = run(fit.state)
        found.append(time.perf_counter() - began)
    return min(found)


def per_step(make, data, schedule, visits, steps):
    """Milliseconds of a silo's local iteration."""
    few, many = (seconds(make(number), data, schedule) for number in (FEW, FEW + steps))
    return 1000 * (many - few) / (steps * visits)


def main(args):
    warnings.simplefilter("ignore")
    columns, hidden, inducing = (5, 4, 6) if args.quick else (108, 50, 100)
    rows = 600 if args.quick else 39_000
    model, layers = nf.gi.mlp([columns, hidden, hidden, 1])
    batch = 32 if args.quick else 256

    def gi(precision):
        options = dict(num_inducing=inducing, precision=precision, batch_size=batch)
        return lambda steps: nf.GIPVI(model, layers, local_steps=steps, **options)

    def mean_field(steps):
        solver = nf.solvers.Gradient(num_steps=steps, num_particles=2, batch_size=batch)
        return nf.PVI(model, family="diagonal", solver=solver, tolerance=0)

    kinds = {"mean field": mean_field, "GI, precision='layer'": gi("layer"), "GI, precision='unit'": gi("unit")}
    lines = []
    for num in (1, 10):
        data, base = silos(num, rows, columns), None
        for name, make in kinds.items():
            steps = args.steps if name != "GI, precision='unit'" else max(10, args.steps // 10)
            found = per_step(make, data, "sequential", 1, steps)
            base = base or found
            lines.append([num, name, f"{found:.2f}", f"{found / base:.1f}"])
            print(*lines[-1], flush=True)
    found = per_step(kinds["GI, precision='layer'"], data, "synchronous", 10, args.steps // 10)
    lines.append([10, "GI, precision='layer', synchronous", f"{found:.2f}", f"{found / base:.1f}"])
    print("\n" + table(["silos", "", "ms a local iteration", "over mean field's"], lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    main(parser.parse_args())
