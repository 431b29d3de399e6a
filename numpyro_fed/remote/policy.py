"""What the owner of a silo allows: the ``[policy]`` table of its ``site.toml``.

A policy is the silo's, is read in the silo, and is never sent. What it refuses is told to the server in words that name
the rule and depend on nothing but the policy: "its policy allows no check" is said whether checks are not allowed at
all or only to silos with more rows; which of the two stands in the silo's own log.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from numpyro_fed.checks import check_count
from numpyro_fed.prepare.asking import THRESHOLD
from numpyro_fed.remote.errors import PolicyRefused

# What a request may be for, and what the server is told that there is "no" of.
PHASES = {
    "survey": "survey",
    "start": "start",
    "rounds": "rounds",
    "closing": "closing",
    "check": "check",
    "correct": "correction",
    "loo": "leave-one-out",
    "ppc": "predictive check",
}
AT_POINTS = ("check", "correct", "loo", "ppc")  # these tell densities or draws that the posterior does not need
COUNTED = ("start", "rounds", "closing")  # these are rounds of a method


class Purpose(NamedTuple):
    """What a request is for, as the silo itself works it out."""

    phase: str  # one of PHASES
    round: int
    points: int = 0  # of a check or correction: at how many points it asks


class Count(NamedTuple):
    """What a silo has answered of one study, in all runs of it."""

    rounds: int = 0
    messages: int = 0  # of any kind, those of rounds included
    points: int = 0


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a silo answers.

    Args:
        studies: names of the studies that it takes part in; None for any whose file it was given.
        phases: what it may be asked for. A check tells the silo's log density at points around the posterior, so that
            the fit can be judged; corrections, leave-one-out and predictive checks tell more of the same kind, and are
            for the owner to allow.
        least_rows: a silo with fewer rows takes part in nothing. With one row the message of a linear regression *is*
            the row; official statistics ask for cells of at least 5. Set 1 where rows are public, as those of a
            meta-analysis.
        check_rows: a silo with fewer rows answers no check, nor what is like it. A check of a model with few sufficient
            statistics tells them, at every 256 points anew: below 20 rows that is nearly the rows themselves.
        most_rounds: of a study, over all its runs: requests of starts, rounds and closings. The default lets SFVI run
            ten times.
        most_messages: of a study, over all its runs, of any kind; answers that were errors count, too.
        most_points: of a study, over all its runs: points of checks and the like. A check and a correction ask for the
            same numbers; how many is what tells them apart. The default is ten checks of the largest size, 2048.
        copies: whether the audit log keeps a copy of everything that left.
        methods: names of the study's methods that may be run; None for any.

    >>> Policy.from_table({"phases": ["survey", "rounds"], "most_rounds": 100}).most_rounds
    100
    >>> Policy.from_table({"max_rounds": 100})
    Traceback (most recent call last):
    ...
    ValueError: a policy has no 'max_rounds', did you mean 'most_rounds'? It has studies, phases, least_rows, ...
    """

    studies: tuple[str, ...] | None = None
    phases: tuple[str, ...] = ("survey", "start", "rounds", "closing", "check")
    least_rows: int = THRESHOLD
    check_rows: int = 20
    most_rounds: int = 50_000
    most_messages: int = 100_000
    most_points: int = 20_480
    copies: bool = False
    methods: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("studies", "methods", "phases"):
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        if self.phases is None:
            raise ValueError(f"phases must be a list of names, got None: name those of {', '.join(PHASES)} you allow")
        for phase in self.phases:
            if phase not in PHASES:
                raise ValueError(f"there is no phase {phase!r}{_nearest(phase, PHASES)} There are {', '.join(PHASES)}")
        for name in ("least_rows", "check_rows", "most_rounds", "most_messages", "most_points"):
            check_count(name, getattr(self, name), least=0)
        if not isinstance(self.copies, bool):
            raise ValueError(f"copies must be true or false, got {self.copies!r}")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "Policy":
        """The policy that a TOML table says; what it does not say is as by default."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in table:
            if name in PHASES:
                raise ValueError(f"{name!r} is a phase: name all that you allow, phases = [..., {name!r}]")
            if name not in known:
                raise ValueError(f"a policy has no {name!r}{_nearest(name, known)} It has {', '.join(known)}")
        return cls(**table)

    def admit(self, study: str, rows: int) -> None:
        """Whether the silo takes part at all.

        The two reasons are told in the same words: how many rows there are is not the server's to know yet.
        """
        told = "its policy does not allow this study"
        if self.studies is not None and study not in self.studies:
            raise PolicyRefused(told, f"the study {study!r} is not among the policy's studies {list(self.studies)}")
        if rows < self.least_rows:
            raise PolicyRefused(told, f"there are {rows} rows, and the policy's least_rows is {self.least_rows}")

    def open(self, method: Any) -> None:
        """Whether a run of this method may be opened."""
        if self.methods is not None and method not in self.methods:
            raise PolicyRefused(
                "its policy does not allow this method",
                f"{method!r} is not among the policy's methods {list(self.methods)}",
            )

    def allow(self, purpose: Purpose, rows: int) -> None:
        """Whether it may be asked for this, at any time."""
        told = f"its policy allows no {PHASES.get(purpose.phase, 'such request')}"
        if purpose.phase not in self.phases:
            raise PolicyRefused(told, f"{purpose.phase!r} is not among the policy's phases {list(self.phases)}")
        if purpose.phase in AT_POINTS and rows < self.check_rows:
            raise PolicyRefused(told, f"there are {rows} rows, and the policy's check_rows is {self.check_rows}")

    def spend(self, count: Count, purpose: Purpose | None) -> Count:
        """The count after one more message, if the policy still allows it."""
        spent = Count(
            count.rounds + (purpose is not None and purpose.phase in COUNTED),
            count.messages + 1,
            count.points + (purpose.points if purpose is not None else 0),
        )
        for name, now, before in zip(Count._fields, spent, count, strict=True):
            most = getattr(self, f"most_{name}")
            if now > most and now > before:
                raise PolicyRefused(
                    f"its policy allows no more {name} of this study",
                    f"this would be {now} {name}, and the policy's most_{name} is {most}",
                )
        return spent


def _names(field: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, Iterable) or not all(isinstance(one, str) for one in value):
        raise ValueError(f'{field} must be a list of names, got {value!r}: write {field} = ["..."]')
    return tuple(value)


def _nearest(name: str, known: Iterable[str]) -> str:
    """
    >>> _nearest("chekc", ["check", "correct"])
    ", did you mean 'check'?"
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f", did you mean {close[0]!r}?" if close else "."
