"""Marginal densities over one another, a panel a parameter."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from numpyro_fed.results.figures import COLOURS, GREY, STYLES, as_array, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFERENCE = "reference"
REACH = 6.0  # a panel shows at most this many reference sds beyond the reference's own draws


def density(x: np.ndarray, grid: np.ndarray, edges: Iterable[float] = ()) -> np.ndarray:
    """Gaussian kernel density on an even grid, reflected at ``edges``, which no draw crosses."""
    # Not ArviZ's kde: it reflects at the least and the largest draw, whose error is thrice this one's for a half-normal
    # (4,000 draws), and its grid spans all draws, so that of a heavy tail (half-Cauchy) no peak is left.
    step = grid[1] - grid[0]
    spread = np.subtract(*np.percentile(x, [75, 25])) / 1.349  # the sd of a normal with this interquartile range
    width = 1.06 * min(x.std(ddof=1), spread) * len(x) ** -0.2  # Silverman (1986), section 3.4.2
    width = max(width, step / 2)  # narrower than that cannot be seen
    bin_size = step / 8
    low = grid[0] - 4 * width
    num_bins = int(np.ceil((grid[-1] + 4 * width - low) / bin_size))
    counts = np.zeros(num_bins)
    for part in (x, *(2 * edge - x for edge in edges)):
        counts += np.histogram(part, num_bins, (low, low + num_bins * bin_size))[0]
    reach = int(4 * width / bin_size)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) * bin_size / width) ** 2)
    smooth = np.convolve(counts, kernel / kernel.sum(), mode="same") / (len(x) * bin_size)
    values = np.interp(grid, low + (np.arange(num_bins) + 0.5) * bin_size, smooth)
    for edge in edges:
        values = np.where(grid >= edge if np.all(x >= edge) else grid <= edge, values, 0.0)
    return values


def marginals(
    names: list[str], reference: dict[str, np.ndarray], draws: dict[str, dict[str, np.ndarray]], left_out: int
) -> np.ndarray:
    """One panel a parameter; a line below tells how many were left out."""
    longest = max(len(label) for label in (REFERENCE, *draws))
    across = 2.4 * min(4, len(names)) if len(names) > 1 else 5.0  # inches, about
    columns = max(1, int(across / (0.65 + 0.075 * longest)))  # of the legend: inches of a handle and of a letter
    rows = -(-(len(draws) + 1) // columns)
    fig, axes = panels(len(names), extra=0.25 * rows + (0.25 if left_out else 0))
    for ax, name in zip(axes, names, strict=True):
        _panel(ax, name, reference[name], {method: values[name] for method, values in draws.items()})
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False)
    if left_out:
        note = f"{len(names)} of {len(names) + left_out} parameters: the largest w1; choose with parameters=[...]"
        fig.supxlabel(note, fontsize="small", color=GREY)
    return as_array(axes)


def _panel(ax: "Axes", name: str, reference: np.ndarray, draws: dict[str, np.ndarray]) -> None:
    mean, sd = reference.mean(), reference.std(ddof=1)
    finite = {method: x[np.isfinite(x)] for method, x in draws.items()}
    finite = {method: x for method, x in finite.items() if len(x) > 1}
    # a method that is far away would flatten the others: a mark at the panel's edge says where it is
    near = [x for x in finite.values() if abs(np.median(x) - mean) <= REACH * sd]
    ends = np.array([np.quantile(x, [0.001, 0.999]) for x in (reference, *near)])
    low = max(ends[:, 0].min(), ends[0, 0] - REACH * sd) - 0.3 * sd
    high = min(ends[:, 1].max(), ends[0, 1] + REACH * sd) + 0.3 * sd
    together = np.concatenate([reference, *finite.values()])
    edges = [edge for edge in (-1.0, 0.0, 1.0) if np.all(together >= edge) or np.all(together <= edge)]
    grid = np.linspace(low, high, 400)

    filled = density(reference, grid, edges)
    peak = top = filled.max()
    ax.fill_between(grid, filled, color="0.82", linewidth=0, label=REFERENCE)
    marks = 0
    for i, method in enumerate(draws):
        colour, style = COLOURS[i % len(COLOURS)], STYLES[i % len(STYLES)]
        x = finite.get(method)
        curve = np.zeros_like(grid) if x is None else density(x, grid, edges)
        top = max(top, curve.max())
        curve = np.where(curve > 1e-3 * peak, curve, np.nan)  # no line along the axis where there is no mass
        ax.plot(grid, curve, label=method, color=colour, linestyle=style, linewidth=1.6)
        if x is not None and not low < np.median(x) < high:
            shift = (x.mean() - mean) / sd
            text = f"{shift:.3g} sd ▸" if shift > 0 else f"◂ {shift:.3g} sd"
            place, side = (0.99, "right") if shift > 0 else (0.01, "left")
            height = 0.98 - 0.13 * marks
            ax.text(place, height, text, color=colour, transform=ax.transAxes, ha=side, va="top", fontsize="small")
            marks += 1
    # nor may a method that is far too narrow: its peak is cut at the panel's top
    ax.set_ylim(0, min(1.05 * top, 2.6 * peak))
    ax.set_xlim(low, high)
    ax.set_title(name, fontsize="medium")
    ax.set_yticks([])
    ax.locator_params(axis="x", nbins=4)
    ax.spines["left"].set_visible(False)
