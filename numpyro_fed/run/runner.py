"""The one loop: phases, one after another, over any engine.

Progress, interruption, the watch for non-finite values, stale broadcasts, byte counts and history stand here and
nowhere else. A phase says what to run (:class:`numpyro_fed.algorithm.Phase`), an engine where.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm.auto import tqdm

from numpyro_fed import schedules
from numpyro_fed.algorithm import Left, Phase, PyTree
from numpyro_fed.checks import check_cohorts, warn_user
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines import ahead, wire
from numpyro_fed.engines.base import Engine, Traffic, traffic
from numpyro_fed.engines.stale import current, held, stale
from numpyro_fed.host import folded
from numpyro_fed.keys import SERVER, digest
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import LITTLE
from numpyro_fed.run.diagnose import NonFinite, all_finite, last_good

COHORTS = digest("\0cohorts")
SHORTER = 3  # times that steps are shortened before a loss that is not finite is given up
SHORTENED = (
    "the loss stopped being finite on the way, and the rounds went on with shorter steps: check the distributions' "
    "parameters, and standardise the data"
)
UNSURE = (
    "the search for a start did not converge, so rounds began at a poor one: standardise the data, pass tighter "
    "priors, or start from another fit, run(..., init_state=nf.EP(model).run(key, silos))"
)


class Record(NamedTuple):
    """What one phase cost."""

    phase: str
    rounds: int
    bytes_up: int
    bytes_down: int


class Ended(NamedTuple):
    """Where a phase's rounds ended."""

    server: PyTree
    states: tuple
    info: dict[str, np.ndarray]  # one row a round
    done: int
    interrupted: bool
    shortened: int  # so many times steps were made shorter


