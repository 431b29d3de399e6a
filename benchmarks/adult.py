"""Logistic regression on Adult in ten silos: EP and PVI against NUTS on the pooled data.

5,000 people (a seeded sample of the training part), 109 coefficients with N(0, 1) priors; ten silos, either alike or
skewed by label (a Dirichlet(0.3) share of each class to every silo). Printed per method: the largest shift of a mean in
NUTS's sds and the range of sd ratios (NUTS's own Monte Carlo error is printed beside), the mean log-likelihood of 5,000
people of the test part, rounds, bytes and seconds. Pooled VI is PVI with one silo: natural-gradient variational
inference on all data.

Run it with ``python -m benchmarks.adult``; ``--quick`` takes 1,000 people and 15 columns.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size

import numpyro_fed as nf
from benchmarks.common import find, table

SOURCE = "UCI Adult (adult.data, adult.test), numeric columns standardised, the others one-hot, as arrays in adult.npz"


def model(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("people", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def load(num, columns=None, seed=0):
    """Training and test rows, with an intercept first."""
    rng = np.random.default_rng(seed)
    with np.load(find("adult.npz", SOURCE)) as file:
        parts = []
        for part in ("train", "test"):
            rows = rng.permutation(len(file[f"y_{part}"]))[:num]
            x = file[f"X_{part}"][rows][:, :columns]
            x = np.concatenate([np.ones((len(x), 1), np.float32), x.astype(np.float32)], axis=1)
            parts.append((x, file[f"y_{part}"][rows].astype(np.int32)))
    return parts


def labels(y, num_silos, skewed, seed=0):
    """A silo for every person."""
    rng = np.random.default_rng(seed)
    if not skewed:
        return rng.permutation(np.arange(len(y)) % num_silos)
    out = np.empty(len(y), int)
    for value in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == value))
        cuts = np.cumsum(rng.dirichlet(np.full(num_silos, 0.3)))[:-1]
        for silo, part in enumerate(np.split(rows, (cuts * len(rows)).astype(int))):
            out[part] = silo
    return out


def held_out(beta, test):
    """Mean log predictive density of the test rows."""
    x, y = test
    logits = jnp.asarray(x) @ jnp.asarray(beta).T  # (people, draws)
    each = dist.Bernoulli(logits=logits).log_prob(jnp.asarray(y)[:, None])
    return float(jnp.mean(jax.scipy.special.logsumexp(each, axis=1) - np.log(logits.shape[1])))


def methods():
    return {
        "EP, full": (nf.EP(model), {}),
        "EP, diagonal": (nf.EP(model, family="diagonal"), {}),
        "PVI, full, synchronous": (nf.PVI(model), {}),
        "PVI, full, sequential": (nf.PVI(model), dict(schedule="sequential")),
        "PVI, full, asynchronous": (nf.PVI(model), dict(schedule="asynchronous")),
        "PVI, diagonal, sequential": (nf.PVI(model, family="diagonal"), dict(schedule="sequential")),
    }


def main(args):
    train, test = load(1000, 14) if args.quick else load(5000)
    pooled = nf.Silos({"all": dict(x=train[0], y=train[1])})
    samples = args.num_samples
    began = time.perf_counter()
    reference = nf.nuts(
        model, pooled, rng_key=jax.random.key(1), num_warmup=400, num_samples=samples, progress_bar=False
    )
    grouped = np.asarray(reference.get_samples(group_by_chain=True)["beta"])
    flat = grouped.reshape(-1, grouped.shape[-1])
    mean, sd = flat.mean(axis=0), flat.std(axis=0)
    error = 1 / np.sqrt(np.min(effective_sample_size(grouped)))
    print(f"NUTS: {time.perf_counter() - began:.0f} s; Monte Carlo error of a mean at most {error:.3f} sds", flush=True)
    rows = [["NUTS, pooled", "-", "", "", f"{held_out(flat[:: max(1, len(flat) // 1000)], test):.4f}", "", "", ""]]
    for family in ("full", "diagonal"):
        fit = nf.PVI(model, family=family, tolerance=1e-3).run(jax.random.key(0), pooled, 30, progress_bar=False)
        rows.append(described(f"VI, pooled, {family}", "-", fit, mean, sd, test))
        print(" | ".join(map(str, rows[-1])), flush=True)
    for skewed in (False, True):
        label = labels(train[1], 10, skewed)
        silos = nf.split(np.char.add("silo ", label.astype(str)), x=train[0], y=train[1])
        for name, (method, options) in methods().items():
            if args.only and name not in args.only:
                continue
            fit = method.run(jax.random.key(0), silos, progress_bar=False, **options)
            rows.append(described(name, "skewed" if skewed else "alike", fit, mean, sd, test))
            print(" | ".join(map(str, rows[-1])), flush=True)
    columns = ["method", "silos", "largest shift", "sd ratios", "held-out log-likelihood", "rounds", "kB", "seconds"]
    print("\n" + table(columns, rows))


def described(name, kind, fit, mean, sd, test):
    normal = fit.normal()
    shift, ratio = np.max(np.abs(normal.mean - mean) / sd), normal.sds / sd
    beta = fit.sample(jax.random.key(3), 1000)["beta"]
    sent = np.sum(fit.history["bytes_up"] + fit.history["bytes_down"]) / 1e3
    ratios = f"{ratio.min():.2f} to {ratio.max():.2f}"
    cells = [name, kind, f"{shift:.2f}", ratios, f"{held_out(beta, test):.4f}"]
    return [*cells, fit.num_rounds, f"{sent:.0f}", f"{fit.seconds:.0f}"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--num-samples", type=int, default=500, help="of each of four chains of NUTS")
    parser.add_argument("--only", nargs="+", default=None)
    main(parser.parse_args())
