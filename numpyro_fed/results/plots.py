"""Figures of a fit: how its rounds went, and what each silo says beside the posterior of all."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.stats import norm

from numpyro_fed.normal.families import product
from numpyro_fed.results.figures import COLOURS, GREY, STYLES, as_array, named, panels, plain
from numpyro_fed.results.influence import Moments, factors_of, moments_of, with_sites
from numpyro_fed.results.scalars import scalars
from numpyro_fed.results.value import Fitted

BLUE, VERMILION = COLOURS[:2]
SILOS, PARAMETERS = 30, 8  # of a forest plot
PROBABILITY = 0.9  # of an interval
POINTS = 500  # of each normal, from which intervals of constrained sites are read
MEANINGS = {
    "loss": "loss",
    "moving": "a whole step would move, sds",
    "shift": "means moved, sds",
    "divergence": "KL of a round",
    "ess": "least effective share",
    "skipped": "silos left out",
    "step": "step",
}
ON_A_LOG_SCALE = ("moving", "shift", "divergence", "step")
SHOWN = ("loss", "moving", "step")  # those of them that a method has, and bytes


class Interval(NamedTuple):
    """Of a parameter, by one silo or by all."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, repr=False, eq=False)
class Plotted(Fitted):
    """A fit that draws figures. Matplotlib is imported when it does; axes are returned."""

    def plot_history(self, names: str | Iterable[str] | None = None) -> np.ndarray:
        """How the rounds went: the loss, how much still moves, and what was sent; an array of matplotlib axes.

        Rounds that looked for a start are shaded. The loss's axis shows the rounds after them, without a first part
        that would hide the rest; thin lines are single rounds where there are many, the thick one their moving average.

        Args:
            names: columns of :attr:`history` to show, or ``"sent"``; by default those above.

        ``fit.plot_history()[0].figure.savefig("history.png")`` keeps the figure.
        """
        columns = [name for name, rows in self.history.items() if rows.ndim == 1 and name not in NOT_SHOWN]
        known = [*columns, *(["sent"] if "bytes_up" in self.history else [])]
        asked = [name for name in (*SHOWN, "sent") if name in known] if names is None else _asked(names, known)
        if not asked:
            raise ValueError("this fit has no history to show: it was made without rounds")
        fig, axes = panels(len(asked), height=2.2, extra=0.3, sharex=True)
        start = np.asarray(self.history.get("start", np.zeros(self.num_rounds)), bool)
        for ax, name in zip(axes, asked, strict=True):
            if start.any():
                ax.axvspan(0.5, start.sum() + 0.5, color="0.93", linewidth=0, label="finding a start")
            if name == "sent":
                _sent(ax, self.history)
            else:
                _column(ax, name, np.asarray(self.history[name], float), start)
            ax.margins(x=0.02)
        fig.supxlabel("round", fontsize="small")
        return as_array(axes)

    def plot_silos(
        self, parameters: str | Iterable[str] | None = None, *, silos: Iterable[str] | None = None
    ) -> np.ndarray:
        r"""A forest plot: each silo's own evidence beside the posterior of all; matplotlib axes. For EP and PVI.

        A silo's line is the median and 90 per cent interval of :math:`t_0 t_j`, the prior times the silo's site: the
        posterior as it would be had nobody else spoken. (The site was found in the others' company, around the
        posterior of all: exact where likelihoods are normal, their curvature there elsewhere.) Where a silo cannot say
        anything of a parameter its line is as wide as the prior; where the product is no distribution, it has none. At
        the bottom the posterior, whose interval is shaded through all silos.

        Reads the server's sites; nobody is asked.

        Args:
            parameters: names of parameters (``"beta[0]"``) or of sites (``"beta"``); by default all, or eight.
            silos: names; by default all, or the thirty that lie furthest from the posterior, in their own sds.
        """
        found = own_evidence(self)
        names = named(list(found.everyone), parameters)
        left_out = len(names) - PARAMETERS if parameters is None and len(names) > PARAMETERS else 0
        names = names[:PARAMETERS] if left_out else names
        if silos is None:
            rows = found.furthest(names, SILOS)
        else:
            rows = [silos] if isinstance(silos, str) else list(silos)
            for name in rows:
                if name not in found.alone:
                    raise ValueError(f"no silo is named {name!r}; the silos are {', '.join(map(repr, found.alone))}")
        return _forest(found, names, rows, left_out)


