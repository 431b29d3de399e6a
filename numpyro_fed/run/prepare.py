"""From a model and silos to what a method compiles from: the partition, the certificate, the survey."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from numpyro_fed.data.inputs import leaves, shared_digest
from numpyro_fed.data.silos import Silos, at_silo
from numpyro_fed.data.stack import Stack, stack_of
from numpyro_fed.engines.base import Engine
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.host import real_dtype, undisturbed
from numpyro_fed.memo import remembered
from numpyro_fed.model.build import certified, uncertified
from numpyro_fed.model.indices import beyond
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.support import outside
from numpyro_fed.model.survey import Survey
from numpyro_fed.model.trace import Model, PartitionError
from numpyro_fed.results.ledger import Entry
from numpyro_fed.run import survey as surveys
from numpyro_fed.run.runner import Runner


class Prepared(NamedTuple):
    """All that a method compiles from, and the silos' data as engines take them."""

    split: SplitModel
    survey: Survey
    stack: Stack
    sent: tuple[Entry, ...]  # by the survey


def prepare(
    model: Model,
    silos: Any,
    local: Any = None,
    shared: Any = None,
    engine: Engine | None = None,
    batch_size: Callable[[SplitModel], int | None] = lambda split: None,
    meanwhile: Callable[[Runner], object] = lambda runner: None,
) -> Prepared:
    """The model divided over these silos (from memory, if it has met such shapes before), and what they answered.

    Of a store an example is looked at: a few silos stand for all. ``meanwhile`` is what the method can do before it
    knows their answers, with a runner over them.
    """
    some = silos.example() if silos.lazy else silos
    make = lambda: uncertified(model, some, local, shared)
    divided = remembered(make, "split", model, local, shared, signature(some))
    elsewhere = getattr(engine, "certified", None)  # where the data are
    engine = Vmap() if engine is None or engine.reads_store else engine  # of a store, its example is in memory
    stack = stack_of(silos, some, divided.spec, divided.partition.axes)

    def ahead() -> None:
        with suppress(Exception), undisturbed():  # what is wrong is said when it is done in its turn
            surveys.begun(divided, stack, engine, batch_size(divided))

    split, failed = certified(divided, some, ahead) if elsewhere is None else elsewhere(divided, some)
    if silos.lazy and split.groups:
        raise PartitionError(
            f"the model has local latents ({', '.join(split.partition.local_sites)}), and silos of a store keep "
            "nothing of theirs between rounds: hold the data in memory, nf.Silos"
        )
    if split is not divided:
        stack = stack_of(silos, some, split.spec, split.partition.axes)
    answers, sent = surveys.take(split, stack, engine, batch_size(split), meanwhile)
    asked = stack.example.names
    for told, message in ((answers.supported, outside), (answers.in_range, beyond)):
        for what, fine in told.items():
            if not np.all(fine):
                silo = asked[int(np.argmin(fine))]
                with at_silo(silo):
                    raise PartitionError(message(split, some, silo, what))
    if failed is not None:
        raise failed
    return Prepared(split, surveys.combined(split, answers, stack), stack, sent)


def refuse_small(prepared: Prepared, least: int) -> None:
    """Raises where a silo has fewer rows, or fewer observations."""
    if not prepared.stack.known:
        raise ValueError("min_rows= is for silos in memory, nf.Silos: of a store not all silos are looked at")
    longest = lambda name: max((axis.lengths[name] for axis in prepared.split.partition.axes), default=1)
    sizes = {
        name: min(number, longest(name))
        for name, number in zip(prepared.stack.names, prepared.survey.sizes, strict=True)
    }
    small = [name for name, size in sizes.items() if size < least]
    if small:
        told = ", ".join(f"{name!r} has {sizes[name]}" for name in small[:5]) + ", ..." * (len(small) > 5)
        raise ValueError(
            f"min_rows={least}, and silo {told}: of few rows, messages tell the rows. Leave the silo "
            "out, silos.only(*names), join it with another, or lower min_rows"
        )


def signature(silos: Silos) -> Any:
    """Shapes, types and ints of every silo's arguments, the digest of shared ones, and the precision."""
    own = tuple(
        (
            name,
            tuple(
                (path, leaf) if isinstance(leaf, int) else (path, tuple(leaf.shape), str(leaf.dtype))
                for path, leaf in leaves(silos.own(name))
            ),
        )
        for name in silos.names
    )
    return own, shared_digest(silos.shared), silos.own_counts, silos.renumbered, str(real_dtype())
