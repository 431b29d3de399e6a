"""Posterior averaging on quadratic losses, where everything is known: the experiments of Al-Shedivat et al. (2021).

- ``playground``: their Fig. 1. Two silos, two numbers, five starts; how far off FedAvg and FedPA are, by round.
- ``delta``: the dynamic programme against a direct solve, and what it adds to the time of a silo's steps (Table 1).
- ``bias``: bias and spread of a silo's Delta against the number of its samples, and of its steps in FedAvg (Fig. 3).
- ``least_squares``: five silos that differ; the distance to the posterior's mode in posterior sds, by round.

Run it with ``python -m benchmarks.posterior_averaging [part ...]``, by default all of them.
"""

import argparse
import math
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

import numpyro_fed as nf
from benchmarks.common import table
from numpyro_fed.algorithm import Broadcast, Plan
from numpyro_fed.methods.averaging import AveragingBroadcast
from numpyro_fed.normal import moments

FIGURES = Path(__file__).parents[1] / "docs" / "figures"

# --- the playground of Fig. 1 -----------------------------------------------------------------------------------------

A = np.stack([np.diag([2.0, 15.0]), np.diag([15.0, 2.0])]) - 1.5
B = np.array([[5.0, 10.0], [10.0, 5.0]])
OPTIMA = np.linalg.solve(A, B[..., None])[..., 0]
OPTIMUM = np.linalg.solve(A.sum(axis=0), B.sum(axis=0))
STARTS = np.array([[-40, -20], [-40, 40], [0, 60], [60, 40], [60, -20]], float)
ROUNDS = (1, 5, 10, 30)
PAPER = {  # mean distances after ROUNDS: one run of five starts
    "MB-SGD": (45.9, 17.9, 6.0, 0.12),
    "FedAvg, 10 steps": (27.3, 3.1, 2.2, 2.2),
    "FedAvg, 100 steps": (14.1, 10.6, 10.5, 10.6),
    "FedPA, 10 samples": (37.2, 7.8, 2.1, 1.6),
    "FedPA, 100 samples": (20.0, 1.1, 0.23, 0.30),
}


def quadratic(A, b):
    r"""A row's loss is w'Aw/2 - b_i'w, so that a silo's mean loss is w'Aw/2 - b'w with the rows' mean b."""
    w = numpyro.sample("w", dist.Normal(0, 100).expand([2]).to_event(1))  # only its shape counts: prior=False
    with numpyro.plate("rows", b.shape[0]):
        numpyro.factor("loss", b @ w - 0.5 * w @ A @ w)


def playground_silos(num_rows=1000, seed=0):
    """Rows b_i of mean b and covariance I, both exactly: one of them has a gradient with noise of unit variance."""
    rng, silos = np.random.default_rng(seed), {}
    for k in range(2):
        noise = rng.normal(size=(num_rows, 2))
        noise -= noise.mean(axis=0)
        noise = np.linalg.solve(np.linalg.cholesky(noise.T @ noise / num_rows), noise.T).T
        silos[f"silo {k + 1}"] = dict(A=A[k].astype("f"), b=(B[k] + noise).astype("f"))
    return nf.Silos(silos)


def exact_draws(key, start, log_density, num_samples):
    """Independent draws of a normal whose log density is given."""
    precision, uphill = -jax.hessian(log_density)(start), jax.grad(log_density)(start)
    white = jax.random.normal(key, (num_samples, *start.shape))
    root = jnp.linalg.cholesky(precision)
    return start + jnp.linalg.solve(precision, uphill) + jax.scipy.linalg.solve_triangular(root.T, white.T).T


def playground_methods():
    """The five of Fig. 1. MB-SGD is FedAvg with one step."""
    paper = dict(prior=False, start_rounds=0)
    average = nf.FedAvg(quadratic, optim=optax.sgd(10**-1.5), batch_size=1, local_steps=1, last_look=False, **paper)
    posterior = nf.FedPA(
        quadratic,
        sampler=exact_draws,
        num_samples=10,
        shrinkage=1.0,
        stein=False,
        averaging_rounds=0,
        server_optim=optax.sgd(0.1),
        posterior=False,
        **paper,
    )
    return {
        "MB-SGD": average,
        "FedAvg, 10 steps": replace(average, local_steps=10),
        "FedAvg, 100 steps": replace(average, local_steps=100),
        "FedPA, 10 samples": posterior,
        "FedPA, 100 samples": replace(posterior, num_samples=100),
    }


