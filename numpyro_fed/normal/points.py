r"""Fixed points for expectations under a normal.

Sobol points, made normal, with their negatives, and whitened so that their mean is 0 and their covariance I exactly:
with constant weights importance sampling then returns the proposal itself, so a fixed point of EP carries no Monte
Carlo error, the same points serve every round and silo, and the map is deterministic.

How many points are enough is known before any data are seen. Near a fixed point the error of the covariance is
multiplied by :math:`I - \rho K` in a round with step :math:`\rho`, where K is the second moment of the features
:math:`(e_a^2 - 1)/\sqrt2` and :math:`e_a e_b` over the points: stable if and only if
:math:`\rho < 2 / \lambda_{\max}(K)`. When that is broken means look converged while sds drift.
"""

from functools import lru_cache

import numpy as np
from scipy.special import ndtri
from scipy.stats import qmc

STABLE = 1.8  # so many points that the largest eigenvalue of K is below this
STEP = 1.6  # the step is at most this over the largest eigenvalue
MAX_POINTS = 16_384


@lru_cache(maxsize=64)
def normal_points(d: int, num: int) -> np.ndarray:
    """(num, d) whitened antithetic points.

    >>> e = normal_points(3, 64)
    >>> bool(np.allclose(e.T @ e / 64, np.eye(3)) and np.allclose(e.mean(axis=0), 0))
    True
    """
    if num % 2 or num // 2 < d:
        raise ValueError(f"num_points must be even and at least {2 * d} in {d} dimensions, got {num}")
    unit = qmc.Sobol(d, scramble=True, rng=np.random.default_rng(20_260)).random_base2(int(np.ceil(np.log2(num // 2))))
    half = ndtri(np.clip(unit[: num // 2], 1e-12, 1 - 1e-12))
    root = np.linalg.cholesky(half.T @ half / (num // 2))
    white = np.linalg.solve(root, half.T).T
    points = np.concatenate([white, -white])
    points.setflags(write=False)
    return points


@lru_cache(maxsize=64)
def largest_eigenvalue(d: int, num: int, correlations: bool = True) -> float:
    """Of K, for a family that keeps correlations or one that does not."""
    e = normal_points(d, num)
    features = [(e**2 - 1) / np.sqrt(2)]
    if correlations and d > 1:
        i, j = np.triu_indices(d, 1)
        features.append(e[:, i] * e[:, j])
    phi = np.concatenate(features, axis=1)
    gram = phi.T @ phi if phi.shape[1] <= num else phi @ phi.T
    return float(np.linalg.eigvalsh(gram / num)[-1])


@lru_cache(maxsize=64)
def enough_points(d: int, correlations: bool = True) -> int:
    """The smallest power of two, from 64, with which a full step is stable by a margin."""
    num = 64
    while num < 2 * d:
        num *= 2
    while num < MAX_POINTS and largest_eigenvalue(d, num, correlations) >= STABLE:
        num *= 2
    return num


def stable_step(d: int, num: int, correlations: bool = True) -> float:
    """The longest step, at most 1, that is stable by a margin."""
    return min(1.0, STEP / largest_eigenvalue(d, num, correlations))


def gauss_hermite(num: int, dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes (num ** dims, dims) and log weights for expectations under a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(num)
    grid = np.stack([axis.reshape(-1) for axis in np.meshgrid(*[nodes] * dims, indexing="ij")], axis=1)
    log_weights = np.log(weights / weights.sum())
    each = np.stack([axis.reshape(-1) for axis in np.meshgrid(*[log_weights] * dims, indexing="ij")], axis=1)
    return grid, each.sum(axis=1)
