"""Precision and the compiler: what is traced in float64, and how hard XLA tries.

Natural parameters are float64 in any program, the user's model is in the user's own precision. What crosses between
the two is converted here.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import FederatedAlgorithm, Lost
from numpyro_fed.host import put, real_dtype
from numpyro_fed.pieces import jit

Array = jax.Array
# XLA's fusion emitters take half of the time to compile, and gain little in programs of this size.
QUICK: dict[str, Any] = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
# for programs that do little work: a third of that time again, and about five times as long to run
LEAST: dict[str, Any] = QUICK | {"xla_backend_optimization_level": 0}
ONCE = {"xla_backend_optimization_level": 1}  # programs that run a few times: half the time to compile, as fast to run
# On a CPU, XLA hands sums and matrix products to a library (YNNPACK). What is summed is then written out first: sums of
# many short rows take three times as long, those of rows of thousands nine tenths; products of silos' small matrices
# take a fifth longer. This hands it nothing.
NO_LIBRARY: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": ""}
LITTLE = 1e7  # numbers that are looked at, up to which the time to compile is more than the time to run


def _takes(options: dict[str, Any]) -> bool:
    try:
        jax.jit(lambda: np.float32(0), compiler_options=options).lower().compile()
    except (jax.errors.JaxRuntimeError, ValueError):
        return False
    return True


@lru_cache(maxsize=1)
def _unknown() -> frozenset[str]:
    """Options that this compiler does not take: they are XLA's to take back, and jaxlib 0.12 lacks one."""
    wishes = LEAST | (NO_LIBRARY if jax.default_backend() == "cpu" else {})
    if _takes(wishes):
        return frozenset()
    return frozenset(name for name, value in wishes.items() if not _takes({name: value}))


def known(options: dict[str, Any]) -> dict[str, Any]:
    """Those of the options that this compiler takes."""
    return {name: value for name, value in options.items() if name not in _unknown()}


def unoptimised() -> dict[str, Any]:
    """What the compiler is told of programs that do little work."""
    return known(LEAST)


def for_rounds(effort: str) -> dict[str, Any]:
    """What the compiler is told of programs that run rounds, by how hard it is to try."""
    options = {"most": {}, "some": QUICK, "least": LEAST}[effort]
    return known(options | (NO_LIBRARY if jax.default_backend() == "cpu" else {}))


def in_x64(function: Callable) -> Callable:
    """The function, traced in float64, its floating arguments converted."""

    def convert(leaf: Any) -> Any:
        floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf, jnp.float64) if floating or isinstance(leaf, float) else leaf

    @wraps(function)
    def wrapped(*args: Any) -> Any:
        with jax.enable_x64(True):
            return function(*jax.tree.map(convert, args))

    return wrapped


def to_user_dtype(tree: Any) -> Any:
    """Float64 leaves in the precision of the user's program."""
    dtype = real_dtype()
    with jax.enable_x64(True):
        return jax.tree.map(lambda leaf: leaf.astype(dtype) if leaf.dtype == jnp.float64 else leaf, tree)


def tree_where(condition: Array, a: Any, b: Any) -> Any:
    """One of two pytrees, whatever the precision of their leaves."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def stacked(trees: list[Any]) -> Any:
    """Pytrees of one structure as one, its leaves stacked on a leading axis, in whatever precision they have."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def finite(tree: Any) -> Any:
    """Whether every floating number in it is; inside a program."""
    real = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in real], bool))


def strong(tree: Any) -> Any:
    """Arrays whose type does not give way to others': a weakly typed start would compile the same program twice."""
    return jax.tree.map(lambda leaf: put(leaf) if getattr(leaf, "weak_type", False) else leaf, tree)


@lru_cache(maxsize=64)
def in_user_precision(algorithm: FederatedAlgorithm, x64: bool) -> FederatedAlgorithm:
    """The algorithm, traced in the user's precision wherever an engine's own code is traced in float64.

    Natural parameters are float64 in any program (:mod:`numpyro_fed.normal.families`), and JAX vectorises what it has
    traced under the precision of the moment: so an engine works in float64, and the model must not notice.
    """

    def under(function: Callable) -> Callable:
        def run(*args: Any) -> Any:
            with jax.enable_x64(x64):  # Python's own numbers (the start of a param) become arrays in it, too
                return jax.tree.map(lambda leaf: jnp.asarray(leaf) if np.isscalar(leaf) else leaf, function(*args))

        return run

    once = lambda function: jax.jit(under(function), inline=True)
    return FederatedAlgorithm(
        under(algorithm.init),
        once(algorithm.init_silo),
        once(algorithm.broadcast),
        once(algorithm.silo_step),
        under(algorithm.aggregate),
        once(algorithm.server_step),
        Lost(
            algorithm.lost.hold,
            algorithm.lost.absorb and under(algorithm.lost.absorb),
            algorithm.lost.server_step and under(algorithm.lost.server_step),
            algorithm.lost.void,
        ),
    )


def engine_in_x64(run: Callable) -> Callable:
    """An engine's method, traced in float64, its algorithm kept in the user's precision."""

    @wraps(run)
    def wrapped(self: Any, algorithm: FederatedAlgorithm, *args: Any, **options: Any) -> Any:
        algorithm = in_user_precision(algorithm, jax.config.read("jax_enable_x64"))
        with jax.enable_x64(True):
            return run(self, algorithm, *args, **options)

    return wrapped


def unforeseen(tree: Any, mask: dict[str, Array]) -> Any:
    """Known numbers, times a one that is not known before the program runs.

    All that follows from known numbers the compiler works out itself, in an interpreter: seconds for a large array.
    """
    if not mask:
        return tree
    one = jnp.minimum(1 + sum(jnp.sum(real) for real in mask.values()), 1)
    return jax.tree.map(lambda leaf: leaf * one.astype(leaf.dtype), tree)


def alongside(tree: Any, array: Array) -> Any:
    """The same values, vectorised wherever ``array`` is: for what a loop begins with.

    Where some of it is not, and will be after the first step, JAX vectorises the loop's body once more to find that
    out, and with it the loops inside, each of them once more. The compiler sees that nothing is done here.

    >>> alongside(1.0, jnp.zeros(3)).tolist()
    1.0
    """
    same = jnp.ravel(array)[0] == jnp.ravel(array)[0]

    def run(leaf: Any) -> Any:
        with jax.enable_x64(True):
            leaf = jnp.asarray(leaf)
            return jax.lax.select(jnp.broadcast_to(same, leaf.shape), leaf, leaf)

    return jax.tree.map(run, tree)


def zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Natural parameters are float64 in any program."""
    with jax.enable_x64(True):
        return jnp.zeros(shape, dtype)


def compiled_once(function: Callable[..., Any], *args: Any) -> Any:
    """Run a program that is used a single time."""
    return jit(function).lower(*args).compile(compiler_options=unoptimised())(*args)
