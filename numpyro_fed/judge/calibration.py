r"""What simulation-based calibration found: ranks of the truth, and tests for bias, pull and spread.

With the posterior's mean m and sd s of a parameter, each a function of the simulated data y, and the truth
:math:`\theta`, a posterior that is right has

.. math::

    E\Big[\frac{m - \theta}{s} \,\Big|\, y\Big] = 0, \qquad
    \text{rank of } \theta \text{ among L draws uniform on } 0, \ldots, L.

- **bias** is the mean of (m - theta) / s: posteriors lie too high where it is positive. Most of its noise is that of
  the truth around its own posterior, which the score knows: :math:`g = \nabla \log p(z_G, y)` at the truth has
  :math:`E[g \mid y] = 0` whatever the method does, and where posteriors are about normal the Newton step
  :math:`\mathrm{Cov}(\theta, z_G)\, g` leads from the truth nearly to the posterior mean. So
  :math:`(m - \theta) / s` is regressed on that step, and its mean taken where the step is zero. Where locals cannot be
  integrated exactly there is no score, and the plain mean is taken.
- **pull** is the slope of (m - theta) / s over where m lies among all simulations (normal scores of m, so in sds of the
  posterior for each sd of its place). Where it is negative, posteriors are drawn too close to the prior (a prior that
  is counted twice); where it is positive, not enough. On average over the prior these errors cancel: no bias shows.
- **spread** is the variance of ranks over that of uniform ones: above 1 posteriors are too narrow, below too wide.
- Uniformity as a whole: :mod:`numpyro_fed.judge.uniform`.

A method that does not look at a part of the data has posteriors that are too wide and yet calibrated. What finds it
are ranks of the truth's likelihood, :math:`\log p(y_j \mid z_G)`, silo by silo (Modrák et al., Bayesian Analysis 20,
2025): where a silo is left out, the truth explains its data better than draws do.
"""

from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import norm, rankdata, t

from numpyro_fed.judge import uniform
from numpyro_fed.judge.plot_ranks import ecdf_panels

LEVEL = 0.05  # family-wise, of all tests together
TESTS = 4  # of a quantity: bias, pull, spread, uniformity
NO_MATTER = 0.1  # sds: a bias or a pull that is no finding, however precisely it is known
MOST_FAILED = 0.05  # share of simulations
FEWEST = 10  # simulations below which nothing is tested
GLOBAL, LOCAL, LIKELIHOOD = "global", "local", "likelihood"
SHOWN = 30  # rows of a printed table


