"""What the benchmarks of the SFVI paper's experiments share: data, tables, runs in stages."""

import os
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np


def find(name, source):
    """The path of a data file in NUMPYRO_FED_DATA; without it, say how to get it and leave."""
    path = Path(os.environ.get("NUMPYRO_FED_DATA", ""), name)
    if not path.is_file():
        sys.exit(
            f"{name} was not found. Set the environment variable NUMPYRO_FED_DATA to the directory that holds it. "
            f"The data are public: {source}"
        )
    return path


def table(columns, rows):
    """A markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def over_seeds(values, digits=1):
    """The mean over seeds, with the standard deviation where there are several."""
    values = np.asarray(values, float)
    spread = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"


def smooth(values, window):
    """A moving average over the last ``window`` values; shorter at the beginning."""
    total = np.cumsum(np.insert(np.asarray(values, np.float64), 0, 0.0))
    last = np.arange(1, len(total))
    first = np.maximum(last - window, 0)
    return (total[last] - total[first]) / (last - first)


def steps_to(loss, level, window):
    """The first step (from 1) at which the smoothed loss is at or below the level; None when it never is."""
    below = np.flatnonzero(smooth(loss, window) <= level)
    return int(below[0]) + 1 if below.size else None


def loss(fit):
    """The loss of every round after the start."""
    return fit.history["loss"][~fit.history["start"]]


def megabytes_up(fit):
    return float(np.sum(fit.history["bytes_up"])) / 1e6


class Stage(NamedTuple):
    """Where a run stood after some rounds."""

    rounds: int
    elbo: float
    megabytes_up: float
    seconds: float  # of running, without the evaluation of the bound


def staged(method, key, silos, num_rounds, every, evaluate):
    """A run in stages: the last Fit, and the evidence bound ``evaluate(fit)`` after every ``every`` rounds."""
    stages, fit, state, seconds, up = [], None, None, 0.0, 0.0
    for done in range(every, num_rounds + 1, every):
        began = time.perf_counter()
        fit = method.run(key, silos, every, init_state=state, progress_bar=False)
        seconds += time.perf_counter() - began
        up += megabytes_up(fit)
        state = fit.state
        stages.append(Stage(done, float(evaluate(fit)), up, seconds))
    return fit, stages


def write(folder, name, text):
    """Print, and keep as a file."""
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(text, end="\n\n", flush=True)
    return path
