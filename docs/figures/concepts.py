"""The pictures of the concepts page: a model over silos, a round, a cavity and a site.

Run it with ``python -m docs.figures.concepts``; no model is fitted.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from scipy.stats import norm

HERE = Path(__file__).resolve().parent
BLUE, ORANGE, GREEN, GREY = "#2a5db0", "#d98b3a", "#5b9e6b", "#666666"


def canvas(width, height):
    figure, panel = plt.subplots(figsize=(width, height), layout="constrained")
    panel.set(xlim=(0, width), ylim=(0, height), aspect="equal")
    panel.axis("off")
    return figure, panel


def box(panel, x, y, width, height, color, label=None):
    patch = FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=.12", fc="none", ec=color, lw=1.6)
    panel.add_patch(patch)
    if label:
        panel.text(x + width / 2, y + height - 0.2, label, ha="center", va="center", color=color, weight="bold")


def node(panel, x, y, label, observed=False):
    panel.add_patch(Circle((x, y), 0.27, fc="#dddddd" if observed else "white", ec="black", lw=1.2, zorder=3))
    panel.text(x, y, label, ha="center", va="center", zorder=4, fontsize=9.5)


def arrow(panel, start, end, color="black", bend=0.0, style="-|>"):
    line = FancyArrowPatch(
        start, end, arrowstyle=style, mutation_scale=11, color=color, lw=1.2, connectionstyle=f"arc3,rad={bend}"
    )
    panel.add_patch(line)


def partition(path):
    """Which site lives where: six cities."""
    figure, panel = canvas(8, 3.7)
    box(panel, 2.2, 2.4, 3.6, 1.2, BLUE, "server")
    node(panel, 3.2, 2.85, r"$\beta$")
    node(panel, 4.8, 2.85, r"$\omega$")
    for x, name, number, color in ((0.2, "A", 300, ORANGE), (4.4, "B", 237, GREEN)):
        box(panel, x, 0.1, 3.4, 1.85, color, f"silo {name}")
        panel.add_patch(
            FancyBboxPatch((x + 0.25, 0.22), 2.9, 1.22, boxstyle="square,pad=0", fc="none", ec=GREY, lw=0.9)
        )
        panel.text(x + 3.08, 0.3, f"{number} children", ha="right", va="bottom", fontsize=8, color=GREY)
        node(panel, x + 0.8, 0.95, "$b_i$")
        node(panel, x + 2.2, 0.95, "$y_{it}$", observed=True)
        arrow(panel, (x + 1.08, 0.95), (x + 1.92, 0.95))
        arrow(panel, (4.7, 2.6), (x + 0.88, 1.22))
        arrow(panel, (3.3, 2.6), (x + 2.12, 1.22))
    figure.savefig(path, dpi=160)
    plt.close(figure)


def round_(path):
    """What crosses in a round."""
    figure, panel = canvas(8, 3.3)
    box(panel, 2.3, 2.15, 3.4, 1.05, BLUE)
    panel.text(4, 2.9, "server", ha="center", color=BLUE, weight="bold")
    panel.text(4, 2.45, "3. adds what it accepts", ha="center", fontsize=9.5)
    for x, name, color in ((0.1, "leeds", ORANGE), (2.85, "york", GREEN), (5.6, "hull", "#8a5bb0")):
        box(panel, x, 0.1, 2.3, 1.1, color, f"silo {name}")
        panel.text(
            x + 1.15, 0.6, "2. works on its rows,\nlatents and state stay", ha="center", va="center", fontsize=8.5
        )
        middle = x + 1.15
        above = 4 + (middle - 4) * 0.42
        arrow(panel, (above - 0.12, 2.13), (middle - 0.12, 1.24), BLUE)
        arrow(panel, (middle + 0.12, 1.24), (above + 0.12, 2.13), color)
    panel.text(1.35, 1.72, "1. broadcast", color=BLUE, fontsize=9.5, ha="center")
    panel.text(6.25, 1.68, "message,\ncounted in bytes", color="#8a5bb0", fontsize=9.5, ha="left", va="center")
    figure.savefig(path, dpi=160)
    plt.close(figure)


def cavity(path, yes=11, number=12):
    """One visit of EP: a normal cavity times a binomial likelihood, on a grid."""
    grid = np.linspace(-3.5, 7, 2001)
    step = grid[1] - grid[0]
    before = norm.pdf(grid, 0.4, 1.3)
    likelihood = np.exp(-yes * np.log1p(np.exp(-grid)) - (number - yes) * np.log1p(np.exp(grid)))
    tilted = before * likelihood
    tilted /= tilted.sum() * step
    mean = (grid * tilted).sum() * step
    sd = np.sqrt(((grid - mean) ** 2 * tilted).sum() * step)
    precision = 1 / sd**2 - 1 / 1.3**2  # the site is the projection over the cavity
    shift = mean / sd**2 - 0.4 / 1.3**2
    site = norm.pdf(grid, shift / precision, precision**-0.5)
    height = tilted.max()
    figure, panels = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained", sharex=True)
    left, right = panels
    left.plot(grid, before / before.max() * 0.75 * height, color=BLUE, label="cavity: what the others say")
    left.plot(grid, likelihood / likelihood.max() * 0.75 * height, color=ORANGE, label="the silo's likelihood")
    left.fill_between(grid, tilted, color=GREEN, alpha=0.35, lw=0, label="tilted: their product")
    right.fill_between(grid, tilted, color=GREEN, alpha=0.35, lw=0, label="tilted")
    right.plot(grid, norm.pdf(grid, mean, sd), color="black", ls="--", label="normal with its moments")
    right.plot(grid, site / site.max() * 0.75 * height, color=ORANGE, ls="--", label="site: that over the cavity")
    for panel in panels:
        panel.set(yticks=[], ylim=(0, height * 1.55), xlim=(grid[0], grid[-1]), xlabel="global parameter")
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8.5, loc="upper left")
    figure.savefig(path, dpi=160)
    plt.close(figure)


if __name__ == "__main__":
    partition(HERE / "partition.png")
    round_(HERE / "round.png")
    cavity(HERE / "cavity.png")
