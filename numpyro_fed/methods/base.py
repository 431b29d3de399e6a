"""What every method shares: settings, and ``run``.

A method is a frozen dataclass of settings that compiles to a program of phases and a posterior
(:class:`numpyro_fed.algorithm.Program`). ``run`` checks its arguments, asks the silos what they have, lets the one loop
(:mod:`numpyro_fed.run.runner`) run the program, and returns a :class:`~numpyro_fed.results.fit.Fit`.
"""

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from tqdm.auto import tqdm

from numpyro_fed import schedules
from numpyro_fed.algorithm import Left, Plan, Posterior, Program
from numpyro_fed.checks import check_cohorts, check_count, check_key, warn_user
from numpyro_fed.engines.base import Engine, tells_silos
from numpyro_fed.engines.choose import check_engine, default_engine
from numpyro_fed.engines.hearing import Gone
from numpyro_fed.engines.stale import current
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.host import key_of, undisturbed
from numpyro_fed.model.mixing import meant
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.model.trace import Model
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.state import Again, Fresh, State
from numpyro_fed.results.value import UNASKED
from numpyro_fed.run import resume
from numpyro_fed.run.check import checked, foreseen
from numpyro_fed.run.checkpoint import Checkpoint, Unsaved
from numpyro_fed.run.correct import correct
from numpyro_fed.run.diagnose import NonFinite, explained
from numpyro_fed.run.finish import finished, warn_of, warn_of_verdict
from numpyro_fed.run.foresee import foresee, foresee_start
from numpyro_fed.run.identity import identity
from numpyro_fed.run.lost import SiloLostError, go_on
from numpyro_fed.run.prepare import Prepared, prepare, refuse_small
from numpyro_fed.run.runner import Runner
from numpyro_fed.schedules import Schedule, as_schedule

ONLY = "run(key, silos.only(*names))"


