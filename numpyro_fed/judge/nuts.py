r"""Pooled NUTS on the split model: the posterior that a federated method approximates.

:func:`nuts` needs no pooled model. The target is the sum of the server's and the silos' terms
(:mod:`numpyro_fed.judge.pooled`).

All data are in one place here: it is the judge of a federated run, not a part of one.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

import jax
import numpy as np
import pandas as pd
from numpyro.diagnostics import split_gelman_rubin

from numpyro_fed.checks import check_key, warn_user
from numpyro_fed.data.padding import SiloData, without_padding
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.stack import Stack, stack_of
from numpyro_fed.host import folded
from numpyro_fed.judge.effective import constant, num_effective
from numpyro_fed.judge.fixed import fixed_theta
from numpyro_fed.judge.pooled import Point, chains
from numpyro_fed.keys import fold_in_name, identity
from numpyro_fed.model.build import split_model
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import Model
from numpyro_fed.pieces import jit
from numpyro_fed.results.scalars import scalars

Array = jax.Array
SHOWN = 20  # rows of a notebook's table
R_HAT = 1.05  # above this the chains have not mixed


@dataclass(frozen=True)
class Reference:
    """Draws of pooled NUTS. Make one with :func:`nuts`."""

    split: SplitModel = field(repr=False)
    data: Stack = field(repr=False)
    theta: dict[str, Array]  # unconstrained
    draws: dict[str, np.ndarray] = field(repr=False)  # {global site: (chains, draws, ...)}, constrained
    unconstrained: Point = field(repr=False)  # {"z": (chains, draws, d), "local": ({group: ...}, ...)}
    diverging: np.ndarray = field(repr=False)  # (chains, draws)
    num_steps: np.ndarray = field(repr=False)  # (chains, draws): leapfrog steps of each draw
    seconds: float  # wall time, with compilation

    @property
    def num_chains(self) -> int:
        return self.diverging.shape[0]

    @property
    def num_samples(self) -> int:
        """Draws of each chain."""
        return self.diverging.shape[1]

    @property
    def divergences(self) -> int:
        return int(self.diverging.sum())

    def get_samples(self, group_by_chain: bool = False) -> dict[str, np.ndarray]:
        """``{site: draws}`` of the global sites and the deterministics of them, constrained."""
        return {name: value if group_by_chain else _flat(value) for name, value in self.draws.items()}

    def sample_local(self, silo: str, group_by_chain: bool = False) -> dict[str, np.ndarray]:
        """``{site: draws}`` of a silo's local sites and deterministics, unpadded, in get_samples' order.

        Discrete sites, which NUTS does not see, are drawn from their exact posterior given the others.
        """
        if silo not in self.data.names:
            raise KeyError(f"no silo is named {silo!r}; the silos are {', '.join(map(repr, self.data.names))}")
        b, position = self.data.place(silo)
        data = self.data.data(silo)
        local = {name: value[:, :, position] for name, value in self.unconstrained["local"][b].items()}
        lengths = self.split.partition.lengths(silo)
        padded = {axis: mask.shape[0] for axis, mask in data.mask.items()}
        local = self.split.unpadded_local(local, lengths, padded)
        data = without_padding(data, self.split.spec, lengths)  # a deterministic site may be a mean over rows
        key = fold_in_name(jax.random.key(0), identity(silo))
        found = _constrained_local(self.split, self.unconstrained["z"], local, self.theta, data, key)
        values = {name: np.asarray(value) for name, value in found.items()}
        return {name: value if group_by_chain else _flat(value) for name, value in values.items()}

    def diagnostics(self) -> pd.DataFrame:
        """Mean, sd, n_eff and split r_hat of every global scalar; a constant one has neither n_eff nor r_hat."""
        # Not arviz.summary: it names and rounds its columns one way in 0.23 and another in 1.x, and its bulk n_eff, of
        # ranks, is not that of the mean, which compare's Monte Carlo errors need.
        values = scalars(self.draws, batch=2)
        columns: dict[str, list[float]] = {"mean": [], "sd": [], "n_eff": [], "r_hat": []}
        for x in values.values():
            columns["mean"].append(x.mean(dtype=np.float64))
            columns["sd"].append(x.std(ddof=1, dtype=np.float64))
            columns["n_eff"].append(num_effective(x))
            columns["r_hat"].append(np.nan if constant(x) or x.shape[1] < 4 else float(split_gelman_rubin(x)))
        return pd.DataFrame(columns, index=pd.Index(list(values), name="parameter"))

    def __repr__(self) -> str:
        return (
            f"Reference: NUTS, {_counted(self.num_chains, 'chain')} of {_counted(self.num_samples, 'draw')}, "
            f"{self.seconds:.1f} s, "
            f"{_counted(self.divergences, 'divergence')}; sites {', '.join(self.draws) or '(no global ones)'}"
        )

    def _repr_html_(self) -> str:
        found = self.diagnostics()
        more = f"<p>... and {len(found) - SHOWN} more: .diagnostics()</p>" if len(found) > SHOWN else ""
        return (
            f"<p>{escape(repr(self))}</p>{found.head(SHOWN).to_html(border=0, float_format='%.4g', na_rep='-')}{more}"
        )


def nuts(
    model: Model,
    silos: Silos,
    *,
    rng_key: Array | None = None,
    num_warmup: int = 1000,
    num_samples: int = 1000,
    num_chains: int = 4,
    local: Iterable[str] | None = None,
    shared: Iterable[str] | None = None,
    theta: Mapping[str, Any] | None = None,
    progress_bar: bool = True,
    **nuts_options: Any,
) -> Reference:
    """Pooled NUTS on the same split that the federated methods use.

    Args:
        model: an ordinary NumPyro model, called as ``model(**silos[name])``.
        silos: the data; ragged silos are padded, which leaves the posterior as it is.
        rng_key: a JAX key; ``jax.random.key(0)`` when not given.
        num_warmup, num_samples, num_chains: as in :class:`numpyro.infer.MCMC`, per chain.
        local, shared: names of sites or plates, overriding the automatic partition.
        theta: ``{name: constrained value}`` of the model's ``numpyro.param`` sites, which NUTS holds fixed. Those not
            given stay at their initial values in the model; ``theta=fit.params`` judges a fit at its own.
        nuts_options: options of :class:`numpyro.infer.NUTS`, such as ``target_accept_prob=0.95``, or
            ``dense_mass=[("z",)]`` for a dense mass matrix over the global latents.

    Chains run in threads, as many at a time as there are cores. (Vectorised chains wait for the longest trajectory
    among them: on the six-cities model they took 2.4 times as long as one chain after the other.)

    Each chain starts at a point drawn uniformly from [-2, 2] in every unconstrained dimension, as in NumPyro. Where the
    log density or its gradient is not finite there, the chain draws again, a hundred times at most, from a cube that is
    halved after every ten.

    >>> import numpy as np, numpyro, numpyro.distributions as dist
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with numpyro.plate("rows", y.shape[0]):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y)
    >>> silos = Silos([dict(y=np.full(n, n, np.float32)) for n in (2, 3)])
    >>> ref = nuts(model, silos, num_warmup=200, num_samples=200, num_chains=2, progress_bar=False)
    >>> ref.get_samples()["mu"].shape
    (400,)
    """
    start = time.perf_counter()
    key = jax.random.key(0) if rng_key is None else check_key(rng_key)
    split = split_model(model, silos, local, shared)
    if not split.dim and not split.groups:
        raise ValueError("the model has no latent sites: there is nothing to sample")
    fixed = _fixed_theta(split, theta)
    data = stack_of(silos, silos, split.spec, split.partition.axes)
    # a chain's key depends on its number alone, not on how many chains there are
    keys = [folded(key, chain) for chain in range(num_chains)]
    unconstrained, extra = chains(split, data, fixed, keys, num_warmup, num_samples, progress_bar, nuts_options)
    draws = _constrained_global(split, unconstrained["z"], fixed)
    reference = Reference(
        split,
        data,
        fixed,
        {name: np.asarray(value) for name, value in draws.items()},
        unconstrained,
        extra["diverging"],
        extra["num_steps"],
        time.perf_counter() - start,
    )
    _warn(reference)
    return reference


def _fixed_theta(split: SplitModel, theta: Mapping[str, Any] | None) -> dict[str, Array]:
    left = [name for name in split.theta if name not in (theta or {})]
    fixed = fixed_theta(split, theta)
    if left:
        warn_user(
            f"NUTS does not learn {', '.join(left)}: held at the initial value in the model. Pass theta=fit.params to "
            "judge a fit at the values it learned, or make them sample sites with a prior"
        )
    return fixed


# --- back to named sites ----------------------------------------------------------------------------------------------


def _constrained_global(split: SplitModel, z: np.ndarray, theta: dict[str, Array]) -> dict[str, Array]:
    return jit(jax.vmap(jax.vmap(lambda z: split.constrain_global(z, theta))))(z)


def _constrained_local(
    split: SplitModel, z: Array, local: dict[str, Array], theta: dict[str, Array], data: SiloData, key: Array
) -> dict[str, Array]:
    one = lambda key, z, z_local: split.constrain_local(z, z_local, theta, data, key)
    return jit(jax.vmap(jax.vmap(one)))(jax.random.split(key, z.shape[:2]), z, local)


def _flat(value: np.ndarray) -> np.ndarray:
    return value.reshape((-1, *value.shape[2:]))


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _warn(reference: Reference) -> None:
    if reference.divergences:
        warn_user(
            f"{reference.divergences} of {_counted(reference.diverging.size, 'draw')} diverged: the reference may miss "
            "part of the posterior. Pass target_accept_prob=0.95 or higher, or write the model non-centred"
        )
    table = reference.diagnostics()
    mixed = table["r_hat"].dropna()
    if len(mixed) and mixed.max() > R_HAT:
        worst = mixed.idxmax()
        warn_user(
            f"the chains disagree about {worst} (r_hat {mixed[worst]:.2f}, n_eff {table['n_eff'][worst]:.0f}): do not "
            "judge a fit by this reference. Run longer chains (num_warmup=, num_samples=), or look for several modes"
        )
