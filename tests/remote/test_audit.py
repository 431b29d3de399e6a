"""What left, line by line; counts that outlive the process that made them."""

import json
import os
import stat
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from guarded import NUMBERS, StandIn, ask, request, site

from numpyro_fed.engines import wire
from numpyro_fed.remote import audit, counts, envelope
from numpyro_fed.remote.counts import Counts
from numpyro_fed.remote.policy import Count, Policy

RUN = "00112233aabbccdd"


def test_a_line_tells_what_left(tmp_path: Path) -> None:
    york = site(tmp_path)
    asked = envelope.pack(request(phase="check", round=3, body={"phase": "check", "round": 3, "points": 256}))
    data = york.handle(asked)
    (line,) = audit.lines(york.folder / "audit.jsonl")
    assert line.pop("time").endswith("Z")
    assert line == {
        "run": RUN,
        "type": "work",
        "phase": "check",
        "round": 3,
        "points": 256,
        "again": False,
        "answers": envelope.digest(asked),
        "body": ["round"],
        "fields": ["['gradient'] float32[19]"],
        "payload_bytes": len(NUMBERS),
        "payload_sha256": envelope.digest(NUMBERS),
        "bytes": len(data),
        "sha256": envelope.digest(data),
    }
    assert not (york.folder / "copies").exists()


class Valued(NamedTuple):
    value: int


def test_names_are_found_by_their_checksums(tmp_path: Path) -> None:
    """Those of a NamedTuple begin with a dot in a path, the only leaf has none; a worker learns names on the way."""
    worker = StandIn()
    worker.fields = ()
    york = site(tmp_path, worker)
    for tree in ({"gradient": np.ones(2)}, Count(1, 2, 3), np.float32(1), Valued(1)):
        worker.fields = tuple(field.name for field in wire.fields(tree))
        ask(york, payload=wire.encode(tree))
    worker.fields = ()
    ask(york, payload=wire.encode({"unheard": np.ones(2)}))
    ask(york, payload=b"no wire")
    ask(york, payload=wire.encode(dict(enumerate(range(120)))))
    found = [line["fields"] for line in audit.lines(york.folder / "audit.jsonl")]
    assert found[0] == ["['gradient'] float64[2]"]
    assert found[1] == ["rounds int32[]", "messages int32[]", "points int32[]"]
    assert found[2] == ["value float32[]"]
    assert found[3] == ["value int32[]"]
    assert found[4][0].startswith("#") and found[4][0].endswith(" float64[2]")
    assert found[5] == ["not of the wire codec"]
    assert len(found[6]) == 101 and found[6][-1] == "and 20 more"


def test_copies_on_request_are_what_left(tmp_path: Path) -> None:
    york = site(tmp_path, policy=Policy(copies=True))
    replies = [york.handle(envelope.pack(request(round=n))) for n in (1, 2)]
    copies = {path.stem: path.read_bytes() for path in (york.folder / "copies").iterdir()}
    assert copies == {envelope.digest(reply): reply for reply in replies}
    assert [line["sha256"] for line in audit.lines(york.audit.path)] == [envelope.digest(reply) for reply in replies]


def test_files_are_for_their_owner_only(tmp_path: Path) -> None:
    york = site(tmp_path, policy=Policy(copies=True))
    ask(york)
    york.handle(b"nonsense")
    assert stat.S_IMODE(york.folder.stat().st_mode) == 0o700
    for path in [york.folder / "audit.jsonl", york.folder / "site.log", *(york.folder / "copies").iterdir()]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_log_that_was_moved_away_begins_anew(tmp_path: Path) -> None:
    york = site(tmp_path)
    ask(york)
    os.replace(york.audit.path, tmp_path / "kept")
    ask(york, round=2)
    assert [line["round"] for line in audit.lines(york.audit.path)] == [2]


def test_the_silos_own_log_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "MOST_LOG", 10_000)
    log = audit.Log(tmp_path)
    for _ in range(40):
        log.note("\ud800" + 100_000 * "x")
    assert {path.name for path in tmp_path.iterdir()} == {"site.log", "site.log.1"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * (10_000 + audit.MOST_TEXT + 100)


def noted(folder: Path, rounds: int, request: str) -> Counts:
    made = Counts(folder)
    with made.held():
        made.note("asthma", Count(rounds, rounds), RUN, request)
    return made


def known(folder: Path) -> tuple[Count, list[str]]:
    """What a process that starts now knows."""
    found = Counts(folder)
    with found.held():
        return found.of("asthma"), found._answered.get(RUN, [])


@pytest.mark.parametrize("lines", [1, 3, 1000], ids=["file each time", "file at times", "journal"])
def test_counts_are_known_to_the_next_process_at_any_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    monkeypatch.setattr(counts, "MOST_LINES", lines)
    for number in range(1, 12):
        noted(tmp_path, number, f"request {number}")
        assert known(tmp_path) == (
            Count(number, number),
            [f"request {n}" for n in range(max(1, number - 7), number + 1)],
        )


def test_a_kill_between_the_file_and_its_journal_counts_nothing_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted(tmp_path, 1, "a")
    noted(tmp_path, 2, "b")
    journal = (tmp_path / "counts.journal").read_bytes()
    monkeypatch.setattr(counts, "MOST_LINES", 1)
    noted(tmp_path, 3, "c")
    (tmp_path / "counts.journal").write_bytes(journal)  # as if it had not been emptied
    assert known(tmp_path) == (Count(3, 3), ["a", "b", "c"])


def test_a_journal_cut_off_by_a_loss_of_power_is_read_up_to_there(tmp_path: Path) -> None:
    for number, request_ in enumerate("abc", start=1):
        noted(tmp_path, number, request_)
    path = tmp_path / "counts.journal"
    path.write_bytes(path.read_bytes()[:-5])
    assert known(tmp_path) == (Count(2, 2), ["a", "b"])
    noted(tmp_path, 3, "d")
    assert known(tmp_path) == (Count(3, 3), ["a", "b", "d"])


@pytest.mark.parametrize("name", ["counts.json", "counts.journal"])
def test_damaged_counts_are_told_to_the_owner_and_nothing_is_answered(tmp_path: Path, name: str) -> None:
    york = site(tmp_path)
    ask(york), ask(york, round=2)
    (york.folder / name).write_text("{}\n")
    with pytest.raises(ValueError, match=rf"{name}' is damaged, so it is not known how much .* remove it"):
        site(tmp_path)
    assert ask(york, round=3).body == {"kind": "ValueError", "why": ""}, "a running one notices, too"


def test_runs_and_requests_that_are_remembered_are_few(tmp_path: Path) -> None:
    made = Counts(tmp_path)
    for number in range(600):
        with made.held():
            made.note("asthma", Count(number, number), f"{number:016x}", "0" * 64)
    told = json.loads((tmp_path / "counts.json").read_text())
    assert len(told["answered"]) == counts.REMEMBERED
    assert (tmp_path / "counts.journal").stat().st_size < counts.MOST_LINES * 200


def test_two_sites_of_one_folder_count_together_and_so_do_threads(tmp_path: Path) -> None:
    """As `silo-step` beside a running silo: none of the answers goes uncounted."""
    sites = [site(tmp_path), site(tmp_path)]
    threads = [
        threading.Thread(target=lambda k=k: [ask(sites[k % 2], round=100 * k + n) for n in range(20)]) for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in sites:
        with one.counts.held():
            assert one.counts.of("asthma") == Count(rounds=80, messages=80)
    assert len(audit.lines(sites[0].audit.path)) == 80
