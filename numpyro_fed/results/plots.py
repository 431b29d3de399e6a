"""Figures of a fit: how its rounds went, and what each silo says beside the posterior of all."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm

from numpyro_fed.host import put, real_dtype
from numpyro_fed.results.conflict import NOTHING
from numpyro_fed.results.figures import COLOURS, GREY, STYLES, as_array, named, panels, plain
from numpyro_fed.results.influence import cavities, factors_of, with_sites
from numpyro_fed.results.scalars import scalars
from numpyro_fed.results.value import Fitted

BLUE, VERMILION = COLOURS[:2]
SILOS, PARAMETERS = 30, 8  # of a forest plot
PROBABILITY = 0.9  # of an interval
WIDEST = 12.0  # intervals of the posterior: a silo's line that is wider is cut
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
                ax.axvspan(0.5, start.sum() + 0.5, color="0.92", linewidth=0)
                ax.text(
                    0.6, 0.01, "start", transform=ax.get_xaxis_transform(), va="bottom", fontsize="x-small", color=GREY
                )
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

        A silo's line is the 90 per cent interval of what it adds to the posterior of a parameter, the others (and the
        prior) being believed about all the rest: with mean m and variance C of the posterior, and m_c, C_c of the
        posterior without the silo, the normal with precision :math:`1 / C - 1 / C_c` and shift
        :math:`m / C - m_c / C_c`. No prior is in it. A silo that disagrees by :meth:`conflict` has a line away from the
        others'; one without a line says nothing of the parameter. At the bottom the posterior, whose interval is shaded
        through all silos.

        (The whole site :math:`t_j` says more, of all parameters together. But it was found around the posterior of all,
        and where a silo disagrees, that is far from where it would go by itself.)

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
    rounds, later = np.arange(1, len(values) + 1), values[~start]
    many = len(values) > 200
    thin = dict(linewidth=0.4, alpha=0.5) if many else dict(linewidth=1.6)
    ax.plot(rounds, values, color=BLUE, marker=_mark(rounds), **thin)
    known = np.isfinite(later)  # a round in which nothing moved has no loss
    if many and np.any(known):
        width = max(len(later) // 50, 1)
        mean = np.convolve(
            np.interp(np.arange(len(later)), np.flatnonzero(known), later[known]), np.full(width, 1 / width), "valid"
        )
        ax.plot(rounds[~start][width - 1 :], mean, color=BLUE, linewidth=1.6)
    ax.set_title(MEANINGS.get(name, name), fontsize="medium", loc="left")
    if name in ON_A_LOG_SCALE and np.any(later > 0):
        ax.set_yscale("log")
    elif name == "loss":
        shown = values[max(start.sum() - 1, 0) :]  # with the last of the start
        shown = shown[np.isfinite(shown)]
        if len(shown):
            low, high = np.quantile(shown, [0.005, 0.995]) if many else (shown.min(), shown.max())
            room = max(0.15 * (high - low), 1e-4 * abs(high), 1e-12)
            ax.set_ylim(low - room, high + room)


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
    """Of each parameter: what all say, and what each silo says of it, the others being believed about the rest."""

    everyone: dict[str, Interval]  # {parameter: interval}
    alone: dict[str, dict[str, Interval]]  # {silo: {parameter: interval}}; without those of which it says nothing

    def furthest(self, names: list[str], most: int) -> list[str]:
        """All silos or, where they are too many, those furthest from the posterior, in the order that they have."""
        if len(self.alone) <= most:
            return list(self.alone)

        def distance(own: dict[str, Interval]) -> float:
            known = [(own[name], self.everyone[name].median) for name in names if name in own]
            return max((abs(one.median - middle) / (one.high - one.low) for one, middle in known), default=0.0)

        kept = sorted(self.alone, key=lambda name: -distance(self.alone[name]))[:most]
        return [name for name in self.alone if name in kept]


def own_evidence(fit: Fitted) -> Evidence:
    """Intervals of the posterior, and of each silo's factor of it, one parameter at a time.

    The silo's factor of a coordinate is the posterior's normal over that of the posterior without the silo: precision
    1 / C - 1 / C_c, shift m / C - m_c / C_c.
    """
    q, each = cavities(factors_of(with_sites(fit, "plot_silos"), fit.state.server), fit.state.names)
    sds = np.sqrt(np.diagonal(q.covariance))
    constrained = _back(fit, q.mean)
    everyone = constrained(q.mean, sds)
    alone = {}
    for name, _, cavity in each:
        own_mean, own_sds = np.full((2, len(sds)), np.nan)
        if cavity is not None:
            variance = np.diagonal(cavity.covariance)
            precision = 1 / sds**2 - 1 / variance
            known = precision * sds**2 > NOTHING
            own_sds[known] = precision[known] ** -0.5
            own_mean[known] = ((q.mean / sds**2 - cavity.mean / variance) / np.where(known, precision, 1.0))[known]
        alone[name] = constrained(own_mean, own_sds)
    return Evidence(everyone, alone)


def _back(fit: Fitted, centre: np.ndarray) -> Callable[[np.ndarray, np.ndarray], dict[str, Interval]]:
    """From means and sds of the coordinates of z_G to intervals, in the sites' own units where these have as many."""
    split, server, dim = fit.split, fit.state.server, len(centre)
    reach = norm.ppf(0.5 + PROBABILITY / 2)
    at_centre = fit.programs.global_sites(put(centre[None].astype(real_dtype())), server)
    shapes = {site: np.shape(value)[1:] for site, value in at_centre.items()}
    plain_sites = [site for site, shape in split.global_shapes.items() if shapes[site] == shape]
    names = split.coordinate_names()
    own_units = [any(name == site or name.startswith(f"{site}[") for site in plain_sites) for name in names]

    def intervals(mean: np.ndarray, sds: np.ndarray) -> dict[str, Interval]:
        ends = np.stack([mean - reach * sds, mean, mean + reach * sds])  # (3, d)
        points = np.broadcast_to(centre, (3, dim, dim)).copy()
        points[:, np.arange(dim), np.arange(dim)] = np.where(np.isfinite(ends), ends, centre)
        sites = fit.programs.global_sites(put(points.reshape(-1, dim).astype(real_dtype())), server)
        values = scalars({site: np.asarray(sites[site]) for site in plain_sites})
        out = {}
        for k, name in enumerate(names):
            if np.isfinite(sds[k]):
                found = values[name].reshape(3, dim)[:, k] if own_units[k] else ends[:, k]
                out[name if own_units[k] else f"{name}, unconstrained"] = Interval(*sorted(map(float, found)))
        return out

    return intervals


