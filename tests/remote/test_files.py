"""Runs by files: what is asked, brought back, refused and read again by the next process."""

import hashlib
import os
import shutil

import pytest

from numpyro_fed.remote import envelope, files
from numpyro_fed.remote.envelope import Envelope
from numpyro_fed.remote.files import Files, NotAReply, Waiting
from numpyro_fed.remote.post import Post
from numpyro_fed.remote.transport import Failure

STUDY, RUN = 64 * "a", 16 * "1"
NAMES = ("leeds", "york")


def seal(data):
    """Stands for a signature: tells that bytes are whole."""
    return hashlib.sha256(data).digest() + data


def unseal(data):
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise ValueError("the message was changed")
    return data[32:]


def handle(name, fails=()):
    """A silo that says who it is, what it was asked and how many bytes came with it."""

    def answer(request):
        asked = envelope.unpack(request)
        said = {"of": name, "to": asked.type, "number": asked.body.get("number")}
        silent = files.says_nothing(asked)
        kind, body = ("error", {"kind": "MemoryError", "why": ""}) if asked.type in fails else (asked.type, said)
        reply = Envelope(
            kind, asked.run, asked.sequence, name, "server", asked.study, asked.software, envelope.digest(request),
            {} if silent and kind != "error" else body, b"",
        )  # fmt: skip
        return envelope.pack(reply)

    return answer


def server(folder, run=RUN, lost=()):
    transport = Files(NAMES, folder / "run", folder / "requests", seal, unseal, lost)
    return transport, Post(transport, STUDY, run)


def carry(folder, names=NAMES, fails=()):
    """To the silos and back; what was carried is gone from the stick."""
    for name in names:
        for path in files.waiting_for(folder / "requests", name):
            reply = folder / "replies" / (path.name.removesuffix(files.REQUEST) + files.REPLY)
            files.answer(handle(name, fails), path, reply, seal, unseal)
    shutil.rmtree(folder / "requests")


def bring(folder, transport):
    return [transport.absorb(path) for path in sorted((folder / "replies").glob("*"))]


def run(post, rounds=3):
    """Stands for a method: what it asks depends on what it heard."""
    heard = [post.ask({name: ("hello", {}, b"") for name in NAMES}, 1)]
    post.ask({name: ("agree", {"survey": 1}, b"") for name in NAMES}, 1)
    post.ask({name: ("work", {"do": "start"}, b"") for name in NAMES}, 1)
    for number in range(rounds):
        told = hashlib.sha256(repr(heard).encode()).hexdigest()
        heard.append(
            post.ask({name: ("work", {"do": "step", "number": number, "told": told}, b"") for name in NAMES}, 1)
        )
    post.ask({name: ("end", {}, b"fit") for name in NAMES}, 1)
    return heard


def test_a_run_is_a_sequence_of_processes(tmp_path):
    trips = 0
    while True:
        transport, post = server(tmp_path)
        if trips:
            bring(tmp_path, transport)
        try:
            heard = run(post)
            break
        except Waiting as waiting:
            assert waiting.names == NAMES
        trips += 1
        # agree and start are not waited for: they travel with the first step
        assert transport.written == {2: 6}.get(trips, 2)
        carry(tmp_path)
    assert trips == 4  # hello, three steps
    assert [one["york"][0]["number"] for one in heard] == [None, 0, 1, 2]
    transport.close()
    assert transport.written == 2  # the end, which needs no reply
    assert transport.traffic["york"][0] > 0


def test_those_who_answered_are_not_asked_again(tmp_path):
    with pytest.raises(Waiting):
        run(server(tmp_path)[1])
    carry(tmp_path, ["leeds"])
    transport, post = server(tmp_path)
    bring(tmp_path, transport)
    with pytest.raises(Waiting) as waiting:
        run(post)
    assert waiting.value.names == ("york",)
    assert [files.silo_of(path) for path in (tmp_path / "requests").iterdir()] == ["york"]


def test_an_error_in_what_was_not_waited_for_is_told_in_its_place(tmp_path):
    with pytest.raises(Waiting):
        run(server(tmp_path)[1])
    carry(tmp_path)
    for _ in range(2):  # the second time with the answers to what was presumed
        transport, post = server(tmp_path)
        bring(tmp_path, transport)
        with pytest.raises(Waiting):
            run(post)
        carry(tmp_path, fails=("agree",))
    transport, post = server(tmp_path)
    bring(tmp_path, transport)
    post.ask({name: ("hello", {}, b"") for name in NAMES}, 1)
    found = post.ask({name: ("agree", {"survey": 1}, b"") for name in NAMES}, 1)
    assert found["york"] == Failure("error", "MemoryError")
    assert transport.forget_errors("york") == 1 and transport.forget_errors("york") == 0
    found = post.ask({name: ("agree", {"survey": 1}, b"") for name in NAMES}, 1)
    assert found["york"] == ({}, b"")  # presumed again


