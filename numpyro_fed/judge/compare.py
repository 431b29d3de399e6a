"""Is it right? Methods beside a reference, one global parameter at a time and all together.

>>> rng = np.random.default_rng(0)
>>> reference = {"mu": rng.normal(0, 1, 4000)}
>>> cmp = compare({"late": {"mu": rng.normal(0.5, 1, 4000)}}, reference)
>>> cmp.table[["method", "parameter", "mean_shift"]].round(1).values.tolist()
[['late', 'mu', 0.5]]
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

import jax
import numpy as np
import pandas as pd
from scipy.stats import wasserstein_distance

from numpyro_fed.checks import check_key
from numpyro_fed.judge.effective import constant, num_effective
from numpyro_fed.judge.joint import Joint, joint_distances
from numpyro_fed.judge.nuts import Reference
from numpyro_fed.judge.plot import REFERENCE, marginals
from numpyro_fed.results.figures import MAX_PANELS, named
from numpyro_fed.results.scalars import scalars

Array = jax.Array

FLOOR = (
    "Joint distance: all parameters together, in sds of the reference. By chance alone, two sets of its own draws are "
    "as far apart as the floor; distances below twice that are no finding."
)


@dataclass(frozen=True)
class Comparison:
    """Marginals of methods against those of a reference. Make one with :func:`compare`.

    Attributes:
        table: one row a method and parameter. ``mean_shift`` (signed) and ``w1`` are in sds of the reference,
            ``sd_ratio`` is the method's sd over the reference's. ``rounds``, ``bytes_up``, ``bytes_down`` and
            ``seconds`` are the method's totals, NaN where unknown.
        monte_carlo_error: standard error of the reference's mean of each parameter, in its sds: 1 / sqrt(n_eff). A
            shift smaller than two of these is no finding. NaN for draws without chains, of which n_eff is unknown.
    """

    table: pd.DataFrame
    monte_carlo_error: pd.Series
    num_samples: dict[str, int]  # draws of each method
    reference: dict[str, np.ndarray] = field(repr=False)  # {parameter: draws}
    draws: dict[str, dict[str, np.ndarray]] = field(repr=False)  # {method: {parameter: draws}}
    show_joint: bool = True

    @property
    def joint(self) -> pd.DataFrame:
        """How far each method is from the reference, all parameters together; found when first asked for.

        One row a method: ``distance`` (in sds of the reference: see :mod:`numpyro_fed.judge.joint`), its ``floor``, the
        distance that two sets of ``num_draws`` draws of the reference have by chance, and ``num_draws``. A method that
        is right has a distance between zero and about its floor; below twice the floor a distance is no finding. NaN
        where draws are not finite or fewer than 50 (100 of the reference).
        """
        return self._joint.table

    @cached_property
    def _joint(self) -> Joint:
        n_eff = self.monte_carlo_error.max() ** -2  # of the slowest parameter; NaN if unknown
        num_draws = len(next(iter(self.reference.values())))
        return joint_distances(self.reference, self.draws, num_draws if np.isnan(n_eff) else n_eff)

    def notes(self) -> list[str]:
        """A sentence a method on its largest miss, one on the reference's own error, one on joint distances."""
        lines = [_largest_miss(method, rows) for method, rows in self.table.groupby("method", sort=False)]
        error = self.monte_carlo_error.dropna()
        if len(error):
            worst = error.idxmax()
            lines.append(
                f"Monte Carlo error of the reference's means: up to {error[worst]:.3f} sd ({worst}, "
                f"n_eff {error[worst] ** -2:.0f}); shifts below twice that are no finding."
            )
        if self.show_joint:
            if self.joint["distance"].notna().any():
                lines.append(FLOOR)
            lines += self._joint.notes
        return lines

    def _shown(self) -> pd.DataFrame:
        shown = self.table.copy()
        for name in ("mean_shift", "sd_ratio", "w1"):
            shown[name] = shown[name].map("{:.2f}".format)
        for name in ("rounds", "bytes_up", "bytes_down"):
            shown[name] = self.table[name].map(lambda x: "" if pd.isna(x) else f"{x:,.0f}")
        shown["seconds"] = self.table["seconds"].map(lambda x: "" if pd.isna(x) else f"{x:.1f}")
        known = [name for name in shown if (shown[name] != "").any()]
        return shown[known]

    def _tables(self) -> list[pd.DataFrame]:
        if not self.show_joint:
            return [self._shown()]
        shown = self.joint.rename(columns={"distance": "joint distance"})
        for name in ("joint distance", "floor"):
            shown[name] = shown[name].map("{:.2f}".format)
        return [self._shown(), shown]

    def __repr__(self) -> str:
        return "\n".join([*(table.to_string(index=False) for table in self._tables()), *self.notes()])

    def _repr_html_(self) -> str:
        notes = "<br>".join(escape(line) for line in self.notes())
        return "".join(table.to_html(index=False, border=0) for table in self._tables()) + f"<p>{notes}</p>"

    def plot(self, parameters: str | Iterable[str] | None = None) -> np.ndarray:
        """The marginal densities over one another, one panel a parameter: an array of matplotlib axes.

        ``cmp.plot()[0].figure.savefig("marginals.png")`` keeps the figure.

        Args:
            parameters: names of parameters (``"beta[0]"``) or of sites (``"beta"``), in the order to show them. When
                not given, all of them, or the sixteen with the largest w1 where there are more.

        The bandwidth is Silverman's, from the sd or the interquartile range, whichever is smaller: a narrow peak is
        not smoothed away. At -1, 0 and 1 a density is reflected when no draw lies beyond: these are the bounds of
        scales, probabilities and correlations. A method that lies outside the panel is marked at its edge, and a peak
        more than 2.6 times as high as the reference's is cut.
        """
        names = list(self.reference)
        chosen = named(names, parameters)
        left_out = 0
        if parameters is None and len(names) > MAX_PANELS:
            worst = self.table.groupby("parameter", sort=False)["w1"].max().fillna(np.inf).nlargest(MAX_PANELS).index
            chosen = [name for name in names if name in worst]
            left_out = len(names) - len(chosen)
        return marginals(chosen, self.reference, self.draws, left_out)


