r"""Whether a fit is to be trusted, as far as a server can find out.

The check phase (:mod:`numpyro_fed.run.check`) knows the density :math:`p(z_G, y)` of all silos at points
:math:`z_s` of a wide Student t around q. A correction would weigh them by p / t; and what it would change is seen
best in pairs, for q's own moments are known under the weights q / t at the same points:

.. math::

    \text{shift} = \frac{\bar z_p - \bar z_q}{\mathrm{sd}_q}, \qquad
    \text{sd ratio} = \frac{\mathrm{sd}_p}{\mathrm{sd}_q}, \qquad
    \bar z_p = \sum_s W^p_s z_s, \quad W^p_s \propto p(z_s) / t(z_s)

Both are exact, 0 and 1, where p = q, whatever the points; unpaired, a right q in 20 dimensions shows shifts of .2 by
chance. Their Monte Carlo errors are those of the paired sums. (Draws of q itself would hide a q that is too narrow.)
What these points do not see is looked at apart (:mod:`numpyro_fed.results.looks`): locals, other modes, theta.

A verdict is about computation: that a fit is what its model and data imply. It never says that the model fits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from scipy.special import logsumexp

from numpyro_fed import ahead
from numpyro_fed.host import real_dtype
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.pieces import jit
from numpyro_fed.precision import ONCE
from numpyro_fed.results.correction import FEW, TRUSTED, Correction
from numpyro_fed.results.importance import pareto_smoothed
from numpyro_fed.results.looks import Looks
from numpyro_fed.results.scalars import scalars

SHIFT = 0.2  # sds that a correction may move a mean of a fit that is trusted
RATIO = 1.25  # by which it may widen an sd, or narrow it
REFINED = 0.1  # by which log p may change, up to a constant, with twice the quadrature nodes
LEAST = 0.1  # of the mean weight of the points with twice the nodes, below which one does not count
BLOCK = 256  # points whose constrained values are computed at once
COLUMNS = ["role", "shift", "shift_error", "sd_ratio", "sd_ratio_error", "pareto_k", "low_share"]
WARNED = ("correct it", "still moving", "not to be trusted")
ONLY = "It is about computation, not about whether the model fits."


class Evidence(NamedTuple):
    """What the check phase found; kept with the fit, so that a correction only adds points."""

    points: Any  # (S, d), of the unconstrained globals, in the user's precision
    log_target: Any  # (S,) float64: log p(z_s, y), locals integrated out
    log_proposal: Any  # (S,) float64: of the Student t
    words: Any  # uint32: of the points' scrambling
    refined: Any = ()  # change of log_target at the first points with twice the nodes
    looks: Looks = Looks()  # at what the points do not see


@dataclass(frozen=True, repr=False, eq=False)
class Verdict:
    """Whether a fit is to be trusted; ``fit.verdict``.

    Attributes:
        status: ``"trusted"``, ``"correct it"``, ``"still moving"``, ``"not to be trusted"`` or ``"not checked"``.
        reasons: why it is not trusted, and what to type.
        table: for each global scalar, the ``shift`` (in sds) and ``sd_ratio`` that a correction would make, on the
            constrained scale, with their Monte Carlo errors. For each local plate, of the weights of its locals given
            the globals, the worst row's ``pareto_k``, and as ``low_share`` the share of rows with an effective share
            below .1.
        pareto_k, ess, num_points: of the points' weights.
        notes: what else was looked at, and what was not.
    """

    status: str
    reasons: tuple[str, ...] = ()
    table: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=COLUMNS))
    pareto_k: float = np.nan
    ess: float = np.nan
    num_points: int = 0
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == "trusted"

    @property
    def warns(self) -> bool:
        """Whether a run says so by itself."""
        return self.status in WARNED

    def __repr__(self) -> str:
        lines = [f"{self.status}. {ONLY}", *(f"- {reason}" for reason in self.reasons)]
        of = self.table[self.table["role"] == "global"]
        if len(of):
            worst = of["shift"].abs().idxmax()
            low, high = of["sd_ratio"].min(), of["sd_ratio"].max()
            lines.append(
                f"A correction would move means by at most {abs(of['shift'][worst]):.2g} sd ({worst}) and make "
                f"sds {low:.3g} to {high:.3g} times theirs; Pareto k {self.pareto_k:.2g}, {self.ess:.0f} effective of "
                f"{self.num_points} points."
            )
        return "\n".join([*lines, *(f"({note}.)" for note in self.notes)])


class Change(NamedTuple):
    """What a correction would make of each scalar, (k,), with Monte Carlo errors (of the log ratio)."""

    shift: np.ndarray
    shift_error: np.ndarray
    ratio: np.ndarray
    ratio_error: np.ndarray

    @property
    def precise(self) -> bool:
        """Errors are at most half of what is still trusted."""
        return bool(np.all(self.shift_error <= SHIFT / 2) and np.all(self.ratio_error <= np.log(RATIO) / 2))

    @property
    def outside(self) -> np.ndarray:
        return (np.abs(self.shift) > SHIFT) | (np.abs(np.log(self.ratio)) > np.log(RATIO))


def change(values: np.ndarray, log_p: np.ndarray, log_q: np.ndarray) -> Change:
    """Of scalars (S, k), from log weights p / t and q / t; see the module.

    >>> z = np.random.default_rng(0).normal(size=(64, 1))
    >>> found = change(z, -z[:, 0] ** 2, -z[:, 0] ** 2)
    >>> found.shift.tolist(), found.ratio.tolist()
    ([0.0], [1.0])

    A number that is the same at all points (a constant, or a sigmoid that is one in float32) moves nowhere.
    """
    p, q = (np.exp(log - logsumexp(log)) for log in (log_p, log_q))
    mean_p, mean_q = p @ values, q @ values
    off_p, off_q = (values - mean_p) ** 2, (values - mean_q) ** 2
    var_p, var_q = p @ off_p, q @ off_q
    tiny = np.finfo(float).tiny
    var_q = np.maximum(var_q, tiny)
    var_p = np.maximum(var_p, 1e-30 * var_q)  # one point may have all the weight
    still = np.ptp(values, axis=0) == 0
    var_p, var_q = (np.where(still, 1.0, var) for var in (var_p, var_q))
    sd = np.sqrt(var_q)
    each = (p[:, None] * (values - mean_p) - q[:, None] * (values - mean_q)) / sd
    spread = p[:, None] * (off_p / var_p - 1) - q[:, None] * (off_q / var_q - 1)
    return Change(
        (mean_p - mean_q) / sd,
        np.sqrt(np.sum(each**2, axis=0)),
        np.sqrt(var_p / var_q),
        np.where(still, 0.0, 0.5 * np.sqrt(np.sum(spread**2, axis=0))),
    )


def log_weights(evidence: Evidence, normal: Normal) -> tuple[np.ndarray, np.ndarray]:
    """p / t and q / t at the points, unnormalised, float64; a density that is not finite is zero."""
    points = np.asarray(evidence.points, np.float64)
    covariance = np.asarray(normal.covariance, np.float64)
    scale = np.sqrt(np.diagonal(covariance))
    root = scale[:, None] * np.linalg.cholesky(covariance / scale / scale[:, None])
    white = np.linalg.solve(root, (points - np.asarray(normal.mean, np.float64)).T)
    log_q = -0.5 * np.sum(white**2, axis=0)
    log_p = np.where(np.isfinite(evidence.log_target), evidence.log_target, -np.inf)
    return log_p - evidence.log_proposal, log_q - evidence.log_proposal


def found_change(evidence: Evidence, normal: Normal, draws: Mapping[str, Any]) -> tuple[Change, list[str]]:
    """Of the scalars of ``draws``, {global site: its values at the points}, and their names."""
    named = scalars(draws)
    values = np.stack([np.asarray(column, np.float64) for column in named.values()], axis=1)
    return change(values, *log_weights(evidence, normal)), list(named)


def judged(
    evidence: Evidence | str, normal: Normal | None, draws: Mapping[str, Any], reasons: tuple[str, ...], moving: bool
) -> Verdict:
    """The verdict on a fit.

    Args:
        evidence: of the check phase; or why there is none.
        normal: q(z_G).
        draws: the constrained globals at the points.
        reasons: what the rounds themselves showed.
        moving: one of these is that the posterior had not come to rest.
    """
    if isinstance(evidence, str) or normal is None:
        status = "still moving" if moving else "not to be trusted" if reasons else "not checked"
        return Verdict(status, (*reasons, *([evidence] if isinstance(evidence, str) else [])))
    log_p, _ = log_weights(evidence, normal)
    if not np.any(np.isfinite(log_p)):
        nowhere = "the density is zero at every point around the posterior approximation: run more rounds"
        return Verdict("not to be trusted", (*reasons, nowhere), num_points=len(log_p))
    if np.any(np.ptp(np.asarray(evidence.points), axis=0) == 0):
        same = (
            "the posterior approximation is so narrow that all points around it are the same number, and none of them "
            "tells whether it is right: call numpyro.enable_x64() first, or scale the data"
        )
        return Verdict("still moving" if moving else "not to be trusted", (*reasons, same), num_points=len(log_p))
    smoothed, pareto_k = pareto_smoothed(log_p)
    ess = float(np.exp(-logsumexp(2 * smoothed)))
    found, names = found_change(evidence, normal, draws)
    columns = (found.shift, found.shift_error, found.ratio, found.ratio * found.ratio_error)
    table = _table(names, columns, evidence.looks)
    facts = (table, pareto_k, ess, len(log_p), evidence.looks.notes())
    apart = (*_integrator(evidence), *evidence.looks.reasons())
    if pareto_k > TRUSTED:
        far = (
            f"importance weights of points around the posterior approximation have a Pareto k of {pareto_k:.2f}, above "
            f"{TRUSTED}: it is elsewhere, or too narrow. Run more rounds, or another method (nf.EP), or correct it "
            "twice, fit.correct(key).correct(key), and see .correction"
        )
        return Verdict("still moving" if moving else "not to be trusted", (*reasons, far, *apart), *facts)
    outside = found.outside
    if np.any(outside):
        worst = int(np.argmax(np.maximum(np.abs(found.shift) / SHIFT, np.abs(np.log(found.ratio)) / np.log(RATIO))))
        off = (
            f"a correction would move {names[worst]} by {found.shift[worst]:.2g} sd and make its sd "
            f"{found.ratio[worst]:.2f} times as large: fit.correct(jax.random.key(1)) does that"
        )
        curable = ess >= FEW and not apart
        status = "still moving" if moving else "correct it" if curable else "not to be trusted"
        return Verdict(status, (*reasons, off, *apart), *facts)
    if moving or reasons or apart:
        return Verdict("still moving" if moving else "not to be trusted", (*reasons, *apart), *facts)
    if not found.precise:
        noisy = (
            f"with {len(log_p)} points the check's own error is {np.max(found.shift_error):.2g} sd in a mean, too "
            "large to tell"
        )
        return Verdict("not checked", (noisy,), *facts)
    return Verdict("trusted", (), *facts)


def _integrator(evidence: Evidence) -> tuple[str, ...]:
    """Whether more quadrature nodes would have given another density, where there is any mass before or after.

    A constant changes no posterior; and nodes are placed around q's mean, so that far out the density may be anything.
    """
    refined = np.asarray(evidence.refined, np.float64)
    before = (np.asarray(evidence.log_target) - np.asarray(evidence.log_proposal))[: len(refined)]
    fine = np.isfinite(refined) & np.isfinite(before)
    refined, before = refined[fine], before[fine]
    if refined.size:
        share = np.maximum(*(np.exp(log - logsumexp(log)) for log in (before, before + refined)))
        refined = refined[share * refined.size >= LEAST]
    if not refined.size or np.ptp(refined) <= REFINED:
        return ()
    return (
        f"with twice as many quadrature nodes for the locals the log density changes by up to {np.ptp(refined):.2g}: "
        "pass solver=nf.solvers.Importance(num_nodes=43), or more",
    )


def _table(names: list[str], columns: tuple, looks: Looks) -> pd.DataFrame:
    """A row for each global scalar and one for each local plate."""
    table = pd.DataFrame(dict(zip(COLUMNS[1:5], columns, strict=True)), index=names)
    table.insert(0, "role", "global")
    local = {
        plate: {"role": "local", "pareto_k": look.pareto_k, "low_share": look.low_share}
        for plate, look in looks.by_plate().items()
    }
    table = table.reindex(columns=COLUMNS)
    return pd.concat([table, pd.DataFrame.from_dict(local, "index").reindex(columns=COLUMNS)]) if local else table


def corrected_verdict(correction: Correction, draws: Mapping[str, Any], looks: Looks) -> Verdict:
    """On a fit whose points are weighed: whether the weights are to be trusted. Its errors are those of their means.

    Locals and theta are as they were, and so are other modes: ``looks`` at them still hold.
    """
    named = scalars(draws)
    values = np.stack([np.asarray(column, np.float64) for column in named.values()], axis=1)
    weights = np.exp(correction.log_weights)[:, None]
    mean = np.sum(weights * values, axis=0)
    off = (values - mean) ** 2
    variance = np.maximum(np.sum(weights * off, axis=0), np.finfo(float).tiny)
    shift_error = np.sqrt(np.sum(weights**2 * off, axis=0) / variance)
    ratio_error = 0.5 * np.sqrt(np.sum((weights * (off / variance - 1)) ** 2, axis=0))
    table = _table(list(named), (0.0 * mean, shift_error, 1.0 + 0.0 * mean, ratio_error), looks)
    reasons = (() if correction.trusted else (correction.verdict(),)) + looks.reasons()
    status = "not to be trusted" if reasons else "trusted"
    return Verdict(status, reasons, table, correction.pareto_k, correction.ess, len(correction.points), looks.notes())


def globals_at(split: SplitModel, theta: dict[str, Any], points: np.ndarray) -> dict[str, np.ndarray]:
    """``{global site: values}``, constrained, at points (S, d) of the unconstrained globals; in blocks of one size."""
    size, program = min(BLOCK, len(points)), _constrained(split)
    ahead.wait(("globals", ByIdentity(split)))
    blocks = [program(points[i : i + size], theta) for i in range(0, len(points), size)]
    names = split.partition.global_sites
    return {name: np.concatenate([np.asarray(block[name]) for block in blocks]) for name in names}


def foresee_globals(split: SplitModel) -> None:
    """Begin to compile the program of :func:`globals_at`."""
    if ahead.worthwhile():
        points = jax.ShapeDtypeStruct((BLOCK, split.dim), real_dtype())
        ahead.begin(("globals", ByIdentity(split)), lambda: _constrained(split).lower(points, split.theta))


def _constrained(split: SplitModel) -> Any:
    make = lambda: jit(jax.vmap(split.constrain_global, (0, None)), compiler_options=ONCE)
    return remembered(make, "globals", ByIdentity(split))
