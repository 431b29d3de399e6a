"""What every method shares: ``run``.

A method is a frozen dataclass of settings. ``run`` checks its arguments, splits the model, finds a start, lets an
engine do the rounds in chunks (so that progress, interruption and the watch for non-finite losses live on the host),
and returns a :class:`~numpyro_fed.results.fit.Fit`.
"""

import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed import schedules
from numpyro_fed.algorithm import FederatedAlgorithm, Posterior
from numpyro_fed.checks import check_key
from numpyro_fed.data.inputs import leaves
from numpyro_fed.data.padding import shared_arrays
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.stack import Source, Stack, stack
from numpyro_fed.data.store import SiloStore
from numpyro_fed.engines.streamed import Streamed
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.model.build import split_model
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.support import check_support
from numpyro_fed.model.trace import Model, PartitionError
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.state import Again, Fresh, State
from numpyro_fed.run import warm_start
from numpyro_fed.run.correct import correct
from numpyro_fed.run.prepare import Prepared
from numpyro_fed.run.runner import Runner
from numpyro_fed.schedules import as_schedule

KEPT = 32  # compiled methods kept
MOST_AT_ONCE = 1000  # silos of a store that may take part in one round without the user's saying so


_prepared: "OrderedDict[Any, Prepared]" = OrderedDict()