def compare(
    fits: Any,
    reference: Any,
    *,
    rng_key: Array | None = None,
    num_samples: int = 4000,
    sites: Iterable[str] | None = None,
    joint: bool = True,
    silo: str | None = None,
) -> Comparison:
    """Compare the global posteriors of one or several fits with a reference, or those of a silo's locals.

    Args:
        fits: ``{label: fit}``, or one fit. A fit is what ``run`` returned, a ``Reference`` from ``nuts``, a NumPyro
            MCMC object or a dict ``{site: draws}``.
        reference: any of these.
        rng_key: a JAX key for the fits' draws; ``jax.random.key(0)`` when not given.
        num_samples: draws from each fit; draws that exist already are all used.
        sites: the sites to compare. When not given: the global sites, where a fit or a ``Reference`` tells which they
            are; else the sites that all have in common.
        joint: whether the printed comparison shows joint distances. They take seconds, once, when it is first printed;
            :attr:`Comparison.joint` has them in any case.
        silo: the name of a silo whose local sites are compared, ``silo="york"``: of fits and of a ``Reference``, drawn
            there; a dict of draws then is of that silo's sites.

    Constant parameters (the diagonal of a correlation matrix) are left out.

    With n independent draws on each side, equal distributions still differ: mean_shift by about sqrt(2 / n) (0.02 for
    4000), sd_ratio by about sqrt(1 / n), and w1, which cannot be negative, by about 2 / sqrt(n) (0.03). n_eff takes the
    place of n for draws of a Markov chain: see :attr:`Comparison.monte_carlo_error`.
    """
    key = jax.random.key(0) if rng_key is None else check_key(rng_key)
    if isinstance(fits, Mapping) and not fits:
        raise ValueError("fits is empty: give {label: fit}")
    methods = dict(fits) if isinstance(fits, Mapping) and not _are_draws(fits) else {_label(fits): fits}
    keys = jax.random.split(key, len(methods) + 1)
    everyone = {REFERENCE: reference} | {str(label): fit for label, fit in methods.items()}
    if len(everyone) <= len(methods):
        raise ValueError(f"a method is labelled {REFERENCE!r}, or two alike: give each its own label")
    draws = {
        who: _draws(who, what, k, num_samples, silo) for (who, what), k in zip(everyone.items(), keys, strict=True)
    }
    known = {
        who: _own_sites(what, draws[who], silo)
        for who, what in everyone.items()
        if isinstance(what, Reference) or not _has_own_draws(what)
    }
    if silo is not None and sites is None and known and not any(known.values()):
        raise ValueError(f"silo {silo!r} has no local sites to compare: leave silo= out")
    names = _sites(draws, known, sites)
    flat = {who: scalars({name: values[name] for name in names}) for who, values in draws.items()}
    kept = {name: x.astype(np.float64) for name, x in flat.pop(REFERENCE).items() if not constant(x)}
    if not kept:
        raise ValueError(f"all parameters of {', '.join(names)} are constant in the reference")
    flat = {who: {name: values[name].astype(np.float64) for name in kept} for who, values in flat.items()}
    rows = [
        {"method": who, "parameter": name, **_distances(x, kept[name]), **_cost(everyone[who])}
        for who, values in flat.items()
        for name, x in values.items()
    ]
    counts = {who: len(next(iter(values.values()))) for who, values in flat.items()}
    return Comparison(pd.DataFrame(rows), _monte_carlo_error(reference, kept, silo), counts, kept, flat, joint)


