"""Every method's rounds as a GPU and a TPU would get them: without the host, the model in the user's precision.

Nothing runs here, for that takes the device. Rounds are traced and lowered for it, which is where an operation that it
lacks is refused.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import jax
import jax.export
import jax.extend
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from table import METHODS, counties, silos_for
from tiers import tiers

from numpyro_fed.algorithm import Cohort, FederatedAlgorithm, Phase, Plan
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines.base import sent_to
from numpyro_fed.precision import in_user_precision

# What a program may leave to the device's own libraries: decompositions, and CUDA's random numbers.
LIBRARY = {
    "cuda": r"(cusolver|cublas|cu_threefry)\w*",
    "tpu": r"Eigh|Qr|LuDecomposition|ProductOfElementaryHouseholderReflectors",
}
MODEL = "model_of_the_user"


def scoped(function: Callable) -> Callable:
    """The function, whose operations, and their derivatives, bear the name."""

    @wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(MODEL):
            return function(*args, **kwargs)

    return marked


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on a CPU; and what NumPyro computes of the model after the model has run bears its name, too."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for kind in (dist.Logistic, dist.Normal):
        monkeypatch.setattr(kind, "log_prob", scoped(kind.log_prob))


def phases_of(name: str) -> tuple[list[Phase], Stack]:
    """Starts and rounds of a method of the table, its model's operations named; and silos' data, of one shape."""
    method = METHODS[name]
    silos = silos_for(method.model, *(() if method.model is counties else ("leeds", "hull")))
    method = replace(method, model=scoped(method.model))
    split, survey, stack, _ = method.prepare(silos)
    phases = method.compile(split, survey, Plan(names=silos.names)).phases
    return [phase if phase.made is None else phase.made() for phase in phases if phase.role != "check"], stack


def round_of(algorithm: FederatedAlgorithm, stack: Stack) -> tuple[Callable, tuple]:
    """One round of all silos, as engines do it, and the shapes of its arguments."""
    (bucket,) = stack.arrays
    index = np.arange(len(stack.names), dtype=np.int32)

    def start(key: Any, arrays: Any, shared: Any) -> tuple[Any, Any]:
        server = algorithm.init(key)
        sent = algorithm.broadcast(key, server)
        one = lambda j, args, mask: algorithm.init_silo(key, sent_to(sent, j), SiloData(args, mask, shared))
        return server, jax.vmap(one)(index, *arrays)

    def one_round(keys: Any, server: Any, silos: Any, arrays: Any, shared: Any) -> tuple[Any, Any, Any]:
        sent = algorithm.broadcast(keys[0], server)

        def step(key: Any, j: Any, silo: Any, args: Any, mask: Any) -> tuple[Any, Any]:
            return algorithm.silo_step(key, sent_to(sent, j), silo, SiloData(args, mask, shared))

        messages, silos = jax.vmap(step)(keys, index, silos, *arrays)
        server, info = algorithm.server_step(
            keys[0], server, algorithm.aggregate(messages, Cohort(index, len(stack.names)))
        )
        return server, silos, info

    keys = jax.random.split(jax.random.key(0), len(stack.names))
    server, silos = jax.eval_shape(start, keys[0], bucket, stack.shared)
    return one_round, (keys, server, silos, bucket, stack.shared)


def operations(jaxpr: Any, scope: str = "") -> Iterator[tuple[str, Any]]:
    """Each with the names around it, those of the calls it stands in included."""
    for equation in jaxpr.eqns:
        around = f"{scope}/{equation.source_info.name_stack}"
        inner = list(jax.extend.core.jaxprs_in_params(equation.params))
        for one in inner:
            yield from operations(getattr(one, "jaxpr", one), around)
        if not inner:
            yield around, equation


def floats(equation: Any) -> set[str]:
    types = {getattr(variable.aval, "dtype", None) for variable in (*equation.invars, *equation.outvars)}
    return {str(kind) for kind in types if kind is not None and jnp.issubdtype(kind, jnp.floating)}


def found_in(jaxpr: Any) -> tuple[set[str], set[str]]:
    """Callbacks to the host, wherever they are; floating types of the operations that bear the model's name."""
    all_of_them = list(operations(jaxpr))
    callbacks = {equation.primitive.name for _, equation in all_of_them if "callback" in equation.primitive.name}
    return callbacks, set().union(*(floats(equation) for around, equation in all_of_them if MODEL in around))


def strange_calls(program: Any, device: str, *args: Any) -> set[str]:
    """Of the program as lowered for a device: what it leaves to the host, or to a library that is not the device's."""
    text = jax.export.export(program, platforms=[device])(*args).mlir_module()
    calls = {call or host for call, host in re.findall(r"custom_call @([\w.$]+)|stablehlo\.(send|recv)\b", text)}
    return {call for call in calls if not re.fullmatch(LIBRARY.get(device, ""), call)}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("name", tiers(METHODS, "SFVI, no locals", "EP", "FedPA", "FedAvg"))
def test_rounds_lower_for_other_devices(name: str) -> None:
    """In float32: naturals and their decompositions are float64 there, too, and the model is not."""
    phases, stack = phases_of(name)
    for phase in phases:
        algorithm = in_user_precision(phase.algorithm, False)
        with jax.enable_x64(True):  # as engines are
            one_round, args = round_of(algorithm, stack)
            rounds = jax.jit(one_round)
            assert found_in(rounds.trace(*args).jaxpr.jaxpr) == (set(), {"float32"}), phase.name
            for device in LIBRARY:
                assert not strange_calls(rounds, device, *args), (phase.name, device)


def test_what_should_not_be_there_would_be_found() -> None:
    """In calls, loops and derivatives."""

    def bad(x: Any) -> Any:
        wide = lambda x: jnp.sum(jnp.sin(x.astype(jnp.float64)))
        body = lambda i, x: x + jax.grad(scoped(jax.jit(wide)))(x)
        return jax.pure_callback(lambda x: x, x, jax.lax.fori_loop(0, 3, body, x), vmap_method="sequential")

    with jax.enable_x64(True):
        program = jax.jit(jax.vmap(bad))
        x = jnp.ones((2, 3), jnp.float32)
        assert found_in(program.trace(x).jaxpr.jaxpr) == ({"pure_callback"}, {"float32", "float64"})
        with pytest.raises(ValueError, match="lowering platform cuda"):  # JAX itself refuses a callback of this host
            strange_calls(program, "cuda", x)
        here = jax.jit(jnp.linalg.cholesky)
        assert strange_calls(here, "cpu", jnp.eye(3)) == {"lapack_dpotrf_ffi"}
