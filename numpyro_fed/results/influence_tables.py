"""Influence and conflict as tables and figures."""

from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import pandas as pd

SHOWN, ACROSS = 30, 16  # silos and parameters of a table or plot
P_VALUES = ("p_value", "family_wise")


@dataclass(frozen=True)
class _Reading:
    """What :class:`Influence` and :class:`Conflict` share."""

    table: pd.DataFrame

    def _shown(self) -> pd.DataFrame:
        raise NotImplementedError

    def notes(self) -> list[str]:
        raise NotImplementedError

    def __repr__(self) -> str:
        shown = self._shown()
        more = [f"... and {len(shown) - SHOWN} more silos: .table"] if len(shown) > SHOWN else []
        return "\n".join([shown.head(SHOWN).to_string(na_rep="-"), *more, *self.notes()])

    def _repr_html_(self) -> str:
        notes = "<br>".join(escape(line) for line in self.notes())
        return self._shown().head(SHOWN).to_html(border=0, na_rep="-") + f"<p>{notes}</p>"


@dataclass(frozen=True, repr=False)
class Influence(_Reading):
    """How far each silo moved the posterior of the globals. Made by :meth:`numpyro_fed.Fit.influence`.

    Attributes:
        table: one row a silo and parameter (of the unconstrained globals): ``shift``, the mean minus the mean without
            the silo, in sds of the posterior; ``sd_ratio``, the sd over the sd without the silo. NaN where the others
            alone do not determine the posterior.
    """

    def _shown(self) -> pd.DataFrame:
        """Mean shifts, silos by parameters, the most influential first."""
        shifts = _wide(self.table, "shift")
        order = shifts.abs().max(axis=1).fillna(np.inf).sort_values(ascending=False, kind="stable").index
        return _foremost(shifts.loc[order].round(2) + 0.0)  # no -0.0

    def notes(self) -> list[str]:
        lines = ["Shift of the mean by each silo, in sds of the posterior; .table has sd ratios, too."]
        improper = _missing(self.table, "shift")
        return lines + [_improper(improper)] * bool(improper) + _left_out(self.table)

    def plot(self) -> Any:
        """Shifts as a table in colour, silos by parameters: matplotlib axes."""
        return _heat_map(self._shown().head(SHOWN), "shift of the mean, in sds")


@dataclass(frozen=True, repr=False)
class Conflict(_Reading):
    r"""Whether each silo agrees with the others (and the prior). Made by :meth:`numpyro_fed.Fit.conflict`.

    Attributes:
        table: one row a silo: ``parameter`` and ``z`` of its largest cautious z, ``p_value`` (times the number of
            parameters) and ``family_wise`` (times the number of silos, too). With ``normal_factors=True`` also
            ``statistic`` and ``df`` (directions of which the silo knows something) of a chi-square, whose p-value it
            then is. NaN where the others alone do not determine the posterior.
        by_parameter: one row a silo and parameter (of the unconstrained globals): ``z``, about standard normal
            where silo and others agree, and ``cautious_z`` (:meth:`numpyro_fed.Fit.conflict`).
        correlations: whether the family keeps them; where it does not, z may be too large.
    """

    by_parameter: pd.DataFrame = field(default_factory=pd.DataFrame)
    correlations: bool = True

    def _shown(self) -> pd.DataFrame:
        found = self.table.set_index("silo").sort_values("p_value", kind="stable", na_position="first")
        told = {name: found[name].map(lambda p: None if np.isnan(p) else f"{p:.3g}") for name in P_VALUES}
        shown = found.drop(columns=["parameter", "z"]).assign(**told).rename_axis(None)
        if "statistic" in shown:
            shown["statistic"] = shown["statistic"].round(2)
        return shown.join(_foremost(_wide(self.by_parameter, "z").round(2) + 0.0).add_prefix("z "))

    def notes(self) -> list[str]:
        improper, found = _missing(self.table, "p_value"), self.table.dropna(subset="p_value")
        lines = []
        if len(found):
            least = found.loc[found["p_value"].idxmin()]
            num = self.by_parameter["parameter"].nunique()
            what = "over all directions" if "statistic" in found else f"in {least['parameter']}, of {num} looked at"
            lines.append(
                f"The smallest p-value is {least['silo']}'s, {what}: {least['p_value']:.3g}; with {len(found)} silos "
                f"looked at, {least['family_wise']:.3g}."
            )
        if not self.correlations:
            lines.append("The family keeps no correlations: where parameters are correlated z are too large.")
        return lines + [_improper(improper)] * bool(improper) + _left_out(self.by_parameter)

    def plot(self) -> Any:
        """z by silo and parameter as a table in colour, with p-values: matplotlib axes."""
        p = self.table.set_index("silo")["p_value"]
        order = p.sort_values(na_position="first", kind="stable").index
        z = _foremost(_wide(self.by_parameter, "z").loc[order].round(2) + 0.0).head(SHOWN)
        z.index = [f"{name}  (p = {p[name]:.2g})" for name in z.index]
        return _heat_map(z, "z: silo against the others", least=3.0)