# --- draws, whatever they come from -----------------------------------------------------------------------------------


def _are_draws(what: Any) -> bool:
    return isinstance(what, Mapping) and not any(_is_fit(x) for x in what.values())


def _label(fit: Any) -> str:
    return fit.state.method if hasattr(fit, "posterior") else "fit"


def _is_fit(what: Any) -> bool:
    if hasattr(what, "__array__"):  # a pandas column has a method `sample` of its own
        return False
    return isinstance(what, Mapping) or hasattr(what, "get_samples") or hasattr(what, "sample")


def _has_own_draws(what: Any) -> bool:
    return isinstance(what, Mapping) or hasattr(what, "get_samples")


def _own_sites(what: Any, draws: Mapping[str, Any], silo: str | None) -> list[str]:
    """The sites that belong to what is compared: of the globals' draws all, of a silo's those that live there."""
    return [name for name in draws if silo is None or not what.split.partition[name].at_server]


def _draws(who: str, what: Any, key: Array, num_samples: int, silo: str | None) -> dict[str, np.ndarray]:
    if _are_draws(what):
        found = what
    elif isinstance(what, Reference) and silo is not None:
        found = what.get_samples() | what.sample_local(silo)
    elif silo is not None and hasattr(what, "get_samples"):
        raise TypeError(
            f"{who}: draws of an MCMC object are not sorted by silo: pass {{site: draws}} of {silo!r}'s sites"
        )
    elif silo is not None and hasattr(what, "sample_local"):
        found = what.sample_local(key, num_samples, silo=silo)
    elif hasattr(what, "get_samples"):
        found = what.get_samples()
    elif hasattr(what, "sample"):
        found = what.sample(key, num_samples)
    else:
        raise TypeError(f"{who}: expected a fit, a NumPyro MCMC object or a dict of draws, got a {type(what).__name__}")
    if not isinstance(found, Mapping):
        raise TypeError(f"{who}: expected draws by site, {{name: array}}, got a {type(found).__name__}")
    arrays = {str(name): np.asarray(x) for name, x in found.items()}
    for name, x in arrays.items():
        if x.ndim == 0 or x.shape[0] < 2:
            raise ValueError(
                f"{who}: site {name!r} has {0 if x.ndim == 0 else x.shape[0]} draws, at least 2 are needed"
            )
    return arrays


