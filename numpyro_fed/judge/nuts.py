r"""Pooled NUTS on the split model: the posterior that a federated method approximates.

:func:`nuts` needs no pooled model. The target is the sum of the server's and the silos' terms,

.. math::

    \log p(z_G) + \sum_j \log p(z_{Lj}, y_j \mid z_G) - \tfrac12 \sum_{\text{padded}} z^2,

on unconstrained vectors. The last sum runs over the local elements that no density touches: padded rows, and the
observed half of an ``obs_mask``. Left flat, they would send every trajectory to its maximal length; as standard
normals, independent of all else, they leave the posterior as it is and the trajectories short.

All data are in one place here: it is the judge of a federated run, not a part of one.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.flatten_util import ravel_pytree
from numpyro.diagnostics import split_gelman_rubin
from numpyro.distributions import biject_to
from numpyro.infer.hmc import hmc
from tqdm.auto import tqdm

from numpyro_fed.checks import check_key
from numpyro_fed.data.padding import SiloData, without_padding
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.stack import Stack, stack_of
from numpyro_fed.judge.effective import constant, num_effective
from numpyro_fed.keys import fold_in_name, identity
from numpyro_fed.model.build import split_model
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import Model
from numpyro_fed.results.summary import scalars

Array = Any
RADIUS = 2.0  # of the cube of starts in unconstrained space, as in NumPyro and Stan
TRIES = 100  # starts tried for each chain; the radius is halved after every ten
CHUNK = 100  # draws between two looks of the host: progress, interruption
R_HAT = 1.05  # above this the chains have not mixed


@dataclass(frozen=True)
class Reference:
    """Draws of pooled NUTS. Make one with :func:`nuts`."""

    split: SplitModel = field(repr=False)
    data: Stack = field(repr=False)
    theta: dict[str, Array]  # unconstrained
    draws: dict[str, Array] = field(repr=False)  # {global site: (chains, draws, ...)}, constrained
    unconstrained: dict[str, Any] = field(repr=False)  # {"z": (chains, draws, d), "local": ({group: ...}, ...)}
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

    def get_samples(self, group_by_chain: bool = False) -> dict[str, Array]:
        """``{site: draws}`` of the global sites and the deterministics of them, constrained."""
        return {name: value if group_by_chain else _flat(value) for name, value in self.draws.items()}

    def sample_local(self, silo: str, group_by_chain: bool = False) -> dict[str, Array]:
        """``{site: draws}`` of a silo's local sites and deterministics, unpadded, in get_samples' order.

        Discrete sites, which NUTS does not see, are drawn from their exact posterior given the others.
        """
        if silo not in self.data.names:
            raise KeyError(f"no silo is named {silo!r}; the silos are {', '.join(map(repr, self.data.names))}")
        b, position = self.data.place(silo)
        data = self.data.data(silo)
        local = {name: value[:, :, position] for name, value in self.unconstrained["local"][b].items()}
        lengths = {axis.name: axis.lengths[silo] for axis in self.split.partition.axes}
        padded = {axis: mask.shape[0] for axis, mask in data.mask.items()}
        local = self.split.unpadded_local(local, lengths, padded)
        data = without_padding(data, self.split.spec, lengths)  # a deterministic site may be a mean over rows
        key = fold_in_name(jax.random.key(0), identity(silo))
        values = _constrained_local(self.split, self.unconstrained["z"], local, self.theta, data, key)
        return {name: np.asarray(value if group_by_chain else _flat(value)) for name, value in values.items()}

    def diagnostics(self) -> pd.DataFrame:
        """Mean, sd, n_eff and split r_hat of every global scalar; a constant one has neither n_eff nor r_hat."""
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
            f"Reference: NUTS, {self.num_chains} chains of {self.num_samples} draws, {self.seconds:.1f} s, "
            f"{self.divergences} divergences; sites {', '.join(self.draws) or '(no global ones)'}"
        )


def nuts(
    model: Model,
    silos: Silos,
    *,
    rng_key: Any = None,
    num_warmup: int = 1000,
    num_samples: int = 1000,
    num_chains: int = 4,
    local: Any = None,
    shared: Any = None,
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
    keys = [jax.random.fold_in(key, chain) for chain in range(num_chains)]
    unconstrained, extra = _sample(split, data, fixed, keys, num_warmup, num_samples, progress_bar, nuts_options)
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


# --- the sampler ------------------------------------------------------------------------------------------------------


def _sample(
    split: SplitModel,
    data: Stack,
    theta: dict[str, Array],
    keys: list[Array],
    num_warmup: int,
    num_samples: int,
    progress_bar: bool,
    options: dict[str, Any],
) -> tuple[Any, dict[str, np.ndarray]]:
    """Unconstrained draws and the sampler's statistics, each (chains, draws, ...)."""
    init, sample = hmc(potential_fn_gen=partial(partial, _potential, split, theta), algo="NUTS")
    arrays = (data.arrays, data.shared)
    zeros = _point(split, data)
    total = num_warmup + num_samples
    chunk = -(-total // -(-total // CHUNK))  # chunks of equal length, with few draws to spare

    def start(key: Array, arrays: Any) -> tuple[Any, Array]:
        key_start, key_run = jax.random.split(key)
        point, found = _start(partial(_potential, split, theta, *arrays), zeros, key_start)
        return init(point, num_warmup, model_args=arrays, rng_key=key_run, **options), found

    def advance(state: Any, arrays: Any) -> tuple[Any, Any]:
        def step(state: Any, _: None) -> tuple[Any, Any]:
            state = sample(state, model_args=arrays)
            return state, (state.z, {"diverging": state.diverging, "num_steps": state.num_steps})

        return jax.lax.scan(step, state, None, length=chunk)

    first = jax.jit(start).lower(keys[0], arrays).compile()
    states = []
    for key in keys:
        state, found = first(key, arrays)
        if not found:
            raise ValueError(
                f"no start with a finite log density and gradient was found in {TRIES} tries: check the data's scale "
                "and the distributions' parameters, or bound them (a scale that can reach zero, an exp that overflows)"
            )
        states.append(state)
    onwards = jax.jit(advance).lower(states[0], arrays).compile()
    stopped = threading.Event()

    def run(state: Any) -> Any:
        kept = []
        for begin in range(0, total, chunk):
            if stopped.is_set():
                break
            state, rows = onwards(state, arrays)
            cut = slice(max(num_warmup - begin, 0), total - begin)
            kept.append(jax.tree.map(lambda leaf, cut=cut: np.asarray(leaf)[cut], rows))
            bar.update(min(chunk, total - begin))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *kept)

    with (
        tqdm(total=total * len(keys), desc="nuts", disable=not progress_bar) as bar,
        ThreadPoolExecutor(min(len(keys), os.cpu_count() or 1)) as pool,
    ):
        chains = [pool.submit(run, state) for state in states]
        try:
            return jax.tree.map(lambda *parts: np.stack(parts), *(chain.result() for chain in chains))
        finally:
            stopped.set()  # after an interrupt the threads end with their chunk