def _limits(all_: Interval, lines: Iterable[Interval]) -> tuple[float, float]:
    """Of a panel: a silo that hardly knows a parameter does not flatten the others."""
    near = [all_, *(one for one in lines if one.high - one.low <= WIDEST * (all_.high - all_.low))]
    low, high = min(one.low for one in near), max(one.high for one in near)
    return low - 0.05 * (high - low), high + 0.05 * (high - low)


def _forest(found: Evidence, names: list[str], rows: list[str], left_out: int) -> np.ndarray:
    from matplotlib import pyplot as plt

    columns, bottom = min(4, len(names)), len(rows)
    lines = -(-len(names) // columns)
    longest = max(len(name) for name in (*rows, "all silos"))
    width = 0.4 + 0.07 * longest + {1: 4.2, 2: 3.0}.get(columns, 2.2) * columns
    size = (width, lines * (0.9 + 0.24 * (bottom + 1)))
    fig, grid = plt.subplots(lines, columns, figsize=size, squeeze=False, sharey=True, layout="constrained")
    for ax in grid.flat[len(names) :]:
        ax.set_visible(False)
    axes = list(grid.flat[: len(names)])
    for ax, name in zip(axes, names, strict=True):
        _forest_panel(ax, found.everyone[name], [found.alone[silo].get(name) for silo in rows])
        ax.set_title(name, fontsize="medium")
    axes[0].set_ylim(bottom + 0.6, -0.6)
    axes[0].set_yticks([*range(bottom + 1)], [*rows, "all silos"], fontsize="small")
    for ax in axes:
        ax.tick_params(axis="y", length=0)
    note = f"{PROBABILITY:.0%} intervals: of each silo's own evidence, and of the posterior"
    if len(rows) < len(found.alone):
        note += f"; {len(rows)} of {len(found.alone)} silos"
    if left_out:
        note += f"; {len(names)} of {len(names) + left_out} parameters"
    fig.supxlabel(note, fontsize="small", color=GREY)
    return as_array(axes)


def _forest_panel(ax: Any, all_: Interval, lines: list[Interval | None]) -> None:
    """One parameter: a line for each silo, marked where it goes on beyond the panel, and the posterior below."""
    plain(ax)
    ax.spines["left"].set_visible(False)
    ax.axvspan(all_.low, all_.high, color="0.92", linewidth=0)
    ax.axvline(all_.median, color="0.6", linewidth=0.8)
    low, high = _limits(all_, [one for one in lines if one is not None])
    for y, own in enumerate(lines):
        if own is None:
            ax.text(
                0.02, y, "says nothing", transform=ax.get_yaxis_transform(), va="center", fontsize="x-small", color=GREY
            )
            continue
        ax.plot([own.low, own.high], [y, y], color=BLUE, linewidth=1.4, solid_capstyle="butt")
        ax.plot(own.median, y, "s", color=BLUE, markersize=4)
        for mark, end, beyond in (("<", low, own.low < low), (">", high, own.high > high)):
            if beyond:
                ax.plot(end, y, mark, color=BLUE, markersize=4, clip_on=False)
    bottom = len(lines)
    ax.plot([all_.low, all_.high], [bottom, bottom], color=VERMILION, linewidth=2.6, solid_capstyle="butt")
    ax.plot(all_.median, bottom, "D", color=VERMILION, markersize=5)
    ax.set_xlim(low, high)
    ax.locator_params(axis="x", nbins=4)
