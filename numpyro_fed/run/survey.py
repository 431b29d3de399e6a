"""Before the first round: the silos tell what a method must know, and nothing else is read.

First a silo tells the shapes, types and ints of its arguments (:func:`~numpyro_fed.data.stack.described`); from these
alone the server divides the model's sites (:mod:`numpyro_fed.model.partition`). With the partition in hand a silo
answers once more (:class:`Answer`): how many observations each observed site has, how its rows lie, how much room a
minibatch needs, whether its data fit their supports and its indices their arrays, whether rows look at all others.
Both are messages, counted in bytes; from them the server chooses and compiles. A few silos are also asked whether the
split's certificate holds on their data (:mod:`numpyro_fed.model.certificate`).
"""

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Phase
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines import wire
from numpyro_fed.engines.base import Engine, Sent
from numpyro_fed.equations import fewer
from numpyro_fed.host import key_of, shapes_of, undisturbed, zeros_like
from numpyro_fed.keys import digest
from numpyro_fed.local.minibatch import rows_apart
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.certificate import ASKED, certifying
from numpyro_fed.model.indices import in_range
from numpyro_fed.model.mixing import looking_around, rows_look_around
from numpyro_fed.model.observations import observations_by_site
from numpyro_fed.model.rows import components_of, how_rows_lie
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.support import supported
from numpyro_fed.model.survey import Survey
from numpyro_fed.results.ledger import Entry
from numpyro_fed.run.foresee import foresee
from numpyro_fed.run.runner import Runner
from numpyro_fed.schedules import as_schedule

Array = jax.Array
KEY = digest("\0survey")


class Answer(NamedTuple):
    """All that a silo tells of itself before the first round, besides shapes. (Of all silos, stacked.)"""

    observations: dict[str, Array]  # {observed site: int}
    supported: dict[str, Array]  # {observed site: bool}: its values are possible
    separable: Array  # bool: every term depends on at most one row of each group
    aligned: Array  # bool: terms stand at their rows
    joined: Array  # bool: rows of several groups meet
    room: Array  # int: observations of as many groups as a minibatch takes; -1: one belongs to no group
    in_range: dict[str, Array]  # {argument: bool}: rows that are looked up by its numbers are there
    apart: dict[str, Array]  # {observed site: bool}: its rows are in a minibatch what they are among all
    around: dict[str, Array]  # {site: int}: 1 where rows look at nearly all others, 0 where not, -1 if rows are too few


def answer(split: SplitModel, batch_size: int | None, data: SiloData) -> Answer:
    """What one silo tells. Pure: engines run it where the data are."""
    trace = split.trace_at_zero(data)
    yes, none = jnp.ones((), bool), jnp.zeros((), jnp.int32)
    separable, aligned, joined, room, found = yes, yes, ~yes, none, None
    if split.groups:
        found = components_of(split, data)
        separable, aligned, joined = how_rows_lie(split, data, found)
    apart: dict[str, Array] = {}
    if batch_size is not None:
        room, apart = rows_apart(split, batch_size, data, found)
    observations = observations_by_site(split, data, trace)
    values, indices, around = supported(split, trace), in_range(split, data), rows_look_around(split, data)
    return Answer(observations, values, separable, aligned, joined, room, indices, apart, around)


def _algorithm(split: SplitModel, batch_size: int | None, num: int, like: SiloData) -> FederatedAlgorithm:
    told = jax.jit(fewer(partial(answer, split, batch_size)), inline=True)
    shapes = jax.eval_shape(told, like)

    def init(key: Any) -> Answer:
        return zeros_like(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num, *leaf.shape), leaf.dtype), shapes))

    def silo_step(key: Any, broadcast: Broadcast, silo: tuple, data: SiloData) -> tuple[Answer, tuple]:
        return told(data), silo

    def aggregate(messages: Answer, cohort: Cohort) -> Answer:
        order = jnp.argsort(jnp.asarray(cohort.index))  # engines stack messages by bucket
        return jax.tree.map(lambda leaf: leaf[order], messages)

    return FederatedAlgorithm(
        init,
        lambda key, broadcast, data: (),
        lambda key, server: Broadcast(()),
        silo_step,
        aggregate,
        lambda key, server, answers: (answers, {}),
    )


def begun(split: SplitModel, stack: Stack, engine: Engine, batch_size: int | None) -> tuple[Runner, Phase, tuple]:
    """The survey over these silos, whose program is being compiled, and their states: they have none."""
    asked = stack.example
    phase = survey_phase(split, batch_size, asked)
    runner = Runner(engine, key_of(KEY), asked, split, as_schedule(None), False, "")
    states: tuple = tuple(() for _ in asked.buckets)
    foresee(runner, phase, scheduled=False, shapes=(shapes_of(phase.algorithm.init, None), states))
    return runner, phase, states


