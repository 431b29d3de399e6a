"""How many independent draws a chain is worth."""

import numpy as np
from numpyro.diagnostics import effective_sample_size


def constant(x: np.ndarray) -> bool:
    """Whether draws vary by no more than their rounding: the diagonal of a correlation matrix."""
    rounding = 8 * np.finfo(x.dtype).eps * np.max(np.abs(x)) if np.issubdtype(x.dtype, np.floating) else 0
    return bool(np.ptp(x) <= rounding)


def num_effective(x: np.ndarray) -> float:
    """Effective sample size of (chains, draws), NaN for a constant or too short a chain."""
    if constant(x) or x.shape[1] < 4:
        return np.nan
    found = float(effective_sample_size(x))
    # a chain that alternates can make the estimate negative or boundless; Stan's bound is n log10(n)
    bound = x.size * np.log10(x.size)
    return min(found, bound) if found > 0 else bound
