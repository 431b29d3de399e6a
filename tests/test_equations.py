"""Fewer equations: the same numbers to the last bit, whatever is done with the function afterwards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.scipy.special import logsumexp

from numpyro_fed.equations import SMALL, fewer, is_work, works

X = np.linspace(-2.0, 2.0, 5).astype(np.float32)


def total(function: Callable[..., Any], *args: Any) -> int:
    """Equations, those of the functions that are called included; of loops and branches one each."""

    def count(jaxpr: Any) -> int:
        calls = [eqn.params["jaxpr"].jaxpr if eqn.primitive.name in ("jit", "pjit") else None for eqn in jaxpr.eqns]
        return sum(1 if call is None else 1 + count(call) for call in calls)

    return count(jax.make_jaxpr(function)(*args).jaxpr)


def bernoulli(x: Any) -> Any:
    return dist.Bernoulli(logits=x[:, None] * jnp.arange(3.0)).to_event(1).log_prob(jnp.ones((5, 3)))


def branches(x: Any) -> Any:
    loop = jax.lax.fori_loop(0, 3, lambda i, a: jnp.where(a > i, jnp.sin(a), a * 1.0), x)
    return jax.lax.cond(x[0] > 0, jnp.cos, lambda v: v - 0.0, loop)


def tree(x: Any) -> Any:
    return {"a": (x, 2.0, x.reshape(1, 5, 1).sum(axis=(0, 2))), "b": jnp.zeros(3), "c": None, "d": x.astype(int)}


FUNCTIONS = {
    "a distribution": bernoulli,
    "loops and branches": branches,
    "outputs of all kinds": tree,
    "random numbers": lambda x: x + jax.random.normal(jax.random.key(0), (5,)),
    "the same twice": lambda x: jnp.sin(x) + jnp.sin(x),
    "almost the same": lambda x: jax.lax.cumsum(x) + jax.lax.cumsum(x, reverse=True) + jnp.clip(x, 0, 1),
    "numbers of two types": lambda x: x * 1 + jnp.asarray(1, jnp.int32) * 1 + (x - 0),
    "negative zeros": lambda x: jnp.sign(1 / ((-0.0 * x) - 0.0)) + jnp.sign(1 / (0.0 * x + 0.0)),
    "shapes": lambda x: x[:, None].reshape(5, 1, 1).squeeze(2).T.reshape(-1).reshape(5, 1)[:, 0] + x[None].max(axis=0),
    "a custom derivative": lambda x: jax.nn.relu(x) + logsumexp(jnp.stack([x, 2 * x]), axis=0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_same_numbers(name: str) -> None:
    function, short = FUNCTIONS[name], fewer(FUNCTIONS[name])
    assert total(short, X) <= total(function, X)
    expected, found = jax.jit(function)(X), jax.jit(short)(X)
    assert jax.tree.structure(expected) == jax.tree.structure(found)
    types = lambda tree: jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type), tree)
    assert types(expected) == types(found)
    same = jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), expected, found)
    assert jax.tree.structure(same) is not None
    many = np.stack([X, X[::-1]])
    for leaf, other in zip(*(jax.tree.leaves(jax.vmap(f)(many)) for f in (function, short)), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("outputs of all kinds", "negative zeros")])
def test_the_same_derivatives(name: str) -> None:
    function = FUNCTIONS[name]
    value = lambda f: lambda x: jnp.sum(f(x) ** 2)
    for of in (jax.grad, jax.hessian) if name != "loops and branches" else (jax.jacfwd,):
        np.testing.assert_allclose(of(value(function))(X), of(value(fewer(function)))(X), rtol=1e-5, atol=1e-6)


def test_what_is_left_out() -> None:
    """Of a log density as NumPyro writes it, a quarter."""
    assert total(fewer(bernoulli), X) < 0.75 * total(bernoulli, X)
    unused = lambda x: (jnp.exp(x), jnp.sum(x))[1]
    assert total(fewer(unused), X) == 1
    assert total(fewer(FUNCTIONS["the same twice"]), X) == 2


def test_long_functions_are_called_and_marked_ones_stay() -> None:
    def long(x: Any) -> Any:
        for i in range(SMALL + 1):
            x = x + i
        return x

    called = jax.jit(long)
    twice = lambda x: called(called(x))
    assert total(fewer(twice), X) == total(twice, X)
    marked = jax.make_jaxpr(fewer(lambda x: works(jnp.sin)(x) + 1.0))(X)
    assert [is_work(eqn) for eqn in marked.eqns] == [True, False]


def test_effects_stay(capfd: Any) -> None:
    def told(x: Any) -> Any:
        jax.debug.print("here")
        jax.debug.print("here")
        return x

    jax.block_until_ready(jax.jit(fewer(told))(X))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("here") == 2


def test_float64_where_the_program_is_float32() -> None:
    def double(x: Any) -> Any:
        with jax.enable_x64(True):
            return jnp.sum(x.astype(jnp.float64) * 1.0 / 3) + 0.1

    def constant(x: Any) -> Any:
        with jax.enable_x64(True):
            return jnp.array(0.1, jnp.float64), jnp.array(2**40, jnp.int64), x

    assert [leaf.dtype.name for leaf in jax.jit(fewer(constant))(X)] == ["float64", "int64", "float32"]
    found = jax.jit(fewer(double))(X)
    assert found.dtype == np.float64 == jax.jit(double)(X).dtype and found == jax.jit(double)(X)
