"""The figure of "Which method?": errors on six cities against bytes, from that page's own table.

Run it with ``python -m docs.figures.which_method``; no model is fitted.
"""

import re
from pathlib import Path

import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
# Where each name stands: its offset in points, and the side of the marker.
PLACES = {
    "EP": (8, 0, "left"),
    "PVI": (-8, 0, "right"),
    "SEP": (-8, 0, "right"),
    "SFVI": (-8, 0, "right"),
    "SFVI-Avg": (8, 0, "left"),
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
    figure, panel = plt.subplots(figsize=(7, 3.1), layout="constrained")
    for method, kilobytes, shift, ratio in rows():
        color = "#2a5db0" if method in ("EP", "PVI", "SEP") else "#d98b3a"
        x, y, side = PLACES[method]
        label = f"{method} ({ratio:.2f})"
        panel.plot(kilobytes, shift, "o", color=color, ms=7)
        panel.annotate(label, (kilobytes, shift), (x, y), textcoords="offset points", ha=side, va="center", fontsize=9)
    panel.set(xscale="log", yscale="log", xlabel="kB, both ways", ylim=(0.006, 0.7), xlim=(1, 4000))
    panel.set(xticks=[10, 100, 1000], xticklabels=["10", "100", "1,000"], yticks=[0.01, 0.1], yticklabels=[".01", ".1"])
    panel.set_title("largest shift of a mean, in exact sds (and the sd ratio farthest from one)", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    draw(HERE / "which_method.png")
