"""The figures of "Accuracy", from that page's own tables.

Run it with ``python -m docs.figures.accuracy``; no model is fitted.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from docs.figures.tables import largest, numbers, table

HERE = Path(__file__).resolve().parent
BLUE, ORANGE, GREY = "#2a5db0", "#d98b3a", "0.55"


def six_cities(path):
    """Each method in two silos: the largest shift of a mean, and the range of sd ratios."""
    few = [row for row in table("accuracy", "| method | silos | beta0") if row[1] == "2" and "stays" not in row[2]]
    lines = [(row[0], largest(row[2:7]), numbers(row[7]), BLUE) for row in few]
    lines += [
        ("SFVI, one draw", largest(row[2:7]), numbers(row[7].replace("(beta0)", "")), ORANGE)
        for row in table("accuracy", "| draws per child")
        if row[0] == "1, the default guide"
    ]
    average = next(row for row in table("accuracy", "| scaling | draws") if row[1] == "10" and row[2] == "by size")
    lines.append(("SFVI-Avg, 10 draws a child", largest(average[4:9]), numbers(average[9]), ORANGE))
    lines = [(*line[:3], ORANGE if line[0].startswith("SFVI") else BLUE) for line in lines]
    lines.sort(key=lambda line: max(line[1], 0.005) * (1 + max(abs(one - 1) for one in line[2])))

    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 5), sharey=True, layout="constrained")
    for place, (_, shift, ratios, color) in enumerate(lines):
        left.plot(max(shift, 0.008), place, "o", color=color, ms=6)
        right.plot([min(ratios), max(ratios)], [place, place], "-", color=color, lw=4, solid_capstyle="round")
    left.set(yticks=range(len(lines)), yticklabels=[line[0] for line in lines], xscale="log", xlim=(0.006, 2))
    left.set(xticks=[0.01, 0.03, 0.1, 0.3, 1], xticklabels=[".01", ".03", ".1", ".3", "1"])
    left.set_xlabel("largest shift of a mean, in exact sds")
    right.set(xlim=(0.4, 1.06), xlabel="sds over the exact ones")
    right.axvline(1, color=GREY, lw=0.8)
    left.axvline(0.06, color=GREY, lw=0.8, ls=":")
    left.invert_yaxis()
    for panel in (left, right):
        panel.grid(axis="y", color="0.92")
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def went_wrong(path):
    """Nine models, five methods: how far off, and whether the verdict is ok."""
    rows = table("accuracy", "| model | EP | PVI | SFVI")
    names = ["EP", "PVI", "SFVI", "SFVI-Avg", "FedPA"]
    markers = dict(zip(names, "osD^v", strict=True))
    figure, panel = plt.subplots(figsize=(8.5, 4.6), layout="constrained")
    for place, row in enumerate(rows):
        for step, (name, cell) in enumerate(zip(names, row[1:], strict=True)):
            if cell == "refused":
                continue
            shift, ratios, ok = cell.split(";")
            off = max(numbers(shift)[0], *(abs(one - 1) for one in numbers(ratios)), 0.004)
            trusted = numbers(ok)[0] >= 3
            y = place + 0.15 * (step - 2)
            panel.plot(off, y, markers[name], ms=6, mfc=BLUE if trusted else "white", mec=BLUE if trusted else ORANGE)
    panel.set(yticks=range(len(rows)), yticklabels=[row[0].replace("`", "").split(" (")[0] for row in rows])
    panel.set(xscale="log", xlim=(0.0035, 2.2), xticks=[0.01, 0.1, 1], xticklabels=[".01", ".1", "1"])
    panel.set_xlabel("shift of a mean in exact sds, or relative error of an sd: the larger")
    panel.invert_yaxis()
    panel.grid(axis="y", color="0.92")
    panel.spines[["top", "right"]].set_visible(False)
    label = lambda marker, text, **style: plt.Line2D([], [], ls="", marker=marker, ms=6, label=text, **style)
    handles = [label(markers[name], name, mfc=GREY, mec=GREY) for name in names]
    handles += [label("o", "trusted by its verdict", mfc=BLUE, mec=BLUE)]
    handles += [label("o", "not trusted by it", mfc="white", mec=ORANGE)]
    figure.legend(
        handles=handles,
        loc="outside upper center",
        ncols=7,
        columnspacing=1.2,
        handletextpad=0.2,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    six_cities(HERE / "accuracy_six_cities.png")
    went_wrong(HERE / "accuracy_went_wrong.png")