def test_who_is_lost_stays_lost_until_asked_again(tmp_path):
    with pytest.raises(Waiting):
        run(server(tmp_path)[1])
    shutil.copytree(tmp_path / "requests", tmp_path / "copies")
    carry(tmp_path, ["leeds"])
    ask = {name: ("hello", {}, b"") for name in NAMES}
    transport, post = server(tmp_path, lost=("york",))
    bring(tmp_path, transport)
    assert post.ask(ask, 1)["york"].kind == "lost"
    transport, post = server(tmp_path)  # the next process is not told so, and knows
    assert post.ask(ask, 1)["york"].kind == "lost"
    shutil.copytree(tmp_path / "copies", tmp_path / "requests")
    carry(tmp_path, ["york"])
    with pytest.raises(NotAReply, match="round --again 'york'"):
        bring(tmp_path, transport)
    assert transport.forget_errors("york") == 1
    bring(tmp_path, transport)
    assert post.ask(ask, 1)["york"][0]["of"] == "york"


@pytest.fixture
def answered(tmp_path):
    """A run that has asked, and the replies to it."""
    transport, post = server(tmp_path)
    with pytest.raises(Waiting):
        post.ask({name: ("hello", {}, b"") for name in NAMES}, 1)
    shutil.copytree(tmp_path / "requests", tmp_path / "copies")
    carry(tmp_path)
    return tmp_path, transport


def test_what_is_no_reply_is_refused_and_says_why(answered):
    folder, transport = answered
    leeds, york = sorted((folder / "replies").iterdir())
    whole = york.read_bytes()
    york.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="was changed"):
        transport.absorb(york)
    request = min((folder / "copies").iterdir())
    with pytest.raises(NotAReply, match="is a request, not a reply"):
        transport.absorb(request)
    reply = envelope.unpack(whole[32:])
    for other, told in (
        (reply._replace(answers=64 * "0"), "answers nothing that was asked in this run"),
        (reply._replace(sender="leeds"), "is of 'leeds', and answers a request to 'york'"),
    ):
        york.write_bytes(seal(envelope.pack(other)))
        with pytest.raises(NotAReply, match=told):
            transport.absorb(york)
    york.write_bytes(whole)
    assert transport.absorb(york) == "york" and transport.absorb(york) == "york"  # twice is once
    york.write_bytes(seal(envelope.pack(reply._replace(body={"of": "york", "other": 1}))))
    with pytest.raises(NotAReply, match="has answered this request before, and otherwise"):
        transport.absorb(york)
    assert transport.absorb(leeds) == "leeds"
    with open(york, "wb") as file:
        os.truncate(file.fileno(), files.MOST + 1)  # takes no room on the disk
    with pytest.raises(NotAReply, match="and a message at most"):
        transport.absorb(york)


def test_signed_files(answered, tmp_path):
    pytest.importorskip("cryptography")
    from numpyro_fed.remote.signing import make_keys

    folder, _ = answered
    public = {name: make_keys(tmp_path / f"{name}.sign") for name in (*NAMES, "server")}
    reply = tmp_path / "york.reply"
    request = tmp_path / "york.request"
    plain = unseal(files.waiting_for(folder / "copies", "york")[0].read_bytes())
    request.write_bytes(files.signer(tmp_path / "server.sign")(plain))
    believe = files.believer({"server": public["server"]})
    files.answer(handle("york"), request, reply, files.signer(tmp_path / "york.sign"), believe)
    assert unseal(seal(files.believer(public)(reply.read_bytes())))
    for name, told in (("leeds", "signed with the key of 'leeds'"), ("york", "unknown key")):
        files.answer(handle("york"), request, reply, files.signer(tmp_path / f"{name}.sign"), believe)
        known = public if name == "leeds" else {"leeds": public["leeds"]}
        with pytest.raises(ValueError, match=told):
            files.believer(known)(reply.read_bytes())
    reply.unlink()
    request.write_bytes(plain)
    with pytest.raises(ValueError, match="not signed"):
        files.answer(handle("york"), request, reply, seal, believe)
    assert not reply.exists()
