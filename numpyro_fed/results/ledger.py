"""What left the silos and what they received, leaf by leaf."""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from numpyro_fed.engines.base import Sent


class Entry(NamedTuple):
    """So many rounds of a phase in which the same was sent by whoever took part."""

    phase: str
    row: int  # of the history, where the first round's bytes are counted
    times: int  # rounds
    who: np.ndarray | None  # (K,) or (times, K): places of the silos; None: all of them
    sent: Sent  # by each, and to each
    together: bool = False  # all rounds are counted in that row: of what precedes the rounds, and of checks

    def members(self, num_silos: int) -> np.ndarray:
        """(times, K)."""
        who = np.arange(num_silos) if self.who is None else self.who
        return np.broadcast_to(who, (self.times, who.shape[-1]))

    def moved(self, rows: int) -> "Entry":
        """The same, so many rows later."""
        return self._replace(row=self.row + rows)


def ledger(entries: tuple[Entry, ...], names: Any, silo: str | None = None) -> pd.DataFrame:
    """A row for each leaf that one silo and the server sent each other in one round.

    ``round`` is the row of the history that counts it. Columns of words are categories, so that a million rows take
    some tens of megabytes.

    >>> from numpyro_fed.engines.wire import Field
    >>> one = Sent(up=(Field("gradient", (2,), 22),), down=(Field("z", (2,), 22),))
    >>> ledger((Entry("rounds", 0, 2, None, one),), ("leeds", "york"), "york")
        phase  round  silo direction     field shape  bytes
    0  rounds      0  york        up  gradient  (2,)     22
    1  rounds      0  york      down         z  (2,)     22
    2  rounds      1  york        up  gradient  (2,)     22
    3  rounds      1  york      down         z  (2,)     22
    """
    only = None if silo is None else names.index(silo)
    leaves = [
        (entry.phase, direction, *field)
        for entry in entries
        for direction, fields in zip(("up", "down"), entry.sent, strict=True)
        for field in fields
    ]
    starts = np.cumsum([0, *(len(entry.sent.up) + len(entry.sent.down) for entry in entries)])
    parts = [_places(entry, first, len(names), only) for entry, first in zip(entries, starts[:-1], strict=True)]
    rounds, members, leaf = np.concatenate(parts).T if parts else np.zeros((3, 0), int)
    phase, direction, field, shape, size = zip(*leaves, strict=True) if leaves else ((),) * 5
    present, at = np.unique(members, return_inverse=True)
    return pd.DataFrame(
        {
            "phase": _words(phase)[leaf],
            "round": rounds,
            "silo": pd.Categorical.from_codes(at, [names[j] for j in present]),
            "direction": _words(direction)[leaf],
            "field": _words(field)[leaf],
            "shape": _words([str(one) for one in shape])[leaf],
            "bytes": np.array(size, np.int64)[leaf],
        }
    )


def _places(entry: Entry, first: int, num_silos: int, only: int | None) -> np.ndarray:
    """(rows, 3): the history's row, the silo, and the place of the leaf in the list of all."""
    members = entry.members(num_silos)
    rounds = np.broadcast_to(entry.row + (0 if entry.together else 1) * np.arange(entry.times)[:, None], members.shape)
    kept = np.ones(members.shape, bool) if only is None else members == only
    pairs = np.stack([rounds[kept], members[kept]], axis=1)
    leaves = first + np.arange(len(entry.sent.up) + len(entry.sent.down))
    return np.concatenate([np.repeat(pairs, len(leaves), axis=0), np.tile(leaves, len(pairs))[:, None]], axis=1)


def _words(values: Any) -> pd.Categorical:
    return pd.Categorical(list(values), categories=list(dict.fromkeys(values)))
