r"""Which of several models predicts better, and which has more evidence.

Both in one table. elpd is that of leave-one-out cross-validation (:meth:`numpyro_fed.Fit.loo`), log evidence that of
a correction (:meth:`numpyro_fed.Fit.correct`).

The error of a difference of elpds is much smaller than that of the two, for both models predict the same units: it is
the standard error of a sum of paired differences :math:`d_i = \mathrm{elpd}_i^A - \mathrm{elpd}_i^B`,

.. math:: \mathrm{se} = \sqrt{\frac{n}{n - 1} \Big(\sum_i d_i^2 - \frac{(\sum_i d_i)^2}{n}\Big)}

Elpd by unit does not leave the silo, and it need not: both models are evaluated in the same silo, which has all its
:math:`d_i`. What leaves are their number, their sum and the sum of their squares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

import jax
import numpy as np
import pandas as pd

from numpyro_fed.checks import check_key, format_names
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.loo import Loo, paired, standard_error

CLOSE = 4.0  # differences of elpd below which models predict alike (Sivula, Magnusson, Matamoros and Vehtari 2020)


@dataclass(frozen=True, repr=False)
class ModelComparison:
    """Models by elpd and by evidence. Make one with :func:`compare_models`.

    Attributes:
        table: a row a model, the best elpd first. ``elpd`` with its ``se``; ``elpd_diff`` to the best, at most 0, with
            its own ``diff_se``; ``p_loo``, the effective number of parameters; ``above``, units whose Pareto k-hat is
            above 0.7; ``log_evidence`` with its Monte Carlo error ``evidence_se``, and ``evidence_diff`` to the
            largest, of fits that were corrected.
        loos: ``{model: Loo}``, with elpd by silo.
    """

    table: pd.DataFrame
    loos: dict[str, Loo] = field(compare=False)
    remarks: tuple[str, ...] = ()

    def notes(self) -> list[str]:
        best, lines = self.table.index[0], []
        for model, row in self.table.iloc[1:].iterrows():
            small = abs(row["elpd_diff"]) < CLOSE or not abs(row["elpd_diff"]) > 2 * row["diff_se"]
            what = "predicts about as well as" if small else "predicts worse than"
            lines.append(f"{model} {what} {best}: elpd {row['elpd_diff']:.1f} (se {row['diff_se']:.1f}).")
        above = {model: int(n) for model, n in self.table["above"].items() if n}
        if above:
            told = ", ".join(f"{model} {number}" for model, number in above.items())
            lines.append(f"Units with a Pareto k above 0.7, whose elpd is not to be trusted: {told}.")
        return [*lines, *self.remarks]

    def __repr__(self) -> str:
        return "\n".join([self.table.round(2).to_string(na_rep="-"), *self.notes()])

    def _repr_html_(self) -> str:
        notes = "<br>".join(escape(line) for line in self.notes())
        return self.table.to_html(border=0, float_format="%.2f", na_rep="-") + f"<p>{notes}</p>"


def compare_models(
    fits: Mapping[str, Fit], rng_key: Any = None, num_samples: int = 1000, *, by: str | None = None
) -> ModelComparison:
    """Several models of the same observations, by what they predict and by their evidence, with errors.

    Args:
        fits: ``{model: fit}``, of silos with the same names and observations; their other arguments may differ. Those
            that were corrected (``fit.correct(key)``) have their evidence in the table.
        rng_key: by default ``jax.random.key(0)``.
        num_samples, by: as of :meth:`numpyro_fed.Fit.loo`. All models must leave out the same units: a random
            intercept for each child leaves out children, a model without it rows. ``by="child"``, an argument that
            numbers them, or ``by="silo"`` lets all leave out the same.

    Evidence needs proper priors, and depends on them however many data there are; elpd hardly does. Where a model has
    ``numpyro.param``, its evidence is that at their values.

    Example:
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> def flat(x, y=None):
        ...     mean = numpyro.sample("mean", dist.Normal(0, 2))
        ...     with numpyro.plate("rows", x.shape[0]):
        ...         numpyro.sample("y", dist.Bernoulli(logits=mean), obs=y)
        >>> other = nf.EP(flat).run(jax.random.key(0), silos, progress_bar=False)
        >>> nf.compare_models({"with x": fit, "without": other}).table.index.tolist()
        ['with x', 'without']
    """
    key = jax.random.key(0) if rng_key is None else check_key(rng_key)
    _check(fits)
    loos = {str(model): fit.loo(key, num_samples, by=by) for model, fit in fits.items()}
    names = sorted(loos, key=lambda model: -loos[model].elpd)
    rows = {model: _row(loos[model], loos[names[0]], model, names[0]) for model in names}
    remarks = []
    for model, fit in fits.items():
        value, error, remark = _evidence(fit)
        rows[str(model)] |= {"log_evidence": value, "evidence_se": error}
        if remark:
            remarks.append(f"{model}: {remark}")
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("model")
    table["evidence_diff"] = table["log_evidence"] - table["log_evidence"].max()
    return ModelComparison(table, loos, tuple(remarks))


def _row(own: Loo, best: Loo, model: str, other: str) -> dict[str, float]:
    row = {"elpd": own.elpd, "se": own.se, "elpd_diff": 0.0, "diff_se": 0.0, "p_loo": own.p_loo}
    row["above"] = int(own.table["above"].sum())
    if own is best:
        return row
    heard = {silo: paired(own, best, silo) for silo in own.table.index}
    unlike = [silo for silo, found in heard.items() if not found.same]
    if unlike:
        raise ValueError(
            f"{model!r} and {other!r} leave out different units ({own.num_units} and {best.num_units}; first in silo "
            f"{unlike[0]!r}): rows in one, what shares local latents in the other? Compare them by what both can leave "
            "out: by='silo', or by= an argument that numbers the groups of all rows, by='county'"
        )
    units, total, squared = (sum(getattr(m, name) for m in heard.values()) for name in ("units", "total", "squared"))
    return row | {"elpd_diff": total, "diff_se": float(standard_error(units, total, squared))}


def _evidence(fit: Fit) -> tuple[float, float, str]:
    """log p(y), its Monte Carlo error, and why there is none."""
    found = fit.correction
    improper = [site.name for site in fit.split.partition.sites if site.shape.improper]
    if improper:
        return np.nan, np.nan, f"the prior of {format_names(improper)} is improper, so that it has no evidence."
    if found is None:
        return np.nan, np.nan, "no evidence was asked for: fit.correct(key)."
    error = float(np.sqrt(max(1 / found.ess - 1 / len(found.points), 0.0)))
    doubt = "" if found.trusted else f"its evidence is not to be trusted ({found!r})."
    return found.log_evidence, error, doubt


def _check(fits: Any) -> None:
    if not isinstance(fits, Mapping) or not fits:
        raise TypeError(
            f"fits must be a dict {{model: fit}}, got {'an empty one' if fits == {} else type(fits).__name__}"
        )
    for model, fit in fits.items():
        if not isinstance(fit, Fit):
            raise TypeError(f"{model!r} must be a fit that run() returned, got a {type(fit).__name__}")
    (first, one), *others = fits.items()
    sites = lambda fit: {s.name for s in fit.split.partition.sites if s.role in ("observed", "factor")}
    for model, fit in others:
        if set(fit.state.names) != set(one.state.names):
            raise ValueError(
                f"{first!r} has the silos {format_names(one.state.names)}, {model!r} {format_names(fit.state.names)}: "
                "models are compared on the same data"
            )
        if sites(fit) != sites(one):
            told = [f"{who!r} observes {', '.join(sorted(sites(what)))}" for who, what in ((first, one), (model, fit))]
            raise ValueError(
                f"{', '.join(told)}: densities of different observations cannot be compared. Name the same ones alike"
            )
