r"""Fewer equations: what a traced function computes, without what it does for nothing.

JAX differentiates, vectorises and lowers a traced function equation by equation, in Python. A log density as a model
writes it has many that nobody needs: priors of globals where a silo's own term is asked for, what is computed twice,
calls of small functions (``jnp.where``), axes of length one that come and go. Each is there again in every derivative,
over nodes, points and silos, in every phase. :func:`fewer` leaves them out before any of that. What is computed is the
same, number for number.

>>> import jax.numpy as jnp
>>> def function(x):
...     unused = jnp.exp(x)
...     return jnp.where(x > 0, x - 0.0, 0.0).reshape(-1, 1).sum(axis=1) + jnp.sin(x) * jnp.sin(x)
>>> count = lambda function: len(jax.make_jaxpr(function)(jnp.ones(3)).eqns)
>>> count(function), count(fewer(function)), bool(jnp.all(function(jnp.ones(3)) == fewer(function)(jnp.ones(3))))
(10, 7, True)
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

SMALL = 12  # equations of a function that is called, up to which its call is replaced by them
WORKS = "does_the_work"  # as a program's call of a marked function is named
_NAMELESS = jax.jit(lambda: 0).trace().jaxpr.jaxpr.debug_info


def works(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, marked: it does most of a round's work (:mod:`numpyro_fed.engines.parts`)."""

    def does_the_work(*args: Any) -> Any:
        return function(*args)

    return jax.jit(does_the_work)


def is_work(eqn: JaxprEqn) -> bool:
    """Whether it is the call of a marked function."""
    return WORKS in str(eqn.params.get("name", ""))


def fewer(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with fewer equations, wherever it is traced."""

    def run(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        found = evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return run


def evaluated(jaxpr: Jaxpr, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """What a traced function gives, computed with as few equations as are needed; loops and branches are one each."""
    found = _Evaluation().run(jaxpr, constants, args)
    return [_value(out) if isinstance(out, Literal) else out for out in found]


def as_jaxpr(eqns: Sequence[JaxprEqn]) -> Jaxpr:
    """Equations one after another as a function of all that they take, giving all that they make."""
    outs = [var for eqn in eqns for var in eqn.outvars]
    made = set(outs)
    taken = dict.fromkeys(var for eqn in eqns for var in eqn.invars if not isinstance(var, Literal))
    effects = frozenset().union(*(eqn.effects for eqn in eqns))
    return Jaxpr((), [var for var in taken if var not in made], outs, eqns, effects, _NAMELESS)


class _Evaluation:
    """One pass over a traced function. Values are JAX's, or literals, which stay what they are."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[Any]] = {}
        self._roots: dict[int, Any] = {}  # of values that are others, in another shape
        self._held: list[Any] = []  # values that are known by their ids

    def run(self, jaxpr: Jaxpr, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        known: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))
        read = lambda atom: atom if isinstance(atom, Literal) else known[atom]
        for eqn in _needed(jaxpr):
            known |= zip(eqn.outvars, self._equation(eqn, [read(atom) for atom in eqn.invars]), strict=True)
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, eqn: JaxprEqn, ins: list[Any]) -> list[Any]:
        if eqn.effects or not eqn.outvars:
            return _bound(eqn, ins)
        if _is_small_call(eqn):
            inner = eqn.params["jaxpr"]
            return self.run(inner.jaxpr, inner.consts, ins)
        same = _same(eqn, ins)
        if same is not None:
            return [same]
        if _is_another_shape(eqn) and not isinstance(ins[0], Literal):
            return [self._in_another_shape(eqn, ins[0])]
        return self._once(eqn, ins)

    def _in_another_shape(self, eqn: JaxprEqn, value: Any) -> Any:
        """Through however many shapes it went before."""
        aval, root = _of(eqn.outvars[0]), self._roots.get(id(value), value)
        if _alike(root, aval):
            return root
        key = "in another shape", id(root), aval.shape
        if key not in self._seen:
            self._seen[key] = _bound(eqn, [value]) if root is value else [jax.lax.reshape(root, aval.shape)]
            self._held += [root, *self._seen[key]]
        (out,) = self._seen[key]
        self._roots[id(out)] = root
        return out

    def _once(self, eqn: JaxprEqn, ins: list[Any]) -> list[Any]:
        key = _key(eqn, ins)
        if key is None:
            return _bound(eqn, ins)
        if key not in self._seen:
            self._seen[key] = _bound(eqn, ins)
            self._held += ins
        return self._seen[key]


