r"""Where EP and PVI begin: sites from the curvature at the posterior's mode.

A few rounds of Newton's method (:mod:`numpyro_fed.run.searches`) find the mode :math:`\hat z` of the posterior. There
every silo's factor has a gradient :math:`g_j` and a curvature :math:`P_j` (minus the Hessian), and so a site

.. math:: t_j(z) = \exp(h_j^\top z - \tfrac12 z^\top P_j z), \qquad h_j = g_j + P_j \hat z

The product of all sites and the prior is Laplace's approximation of the posterior, and every cavity is what it will
about be; so silos need not look for the modes of tilted distributions that are mostly prior, which takes longer to
compile and to run than all the rest. Where the search does not converge, or its end is no maximum, rounds begin at the
prior.
"""

from functools import partial
from typing import Any

import numpy as np

from numpyro_fed.algorithm import Left, Phase
from numpyro_fed.host import real_dtype
from numpyro_fed.local.integrate import integrable
from numpyro_fed.local.start import WarmStart
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.normal.families import Natural
from numpyro_fed.normal.newton import Search
from numpyro_fed.normal.prior import Prior
from numpyro_fed.run.mode import MAX_DIM, converged, for_start
from numpyro_fed.run.searches import SearchServer, looks, num_searches, searches
from numpyro_fed.solvers import Solver

MAX_ROUNDS = 20
FLAT = 1e-8  # the least curvature of a maximum, in a precision with a unit diagonal


def laplace_start(split: SplitModel, survey: Survey, solver: Solver, prior: Prior) -> tuple[Phase, ...]:
    """One phase; or none, where the solver begins elsewhere or factors are known with noise only."""
    exact = not split.groups or integrable(split, survey)
    if not getattr(solver, "begins_at_q", False) or split.dim > MAX_DIM or not exact:
        return ()
    marginal, num = for_start(split, survey), num_searches(split)
    return (
        Phase(
            "mode",
            searches(split, marginal, num, survey.num_silos),
            num_rounds=MAX_ROUNDS,
            done=lambda info: bool(
                info["_ended"][-1][0]
            ),  # nearer than a start needs to be: sites are the curvature there
            finish=partial(_finish, prior),
            role="start",
            effort="some",
            looks_at_data=looks(split, marginal, num),
            look=1,  # each is a message of O(d^2) numbers
        ),
    )


def _finish(prior: Prior, left: Left, server: SearchServer, info: dict[str, Any]) -> Left:
    """A start, or none: what was found need not be a maximum."""
    search, each = Search(*(np.asarray(leaf)[0] for leaf in server.search)), server.each  # trials of one search
    on_host = lambda leaf: np.asarray(leaf, np.float64)
    at, total, slope = on_host(search.x), on_host(search.precision), on_host(search.gradient)
    slopes, lower = on_host(each.gradient), on_host(each.precision)
    own = np.zeros((len(lower), *total.shape))
    rows, columns = np.tril_indices(len(total))
    own[:, rows, columns] = own[:, columns, rows] = lower
    if not (converged(info) and np.all(np.isfinite(total)) and np.all(np.isfinite(own))):
        return left
    known, known_shift = on_host(prior.factor.precision), on_host(prior.factor.shift)
    if not prior.exact:
        known = total - own.sum(axis=0)
        known_shift = slope - slopes.sum(axis=0) + known @ at
    shifts = slopes + own @ at
    precision = known + own.sum(axis=0)
    scale = np.sqrt(np.maximum(np.diagonal(precision), np.finfo(float).tiny))
    values, vectors = np.linalg.eigh(precision / scale / scale[:, None])
    if values[0] < FLAT:
        return left
    covariance = (vectors / values) @ vectors.T / scale / scale[:, None]
    mean, dtype = covariance @ (known_shift + shifts.sum(axis=0)), real_dtype()
    loc, chol, sd = (np.asarray(value, dtype) for value in (mean, np.linalg.cholesky(covariance), 1 / scale))
    factors: Any = (known, known_shift), (own, shifts)
    normal: dict[str, Any] = dict(loc=loc, chol=chol, sd=sd)
    warm = WarmStart(theta={}, theta_sd={}, sites=tuple(Natural(*factor) for factor in factors), **normal)
    return left._replace(warm=warm, reached=float(search.value))