def take(
    split: SplitModel,
    stack: Stack,
    engine: Engine,
    batch_size: int | None,
    meanwhile: Callable[[Runner], object] = lambda runner: None,
) -> tuple[Answer, tuple[Entry, ...]]:
    """Everyone's answers, stacked in the order of the silos (of a store: of its example), and what they cost.

    ``meanwhile`` is done while the program is compiled; what is wrong there is said when it is done in its turn.
    """
    asked, (runner, phase, states) = stack.example, begun(split, stack, engine, batch_size)
    with suppress(Exception), undisturbed():
        meanwhile(runner)
    left, _ = runner.run((phase,), Left(), states, None)
    places = np.array([stack.names.index(name) for name in asked.names])
    answered = (entry._replace(who=places) for entry in runner.books.entries)
    return jax.device_get(left.server), (*_before(split, asked, places), *answered)


def survey_phase(split: SplitModel, batch_size: int | None, asked: Stack) -> Phase:
    """One round in which these silos answer."""
    num = len(asked.names)
    make = lambda: _algorithm(split, batch_size, num, asked.shapes(0))
    algorithm = remembered(make, KEY, ByIdentity(split), batch_size, num)
    return Phase(
        "survey",
        algorithm,
        lambda left, fresh: Begun(algorithm.init(None)),
        role="check",
        effort="least",
        watched=False,
        recipe=("survey",),
    )


def _before(split: SplitModel, asked: Stack, places: np.ndarray) -> Iterable[Entry]:
    """What is sent before the survey's round: each silo's description, the partition, and a few certificates."""
    entry = lambda who, sent: Entry("survey", 0, 1, places[np.array(who)], sent, together=True)
    sizes: dict[int, list[int]] = {}
    for j, size in enumerate(asked.description_bytes):
        sizes.setdefault(size, []).append(j)
    for size, who in sizes.items():
        yield entry(who, Sent(up=(wire.Field("description", (), size),)))
    partition = wire.Field("partition", (), len(json.dumps(told(split)).encode()))
    yield entry(range(len(asked.names)), Sent(down=(partition,)))
    agrees = Sent(wire.fields({"agrees": np.zeros((), bool)}), wire.fields({"seed": np.zeros((), np.int32)}))
    yield entry([asked.names.index(name) for name in certifying(asked.silos, split.partition.axes)], agrees)


def told(split: SplitModel) -> list[list[str]]:
    """The partition, as silos receive it: whose each site is, and along which of their arguments it lies."""
    along = {axis.name: axis.arguments for axis in split.partition.axes}
    return [
        [
            site.name,
            site.role,
            "server" if site.at_server else "silo",
            *(path for a, _ in site.axes for path in along[a]),
        ]
        for site in split.partition.sites
    ]


def combined(split: SplitModel, answers: Answer, stack: Stack) -> Survey:
    """The server's view of all answers."""
    by_site = tuple((site, tuple(np.asarray(column).tolist())) for site, column in answers.observations.items())
    rows = "whole" if not np.all(answers.separable) else "aligned" if np.all(answers.aligned) else "indexed"
    room = -1 if np.any(answers.room < 0) else int(np.max(answers.room, initial=0))
    plain = not split.groups
    mixed = next((site for site, fine in answers.apart.items() if not np.all(fine)), "")
    return Survey(
        len(stack.names),
        by_site,
        stack.known,
        "whole" if plain else rows,
        bool(plain or np.any(answers.joined)),
        room,
        mixed,
        min(len(stack.example.names), ASKED),
        looking_around(answers.around) if len(stack.names) > 1 else (),  # one silo's mean is that of all data
    )


def likely(split: SplitModel, num_silos: int) -> Survey | None:
    """What silos will probably answer of how their rows lie, told from shapes alone; None: hard to say.

    Only programs that are compiled before the answers are in depend on it.
    """
    if not split.groups:
        return Survey(num_silos)
    own = [site for site in split.partition.sites if site.role in ("observed", "factor") and not site.at_server]
    axes = {axis for axis, _ in split.groups[0].axes}
    if len(split.groups) > 1 or any(not axes <= {axis for axis, _ in site.axes} for site in own):
        return None
    return Survey(num_silos, rows="aligned" if axes else "indexed", joined=False)
