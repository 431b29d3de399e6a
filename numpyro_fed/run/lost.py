"""A silo that is lost for good leaves with its term: the run goes on with the others, and the fit says so."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from numpyro_fed.algorithm import Posterior
from numpyro_fed.checks import VerdictWarning, unsaid
from numpyro_fed.engines.hearing import Gone
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.state import State


class SiloLostError(RuntimeError):
    """A silo was lost, and nothing is left to go on with. ``fit`` is the last good state, or None."""

    fit: Any = None


def go_on(
    gone: Gone,
    before: Fit | None,
    names: tuple[str, ...],
    run: Callable[[tuple[str, ...], Any, str], Fit],
    quorum: int = 1,
) -> Fit:
    """The fit of the silos that are left.

    Args:
        before: the rounds so far; None: there were none.
        names: of all silos.
        run: (names, state to go on from or None, why the fit is not that of all) -> Fit
        quorum: silos below which it does not go on.
    """
    rest = tuple(name for name in names if name != gone.silo)
    if len(rest) < max(quorum, 1):
        left = f"the {len(rest)} others are fewer than quorum={quorum}" if rest else "it was the only one"
        fit = "The error's .fit is the last good state" if before is not None else "There was no round yet"
        error = SiloLostError(f"{gone}, and {left}. {fit}; without it: run(key, silos.only(*names))")
        error.fit = before
        raise error from None
    state = None if before is None else _without(before.posterior, before.state, rest)
    if state is not None and gone.hearing is not None:
        state = state._replace(hearing=gone.hearing.of([names.index(name) for name in rest]))
    reason = (
        f"silo {gone.silo!r} was lost {f'at round {gone.round}' if before else 'before the first round'} ({gone.why}) "
        f"and left with its term: this is the posterior of the {len(rest)} other silo{'s' * (len(rest) > 1)}. Once it "
        "is back, run again with all of them, run(..., init_state=fit)"
    )
    with unsaid(VerdictWarning):  # said of the whole
        try:
            after = run(rest, state, reason)
        except SiloLostError as error:  # another, before it had done a round of its own
            error.fit = before if error.fit is None else error.fit
            raise
    all_ = np.arange(len(rest))  # who were asked, now that there is one more name
    told = tuple(entry if entry.who is not None else entry._replace(who=all_) for entry in after.sent)
    after = replace(after, reasons=(*after.reasons, reason), sent=told)
    if before is None:
        at = names.index(gone.silo)
        history = {name: _widened(rows, len(rest), at) for name, rows in after.history.items()}
        return replace(after, left=(*after.left, gone.silo), history=history)
    return _joined(before, after, gone.silo)


def _without(posterior: Posterior, state: State, rest: tuple[str, ...]) -> State:
    """The state in which a silo never was."""
    order = [state.names.index(name) for name in rest]
    server = posterior.reordered(state.server, order) if hasattr(posterior, "reordered") else state.server
    return state.only(rest, server)


def _joined(before: Fit, after: Fit, silo: str) -> Fit:
    """One fit of both halves: rows of the history, what was sent, what it cost."""
    names, at = before.state.names, before.state.names.index(silo)
    everyone = (*after.state.names, *after.left, silo)
    places = np.array([everyone.index(name) for name in names])
    num = before.num_rounds

    def column(name: str) -> np.ndarray:
        rows = [half.history.get(name) for half in (before, after)]
        like = next(one for one in rows if one is not None)
        old, new = (
            np.full((half.num_rounds, *like.shape[1:]), _nothing(like)) if one is None else one
            for one, half in zip(rows, (before, after), strict=True)
        )
        if old.ndim > 1 and old.shape[1] == len(names):
            new = _widened(new, len(names) - 1, at)
        return np.concatenate([old, new])

    moved = (entry._replace(who=places if entry.who is None else places[entry.who]) for entry in before.sent)
    return replace(
        after,
        history={name: column(name) for name in dict.fromkeys((*before.history, *after.history))},
        seconds=before.seconds + after.seconds,
        records=(*before.records, *after.records),
        sent=(*moved, *(entry.moved(num) for entry in after.sent)),
        left=(*after.left, silo),
    )


def _widened(rows: np.ndarray, num: int, at: int) -> np.ndarray:
    """A number for each of so many silos, with one for a silo that was not there."""
    return np.insert(rows, at, _nothing(rows), axis=1) if rows.shape[1:2] == (num,) else rows


def _nothing(like: np.ndarray) -> Any:
    return {"f": np.nan, "U": "", "b": False}.get(like.dtype.kind, 0)