@dataclass(frozen=True)
class Method:
    """The settings every method has; see its subclasses. A method of your own needs :meth:`compile` alone."""

    model: Model

    stateless: ClassVar[bool] = False  # its silos keep nothing between rounds, so they may come from a store
    accepts_stale: ClassVar[bool] = False  # a message made from an old broadcast is still of use
    fewest: ClassVar[int] = 1  # silos below which there is nothing to federate: said in a run

    def __post_init__(self) -> None:
        if not callable(self.model):
            raise TypeError(f"model must be a NumPyro model (a function), got a {type(self.model).__name__}")
        for name in ("local", "shared"):
            value = getattr(self, name, None)
            if value is not None:  # hashable, so that a method can be a key
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))

    def compile(self, split: SplitModel, survey: Survey, plan: Plan) -> Program:
        """The method for this model, these silos and this run."""
        raise NotImplementedError(f"nf.{type(self).__name__} says how it runs in compile(split, survey, plan)")

    def posterior_of(self, split: SplitModel, survey: Survey) -> Posterior:
        """How draws are made from the method's states."""
        return self.compile(split, survey, Plan()).posterior

    def prepare(self, silos: Any, engine: Engine | None = None) -> Prepared:
        """The model divided over the silos, and what they answered."""
        local, shared = getattr(self, "local", None), getattr(self, "shared", None)
        return prepare(self.model, silos, local, shared, engine, self.batch_size_for, self.meanwhile)

    def meanwhile(self, runner: Runner) -> object:
        """What will be asked for again, and does not depend on the silos' answers: it is done while they are asked."""
        return None

    def batch_size_for(self, split: SplitModel) -> int | None:
        """Rows of a silo that a step looks at, of which silos are asked in the survey; None: all."""
        return getattr(self, "batch_size", None)

    def again(self, engine: Engine | None = None) -> Again:
        """What a fit of this method needs to run again."""
        engine = Vmap() if engine is None else engine
        return Again(partial(_fresh, self, engine), partial(_again, self, engine), partial(correct, engine))

    def run(
        self,
        rng_key: Any,
        silos: Any,
        num_rounds: int | None = None,
        *,
        schedule: str | Schedule | None = None,
        engine: Engine | None = None,
        init_state: Any = None,
        progress_bar: bool = True,
        check: bool = True,
        min_rows: int | None = None,
        checkpoint: str | Path | None = None,
        checkpoint_every: int | None = None,
    ) -> Fit:
        """Fit the model to the silos.

        Args:
            rng_key: ``jax.random.key(0)``.
            silos: the data, an :class:`~numpyro_fed.Silos`; for FedPA, FedAvg, FedNP and SEP also a
                :class:`~numpyro_fed.SiloStore`, of which each round's cohort is read.
            num_rounds: rounds after the start. By default as many as are needed until the posterior is at rest, up to
                a limit of the method's; of EP and PVI the largest number.
            schedule: who takes part in a round: None (all), ``"sequential"``, ``"asynchronous"`` (EP and PVI),
                ``nf.schedules.sampled(cohort_size)``.
            engine: where it runs; by default ``nf.engines.Vmap()``, for a store ``nf.engines.Streamed()``.
            init_state: a ``fit.state`` of the same method (its round counter goes on), or a Fit of any method.
            progress_bar: show rounds, loss and rate.
            check: ask the silos at the end for their densities at 256 points (up to 2,048, where these do not tell)
                around the posterior, how good their locals are, and whether there are other modes, for
                ``fit.verdict``. These numbers say more of a silo's data than most messages.
            min_rows: rows that every silo must have, or the run is refused before anything but shapes and
                counts has left: of a silo with few rows, messages tell the rows (docs/privacy.md). By default any
                number will do; a trial of one row a silo is legitimate.
            checkpoint: a file that the run is written to on the way. Where it is there, of the same method, settings,
                key and data, the run goes on from it and ends bit for bit as if it had not been stopped; a file of
                another run is refused. It holds the silos' states, so it belongs where the data are.
            checkpoint_every: rounds between two writes; by default about ten seconds.

        Returns:
            The fit. Stopped by KeyboardInterrupt, the fit so far.
        """
        key, schedule = check_key(rng_key), as_schedule(schedule)
        if not hasattr(silos, "lazy"):
            raise TypeError(
                f"silos must be an nf.Silos, got a {type(silos).__name__}: wrap it as nf.Silos({{name: arguments}})"
            )
        if num_rounds is not None:
            num_rounds = check_count("num_rounds", num_rounds)
        engine = default_engine(silos) if engine is None else engine
        plan = self._plan(silos, schedule, num_rounds, engine, check)
        elsewhere = tells_silos(engine)
        began, saved = time.perf_counter(), Unsaved()
        if checkpoint is not None:
            processes = getattr(engine, "processes", 1)
            if processes > 1:
                raise ValueError(
                    f"checkpoint= is for a run in one process, and the engine's devices are those of {processes} "
                    "processes: leave it out, and go on from a saved fit, init_state=fit.state"
                )
            where = getattr(engine, "identity", engine)
            asked = {"num_rounds": num_rounds, "schedule": schedule, "engine": where, "check": check}
            saved = Checkpoint(checkpoint, checkpoint_every, identity(self, key, silos, asked, init_state))
            began -= saved.seconds
            if saved.loops and progress_bar:
                tqdm.write(f"goes on from {checkpoint}", file=sys.stderr)
        elif checkpoint_every is not None:
            raise ValueError("checkpoint_every says how often a checkpoint is written: say where, checkpoint='run.nfc'")
        resume.check_start(init_state, silos.names)
        if elsewhere is not None:
            engine = elsewhere = elsewhere.bound(self, silos, saved.run)
            saved.run = elsewhere.run
        again = partial(self._among, key, silos, schedule, dict(engine=engine, progress_bar=progress_bar, check=check))
        quorum = getattr(engine, "quorum", 1)
        try:
            with undisturbed() if elsewhere is None and not silos.lazy else nullcontext():  # or it may be waiting
                prepared = self.prepare(silos, engine)
        except Gone as gone:
            return go_on(gone, None, silos.names, partial(again, num_rounds), quorum)
        if min_rows is not None:
            refuse_small(prepared, check_count("min_rows", min_rows))
        if len(silos.names) < self.fewest:
            warn_of(self, "has one silo, so there is nothing to average: nf.SFVI(model) fits it")
        for site in prepared.survey.around:
            warn_user(meant(site))
        split = prepared.split
        program = _numbered(self.compile(split, prepared.survey, plan))
        name = type(self).__name__
        runner = Runner(engine, key, prepared.stack, split, schedule, progress_bar, name)
        runner.saved_to(saved)
        runner.books.surveyed(prepared.sent, len(silos.names))
        start = resume.start(init_state, name, program, runner)
        first = runner.round
        main = next(phase for phase in program.phases if phase.role == "rounds")
        if start[0].warm is None and start[0].server is None:
            for phase in [phase for phase in program.phases if phase.role == "start" and phase.made is None][:1]:
                foresee_start(runner, phase)
                foresee(runner, phase, scheduled=False)
        foresee(runner, main)
        runner.later = foreseen(runner, program, prepared.survey) if check else []
        runner.later.append(partial(foresee_start, runner, main))
        fit = partial(finished, runner, program.posterior, prepared, silos, self.again(engine), began)
        try:
            if elsewhere is not None:
                elsewhere.agree(prepared.survey, plan, program)
            left, states = runner.run(program.phases, *start)
        except NonFinite as error:
            told = explained(error, split, program.posterior, prepared.stack, engine)
            if error.phase.role == "rounds":
                told.fit = fit(Left(server=current(error.server)), error.states, warn=False)
            raise told from None
        except Gone as gone:
            done = gone.role == "rounds" and bool(runner.books.history)
            before = fit(Left(server=gone.server), gone.states, warn=False) if done else None
            rounds = num_rounds and max(1, num_rounds - (gone.round - first))
            found = go_on(gone, before, silos.names, partial(again, rounds), quorum)
            warn_of_verdict(name, found)
            return found
        evidence: Any = UNASKED
        if check:
            try:
                evidence = checked(runner, program.posterior, prepared.survey, left.server, left.interrupted, states)
            except Gone as gone:
                evidence = f"not checked: {gone}"
        found = fit(left, states, evidence)
        if elsewhere is not None:
            elsewhere.finished(found)
        if progress_bar:
            tqdm.write(f"verdict: {found.verdict.status}", file=sys.stderr)  # beside the bar
        return found

    def _among(
        self,
        key: Any,
        silos: Any,
        schedule: Schedule,
        options: dict[str, Any],
        num_rounds: int | None,
        rest: tuple[str, ...],
        state: State | None,
        why: str,
    ) -> Fit:
        """The run among some of the silos, from this state of theirs; silos elsewhere are told why."""
        elsewhere = tells_silos(options["engine"])
        if elsewhere is not None:
            options = options | {"engine": elsewhere.doubted(why)}
        among = getattr(schedule, "among", lambda names: schedule)
        return Method.run(self, key, silos.only(*rest), num_rounds, schedule=among(rest), init_state=state, **options)

    def _plan(self, silos: Any, schedule: Schedule, num_rounds: int | None, engine: Engine, check: bool) -> Plan:
        """What is known of the run before anybody is asked; what does not go together says so now."""
        names, stale = silos.names, schedules.stale(schedule)
        cohort = check_cohorts(schedule.cohorts(key_of(0), names, 0, 1), names)
        if stale and not self.accepts_stale:
            raise ValueError(
                f"nf.{type(self).__name__} needs replies to its newest broadcast, so it has no asynchronous schedule: "
                "use nf.PVI or nf.EP, or schedule=nf.schedules.sampled(cohort_size)"
            )
        check_engine(engine, type(self).__name__, self.stateless, silos, cohort is None, stale)
        size = None if cohort is None else int(np.shape(cohort)[1])
        return Plan(num_rounds, names, schedules.sweep(schedule, names), size, schedules.random(schedule), stale, check)