def _sites(
    draws: dict[str, dict[str, np.ndarray]], known: Mapping[str, list[str]], sites: Iterable[str] | None
) -> list[str]:
    """The sites to compare: those asked for, those known to be global, or those in common."""
    listing = "; ".join(f"{who} has {', '.join(values) or 'no sites'}" for who, values in draws.items())
    if sites is not None:
        names = [sites] if isinstance(sites, str) else list(sites)
    elif known:
        names = list(dict.fromkeys(name for own in known.values() for name in own))
    else:
        reference = draws[REFERENCE]
        # more sites on one side are local ones, or not of interest; more on both sides are a site under two names
        odd = [who for who, values in draws.items() if set(values) - set(reference) and set(reference) - set(values)]
        if odd:
            raise ValueError(f"sites differ: {listing}. Name them alike, or say which to compare with sites=[...]")
        names = [name for name in reference if any(name in values for who, values in draws.items() if who != REFERENCE)]
    for name in names:
        without = [who for who, values in draws.items() if name not in values]
        if without:
            raise ValueError(
                f"site {name!r} is missing: {listing}. Name the sites alike, or say which to compare with sites=[...]"
            )
        shapes = {who: values[name].shape[1:] for who, values in draws.items()}
        if len(set(shapes.values())) > 1:
            listed = ", ".join(f"{who} {shape}" for who, shape in shapes.items())
            raise ValueError(f"site {name!r} differs in shape (without the axis of draws): {listed}")
    if not names:
        raise ValueError(f"there is no site to compare: {listing}")
    return names


# --- the table --------------------------------------------------------------------------------------------------------


def _distances(x: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    sd = reference.std(ddof=1)
    return {
        "mean_shift": (x.mean() - reference.mean()) / sd,
        "sd_ratio": x.std(ddof=1) / sd,
        "w1": wasserstein_distance(x, reference) / sd if np.all(np.isfinite([x.sum(), reference.sum()])) else np.nan,
    }


def _cost(fit: Any) -> dict[str, Any]:
    history = getattr(fit, "history", None) or {}
    total = lambda name: int(np.sum(np.asarray(history[name], np.float64))) if name in history else np.nan
    rounds, seconds = getattr(fit, "num_rounds", None), getattr(fit, "seconds", None)
    return {
        "rounds": np.nan if rounds is None else int(rounds),
        "bytes_up": total("bytes_up"),
        "bytes_down": total("bytes_down"),
        "seconds": np.nan if seconds is None else float(seconds),
    }


def _monte_carlo_error(reference: Any, kept: dict[str, np.ndarray], silo: str | None) -> pd.Series:
    if not _has_own_draws(reference):  # a fit's draws are independent
        n_eff = {name: float(len(x)) for name, x in kept.items()}
    elif isinstance(reference, Mapping):
        n_eff = dict.fromkeys(kept, np.nan)
    else:
        found = reference.get_samples(group_by_chain=True)
        if silo is not None:
            found = found | reference.sample_local(silo, group_by_chain=True)
        chains = scalars(found, batch=2)
        n_eff = {name: num_effective(chains[name]) for name in kept}
    return pd.Series(n_eff, name="monte_carlo_error", dtype=float).rename_axis("parameter") ** -0.5


def _largest_miss(method: Any, rows: pd.DataFrame) -> str:
    broken = rows.loc[rows["w1"].isna(), "parameter"]
    if len(broken):
        return f"{method}: draws of {', '.join(broken[:5])}{', ...' if len(broken) > 5 else ''} are not finite"
    worst = rows.loc[rows["mean_shift"].abs().idxmax()]
    ratios = rows["sd_ratio"]
    spread = (
        f"sd ratios {ratios.min():.2f} to {ratios.max():.2f}" if len(rows) > 1 else f"sd ratio {ratios.iloc[0]:.2f}"
    )
    return f"{method}: largest shift {worst['mean_shift']:.2f} sd ({worst['parameter']}), {spread}"
