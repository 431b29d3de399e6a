"""Before a run: what each method would send, from shapes."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import pandas as pd

from numpyro_fed.algorithm import Phase, Plan
from numpyro_fed.engines.base import Sent, sent
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.host import key_of
from numpyro_fed.methods import EP, PVI, SEP, SFVI, FedAvg, FedNP, FedPA, SFVIAvg
from numpyro_fed.methods.base import Method
from numpyro_fed.model import partition as labels
from numpyro_fed.model.partition_table import Partition
from numpyro_fed.model.trace import Model
from numpyro_fed.precision import in_user_precision
from numpyro_fed.run.foresee import fresh_shapes
from numpyro_fed.run.prepare import Prepared
from numpyro_fed.run.runner import Runner
from numpyro_fed.run.target import BLOCK, exact_marginal, target_phase
from numpyro_fed.schedules import as_schedule

METHODS = (EP, PVI, SFVI, SFVIAvg, SEP, FedPA, FedAvg, FedNP)
COLUMNS = ["method", "phase", "direction", "field", "shape", "bytes"]


def partition(model: Model, silos: Any, local: Any = None, shared: Any = None) -> Partition:
    """Which site lives where, from the shapes of the silos' arguments; it prints as a table.

        >>> part = nf.partition(model, silos)
        >>> part.global_sites, part.observed_sites
        (('beta',), ('y',))

    ``part.messages()`` lists what each method would send, before anything is:

        >>> sent = part.messages()
        >>> sent = sent[(sent["phase"] == "rounds") & (sent["direction"] == "up")]
        >>> sent.groupby("method")["bytes"].sum().loc[["EP", "SFVI"]].tolist()
        [107, 52]

    Args:
        model: an ordinary NumPyro model, called as ``model(**silos[name])``.
        silos: an nf.Silos.
        local, shared: names of sites or plates, where the automatic partition is to be overridden.

    Raises:
        PartitionError: where the model cannot be divided, or could be in two ways: it says what to type.
    """
    part = labels.partition(model, silos, local, shared)
    return replace(part, foretell=lambda methods: would_send(model, silos, local, shared, methods))


def would_send(
    model: Model, silos: Any, local: Any = None, shared: Any = None, methods: Iterable[Method] | None = None
) -> pd.DataFrame:
    """A row for each leaf that one silo and the server send each other in a round of each phase.

    Methods that cannot fit the model are left out; ``.attrs["refused"]`` has their reasons.
    """
    chosen = [kind(model, local=local, shared=shared) for kind in METHODS] if methods is None else list(methods)
    rows: list[tuple] = []
    refused = {}
    for method in chosen:
        name = type(method).__name__
        try:
            rows += [(name, *row) for row in _of(method, method.prepare(silos))]
        except (TypeError, ValueError) as error:  # a PartitionError is one
            refused[name] = str(error)
    table = pd.DataFrame(rows, columns=COLUMNS)
    table.attrs["refused"] = refused
    return table


def _of(method: Method, prepared: Prepared) -> Iterable[tuple]:
    split, survey, stack, asked = prepared
    program = method.compile(split, survey, Plan(names=stack.names, check=True))
    runner = Runner(Vmap(), key_of(0), stack, split, as_schedule(None), False, "")
    for entry in asked:
        if entry.who is None or 0 in entry.who:
            yield from _rows("survey", entry.sent)
    phases = {phase.name: phase if phase.made is None else phase.made() for phase in reversed(program.phases)}
    for phase in (
        *reversed(phases.values()),
        target_phase(runner, "check", exact_marginal(split, survey, program.posterior), BLOCK),
    ):
        yield from _rows(phase.name, _sent(runner, phase))


def _sent(runner: Runner, phase: Phase) -> Sent:
    algorithm = in_user_precision(phase.algorithm, jax.config.read("jax_enable_x64"))
    with jax.enable_x64(True):  # as engines do
        server, states = fresh_shapes(runner, algorithm)
        silo = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), states[0])
        return sent(algorithm, server, silo, runner.stack.shapes(0))


def _rows(phase: str, found: Sent) -> Iterable[tuple]:
    for direction, fields in zip(("up", "down"), found, strict=True):
        for one in fields:
            yield phase, direction, one.name, str(one.shape), one.bytes
