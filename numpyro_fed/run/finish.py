"""From the end of a run to a fit."""

import time
from typing import Any

from numpyro_fed.algorithm import Left, Posterior
from numpyro_fed.checks import VerdictWarning, sentences, warn_user
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.state import Again, State
from numpyro_fed.results.value import UNASKED
from numpyro_fed.results.verdict import Evidence
from numpyro_fed.run.prepare import Prepared
from numpyro_fed.run.runner import Runner


def finished(
    runner: Runner,
    posterior: Posterior,
    prepared: Prepared,
    silos: Any,
    again: Again,
    began: float,
    left: Left,
    states: tuple,
    evidence: Evidence | str = UNASKED,
    warn: bool = True,
) -> Fit:
    """The fit, which says itself why it is to be doubted."""
    stack, holds = prepared.stack, runner.engine.holds_states
    gathered = getattr(runner.engine, "gathered", None)  # states may lie on several devices
    states = states if gathered is None else gathered(states)
    state = State(
        runner.label,
        stack.names,
        tuple(bucket.names for bucket in stack.buckets) if holds else (),
        left.server,
        states,
        runner.round,
    )
    padded = tuple(dict(bucket.lengths) for bucket in stack.buckets) if holds else ()
    fit = Fit(
        posterior,
        prepared.split,
        state,
        runner.books.columns(),
        time.perf_counter() - began,
        padded,
        silos,
        survey=prepared.survey,
        records=tuple(runner.books.records),
        sent=tuple(runner.books.entries),
        reasons=(*left.reasons, *_missing(silos)),
        moving=left.moving,
        evidence=evidence,
        again=again,
        hints=left.hints,
    )
    if warn:
        warn_of_verdict(runner.label, fit)
    return fit


def _missing(silos: Any) -> tuple[str, ...]:
    """Silos elsewhere that were asked for, and were not there."""
    names = getattr(silos, "missing", ())
    if not names:
        return ()
    who = f"silo{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"
    return (f"{who} did not answer when the run began: this is the posterior of the {len(silos.names)} others",)


def warn_of_verdict(method: str, fit: Fit) -> None:
    """A fit that is to be doubted says so once."""
    if fit.verdict.warns:
        told = f"{method}: the verdict is {fit.verdict.status!r}. {sentences(fit.verdict.reasons)}"
        warn_user(f"{told} (All of it: fit.verdict)", VerdictWarning)


def warn_of(method: Any, what: str) -> None:
    warn_user(f"{type(method).__name__} {what}")
