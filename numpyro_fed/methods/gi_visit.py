r"""What a silo does with its rows: where they begin, and steps on its local free energy.

.. math:: E_q[\log p(y_k \mid W)] - KL[q \| q_{\setminus k}]

The divergence is a sum over layers, each in closed form along a sampled path of weights.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from numpyro_fed.data.padding import SiloData
from numpyro_fed.local import minibatch
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.inducing import Cavity, Rows, cavity_of, noise_for, sample, sample_tilted
from numpyro_fed.normal.network import Network

Array = jax.Array
PARTS = 4  # of a visit's steps, whose mean values are compared
FEW = 10  # rows, whose means would tell of single ones
LOOKS = 16  # at the rows before and after a visit, with the same draws and minibatches


class Work(NamedTuple):
    """A silo's work in a round. Static: part of the compiled program."""

    split: SplitModel
    network: Network
    num_inducing: int
    groups: tuple[int, ...]  # of each layer: 1, or its units, where these have their own precisions
    start_precision: float
    init: str  # "normal" or "data"
    optim: Any
    local_steps: int
    num_particles: int
    batching: Batching | None


class Free(NamedTuple):
    """Rows as the optimiser sees them."""

    inputs: Array
    outputs: tuple[Array, ...]
    log_precisions: tuple[Array, ...]

    def rows(self) -> Rows:
        return Rows(self.inputs, self.outputs, tuple(jnp.exp(one) for one in self.log_precisions))


class Visited(NamedTuple):
    """Where a visit ended."""

    rows: Rows
    log_likelihood: Array  # E_q[log p(y_k | W)] before the visit
    change: Array  # by how much it changed in it
    climb: Array  # by how much the bound rose over the last steps; 0 if that may be chance


def start_rows(work: Work, key: Array, data: SiloData, table: Rows, noise: tuple[Array, ...], warm: Array) -> Rows:
    """Where a silo's rows begin: inputs drawn from a normal, outputs those of a network that the others' rows make.

    All silos take the same ``noise`` for it: they begin with one network, also while there are no rows yet. (If
    ``warm``, it is another fit's network, in units of the prior.) The normal has the silo's means and variances, as
    they would be with one row more at 0 +- 1; of a silo with fewer than FEW rows, that would tell them, and it is a
    standard normal.
    """
    x, valid = work.network.rows(data), data.mask[work.network.axis]
    number = jnp.sum(valid).astype(x.dtype)
    total = lambda values: jnp.sum(jnp.where(valid[:, None], values, 0.0), axis=0)
    mean = total(x) / (number + 1)
    variance = (total((x - mean) ** 2) + mean**2 + 1) / (number + 1)
    drawn, chosen = jax.random.split(key)
    num = work.num_inducing
    mean, variance = jnp.where(number < FEW, 0.0, mean), jnp.where(number < FEW, 1.0, variance)
    inputs = mean + jnp.sqrt(variance) * jax.random.normal(drawn, (num, x.shape[1]), x.dtype)
    if work.init == "data":
        order = jnp.argsort(jnp.where(valid, jax.random.uniform(chosen, valid.shape), 2.0))
        place = jnp.pad(order, (0, max(0, num - order.shape[0])))[:num]
        inputs = jnp.where((jnp.arange(num) < number)[:, None], x[place], inputs)
    precisions = tuple(jnp.full((groups, num), work.start_precision, x.dtype) for groups in work.groups)
    made, _ = sample(work.network, table, noise)
    weights = jax.tree.map(lambda a, b: jnp.where(warm, a, b), work.network.from_standard(noise), made)
    return Rows(inputs, work.network.outputs(inputs, weights), precisions)


def visit(work: Work, key: Array, table: Rows, begin: Rows, data: SiloData) -> Visited:
    """Steps from where a silo's rows are, against the others' ``table``."""
    cavity = cavity_of(work.network, table)
    values_and_steps = jax.value_and_grad(lambda free, key: _loss(work, cavity, free.rows(), data, key), has_aux=True)
    tiny = jnp.finfo(begin.inputs.dtype).tiny
    logs = tuple(jnp.log(jnp.maximum(one, tiny)) for one in begin.precisions)
    free = Free(begin.inputs, begin.outputs, logs)

    def step(carry: tuple, key: Array) -> tuple[tuple, Array]:
        free, state = carry
        (loss, _), gradient = values_and_steps(free, key)
        moves, state = work.optim.update(gradient, state, free)
        return (optax.apply_updates(free, moves), state), loss

    keys = jax.random.split(key, work.local_steps)
    end, losses = jax.lax.scan(step, (free, work.optim.init(free)), keys)
    rows: Rows = end[0].rows()
    looks = jax.random.split(jax.random.fold_in(key, work.local_steps), LOOKS)
    before, after = (
        jnp.mean(jax.lax.map(lambda key, own=own: _loss(work, cavity, own, data, key)[1], looks))
        for own in (begin, rows)
    )
    return Visited(rows, before, after - before, _climb(losses))


def _climb(losses: Array) -> Array:
    """How much lower losses are in the last quarter than in the one before."""
    part = losses.shape[0] // PARTS
    if part < 2:
        return jnp.zeros(())
    last, before = losses[-part:], losses[-2 * part : -part]
    error = jnp.sqrt((jnp.var(last) + jnp.var(before)) / part)
    climb = jnp.mean(before) - jnp.mean(last)
    return jnp.where(climb > 3 * error, climb, 0.0)


def _loss(work: Work, cavity: Cavity, own: Rows, data: SiloData, key: Array) -> tuple[Array, Array]:
    """Minus the local bound, from a few draws and one minibatch; and the likelihood's part of it."""
    split, network = work.split, work.network
    batch_key, draw_key = jax.random.split(key)
    if work.batching is None:
        log_likelihood = lambda z: split.log_silo(z, {}, split.theta, data)
    else:
        taken = minibatch.with_replacement(split, work.batching, batch_key, data)
        log_likelihood = lambda z: minibatch.log_silo(split, z, split.theta, taken)

    def along(noise: tuple[Array, ...]) -> tuple[Array, Array]:
        weights, divergence = sample_tilted(network, cavity, own, noise)
        return log_likelihood(split.ravel(network.sites(weights))), divergence

    pairs = -(-work.num_particles // 2)  # a draw and its mirror image
    half = jax.vmap(lambda key: noise_for(network, key))(jax.random.split(draw_key, pairs))
    noise = jax.tree.map(lambda leaf: jnp.concatenate([leaf, -leaf])[: work.num_particles], half)
    likelihoods, divergences = jax.vmap(along)(noise)
    return jnp.mean(divergences) - jnp.mean(likelihoods), jnp.mean(likelihoods)
