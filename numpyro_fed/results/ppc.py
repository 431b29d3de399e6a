"""Does the model fit? Data that the posterior would give, beside those that there are, silo by silo.

A statistic of a silo's observations is compared with the same of replicates: the model run forward on draws of the
posterior. What leaves a silo are how many replicates have a larger one, and by how many sds of the replicates the
observed one lies off; neither data nor the statistic itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd

from numpyro_fed.data.silos import at_silo
from numpyro_fed.results import predict
from numpyro_fed.results.draws import data_of
from numpyro_fed.results.value import Fitted

Array = jax.Array
Statistic = Callable[[np.ndarray], Any]
BY_NAME: dict[str, Statistic] = {"mean": np.mean, "sd": np.std, "min": np.min, "max": np.max}
LEVEL = 0.05


class PpcMessage(NamedTuple):
    """All that leaves a silo, of one statistic."""

    above: int  # replicates whose statistic is larger
    equal: int
    z: float  # (observed - mean of replicates) / their sd; NaN where all replicates are alike


@dataclass(frozen=True, repr=False)
class Ppc:
    """Posterior predictive checks. Make one with :meth:`numpyro_fed.Fit.ppc`.

    Attributes:
        table: a row a silo and statistic. ``p_value``: the share of replicates with a larger statistic, equal ones
            counted half; near 0 the observed one is too large for the model, near 1 too small. ``z``: by how many sds
            of the replicates it is. NaN of a silo without observations.
        num_samples: replicates of each silo.
    """

    table: pd.DataFrame
    num_samples: int
    own_locals: bool  # replicates have local latents that have seen the data

    @property
    def surprising(self) -> pd.DataFrame:
        """Rows whose two-sided p-value, times the number of rows, is below .05."""
        two_sided = 2 * np.minimum(self.table["p_value"], 1 - self.table["p_value"])
        return self.table[two_sided * len(self.table) < LEVEL]

    def notes(self) -> list[str]:
        found = [
            f"silo {row['silo']!r}: {row['statistic']} of {row['site']} is {'larger' if row['z'] > 0 else 'smaller'} "
            f"than the model would have it (z {row['z']:.1f})."
            for _, row in self.surprising.iterrows()
        ]
        if not found:
            found = ["No silo is surprising, all statistics and silos considered."]
        if self.own_locals:
            found.append(
                "Replicates have the silos' own local latents, which have seen the data: redraw_locals=True draws them "
                "from their prior, and sees more."
            )
        return found

    def __repr__(self) -> str:
        return "\n".join([self.table.head(40).round(3).to_string(index=False), *self.notes()])

    def _repr_html_(self) -> str:
        notes = "<br>".join(escape(line) for line in self.notes())
        return self.table.head(40).to_html(index=False, border=0, float_format="%.3f") + f"<p>{notes}</p>"


def ppc(fit: Fitted, keys: Array, statistic: Any, site: str | None, redraw_locals: bool) -> Ppc:
    """See :meth:`numpyro_fed.Fit.ppc`."""
    statistics, site = _statistics(statistic), _site(fit, site)
    fit.need_silos("replicates of the silos' data")
    rows = []
    for silo in fit.state.names:
        for name, found in _in_silo(fit, keys, silo, site, statistics, redraw_locals).items():
            known = found.above + found.equal or not np.isnan(found.z)  # NaN and no replicate: nothing is observed
            share = (found.above + 0.5 * found.equal) / len(keys) if known else np.nan
            rows.append({"silo": silo, "site": site, "statistic": name, "p_value": share, "z": found.z})
    part = fit.split.partition
    own = not redraw_locals and bool(part.local_sites or part.enumerated_sites)
    return Ppc(pd.DataFrame(rows), len(keys), own)


def _in_silo(
    fit: Fitted, keys: Array, silo: str, site: str, statistics: dict[str, Statistic], redraw_locals: bool
) -> dict[str, PpcMessage]:
    server = fit.state.server
    z = fit.programs.z(keys, server)
    with at_silo(silo):
        padded, own = data_of(fit, silo, plain=True)
        values, counts = fit.programs.observations(padded if own is None else own)
        observed, counted = np.asarray(values[site]), np.asarray(counts[site])
        given = (fit.silos[silo], None) if redraw_locals else (None, silo)
        call, request, _ = predict.asked(fit, *given, plain=True)
        drawn = np.asarray(fit.programs.predictor(call, keys, z, server, request)[site])
        if drawn.shape[1:] != observed.shape:
            raise ValueError(
                f"site {site!r} observes values of shape {observed.shape} in silo {silo!r}, and its distribution draws "
                f"{drawn.shape[1:]}: give it the shape of its observations, .expand({list(observed.shape)})"
            )
        if not np.all(counted):  # a mask of the model's: these are no observations
            observed, drawn = observed[counted], drawn[:, counted]
        if not observed.size:
            return dict.fromkeys(statistics, PpcMessage(0, 0, np.nan))
        return {name: _compared(silo, name, one, observed, drawn) for name, one in statistics.items()}


def _compared(silo: str, name: str, statistic: Statistic, observed: np.ndarray, drawn: np.ndarray) -> PpcMessage:
    actual = np.asarray(statistic(observed))
    if actual.shape != () or not np.isfinite(actual):
        raise ValueError(
            f"statistic {name!r} gives {'an array of shape ' + str(actual.shape) if actual.shape else actual} for silo "
            f"{silo!r}, whose observations have shape {observed.shape}: a statistic gives one finite number"
        )
    each = np.array([float(statistic(one)) for one in drawn])
    sd = float(np.std(each))
    z = (float(actual) - float(np.mean(each))) / sd if sd > 0 else np.nan
    return PpcMessage(int(np.sum(each > actual)), int(np.sum(each == actual)), z)


def _statistics(given: Any) -> dict[str, Statistic]:
    """By name; what is given is a function, one of four names, or several of either."""
    if isinstance(given, str):
        given = (given,)
    if callable(given):
        return {getattr(given, "__name__", "statistic"): given}
    named = dict(given) if isinstance(given, Mapping) else {one: one for one in given}
    found = {}
    for name, one in named.items():
        if not callable(one) and one not in BY_NAME:
            raise ValueError(
                f"statistic {one!r} is not known: give a function of an array of observations, such as np.max, or "
                f"one of {', '.join(map(repr, BY_NAME))}"
            )
        found[getattr(name, "__name__", str(name))] = one if callable(one) else BY_NAME[one]
    if not found:
        raise ValueError("no statistic is given: fit.ppc('sd'), or fit.ppc(np.max)")
    return found


def _site(fit: Fitted, site: str | None) -> str:
    known = [one.name for one in fit.split.partition.sites if one.role == "observed" and not one.at_server]
    if site is None and len(known) == 1:
        return known[0]
    if site is None and known:
        raise ValueError(f"several sites are observed, {', '.join(map(repr, known))}: choose, site={known[0]!r}")
    if site not in known:
        listed = ", ".join(map(repr, known)) or "none: numpyro.factor has no replicates"
        raise ValueError(f"site {site!r} is not observed in the silos; those that are: {listed}")
    return site
