"""The server takes no answer that is not one."""

from pathlib import Path
from typing import Any

import pytest
from guarded import NUMBERS, RUN, SOFTWARE, STUDY, StandIn, site

from numpyro_fed.remote import envelope
from numpyro_fed.remote.policy import Policy
from numpyro_fed.remote.post import Post, Traffic
from numpyro_fed.remote.transport import Direct, Failure

WORK = ("work", {"phase": "rounds", "round": 1}, NUMBERS)


class Tampering(Direct):
    """A transport that changes replies on the way."""

    def __init__(self, silos: dict, change: Any) -> None:
        super().__init__(silos)
        self.change = change

    def ask(self, requests: Any, timeout: float) -> dict[str, Any]:
        return {name: self.change(name, reply) for name, reply in super().ask(requests, timeout).items()}


def post(transport: Direct, **changed: Any) -> Post:
    return Post(transport, **{"study": STUDY, "run": RUN, "software": SOFTWARE, **changed})


def changed(**fields: Any) -> Any:
    """A reply with other fields, written as the protocol wants it."""
    return lambda name, reply: envelope.pack(envelope.unpack(reply)._replace(**fields))


def heard(tmp_path: Path, change: Any = lambda name, reply: reply, **settings: Any) -> Any:
    transport = Tampering({"york": site(tmp_path).handle}, change)
    return post(transport, **settings).ask({"york": WORK}, timeout=1.0)["york"]


def test_answers_come_by_name_with_their_traffic(tmp_path: Path) -> None:
    silos = {name: site(tmp_path / name, StandIn(name)).handle for name in ("york", "leeds")}
    sent: list[dict[str, bytes]] = []

    class Listening(Direct):
        def ask(self, requests: Any, timeout: float) -> dict[str, Any]:
            replies = super().ask(requests, timeout)
            sent.extend([dict(requests), replies])
            return replies

    server = post(Listening(silos))
    assert server.ask({"leeds": WORK, "york": WORK}, timeout=1.0) == {
        "leeds": ({"round": 1}, NUMBERS),
        "york": ({"round": 1}, NUMBERS),
    }
    server.ask({"york": WORK}, timeout=1.0)
    assert server.traffic["leeds"] == Traffic(up=len(sent[1]["leeds"]), down=len(sent[0]["leeds"]))
    assert server.traffic["york"] == Traffic(up=2 * len(sent[1]["york"]), down=2 * len(sent[0]["york"]))


def test_a_restarted_server_asks_in_the_same_bytes(tmp_path: Path) -> None:
    """So that a reply which came while it was away still answers."""
    kept: list[bytes] = []
    transport = Tampering({"york": site(tmp_path).handle}, lambda name, reply: kept.append(reply) or reply)
    first = post(transport)
    first.ask({"york": ("hello", {}, b"")}, timeout=1.0)
    first.ask({"york": WORK}, timeout=1.0)
    restarted = post(Direct({"york": lambda request: kept[1]}))
    assert restarted.ask({"york": WORK}, timeout=1.0)["york"] == ({"round": 1}, NUMBERS)


OTHER = 64 * "f"
TAMPERED = {
    "of another silo": (changed(sender="leeds"), "this reply is of 'leeds'"),
    "for another": (changed(recipient="leeds"), "this is a request, not a reply"),
    "a request": (changed(answers=""), "this is a request, not a reply"),
    "of another run": (changed(run=16 * "f"), f"its reply belongs to the run {16 * 'f'}, and this is {RUN}"),
    "of another run, kept": (changed(run=16 * "f", answers=OTHER), f"its reply belongs to the run {16 * 'f'}"),
    "of another study": (changed(study=OTHER), f"its reply is of the study {12 * 'f'}..., and this is {STUDY[:12]}..."),
    "of other software": (changed(software="jax 0.1"), f"its reply was made with jax 0.1, and this is {SOFTWARE}"),
    "of another type": (changed(type="hello"), "its reply is of type 'hello', and it was asked 'work'"),
    "of another request": (changed(answers=OTHER), "its reply answers another request"),
    "changed byte": (lambda n, r: r[:-1] + bytes([r[-1] ^ 1]), "its reply cannot be read: the message is damaged"),
    "cut off": (lambda n, r: r[:-1], "its reply cannot be read: the message is truncated"),
    "nothing": (lambda n, r: b"", "its reply cannot be read: the message is truncated: got 0 bytes"),
}


