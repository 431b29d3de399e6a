"""Exact posteriors of small models, in NumPy and float64: what the benchmarks hold fits against."""

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.special import logsumexp
from scipy.stats import chi2, multivariate_t, norm, qmc

Exact = dict[str, tuple[float, float]]  # {scalar, as fit.summary() names it: (mean, sd)}
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(40)
LOG_WEIGHTS = np.log(WEIGHTS / np.sqrt(2 * np.pi)) + 0.5 * NODES**2
NEWTON_STEPS = 25


def row_integrals(likelihood: Callable, centre: np.ndarray, spread: np.ndarray, num: int) -> np.ndarray:
    r"""The sum over rows of :math:`\log \int N(e; 0, 1) f_i(c + s e)\, de`, for many places at once.

    Args:
        likelihood: ``x (S, rows) -> (log f, its slope, minus its curvature)``, log-concave in x.
        centre, spread: c and s, which broadcast to (S, rows).
        num: the number of rows.

    Quadrature with 40 nodes around each row's mode, in its own sds: checked against 80 it changes nothing.
    """
    e = np.zeros((np.broadcast(centre, spread).shape[0], num))
    spread = np.maximum(spread, 1e-12)
    for _ in range(NEWTON_STEPS):
        _, slope, curvature = likelihood(centre + spread * e)
        e = e + np.clip((spread * slope - e) / (1 + spread**2 * curvature), -2, 2)
    sd = 1 / np.sqrt(1 + spread**2 * likelihood(centre + spread * e)[2])
    terms = []
    for node, log_weight in zip(NODES, LOG_WEIGHTS, strict=True):
        at = e + sd * node
        terms.append(log_weight + likelihood(centre + spread * at)[0] - 0.5 * at**2)
    return np.sum(logsumexp(np.stack(terms), axis=0) + np.log(sd), axis=1)


def weighted(log_density: Callable, start: Any, scalars: Callable, num: int = 2**14) -> Exact:
    """By importance sampling from a Student t of 5 degrees of freedom around the mode, on Sobol points.

    Args:
        log_density: ``z (S, d) -> (S,)``, unnormalised.
        start: of the search for the mode.
        scalars: ``z (S, d) -> {name: (S,)}``.
    """
    one = lambda z: -float(log_density(np.asarray(z)[None])[0])
    mode = minimize(one, start, method="Nelder-Mead", options=dict(xatol=1e-6, fatol=1e-9, maxiter=20_000)).x
    d, step = len(mode), 1e-3
    unit = step * np.eye(d)
    shifts = [(i, j, a, b) for i in range(d) for j in range(d) for a in (1, -1) for b in (1, -1)]
    values = log_density(np.array([mode + a * unit[i] + b * unit[j] for i, j, a, b in shifts]))
    signs = np.array([a * b for _, _, a, b in shifts])
    hessian = np.sum((signs * values).reshape(d * d, 4), axis=1).reshape(d, d) / (4 * step**2)
    covariance, centre = np.linalg.inv(-0.5 * (hessian + hessian.T)), mode
    for _ in range(3):  # around the moments that were found, a third as wide again
        proposal = multivariate_t(centre, covariance * 1.3, df=5)
        points = _student(centre, covariance * 1.3, 5, num)
        log_weight = log_density(points) - proposal.logpdf(points)
        weight = np.exp(log_weight - logsumexp(log_weight))
        centre = weight @ points
        covariance = (points - centre).T @ (weight[:, None] * (points - centre))
    effective = 1 / np.sum(weight**2)
    if effective < 0.1 * num:
        raise RuntimeError(f"of {num} points only {effective:.0f} are effective: the exact answer is not exact")
    return _moments(weight, scalars(points))


def _student(centre: np.ndarray, covariance: np.ndarray, df: int, num: int) -> np.ndarray:
    """Sobol points of a Student t: normal ones, each divided by a chi."""
    unit = np.clip(qmc.Sobol(len(centre) + 1, scramble=True, rng=np.random.default_rng(1)).random(num), 1e-12, 1)
    normal = norm.ppf(np.minimum(unit[:, 1:], 1 - 1e-12)) @ np.linalg.cholesky(covariance).T
    return centre + normal / np.sqrt(chi2.ppf(np.minimum(unit[:, :1], 1 - 1e-12), df) / df)


def gridded(log_density: Callable, grids: tuple[np.ndarray, ...], scalars: Callable) -> Exact:
    """On a regular grid, in blocks of points."""
    points = np.stack([axis.ravel() for axis in np.meshgrid(*grids, indexing="ij")], axis=1)
    logs = np.concatenate([log_density(block) for block in np.array_split(points, 1 + len(points) // 20_000)])
    return _moments(np.exp(logs - logsumexp(logs)), scalars(points))


def regression_unknown_sd(x: np.ndarray, y: np.ndarray, scales: np.ndarray, prior_sd: float) -> list:
    r"""(mean, sd) of each coefficient and of the residual sd: :math:`w \sim N(0, \mathrm{scales}^2)`, a half-normal sd.

    Given the sd everything is normal; the sd lies on a grid.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    num, rss = len(y), float(np.sum((y - x @ np.linalg.lstsq(x, y, rcond=None)[0]) ** 2))
    guess = np.sqrt(rss / num)
    grid = guess * np.exp(np.linspace(-8, 8, 801) / np.sqrt(2 * num))
    logs, means, variances = [], [], []
    unit = x * scales  # coefficients in units of their prior
    for s in grid:
        precision = unit.T @ unit / s**2 + np.eye(len(scales))
        mean = np.linalg.solve(precision, unit.T @ y / s**2)
        fitted = np.sum((y - unit @ mean) ** 2) / s**2 + mean @ mean
        logs.append(-num * np.log(s) - 0.5 * fitted - 0.5 * np.linalg.slogdet(precision)[1] - 0.5 * (s / prior_sd) ** 2)
        means.append(mean * scales)
        variances.append(np.diagonal(np.linalg.inv(precision)) * scales**2)
    logs = np.array(logs) + np.log(grid)  # the grid is regular in log s
    weight = np.exp(logs - logsumexp(logs))
    mean = weight @ np.array(means)
    sd = np.sqrt(weight @ (np.array(variances) + (np.array(means) - mean) ** 2))
    return [*zip(mean.tolist(), sd.tolist(), strict=True), _moments(weight, {"s": grid})["s"]]


def _moments(weight: np.ndarray, scalars: dict[str, np.ndarray]) -> Exact:
    found = {}
    for name, values in scalars.items():
        mean = float(weight @ values)
        found[name] = mean, float(np.sqrt(weight @ (values - mean) ** 2))
    return found
