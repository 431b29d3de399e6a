"""What all figures share: colours, panels, names. Matplotlib is imported when something is drawn."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_PANELS = 16
# Okabe and Ito's colours, told apart by colour-blind readers; line styles and marks tell them apart in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
GREY = "0.35"


def panels(num: int, *, height: float = 1.9, extra: float = 0.0, **options: Any) -> "tuple[Figure, list[Axes]]":
    """A figure of so many panels in rows of at most four, and their axes.

    Args:
        num: of panels.
        height: of one, in inches; a single one is taller.
        extra: inches beside them, for a legend or a note.
        options: of ``matplotlib.pyplot.subplots``.
    """
    from matplotlib import pyplot as plt

    columns = 3 if num in (5, 6) else min(4, num)
    rows = -(-num // columns)
    width = {1: 5.0, 2: 3.4, 3: 2.7}.get(columns, 2.4) * columns
    size = (width, (1.35 * height if columns == 1 else height) * rows + extra)
    fig, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    for ax in axes.flat[num:]:
        ax.set_visible(False)
    shown = list(axes.flat[:num])
    for ax in shown:
        plain(ax)
    return fig, shown


def plain(ax: "Axes") -> None:
    """No frame above and to the right; small, grey ticks."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("0.5")
    ax.tick_params(labelsize="small", length=2.5, color="0.5")


def as_array(axes: "Iterable[Axes]") -> np.ndarray:
    """Axes in an array, as ``matplotlib.pyplot.subplots`` returns them."""
    axes = list(axes)
    out = np.empty(len(axes), object)
    out[:] = axes
    return out


def named(names: list[str], asked: str | Iterable[str] | None) -> list[str]:
    """Of parameters ``"beta[0]"`` those that are asked for, by their names or by their site's, ``"beta"``.

    >>> named(["mu", "beta[0]", "beta[1]"], ["beta", "mu"])
    ['beta[0]', 'beta[1]', 'mu']
    """
    if asked is None:
        return names
    chosen: list[str] = []
    for wanted in [asked] if isinstance(asked, str) else asked:
        found = [name for name in names if name == wanted or name.startswith(f"{wanted}[")]
        if not found:
            shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
            raise ValueError(f"no parameter or site is named {wanted!r}; the parameters are {shown}")
        chosen += [name for name in found if name not in chosen]
    return chosen
