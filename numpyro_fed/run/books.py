"""What a run keeps of its rounds: the history, what each phase cost, and all that was sent."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from numpyro_fed.engines.base import Sent, Traffic
from numpyro_fed.engines.wire import Field
from numpyro_fed.results.ledger import Entry

NOTHING = Traffic(0, 0)


class Record(NamedTuple):
    """What one phase cost."""

    phase: str
    rounds: int
    bytes_up: int
    bytes_down: int


class Books:
    """The books of one run.

    Attributes:
        history: rows of the rounds so far; rounds of checks have none, what they send is counted with the last one.
        records: what each phase cost.
        entries: all that was sent.
    """

    def __init__(self) -> None:
        self.history: list[dict[str, np.ndarray]] = []
        self.records: list[Record] = []
        self.entries: list[Entry] = []
        self.uncounted = NOTHING  # what was sent before the first round
        self.recorded = NOTHING  # the part of it that has a record of its own

    @property
    def num_rows(self) -> int:
        return sum(len(rows["loss"]) for rows in self.history)

    # --- what precedes a phase's rounds -------------------------------------------------------------------------------

    def surveyed(self, entries: tuple[Entry, ...], num_silos: int) -> None:
        """What the silos told before the first phase is counted with its first round, and recorded by itself."""
        self.entries += entries
        sent = _traffic(entries, num_silos)
        self.records.append(Record("survey", 2, sent.up, sent.down))
        self.uncounted, self.recorded = self.uncounted + sent, self.recorded + sent

    def ahead(self, phase: str, sent: Sent, num_silos: int) -> None:
        """Sent by each silo and to it before the phase's first round, and counted with that."""
        self.entries.append(Entry(phase, self.num_rows, 1, None, sent, together=True))
        self.uncounted = self.uncounted + num_silos * sent.traffic

    # --- rounds -------------------------------------------------------------------------------------------------------

    def looked(
        self, phase: str, info: dict, count: int, cohorts: np.ndarray | None, num_silos: int, sent: Sent
    ) -> None:
        """Rounds of a check: they are counted with the last one before."""
        found = _entries(phase, max(self.num_rows - 1, 0), info, count, cohorts, sent, together=True)
        self.entries += found
        total = _traffic(found, num_silos)
        self.records.append(Record(phase, count, total.up, total.down))
        if self.history:
            self.history[-1] = _with(self.history[-1], -1, total)
        else:
            self.uncounted = self.uncounted + total

    def rounds(
        self, phase: str, start: bool, info: dict, count: int, cohorts: np.ndarray | None, num_silos: int, sent: Sent
    ) -> None:
        """Rounds, each with a row in the history."""
        for entry in _entries(phase, self.num_rows, info, count, cohorts, sent):
            self._enter(entry)
        cohort = num_silos if cohorts is None else cohorts.shape[1]
        rows = {name: column for name, column in info.items() if not name.startswith("_")}
        rows.setdefault("bytes_up", np.full(count, cohort * sent.traffic.up))
        rows.setdefault("bytes_down", np.full(count, cohort * sent.traffic.down))
        rows["start"] = np.full(count, start)
        rows = _with(rows, 0, self.uncounted)
        self.history.append(rows)
        up, down = (
            int(np.sum(rows["bytes_up"])) - self.recorded.up,
            int(np.sum(rows["bytes_down"])) - self.recorded.down,
        )
        self.uncounted = self.recorded = NOTHING
        if self.records and self.records[-1].phase == phase:
            last = self.records.pop()
            count, up, down = count + last.rounds, up + last.bytes_up, down + last.bytes_down
        self.records.append(Record(phase, count, up, down))

    def _enter(self, entry: Entry) -> None:
        """One more, or more of the last."""
        last = self.entries[-1] if self.entries else None
        if last is not None and not last.together and last.who is None and entry.who is None:
            if (last.phase, last.sent) == (entry.phase, entry.sent):
                self.entries[-1] = last._replace(times=last.times + entry.times)
                return
        self.entries.append(entry)

    # --- the history --------------------------------------------------------------------------------------------------

    def columns(self) -> dict[str, np.ndarray]:
        """The history: each quantity over all rounds, NaN in rounds that do not have it."""
        names = dict.fromkeys(name for rows in self.history[::-1] for name in rows)
        return {name: self._column(name) for name in names}

    def _column(self, name: str) -> np.ndarray:
        like = next(rows[name] for rows in self.history if name in rows)

        def column(rows: dict[str, np.ndarray]) -> np.ndarray:
            return rows[name] if name in rows else np.full((len(rows["loss"]), *like.shape[1:]), np.nan)

        return np.concatenate([column(rows) for rows in self.history])

    # --- to go on with ------------------------------------------------------------------------------------------------

    def kept(self) -> dict[str, Any]:
        """All of it, as lists and tuples; later rounds do not change them."""
        lists = {name: list(getattr(self, name)) for name in ("history", "records", "entries")}
        return lists | {name: (getattr(self, name).up, getattr(self, name).down) for name in ("uncounted", "recorded")}

    def put_back(self, kept: dict[str, Any]) -> None:
        """As :meth:`kept` gave it."""
        self.history, self.records, self.entries = (list(kept[name]) for name in ("history", "records", "entries"))
        self.uncounted, self.recorded = (Traffic(*kept[name]) for name in ("uncounted", "recorded"))


def _traffic(entries: Iterable[Entry], num_silos: int) -> Traffic:
    return sum((one.members(num_silos).size * one.sent.traffic for one in entries), NOTHING)


def _entries(
    phase: str, row: int, info: dict, times: int, cohorts: np.ndarray | None, sent: Sent, together: bool = False
) -> list[Entry]:
    """What was sent in these rounds: by all who were asked; where messages get lost, as the rounds tell."""
    if "_asked" not in info:
        return [Entry(phase, row, times, cohorts, sent, together)]
    found = []
    for i, (asked, heard, refused) in enumerate(
        zip(info["_asked"], info["took_part"], info["_refused_bytes"], strict=True)
    ):
        at = row if together else row + i
        entry = lambda who, sent, at=at: Entry(phase, at, 1, np.asarray(who), sent, together=True)
        found += [entry(np.repeat(np.arange(len(asked)), asked), Sent(down=sent.down))]
        found += [entry(np.flatnonzero(heard), Sent(up=sent.up))]
        for j in np.flatnonzero(refused).tolist():
            found += [entry([j], Sent(up=(Field("refused", (), int(refused[j])),)))]
    return found


def _with(rows: dict[str, np.ndarray], at: int, sent: Traffic) -> dict[str, np.ndarray]:
    """The same rounds, and in one of them what was sent beside it."""
    changed = {}
    for name, size in (("bytes_up", sent.up), ("bytes_down", sent.down)):
        changed[name] = np.array(rows[name])
        changed[name][at] += size
    return rows | changed
