r"""Large batches of matrices in pieces: on some versions of jaxlib programs that decompose them wait for ever.

On a CPU, jaxlib 0.10 cuts a LAPACK call for a batch of matrices into tasks of about 200,000 operations each, hands
these to the threads that run the program, and waits for them in the thread that makes the call, which is one of them.
As many such calls at once as there are threads wait for one another, and the program never ends. On two cores a round
of EP did not, with two correlated outcomes in silos of 300 and 250 rows. JAX 0.11.2 does not cut any more, but for
Python 3.11 there is no such version.

So programs of a user's model are looked through after they were differentiated and vectorised. A call that would be cut
becomes a loop over pieces that are not: the same numbers. Matrices of up to four rows are factorised and solved with
number by number instead, all of the batch at once: LAPACK takes longer to be called for one of them than for its work.

>>> solve = jax.vmap(lambda a: jnp.linalg.cholesky(a) * 2)
>>> matrices = jnp.broadcast_to(4 * jnp.eye(8), (2_000, 8, 8))
>>> bool(jnp.all(jit(solve)(matrices) == matrices)), "scan" in str(jit(solve).trace(matrices[:5]).jaxpr)
(True, False)
>>> ("scan" in str(jit(solve).trace(matrices).jaxpr)) == cut_by_jaxlib()
True
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial, wraps
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

Array = jax.Array
UNCUT = 200_000  # operations, by jaxlib's own count: up to here a batch is not cut
MENDED = (0, 11, 2)  # jaxlib's version
FEW = 4  # rows of a matrix, up to which it is gone through number by number

# An upper bound of jaxlib's count for one matrix, of its larger side and of numbers on a right-hand side. The counts of
# 0.10.2, read off the size of its tasks: n b for b numbers, n^3 / 3, n^3; of the others 10 n^3 at most.
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "triangular_solve": lambda n, b: 2 * n * b,
    "cholesky": lambda n, b: n**3,
    "lu": lambda n, b: 2 * n**3,
}
OTHERS = ("eigh", "eig", "svd", "qr", "geqrf", "geqp3", "householder_product", "ormqr", "schur", "hessenberg")
OPERATIONS |= dict.fromkeys(OTHERS, lambda n, b: 30 * n**3)


@cache
def cut_by_jaxlib() -> bool:
    """Whether this jaxlib cuts batches."""
    own = tuple(int(part) for part in version("jaxlib").split(".")[:3] if part.isdigit())
    return own < MENDED and jax.default_backend() == "cpu"


def jit(
    function: Callable[..., Any],
    static_argnums: int | Sequence[int] = (),
    compiler_options: dict[str, Any] | None = None,
) -> Any:
    """``jax.jit``, for what evaluates a user's model: with large batches of matrices in pieces.

    The function takes arguments by position; static ones are counted from the first.
    """
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if any(place < 0 for place in static):
        raise ValueError(f"static_argnums are counted from the first argument, 0, got {static}")
    return jax.jit(in_pieces(function, static), static_argnums=static, compiler_options=compiler_options)


def in_pieces(function: Callable[..., Any], static_argnums: Sequence[int] = ()) -> Callable[..., Any]:
    """The function, large batches of matrices in pieces: the outermost of a program, after all derivatives."""
    inner = jax.jit(function, static_argnums=tuple(static_argnums))

    @wraps(function)
    def run(*args: Any) -> Any:
        if not cut_by_jaxlib() or jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return function(*args)
        traced = inner.trace(*args)
        closed = rewritten(traced.jaxpr)
        if closed is traced.jaxpr:
            return inner(*args)  # as it was traced, in one equation
        given = [arg for place, arg in enumerate(args) if place not in static_argnums]
        found = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(given))
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), found)

    return run


def unwrapped(closed: Any) -> Any:
    """A traced program without the call that is all there is to it."""
    eqns, jaxpr = closed.jaxpr.eqns, closed.jaxpr
    lone = len(eqns) == 1 and eqns[0].primitive.name in ("jit", "pjit") and not closed.consts
    if lone and list(eqns[0].invars) == list(jaxpr.invars) and list(eqns[0].outvars) == list(jaxpr.outvars):
        return eqns[0].params["jaxpr"]
    return closed


def rewritten(closed: Any) -> Any:
    """A traced function whose large batches are in pieces; itself, where it has none."""
    return _Rewriting().of(closed)


class _Rewriting:
    """One pass over a traced function. What stands there several times is one object afterwards, too: lowered once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # by its id: a function that is called, and what it became
        self._calls: dict[Hashable, JaxprEqn] = {}

    def of(self, closed: Any) -> Any:
        if id(closed) not in self._known:
            self._known[id(closed)] = closed, self._anew(closed)
        return self._known[id(closed)][1]

    def _anew(self, closed: Any) -> Any:
        if isinstance(closed, ClosedJaxpr):
            jaxpr = self.of(closed.jaxpr)
            return closed if jaxpr is closed.jaxpr else closed.replace(jaxpr=jaxpr)
        eqns = [self._equation(eqn) for eqn in closed.eqns]
        if all(new is old for new, old in zip(eqns, closed.eqns, strict=True)):
            return closed
        return closed.replace(eqns=eqns)

    def _equation(self, eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive.name in OPERATIONS:
            num = uncut(eqn.primitive.name, [shape.shape for shape in _shapes(eqn)])
            return eqn if num is None else self._call(eqn, num)
        params = {name: self._inside(value) for name, value in eqn.params.items()}
        return eqn if all(params[name] is eqn.params[name] for name in params) else eqn.replace(params=params)

    def _call(self, eqn: JaxprEqn, num: int) -> JaxprEqn:
        """A function's call in the place of an equation."""
        shapes = tuple((shape.shape, str(shape.dtype)) for shape in _shapes(eqn))
        key = eqn.primitive, shapes, tuple(sorted((name, str(value)) for name, value in eqn.params.items()))
        if key not in self._calls:
            by_number = BY_NUMBER.get(eqn.primitive.name) if shapes[0][0][-1] <= FEW else None
            self._calls[key] = _traced(eqn, partial(by_number, **eqn.params) if by_number else _loop(eqn, num))
        return self._calls[key].replace(invars=eqn.invars, outvars=eqn.outvars)

    def _inside(self, value: Any) -> Any:
        """Of an equation's parameter: what it calls, loops over or chooses from."""
        if isinstance(value, Jaxpr | ClosedJaxpr):
            return self.of(value)
        if isinstance(value, tuple) and any(isinstance(each, Jaxpr | ClosedJaxpr) for each in value):
            new = [self._inside(each) for each in value]
            if any(a is not b for a, b in zip(new, value, strict=True)):
                return type(value)(*new) if hasattr(value, "_fields") else tuple(new)
        return value


def uncut(name: str, shapes: Sequence[tuple[int, ...]]) -> int | None:
    """How many matrices jaxlib leaves together; None where it leaves all.

    >>> uncut("cholesky", [(5, 100, 20, 20)]), uncut("cholesky", [(5, 4, 20, 20)]), uncut("cholesky", [(900, 900)])
    (25, None, None)
    """
    *batch, rows, columns = shapes[0]
    right = int(np.prod(shapes[-1][len(batch) :], dtype=np.int64))
    most = max(1, UNCUT // max(1, OPERATIONS[name](max(rows, columns), right)))
    return None if np.prod(batch, dtype=np.int64) <= most or not rows * columns else most


def _traced(eqn: JaxprEqn, function: Callable[..., Any]) -> JaxprEqn:
    """The call of a function with the shapes that an equation takes."""
    with jax.enable_x64(True):
        (call,) = jax.make_jaxpr(jax.jit(function))(*_shapes(eqn)).eqns
    return call


def _shapes(eqn: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.invars]


def _loop(eqn: JaxprEqn, num: int) -> Callable[..., Any]:
    """What the equation does, ``num`` matrices at a time."""

    def pieces(*operands: Any) -> Any:
        batch = operands[0].shape[:-2]
        flat = tuple(each.reshape(-1, *each.shape[len(batch) :]) for each in operands)
        one = lambda each: eqn.primitive.bind(*each, **eqn.params)
        found = jax.lax.map(one, flat, batch_size=num if num > 1 else None)
        return jax.tree.map(lambda each: each.reshape(*batch, *each.shape[1:]), found)

    return pieces


def solved_by_number(
    a: Array, b: Array, *, left_side: bool, lower: bool, transpose_a: bool, conjugate_a: bool, unit_diagonal: bool
) -> Array:
    """``jax.lax.linalg.triangular_solve``, row after row."""
    a = jnp.conj(a) if conjugate_a else a
    a, lower = (a.mT, not lower) if transpose_a == left_side else (a, lower)  # x a = b is a' x' = b'
    b = b if left_side else b.mT
    found: dict[int, Array] = {}
    for i in range(a.shape[-1]) if lower else reversed(range(a.shape[-1])):
        rest = b[..., i, :]
        for j, x in found.items():
            rest = rest - a[..., i, j, None] * x
        found[i] = rest if unit_diagonal else rest / a[..., i, i, None]
    x = jnp.stack([found[i] for i in range(a.shape[-1])], axis=-2)
    return x if left_side else x.mT


def factorised_by_number(a: Array, **_: Any) -> Array:
    """``jax.lax.linalg.cholesky``, column after column; NaN where a matrix has none."""
    n = a.shape[-1]
    root: dict[tuple[int, int], Array] = {}
    for j in range(n):
        for i in range(j, n):
            rest = a[..., i, j] - sum(root[i, k] * jnp.conj(root[j, k]) for k in range(j))
            root[i, j] = jnp.sqrt(rest) if i == j else rest / root[j, j]
    zero = jnp.zeros_like(a[..., 0, 0])
    rows = [jnp.stack([root.get((i, j), zero) for j in range(n)], axis=-1) for i in range(n)]
    exists = jnp.all(jnp.stack([jnp.real(root[i, i]) > 0 for i in range(n)]), axis=0)
    return jnp.where(exists[..., None, None], jnp.stack(rows, axis=-2), jnp.nan)


BY_NUMBER: dict[str, Callable[..., Array]] = {"triangular_solve": solved_by_number, "cholesky": factorised_by_number}
