"""A run in a silo: what was agreed on, its states and its compiled programs."""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import FederatedAlgorithm, Plan
from numpyro_fed.data.inputs import checked_arguments
from numpyro_fed.data.silos import Silos, at_silo
from numpyro_fed.engines import wire
from numpyro_fed.files import replace_file
from numpyro_fed.host import folded, key_of, shapes_of, zeros_like
from numpyro_fed.keys import fold_in_name, identity
from numpyro_fed.methods.base import Method
from numpyro_fed.model.survey import Survey
from numpyro_fed.pieces import jit
from numpyro_fed.precision import finite, for_rounds, in_user_precision, strong, unoptimised
from numpyro_fed.remote.envelope import MOST_PAYLOAD
from numpyro_fed.remote.errors import ToldError
from numpyro_fed.remote.opening import Agreed, agreed, description, from_json, opened, settled, silos_like
from numpyro_fed.remote.recipes import Made, Recipe, made, same_shapes
from numpyro_fed.remote.states import States, arrays_of, like_of
from numpyro_fed.run.survey import survey_phase

MOST_MADE = 64  # phases whose functions are kept: a run has about ten


class Studied(Protocol):
    """What a silo asks of a study file."""

    @property
    def shared(self) -> Mapping[str, Any]: ...

    @property
    def methods(self) -> Mapping[str, Method]: ...


class NotHere(ToldError):
    """What a request begins from is not in this silo."""


def shared_of(study: Studied) -> dict[str, Any]:
    """The study's shared arguments, as arrays and ints."""
    return checked_arguments(None, dict(study.shared))