# --- the target -------------------------------------------------------------------------------------------------------


def _potential(split: SplitModel, theta: dict[str, Array], buckets: Any, shared: Any, point: dict[str, Any]) -> Array:
    """-log density of the pooled model, with a standard normal on the local elements that no density touches."""
    energy = -split.log_prior(point["z"], theta)
    for (args, mask), local in zip(buckets, point["local"], strict=True):

        def of_silo(args: Any, mask: Any, z_local: dict[str, Array]) -> Array:
            terms, active = split.evaluate(point["z"], z_local, theta, SiloData(args, mask, shared))
            unused = sum((jnp.sum(jnp.where(active[g], 0.0, z_local[g]) ** 2) for g in active), jnp.zeros(()))
            return 0.5 * unused - sum((jnp.sum(term) for term in terms.values()), jnp.zeros(()))

        energy = energy + jnp.sum(jax.vmap(of_silo)(args, mask, local))
    return energy


def _point(split: SplitModel, data: Stack) -> dict[str, Any]:
    """Zeros in the shape of the sampler's state: z_G, and each bucket's z_L stacked over its silos."""
    buckets = zip(data.buckets, data.arrays, strict=True)
    local = tuple(split.zeros_locals(mask, len(bucket.names)) for bucket, (_, mask) in buckets)
    return {"z": jnp.zeros(split.dim), "local": local}


