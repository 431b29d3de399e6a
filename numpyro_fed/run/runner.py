"""One run: a start, rounds in chunks, a closing round, and the watch for losses that are not finite."""

import time
import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from numpyro_fed import schedules
from numpyro_fed.algorithm import FederatedAlgorithm
from numpyro_fed.data.names import Names
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.stack import Stack
from numpyro_fed.data.store import SiloStore
from numpyro_fed.engines.base import sent_to, traffic
from numpyro_fed.engines.loopback import Loopback
from numpyro_fed.engines.stale import Held, held, stale
from numpyro_fed.engines.streamed import Streamed
from numpyro_fed.engines.vmap import CHUNK
from numpyro_fed.keys import SERVER, START, digest, fold_in_name, identity
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.results.correction import Corrected
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.state import State
from numpyro_fed.run import mode, warm_start
from numpyro_fed.run.diagnose import NonFiniteError
from numpyro_fed.run.prepare import Prepared

COHORTS = digest("\0cohorts")
CLOSING = digest("\0posterior")  # a run that goes on draws other numbers in the round of the same index
START_CHUNK = 5  # rounds of mode finding between two looks at whether it has converged


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


def _started(fit: Fit, states: tuple) -> warm_start.Found:
    """A fit of any method as the start of another run: the server's half, and what each silo knows of its locals."""
    posterior: Any = fit.posterior
    warm = posterior.to_warm_start(fit.state.server)
    local: tuple = ()
    if hasattr(posterior, "local_start"):
        each = tuple(jax.vmap(partial(posterior.local_start, warm._replace(source=None)))(state) for state in states)
        local = tuple(one for one in each if one is not None)
    source = None
    if warm.source is not None:
        source = warm_start.Source(*warm.source, warm.context, tuple(one.own for one in local))
    known = tuple(mode.SiloState(one.loc, one.scale, one.coupling) for one in local if one.loc)
    return warm_start.Found(warm.loc, warm.chol, warm.sd, warm.theta, warm.theta_sd, known, source)


class Runner:
    """One run: its engine, progress bar and history."""

    def __init__(
        self,
        method: Any,
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
        limit = getattr(self.method, "start_rounds", mode.MAX_ROUNDS)
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
                if float(gain[-1]) < mode.CONVERGED:
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
            found = _started(init_state, states)
            fresh, silos = self.engine.start(self.prepared.algorithm, self.key, self.stack)
            self._check_start(found, split)
            server, states = self.method.adopt(split, fresh, silos, found)
            return (*self.method.with_rounds(server, states, num_rounds, self.share), 0)
        if isinstance(given.server, Corrected):
            raise ValueError(
                f"init_state is of a corrected fit of {given.method}: pass the Fit itself to start from it, or go on "
                "from fit.uncorrected.state"
            )
        if given.method != type(self.method).__name__:
            raise ValueError(
                f"init_state is of {given.method}, this is {type(self.method).__name__}: pass the Fit itself to start "
                "from it"
            )
        order = list(range(len(given.names)))
        if given.names != self.stack.names:
            order = [given.names.index(name) for name in self.stack.names]
        posterior = self.method.posterior_of(split)
        if hasattr(posterior, "reordered"):
            given = given._replace(server=posterior.reordered(given.server, order))
        shapes = jax.eval_shape(lambda: self.engine.start(self.prepared.algorithm, self.key, self.stack))
        hint = "init_state was made with other settings or data; pass the Fit itself to start from it"
        _check_shapes((given.server, states), shapes, hint)
        return (*self.method.with_rounds(given.server, states, num_rounds, self.share), given.round)

    def _check_start(self, found: warm_start.Found, split: SplitModel) -> None:
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
        notes, method = self.prepared.notes, self.method
        survey = notes.get("weighting", notes.get("marginal"))  # how rows lie
        return Fit(
            method.posterior_of(self.prepared.split, survey),
            self.prepared.split,
            state,
            history,
            seconds,
            padded,
            self.silos,
            survey=survey,
            reasons=method.doubts(server, self.stack.names),
            again=method.again(self.engine),
        )

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
        z, z_local, theta = jnp.full(split.dim, 0.01), split.near_zero_local(data.mask), split.theta
        if algorithm is not self.prepared.mode:
            server = server.server if isinstance(server, Held) else server
            if server == () and hasattr(state, "server"):  # a silo that is its own server
                server, state = state.server, state.silo
            posterior, key = self.method.posterior_of(split), jax.random.key(0)
            drawn = posterior.sample(key, server)
            if bool(jnp.all(jnp.isfinite(drawn))):
                z, theta = drawn, posterior.theta(server) or theta
                z_local = posterior.sample_local(key, z, server, state, data)
        for site, term in split.evaluate(z, z_local, theta, data).terms.items():
            if not bool(np.all(np.isfinite(term))):
                yield f"site {site!r}"