NOT_SHOWN = ("start", "bytes_up", "bytes_down")


def _asked(names: str | Iterable[str], known: list[str]) -> list[str]:
    found = [names] if isinstance(names, str) else list(names)
    for name in found:
        if name not in known:
            raise ValueError(f"the history has no {name!r}; it has {', '.join(known)}")
    return found


# --- rounds -----------------------------------------------------------------------------------------------------------


def _column(ax: Any, name: str, values: np.ndarray, start: np.ndarray) -> None:
    rounds = np.arange(1, len(values) + 1)
    many = len(values) > 200
    ax.plot(
        rounds, values, color=BLUE, linewidth=0.4 if many else 1.6, alpha=0.5 if many else 1.0, marker=_mark(rounds)
    )
    if many:
        width = max(len(values) // 50, 2)
        mean = np.convolve(values, np.full(width, 1 / width), mode="valid")
        ax.plot(rounds[width - 1 :], mean, color=BLUE, linewidth=1.6)
    ax.set_title(MEANINGS.get(name, name), fontsize="medium", loc="left")
    later = values[~start] if (~start).any() else values
    later = later[np.isfinite(later)]
    if name in ON_A_LOG_SCALE and np.any(later > 0):
        ax.set_yscale("log")
    elif name == "loss" and len(later) > 3:
        low, high = later.min(), np.quantile(later, 0.98) if many else later.max()
        if high > low:
            ax.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))


def _sent(ax: Any, history: dict[str, np.ndarray]) -> None:
    up, down = (np.cumsum(np.asarray(history[f"bytes_{way}"], float)) for way in ("up", "down"))
    unit, name = next(
        (u, n) for u, n in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes")) if up[-1] >= u or u == 1
    )
    rounds = np.arange(1, len(up) + 1)
    for values, label, colour, style in ((up, "up", BLUE, STYLES[0]), (down, "down", VERMILION, STYLES[1])):
        ax.plot(rounds, values / unit, color=colour, linestyle=style, linewidth=1.6, label=label, marker=_mark(rounds))
    ax.set_title(f"sent so far, {name}", fontsize="medium", loc="left")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, fontsize="small", loc="upper left")


def _mark(rounds: np.ndarray) -> str | None:
    return "." if len(rounds) <= 30 else None


# --- silos ------------------------------------------------------------------------------------------------------------


class Evidence(NamedTuple):
    """Of each parameter: what all say, and what each silo says with the prior alone."""

    everyone: dict[str, Interval]  # {parameter: interval}
    alone: dict[str, dict[str, Interval] | None]  # {silo: {parameter: interval}}; None where it is no distribution

    def furthest(self, names: list[str], most: int) -> list[str]:
        """All silos or, where they are too many, those furthest from the posterior, in the order that they have."""
        if len(self.alone) <= most:
            return list(self.alone)

        def distance(own: dict[str, Interval] | None) -> float:
            if own is None:
                return -1.0
            off = [abs(own[n].median - self.everyone[n].median) / max(own[n].high - own[n].low, 1e-300) for n in names]
            return max(off)

        kept = sorted(self.alone, key=lambda name: -distance(self.alone[name]))[:most]
        return [name for name in self.alone if name in kept]


def own_evidence(fit: Fitted) -> Evidence:
    """Intervals of the posterior, and of the prior's factor times each silo's."""
    factors = factors_of(with_sites(fit, "plot_silos"), fit.state.server)
    q = moments_of(factors.family, factors.product)
    if q is None:
        raise ValueError("the posterior itself is improper, so there is nothing to show: run more rounds")
    found: dict[str, Moments | None] = {}
    for j, name in enumerate(fit.state.names):
        with jax.enable_x64(True):
            site = jax.tree.map(lambda leaf, j=j: leaf[j], factors.each)
        found[name] = moments_of(factors.family, product(factors.prior, site))
    proper = {name: moments for name, moments in found.items() if moments is not None}
    intervals = _intervals(fit, [q, *proper.values()])
    alone = dict(zip(proper, intervals[1:], strict=True))
    return Evidence(intervals[0], {name: alone.get(name) for name in found})


