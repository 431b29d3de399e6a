"""Silos over TCP, on this machine; silos are threads that echo, but for one test with processes."""

import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from numpyro_fed.remote import links
from numpyro_fed.remote.config import Network
from numpyro_fed.remote.sockets import Sockets, serve
from numpyro_fed.remote.transport import Failure

KEYS = {"leeds": bytes(range(32)), "york": bytes(range(32, 64))}
ANYWHERE = ("127.0.0.1", 0)


class Echo:
    def __init__(self, name, pause=0.0):
        self.name, self.pause, self.asked = name, pause, []

    def handle(self, request):
        self.asked.append(request)
        time.sleep(self.pause)
        return self.name.encode() + b":" + request


@contextmanager
def serving(site, address, secret=None, tls=None, said=None):
    stop = threading.Event()
    told = said.append if said is not None else lambda line: None
    args = (site.name, site.handle, address, KEYS[site.name] if secret is None else secret, tls)
    thread = threading.Thread(target=serve, args=args, kwargs=dict(stop=stop, told=told), daemon=True)
    thread.start()
    try:
        yield site
    finally:
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


def test_asks_all_and_counts_bytes():
    with Sockets(ANYWHERE, KEYS) as hub, serving(Echo("leeds"), hub.address), serving(Echo("york"), hub.address):
        found = hub.ask({"leeds": b"a", "york": b"bc"}, 10)
        assert found == {"leeds": b"leeds:a", "york": b"york:bc"}
        assert hub.ask({"york": b"alone"}, 10) == {"york": b"york:alone"}
        frame = links.HEAD
        assert hub.traffic["leeds"] == (7 + frame, 1 + frame)
        with pytest.raises(ValueError, match="no silo is named 'hull'"):
            hub.ask({"hull": b""}, 1)


def test_a_round_costs_less_than_a_millisecond():
    """Of CPU time, of the server and both silos together: they are threads here, and others may keep the cores busy.

    Wall time tells whether frames wait for one another: a sender without TCP_NODELAY waits for an acknowledgement that
    comes 40 ms later.
    """
    with Sockets(ANYWHERE, KEYS) as hub, serving(Echo("leeds"), hub.address), serving(Echo("york"), hub.address):
        request = dict.fromkeys(KEYS, os.urandom(300))
        hub.ask(request, 10)
        cpu = wall = float("inf")
        for _ in range(20):
            began, spent = time.perf_counter(), time.process_time()
            for _ in range(10):
                hub.ask(request, 10)
            wall = min(wall, (time.perf_counter() - began) / 10)
            cpu = min(cpu, (time.process_time() - spent) / 10)
        assert cpu < 1e-3
        assert wall < 20e-3


def test_large_messages_pass_whole():
    data = os.urandom(20_000_000)  # many times what the kernel buffers
    with Sockets(ANYWHERE, KEYS) as hub, serving(Echo("leeds"), hub.address), serving(Echo("york"), hub.address):
        found = hub.ask({"leeds": data, "york": b"small"}, 30)
        assert found["leeds"] == b"leeds:" + data and found["york"] == b"york:small"


def test_too_large_a_reply_is_refused_before_it_is_read():
    with Sockets(ANYWHERE, KEYS, most=1000) as hub, serving(Echo("leeds"), hub.address):
        found = hub.ask({"leeds": b"x" * 1000}, 10)["leeds"]
        assert found == Failure("malformed", "leeds sends 1006 bytes, and at most 1000 are taken")
        assert hub.ask({"leeds": b"x"}, 10)["leeds"] == b"leeds:x"  # it has come back
        assert hub.traffic["leeds"][0] < 1000


def test_who_is_not_there_or_slow_is_named_and_a_late_reply_is_no_answer():
    with Sockets(ANYWHERE, KEYS) as hub, serving(Echo("leeds", pause=0.6), hub.address):
        found = hub.ask({"leeds": b"first", "york": b"first"}, 0.4)
        assert found["york"] == Failure("lost", "not connected, and did not come back within 0.4 s")
        assert found["leeds"] == Failure("timeout", "no answer within 0.4 s")
        assert hub.ask({"leeds": b"second"}, 10)["leeds"] == b"leeds:second"


def test_a_silo_that_comes_late_is_asked():
    with Sockets(ANYWHERE, KEYS) as hub:
        found = {}
        asking = threading.Thread(target=lambda: found.update(hub.ask({"york": b"early"}, 20)))
        asking.start()
        time.sleep(0.2)
        with serving(Echo("york"), hub.address):
            asking.join(20)
        assert found == {"york": b"york:early"}


