"""Programs that a run will need, compiled beside what goes on before (:mod:`numpyro_fed.ahead`)."""

import jax

from numpyro_fed import schedules
from numpyro_fed.algorithm import FederatedAlgorithm, Phase, PyTree
from numpyro_fed.engines.base import received_by_one
from numpyro_fed.host import shapes_of, undisturbed
from numpyro_fed.precision import in_user_precision
from numpyro_fed.run.runner import Runner


def fresh_shapes(runner: Runner, algorithm: FederatedAlgorithm) -> tuple[PyTree, tuple]:
    """Of the states that the engine would start with; nothing is computed, and nothing sent."""
    key, stack = runner.key, runner.stack
    own = in_user_precision(algorithm, jax.config.read("jax_enable_x64"))
    with jax.enable_x64(True):  # elsewhere a shape of float64 is cut to float32
        server = shapes_of(own.init, key)
        if not runner.engine.holds_states:
            return server, ()
        received = received_by_one(own, key, server)
        states = []
        for b, bucket in enumerate(stack.buckets):
            one = shapes_of(own.init_silo, key, received, stack.shapes(b))
            number = len(bucket.names)
            states.append(jax.tree.map(lambda leaf, n=number: jax.ShapeDtypeStruct((n, *leaf.shape), leaf.dtype), one))
    return server, tuple(states)


def foresee(runner: Runner, phase: Phase, scheduled: bool = True, shapes: tuple[PyTree, tuple] | None = None) -> None:
    """Begin to compile a phase whose rounds will be asked for, where the engine can do that.

    Args:
        scheduled: those take part whom the schedule names; else everyone.
        shapes: of the states that it will begin with; None: of the algorithm's own.
    """
    begin = getattr(runner.engine, "compile_ahead", None)
    if begin is None or (scheduled and schedules.stale(runner.schedule)):
        return
    algorithm = phase.variant(phase.likely).algorithm
    with undisturbed():
        if shapes is None:
            shapes = fresh_shapes(runner, algorithm)
        server, states = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes)
        cohorts = runner.cohorts(0, 1) if scheduled else None
        begin(algorithm, runner.key, runner.stack, server, states, cohorts, runner.effort(phase))


def foresee_start(runner: Runner, phase: Phase) -> None:
    """Begin to compile what gives a phase its first states."""
    begin = getattr(runner.engine, "start_ahead", None)
    if begin is not None:
        with undisturbed():
            begin(phase.algorithm, runner.key, runner.stack)  # whichever key it will be
