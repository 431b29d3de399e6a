r"""The pooled log density of a split model, and chains of NUTS on it.

.. math::

    \log p(z_G) + \sum_j \log p(z_{Lj}, y_j \mid z_G) - \tfrac12 \sum_{\text{padded}} z^2,

on unconstrained vectors. The last sum runs over the local elements that no density touches: padded rows, and the
observed half of an ``obs_mask``. Left flat, they would send every trajectory to its maximal length; as standard
normals, independent of all else, they leave the posterior as it is and the trajectories short.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.infer.hmc import hmc
from tqdm.auto import tqdm

from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.host import real_dtype, zeros_like
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.pieces import jit

Array = jax.Array
Point = dict[str, Any]  # {"z": z_G, "local": for each bucket {group: z_L stacked over its silos}}
RADIUS = 2.0  # of the cube of starts in unconstrained space, as in NumPyro and Stan
TRIES = 100  # starts tried for each chain; the radius is halved after every ten
CHUNK = 100  # draws between two looks of the host: progress, interruption


def potential(split: SplitModel, theta: dict[str, Array], buckets: Any, shared: Any, point: Point) -> Array:
    """-log density of the pooled model, with a standard normal on the local elements that no density touches."""
    energy = -split.log_prior(point["z"], theta)
    for (args, mask), local in zip(buckets, point["local"], strict=True):

        def of_silo(args: Any, mask: Any, z_local: dict[str, Array]) -> Array:
            terms, active = split.evaluate(point["z"], z_local, theta, SiloData(args, mask, shared))
            unused = sum((jnp.sum(jnp.where(active[g], 0.0, z_local[g]) ** 2) for g in active), jnp.zeros(()))
            return 0.5 * unused - sum((jnp.sum(term) for term in terms.values()), jnp.zeros(()))

        energy = energy + jnp.sum(jax.vmap(of_silo)(args, mask, local))
    return energy


def origin(split: SplitModel, data: Stack) -> Point:
    """Zeros in the shape of the sampler's state: z_G, and each bucket's z_L stacked over its silos."""
    buckets = zip(data.buckets, data.arrays, strict=True)
    local = tuple(
        jax.eval_shape(partial(split.zeros_locals, num=len(bucket.names)), mask) for bucket, (_, mask) in buckets
    )
    return zeros_like({"z": jax.ShapeDtypeStruct((split.dim,), real_dtype()), "local": local})


def start(energy: Callable[[Point], Array], zeros: Point, key: Array) -> tuple[Point, Array]:
    """A point with a finite potential and gradient, and whether one was found."""
    flat, unravel = ravel_pytree(zeros)

    def draw(attempt: Array) -> Array:
        radius = RADIUS * 0.5 ** (attempt // 10)
        return jax.random.uniform(jax.random.fold_in(key, attempt), flat.shape, flat.dtype, -1, 1) * radius

    def fails(x: Array) -> Array:
        value, gradient = jax.value_and_grad(lambda x: energy(unravel(x)))(x)
        return ~(jnp.isfinite(value) & jnp.all(jnp.isfinite(gradient)))

    def again(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        attempt, x, _ = carry
        x = draw(attempt)
        return attempt + 1, x, fails(x)

    first = (jnp.array(0), flat, jnp.array(True))
    _, x, failed = jax.lax.while_loop(lambda carry: carry[2] & (carry[0] < TRIES), again, first)
    return unravel(x), ~failed


def chains(
    split: SplitModel,
    data: Stack,
    theta: dict[str, Array],
    keys: list[Array],
    num_warmup: int,
    num_samples: int,
    progress_bar: bool,
    options: dict[str, Any],
) -> tuple[Point, dict[str, np.ndarray]]:
    """Unconstrained draws and the sampler's statistics, each (chains, draws, ...); a chain for each key."""
    init, sample = hmc(potential_fn_gen=partial(partial, potential, split, theta), algo="NUTS")
    arrays = (data.arrays, data.shared)
    zeros = origin(split, data)
    total = num_warmup + num_samples
    chunk = -(-total // -(-total // CHUNK))  # chunks of equal length, with few draws to spare

    def begin(key: Array, arrays: Any) -> tuple[Any, Array]:
        key_start, key_run = jax.random.split(key)
        point, found = start(partial(potential, split, theta, *arrays), zeros, key_start)
        return init(point, num_warmup, model_args=arrays, rng_key=key_run, **options), found

    def advance(state: Any, arrays: Any) -> tuple[Any, Any]:
        def step(state: Any, _: None) -> tuple[Any, Any]:
            state = sample(state, model_args=arrays)
            return state, (state.z, {"diverging": state.diverging, "num_steps": state.num_steps})

        return jax.lax.scan(step, state, None, length=chunk)

    first = jit(begin).lower(keys[0], arrays).compile()
    states = []
    for key in keys:
        state, found = first(key, arrays)
        if not found:
            raise ValueError(
                f"no start with a finite log density and gradient was found in {TRIES} tries: check the data's scale "
                "and the distributions' parameters, or bound them (a scale that can reach zero, an exp that overflows)"
            )
        states.append(state)
    onwards = jit(advance).lower(states[0], arrays).compile()
    stopped = threading.Event()

    def run(state: Any) -> Any:
        kept = []
        for done in range(0, total, chunk):
            if stopped.is_set():
                break
            state, rows = onwards(state, arrays)
            cut = slice(max(num_warmup - done, 0), total - done)
            kept.append(jax.tree.map(lambda leaf, cut=cut: np.asarray(leaf)[cut], rows))
            bar.update(min(chunk, total - done))
        return jax.tree.map(lambda *parts: np.concatenate(parts), *kept)

    with (
        tqdm(total=total * len(keys), desc="nuts", disable=not progress_bar) as bar,
        ThreadPoolExecutor(min(len(keys), os.cpu_count() or 1)) as pool,
    ):
        running = [pool.submit(run, state) for state in states]
        try:
            return jax.tree.map(lambda *parts: np.stack(parts), *(chain.result() for chain in running))
        finally:
            stopped.set()  # after an interrupt the threads end with their chunk
