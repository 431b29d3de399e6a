"""Tables of the documentation as rows of cells: figures are drawn from what their page says."""

import re
from pathlib import Path

PAGES = Path(__file__).resolve().parent.parent


def table(page, header):
    """Rows of the first table of a page whose names begin with ``header``; an empty cell repeats the one above."""
    lines = (PAGES / f"{page}.md").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(header))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip().replace("**", "") for cell in line.strip().strip("|").split("|")]
        rows.append([cell or (rows[-1][i] if rows and i < 2 else "") for i, cell in enumerate(cells)])
    return rows


def numbers(cell):
    """All numbers of a cell: ``.03 to .05`` has two, ``5,030`` one; a name in brackets (``beta0``) has none."""
    return [float(text.replace(",", "")) for text in re.findall(r"(?<![A-Za-z])-?(?:\d[\d,]*)?\.?\d+(?:e-?\d+)?", cell)]


def largest(cells):
    """The largest of all numbers of some cells, without their signs; None of none."""
    return max((abs(one) for cell in cells for one in numbers(cell)), default=None)