def playground_path(method, silos, key, start, rounds):
    """Distances to the optimum after each of ``rounds``."""
    state = method.run(key, silos, 1, progress_bar=False).state
    state = state._replace(round=0, server=state.server._replace(z=jnp.asarray(start, "f"), round=jnp.zeros((), int)))
    far, done = [], 0
    for at in rounds:
        state = method.run(key, silos, at - done, init_state=state, progress_bar=False).state
        far.append(np.linalg.norm(np.asarray(state.server.z) - OPTIMUM))
        done = at
    return far


def playground(num_seeds=5, rounds=ROUNDS):
    """{method: distances, (seeds, starts, rounds)}."""
    silos, found = playground_silos(), {}
    for name, method in playground_methods().items():
        found[name] = np.array(
            [
                [playground_path(method, silos, jax.random.key(5 * s + i), w, rounds) for i, w in enumerate(STARTS)]
                for s in range(num_seeds)
            ]
        )
    return found


def playground_table(found, at):
    """Mean distances beside the paper's; after ± the sd of the mean of five starts, which is what the paper shows."""
    rows = []
    for name, far in found.items():
        mean, sd = far.mean(axis=(0, 1)), far.mean(axis=1).std(axis=0, ddof=1)
        cells = [f"{mean[i]:.2f} ± {sd[i]:.2f} ({paper})" for i, paper in zip(at, PAPER[name], strict=True)]
        rows.append([name, *cells])
    return table(["distance after round", *map(str, ROUNDS)], rows)


def playground_figure(found, path):
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.4), constrained_layout=True)
    x, y = np.meshgrid(np.linspace(-60, 80, 200), np.linspace(-60, 80, 200))
    grid = np.stack([x, y], axis=-1)
    for k, colour in enumerate(["tab:blue", "tab:red"]):
        away = grid - OPTIMA[k]
        loss = 0.5 * np.einsum("...i,ij,...j", away, A[k], away)
        left.contour(x, y, loss, levels=np.array([30, 300, 1200, 3000, 6000]), colors=colour, linewidths=0.7)
        left.plot(*OPTIMA[k], "o", color=colour, markersize=5, label=f"optimum of silo {k + 1}")
    left.plot(*OPTIMUM, "*", color="black", markersize=9, label="optimum of both")
    left.plot(*STARTS.T, "x", color="grey", markersize=5, label="starts")
    left.set(xlabel="$w_1$", ylabel="$w_2$", aspect="equal")
    left.set_title("two silos' losses", fontsize=10)
    left.legend(fontsize=7, loc="upper right")
    begin = np.linalg.norm(STARTS - OPTIMUM, axis=1).mean()
    for axes, kind in ((middle, ("MB-SGD", "FedAvg")), (right, ("FedPA",))):
        for name, far in found.items():
            if not name.startswith(kind):
                continue
            each = far.mean(axis=1)  # (seeds, rounds), of five starts
            mean, rounds = np.append(begin, each.mean(axis=0)), np.arange(each.shape[1] + 1)
            (line,) = axes.plot(rounds, mean, label=name)
            low, high = np.quantile(each, [0.025, 0.975], axis=0)
            axes.fill_between(rounds[1:], low, high, color=line.get_color(), alpha=0.2, linewidth=0)
            shown = [i for i, r in enumerate(ROUNDS) if r < len(rounds)]
            axes.plot(np.array(ROUNDS)[shown], np.array(PAPER[name])[shown], ".", color=line.get_color())
        axes.set(yscale="log", ylim=(0.05, 100), xlabel="round", ylabel="distance to the optimum")
        axes.set_title(" and ".join(kind) + "; dots: the paper's", fontsize=10)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def run_playground(args):
    rounds = range(1, ROUNDS[-1] + 1)
    found = playground(args.seeds, rounds)
    print(playground_table(found, [r - 1 for r in ROUNDS]))
    playground_figure(found, args.out / "fedpa_playground.png")


