"""Whether silos agree: each one's site against the posterior of the others, read off the server."""

from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import chi2, norm

from numpyro_fed.normal.families import Natural
from numpyro_fed.results.influence import Moments, cavities, factors_of, with_sites
from numpyro_fed.results.influence_tables import Conflict
from numpyro_fed.results.value import Fitted

NOTHING = 1e-6  # a direction in which a site adds less than this share to the others' precision says nothing


def conflict(fit: Fitted, normal_factors: bool) -> Conflict:
    """See :meth:`numpyro_fed.results.fit.Fit.conflict`."""
    factors = factors_of(with_sites(fit, "conflict"), fit.state.server)
    q, each = cavities(factors, fit.state.names)
    names, shares = fit.split.coordinate_names(), fit.survey.shares
    if len(shares) != len(each):  # silos have left since they were asked
        shares = np.full(len(each), 1 / len(each))
    dense = [factors.family.dense(site) for _, site, _ in each]
    total = np.sum([np.asarray(site.precision) for site in dense], axis=0)
    rows, by_parameter = [], []
    for (name, _, cavity), site, share in zip(each, dense, shares, strict=True):
        z = cautious = np.full(len(names), np.nan)
        if cavity is not None:
            z = moved(q, cavity)
            cautious = np.where(np.isnan(z), z, least(z, moved(q, cavity, share * total)))
        where, largest, p_value = furthest(cautious)
        row = {"silo": name, "parameter": None if where is None else names[where], "z": largest, "p_value": p_value}
        if normal_factors:
            row |= _chi_square(site, cavity)
        rows.append(row)
        columns = {"parameter": names, "z": z, "cautious_z": cautious}
        by_parameter.append(pd.DataFrame({"silo": name, **columns}))
    table = pd.DataFrame(rows)
    table["family_wise"] = np.minimum(1.0, table["p_value"] * table["p_value"].notna().sum())
    return Conflict(table, pd.concat(by_parameter, ignore_index=True), correlations=factors.family.kind == "full")


def moved(q: Moments, cavity: Moments, precision: np.ndarray | None = None) -> np.ndarray:
    """How far each mean moved from the cavity to q, over the sd that this has by chance.

    That is sqrt(C_c - C) where the silo's site is that of a normal likelihood. With ``precision``, C is the covariance
    that a site of that precision would have left. NaN where nothing is learned of a parameter.
    """
    before, after = np.diagonal(cavity.covariance), np.diagonal(q.covariance)
    if precision is not None:
        after = np.diagonal(np.linalg.inv(np.linalg.inv(cavity.covariance) + precision))
    gained = before - after
    known = gained > NOTHING * before
    return np.where(known, (q.mean - cavity.mean) / np.sqrt(np.where(known, gained, 1.0)), np.nan)


def least(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The one nearer to zero, of each pair; NaN does not count."""
    return np.where(np.abs(b) < np.abs(a), b, a)


def furthest(z: np.ndarray) -> tuple[int | None, float, float]:
    r"""The place of the largest :math:`|z|`, that z, and its two-sided p-value times the number of z (Bonferroni).

    >>> where, z, p_value = furthest(np.array([0.5, -3.0, np.nan]))
    >>> where, z, round(p_value, 4)
    (1, -3.0, 0.0054)
    """
    num = int(np.isfinite(z).sum())
    if num == 0:
        return None, np.nan, np.nan
    where = int(np.nanargmax(np.abs(z)))
    return where, float(z[where]), float(min(1.0, 2 * num * norm.sf(abs(z[where]))))


def _chi_square(site: Natural, cavity: Moments | None) -> dict[str, Any]:
    """Statistic, degrees of freedom and p-value over all directions; the site has a matrix."""
    if cavity is None:
        return {"statistic": np.nan, "df": 0, "p_value": np.nan}
    statistic, df = disagreement(*cavity, np.asarray(site.precision), np.asarray(site.shift))
    return {"statistic": statistic, "df": df, "p_value": float(chi2.sf(statistic, df)) if df else np.nan}


def disagreement(
    mean: np.ndarray, covariance: np.ndarray, precision: np.ndarray, shift: np.ndarray
) -> tuple[float, int]:
    r"""Distance of a normal c from a factor t, and its degrees of freedom.

    With :math:`C_c = L L^\top` and :math:`x = L^{-1}(z - m_c)`, c is standard normal and t has the precision
    :math:`A = L^\top P_t L` and the shift :math:`r = L^\top (h_t - P_t m_c)`. In an eigen-direction of A with value
    :math:`\lambda`, t stands for an observation :math:`r / \lambda` of x with variance :math:`1 / \lambda`, which c
    expects to be normal with mean 0 and variance :math:`1 + 1 / \lambda`. So the sum over directions of

    .. math:: \frac{(r / \lambda)^2}{1 + 1 / \lambda} = \frac{r^2}{\lambda^2 + \lambda}

    is chi-square where both agree and stand for normal likelihoods (not where the width of t depends on the silo's
    residuals). Where t is proper it is
    :math:`(m_c - m_t)^\top (C_c + C_t)^{-1} (m_c - m_t)`. Directions of which t says nothing (or, as a site may, less
    than nothing) are left out.
    """
    root = np.linalg.cholesky(covariance)
    values, vectors = np.linalg.eigh(root.T @ precision @ root)
    r = vectors.T @ (root.T @ (shift - precision @ mean))
    known = values > NOTHING * max(1.0, values[-1])
    if not known.any():
        return np.nan, 0
    return float(np.sum(r[known] ** 2 / (values[known] ** 2 + values[known]))), int(known.sum())
