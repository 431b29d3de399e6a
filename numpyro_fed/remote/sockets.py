"""Silos over TCP: the server listens, each silo connects to it and stays.

The silo makes the connection, so that it needs no open port; whoever is lost comes back by itself and is asked again.
The protocol stands in :mod:`numpyro_fed.remote.links`.
"""

import queue
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any

from numpyro_fed.checks import format_names
from numpyro_fed.remote.envelope import MOST_HEADER, MOST_PAYLOAD
from numpyro_fed.remote.links import HANDSHAKE, Link, LinkError, greet_server, greet_silo, tuned
from numpyro_fed.remote.transport import Failure

MOST = MOST_HEADER + MOST_PAYLOAD + 16  # bytes of a message
GREETED_AT_ONCE = 32  # connections whose silo is not known yet
PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # seconds before a silo tries again; the last for ever


class Sockets:
    """The server's end of TCP: a :class:`numpyro_fed.remote.transport.Transport`.

    Args:
        address: where to listen, ``("0.0.0.0", 7433)``; port 0 takes a free one, see :attr:`address`.
        secrets: each silo's name and the 32 bytes it shares with the server.
        tls: the server's TLS, see :meth:`numpyro_fed.remote.config.Network.tls`; None: messages are authenticated but
            not secret, for a trusted network or a tunnel.
        most: bytes of a reply.
        told: is given a line when a silo comes, goes or is refused.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secrets: Mapping[str, bytes],
        tls: ssl.SSLContext | None = None,
        most: int = MOST,
        told: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.names = tuple(secrets)
        self._secrets, self._tls, self._most, self._told = dict(secrets), tls, most, told
        self._links: dict[str, Link] = {}
        self._gone: dict[str, tuple[int, int]] = dict.fromkeys(self.names, (0, 0))  # bytes over links that are closed
        self._arrived: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._asked = 0
        self._selector = selectors.DefaultSelector()
        self._bell, self._ring = socket.socketpair()  # rung by other threads when a silo has arrived
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._greeting = threading.BoundedSemaphore(GREETED_AT_ONCE)
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family, backlog=128)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, name="numpyro_fed accepts silos", daemon=True).start()

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes from and to each silo, as they crossed (without TLS and TCP)."""
        now = {name: (link.received, link.sent) for name, link in self._links.items()}
        zero = (0, 0)
        return {name: (a + now.get(name, zero)[0], b + now.get(name, zero)[1]) for name, (a, b) in self._gone.items()}

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Send to all at once and wait for all, at most ``timeout`` seconds; who comes back is asked again."""
        unknown = [name for name in requests if name not in self._secrets]
        if unknown:
            raise ValueError(f"no silo is named {unknown[0]!r}; the silos are {format_names(self.names)}")
        deadline = time.monotonic() + timeout
        self._asked += 1
        replies: dict[str, bytes | Failure] = {}
        self._welcome({})
        for name, data in requests.items():
            self._send(name, data)
        while len(replies) < len(requests):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for key, events in self._selector.select(left):
                link: Link | None = key.data
                if link is None:
                    self._welcome({name: data for name, data in requests.items() if name not in replies})
                elif link is self._links.get(link.name):  # and has not been replaced a moment ago
                    self._serve(link, events, requests, replies)
        return {name: replies[name] if name in replies else self._failure(name, timeout) for name in requests}

    def _serve(
        self, link: Link, events: int, requests: Mapping[str, bytes], replies: dict[str, bytes | Failure]
    ) -> None:
        """What a link has to be done: send on, take a reply."""
        try:
            if events & selectors.EVENT_WRITE:
                link.flush()
            while (found := link.receive()) is not None:
                request, data = found
                if request == self._asked and link.name in requests:  # a late reply is of an earlier request
                    replies[link.name] = data
            self._watch(link)
        except LinkError as error:  # would come again
            self._drop(link, str(error))
            if link.name in requests:
                replies[link.name] = Failure("malformed", str(error))
        except (EOFError, OSError) as error:
            self._drop(link, str(error) or type(error).__name__)

    def _send(self, name: str, data: bytes) -> None:
        link = self._links.get(name)
        if link is None:
            return
        try:
            link.send(self._asked, data)
            self._watch(link)
        except OSError as error:
            self._drop(link, str(error))

    def _watch(self, link: Link) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.sending else 0)
        if self._selector.get_key(link).events != events:
            self._selector.modify(link, events, link)

    def _failure(self, name: str, timeout: float) -> Failure:
        if name in self._links:
            return Failure("timeout", f"no answer within {timeout:g} s")
        return Failure("lost", f"not connected, and did not come back within {timeout:g} s")

    def _welcome(self, outstanding: Mapping[str, bytes]) -> None:
        """Take over who has arrived, and ask them what they have not answered."""
        with suppress(BlockingIOError):
            while self._bell.recv(64):
                pass
        while True:
            try:
                link = self._arrived.get_nowait()
            except queue.Empty:
                return
            if link.name in self._links:
                self._drop(self._links[link.name], "it has connected again")
            self._links[link.name] = link
            self._selector.register(link, selectors.EVENT_READ, link)
            self._told(f"{link.name} is connected")
            if link.name in outstanding:
                self._send(link.name, outstanding[link.name])

    def _drop(self, link: Link, why: str) -> None:
        self._told(f"{link.name} is lost: {why}")
        self._selector.unregister(link)
        del self._links[link.name]
        up, down = self._gone[link.name]
        self._gone[link.name] = up + link.received, down + link.sent
        link.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            if self._greeting.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(sock,), name="numpyro_fed greets", daemon=True).start()
            else:
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        """In a thread of its own: a caller who says nothing keeps nobody waiting."""
        try:
            sock.settimeout(HANDSHAKE)
            tuned(sock)
            secure = sock if self._tls is None else self._tls.wrap_socket(sock, server_side=True)
            self._arrived.put(greet_silo(secure, self._secrets, self._most))
            with suppress(BlockingIOError):  # it has been rung often enough
                self._ring.send(b"!")
        except (EOFError, OSError) as error:
            self._told(f"a connection was refused: {error or type(error).__name__}")
            sock.close()
        finally:
            self._greeting.release()

    def close(self) -> None:
        """Hang up; silos try to come back until they are stopped. Once is enough, twice no harm."""
        if self._listener.fileno() < 0:
            return
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._listener.close()
        self._welcome({})
        self._told = lambda line: None
        for link in list(self._links.values()):
            self._drop(link, "")
        self._selector.close()
        self._bell.close()
        self._ring.close()

    def __enter__(self) -> "Sockets":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def serve(
    name: str,
    handle: Callable[[bytes], bytes],
    address: tuple[str, int],
    secret: bytes,
    tls: ssl.SSLContext | None = None,
    most: int = MOST,
    told: Callable[[str], None] = lambda line: None,
    stop: threading.Event | None = None,
) -> None:
    """Answer a server's requests, for ever: when it is gone, wait for it to come back.

    Args:
        name: of the silo.
        handle: answers, as :meth:`numpyro_fed.remote.site.Site.handle` does; to the same request twice the same.
        address: of the server.
        secret: the 32 bytes that this silo shares with the server.
        tls: the silo's TLS; None: none.
        most: bytes of a request.
        told: is given a line when the connection comes and goes.
        stop: once it is set, return at the next pause.
    """
    stop = stop or threading.Event()
    tries, said = 0, ""
    while not stop.is_set():
        began = time.monotonic()
        try:
            with closing(_connect(name, address, secret, tls, most)) as link:
                said = ""
                told(f"connected to {address[0]}:{address[1]}")
                _answer(handle, link, stop)
        except (EOFError, OSError) as error:
            why = f"{address[0]}:{address[1]}: {error or type(error).__name__}"
            if why != said:  # once, not at every try
                told(f"{why}; trying again")
            said = why
        if time.monotonic() - began > PAUSES[-1]:  # two processes of one name would else drive each other out at once
            tries = 0
        stop.wait(PAUSES[min(tries, len(PAUSES) - 1)])
        tries += 1


def _connect(name: str, address: tuple[str, int], secret: bytes, tls: ssl.SSLContext | None, most: int) -> Link:
    sock = tuned(socket.create_connection(address, timeout=HANDSHAKE))
    try:
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname=address[0])
        return greet_server(sock, name, secret, most)
    except BaseException:
        sock.close()
        raise


def _answer(handle: Callable[[bytes], bytes], link: Link, stop: threading.Event) -> None:
    while not stop.is_set():
        link.wait(1.0)
        link.flush()
        while (found := link.receive()) is not None:
            request, data = found
            link.send(request, handle(data))