# --- Delta: right, and cheap ------------------------------------------------------------------------------------------

DIMENSIONS = (100, 1_000, 10_000, 100_000)
TABLE_1 = {100: (72, 91), 1_000: (76, 92), 10_000: (80, 93), 100_000: (149, 155)}  # ms: FedAvg, with Delta


def delta_errors(dimensions=(10, 100, 500, 2000), numbers=(2, 10, 100), rhos=(0.0, 0.01, 1.0, "oas")):
    """{rho: the largest relative error of the dynamic programme against a direct solve}."""
    worst = {}
    for rho in rhos:
        errors = []
        for d in dimensions:
            for num in numbers:
                keys = jax.random.split(jax.random.key(d + num), 3)
                scale = jnp.exp(jax.random.normal(keys[2], (d,)))
                theta, draws = jax.random.normal(keys[0], (d,)), scale * jax.random.normal(keys[1], (num, d))
                fast, slow = (np.asarray(f(theta, draws, rho)) for f in (moments.delta, moments.direct))
                errors.append(np.linalg.norm(fast - slow) / np.linalg.norm(slow))
        worst[rho] = max(errors)
    return worst


def regression(x, y):
    """Least squares with a wide prior."""
    w = numpyro.sample("w", dist.Normal(0, 10).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ w, 1), obs=y)


def make_regression(rng, num, d, informative=10, noise=1.0):
    """Standard normal features, of which few count; coefficients up to 1 and noise."""
    x, w = rng.normal(size=(num, d)), np.zeros(d)
    w[rng.permutation(d)[:informative]] = rng.uniform(size=min(informative, d))
    return dict(x=x, y=x @ w + noise * rng.normal(size=num))


def silo_step(method, silos):
    """A silo's own work in a round, as a function (key, w, data) of arrays, and its data."""
    split, survey, stack, _ = method.prepare(silos)
    phases = method.compile(split, survey, Plan(names=silos.names)).phases
    algorithm = next(phase.algorithm for phase in phases if phase.role == "rounds")

    def step(key, w, data):
        zero = jnp.zeros((), w.dtype)
        sent = AveragingBroadcast(w, jnp.asarray(isinstance(method, nf.FedAvg)), zero + survey.total, zero)
        return algorithm.silo_step(key, Broadcast(sent), (), data)[0].delta

    return step, stack


def silo_times(d, rho="oas", num_rows=1000, epochs=5, steps=100, repeats=25):
    """Milliseconds of FedAvg's and of FedPA's steps in a silo, and how often as long the second is.

    Medians, the runs in turns. The ratio is that of processor time, which others on the machine disturb less.
    """
    data = make_regression(np.random.default_rng(0), num_rows, d)
    silos = nf.Silos({"one": {name: value.astype("f") for name, value in data.items()}})
    optim = optax.sgd(0.1 / (10 + d / 10))  # a batch of 10 has curvatures near d / 10
    average = nf.FedAvg(regression, optim=optim, batch_size=10, local_steps=epochs * steps, prior=False)
    posterior = nf.FedPA(
        regression,
        optim=optim,
        batch_size=10,
        num_samples=epochs,
        thinning=steps,
        num_warmup=0,
        averaging_rounds=0,
        shrinkage=rho,
        prior=False,
    )
    pairs = []
    for method in (average, posterior):
        step, stack = silo_step(method, silos)
        pairs.append((jax.jit(step), stack.data("one")))
    key, w = jax.random.key(0), jnp.zeros(d)
    times = np.zeros((2, repeats + 1, 2))  # passed, and spent by the processors
    for i in range(repeats + 1):  # the first compiles
        for j in (0, 1) if i % 2 else (1, 0):
            step, data = pairs[j]
            began = time.perf_counter(), time.process_time()
            step(key, w, data).block_until_ready()
            times[:, i, j] = 1e3 * (np.array([time.perf_counter(), time.process_time()]) - began)
    passed, spent = np.median(times[:, 1:], axis=1)
    return *passed, spent[1] / spent[0]