def _bound(eqn: JaxprEqn, ins: list[Any]) -> list[Any]:
    """The equation, of these values."""
    atoms = [value if isinstance(value, Literal) else atom for atom, value in zip(eqn.invars, ins, strict=True)]
    given = {atom: value for atom, value in zip(atoms, ins, strict=True) if not isinstance(atom, Literal)}
    one = as_jaxpr([eqn.replace(invars=atoms)])
    return jax.core.eval_jaxpr(one, (), *(given[var] for var in one.invars))


def _needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Equations that something comes of."""
    wanted = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    kept = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(var in wanted for var in eqn.outvars):
            kept.append(eqn)
            wanted |= {atom for atom in eqn.invars if not isinstance(atom, Literal)}
    return kept[::-1]


def _is_small_call(eqn: JaxprEqn) -> bool:
    """Of a function that nothing is asked of but its value; long ones may be called several times."""
    if eqn.primitive.name not in ("jit", "pjit") or is_work(eqn):
        return False
    placed = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    asked = any(type(place).__name__ != "UnspecifiedValue" for place in placed) or eqn.params.get(
        "compiler_options_kvs"
    )
    return not asked and len(eqn.params["jaxpr"].jaxpr.eqns) <= SMALL


def _same(eqn: JaxprEqn, ins: list[Any]) -> Any:
    """What the equation gives, where that is what it takes; None where it is not, or not to the last bit."""
    name, out = eqn.primitive.name, _of(eqn.outvars[0])
    first = next(iter(ins), None)
    if name in ("sub", "mul", "div") and len(ins) == 2:
        none = 0 if name == "sub" else 1
        if _is_number(ins[1], none) and _alike(first, out):
            return first
        return ins[1] if name == "mul" and _is_number(first, none) and _alike(ins[1], out) else None
    untouched = name in ("convert_element_type", "copy", "copy_p", "slice")
    untouched |= name == "transpose" and tuple(eqn.params["permutation"]) == tuple(range(len(out.shape)))
    return first if untouched and _alike(first, out) else None


def _is_another_shape(eqn: JaxprEqn) -> bool:
    """Whether all numbers stay, in their order."""
    name, params = eqn.primitive.name, eqn.params
    if len(eqn.invars) != 1 or not hasattr(eqn.invars[0].aval, "shape"):
        return False
    before, after = _of(eqn.invars[0]), _of(eqn.outvars[0])
    if before.dtype != after.dtype or before.size != after.size:
        return False
    if name in ("reshape", "squeeze"):
        return params.get("dimensions") is None or name == "squeeze"
    if name == "broadcast_in_dim":
        return list(params["broadcast_dimensions"]) == sorted(params["broadcast_dimensions"])
    return name in ("reduce_sum", "reduce_max", "reduce_min")  # of single numbers


def _key(eqn: JaxprEqn, ins: list[Any]) -> Hashable | None:
    """What tells equations apart that give different numbers; None: it cannot be told."""
    known = lambda value: (
        (str(value.aval), np.asarray(value.val).tobytes()) if isinstance(value, Literal) else id(value)
    )
    params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    key = eqn.primitive, eqn.ctx, tuple(map(known, ins)), params
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _alike(value: Any, aval: Any) -> bool:
    """Whether a value has a shape and type, and gives way to other types as it would."""
    own = _of(value) if isinstance(value, Literal) else jax.typeof(value)
    weak = getattr(own, "weak_type", False) == getattr(aval, "weak_type", False)
    return getattr(own, "shape", None) == aval.shape and own.dtype == aval.dtype and weak


def _is_number(value: Any, number: int) -> bool:
    return isinstance(value, Literal) and np.ndim(value.val) == 0 and bool(value.val == number)


def _value(literal: Literal) -> Any:
    if getattr(literal.aval, "weak_type", False):
        return literal.val
    with jax.enable_x64(True):  # elsewhere a float64 is cut to float32
        return jax.device_put(np.asarray(literal.val, _of(literal).dtype))


def _of(atom: Any) -> Any:
    """The shape and type of an atom."""
    return atom.aval