def test_silos_wait_for_a_server_that_restarts():
    said = []
    with Sockets(ANYWHERE, KEYS) as hub:
        address = hub.address
        site = Echo("york")
        context = serving(site, address, said=said)
        context.__enter__()
        assert hub.ask({"york": b"1"}, 10)["york"] == b"york:1"
    time.sleep(0.3)
    with Sockets(address, KEYS) as hub:
        assert hub.ask({"york": b"2"}, 20)["york"] == b"york:2"
        context.__exit__(None, None, None)
    assert sum(line.startswith("connected") for line in said) == 2


def test_a_wrong_key_is_refused_at_both_ends():
    heard, said = [], []
    with (
        Sockets(ANYWHERE, KEYS, told=heard.append) as hub,
        serving(Echo("york"), hub.address, KEYS["leeds"], said=said),
    ):
        assert hub.ask({"york": b"?"}, 1.0)["york"].kind == "lost"
    assert any("does not have that silo's key" in line for line in heard)
    assert any("compare the key files of both ends" in line for line in said)
    assert sum("compare the key files" in line for line in said) == 1  # said once, tried often


def test_a_stranger_who_says_nothing_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(links, "HANDSHAKE", 0.5)
    heard = []
    with Sockets(ANYWHERE, KEYS, told=heard.append) as hub:
        with socket.create_connection(hub.address), serving(Echo("york"), hub.address):
            assert hub.ask({"york": b"1"}, 10)["york"] == b"york:1"
            time.sleep(0.7)
    assert any("refused" in line for line in heard)


@pytest.mark.parametrize("what", ["changed", "repeated", "another way"])
def test_frames_are_the_other_ends_own(what):
    a, b = socket.socketpair()
    made = lambda sock, ours, theirs: links.Link(sock, "york", b"session", ours, theirs, 1000)
    sender, receiver = made(a, b"server", b"silo"), made(b, b"silo", b"server")
    sender.send(1, b"hello")
    assert receiver.receive() == (1, b"hello")
    raw = links.FRAME.pack(5, 2)
    other = (
        sender
        if what == "changed"
        else made(a, *((b"server", b"silo") if what == "repeated" else (b"silo", b"server")))
    )
    if what == "another way":
        other._tag(0, b"", b"")  # so that its number is the expected one
    tag = other._tag(0, raw, b"hellO" if what == "changed" else b"hello")
    a.send(raw + tag + b"hello")
    with pytest.raises(links.LinkError, match="changed on its way, or is not its own"):
        receiver.receive()
    sender.close(), receiver.close()


def certificates(folder):
    """An authority and a certificate of 127.0.0.1, by openssl."""
    run = lambda *args: subprocess.run(["openssl", *args], cwd=folder, check=True, capture_output=True)
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    usage = ("-addext", "keyUsage=critical,keyCertSign")
    run("req", "-x509", *curve, *usage, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority")
    for name in ("server", "york"):
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "ext").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid")
        files = ("-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", f"{name}.pem")
        run("x509", "-req", *files, "-days", "2", "-extfile", "ext")


def test_tls(tmp_path):
    try:
        certificates(tmp_path)
    except FileNotFoundError:
        pytest.skip("no openssl to make certificates with")
    file = lambda name: tmp_path / name
    ends = {
        name: Network(ANYWHERE, file("ca.pem"), file(f"{name}.pem"), file(f"{name}.key")) for name in ("server", "york")
    }
    data, said = os.urandom(3_000_000), []
    with Sockets(ANYWHERE, KEYS, ends["server"].tls(True)) as hub:
        with serving(Echo("york"), hub.address, tls=ends["york"].tls(False)):
            for _ in range(3):
                assert hub.ask({"york": data}, 20)["york"] == b"york:" + data
        plain = Network(ANYWHERE, file("ca.pem")).tls(False)  # shows no certificate
        with serving(Echo("york"), hub.address, tls=plain, said=said):
            assert hub.ask({"york": b"?"}, 1.0)["york"].kind == "lost"
    assert said and not isinstance(ends["york"].tls(False), type(None))
    assert ends["york"].tls(False).minimum_version is ssl.TLSVersion.TLSv1_3


SILO = """
import sys
from numpyro_fed.remote.sockets import serve
serve("york", lambda request: b"york:" + request, ("127.0.0.1", int(sys.argv[1])), bytes(range(32, 64)))
"""


@pytest.mark.slow
def test_a_killed_process_is_asked_again():
    with Sockets(ANYWHERE, KEYS) as hub:
        start = lambda: subprocess.Popen([sys.executable, "-c", SILO, str(hub.address[1])])
        silo = start()
        assert hub.ask({"york": b"1"}, 60)["york"] == b"york:1"
        silo.kill()
        silo.wait()
        silo = start()
        assert hub.ask({"york": b"2"}, 60)["york"] == b"york:2"
        silo.kill()
        silo.wait()


def test_to_close_twice_is_no_error():
    hub = Sockets(ANYWHERE, KEYS)
    hub.close()
    hub.close()
    with pytest.raises(OSError):
        socket.create_connection(hub.address, timeout=5)