@pytest.mark.parametrize("which", TAMPERED)
def test_what_is_no_reply_to_this_request_is_malformed_and_says_why(tmp_path: Path, which: str) -> None:
    change, told = TAMPERED[which]
    found = heard(tmp_path, change)
    assert isinstance(found, Failure)
    assert found.kind == "malformed"
    assert told in found.told


def test_a_reply_that_was_kept_is_none_to_the_next_request(tmp_path: Path) -> None:
    kept: list[bytes] = []
    transport = Tampering({"york": site(tmp_path).handle}, lambda name, reply: kept.append(reply) or kept[0])
    server = post(transport)
    assert server.ask({"york": WORK}, 1.0)["york"] == ({"round": 1}, NUMBERS)
    assert server.ask({"york": ("work", {"phase": "rounds", "round": 2}, NUMBERS)}, 1.0)["york"] == Failure(
        "malformed", "its reply answers another request: it was sent before, or the request was changed on the way"
    )


def test_replies_of_two_silos_cannot_be_swapped(tmp_path: Path) -> None:
    silos = {name: site(tmp_path / name, StandIn(name)).handle for name in ("york", "leeds")}

    class Swapping(Direct):
        def ask(self, requests: Any, timeout: float) -> dict[str, Any]:
            replies = super().ask(requests, timeout)
            return dict(zip(replies, reversed(replies.values()), strict=True))

    found = post(Swapping(silos)).ask({"york": WORK, "leeds": WORK}, 1.0)
    assert found["york"] == Failure("malformed", "this reply is of 'leeds'")
    assert found["leeds"] == Failure("malformed", "this reply is of 'york'")


def test_a_request_changed_on_the_way_has_no_answer(tmp_path: Path) -> None:
    york = site(tmp_path)
    damage = lambda request: york.handle(request[:-1] + b"?")
    other = lambda request: york.handle(
        envelope.pack(envelope.unpack(request)._replace(body={"phase": "rounds", "round": 9}))
    )
    for change in (damage, other):
        found = post(Direct({"york": change})).ask({"york": WORK}, 1.0)["york"]
        assert isinstance(found, Failure) and "the request was changed on the way" in found.told


def test_a_long_payload_is_not_taken(tmp_path: Path) -> None:
    found = heard(tmp_path, most_payload=50)
    assert found == Failure(
        "malformed",
        f"its reply cannot be read: the payload is too long: it says {len(NUMBERS)} bytes, expected at most 50",
    )


def test_failures_of_the_transport_pass_and_silence_is_one() -> None:
    class Silent(Direct):
        def ask(self, requests: Any, timeout: float) -> dict[str, Any]:
            return {"york": Failure("timeout", "no answer within 1 s")}

    found = post(Silent({})).ask({"york": WORK, "leeds": WORK}, 1.0)
    assert found["york"] == Failure("timeout", "no answer within 1 s")
    assert found["leeds"] == Failure("lost", "the transport brought nothing of it")


def test_kinds_tell_who_must_do_something(tmp_path: Path) -> None:
    """The owner of the silo, whoever installed it, or nobody but its own log."""
    york = Direct({"york": site(tmp_path, policy=Policy(phases=("rounds",))).handle})
    check = ("work", {"phase": "check", "round": 1}, b"")
    assert post(york).ask({"york": check}, 1.0)["york"] == Failure("refused", "its policy allows no check")
    for field, value, told in (("study", OTHER, "the study files differ"), ("software", "jax 0.1", "other software")):
        found = post(york, **{field: value}).ask({"york": WORK}, 1.0)["york"]
        assert isinstance(found, Failure) and found.kind == "mismatch" and told in found.told
    failing = Direct({"york": site(tmp_path, StandIn(fails=lambda: 1 / 0)).handle})
    assert post(failing).ask({"york": WORK}, 1.0)["york"] == Failure("error", "ZeroDivisionError")


@pytest.mark.parametrize("body", [{}, {"kind": 7, "why": []}, {"kind": "\x1b[31m\n", "why": 900_000 * "x"}])
def test_what_a_hostile_silo_says_is_cut_to_what_a_log_may_hold(tmp_path: Path, body: dict) -> None:
    found = heard(tmp_path, changed(type="error", body=body))
    assert isinstance(found, Failure) and found.kind == "error"
    assert found.told and len(found.told) < 1000 and found.told.isprintable()


def test_an_error_must_answer_the_request_as_well(tmp_path: Path) -> None:
    """Else an old refusal could be used to drive a silo out of a run."""
    body = {"kind": "PolicyRefused", "why": "its policy does not allow this study"}
    found = heard(tmp_path, changed(type="error", answers=OTHER, body=body))
    assert isinstance(found, Failure) and found.kind == "malformed"
