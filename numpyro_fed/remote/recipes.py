"""A phase of a run, made in the silo from its recipe.

The server says which phase it asks for in a few words (``Phase.recipe``). A silo makes the same functions from what it
was told when the run was opened, and what a phase is for is known from here, not from what the server calls it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_fed.algorithm import Broadcast, FederatedAlgorithm, Phase
from numpyro_fed.engines.stale import stale
from numpyro_fed.host import key_of
from numpyro_fed.local.integrate import rows_of
from numpyro_fed.remote.opening import Agreed
from numpyro_fed.run.locals import locals_round
from numpyro_fed.run.modes import modes_phase
from numpyro_fed.run.searches import with_few_nodes
from numpyro_fed.run.target import exact_marginal, target_round
from numpyro_fed.run.theta import ThetaBroadcast, theta_round

Recipe = tuple[str | int, ...]
MOST_POINTS = 1 << 14  # of one round


class Made(NamedTuple):
    """What a silo does in a phase."""

    phase: Phase
    purpose: str  # "start", "rounds", "closing", "check" or "correct"
    points: int = 0  # at which densities are asked for
    asked: Any = None  # where there are points: what a server sends that asks at so many, as shapes


def made(run: Agreed, recipe: Recipe) -> Made:
    """The phase of that recipe; a ValueError where there is none."""
    kind = recipe[0] if recipe else None
    if kind not in _KINDS:
        raise ValueError("the server asks for a phase that this version does not know")
    return _KINDS[kind](run, *recipe[1:])


def _of_program(run: Agreed, place: Any = None, *rest: Any) -> Made:
    phases = run.program.phases
    if type(place) is not int or not 0 <= place < len(phases):
        raise ValueError("the method has no such phase")
    phase = phases[place] if phases[place].made is None else _later(phases[place].made)
    late = rest[-1:] == ("stale",)
    chosen = rest[:-1] if late else rest
    if len(chosen) > 1:
        raise ValueError("a phase is asked for in one variant")
    for variant in chosen:
        if type(variant) is not int or not 0 <= variant < len(phase.variants):
            raise ValueError("the phase has no such variant")
        phase = phase.variant(variant)
    if late:
        phase = phase._replace(algorithm=stale(phase.algorithm, run.survey.num_silos))
    return Made(phase, "closing" if phase.role == "check" else phase.role)


def _later(make: Callable[[], Phase] | None) -> Phase:
    assert make is not None
    return make()


def _target(run: Agreed, name: Any = None, size: Any = None) -> Made:
    num = _count(size)
    if name not in ("check", "correct"):
        raise ValueError("densities are asked for in a check or in a correction")
    marginal = exact_marginal(run.split, run.survey, run.program.posterior)
    algorithm = target_round(run.split, marginal, num)
    return Made(_look(name, algorithm), str(name), num, _sent_by(algorithm))


def _theta(run: Agreed, size: Any = None) -> Made:
    dim = run.split.dim
    num, marginal = _count(size), exact_marginal(run.split, run.survey, run.program.posterior)
    shape: Any = lambda *sizes: jax.ShapeDtypeStruct(sizes, float)
    asked = Broadcast(ThetaBroadcast(shape(num, dim), shape(num), shape(dim), _shapes(run.split.theta)))
    return Made(_look("theta", theta_round(run.split, marginal, num)), "check", num, asked)


def _locals(run: Agreed, size: Any = None) -> Made:
    algorithm = locals_round(run.split, run.program.posterior, rows_of(run.split, run.survey), _count(size))
    return Made(_look("locals", algorithm), "check")


def _modes(run: Agreed, size: Any = None) -> Made:
    num, marginal = _count(size), exact_marginal(run.split, run.survey, run.program.posterior)
    phase = modes_phase(run.split, with_few_nodes(marginal, run.split), num, run.survey.num_silos)
    return Made(phase, "check", num, _sent_by(phase.algorithm))


_KINDS: dict[Any, Callable[..., Made]] = {
    "program": _of_program,
    "target": _target,
    "theta": _theta,
    "locals": _locals,
    "modes": _modes,
}


def _look(name: str, algorithm: FederatedAlgorithm) -> Phase:
    return Phase(name, algorithm, role="check")


def _sent_by(algorithm: FederatedAlgorithm) -> Any:
    """What a server of this algorithm sends, as shapes."""
    return jax.eval_shape(lambda key: algorithm.broadcast(key, algorithm.init(key)), key_of(0))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), float), tree)


def same_shapes(one: Any, other: Any) -> bool:
    """Whether two trees have the same leaves of the same shapes, of whatever types."""
    if jax.tree.structure(one) != jax.tree.structure(other):  # type: ignore[operator]
        return False
    return all(np.shape(a) == np.shape(b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def _count(size: Any) -> int:
    if type(size) is not int or not 1 <= size <= MOST_POINTS:
        raise ValueError(f"a number from 1 to {MOST_POINTS} was expected")
    return int(np.int64(size))