def _intervals(fit: Fitted, normals: list[Moments]) -> list[dict[str, Interval]]:
    """Of the constrained sites, from the same standard normal points for all."""
    dim = len(normals[0].mean)
    eps = np.random.default_rng(0).normal(size=(POINTS // 2, dim))
    grid = norm.ppf((np.arange(POINTS) + 0.5) / POINTS)  # a parameter's own points are quantiles, whatever is drawn
    eps = np.concatenate([eps, -eps])
    order = np.argsort(np.argsort(eps, axis=0), axis=0)
    points = [one.mean + grid[order] @ np.linalg.cholesky(one.covariance).T for one in normals]
    dtype = np.dtype(jax.dtypes.canonicalize_dtype(np.float64))
    sites = fit.programs.global_sites(np.concatenate(points).astype(dtype), fit.state.server)
    values = scalars({name: np.asarray(x) for name, x in sites.items()})
    tail = (1 - PROBABILITY) / 2
    out = []
    for i in range(len(normals)):
        part = {name: x[i * POINTS : (i + 1) * POINTS] for name, x in values.items() if np.ptp(x) > 0}
        out.append({name: Interval(*np.quantile(x, [tail, 0.5, 1 - tail])) for name, x in part.items()})
    return out


def _forest(found: Evidence, names: list[str], rows: list[str], left_out: int) -> np.ndarray:
    from matplotlib import pyplot as plt

    columns = min(4, len(names))
    lines = -(-len(names) // columns)
    longest = max(len(name) for name in (*rows, "all silos"))
    size = (0.4 + 0.07 * longest + {1: 4.2, 2: 3.0}.get(columns, 2.2) * columns, lines * (0.9 + 0.24 * (len(rows) + 1)))
    fig, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, sharey=True, layout="constrained")
    for ax in grid.flat[len(names) :]:
        ax.set_visible(False)
    axes, bottom = list(grid.flat[: len(names)]), len(rows)
    for ax, name in zip(axes, names, strict=True):
        plain(ax)
        ax.spines["left"].set_visible(False)
        all_ = found.everyone[name]
        ax.axvspan(all_.low, all_.high, color="0.92", linewidth=0)
        ax.axvline(all_.median, color="0.6", linewidth=0.8)
        for y, silo in enumerate(rows):
            own = found.alone[silo]
            if own is None:
                ax.text(
                    all_.median, y, "no distribution alone", fontsize="x-small", color=GREY, ha="center", va="center"
                )
                continue
            ax.plot([own[name].low, own[name].high], [y, y], color=BLUE, linewidth=1.4, solid_capstyle="butt")
            ax.plot(own[name].median, y, "s", color=BLUE, markersize=4)
        ax.plot([all_.low, all_.high], [bottom, bottom], color=VERMILION, linewidth=2.6, solid_capstyle="butt")
        ax.plot(all_.median, bottom, "D", color=VERMILION, markersize=5)
        ax.set_title(name, fontsize="medium")
        ax.locator_params(axis="x", nbins=4)
    axes[0].set_ylim(bottom + 0.6, -0.6)
    axes[0].set_yticks([*range(bottom + 1)], [*rows, "all silos"], fontsize="small")
    for ax in axes:
        ax.tick_params(axis="y", length=0)
    note = f"{PROBABILITY:.0%} intervals: each silo with the prior alone, and the posterior of all"
    if len(rows) < len(found.alone):
        note += f"; {len(rows)} of {len(found.alone)} silos"
    if left_out:
        note += f"; {len(names)} of {len(names) + left_out} parameters"
    fig.supxlabel(note, fontsize="small", color=GREY)
    return as_array(axes)
