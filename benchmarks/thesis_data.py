"""Adult and Bank as the GI-PVI thesis cuts them: a training part in ten silos, and a test part."""

from typing import NamedTuple

import numpy as np

import numpyro_fed as nf
from benchmarks.common import find

SOURCES = {
    "adult": "UCI Adult (adult.data, adult.test), numeric columns first, the others one-hot, as arrays in adult.npz",
    "bank": "UCI Bank Marketing (bank-full.csv), numeric columns first, the others one-hot, as arrays in bank.npz",
}
NUMERIC = dict(adult=6, bank=7)  # the first columns
SILOS = 10


class Rows(NamedTuple):
    x: np.ndarray  # (n, columns) float32
    y: np.ndarray  # (n,) int32


class Data(NamedTuple):
    name: str
    train: Rows
    test: Rows


def load(name: str) -> Rows:
    """All rows of a data set: the splits are ours."""
    with np.load(find(f"{name}.npz", SOURCES[name])) as file:
        join = lambda letter: np.concatenate([file[key] for key in sorted(file.files) if key.split("_")[0] == letter])
        return Rows(join("X").astype(np.float32), join("y").astype(np.int32))


def made_up(name: str) -> Rows:
    """Rows for a quick run without data: a label that a line does not tell."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, NUMERIC[name] + 4)).astype(np.float32)
    return Rows(x, (x[:, 0] + np.abs(x[:, 1]) + 0.5 * rng.normal(size=600) > 1.2).astype(np.int32))


def divided(name: str, rows: Rows, seed: int, validate: bool) -> Data:
    """Training and test part, 80 and 20 %; to validate, the same two parts of the training part alone."""
    order = np.random.default_rng(seed).permutation(len(rows.y))
    for _ in range(2 if validate else 1):
        last, order = order[int(0.8 * len(order)) :], order[: int(0.8 * len(order))]
    train, test = (Rows(rows.x[part].copy(), rows.y[part]) for part in (order, last))
    numeric = slice(NUMERIC[name])
    mean, sd = train.x[:, numeric].mean(axis=0), train.x[:, numeric].std(axis=0)
    for part in (train, test):
        part.x[:, numeric] = (part.x[:, numeric] - mean) / sd
    return Data(name, train, test)


def cut(train: Rows, split: str, seed: int) -> nf.Silos:
    """The training part in silos; of B and text the small ones come first, as in the thesis."""
    if split == "one":
        return nf.Silos({"all": train._asdict()})
    if split == "A":
        label = nf.partitioners.homogeneous(len(train.y), SILOS, seed=seed)
    else:
        scheme = "code" if split == "B" else "text"
        label = nf.partitioners.inhomogeneous(train.y, SILOS, kappa=0.9, beta=0.95, seed=seed, scheme=scheme)
    return nf.Silos({f"silo {j}": dict(x=train.x[label == j], y=train.y[label == j]) for j in range(SILOS)})