@dataclass(frozen=True, repr=False, eq=False)
class Calibration:
    """How well a method's posteriors are calibrated on a design. Made by :func:`numpyro_fed.sbc`.

    Attributes:
        method: its name.
        ranks: one row a simulation that ended, one column a quantity: of ``num_draws`` draws, those below the truth.
        means, sds, truths: of the same shape: the posterior's, and what was to be found.
        steps: of the same shape: Newton steps from the truth, which take most of the noise out of ``bias`` and
            ``pull``; NaN where there are none.
        kinds: of the quantities: ``"global"``, ``"local"``, or ``"likelihood"`` of a silo's data.
        num_draws: L.
        failures: ``{simulation: why}``; these have no ranks.
        verdicts: what the fits said of themselves (``fit.verdict.status``), by simulation.
        seconds: of all simulations, those that were read from a file included.
        num_simulations: that were asked for.
    """

    method: str
    ranks: pd.DataFrame
    means: pd.DataFrame = field(repr=False)
    sds: pd.DataFrame = field(repr=False)
    truths: pd.DataFrame = field(repr=False)
    steps: pd.DataFrame = field(repr=False)
    kinds: dict[str, str] = field(repr=False)
    num_draws: int
    failures: dict[int, str]
    verdicts: pd.Series
    seconds: float
    num_simulations: int

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a quantity, with 95 per cent intervals.

        ``bias``, ``bias_low``, ``bias_high``, ``pull``, ``spread``, ``spread_low``, ``spread_high``, ``p_uniform``;
        ``p_value`` of the four tests together (the least of their p-values, times four) and ``family_wise``, that times
        the number of quantities.
        """
        rows = []
        for name, kind in self.kinds.items():
            column = [part[name].to_numpy() for part in (self.ranks, self.means, self.sds, self.truths, self.steps)]
            ranks, means, sds, truths, steps = column
            no_matter = 0.0 if kind == LIKELIHOOD else NO_MATTER
            found = statistics(ranks, means, sds, truths, steps, self.num_draws, no_matter)
            rows.append({"parameter": name, "kind": kind} | found)
        table = pd.DataFrame(rows)
        table["family_wise"] = np.minimum(1.0, table["p_value"] * len(table))
        return table

    @property
    def num_done(self) -> int:
        """Simulations that ended with a posterior."""
        return len(self.ranks)

    @property
    def ok(self) -> bool:
        """Whether nothing was found that chance does not explain, and nearly all simulations ended.

        Biases and pulls of up to a tenth of a posterior sd are no finding, however precisely they are known.
        """
        failed = len(self.failures) > MOST_FAILED * (self.num_done + len(self.failures))
        return bool(not failed and not np.any(self.table["family_wise"] < LEVEL) and self.num_done >= FEWEST)

    def notes(self) -> list[str]:
        """What was found, in sentences."""
        lines = []
        if self.num_done < FEWEST:
            lines.append(f"{self.num_done} simulations are too few to find anything: at least {FEWEST}, better 200.")
        found = self.table[self.table["family_wise"] < LEVEL].sort_values("family_wise", kind="stable")
        found = found.sort_values("kind", key=lambda kind: kind == LIKELIHOOD, kind="stable")  # parameters come first
        lines += [_finding(row) for _, row in found.head(5).iterrows()]
        if len(found) > 5:
            lines.append(f"... and {len(found) - 5} more: .table")
        if not len(found) and self.num_done >= FEWEST:
            lines.append("Nothing was found that chance does not explain.")
        if self.failures:
            reason, _ = _most_frequent(list(self.failures.values()))
            lines.append(
                f"{len(self.failures)} of {self.num_done + len(self.failures)} simulations failed and have no ranks "
                f"(.failures), most often: {reason}"
            )
        doubted = self.verdicts[~self.verdicts.isin(["trusted", "not checked", ""])]
        if len(doubted):
            told = ", ".join(f"{num} {status!r}" for status, num in doubted.value_counts().items())
            lines.append(f"Of the fits, {told} by their own verdict; they are among the ranks.")
        return lines

    def _shown(self) -> pd.DataFrame:
        pair = lambda low, high: f"[{low:.2f}, {high:.2f}]"
        table, shown = self.table, self.table[["parameter", "bias"]].copy()
        shown["bias"] = table["bias"].map("{:.2f}".format)
        shown["(bias)"] = [pair(*ends) for ends in table[["bias_low", "bias_high"]].to_numpy()]
        shown["pull"] = table["pull"].map("{:.2f}".format)
        shown["spread"] = table["spread"].map("{:.2f}".format)
        shown["(spread)"] = [pair(*ends) for ends in table[["spread_low", "spread_high"]].to_numpy()]
        for name in ("p_uniform", "family_wise"):
            shown[name] = table[name].map("{:.2g}".format)
        return shown.rename(columns={"(bias)": "95%", "(spread)": "95% "})

    def _title(self) -> str:
        return (
            f"Calibration of {self.method}: {self.num_done} simulations, {self.num_draws} draws, {self.seconds:.0f} s"
        )

    def __repr__(self) -> str:
        shown = self._shown()
        more = [f"... and {len(shown) - SHOWN} more: .table"] if len(shown) > SHOWN else []
        return "\n".join([self._title(), shown.head(SHOWN).to_string(index=False), *more, *self.notes()])

    def _repr_html_(self) -> str:
        notes = "<br>".join(escape(line) for line in self.notes())
        return (
            f"<p><b>{escape(self._title())}</b></p>"
            + self._shown().head(SHOWN).to_html(index=False, border=0)
            + f"<p>{notes}</p>"
        )

    def plot(self, parameters: Any = None) -> Any:
        """The distribution of ranks less the uniform one, a panel a quantity, with bands that hold all of it in 95 of
        100 calibrations; as an array of matplotlib axes.

        A curve that leaves the band below, then above (an S) has too many ranks in the middle: posteriors are too wide.
        Above, then below: too narrow. A curve to one side: ranks are too high (below) or too low (above), so posteriors
        lie too low or too high.

        Args:
            parameters: names of quantities, in the order to show them. When not given, all of them, or the sixteen with
                the least p-values where there are more.
        """
        least = self.table.set_index("parameter")["p_value"].sort_values(kind="stable")
        return ecdf_panels(self.ranks, self.num_draws + 1, least, parameters, self.method)


def statistics(
    ranks: np.ndarray,
    mean: np.ndarray,
    sd: np.ndarray,
    truth: np.ndarray,
    steps: np.ndarray,
    num_draws: int,
    no_matter: float = 0.0,
) -> dict[str, float]:
    """Bias, pull and spread of one quantity with their intervals, and p-values; NaN of what few simulations do not say.

    A bias or a pull up to ``no_matter`` is none: what is tested is whether it is larger.

    >>> draws = np.random.default_rng(0)
    >>> mean, ranks = draws.normal(size=1000), draws.integers(0, 100, 1000)
    >>> found = statistics(ranks, mean, np.ones(1000), mean + draws.normal(0.5, 1, 1000), np.full(1000, np.nan), 99)
    >>> bool(-0.6 < found["bias"] < -0.4), bool(abs(found["pull"]) < 0.1), found["p_value"] < 0.001
    (True, True, True)
    """
    num = len(ranks)
    if num < 3:
        names = ("bias", "pull", "spread")
        intervals = [f"{name}_{end}" for name in ("bias", "spread") for end in ("low", "high")]
        return dict.fromkeys([*names, *intervals, "p_uniform"], np.nan) | {"p_value": 1.0}
    with np.errstate(divide="ignore", invalid="ignore"):
        error = (mean - truth) / sd
    error = _without_noise(error, steps)
    bias, bias_error = error.mean(), error.std(ddof=1) / np.sqrt(num)
    wide = t.ppf(0.975, num - 1) * bias_error
    place = norm.ppf((rankdata(mean) - 0.5) / num)
    pull, pull_error = _slope(place, error)
    variance = (num_draws + 1) ** 2 / 12 - 1 / 12  # of a uniform rank
    centred = (ranks - ranks.mean()) ** 2 / variance
    spread = centred.sum() / (num - 1)
    spread_error = norm.ppf(0.975) * centred.std(ddof=1) / np.sqrt(num)
    beyond = lambda x, sd: 2 * t.sf(max(abs(x) - no_matter, 0.0) / sd, num - 2) if sd > 0 else float(x == 0)
    p_bias, p_pull = beyond(bias, bias_error), 1.0 if np.isnan(pull) else beyond(pull, pull_error)
    p_spread = 2 * norm.sf(abs(spread - 1) / np.sqrt(0.8 / num))  # a uniform's fourth moment is 1.8 times var^2
    p_uniform = uniform.p_value(ranks, num_draws + 1)
    tests = [0.0 if np.isnan(p) else float(p) for p in (p_bias, p_pull, p_spread, p_uniform)]
    return {
        "bias": bias,
        "bias_low": bias - wide,
        "bias_high": bias + wide,
        "pull": pull,
        "spread": spread,
        "spread_low": max(spread - spread_error, 0.0),
        "spread_high": spread + spread_error,
        "p_uniform": p_uniform,
        "p_value": min(1.0, TESTS * min(tests)) if num >= FEWEST else 1.0,
    }


def _without_noise(error: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Errors less what the steps, whose mean is zero, explain of them; as they are where there are no steps."""
    slope, slope_error = _slope(steps, error)
    return error - slope * steps if np.isfinite(slope_error) else error