def run_delta(args):
    errors = delta_errors()
    print(
        table(["rho", "largest relative error"], [[rho, f"{error:.1e}"] for rho, error in errors.items()]), end="\n\n"
    )
    rows = []
    for d in DIMENSIONS:
        paper = TABLE_1[d]
        for rho in ("oas", 0.01):
            first, second, ratio = silo_times(d, rho)
            rows.append(
                [f"{d:,}", rho, f"{first:.2f}", f"{second:.2f}", f"{100 * (ratio - 1):+.1f} %"]
                + [*paper, f"{100 * (paper[1] / paper[0] - 1):+.0f} %"]
            )
    print(table(["d", "rho", "FedAvg, ms", "FedPA, ms", "more", "paper: FedAvg", "FedPA", "more"], rows))


# --- bias and spread of Delta -----------------------------------------------------------------------------------------

BIAS_SAMPLES = (5, 20, 50, 200)
BIAS_STEPS = (1, 10, 50, 200)


def deltas(method, silos, w, num_keys, seed=0):
    """Delta of every silo (a problem each) at each w, for many keys: (silos, starts, keys, d)."""
    step, stack = silo_step(method, silos)
    keys = jax.random.split(jax.random.key(seed), num_keys)
    many = jax.jit(jax.vmap(jax.vmap(step, (0, None, None)), (None, 0, None)))
    return np.stack([np.asarray(many(keys, w, stack.data(name))) for name in silos.names])


def bias_and_spread(found, exact):
    """Of Delta, over the norm of the exact one: means over problems and starts, the bias without its own noise."""
    size = np.linalg.norm(exact, axis=-1)
    num = found.shape[2]
    variance = found.var(axis=2, ddof=1).sum(axis=-1)
    squared = np.sum((found.mean(axis=2) - exact) ** 2, axis=-1) - variance / num
    return np.mean(np.sqrt(np.maximum(squared, 0)) / size), np.mean(np.sqrt(variance) / size)


def turned(found, exact):
    """The bias that no step of the server can mend: the sine of the angle between the mean and the exact one."""
    mean = found.mean(axis=2)
    cosine = np.sum(mean * exact, axis=-1) / np.linalg.norm(mean, axis=-1) / np.linalg.norm(exact, axis=-1)
    return np.mean(np.sqrt(np.maximum(1 - cosine**2, 0)))


def bias_problems(d, num_problems, num_starts, seed=0):
    rng = np.random.default_rng(seed)
    silos = nf.Silos({f"problem {i}": make_regression(rng, 500, d) for i in range(num_problems)})
    w = rng.normal(size=(num_starts, d))
    exact = [(w @ silo["x"].T - silo["y"]) @ silo["x"] / 500 for silo in map(silos.__getitem__, silos.names)]
    return silos, w, np.stack(exact)


def bias(d, samples=BIAS_SAMPLES, steps=BIAS_STEPS, rhos=(0.1, "oas"), num_problems=2, num_starts=2, num_keys=30):
    """Rows (method, number, bias, spread, sine of the angle) for one dimension; in float64."""
    silos, w, exact = bias_problems(d, num_problems, num_starts)
    rate = 0.1  # the paper's for 10 and 100 dimensions
    rows = []
    plain = nf.FedAvg(regression, optim=optax.sgd(rate), batch_size=10, prior=False)
    for number in steps:
        found = deltas(replace(plain, local_steps=number), silos, w, num_keys) / (rate * number)
        rows.append(("FedAvg", number, *bias_and_spread(found, exact), turned(found, exact)))
    shared = dict(averaging_rounds=0, prior=False, stein=False)
    for kind in ("IASG", "exact"):
        for rho in (*rhos, math.inf):
            for number in samples:
                if rho == math.inf and number <= d:
                    continue
                if kind == "IASG":
                    method = nf.FedPA(
                        regression,
                        optim=optax.sgd(rate),
                        batch_size=10,
                        num_warmup=250,
                        thinning=50,
                        num_samples=number,
                        shrinkage=rho,
                        **shared,
                    )
                else:
                    method = nf.FedPA(regression, sampler=exact_draws, num_samples=number, shrinkage=rho, **shared)
                found = deltas(method, silos, w, num_keys)
                rows.append((f"FedPA, {kind}, rho {rho}", number, *bias_and_spread(found, exact), turned(found, exact)))
    return rows