def _start(potential: Callable[[Any], Array], zeros: Any, key: Array) -> tuple[Any, Array]:
    """A point with a finite potential and gradient, and whether one was found."""
    flat, unravel = ravel_pytree(zeros)

    def draw(attempt: Array) -> Array:
        radius = RADIUS * 0.5 ** (attempt // 10)
        return jax.random.uniform(jax.random.fold_in(key, attempt), flat.shape, flat.dtype, -1, 1) * radius

    def fails(x: Array) -> Array:
        energy, gradient = jax.value_and_grad(lambda x: potential(unravel(x)))(x)
        return ~(jnp.isfinite(energy) & jnp.all(jnp.isfinite(gradient)))

    def again(carry: tuple) -> tuple:
        attempt, x, _ = carry
        x = draw(attempt)
        return attempt + 1, x, fails(x)

    _, x, failed = jax.lax.while_loop(lambda carry: carry[2] & (carry[0] < TRIES), again, (0, flat, jnp.array(True)))
    return unravel(x), ~failed


def _fixed_theta(split: SplitModel, theta: Mapping[str, Any] | None) -> dict[str, Array]:
    given = dict(theta or {})
    unknown = sorted(set(given) - set(split.theta) - set(split.constants))
    if unknown:
        raise ValueError(
            f"theta= names {', '.join(map(repr, unknown))}; the model's params are {', '.join(split.theta) or 'none'}"
        )
    left = [name for name in split.theta if name not in given]
    if left:
        warnings.warn(
            f"NUTS does not learn {', '.join(left)}: held at the initial value in the model. Pass theta=fit.params to "
            "judge a fit at the values it learned, or make them sample sites with a prior",
            stacklevel=3,
        )
    fixed = dict(split.theta)
    for name in split.theta:
        if name in given:
            like = lambda new, old: jnp.broadcast_to(jnp.asarray(new, old.dtype), old.shape)
            value = jax.tree.map(jnp.asarray, given[name])  # of a network, a tree
            fixed[name] = jax.tree.map(like, biject_to(split.constraints[name]).inv(value), split.theta[name])
    return fixed


# --- back to named sites ----------------------------------------------------------------------------------------------


def _constrained_global(split: SplitModel, z: Array, theta: dict[str, Array]) -> dict[str, Array]:
    return jax.jit(jax.vmap(jax.vmap(lambda z: split.constrain_global(z, theta))))(z)


def _constrained_local(
    split: SplitModel, z: Array, local: dict[str, Array], theta: dict[str, Array], data: SiloData, key: Array
) -> dict[str, Array]:
    one = lambda key, z, z_local: split.constrain_local(z, z_local, theta, data, key)
    return jax.jit(jax.vmap(jax.vmap(one)))(jax.random.split(key, z.shape[:2]), z, local)


def _flat(value: Array) -> Array:
    return value.reshape((-1, *value.shape[2:]))


def _warn(reference: Reference) -> None:
    if reference.divergences:
        warnings.warn(
            f"{reference.divergences} of {reference.diverging.size} draws diverged: the reference may miss part of the "
            "posterior. Pass target_accept_prob=0.95 or higher, or write the model non-centred",
            stacklevel=3,
        )
    table = reference.diagnostics()
    mixed = table["r_hat"].dropna()
    if len(mixed) and mixed.max() > R_HAT:
        worst = mixed.idxmax()
        warnings.warn(
            f"the chains disagree about {worst} (r_hat {mixed[worst]:.2f}, n_eff {table['n_eff'][worst]:.0f}): do not "
            "judge a fit by this reference. Run longer chains (num_warmup=, num_samples=), or look for several modes",
            stacklevel=3,
        )