@dataclass(frozen=True)
class Method:
    """The settings every method has; see its subclasses."""

    model: Model

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise TypeError(f"model must be a NumPyro model (a function), got a {type(self.model).__name__}")
        for name in ("local", "shared"):
            value = getattr(self, name, None)
            if value is not None:  # hashable, so that a method can be a key
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))

    # --- what a method says of itself -------------------------------------------------------------------------------

    @property
    def program(self) -> "Method":
        """The method without the settings that are not part of its compiled program."""
        return self

    def prepare(self, split: SplitModel, stack: Stack) -> Prepared:
        """The method's algorithm for this model, and how to find a start."""
        raise NotImplementedError

    def suits(self, prepared: Prepared, stack: Stack) -> bool:
        """Whether what was prepared for silos of the same shapes is right for these data too."""
        return True

    def default_rounds(self, prepared: Prepared, sweep: int = 1) -> int:
        """How many rounds when the user does not say; in ``sweep`` rounds every silo takes part once."""
        raise NotImplementedError

    def started(self, split: SplitModel, server: Any, silos: tuple) -> Any:
        """What mode finding found at the end; None if it never met a finite density."""
        return warm_start.found(split, server, silos) if np.isfinite(float(server.value)) else None

    def adopt(self, split: SplitModel, server: Any, silos: tuple, found: Any) -> tuple[Any, tuple]:
        """States that start from what mode finding or another fit found."""
        raise NotImplementedError

    @property
    def steps_per_round(self) -> int:
        """How much work a round is: so many steps of an optimiser."""
        return 1

    def with_rounds(self, server: Any, silos: tuple, num_rounds: int, share: float = 1.0) -> tuple[Any, tuple]:
        """States whose step sizes suit a run of ``num_rounds``, of which a silo takes part in a ``share``."""
        return server, silos

    stateless = False  # whether its silos keep nothing between rounds, so that they may come from a store
    accepts_stale = False  # whether a message made from an old broadcast is still of use

    def with_schedule(self, prepared: Prepared, server: Any, schedule: Any, names: tuple[str, ...]) -> Any:
        """A server state whose steps suit the schedule."""
        return server

    effort = "most"  # of the compiler: "some" where a run has few rounds
    stops = False  # whether `settled` may end a run before its last round

    def settled(self, history: dict[str, np.ndarray]) -> bool:
        """Whether nothing moves any more, from the last rounds."""
        return False

    def closing(self, prepared: Prepared, server: Any, names: tuple[str, ...]) -> FederatedAlgorithm | None:
        """One more round at the end: asks whether the answer can be trusted, or for what `closed` keeps of it.

        Everyone is asked; the next cohort where cohorts are drawn at random.
        """
        return None

    def asked(self, prepared: Prepared, num_silos: int, cohort: int) -> int:
        """How many silos take part in the closing round, where ``cohort`` would."""
        return cohort

    unfinished = ""  # what a fit lacks without the closing round
    remedy = "pass a smaller step: optim=optax.adam(1e-3)"  # against a loss that is not finite

    def opening(self, prepared: Prepared, server: Any, num_asked: int) -> Any:
        """The server state that the closing round begins with."""
        return server

    def closed(self, prepared: Prepared, server: Any, closing_server: Any, num_asked: int) -> Any:
        """The server state at the end of the run, from those before and after the closing round."""
        return server

    def conclude(self, prepared: Prepared, info: dict[str, np.ndarray]) -> None:
        """Says what the closing round found."""

    def doubts(self, server: Any, names: tuple[str, ...]) -> tuple[str, ...]:
        """Why the posterior at the end of a run is to be doubted."""
        return ()

    def posterior_of(self, split: SplitModel, survey: Any = None) -> Posterior:
        """How draws are made from the method's states; ``survey`` is how the silos' rows lie, if that is known."""
        raise NotImplementedError

    def again(self, engine: Any = None) -> Again:
        """How a fit of this method runs again, on the engine it was made on."""
        engine = Vmap() if engine is None else engine
        return Again(partial(_fresh, self, engine), partial(_run, self, engine), partial(correct, engine=engine))

    # --- run --------------------------------------------------------------------------------------------------------

    def ready(self, silos: Silos | SiloStore) -> tuple[Prepared, Stack]:
        """The method prepared for these silos (from memory, if it has met such shapes before), and their data.

        For a store it is prepared on an example: ``stack.names`` are those of all silos, without a loop over them,
        ``stack.example`` and the lengths of the partition's axes are those of a few.
        """
        store = silos if isinstance(silos, SiloStore) else None
        silos = silos.example() if isinstance(silos, SiloStore) else silos
        key = (self.program, _signature(silos), store and store.names)
        if key in _prepared:
            _prepared.move_to_end(key)
            prepared = _prepared[key]
            check_support(prepared.split, silos)
            stacked = _stack(prepared.split, silos, store)
            if self.suits(prepared, stacked):
                return prepared, stacked
        split = split_model(self.model, silos, getattr(self, "local", None), getattr(self, "shared", None))
        if store is not None and split.groups:
            raise PartitionError(
                f"the model has local latents ({', '.join(split.partition.local_sites)}), and silos of a store keep "
                "nothing of theirs between rounds: hold the data in memory, nf.Silos"
            )
        stacked = _stack(split, silos, store)
        prepared = self.prepare(split, stacked)
        _prepared[key] = prepared
        while len(_prepared) > KEPT:
            _prepared.popitem(last=False)
        return prepared, stacked

    def run(
        self,
        rng_key: Any,
        silos: Silos | SiloStore,
        num_rounds: int | None = None,
        *,
        schedule: Any = None,
        engine: Any = None,
        init_state: Any = None,
        progress_bar: bool = True,
    ) -> Fit:
        """Fit the model to the silos.

        Args:
            rng_key: ``jax.random.key(0)``.
            silos: the data, an :class:`~numpyro_fed.Silos`; for FedPA, FedAvg and SEP also a
                :class:`~numpyro_fed.SiloStore`, of which each round's cohort is read.
            num_rounds: rounds after the start; by default the method's own number. For methods that notice when
                nothing moves any more, the largest number.
            schedule: who takes part in a round: None (all), ``"sequential"``, ``"asynchronous"`` (EP and PVI),
                ``nf.schedules.sampled(cohort_size)``.
            engine: where it runs; by default ``nf.engines.Vmap()``, for a store ``nf.engines.Streamed()``.
            init_state: a ``fit.state`` of the same method (its round counter goes on), or a Fit.
            progress_bar: show rounds, loss and rate.

        Returns:
            The fit. Stopped by KeyboardInterrupt, the fit so far.
        """
        key = check_key(rng_key)
        if not isinstance(silos, Silos | SiloStore):
            raise TypeError(
                f"silos must be an nf.Silos, got a {type(silos).__name__}: wrap it as nf.Silos({{name: arguments}})"
            )
        counted = isinstance(num_rounds, int | np.integer) and not isinstance(num_rounds, bool) and num_rounds >= 1
        if num_rounds is not None and not counted:
            raise ValueError(f"num_rounds must be an int of at least 1, got {num_rounds!r}")
        schedule = as_schedule(schedule)
        names: Any = silos.names
        cohort = schedule.cohorts(jax.random.key(0), names, 0, 1)  # one that does not fit the silos says so now
        if schedules.stale(schedule) and not self.accepts_stale:
            raise ValueError(
                f"nf.{type(self).__name__} needs replies to its newest broadcast, so it has no asynchronous schedule: "
                "use nf.PVI or nf.EP, or schedule=nf.schedules.sampled(cohort_size)"
            )
        engine = (Streamed() if isinstance(silos, SiloStore) else Vmap()) if engine is None else engine
        _check_store(self, silos, schedule, engine)
        began = time.perf_counter()
        prepared, stacked = self.ready(silos)
        sweep = schedules.sweep(schedule, names)
        num_rounds = self.default_rounds(prepared, sweep) if num_rounds is None else int(num_rounds)
        runner = Runner(self, prepared, stacked, engine, key, silos, began, progress_bar)
        runner.share = 1.0 if cohort is None else cohort.shape[1] / silos.num_silos
        if init_state is None:
            server, states = runner.begin(num_rounds)
            first = 0
        else:
            server, states, first = runner.resume(init_state, num_rounds)
        server = self.with_schedule(prepared, server, schedule, names)
        return runner.rounds(server, states, first, num_rounds, schedule)


