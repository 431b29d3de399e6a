"""Is a function a polynomial of some of its arguments, and of which degree? Told from its equations, never from values.

Where a silo's log density is quadratic in its locals, whatever the globals and the data are, the locals are normal
given the globals, and their integral has a closed form. A look at values could not tell that from a function that is
quadratic only where it was looked at.

>>> degree(lambda x, y: jnp.sum(y * (x - jnp.exp(y)) ** 2), jnp.ones(3), jnp.ones(3))
2.0
>>> degree(lambda x, y: jnp.sum(jnp.where(y > 0, x @ x, x[0])), jnp.ones(3), jnp.ones(3))
2.0
>>> degree(lambda x, y: jnp.sum(jnp.abs(x)), jnp.ones(3), jnp.ones(3))
inf
"""

from collections.abc import Callable
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

# What these give is as much of a polynomial as the largest of what they take.
LINEAR = {
    *("add", "add_any", "sub", "neg", "reduce_sum", "cumsum", "convert_element_type", "copy", "copy_p", "real"),
    *("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice", "rev", "concatenate", "pad"),
    *("stop_gradient", "split", "sharding_constraint", "device_put"),
}
# The same, of what they take from or put in; where that is must not depend on the arguments.
PLACED = {"gather": 1, "dynamic_slice": 1, "dynamic_update_slice": 2, "scatter": 1, "scatter-add": 1}
CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "remat2",
    "checkpoint",
)


def degree(function: Callable[..., Any], wrt: Any, *others: Any) -> float:
    """Of what ``function(wrt, *others)`` returns, in ``wrt``: 0, 1, ...; ``inf`` where it is not known to have one."""
    closed = jax.make_jaxpr(function)(wrt, *others)
    number = len(jax.tree.leaves(wrt))
    ins = [1.0] * number + [0.0] * (len(closed.jaxpr.invars) - number)
    return max(_outs(closed.jaxpr, ins), default=0.0)


def _outs(jaxpr: Jaxpr, ins: list[float]) -> list[float]:
    known: dict[Any, float] = dict(zip(jaxpr.invars, ins, strict=True))
    of = lambda atom: 0.0 if isinstance(atom, Literal) else known.get(atom, 0.0)
    for eqn in jaxpr.eqns:
        found = _of_equation(eqn, [of(atom) for atom in eqn.invars])
        known |= zip(eqn.outvars, found, strict=True)
    return [of(atom) for atom in jaxpr.outvars]


def _of_equation(eqn: Any, ins: list[float]) -> list[float]:
    """Of everything that an equation gives."""
    name = eqn.primitive.name
    if not any(ins) or _always_finite(eqn, ins):
        return [0.0] * len(eqn.outvars)
    if name in CALLS:
        inner = next((eqn.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in eqn.params), None)
        jaxpr = getattr(inner, "jaxpr", inner)
        return [inf] * len(eqn.outvars) if jaxpr is None else _outs(jaxpr, ins)
    return [_of_primitive(name, eqn.params, ins)] * len(eqn.outvars)


def _always_finite(eqn: Any, ins: list[float]) -> bool:
    """Whether it asks of a polynomial what is always so: NumPyro asks whether values are within the support."""
    if len(eqn.invars) != 2 or inf in ins:
        return False
    a, b = eqn.invars
    infinite = isinstance(b, Literal) and bool(np.all(np.isinf(b.val)))
    return (eqn.primitive.name == "eq" and a is b) or (eqn.primitive.name == "ne" and infinite)


def _of_primitive(name: str, params: dict[str, Any], ins: list[float]) -> float:
    if name == "convert_element_type" and not jnp.issubdtype(params["new_dtype"], jnp.floating):
        return inf  # it rounds
    if name == "convert_element_type" and jnp.finfo(params["new_dtype"]).bits < 32:
        return inf
    if name in LINEAR:
        return max(ins)
    if name in ("mul", "dot_general"):
        return sum(ins)
    if name in ("square", "integer_pow"):
        power = params.get("y", 2)
        return power * ins[0] if power > 0 else 0.0 if power == 0 else inf
    if name == "div":
        return inf if ins[1] else ins[0]
    if name == "select_n":
        return inf if ins[0] else max(ins)
    if name == "triangular_solve":
        return inf if ins[0] else ins[1]
    if name in PLACED:
        values = PLACED[name]
        if name.startswith("scatter"):  # into what, where, what
            return inf if ins[1] else max(ins)
        return inf if any(ins[values:]) else max(ins[:values])
    return inf
