"""Optimisers: the default one, and checks of the user's."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Literal

PEAK, FLOOR = 2e-2, 2e-4  # in whitened coordinates: sds of the posterior
LINEAR_PEAK, CLIP = 5e-2, 20.0  # a step of at most one sd


class HorizonState(NamedTuple):
    """Rounds done, rounds to go in all, and how long steps are: in the state, so that others need no new program."""

    count: Any
    horizon: Any
    length: Any


def _init(params: Any) -> HorizonState:
    return HorizonState(jnp.zeros((), jnp.int32), jnp.full((), 1000, jnp.int32), jnp.ones(()))


def falling(peak: float, floor: float) -> optax.GradientTransformation:
    """Steps that fall on a cosine from ``peak`` to ``floor`` over the steps of a run."""

    def update(updates: Any, state: HorizonState, params: Any = None) -> tuple[Any, HorizonState]:
        done = jnp.minimum(state.count / state.horizon, 1.0)
        rate = state.length * (floor + (peak - floor) * 0.5 * (1 + jnp.cos(jnp.pi * done)))
        moved = jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates)
        return moved, state._replace(count=state.count + 1)

    return optax.GradientTransformation(_init, update)


DEFAULT = optax.chain(optax.scale_by_adam(), falling(PEAK, FLOOR))
"""Adam whose step falls on a cosine from 0.02 to 0.0002 over the rounds of a run, in units of the start's sds."""

ENCODER = optax.chain(optax.scale_by_adam(), falling(3e-3, 3e-5))
"""For the weights of a network, which have no unit."""

LINEAR = optax.chain(optax.clip(CLIP), falling(LINEAR_PEAK, LINEAR_PEAK / 100))
"""Plain gradient steps in units of the start's sds, where all curvatures are about one.

For averages of silos: the mean of their gradients is the gradient of all silos, and stays so after a linear step. Adam
divides each silo's gradient by its own size, so that silos which pull apart meet at a median, not at the mean.
"""


def with_horizon(opt_state: Any, num_rounds: Any) -> Any:
    """The optimiser's state with the default schedule set to ``num_rounds``; other states are unchanged."""

    def reset(node: HorizonState) -> HorizonState:
        horizon = jnp.broadcast_to(jnp.asarray(num_rounds, node.horizon.dtype), node.horizon.shape)
        return node._replace(count=jnp.zeros_like(node.count), horizon=horizon)

    return _changed(opt_state, reset)


def shortened(opt_state: Any) -> Any:
    """The optimiser's state with steps of the default schedule a third as long; other states are unchanged."""
    return _changed(opt_state, lambda node: node._replace(length=node.length / 3))


def _is_horizon(node: Any) -> bool:
    return isinstance(node, HorizonState)


def _changed(opt_state: Any, change: Any) -> Any:
    return jax.tree.map(lambda node: change(node) if _is_horizon(node) else node, opt_state, is_leaf=_is_horizon)


BY_ELEMENT = frozenset(
    "abs add and clamp convert_element_type copy div eq exp expm1 ge gt integer_pow is_finite le log log1p logistic lt "
    "max min mul ne neg not or pow rsqrt select_n sign sqrt square stop_gradient sub tanh".split()
)


def by_element(optim: optax.GradientTransformation) -> bool:
    """Whether a number's steps depend on its own gradients alone, so that a vector may as well come in pieces.

    >>> by_element(optax.adam(1e-2)), by_element(optax.clip_by_global_norm(1.0)), by_element(optax.lars(0.1))
    (True, False, False)
    """
    like = jax.ShapeDtypeStruct((3,), jnp.zeros(()).dtype)
    return _all_by_element(jax.make_jaxpr(optim.update)(like, jax.eval_shape(optim.init, like), like))


def _all_by_element(program: ClosedJaxpr) -> bool:
    def one(equation: Any) -> bool:
        inside = [value for value in equation.params.values() if isinstance(value, ClosedJaxpr)]
        if inside and equation.primitive.name == "jit":
            return all(map(_all_by_element, inside))
        fed = [np.shape(value.val) if isinstance(value, Literal) else () for value in equation.invars]
        if any(fed):  # known numbers, which belong to places
            return False
        shapes = [variable.aval.shape for variable in (*equation.invars, *equation.outvars)]
        if not any(shapes) or equation.primitive.name in BY_ELEMENT:
            return True
        return equation.primitive.name == "broadcast_in_dim" and not equation.invars[0].aval.shape

    return not any(np.shape(value) for value in program.consts) and all(map(one, program.jaxpr.eqns))


def check_optim(optim: Any, name: str = "optim") -> optax.GradientTransformation:
    """An optax optimiser that works from gradients alone, or an error that says what to type."""
    if optim is None:
        return DEFAULT
    if not (hasattr(optim, "init") and hasattr(optim, "update")):
        got = repr(optim) if isinstance(optim, str) else f"{getattr(optim, '__name__', type(optim).__name__)}"
        raise TypeError(f"{name} must be an optax optimiser, got {got}: pass optax.adam(1e-2)")
    _check_shapes(optim, name)
    params = jnp.ones(3)
    state = optim.init(params)
    total = np.zeros(3)
    for _ in range(3):  # a warm-up schedule may start at zero
        step, state = optim.update(params, state, params)
        total += np.asarray(step)
    if not np.all(np.isfinite(total)) or np.all(total >= 0):
        raise ValueError(
            f"{name} does not go downhill (its steps for a gradient of 1 add up to {total[0]}): is its learning rate "
            "positive?"
        )
    return optim


def _check_shapes(optim: Any, name: str) -> None:
    """It needs nothing but gradients, and gives a step for each number; found from shapes, so that nothing is run."""
    like = jax.ShapeDtypeStruct((3,), jnp.zeros(()).dtype)
    try:
        step = jax.eval_shape(lambda params: optim.update(params, optim.init(params), params)[0], like)
    except TypeError as error:
        raise TypeError(
            f"{name} needs more than gradients ({error}): pass one that does not search along a line, such as "
            "optax.adam(1e-2), optax.sgd(1e-2) or optax.adamw(1e-2)"
        ) from None
    got = getattr(step, "shape", None)
    if got != like.shape:
        raise ValueError(
            f"{name} gives steps of shape {got} for gradients of shape {like.shape}: it takes the first axis for rows, "
            "as differentially private optimisers do (optax.contrib.dpsgd), and clips each. A silo's gradient here is "
            "that of its whole loss, with no axis of rows: pass optax.adam(1e-2). numpyro_fed has no differential "
            "privacy: who may see a silo's messages may learn from them what they tell of its data"
        )
