"""Any fit as the start of another run."""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Posterior, PyTree
from numpyro_fed.host import put, real_dtype
from numpyro_fed.local.start import WarmStart
from numpyro_fed.model.split_model import SplitModel

DRAWS = 1000  # of a posterior that cannot tell its moments
LEAST_SD = 1e-3  # a point has no spread, but a start needs one


def warm_start(posterior: Posterior, split: SplitModel, server: PyTree) -> WarmStart:
    """The server's half: what the posterior says itself (``to_warm_start``), or its moments."""
    if hasattr(posterior, "to_warm_start"):
        return posterior.to_warm_start(server)
    normal, theta = posterior.normal(server), posterior.theta(server)
    dtype = real_dtype()
    units = jax.tree.map(jnp.ones_like, theta)
    if normal is not None:
        mean, covariance = np.asarray(normal.mean, np.float64), normal.covariance
    else:
        keys = jax.random.split(jax.random.key(0), DRAWS)
        draws = np.asarray(jax.vmap(lambda key: posterior.sample(key, server))(keys), np.float64)
        mean, sds = draws.mean(axis=0), np.maximum(draws.std(axis=0), LEAST_SD)
        if 4 * split.dim > DRAWS:
            return WarmStart(put(mean.astype(dtype)), None, put(sds.astype(dtype)), theta, units)
        covariance = np.atleast_2d(np.cov(draws.T)) + np.diag(1e-6 * sds**2 + LEAST_SD**2)
    chol = np.linalg.cholesky(covariance)
    sd = 1 / np.sqrt(np.diagonal(np.linalg.inv(covariance)))
    loc, lower, spread = (put(x.astype(dtype)) for x in (mean, chol, sd))
    return WarmStart(loc, lower, spread, theta, units)