def _fresh(method: Method, engine: Any, rng_key: Any, silos: Silos) -> Fresh:
    """States of a run on these silos, before its first round."""
    prepared, stacked = method.ready(silos)
    server, states = engine.start(prepared.algorithm, rng_key, stacked)
    buckets = tuple(bucket.names for bucket in stacked.buckets)
    state = State(type(method).__name__, stacked.names, buckets, server, states, 0)
    padded = tuple({axis: rows.shape[-1] for axis, rows in bucket.mask.items()} for bucket in stacked.buckets)
    return Fresh(prepared.split, state, padded)


def _run(method: Method, engine: Any, rng_key: Any, silos: Silos, num_rounds: int, **options: Any) -> Fit:
    return method.run(rng_key, silos, num_rounds, engine=engine, progress_bar=False, **options)


def _check_store(method: Method, silos: Silos | SiloStore, schedule: Any, engine: Any) -> None:
    """A store goes with a method without silo states, a schedule of cohorts, and an engine that reads."""
    if not isinstance(silos, SiloStore):
        if isinstance(engine, Streamed):
            raise TypeError("nf.engines.Streamed reads from an nf.SiloStore, got nf.Silos: leave engine= out")
        return
    if not method.stateless:
        raise TypeError(
            f"silos of nf.{type(method).__name__} keep a state between rounds, so it needs an nf.Silos, got an "
            "nf.SiloStore: use nf.FedPA, nf.FedAvg or nf.SEP, or hold the data in memory, nf.Silos({name: arguments})"
        )
    if not isinstance(engine, Streamed):
        raise TypeError(
            f"nf.engines.{type(engine).__name__} needs all data in memory, got an nf.SiloStore: leave engine= out, or "
            "pass engine=nf.engines.Streamed()"
        )
    everyone = isinstance(schedule, schedules.Synchronous) and silos.num_silos > MOST_AT_ONCE
    if everyone or schedules.stale(schedule):
        raise ValueError(
            f"with {silos.num_silos} silos in a store, "
            + ("all of them would be read each round" if everyone else "the server cannot hold what each received last")
            + ": pass schedule=nf.schedules.sampled(100)"
        )


def _stack(split: SplitModel, silos: Silos, store: SiloStore | None) -> Stack:
    axes = split.partition.axes
    found = Stack(silos.names, tuple(stack(silos, split.spec, axes)), shared_arrays(silos))
    if store is None:
        return found
    names: Any = store.names  # as a tuple, but for loops over it
    return found._replace(names=names, source=Source(store, split.spec, axes))


def _signature(silos: Silos) -> Any:
    own = tuple(
        (
            name,
            tuple(
                (p, leaf) if isinstance(leaf, int) else (p, leaf.shape, str(leaf.dtype))
                for p, leaf in leaves(silos.own(name))
            ),
        )
        for name in silos.names
    )
    shared = tuple(
        (p, leaf) if isinstance(leaf, int) else (p, leaf.shape, str(leaf.dtype), leaf.tobytes())
        for p, leaf in leaves(silos.shared)
    )
    return own, shared, silos.own_counts, str(jnp.zeros(()).dtype)
