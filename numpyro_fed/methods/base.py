"""What every method shares: ``run``.

A method is a frozen dataclass of settings. ``run`` checks its arguments, splits the model, finds a start, lets an
engine do the rounds in chunks (so that progress, interruption and the watch for non-finite losses live on the host),
and returns a :class:`~numpyro_fed.fit.Fit`.
"""

import time
import warnings
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from numpyro_fed import schedules, start
from numpyro_fed.algorithm import FederatedAlgorithm, Held, held, stale
from numpyro_fed.engines.base import Source, Stack, sent_to, traffic
from numpyro_fed.engines.loopback import Loopback
from numpyro_fed.engines.streamed import Streamed
from numpyro_fed.engines.vmap import CHUNK, Vmap
from numpyro_fed.fit import CORRECTED, Fit, State
from numpyro_fed.keys import SERVER, START, check_key, digest, fold_in_name, identity
from numpyro_fed.padding import SiloData, shared_arrays, stack
from numpyro_fed.schedules import as_schedule
from numpyro_fed.silos import Silos, leaves
from numpyro_fed.split_model import SplitModel, check_support, split_model
from numpyro_fed.store import Names, SiloStore
from numpyro_fed.tracing import Model, PartitionError

COHORTS = digest("\0cohorts")
CLOSING = digest("\0posterior")  # a run that goes on draws other numbers in the round of the same index
START_CHUNK = 5  # rounds of mode finding between two looks at whether it has converged
KEPT = 32  # compiled methods kept
MOST_AT_ONCE = 1000  # silos of a store that may take part in one round without the user's saying so


class NonFiniteError(FloatingPointError):
    """The loss stopped being a number. ``fit`` is the last good state."""

    fit: Any = None


class VerdictWarning(UserWarning):
    """The fit itself doubts its posterior; the message says why and what to type."""


class Prepared(NamedTuple):
    """A method made ready for silos of certain shapes; holds no data but the shared arguments."""

    split: SplitModel
    algorithm: FederatedAlgorithm
    mode: FederatedAlgorithm | None  # finds a start
    notes: dict[str, Any]


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
        return start.found(split, server, silos) if np.isfinite(float(server.value)) else None

    def adopt(self, split: SplitModel, server: Any, silos: tuple, found: Any) -> tuple[Any, tuple]:
        """States that start from what mode finding or another fit found."""
        raise NotImplementedError

    def point(self, split: SplitModel, server: Any, silo: Any, data: SiloData) -> tuple[Any, dict, dict]:
        """A typical z_G, z_L and theta at these states, where a non-finite loss is looked into."""
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

    def reordered(self, server: Any, order: list[int]) -> Any:
        """A server state whose silos come in another order (or are fewer)."""
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
        runner = _Runner(self, prepared, stacked, engine, key, silos, began, progress_bar)
        runner.share = 1.0 if cohort is None else cohort.shape[1] / silos.num_silos
        if init_state is None:
            server, states = runner.begin(num_rounds)
            first = 0
        else:
            server, states, first = runner.resume(init_state, num_rounds)
        server = self.with_schedule(prepared, server, schedule, names)
        return runner.rounds(server, states, first, num_rounds, schedule)


def _check_shapes(got: Any, expected: Any, problem: str) -> None:
    """Both have the same structure and shapes, or an error that shows the first difference."""
    if jax.tree.structure(got) != jax.tree.structure(expected):  # type: ignore[operator]
        raise ValueError(f"{problem} (guide and optimiser must be the same to go on)")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if a.shape != b.shape:
            raise ValueError(f"{problem} (an array of shape {a.shape} where {b.shape} is needed)")


def _finite(tree: Any) -> bool:
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return all(bool(np.all(np.isfinite(leaf))) for leaf in floats)


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


