"""Before the first round: the silos tell what a method must know, and nothing else is read.

First a silo tells the shapes, types and ints of its arguments (:func:`~numpyro_fed.data.stack.described`); from these
alone the server divides the model's sites (:mod:`numpyro_fed.model.partition`). With the partition in hand a silo
answers once more (:class:`Answer`): how many observations each observed site has, how its rows lie, how much room a
minibatch needs, whether its data fit their supports and its indices their arrays, whether rows look at all others.
Both are messages, counted in bytes; from them the server chooses and compiles. (A few silos also check the split's
certificate: :mod:`numpyro_fed.model.certificate`.)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines.base import Engine, Traffic, traffic
from numpyro_fed.keys import digest
from numpyro_fed.local.minibatch import rows_apart
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.indices import in_range
from numpyro_fed.model.mixing import looking_around, rows_look_around
from numpyro_fed.model.observations import observations_by_site
from numpyro_fed.model.rows import components_of, how_rows_lie
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.support import supported
from numpyro_fed.model.survey import Survey

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
    trace = split.trace_near_zero(data)
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
    shapes = jax.eval_shape(lambda data: answer(split, batch_size, data), like)

    def init(key: Any) -> Answer:
        return jax.tree.map(lambda leaf: jnp.zeros((num, *leaf.shape), leaf.dtype), shapes)

    def silo_step(key: Any, broadcast: Broadcast, silo: tuple, data: SiloData) -> tuple[Answer, tuple]:
        return answer(split, batch_size, data), silo

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


def take(split: SplitModel, stack: Stack, engine: Engine, batch_size: int | None) -> tuple[Answer, Traffic]:
    """Everyone's answers, stacked in the order of the silos (of a store: of its example), and what they cost."""
    asked = stack.example
    num = len(asked.names)
    make = lambda: _algorithm(split, batch_size, num, asked.shapes(0))
    algorithm = remembered(make, KEY, ByIdentity(split), batch_size, num)
    key = jax.random.key(KEY)
    server, states = engine.start(algorithm, key, asked)
    sent = traffic(algorithm, server, (), asked.shapes(0))
    answers, _, _ = engine.rounds(algorithm, key, asked, server, states, 0, None, 1, "least")
    return jax.device_get(answers), num * sent + Traffic(asked.description_bytes, 0)


def combined(split: SplitModel, answers: Answer, stack: Stack) -> Survey:
    """The server's view of all answers."""
    counts = sum((np.asarray(column, np.int64) for column in answers.observations.values()), np.zeros((), np.int64))
    sizes = tuple(np.maximum(np.atleast_1d(counts), 1).tolist())
    rows = "whole" if not np.all(answers.separable) else "aligned" if np.all(answers.aligned) else "indexed"
    room = -1 if np.any(answers.room < 0) else int(np.max(answers.room, initial=0))
    plain = not split.groups
    mixed = next((site for site, fine in answers.apart.items() if not np.all(fine)), "")
    return Survey(
        len(stack.names),
        sizes,
        stack.known,
        "whole" if plain else rows,
        bool(plain or np.any(answers.joined)),
        room,
        mixed,
        looking_around(answers.around) if len(stack.names) > 1 else (),  # one silo's mean is that of all data
    )