def _numbered(program: Program) -> Program:
    """Each phase with its place, by which silos that are elsewhere find it in their own."""
    phases = (phase._replace(recipe=("program", i)) for i, phase in enumerate(program.phases))
    return program._replace(phases=tuple(phases))


def _again(method: Method, engine: Engine, rng_key: Any, silos: Any, num_rounds: int, **options: Any) -> Fit:
    """Further rounds of the same method, on the engine that the fit was made on."""
    return method.run(rng_key, silos, num_rounds, engine=engine, progress_bar=False, **options)


def _fresh(method: Method, engine: Engine, rng_key: Any, silos: Any) -> Fresh:
    """States of the method's rounds on other silos, before the first."""
    plan = Plan(names=silos.names)
    elsewhere = tells_silos(engine)
    if elsewhere is not None:
        engine = elsewhere = elsewhere.bound(method, silos, "")
    try:
        split, survey, stack, _ = method.prepare(silos, engine)
        program = _numbered(method.compile(split, survey, plan))
        if elsewhere is not None:
            elsewhere.agree(survey, plan, program)
        phase = next(phase for phase in program.phases if phase.role == "rounds")
        runner = Runner(engine, check_key(rng_key), stack, split, as_schedule(None), False, "")
        server, states = runner.begun(phase, runner.key)
    except Gone as gone:
        raise SiloLostError(f"{gone}. Nobody was asked for a round yet; without it: {ONLY}") from None
    buckets = tuple(bucket.names for bucket in stack.buckets)
    state = State(type(method).__name__, stack.names, buckets, server, states, 0)
    return Fresh(split, state, tuple(dict(bucket.lengths) for bucket in stack.buckets))
