"""A warm start has two halves: what the server begins from, and what each silo knows of its own locals.

A mode search ends in one, and so does a fit of any method. The silo's half never leaves the silo: a run begins by
sending the server's half, and each silo puts the two together (``begin_silo`` of a
:class:`~numpyro_fed.algorithm.Phase`).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import PyTree
from numpyro_fed.host import concrete, put

Array = jax.Array


class WarmStart(NamedTuple):
    """The server's half: a normal over the globals, and theta."""

    loc: Array  # (d,)
    chol: Array | None  # (d, d), of the covariance; None when only sds are known
    sd: Array  # (d,): conditional, as a guide with independent coordinates would have them
    theta: dict[str, Any]  # unconstrained
    theta_sd: dict[str, Any]
    context: PyTree = ()  # what of a guide over the globals is needed to read the silo's half
    source: Any = None  # (guide, params, base): a run with the same guide goes on from q itself
    sites: Any = ()  # (prior, each): normal factors whose product is this normal, of the prior and of every silo

    @property
    def unit(self) -> Array:
        """Marginal sds."""
        if self.chol is None or not concrete(self.chol):
            return self.sd if self.chol is None else jnp.sqrt(jnp.sum(self.chol**2, axis=1))
        with np.errstate(all="ignore"):
            return put(np.sqrt(np.sum(np.asarray(self.chol) ** 2, axis=1)))


class LocalStart(NamedTuple):
    """The silo's half: its locals around ``WarmStart.loc``, and its own parameters of the guide they come from."""

    loc: dict[str, Array]  # {group: (rows, k)}
    scale: dict[str, Array]  # {group: (rows, k)}
    coupling: dict[str, Array]  # {group: (rows, k, d)}; {} where locals do not move with the globals
    own: PyTree = ()  # (params, base)

    @property
    def frame(self) -> Any:
        """Where a search knows more than this of its end, all of it; else None."""
        return None