class Runner:
    """One run: its engine, progress bar and history.

    Attributes:
        history: rows of the rounds so far; rounds of checks have none, what they send is counted with the last one.
        records: what each phase cost.
        round: of the method's own rounds, those of earlier runs that this one goes on with included.
    """

    def __init__(
        self, engine: Engine, key: Any, stack: Stack, split: SplitModel, schedule: Any, bar: bool, label: str
    ) -> None:
        self.engine, self.key, self.stack, self.split = engine, key, stack, split
        self.schedule, self.bar, self.label = schedule, bar, label
        self.history: list[dict[str, np.ndarray]] = []
        self.records: list[Record] = []
        self.uncounted = Traffic(0, 0)  # what was sent before the first round
        self.recorded = Traffic(0, 0)  # the part of it that has a record of its own
        self.round = 0
        self.later: list[Callable[[], None]] = []  # programs that will be needed after the rounds

    def surveyed(self, sent: Traffic) -> None:
        """What the silos told before the first phase is counted with its first round, and recorded by itself."""
        self.records.append(Record("survey", 2, sent.up, sent.down))
        self.uncounted, self.recorded = self.uncounted + sent, self.recorded + sent

    # --- phases -------------------------------------------------------------------------------------------------------

    def run(
        self, phases: tuple[Phase, ...], left: Left, states: tuple | None, local: tuple | None
    ) -> tuple[Left, tuple]:
        """All phases.

        Args:
            phases: of the method's program; those that look for a start are left out where there is one.
            left: a warm start, or the state of a run to go on with.
            states: of the silos, when a run goes on; None: fresh ones.
            local: what another fit knows of the silos' locals, as a start.
        """
        begun = left.warm is not None or left.server is not None
        starts = [phase for phase in phases if phase.role == "start"]
        if starts and not begun and self.engine.holds_states:  # a start is looked for among all silos
            left, local = self._starts(starts, left)
        ran = False
        for phase in phases:
            if phase.role == "rounds":
                if ran and (left.interrupted or not left.moving):
                    continue
                left, states = self._rounds(phase, left._replace(moving=False, reasons=()), states, local)
                local, ran = None, True
            elif phase.role == "check":
                left = self._check(phase, left, states or ())
        return left, states or ()

    def _begin(
        self, phase: Phase, key: Any, left: Left, states: tuple | None, local: tuple | None
    ) -> tuple[PyTree, tuple]:
        """States of both sides, and the bytes of what the silos are given for theirs."""
        fresh = None
        if states is None or left.server is None:
            fresh, states = self.engine.start(phase.algorithm, key, self.stack)
        begun = phase.begin(left, fresh)
        assert begun is not None, "rounds have a beginning"
        server, given = begun
        if self.engine.holds_states:
            states = self.engine.in_silos(phase.begin_silo, given, self.stack, states, local)
            if jax.tree.leaves(given):
                self.uncounted = self.uncounted + Traffic(0, wire.num_bytes(given) * len(self.stack.names))
        return server, states

    def _starts(self, phases: list[Phase], left: Left) -> tuple[Left, tuple | None]:
        """The first that converges; else the best of them, and a hint that it may not do."""
        local: tuple | None = None
        failed: NonFinite | None = None
        for given in phases:
            phase = given if given.made is None else given.made()
            key = self._key(phase)
            ended = self._loop(phase, key, *self._begin(phase, key, left, None, None), 0, lambda first, count: None)
            found = phase.finish(left, ended.server, ended.info)
            if found is None:
                failed = NonFinite(phase, key, ended.server, ended.states, ended.done, None)
                continue
            if local is None or found.warm is not left.warm:
                local = ended.states
                if phase.leave_silo is not None:
                    local = self.engine.in_silos(phase.leave_silo, found.warm, self.stack, ended.states)
            left = found
            if not left.unsure:
                return left, local
        if left.warm is None:
            assert failed is not None, "a start that is finite leaves one"
            raise failed
        return left._replace(hints=(*left.hints, UNSURE)), local

    def _rounds(self, phase: Phase, left: Left, states: tuple | None, local: tuple | None) -> tuple[Left, tuple]:
        names, late = self.stack.names, schedules.stale(self.schedule)
        server, states = self._begin(phase, self.key, left, states, local)
        if phase.suited is not None:
            phase = phase._replace(algorithm=phase.suited(server))
        while self.later and ahead.busy():  # the compiler has time for more
            self.later.pop(0)()
        finish = phase.finish
        if late:
            key = folded(folded(self.key, self.round), SERVER)
            server = held(phase.algorithm, server, key, len(names))
            phase = phase._replace(algorithm=stale(phase.algorithm, len(names)))
        ended = self._loop(phase, self.key, server, states, self.round, self.cohorts)
        server = current(ended.server)
        if ended.interrupted or not ended.done:
            return left._replace(server=server, interrupted=ended.interrupted), ended.states
        if ended.shortened:
            left = left._replace(hints=(*left.hints, SHORTENED))
        found = finish(left, server, ended.info)
        assert found is not None, "rounds that were done are finite"
        return found, ended.states

    def _check(self, phase: Phase, left: Left, states: tuple) -> Left:
        """One more look at the end; what it sends is counted with the last round."""
        begun = None if left.interrupted else phase.begin(left, None)
        if begun is None:
            if left.interrupted and phase.lacks and self.bar:
                tqdm.write(f"the last look was left out{phase.lacks}")
            return left
        names, cohorts = self.stack.names, None
        if schedules.random(self.schedule) or self.engine.reads_store:
            cohorts = self.cohorts(self.round, 1)
        asked = len(names) if cohorts is None else cohorts.shape[1]
        if phase.cohort is not None and phase.cohort != asked:
            cohorts = schedules.sampled(phase.cohort).cohorts(self._cohort_key, names, self.round, 1)
        ended = self._loop(phase, self._key(phase), begun.server, states, self.round, lambda first, count: cohorts)
        if ended.interrupted:
            return left._replace(interrupted=True)
        found = phase.finish(left, ended.server, ended.info) if not phase.watched or all_finite(ended.server) else None
        if found is None:
            warn_user(
                "what some silo sent in the closing round was not finite, so it was left out: the fit is that of the "
                f"round before{phase.lacks}"
            )
            return left
        return found

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _loop(
        self, phase: Phase, key: Any, server: PyTree, states: tuple, first: int, cohorts_of: Callable[[int, int], Any]
    ) -> "Ended":
        """Rounds of a phase, chunk by chunk: between two chunks the host looks."""
        sent, names = self._traffic(phase, server, states), self.stack.names
        look, effort = phase.look or phase.num_rounds, self.effort(phase)
        info: dict[str, np.ndarray] = {}
        rows: list[dict[str, np.ndarray]] = []
        done, interrupted, total, shortened = 0, False, phase.num_rounds, 0
        title = "finding a start" if phase.role == "start" else self.label
        hidden, kept = not self.bar or phase.role == "check", phase.role == "rounds"
        with tqdm(total=total, desc=title, disable=hidden, leave=kept, unit="round") as bar:
            try:
                while done < total:
                    count = min(self.engine.chunk, look - done % look, total - done)
                    cohorts = cohorts_of(first + done, count)
                    asked = len(names) if cohorts is None else cohorts.shape[1]
                    chunk = (phase.algorithm, key, self.stack, server, states, first + done, cohorts)
                    after = self.engine.rounds(*chunk, count, effort)
                    bad = _first_bad(after, count) if phase.role == "rounds" and phase.watched else None
                    if bad is not None and phase.shorter is not None and shortened < SHORTER:
                        server, states = self._shorter(phase, server, states)
                        shortened += 1
                        continue
                    if bad is not None:
                        good, (server, states, info) = last_good(self.engine, chunk, bad, effort)
                        if good:
                            self._record(info, good, asked, sent, phase)
                        self.round += good
                        members = None if cohorts is None or good >= len(cohorts) else cohorts[good]
                        raise NonFinite(phase, key, server, states, self.round, members)
                    server, states, info = after
                    self._record(info, count, asked, sent, phase)
                    rows.append(info)
                    done += count
                    self.round += count if phase.role == "rounds" else 0
                    bar.update(count)
                    if "loss" in info:
                        bar.set_postfix(loss=f"{float(np.mean(info['loss'][-100:])):.4g}")
                    if phase.done is not None and done % look == 0 and done < total and phase.done(info):
                        if kept and self.bar:
                            bar.write(f"nothing moves any more after {done} rounds")
                        break
            except KeyboardInterrupt:
                if phase.role == "start":  # there is no fit yet
                    raise
                interrupted = True
                if kept:
                    bar.write(f"stopped after {done} of {total} rounds; this is the fit so far")
        whole = {name: np.concatenate([one[name] for one in rows]) for name in info}
        return Ended(server, states, whole, done, interrupted, shortened)

    def effort(self, phase: Phase) -> str:
        """Of the compiler: little work is done before a program for much work is compiled."""
        if phase.looks_at_data is None or not self.stack.known:
            return phase.effort
        return "least" if phase.looks_at_data * self.stack.elements <= LITTLE else phase.effort

    def _shorter(self, phase: Phase, server: PyTree, states: tuple) -> tuple[PyTree, tuple]:
        """Back where the chunk began, with shorter steps on both sides."""
        shorter = phase.shorter
        assert shorter is not None
        if self.engine.holds_states:
            states = self.engine.in_silos(lambda given, state: shorter(state), (), self.stack, states)
        return shorter(server), states

    @property
    def _cohort_key(self) -> Any:
        return folded(self.key, COHORTS)

    def cohorts(self, first: int, count: int) -> Any:
        return check_cohorts(self.schedule.cohorts(self._cohort_key, self.stack.names, first, count), self.stack.names)

    # --- what is counted ----------------------------------------------------------------------------------------------

    def _key(self, phase: Phase) -> Any:
        return folded(self.key, digest(f"\0{phase.name}"))

    def _traffic(self, phase: Phase, server: PyTree, states: tuple) -> Traffic:
        """Of one silo in one round, from shapes alone."""
        data = self.stack.shapes(0)
        if self.engine.holds_states:
            silo = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), states[0])
        else:
            silo = None
        return traffic(phase.algorithm, server, silo, data)

    def _record(self, info: dict, count: int, cohort: int, sent: Traffic, phase: Phase) -> None:
        if phase.role == "check":
            asked = count * cohort
            self.records.append(Record(phase.name, count, asked * sent.up, asked * sent.down))
            self._count(asked * sent, at=-1)
            return
        rows = {name: column for name, column in info.items() if not name.startswith("_")}
        rows.setdefault("bytes_up", np.full(count, cohort * sent.up))
        rows.setdefault("bytes_down", np.full(count, cohort * sent.down))
        rows["start"] = np.full(count, phase.role == "start")
        self.history.append(rows)
        if self.uncounted != Traffic(0, 0):
            self._count(self.uncounted, at=0, rows=rows)
            self.uncounted = Traffic(0, 0)
        up, down = (
            int(np.sum(rows["bytes_up"])) - self.recorded.up,
            int(np.sum(rows["bytes_down"])) - self.recorded.down,
        )
        self.recorded = Traffic(0, 0)
        if self.records and self.records[-1].phase == phase.name:
            last = self.records.pop()
            count, up, down = count + last.rounds, up + last.bytes_up, down + last.bytes_down
        self.records.append(Record(phase.name, count, up, down))

    def _count(self, sent: Traffic, at: int, rows: dict | None = None) -> None:
        """Add to a round what was sent beside it."""
        rows = (self.history[-1] if self.history else None) if rows is None else rows
        if rows is None:
            self.uncounted = self.uncounted + sent
            return
        for name, size in (("bytes_up", sent.up), ("bytes_down", sent.down)):
            column = np.array(rows[name])
            column[at] += size
            rows[name] = column

    def columns(self) -> dict[str, np.ndarray]:
        """The history: each quantity over all rounds, NaN in rounds that do not have it."""
        names = dict.fromkeys(name for rows in self.history[::-1] for name in rows)
        return {name: self._column(name) for name in names}

    def _column(self, name: str) -> np.ndarray:
        like = next(rows[name] for rows in self.history if name in rows)

        def column(rows: dict[str, np.ndarray]) -> np.ndarray:
            return rows[name] if name in rows else np.full((len(rows["loss"]), *like.shape[1:]), np.nan)

        return np.concatenate([column(rows) for rows in self.history])


def _first_bad(after: tuple[PyTree, tuple, dict[str, np.ndarray]], count: int) -> int | None:
    """The first of a chunk's rounds whose loss is not finite; ``count``: all are, and the server's state is not."""
    bad = np.flatnonzero(~np.isfinite(after[2]["loss"]))
    if bad.size:
        return int(bad[0])
    return None if all_finite(after[0]) else count  # a loss can be that of the round's beginning
