"""Bayesian networks across ten silos on Adult and Bank: chapter 5.2 of the GI-PVI thesis.

Two hidden layers of 50 units, weights N(0, 1 / inputs); 80 % of the rows are cut into ten silos, 20 % are the test
part. Splits: A, silos of one size at random; B, half of the silos small and nearly without positives, as the thesis'
code makes it; text, the same as its text words it (small silos are then half positive); one, all rows in one silo.
Beside the network stands plain logistic regression, by nf.PVI and by NUTS on the pooled rows.

Printed per method: the log likelihood of the test part in two readings (the mean over 50 draws of the log likelihood,
which is that of the thesis, and the logarithm of averaged probabilities), accuracy, ECE in 15 bins, bytes and minutes.
Each seed is another test part, another cut into silos and another run; the table has medians over seeds, with the
smallest and largest beside them.

Settings were chosen with ``--validate``: a fifth of the training part is then held out in the place of the test part.

Every finished row is appended to ``--out`` as a line of JSON, and a row that is already there is not run again: a long
run may be interrupted, and several processes may each do a part. ``--table`` prints the medians of such files::

    python -m benchmarks.networks --data adult --split A B --out networks.jsonl
    python -m benchmarks.networks --table networks.jsonl

``--quick`` takes 600 rows and 14 columns of the data (without them, made-up ones) and small networks: seconds instead
of an hour.
"""

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax

import numpyro_fed as nf
from benchmarks.common import table
from benchmarks.thesis_data import SILOS, SOURCES, Data, Rows, cut, divided, load, made_up
from numpyro_fed.judge.metrics import accuracy, ece, log_likelihood

DRAWS = 50
# Table 5.1 of the thesis: mean over draws of the log likelihood of the test part.
THESIS = {
    ("adult", "one", "GI, one silo"): -0.315,
    ("adult", "A", "GI, sequential"): -0.324,
    ("adult", "A", "GI, synchronous"): -0.356,
    ("adult", "B", "GI, sequential"): -0.328,
    ("adult", "B", "GI, synchronous"): -0.353,
    ("bank", "one", "GI, one silo"): -0.213,
    ("bank", "A", "GI, sequential"): -0.232,
    ("bank", "A", "GI, synchronous"): -0.241,
    ("bank", "B", "GI, sequential"): -0.225,
    ("bank", "B", "GI, synchronous"): -0.253,
    ("adult", "one", "mean field, one silo"): -0.356,
    ("adult", "A", "mean field, sequential"): -0.331,
    ("adult", "A", "mean field, synchronous"): -0.438,
    ("adult", "B", "mean field, sequential"): -0.365,
    ("adult", "B", "mean field, synchronous"): -0.422,
    ("bank", "one", "mean field, one silo"): -0.250,
    ("bank", "A", "mean field, sequential"): -0.235,
    ("bank", "A", "mean field, synchronous"): -0.392,
    ("bank", "B", "mean field, sequential"): -0.239,
    ("bank", "B", "mean field, synchronous"): -0.325,
}


# --- models -----------------------------------------------------------------------------------------------------------


def network(widths: tuple[int, ...]) -> Callable:
    """A network with ReLUs between layers, and the weights of a layer N(0, 1 / inputs)."""

    def model(x, y=None):
        sizes = (x.shape[1], *widths, 1)
        for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
            normal = dist.Normal(0, inputs**-0.5)
            kernel = numpyro.sample(f"kernel{layer}", normal.expand([inputs, outputs]).to_event(2))
            bias = numpyro.sample(f"bias{layer}", normal.expand([outputs]).to_event(1))
            x = (jax.nn.relu(x) if layer else x) @ kernel + bias
        with numpyro.plate("people", x.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=x[:, 0]), obs=y)

    return model


def logistic(x, y=None):
    intercept = numpyro.sample("intercept", dist.Normal(0, 1))
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("people", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + x @ beta), obs=y)


# --- a row of the table -----------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One method, one seed. A new method is a function ``(data, silos, seed) -> Row`` in :func:`methods`."""

    mean_log_likelihood: float  # over draws: the thesis' reading
    log_likelihood: float  # of averaged probabilities
    accuracy: float
    ece: float
    bytes_up: int
    bytes_down: int
    minutes: float
    rounds: int


def row_of(fit: Any, data: Data, seed: int) -> Row:
    """A fit on the test part, by :func:`nf.evaluate`."""
    found = nf.evaluate(fit, data.test._asdict(), jax.random.key(100 + seed), num_samples=DRAWS).loc["marginalised"]
    sent = (int(np.sum(fit.history[f"bytes_{way}"])) for way in ("up", "down"))
    scores = (float(found[name]) for name in ("mean_log_likelihood", "log_likelihood", "accuracy", "ece"))
    return Row(*scores, *sent, fit.seconds / 60, fit.num_rounds)


