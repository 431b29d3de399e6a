"""Where a run begins: at the beginning, at a fit of any method, or at the state of the same method."""

from functools import partial
from typing import Any

import jax

from numpyro_fed.algorithm import Left, Phase, Program
from numpyro_fed.engines import wire
from numpyro_fed.engines.base import Sent, tells_silos
from numpyro_fed.host import real_dtype
from numpyro_fed.local.start import LocalStart, WarmStart
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.state import State
from numpyro_fed.run.foresee import fresh_shapes
from numpyro_fed.run.runner import Runner
from numpyro_fed.run.warm_start import warm_start

Start = tuple[Left, tuple | None, tuple | None]  # as Runner.run takes it


def start(init_state: Any, method: str, program: Program, runner: Runner) -> Start:
    """What is left for the first phase, the silos' states if a run goes on, and what they know of their locals."""
    if init_state is None:
        return Left(), None, None
    given = init_state.state if isinstance(init_state, Fit) else init_state
    states = given.arranged(runner.stack) if runner.engine.holds_states else ()
    if isinstance(init_state, Fit):  # a start, whatever the method and its settings
        return _from_fit(init_state, states, runner)
    return _onwards(given, states, method, program, runner)


def check_start(init_state: Any, names: Any) -> None:
    """Raises where this is no start for these silos; before anybody is asked."""
    if init_state is None:
        return
    given = init_state.state if isinstance(init_state, Fit) else init_state
    if not isinstance(given, State):
        raise TypeError(f"init_state must be a fit.state or a Fit, got a {type(init_state).__name__}")
    lazy = [getattr(one, "lazy", False) for one in (given.names, names)]
    if any(lazy):
        if given.names != names:
            kinds = ["an nf.SiloStore" if one else "an nf.Silos" for one in lazy]
            raise ValueError(
                f"init_state has other silos: {len(given.names)} of {kinds[0]}, where {kinds[1]} has {len(names)}, or "
                "others' names"
            )
    elif set(given.names) != set(names):
        gone, new = sorted(set(given.names) - set(names)), sorted(set(names) - set(given.names))
        told = [f"missing now: {', '.join(gone)}"] * bool(gone) + [f"not in the state: {', '.join(new)}"] * bool(new)
        raise ValueError(f"init_state has other silos: {'; '.join(told)}")


def _from_fit(fit: Fit, states: tuple, runner: Runner) -> Start:
    warm = warm_start(fit.posterior, fit.split, fit.state.server)
    local = None
    here = tells_silos(runner.engine) is None  # silos elsewhere do not know the other fit's method
    if here and runner.split.groups and hasattr(fit.posterior, "local_start") and states:
        sent = warm._replace(source=None)
        found = runner.engine.in_silos(partial(_local_start, fit.posterior), sent, runner.stack, states)
        runner.books.ahead("start", Sent(down=wire.fields(sent)), len(runner.stack.names))
        local = None if found[0] is None else found
    _check_start(warm, local, runner)
    return Left(warm=warm), None, local


def _local_start(posterior: Any, warm: WarmStart, state: Any) -> LocalStart | None:
    return posterior.local_start(warm, state)


def _onwards(given: State, states: tuple, method: str, program: Program, runner: Runner) -> Start:
    if given.corrected:
        raise ValueError(
            f"init_state is of a corrected fit of {given.method}: pass the Fit itself to start from it, or go on from "
            "fit.uncorrected.state"
        )
    if given.method != method:
        raise ValueError(f"init_state is of {given.method}, this is {method}: pass the Fit itself to start from it")
    names, server = runner.stack.names, given.server
    order = list(range(len(names)))
    if given.names != names:
        order = [given.names.index(name) for name in names]
    if hasattr(program.posterior, "reordered"):
        server = program.posterior.reordered(server, order)
    phase: Phase = next(phase for phase in program.phases if phase.role == "rounds")
    shapes = fresh_shapes(runner, phase.algorithm)
    hint = "init_state was made with other settings or data; pass the Fit itself to start from it"
    if tells_silos(runner.engine) is not None:  # the states are elsewhere
        check_shapes(server, shapes[0], hint)
    else:
        check_shapes((server, states), shapes, hint)
    runner.round, runner.heard = given.round, given.hearing
    return Left(server=server), states, None


def _check_start(warm: WarmStart, local: tuple | None, runner: Runner) -> None:
    """A fit of another model or of other data is no start for this one."""
    problem, split = "init_state is of another model or data", runner.split
    check_shapes(warm.loc, jax.ShapeDtypeStruct((split.dim,), real_dtype()), problem)
    for bucket, found in zip(range(len(runner.stack.buckets)), local or (), strict=False):
        zeros = jax.eval_shape(split.zeros_local, runner.stack.shapes(bucket).mask)
        number = len(runner.stack.buckets[bucket].names)
        expected = jax.tree.map(lambda leaf, n=number: jax.ShapeDtypeStruct((n, *leaf.shape), leaf.dtype), zeros)
        check_shapes(found.loc, expected, problem)


def check_shapes(got: Any, expected: Any, problem: str) -> None:
    """Both have the same structure and shapes, or an error that shows the first difference."""
    if jax.tree.structure(got) != jax.tree.structure(expected):  # type: ignore[operator]
        raise ValueError(f"{problem} (guide and optimiser must be the same to go on)")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if a.shape != b.shape:
            raise ValueError(f"{problem} (an array of shape {a.shape} where {b.shape} is needed)")