def run_bias(args):
    for d in (10, 100):
        with jax.enable_x64(True):
            rows = bias(d)
        columns = [f"d = {d}", "samples (FedAvg: steps)", "bias", "spread", "sine"]
        print(table(columns, [[r[0], r[1], *(f"{v:.3f}" for v in r[2:])] for r in rows]), end="\n\n", flush=True)


# --- federated least squares ------------------------------------------------------------------------------------------


def unequal_silos(sizes=(300, 200, 120, 80, 50), d=10, seed=0):
    """Every silo has features of its own covariance, and coefficients of its own."""
    rng, silos = np.random.default_rng(seed), {}
    common = rng.normal(size=d)
    for k, num in enumerate(sizes):
        turn = np.linalg.qr(rng.normal(size=(d, d)))[0]
        x = rng.normal(size=(num, d)) * np.geomspace(0.3, 2.0, d) @ turn.T
        own = common + 0.5 * rng.normal(size=d)
        silos[f"silo {k + 1}"] = dict(x=x, y=x @ own + rng.normal(size=num))
    return nf.Silos(silos)


def exact_posterior(silos):
    """Mode and precision, of the likelihood of all and the prior N(0, 10^2)."""
    x, y = (np.concatenate([np.asarray(silos[name][part]) for name in silos.names]) for part in ("x", "y"))
    precision = x.T @ x + np.eye(x.shape[1]) / 100
    return np.linalg.solve(precision, x.T @ y), precision


def least_squares_methods():
    average = nf.FedAvg(regression, start_rounds=0, last_look=False)
    posterior = nf.FedPA(regression, start_rounds=0, posterior=False)
    return {
        "FedAvg, 1 step": replace(average, local_steps=1),
        "FedAvg, 10 steps": replace(average, local_steps=10),
        "FedAvg, 100 steps": replace(average, local_steps=100),
        "FedPA": posterior,
        "FedPA, stein=False": replace(posterior, stein=False),
        "FedPA, batches of 20": replace(posterior, batch_size=20),
        "FedPA, batches of 20, seven times the steps": replace(posterior, batch_size=20, num_warmup=500, thinning=100),
    }


def ends(methods, silos, rounds, seed=0):
    """{method: distance to the mode where a run of so many rounds ends}, in posterior sds.

    The distance is that along the worst direction, sqrt((w - mode)' precision (w - mode)).
    """
    mode, precision = exact_posterior(silos)
    found = {}
    for name, method in methods.items():
        fits = [method.run(jax.random.key(seed), silos, r, progress_bar=False) for r in rounds]
        away = np.stack([np.asarray(fit.state.server.z, np.float64) for fit in fits]) - mode
        found[name] = np.sqrt(np.einsum("ri,ij,rj->r", away, precision, away))
    return found


def least_squares_figure(found, rounds, path):
    figure, axes = plt.subplots(figsize=(6.5, 3.8), constrained_layout=True)
    for name, far in found.items():
        axes.plot(rounds, far, "--" if name.startswith("FedAvg") else "-", marker=".", label=name)
    axes.axhline(1e-3, color="grey", linewidth=0.7, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="rounds of the run", ylabel="distance to the mode, posterior sds")
    axes.set_xticks(rounds, [str(r) for r in rounds])
    axes.minorticks_off()
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def run_least_squares(args):
    rounds = (6, 20, 50, 105, 205)
    with jax.enable_x64(True):
        found = ends(least_squares_methods(), unequal_silos(), rounds)
    print(
        table(["sds after a run of", *map(str, rounds)], [[n, *(f"{v:.1e}" for v in far)] for n, far in found.items()])
    )
    least_squares_figure(found, rounds, args.out / "fedpa_least_squares.png")


PARTS = {"playground": run_playground, "delta": run_delta, "bias": run_bias, "least_squares": run_least_squares}


def main(args):
    for part in args.parts or PARTS:
        print(f"## {part}\n")
        began = time.perf_counter()
        PARTS[part](args)
        print(f"\n{part}: {time.perf_counter() - began:.0f} s\n", flush=True)


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="by default all")
    parser.add_argument("--seeds", type=int, default=5, help="of the playground")
    parser.add_argument("--out", type=Path, default=FIGURES, help="where figures go")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse())
