"""The one loop: phases, one after another, over any engine.

Progress, interruption, the watch for non-finite values, stale broadcasts, byte counts and history stand here and
nowhere else. A phase says what to run (:class:`numpyro_fed.algorithm.Phase`), an engine where.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm.auto import tqdm

from numpyro_fed import ahead, schedules
from numpyro_fed.algorithm import Left, Phase, PyTree
from numpyro_fed.checks import check_cohorts, warn_user
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines import wire
from numpyro_fed.engines.base import Engine, Sent, one_state, sent
from numpyro_fed.engines.hearing import Gone, inner, within
from numpyro_fed.engines.stale import current, held, stale
from numpyro_fed.host import folded, undisturbed
from numpyro_fed.keys import SERVER, digest
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import LITTLE
from numpyro_fed.results.scalars import mean_loss
from numpyro_fed.run.books import Books
from numpyro_fed.run.checkpoint import Loop, Unsaved
from numpyro_fed.run.diagnose import NonFinite, all_finite, first_bad, last_good

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


class Ended(NamedTuple):
    """Where a phase's rounds ended."""

    server: PyTree
    states: tuple
    info: dict[str, np.ndarray]  # one row a round
    done: int
    interrupted: bool
    shortened: int  # so many times steps were made shorter


class Runner:
    """One run: its engine, progress bar and books.

    Attributes:
        books: the rounds so far, and what was sent.
        checkpoint: where it is written to on the way.
        round: of the method's own rounds, those of earlier runs that this one goes on with included.
    """

    def __init__(
        self, engine: Engine, key: Any, stack: Stack, split: SplitModel, schedule: Any, bar: bool, label: str
    ) -> None:
        self.engine, self.key, self.stack, self.split = engine, key, stack, split
        self.schedule, self.bar, self.label = schedule, bar, label
        self.books = Books()
        self.checkpoint = Unsaved()
        self.round = 0
        self.heard: Any = None  # a Hearing: how silos were heard in rounds before
        self.later: list[Callable[[], None]] = []  # begin to compile programs that will be needed

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
                try:
                    left = self._check(phase, left, states or ())
                except Gone as gone:
                    if not ran:  # nobody but the caller knows what the look was for
                        raise
                    warn_user(told := f"{gone}. A closing round was left out{phase.lacks}")
                    left = left._replace(reasons=(*left.reasons, *[told] * bool(phase.lacks)))
        return left, states or ()

    def _begin(
        self, phase: Phase, key: Any, left: Left, states: tuple | None, local: tuple | None
    ) -> tuple[PyTree, tuple]:
        """States of both sides, and the bytes of what the silos are given for theirs."""
        fresh = None
        if states is None or left.server is None:
            fresh, states = self.begun(phase, key)
            told = getattr(self._engine(phase), "sent_at_start", None)
            if told is not None:
                self.books.ahead(phase.name, told(phase.algorithm, fresh, self.stack.shapes(0)), len(self.stack.names))
        begun = phase.begin(left, fresh)
        assert begun is not None, "rounds have a beginning"
        server, given = begun
        if self.engine.holds_states:
            states = self._engine(phase).in_silos(phase.begin_silo, given, self.stack, states, local)
            if jax.tree.leaves(given):
                self.books.ahead(phase.name, Sent(down=wire.fields(given)), len(self.stack.names))
        return server, states

    def _starts(self, phases: list[Phase], left: Left) -> tuple[Left, tuple | None]:
        """The first that converges; else the best of them, and a hint that it may not do."""
        local: tuple | None = None
        failed: NonFinite | None = None
        for given in phases:
            phase = given if given.made is None else given.made()._replace(recipe=given.recipe)
            key = self._key(phase)
            ended = self._loop(phase, key, *self._begin(phase, key, left, None, None), 0, lambda first, count: None)
            found = phase.finish(left, ended.server, ended.info)
            if found is None:
                failed = NonFinite(phase, key, ended.server, ended.states, ended.done, None)
                continue
            if local is None or found.warm is not left.warm:
                local = ended.states
                if phase.leave_silo is not None:
                    leave = self._engine(phase).in_silos
                    local = leave(phase.leave_silo, found.warm, self.stack, ended.states)
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
            phase = phase.variant(phase.suited(server))
        finish = phase.finish
        if late:
            key = folded(folded(self.key, self.round), SERVER)
            server = held(phase.algorithm, server, key, len(names))
            phase = phase._replace(algorithm=stale(phase.algorithm, len(names)), recipe=(*phase.recipe, "stale"))
        listening = getattr(self._engine(phase), "listening", None)
        if listening is not None:
            server = listening(phase.algorithm, server, states, self.stack, self.heard)
        ended = self._loop(phase, self.key, server, states, self.round, self.cohorts)
        self.heard = None if listening is None else ended.server
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
        sent, look, effort = self._sent(phase, server, states), phase.look or phase.num_rounds, self.effort(phase)
        engine = self._engine(phase)
        at = self.checkpoint.entered(phase, server, states, self.books) or Loop(server, states, {}, round=self.round)
        rows, recent, interrupted, total = [at.info] * bool(at.done), [], False, phase.num_rounds
        if at.since < at.done:
            recent = [{name: column[at.since :] for name, column in at.info.items()}]
        self.round = at.round
        title = "finding a start" if phase.role == "start" else self.label
        hidden, kept = not self.bar or phase.role == "check", phase.role == "rounds"
        with tqdm(total=total, initial=at.done, desc=title, disable=hidden, leave=kept, unit="round") as bar:
            try:
                ahead.beside(self.later)
                while not at.finished:
                    end = at.since + min(engine.chunk, look - at.since % look, total - at.since)
                    count = self.checkpoint.until(at.done, end) - at.done
                    cohorts = cohorts_of(first + at.done, count)
                    chunk = (phase.algorithm, key, self.stack, at.server, at.states, first + at.done, cohorts)
                    try:
                        after = engine.rounds(*chunk, count, effort)
                    except Gone as gone:
                        self.checkpoint.interrupted()
                        raise self._told(gone, phase, cohorts, sent) from None
                    bad = first_bad(after, count, rows, total) if phase.role == "rounds" and phase.watched else None
                    if bad is not None and phase.shorter is not None and at.shortened < SHORTER:
                        server, states = self._shorter(phase, at.server, at.states)
                        at = at._replace(server=server, states=states, shortened=at.shortened + 1)
                        continue
                    if bad is not None:
                        raise self._non_finite(phase, chunk, bad, effort, sent)
                    info = after[2]
                    self._record(phase, info, count, cohorts, sent)
                    rows, recent = [*rows, info], [*recent, info]
                    done, since = at.done + count, at.since
                    if "loss" in info:
                        bar.set_postfix(loss=f"{mean_loss(info['loss'][-100:]):.4g}")
                    finished = done == total
                    if done == end:  # a whole chunk
                        looks = done % look == 0 and not finished
                        if looks and phase.done is not None and phase.done(_together(recent)):
                            finished = True
                            if kept and self.bar:
                                bar.write(f"nothing moves any more after {done} rounds")
                        since, recent = done, []
                    self.round += count if phase.role == "rounds" else 0
                    at = Loop(after[0], after[1], {}, done, since, at.shortened, finished, self.round)
                    self.checkpoint.reached(at, rows, self.books)
                    self._pin()
                    bar.update(count)
            except KeyboardInterrupt:
                self.checkpoint.interrupted()
                if phase.role == "start":  # there is no fit yet
                    raise
                interrupted = True
                if kept:
                    bar.write(f"stopped after {at.done} of {total} rounds; this is the fit so far")
        return Ended(at.server, at.states, _together(rows), at.done, interrupted, at.shortened)

    def saved_to(self, checkpoint: Unsaved) -> None:
        """Write the run there on the way, or go on from it."""
        self.checkpoint = checkpoint
        known = getattr(self.engine, "names_of", None)
        if known is not None:
            checkpoint.names_of = lambda states: known(states, self.stack)
        self._pin()

    def _pin(self) -> None:
        """Silos that are elsewhere keep the states that a checkpoint names."""
        pin = getattr(self.engine, "pin", None)
        if pin is not None:
            pin(self.checkpoint.kept)

    def begun(self, phase: Phase, key: Any) -> tuple[PyTree, tuple]:
        """Fresh states of both sides."""
        return self._engine(phase).start(phase.algorithm, key, self.stack)

    def _engine(self, phase: Phase) -> Any:
        """What runs the phase's rounds: an engine may do so in its own way."""
        during = getattr(self.engine, "during", None)
        return self.engine if during is None else during(phase)

    def _told(self, gone: Gone, phase: Phase, cohorts: Any, sent: Sent) -> Gone:
        """A silo that is lost, the rounds before in the books."""
        if gone.done:
            self._record(phase, gone.info, gone.done, None if cohorts is None else cohorts[: gone.done], sent)
        self.round += gone.done if phase.role == "rounds" else 0
        gone.role, gone.round, gone.server = phase.role, self.round, current(gone.server)
        return gone

    def _non_finite(self, phase: Phase, chunk: tuple, bad: int, effort: str, sent: Sent) -> NonFinite:
        """The end of a run whose values are not finite, with the last states that are."""
        key, cohorts = chunk[1], chunk[6]
        good, (server, states, info) = last_good(self._engine(phase), chunk, bad, effort)
        if good:
            self._record(phase, info, good, None if cohorts is None else cohorts[:good], sent)
        self.round += good
        members = None if cohorts is None or good >= len(cohorts) else cohorts[good]
        return NonFinite(phase, key, inner(server), states, self.round, members)

    def _record(self, phase: Phase, info: dict, count: int, cohorts: Any, sent: Sent) -> None:
        num = len(self.stack.names)
        if phase.role == "check":
            self.books.looked(phase.name, info, count, cohorts, num, sent)
        else:
            self.books.rounds(phase.name, phase.role == "start", info, count, cohorts, num, sent)

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
            states = self._engine(phase).in_silos(phase.shorten, (), self.stack, states)
        return within(shorter, server), states

    @property
    def _cohort_key(self) -> Any:
        return folded(self.key, COHORTS)

    def cohorts(self, first: int, count: int) -> Any:
        return check_cohorts(self.schedule.cohorts(self._cohort_key, self.stack.names, first, count), self.stack.names)

    # --- what is counted ----------------------------------------------------------------------------------------------

    def _key(self, phase: Phase) -> Any:
        return folded(self.key, digest(f"\0{phase.name}"))

    def _sent(self, phase: Phase, server: PyTree, states: tuple) -> Sent:
        """By one silo in one round, and to it, from shapes alone."""
        data, server, holds = self.stack.shapes(0), inner(server), self.engine.holds_states
        silo = one_state(self._engine(phase), phase.algorithm, server, states, data) if holds else None
        with undisturbed():
            return sent(phase.algorithm, server, silo, data)


def _together(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Infos of one chunk after the other."""
    if len(rows) == 1:
        return rows[0]
    return {name: np.concatenate([one[name] for one in rows]) for name in (rows[0] if rows else ())}