# --- tables and plots -----------------------------------------------------------------------------------------------


def _wide(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Silos by parameters, in the order of the table."""
    wide = table.pivot(index="silo", columns="parameter", values=column)
    wide = wide.loc[list(dict.fromkeys(table["silo"])), list(dict.fromkeys(table["parameter"]))]
    return wide.rename_axis(index=None, columns=None)


def _foremost(wide: pd.DataFrame) -> pd.DataFrame:
    """The parameters with the largest values, where there are too many to show."""
    largest = wide.abs().max().nlargest(ACROSS).index
    return wide if wide.shape[1] <= ACROSS else wide[[name for name in wide if name in largest]]


def _left_out(table: pd.DataFrame) -> list[str]:
    num = table["parameter"].nunique()
    return [f"Shown are {ACROSS} of {num} parameters, those with the largest values."] * (num > ACROSS)


def _missing(table: pd.DataFrame, column: str) -> list[str]:
    return list(dict.fromkeys(table.loc[table[column].isna(), "silo"]))


def _improper(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{shown}: nothing to compare with, for without it the others' sites do not determine the posterior."


def _heat_map(values: pd.DataFrame, label: str, least: float = 1.0) -> Any:
    import matplotlib
    from matplotlib import pyplot as plt

    num_rows, num_columns = values.shape
    longest = max(len(str(name)) for name in values.index)
    width, height = 1.4 + 0.085 * longest + 0.62 * num_columns, 1.2 + 0.3 * num_rows
    fig, ax = plt.subplots(figsize=(max(width, 3.6), max(height, 2.0)), layout="constrained")
    limit = max(least, np.nanmax(np.abs(values.to_numpy()), initial=0.0))
    colours = matplotlib.colormaps["RdBu_r"].with_extremes(bad="0.9")
    image = ax.imshow(values.to_numpy(float), cmap=colours, vmin=-limit, vmax=limit, aspect="auto")
    ax.set_xticks(range(num_columns), values.columns, rotation=40, ha="right", rotation_mode="anchor", fontsize="small")
    ax.set_yticks(range(num_rows), values.index, fontsize="small")
    ax.set_title(label, loc="left", fontsize="medium")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    for (i, j), value in np.ndenumerate(values.to_numpy(float)):
        text, dark = ("-", False) if np.isnan(value) else (f"{round(value, 1) + 0.0:.1f}", abs(value) > 0.6 * limit)
        ax.text(j, i, text, ha="center", va="center", fontsize="small", color="white" if dark else "0.2")
    bar = fig.colorbar(image, ax=ax, shrink=min(1.0, 2.2 / max(height, 2.0)))
    bar.ax.tick_params(labelsize="small", length=2)
    bar.outline.set_visible(False)
    return ax
