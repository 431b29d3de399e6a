"""The figure of "Which method?": errors on six cities against bytes, from that page's own table.

Run it with ``python -m docs.figures.which_method``; no model is fitted.
"""

import re
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
# Where each name stands: its offset in points, and the side of the marker.
PLACES = {
    "EP": (6, -13, "left"),
    "PVI": (-6, -13, "right"),
    "SEP": (7, 5, "left"),
    "SFVI": (-6, 8, "right"),
    "SFVI-Avg": (-6, 8, "right"),
    "EP, diagonal family": (8, 0, "left"),
    "EP, Laplace": (8, 0, "left"),
}


def middle(cell):
    """Of ``4.2 to 6.7``, the mean of its ends; of ``1,873``, itself."""
    ends = [float(end.replace(",", "")) for end in cell.split(" to ")]
    return sum(ends) / len(ends)


def rows():
    """(method, kB, largest shift, sd ratio farthest from one), line by line of the first table with a column kB."""
    text = (HERE.parent / "which_method.md").read_text()
    table = text[text.index("| method | largest shift | sd ratios | rounds | kB |") :].split("\n\n")[0]
    for line in table.splitlines()[2:]:
        method, shift, ratios, _, kilobytes = (cell.strip() for cell in line.strip("| ").split(" | "))
        worst = max(map(float, ratios.split(" to ")), key=lambda ratio: abs(ratio - 1))
        yield re.split(r", 10 draws|, 20 rounds| on the", method)[0], middle(kilobytes), float(shift), worst


def draw(path):
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.1), layout="constrained", sharex=True)
    for method, kilobytes, shift, ratio in rows():
        color = "#2a5db0" if method in ("EP", "PVI", "SEP") else "#d98b3a"
        x, y, side = PLACES[method]
        for panel, value in ((left, shift), (right, ratio)):
            panel.plot(kilobytes, value, "o", color=color, ms=6)
            panel.annotate(
                method, (kilobytes, value), (x, y), textcoords="offset points", ha=side, va="center", fontsize=8.5
            )
    left.set(xscale="log", yscale="log", xlabel="kB, both ways", ylim=(0.006, 0.7), xlim=(2, 4000))
    left.set_title("largest shift of a mean, exact sds", fontsize=10)
    right.axhline(1, color="grey", lw=0.8)
    right.set(xlabel="kB, both ways", ylim=(0.75, 1.03))
    right.set_title("sd ratio farthest from one", fontsize=10)
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    draw(HERE / "which_method.png")