class Settings(NamedTuple):
    """What is tuned, on the validation part: of mean field, of GI, and of both."""

    step: float = 0.05  # mean field: of Adam, in sds of q; it falls to a hundredth
    steps: int = 1000  # of a silo in a visit
    one_silo_steps: int = 3000
    start_sd: float = 0.1
    rounds: int = 4  # synchronous
    sweeps: int = 2  # sequential
    gi_step: float = 0.03  # GI: of Adam; it falls to zero
    gi_steps: int = 500
    gi_one_silo_steps: int = 2000
    gi_start_precision: float = 100.0
    gi_damping: float = 0.3  # synchronous


class Method(NamedTuple):
    run: Callable[[Data, nf.Silos, int], Row]
    splits: tuple[str, ...]


def methods(settings: Settings, quick: bool) -> dict[str, Method]:
    """What can be run, by name, and the splits that it is for."""
    widths = (8, 8) if quick else (50, 50)
    model = network(widths)

    def mean_field(steps: int, damping: float, rounds: int, schedule: str) -> Callable:
        solver = nf.solvers.Gradient(
            num_steps=steps,
            optim=optax.adam(optax.cosine_decay_schedule(settings.step, steps, 0.01)),
            num_particles=2,
            batch_size=32 if quick else 256,
            start_sd=settings.start_sd,
        )
        method = nf.PVI(model, family="diagonal", damping=damping, solver=solver, tolerance=0)
        options = dict(schedule=schedule, progress_bar=False, check=False)
        return lambda data, silos, seed: row_of(method.run(jax.random.key(seed), silos, rounds, **options), data, seed)

    def inducing(steps: int, damping: float, rounds: int, schedule: str) -> Callable:
        def run(data: Data, silos: nf.Silos, seed: int) -> Row:
            layers = [(f"kernel{i}", f"bias{i}", "relu" if i < len(widths) else "linear") for i in range(3)]
            method = nf.GIPVI(
                model,
                layers,
                num_inducing=10 if quick else 100,
                local_steps=steps,
                batch_size=32 if quick else 256,
                damping=damping,
                optim=optax.adam(optax.cosine_decay_schedule(settings.gi_step, steps)),
                start_precision=settings.gi_start_precision,
            )
            fit = method.run(jax.random.key(seed), silos, rounds, schedule=schedule, progress_bar=False, check=False)
            return row_of(fit, data, seed)

        return run

    def regression(data: Data, silos: nf.Silos, seed: int) -> Row:
        fit = nf.PVI(logistic).run(jax.random.key(seed), silos, 10, progress_bar=False, check=False)  # at most
        return row_of(fit, data, seed)

    def nuts(data: Data, silos: nf.Silos, seed: int) -> Row:
        num = 20 if quick else 100
        reference = nf.nuts(
            logistic,
            silos,
            rng_key=jax.random.key(seed),
            num_warmup=2 * num,
            num_samples=num,
            num_chains=1,
            max_tree_depth=6,
            progress_bar=False,
        )
        draws = {name: value[:: num // min(num, DRAWS)] for name, value in reference.get_samples().items()}
        logits = draws["intercept"] + data.test.x @ draws["beta"].T  # (n, draws)
        signs = 2 * data.test.y[:, None] - 1
        probs = np.asarray(jax.nn.sigmoid(logits), np.float64).mean(axis=1)
        scores = log_likelihood(probs, data.test.y), accuracy(probs, data.test.y), ece(probs, data.test.y)
        each = float(jnp.mean(jax.nn.log_sigmoid(signs * logits)))
        return Row(each, *scores, 0, 0, reference.seconds / 60, 0)

    steps, gi_steps, ten = settings.steps, settings.gi_steps, ("A", "B", "text")
    return {
        "GI, one silo": Method(inducing(settings.gi_one_silo_steps, 1.0, 1, "synchronous"), ("one",)),
        "GI, sequential": Method(inducing(gi_steps, 1.0, settings.sweeps * SILOS, "sequential"), ten),
        "GI, synchronous": Method(inducing(gi_steps, settings.gi_damping, settings.rounds, "synchronous"), ten),
        "mean field, one silo": Method(mean_field(settings.one_silo_steps, 1.0, 1, "synchronous"), ("one",)),
        "mean field, sequential": Method(mean_field(steps, 1.0, settings.sweeps * SILOS, "sequential"), ten),
        "mean field, synchronous": Method(mean_field(steps, 0.2, settings.rounds, "synchronous"), ten),
        "logistic regression, PVI": Method(regression, ten),
        "logistic regression, NUTS": Method(nuts, ("one",)),
    }


# --- running and printing ---------------------------------------------------------------------------------------------


def read(paths: list[str]) -> list[dict]:
    """All rows of some files; one that is not there has none."""
    lines = [line for path in paths if Path(path).is_file() for line in Path(path).read_text().splitlines()]
    return [json.loads(line) for line in lines]


def summary(rows: list[dict]) -> str:
    """Medians over seeds, with the smallest and largest where there are several."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        part = "quick" if row["quick"] else "validation" if row["validate"] else "test"
        what = (row["data"], row["split"], row["method"], part)
        groups.setdefault((*what, json.dumps(row["settings"]) if row["validate"] else ""), []).append(row)

    def spread(found: list[dict], name: str, digits: int) -> str:
        values = [row[name] for row in found if name in row]
        if not values:
            return ""
        ends = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
        return f"{np.median(values):.{digits}f}{ends}"

    lines = []
    for key, found in sorted(groups.items()):
        data, split, method, part, settings = key
        megabytes = [np.median([row[f"bytes_{way}"] for row in found]) / 1e6 for way in ("up", "down")]
        lines.append(
            [
                *(data, split, method if part == "test" else f"{method}, {part} {settings}"),
                THESIS.get((data, split, method), "") if part == "test" else "",
                *(spread(found, name, 4) for name in ("mean_log_likelihood", "log_likelihood")),
                *(spread(found, name, 3) for name in ("accuracy", "ece")),
                *(f"{number:.1f}" for number in megabytes),
                *(spread(found, name, 1) for name in ("minutes", "cpu_minutes")),
                len(found),
            ]
        )
    columns = [
        "data",
        "split",
        "method",
        "thesis",
        "mean log-likelihood",
        "of averaged probabilities",
        "accuracy",
        "ECE",
    ]
    return table([*columns, "MB up", "MB down", "minutes", "CPU minutes", "seeds"], lines)


def main(args: argparse.Namespace) -> list[dict]:
    if args.table:
        rows = read(args.table)
        print(summary(rows))
        return rows
    settings = Settings(**{name: getattr(args, name) for name in Settings._fields})
    known = methods(settings, args.quick)
    rows = read([args.out]) if args.out else []
    for seed in args.seed:
        for name in args.data:
            missing = args.quick and not Path(os.environ.get("NUMPYRO_FED_DATA", ""), f"{name}.npz").is_file()
            everything = made_up(name) if missing else load(name)
            if args.quick:
                everything = Rows(everything.x[:600, :14], everything.y[:600])
            data = divided(name, everything, seed, args.validate)
            for split in args.split:
                for method in args.method or list(known):
                    if split not in known[method].splits:
                        continue
                    what = dict(data=name, split=split, method=method, seed=seed, validate=args.validate)
                    what |= dict(settings=settings._asdict(), quick=args.quick)
                    if any(all(row[key] == value for key, value in what.items()) for row in rows):
                        continue
                    began, cpu = time.perf_counter(), time.process_time()
                    row = known[method].run(data, cut(data.train, split, seed), seed)
                    worked = (time.process_time() - cpu) / 60  # a busy machine's clock says little
                    rows.append({**what, **row._asdict(), "cpu_minutes": worked})
                    if args.out:
                        with Path(args.out).open("a") as file:
                            file.write(json.dumps(rows[-1]) + "\n")
                    scores = f"{row.mean_log_likelihood:.4f} {row.log_likelihood:.4f} {row.accuracy:.3f} {row.ece:.3f}"
                    took = f"{time.perf_counter() - began:.0f} s"
                    print(name, split, method, f"seed {seed}:", scores, took, flush=True)
    print("\n" + summary(rows))
    return rows


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", nargs="+", choices=list(SOURCES), default=None)
    parser.add_argument("--split", nargs="+", choices=("one", "A", "B", "text"), default=None)
    parser.add_argument("--seeds", type=int, default=None, help="how many; 3 by default")
    parser.add_argument("--seed", type=int, nargs="+", default=None, help="these seeds instead")
    parser.add_argument("--method", nargs="+", default=None, choices=list(methods(Settings(), True)))
    parser.add_argument("--out", default=None, help="a file of JSON lines to add rows to")
    parser.add_argument("--table", nargs="+", default=None, help="such files: print their medians, run nothing")
    parser.add_argument("--validate", action="store_true", help="score on a part of the training rows")
    quick = Settings(steps=40, one_silo_steps=80, rounds=2, sweeps=1, gi_steps=20, gi_one_silo_steps=40)
    for name in Settings._fields:
        kind = Settings.__annotations__[name]
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None)
    args = parser.parse_args(words)
    usual = quick if args.quick else Settings()
    for name in Settings._fields:
        given = getattr(args, name)
        setattr(args, name, getattr(usual, name) if given is None else given)
    args.data = args.data or (["adult"] if args.quick else list(SOURCES))
    args.split = args.split or (["one", "B"] if args.quick else ["one", "A", "B"])
    args.seed = args.seed or list(range(args.seeds or (1 if args.quick else 3)))
    return args


if __name__ == "__main__":
    warnings.simplefilter("ignore", nf.VerdictWarning)
    main(parse())