class _Runner:
    """One run: its engine, progress bar and history."""

    def __init__(
        self,
        method: Method,
        prepared: Prepared,
        stacked: Stack,
        engine: Any,
        key: Any,
        silos: Silos | SiloStore,
        began: float,
        bar: bool,
    ) -> None:
        self.method, self.prepared, self.stack, self.engine, self.key = method, prepared, stacked, engine, key
        self.silos, self.began, self.bar = silos, began, bar
        self.history: list[dict[str, np.ndarray]] = []
        self.share = 1.0  # of the rounds in which a silo takes part

    def begin(self, num_rounds: int) -> tuple[Any, tuple]:
        found = self._find_mode()
        server, states = self.engine.start(self.prepared.algorithm, self.key, self.stack)
        if found is not None:
            server, states = self.method.adopt(self.prepared.split, server, states, found)
        return self.method.with_rounds(server, states, num_rounds, self.share)

    def _find_mode(self) -> Any:
        algorithm = self.prepared.mode
        if algorithm is None or self.stack.source is not None:  # a start is looked for among all silos
            return None
        key = jax.random.fold_in(self.key, digest("\0mode"))
        server, states = self.engine.start(algorithm, key, self.stack)
        limit = getattr(self.method, "start_rounds", start.MAX_ROUNDS)
        done, sent = 0, self._traffic(algorithm, server, states)
        with tqdm(total=limit, desc="finding a start", disable=not self.bar, leave=False) as bar:
            while done < limit:
                count = min(START_CHUNK, limit - done)
                server, states, info = self.engine.rounds(
                    algorithm, key, self.stack, server, states, done, None, count, effort="least"
                )
                done += count
                gain = info.pop("gain")
                self._record(info, count, len(self.stack.names), sent, started=True)
                bar.update(count)
                if float(gain[-1]) < start.CONVERGED:
                    break
        found = self.method.started(self.prepared.split, server, states)
        if found is None:
            self._raise_non_finite(algorithm, key, server, states, done, None)
        return found

    def _traffic(self, algorithm: FederatedAlgorithm, server: Any, states: tuple) -> Any:
        name = self.stack.buckets[0].names[0]
        data = self.stack.data(name)
        if self.stack.source is not None:
            silo = jax.eval_shape(lambda: self._fresh(algorithm, self.key, server, name))
        else:
            silo = jax.tree.map(lambda leaf: leaf[0], states[0])
        return traffic(algorithm, server, silo, data)

    def _fresh(self, algorithm: FederatedAlgorithm, key: Any, server: Any, name: str) -> Any:
        """The state with which a silo of a store begins each of its rounds."""
        sent = sent_to(algorithm.broadcast(key, server), self.stack.names.index(name))
        start_key = fold_in_name(jax.random.fold_in(self.key, START), identity(name))
        return algorithm.init_silo(start_key, sent, self.stack.data(name))

    def _record(self, info: dict, count: int, cohort: int, sent: Any, started: bool = False) -> None:
        rows = dict(info)
        rows.setdefault("bytes_up", np.full(count, cohort * sent.up))
        rows.setdefault("bytes_down", np.full(count, cohort * sent.down))
        rows["start"] = np.full(count, started)
        self.history.append(rows)

    def resume(self, init_state: Any, num_rounds: int) -> tuple[Any, tuple, int]:
        given = init_state.state if isinstance(init_state, Fit) else init_state
        if not isinstance(given, State):
            raise TypeError(f"init_state must be a fit.state or a Fit, got a {type(init_state).__name__}")
        lazy = [isinstance(names, Names) for names in (given.names, self.stack.names)]
        if any(lazy):
            if given.names != self.stack.names:
                kinds = ["an nf.SiloStore" if one else "an nf.Silos" for one in lazy]
                raise ValueError(
                    f"init_state has other silos: {len(given.names)} of {kinds[0]}, where {kinds[1]} has "
                    f"{len(self.stack.names)}, or others' names"
                )
        elif set(given.names) != set(self.stack.names):
            gone = sorted(set(given.names) - set(self.stack.names))
            new = sorted(set(self.stack.names) - set(given.names))
            told = [f"missing now: {', '.join(gone)}"] * bool(gone) + [f"not in the state: {', '.join(new)}"] * bool(
                new
            )
            raise ValueError(f"init_state has other silos: {'; '.join(told)}")
        split, states = self.prepared.split, () if self.stack.source is not None else given.arranged(self.stack)
        if isinstance(init_state, Fit):  # a start, whatever the method and its settings
            found = init_state.method.found(init_state.split, given.server, states)
            fresh, silos = self.engine.start(self.prepared.algorithm, self.key, self.stack)
            self._check_start(found, split)
            server, states = self.method.adopt(split, fresh, silos, found)
            return (*self.method.with_rounds(server, states, num_rounds, self.share), 0)
        if given.method != type(self.method).__name__:
            raise ValueError(
                f"init_state is of {given.method}, this is {type(self.method).__name__}: pass the Fit itself to start "
                "from it" + (", or go on from fit.uncorrected.state" if given.method.endswith(CORRECTED) else "")
            )
        order = list(range(len(given.names)))
        if given.names != self.stack.names:
            order = [given.names.index(name) for name in self.stack.names]
        given = given._replace(server=self.method.reordered(given.server, order))
        shapes = jax.eval_shape(lambda: self.engine.start(self.prepared.algorithm, self.key, self.stack))
        hint = "init_state was made with other settings or data; pass the Fit itself to start from it"
        _check_shapes((given.server, states), shapes, hint)
        return (*self.method.with_rounds(given.server, states, num_rounds, self.share), given.round)

    def _check_start(self, found: start.Found, split: SplitModel) -> None:
        """A fit of another model or of other data is no start for this one."""
        problem = "init_state is of another model or data"
        _check_shapes(found.loc, jax.ShapeDtypeStruct((split.dim,), jnp.zeros(()).dtype), problem)
        zeros = lambda bucket: jax.eval_shape(partial(split.zeros_locals, num=len(bucket.names)), bucket.mask)
        shapes = tuple(zeros(bucket) for bucket in self.stack.buckets)
        for local, expected in zip(found.local, shapes, strict=False):
            _check_shapes(local.loc, expected, problem)

    def rounds(self, server: Any, states: tuple, first: int, num_rounds: int, schedule: Any) -> Fit:
        algorithm, names = self.prepared.algorithm, self.stack.names
        sweep = schedules.sweep(schedule, names)
        if schedules.stale(schedule):
            key = jax.random.fold_in(jax.random.fold_in(self.key, first), SERVER)
            server, algorithm = held(algorithm, server, key, len(names)), stale(algorithm, len(names))
        sent = self._traffic(algorithm, server, states)
        cohort_key = jax.random.fold_in(self.key, COHORTS)
        size = max(1, (16 if isinstance(self.engine, Loopback) else CHUNK) // self.method.steps_per_round)
        if isinstance(self.engine, Streamed):
            size = self.engine.chunk
        if self.method.stops:
            size = min(size, sweep)
        done = 0
        with tqdm(total=num_rounds, desc=type(self.method).__name__, disable=not self.bar, unit="round") as bar:
            try:
                while done < num_rounds:
                    count = min(size, num_rounds - done)
                    cohorts = schedule.cohorts(cohort_key, names, first + done, count)
                    good, effort = (server, states), self.method.effort
                    server, states, info = self.engine.rounds(
                        algorithm, self.key, self.stack, server, states, first + done, cohorts, count, effort
                    )
                    bad = np.flatnonzero(~np.isfinite(info["loss"]))
                    if not bad.size and not _finite(server):  # a loss can be that of the round's beginning
                        bad = np.array([count])
                    if bad.size:
                        self._stop_at_last_good(algorithm, good, first + done, cohorts, int(bad[0]), sent)
                    self._record(info, count, len(names) if cohorts is None else cohorts.shape[1], sent)
                    done += count
                    bar.update(count)
                    bar.set_postfix(loss=f"{float(np.mean(info['loss'][-100:])):.4g}")
                    if self.method.stops and done < num_rounds and self.method.settled(info):
                        if self.bar:
                            bar.write(f"nothing moves any more after {done} rounds")
                        break
                server = self._close(
                    server.server if isinstance(server, Held) else server, states, first + done, schedule
                )
            except KeyboardInterrupt:
                bar.write(
                    f"stopped after {done} of {num_rounds} rounds; this is the fit so far{self.method.unfinished}"
                )
        return self._fit(server, states, first + done)

    def _close(self, server: Any, states: tuple, at: int, schedule: Any) -> Any:
        """The server after the closing round, if the method has one; what it sends is counted with the last round."""
        names = self.stack.names
        algorithm = self.method.closing(self.prepared, server, names)
        if algorithm is None:
            return server
        cohorts, cohort_key = None, jax.random.fold_in(self.key, COHORTS)
        if isinstance(schedule, schedules.Sampled) or self.stack.source is not None:
            cohorts = schedule.cohorts(cohort_key, names, at, 1)
        usual = len(names) if cohorts is None else cohorts.shape[1]
        asked = self.method.asked(self.prepared, len(names), usual)
        if asked != usual:
            cohorts = schedules.sampled(asked).cohorts(cohort_key, names, at, 1)
        key = jax.random.fold_in(self.key, CLOSING)
        begin = self.method.opening(self.prepared, server, asked)
        sent = self._traffic(algorithm, begin, states)
        after, _, info = self.engine.rounds(algorithm, key, self.stack, begin, states, at, cohorts, 1, effort="least")
        for name, size in (("bytes_up", sent.up), ("bytes_down", sent.down)):
            last = np.array(self.history[-1][name])
            last[-1] += asked * size
            self.history[-1][name] = last
        if not _finite(after):
            warnings.warn(
                "what some silo sent in the closing round was not finite, so it was left out: the fit is that of the "
                f"round before{self.method.unfinished}",
                stacklevel=4,
            )
            return server
        server = self.method.closed(self.prepared, server, after, asked)
        self.method.conclude(self.prepared, info)
        return server

    def _stop_at_last_good(
        self, algorithm: FederatedAlgorithm, good: tuple, first: int, cohorts: Any, bad: int, sent: Any
    ) -> None:
        """Run the chunk again up to the round whose message was not finite; a gradient can be so before the loss is."""
        for count in range(bad, -1, -1):
            server, states, info = self.engine.rounds(
                algorithm, self.key, self.stack, *good, first, cohorts, count, self.method.effort
            )
            if _finite((server, states)):
                break
        if count:
            self._record(info, count, len(self.stack.names) if cohorts is None else cohorts.shape[1], sent)
        members = None if cohorts is None or count >= len(cohorts) else cohorts[count]
        self._raise_non_finite(algorithm, self.key, server, states, first + count, members)

    def _fit(self, server: Any, states: tuple, last: int) -> Fit:
        server = server.server if isinstance(server, Held) else server
        history = {name: self._column(name) for name in dict.fromkeys(n for rows in self.history[::-1] for n in rows)}
        state = State(
            type(self.method).__name__,
            self.stack.names,
            () if self.stack.source is not None else tuple(b.names for b in self.stack.buckets),
            server,
            states,
            last,
        )
        seconds = time.perf_counter() - self.began
        buckets = () if self.stack.source is not None else self.stack.buckets
        padded = tuple({axis: mask.shape[-1] for axis, mask in bucket.mask.items()} for bucket in buckets)
        return Fit(self.method, self.prepared.split, state, history, seconds, padded, self.silos)

    def _column(self, name: str) -> np.ndarray:
        """One quantity over all rounds; NaN in rounds (of the start) that do not have it."""
        like = next(rows[name] for rows in self.history if name in rows)

        def column(rows: dict[str, np.ndarray]) -> np.ndarray:
            return rows[name] if name in rows else np.full((len(rows["loss"]), *like.shape[1:]), np.nan)

        return np.concatenate([column(rows) for rows in self.history])

    def _raise_non_finite(
        self, algorithm: FederatedAlgorithm, key: Any, server: Any, states: tuple, at: int, cohort: Any
    ) -> None:
        """Name the silos whose message is not finite, and the sites in them; hand over the last good fit."""
        round_key = jax.random.fold_in(key, at)
        sent = algorithm.broadcast(jax.random.fold_in(round_key, SERVER), server)
        names = self.stack.names if cohort is None else [self.stack.names[j] for j in np.asarray(cohort).tolist()]
        culprits = []
        for name in names:
            if self.stack.source is not None:
                state = self._fresh(algorithm, jax.random.fold_in(round_key, SERVER), server, name)
            else:
                b, position = self.stack.place(name)
                state = jax.tree.map(lambda leaf, position=position: leaf[position], states[b])
            silo_key = fold_in_name(round_key, identity(name))
            message, _ = algorithm.silo_step(
                silo_key, sent_to(sent, self.stack.names.index(name)), state, self.stack.data(name)
            )
            if not all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(message)):
                sites = self._bad_sites(algorithm, name, server, state)
                culprits.append(f"{name!r} ({', '.join(sites) or 'its gradient'})")
        where = f"silo {', '.join(culprits)}" if culprits else "the server's prior term"
        error = NonFiniteError(
            f"the loss is not finite at round {at}, from {where}. Standardise the data, check the distributions' "
            f"parameters, or {self.method.remedy}. The error's .fit is the last good state."
        )
        if algorithm is not self.prepared.mode:
            error.fit = self._fit(server, states, at)
        raise error

    def _bad_sites(self, algorithm: FederatedAlgorithm, name: str, server: Any, state: Any) -> Iterable[str]:
        split, data = self.prepared.split, self.stack.data(name)
        if algorithm is not self.prepared.mode:
            server = server.server if isinstance(server, Held) else server
            z, z_local, theta = self.method.point(split, server, state, data)
        else:
            z, z_local, theta = jnp.zeros(split.dim), split.zeros_local(data.mask), split.theta
        for site, term in split.evaluate(z, z_local, theta, data).terms.items():
            if not bool(np.all(np.isfinite(term))):
                yield f"site {site!r}"
