"""The figure of "Speed": ratios of times, from that page's own tables.

Run it with ``python -m docs.figures.speed``; nothing is timed.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from docs.figures.tables import numbers, table

HERE = Path(__file__).resolve().parent
BLUE, ORANGE = "#2a5db0", "#d98b3a"


def ratios():
    """(what against what, least ratio of times, largest), group by group."""
    for name, _, _, ratio in table("speed", "| | SVI, ms a step"):
        yield f"a step of SFVI over SVI's: {name}", *ends(ratio)
    for study, method, *_, ratio in table("speed", "| study | method | s |"):
        if ratio:
            yield f"a first run of {method} over NUTS's: {study.split(',')[0]}", *ends(ratio)
    for task, _, _, ratio in table("speed", "| task | FedJAX | nf.FedAvg"):
        low, high = ends(ratio)
        yield f"a round of FedAvg over FedJAX's: {task.split(',')[0]}", 1 / high, 1 / low


def ends(cell):
    return min(numbers(cell)), max(numbers(cell))


def draw(path):
    lines = list(ratios())
    figure, panel = plt.subplots(figsize=(8.5, 4.6), layout="constrained")
    for place, (_, low, high) in enumerate(lines):
        color = BLUE if high <= 1 else ORANGE
        panel.plot([low, high], [place, place], "-o", color=color, lw=3, ms=5)
    panel.set(yticks=range(len(lines)), yticklabels=[line[0] for line in lines], xscale="log", xlim=(0.035, 5))
    panel.set(xticks=[0.1, 0.25, 0.5, 1, 2, 4], xticklabels=["1/10", "1/4", "1/2", "1", "2", "4"])
    panel.minorticks_off()
    panel.axvline(1, color="0.4", lw=0.8)
    panel.set_xlabel("our time over theirs: blue is faster, or as fast")
    panel.invert_yaxis()
    panel.grid(axis="y", color="0.92")
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    draw(HERE / "speed.png")