def _slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Of a regression of y on x, and its standard error; NaN where there is none."""
    x, y = x - x.mean(), y - y.mean()
    if not (np.all(np.isfinite(x)) and np.all(np.isfinite(y)) and x @ x > 0 and len(x) > 3):
        return np.nan, np.nan
    slope = x @ y / (x @ x)
    residual = y - slope * x
    return float(slope), float(np.sqrt(residual @ residual / (len(x) - 2) / (x @ x)))


def _finding(row: pd.Series) -> str:
    """A sentence on a quantity that is not calibrated."""
    number = f"family-wise p {row['family_wise']:.2g}"
    if row["kind"] == LIKELIHOOD:
        if row["bias_high"] < 0:
            told = "the truth explains these data better than draws do, as if they were left out or counted too little"
        elif row["bias_low"] > 0:
            told = "draws explain these data better than the truth does, as if they were counted more than once"
        else:
            told = "ranks of the truth's likelihood are not uniform"
        return f"{row['parameter']}: {told} ({number})."
    said = []
    if row["bias_low"] > NO_MATTER or row["bias_high"] < -NO_MATTER:
        said.append(f"means lie {abs(row['bias']):.2f} sd too {'high' if row['bias'] > 0 else 'low'}")
    if row["spread_low"] > 1 or row["spread_high"] < 1:
        narrow = row["spread"] > 1
        said.append(f"posteriors are too {'narrow' if narrow else 'wide'} (spread {row['spread']:.2f})")
    if abs(row["pull"]) > 2 * NO_MATTER:
        said.append(
            "means are drawn too close to the prior's, as if it were counted twice"
            if row["pull"] < 0
            else "means are not drawn to the prior enough"
        )
    return f"{row['parameter']}: {'; '.join(said) or 'ranks are not uniform'} ({number})."


def _most_frequent(texts: list[str]) -> tuple[str, int]:
    names, counts = np.unique(np.array(texts, dtype=object).astype(str), return_counts=True)
    most = int(np.argmax(counts))
    return str(names[most]), int(counts[most])
