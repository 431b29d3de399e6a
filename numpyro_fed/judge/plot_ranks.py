"""The distribution of ranks, less the uniform one, as panels."""

from typing import Any

import numpy as np
import pandas as pd

from numpyro_fed.judge import uniform
from numpyro_fed.results.figures import COLOURS, GREY, MAX_PANELS, as_array, named, panels

INSIDE, OUTSIDE = COLOURS[0], COLOURS[1]  # blue, vermilion


def ecdf_panels(ranks: pd.DataFrame, num_ranks: int, p_values: pd.Series, parameters: Any, label: str) -> np.ndarray:
    """One panel a quantity; those with the least p-values where there are too many.

    Args:
        ranks: one column a quantity.
        num_ranks: L + 1.
        p_values: of the quantities, the least first.
        parameters: names to show, or None.
        label: of the method.
    """
    names = named(list(ranks), parameters)
    left_out = 0
    if parameters is None and len(names) > MAX_PANELS:
        worst = set(p_values.index[:MAX_PANELS])
        left_out, names = len(names) - MAX_PANELS, [name for name in names if name in worst]
    fig, axes = panels(len(names), extra=0.6, sharex=True, sharey=True)
    band = uniform.band(len(ranks), num_ranks)
    at = np.concatenate([[0.0], band.points, [1.0]])
    low, high = (np.concatenate([[0.0], end - band.points, [0.0]]) for end in (band.low, band.high))
    widest = 1.15 * max(high.max(), -low.min())
    for ax, name in zip(axes, names, strict=True):
        share = uniform.below(ranks[name].to_numpy(), uniform.points(num_ranks, len(ranks))) / len(ranks)
        curve = np.concatenate([[0.0], share - band.points, [0.0]])
        outside = np.any((curve < low - 1e-9) | (curve > high + 1e-9))
        widest = max(widest, 1.05 * np.max(np.abs(curve)))
        ax.fill_between(at, low, high, color="0.87", linewidth=0, label="95% of calibrated methods, all ranks together")
        ax.axhline(0, color="0.6", linewidth=0.8)
        colour, style = (OUTSIDE, "--") if outside else (INSIDE, "-")
        ax.plot(at, curve, color=colour, linestyle=style, linewidth=1.6, label=label)
        ax.set_title(f"{name}  (outside)" if outside else name, fontsize="medium")
        ax.set_xlim(0, 1)
        ax.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    for ax in axes:
        ax.set_ylim(-widest, widest)
    fig.supxlabel("rank of the truth among draws, as a share", fontsize="small")
    fig.supylabel("ECDF less uniform", fontsize="small")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles[:1], labels[:1], loc="outside upper left", frameon=False, fontsize="small")
    if left_out:
        fig.suptitle(f"{len(names)} of {len(names) + left_out}: the least p-values", fontsize="small", color=GREY)
    return as_array(axes)
