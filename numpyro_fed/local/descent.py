"""Steps downhill on a silo's mean loss: what a silo does in a round of averaging."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.local.walk import Flat, Walk
from numpyro_fed.model.survey import Survey
from numpyro_fed.normal.curvature import largest_curvature
from numpyro_fed.optim import by_element

Array = jax.Array
STEP, SMALL_STEP = 1.0, 0.2  # over the largest curvature: with all of the silo's rows, with minibatches


class Task(NamedTuple):
    """What a silo's functions know beforehand."""

    flat: Flat
    whole: Callable  # (w, data) -> log likelihood
    part: Callable | None  # (w, data, key) -> its estimate from a minibatch
    count: Callable  # (data) -> number of observations
    batching: Batching | None
    survey: Survey


class Goal(NamedTuple):
    """What silos go for, and how."""

    optim: optax.GradientTransformation | None  # None: steps of one over the largest curvature
    prior: bool  # each silo's loss has its share of the prior
    proximal: float  # FedProx's mu


class Beside(NamedTuple):
    """What is learned beside x: parameters with an optimiser of their own, and their part in the silo's loss."""

    start: Any
    term: Callable[[Array, Any, Array | None], Array] | None  # (x, parameters, a minibatch's key) -> added to the loss
    optim: optax.GradientTransformation


NOTHING = Beside((), None, optax.identity())


class Learning(NamedTuple):
    """The state of a walk: the optimiser's own, and what is learned beside x."""

    own: Any
    params: Any  # of what is beside
    optim: Any  # its optimiser's state


class Steps(NamedTuple):
    """Where the default optimiser last was, and the gradient and loss there."""

    x: Array
    gradient: Array
    total: Array
    rate: Array


def walk_from(
    task: Task,
    goal: Goal,
    key: Array,
    w: Array,
    data: SiloData,
    total: Array | None,
    steepest_of_all: Array | None,
    noise: bool = False,
    beside: Beside = NOTHING,
    apart: bool = False,
) -> Walk:
    """Steps on the silo's mean loss, from w.

    Args:
        total: observations in all silos, where the silo's share of the prior belongs to its loss; None for the
            likelihood alone.
        steepest_of_all: the largest curvature of any silo's loss, on which the default optimiser's steps depend:
            silos whose steps differ would meet elsewhere. None for the silo's own.
        noise: of the size that makes the walk's stationary distribution the silo's posterior (Langevin).
        beside: what else is learned, one step of its optimiser with each step of x.
        apart: the walk takes no samples, so the weights of each site may stay apart, where the given optimiser does not
            mind: matrices that are cut from one vector, and gradients put together to one, are copied in each step.
    """
    own, batching = task.flat, task.batching
    number = task.count(data)
    share = 1 / total if goal.prior and total is not None else None
    pieces = own.pieces if apart and goal.optim is not None and by_element(goal.optim) else None

    def loss(x: Any, params: Any, key: Array | None) -> tuple[Array, Array]:
        x = x if pieces is None else jnp.concatenate(x)
        if batching is None or key is None:
            value = -task.whole(x, data) / number
        else:
            assert task.part is not None, "minibatches have an estimate"
            value = -task.part(x, data, key) / number
        rest = jnp.zeros(())
        if goal.proximal:  # a term of zero would be computed all the same
            rest = rest + 0.5 * goal.proximal * jnp.sum((x - w) ** 2)
        if share is not None:
            rest = rest - share * own.log_prior(x)
        if beside.term is not None:
            rest = rest + beside.term(x, params, key)
        return value + rest, value

    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

    def begun(state: Any) -> Learning:
        return Learning(state, beside.start, beside.optim.init(beside.start))

    def learned(state: Learning, gradient: Any, own: Any) -> Learning:
        moves, optim_state = beside.optim.update(gradient, state.optim, state.params)
        return Learning(own, optax.apply_updates(state.params, moves), optim_state)

    optim, rate, steepest = goal.optim, jnp.zeros(()), jnp.zeros(())
    if optim is None:
        gradient = lambda away: jax.grad(loss, has_aux=True)(w + away, beside.start, None)[0]
        steepest = largest_curvature(key, gradient, w.shape)
        common = steepest if steepest_of_all is None else jnp.maximum(steepest_of_all, steepest)
        rate = (STEP if batching is None else SMALL_STEP) / common

    if optim is not None:

        def given(x: Any, state: Learning, key: Array) -> tuple[Any, Learning, Array]:
            (_, value), (gradient, aside) = both(x, state.params, key)
            moves, own_state = optim.update(gradient, state.own, x)
            return jax.tree.map(jnp.add, x, moves), learned(state, aside, own_state), value

        return Walk(given, begun(optim.init(w if pieces is None else pieces(w))), steepest, pieces)

    # how much a loss may rise in a step: not at all; by what noise does; or, where it is another each time (of other
    # rows, or with other parameters beside), to many times itself
    tame = lambda value: (5 * own.size + 10) / number if noise else 1e-6 * jnp.abs(value)
    same = batching is None and beside.term is None
    allowed = tame if same else lambda value: 10 * (1 + jnp.abs(value))

    def step(x: Array, learning: Learning, key: Array) -> tuple[Array, Learning, Array]:
        state: Steps = learning.own
        batch_key, noise_key = jax.random.split(key)
        (total, value), (gradient, aside) = both(x, learning.params, batch_key)
        fine = jnp.isfinite(total) & jnp.all(jnp.isfinite(gradient))
        fine = fine & (total <= state.total + allowed(state.total))
        # a step that went too far is taken again, half as long: the curvature was another where it began
        keep = lambda new, old: jnp.where(fine, new, old)
        now = Steps(keep(x, state.x), keep(gradient, state.gradient), keep(total, state.total), state.rate)
        now = now._replace(rate=jnp.where(fine, state.rate, 0.5 * state.rate))
        x = now.x - now.rate * now.gradient
        if noise:
            x = x + jnp.sqrt(2 * now.rate / number) * jax.random.normal(noise_key, x.shape)
        aside = jax.tree.map(lambda leaf: jnp.where(fine, leaf, 0.0), aside)  # none from where it went too far
        return x, learned(learning, aside, now), keep(value, state.total)

    start = Steps(w, jnp.zeros_like(w), jnp.full((), jnp.inf, w.dtype), rate)
    return Walk(step, begun(start), steepest)
