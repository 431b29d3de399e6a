"""What a fit says of itself: a table of its scalars, and a few lines for a prompt or a notebook."""

from html import escape
from typing import Any

import jax
import numpy as np
import pandas as pd
from numpyro.diagnostics import hpdi

from numpyro_fed.checks import sentences
from numpyro_fed.model.partition_table import Partition
from numpyro_fed.results.scalars import mean_loss, scalars
from numpyro_fed.results.value import Fitted

SHOWN = 20  # rows of a notebook's table


def table(draws: dict[str, Any], params: dict[str, Any], part: Partition, hdi_prob: float) -> pd.DataFrame:
    """Mean, sd, median and a highest-density interval of every scalar; params have a value alone."""
    if not 0 < hdi_prob < 1:
        raise ValueError(f"hdi_prob must lie between 0 and 1, got {hdi_prob}")
    low, high = f"hdi_{50 * (1 - hdi_prob):g}%", f"hdi_{100 - 50 * (1 - hdi_prob):g}%"
    rows: dict[str, dict[str, Any]] = {}
    for name, value in draws.items():
        for label, column in scalars({name: value}).items():
            interval = hpdi(column, hdi_prob)
            rows[label] = {
                "role": part[name].role,
                "mean": column.mean(dtype=np.float64),
                "sd": column.std(ddof=1, dtype=np.float64) if len(column) > 1 else np.nan,
                "median": np.median(column),
                low: interval[0],
                high: interval[1],
            }
    for name, tree in params.items():
        for path, value in jax.tree_util.tree_leaves_with_path(tree):  # a network's is a tree
            full = ".".join([name, *(str(getattr(key, "key", key)) for key in path)])
            for label, column in scalars({full: np.asarray(value)[None]}).items():
                rows[label] = {"role": "param", "mean": float(column[0])}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["role", "mean", "sd", "median", low, high])


def described(fit: Fitted) -> str:
    """The method and what its posterior is made of, for a message."""
    family = getattr(fit.posterior, "family", None)
    return f"nf.{fit.state.method}" + (f" with {family!r}" if family is not None else "")


def text(fit: Fitted) -> str:
    return f"Fit by {fit.state.method}: " + "; ".join(f"{name} {value}" for name, value in _facts(fit).items())


def html(fit: Fitted, found: pd.DataFrame) -> str:
    facts = "; ".join(f"{escape(name)} {escape(value)}" for name, value in _facts(fit).items())
    more = f"<p>... and {len(found) - SHOWN} more: fit.summary()</p>" if len(found) > SHOWN else ""
    shown = found.head(SHOWN).to_html(float_format="%.4g", na_rep="")
    return f"<p><b>Fit by {escape(fit.state.method)}</b>: {facts}</p>{shown}{more}"


def _facts(fit: Fitted) -> dict[str, str]:
    sent = sum(int(np.sum(fit.history[k])) for k in ("bytes_up", "bytes_down") if k in fit.history)
    facts = {
        "silos": str(len(fit.state.names)),
        "rounds": str(fit.num_rounds),
        "sent": _bytes(sent),
        "seconds": f"{fit.seconds:.1f}",
    }
    if "loss" in fit.history:
        losses = fit.history["loss"]
        facts["loss"] = f"{mean_loss(losses[-min(100, max(1, len(losses) // 10)) :]):.4g}"  # one alone may be noisy
    if fit.correction is not None:
        facts["correction"] = repr(fit.correction)
    verdict = fit.verdict
    why = [sentences(verdict.reasons).removesuffix(".")] if verdict.reasons else []
    facts["verdict"] = ": ".join([verdict.status, *why])
    facts["global sites"] = ", ".join(fit.split.partition.global_sites) or "none"
    facts["local sites"] = ", ".join(fit.split.partition.local_sites) or "none"
    return facts


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