class Run:
    """A run in a silo: what was agreed on, its states and programs."""

    def __init__(
        self, name: str, own: Mapping[str, Any], study: Studied, opening: dict[str, Any], folder: Path | None
    ) -> None:
        self.name, self.opening = name, opening
        self.x64 = bool(jax.config.read("jax_enable_x64"))
        if opening["method"] not in study.methods:
            raise ToldError(f"its study file has no method {opening['method']!r}")
        described = dict(opening["silos"])
        if described.get(name) != description(own):
            raise ToldError("the server has another description of its data: it was asked before they changed")
        everyone = silos_like(described, shared_of(study), opening["told"])
        self.opened = opened(study.methods[opening["method"]], name, own, everyone)
        self.run: Agreed | None = None
        self.agreement: dict[str, Any] | None = None
        self._use(self.opened.padded)
        self.folder = folder
        self.states = States(None if folder is None else folder / "states")
        self.structures: dict[str, str] = {}  # of what is sent, by what is done in which phase
        if folder is not None and (folder / "structures.json").exists():
            self.structures = json.loads((folder / "structures.json").read_text())
        self._made: dict[Recipe, Made] = {}
        self._steps: dict[tuple[Recipe, str], Any] = {}
        self.words = identity(name)
        self._compiled: dict[tuple[str, Recipe], Any] = {}

    def _use(self, padded: bool) -> None:
        self.settled = settled(self.opened, padded)
        with at_silo(self.name):
            self.data = self.settled.stack.data(self.name)

    @property
    def rows(self) -> int:
        """Of the longest axis along which something is observed: a grid of knots is not made of patients."""
        part = self.settled.split.partition
        along = {axis for site in part.sites if site.role == "observed" and not site.at_server for axis, _ in site.axes}
        return max((length for axis, length in part.lengths(self.name).items() if axis in along), default=1)

    @property
    def silos(self) -> Silos:
        """This one alone."""
        return self.settled.stack.silos

    def agree(self, body: dict[str, Any]) -> None:
        survey, plan = from_json(Survey, body["survey"]), from_json(Plan, body["plan"])
        if body["padded"] is not True:
            self._use(False)
        self.run, self.agreement = agreed(self.settled, survey, plan), body
        self._made.clear()

    def made(self, recipe: Recipe) -> Made:
        if recipe not in self._made:
            if len(self._made) >= MOST_MADE:  # a server that asks for ever other ones, refused or not
                self._made.clear()
                self._steps.clear()
                self._compiled.clear()
            if recipe == ("survey",):
                size = self.opened.method.batch_size_for(self.settled.split)
                self._made[recipe] = Made(survey_phase(self.settled.split, size, self.settled.stack), "survey")
            elif self.run is None:
                raise NotHere("nothing was agreed on in this run")
            else:
                self._made[recipe] = made(self.run, recipe)
        return self._made[recipe]

    def received(self, do: str, recipe: Recipe, body: dict[str, Any], payload: bytes) -> Any:
        """What was sent, as a tree. In a phase it always has the same structure, which is told once."""
        place, structure = json.dumps([do, *recipe]), body.get("like")
        known = self.structures.get(place)
        if structure is not None and structure != known:
            if known is not None or not isinstance(structure, str):
                raise ValueError("the server sends another structure than before")
            asked = self.made(recipe).asked
            if asked is not None and not same_shapes(like_of(structure), asked):
                raise ValueError("the server asks at another number of points than it says")
            like_of(structure)
            self.structures[place] = known = structure
            if self.folder is not None:
                replace_file(self.folder / "structures.json", json.dumps(self.structures).encode())
        if known is None:
            raise NotHere("the server does not tell the structure of what it sends")
        like = _like(known)
        if do == "start" and not payload:  # nothing of it is looked at
            if wire.num_bytes(like) > MOST_PAYLOAD:
                raise ValueError("the server tells the structure of more than it could send")
            return zeros_like(like)
        return wire.decode(payload, like) if do == "step" else arrays_of(payload, like)  # a step takes host arrays

    def step(self, recipe: Recipe, effort: str, key: Any, at: int, given: Any, state: Any) -> tuple[Any, Any]:
        """A message, on the host, and the state after it: the same, where that would not be finite."""
        made = self.made(recipe)
        if made.asked is not None:  # a state made for more points would be an answer at more
            fresh = shapes_of(made.phase.algorithm.init_silo, key_of(0), given, self.data)
            if not same_shapes(state, fresh):
                raise ValueError("the state is of another number of points than the phase")
        with jax.enable_x64(True):
            args = key, (np.uint32(at), self.words), given, strong(state), self.data
            step = self._steps.get((recipe, effort))
            if step is None:  # compiled once: JAX's own look-up takes longer than a small step
                algorithm = in_user_precision(made.phase.algorithm, self.x64)
                program = jit(partial(_step, algorithm), compiler_options=for_rounds(effort))
                step = self._steps[recipe, effort] = program.lower(*args).compile()
            message, state = step(*args)
        return jax.device_get(message), state

    def compiled(self, do: str, recipe: Recipe) -> Callable[..., Any]:
        """What is done once in a phase, in the user's precision."""
        if (do, recipe) not in self._compiled:
            phase, x64 = self.made(recipe).phase, self.x64
            function: Any = phase.algorithm.init_silo if do == "start" else getattr(phase, do)
            if function is None:
                raise ValueError("the phase does no such thing in silos")
            self._compiled[do, recipe] = partial(_in_user_precision, jit(function, compiler_options=unoptimised()), x64)
        return self._compiled[do, recipe]


def _in_user_precision(function: Callable[..., Any], x64: bool, *args: Any) -> Any:
    with jax.enable_x64(x64):
        return function(*args)


@lru_cache(maxsize=256)
def _like(structure: str) -> Any:
    return like_of(structure)


def _step(algorithm: FederatedAlgorithm, key: Any, place: tuple, given: Any, state: Any, data: Any) -> Any:
    at, words = place
    own = fold_in_name(jax.random.fold_in(key, at), words)
    message, new = algorithm.silo_step(own, given, state, data)
    fine = finite(new)
    return message, jax.tree.map(lambda old, new: jnp.where(fine, new, old), state, new)


def silo_key(key: Any, name: str) -> Any:
    """A silo's own: folded with both words of its identity."""
    first, second = identity(name).tolist()
    return folded(folded(key, first), second)
