"""Run the notebooks of this folder, as plain Python, and print what their cells show.

A notebook is a MyST Markdown file: its code stands in ``{code-cell}`` blocks. The site runs them with Jupyter
(``make docs``); here they run one after another in this process, without a kernel, and stop at the first error, whose
line is that of the Markdown file. ``--figures`` keeps every plot.

Run it with ``python examples/run_notebooks.py quickstart trial``; without names, all of them.
"""

import argparse
import ast
import re
import time
from pathlib import Path

import matplotlib

HERE = Path(__file__).parent
CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
HEAD = re.compile(r"\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)
TAGS = re.compile(r"\A(?::[\w-]+:[^\n]*\n)+")


def notebooks():
    """Paths of all notebooks: Markdown files that name a kernel."""
    head = lambda path: HEAD.match(path.read_text())
    return [path for path in sorted(HERE.glob("*.md")) if (found := head(path)) and "kernelspec" in found.group()]


def cells(text):
    """(line, code) of each cell; the line is where its code begins in the file."""
    for found in CELL.finditer(text):
        code = found.group(1)
        tags = TAGS.match(code)
        start = found.start(1) + (tags.end() if tags else 0)
        yield text.count("\n", 0, start) + 1, text[start : found.end(1)]


def run(path, figures=None):
    """The names that a notebook leaves; its cells' last expressions are printed."""
    import matplotlib.pyplot as plt

    names = {"__name__": "__main__"}
    for line, code in cells(path.read_text()):
        tree = ast.parse("\n" * (line - 1) + code, filename=str(path))
        shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, str(path), "exec"), names)
        value = eval(compile(ast.Expression(shown.value), str(path), "eval"), names) if shown else None
        if value is not None and not code.rstrip().endswith(";"):
            print(value, end="\n\n")
        for number in plt.get_fignums():
            if figures:
                plt.figure(number).savefig(figures / f"{path.stem}_{line}_{number}.png", dpi=100, bbox_inches="tight")
        plt.close("all")
    return names


def main(args):
    args.figures and args.figures.mkdir(parents=True, exist_ok=True)
    for path in [HERE / f"{name}.md" for name in args.names] or notebooks():
        print(f"=== {path.name}")
        begin = time.perf_counter()
        try:
            run(path, args.figures)
        except SystemExit as stop:  # a notebook whose data are not here says so, and ends
            print(f"{path.name} stopped: {stop}")
        print(f"=== {path.name}: {time.perf_counter() - begin:.0f} seconds", flush=True)


if __name__ == "__main__":
    matplotlib.use("agg")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="notebooks, without .md")
    parser.add_argument("--figures", type=Path, help="folder for the plots")
    main(parser.parse_args())
