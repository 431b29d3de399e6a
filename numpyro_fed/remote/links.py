"""One connection between the server and a silo: who is at the other end, and frames of bytes in both directions.

Both ends hold a secret of 32 bytes, of this silo alone. Each proves that it does by an HMAC of the other's fresh random
bytes, so nothing that was heard once can be said again; a key of this connection is made of both::

    server -> silo    "NFT1", 32 random bytes a
    silo -> server    32 random bytes b, HMAC(secret, "silo" a b name), length of the name, name
    server -> silo    HMAC(secret, "server" a b name)

Then come frames, each with its number and an HMAC under the connection's key: changed, repeated or reordered ones are
refused. That is authenticity, not secrecy: for secrecy the socket is TLS, or runs in a tunnel. Nothing is unpickled,
and a frame's length is compared with the limit before room is made for it; room is made as bytes come.
"""

import hashlib
import hmac
import os
import select
import socket
import ssl
import struct
import time

MAGIC = b"NFT1"
RANDOM = 32
TAG = 32
MOST_NAME = 200  # bytes
FRAME = struct.Struct("<QQ")  # length of what follows the head; which request it is of, or answers
HEAD = FRAME.size + TAG
CHUNK = 1 << 18
HANDSHAKE = 10.0  # seconds

Socket = socket.socket  # or an SSLSocket, which is one


class LinkError(ConnectionError):
    """The other end is not who it should be, or sends what is no frame."""


class Link:
    """Frames over a socket whose ends know each other. Sends and receives what it can and does not wait."""

    def __init__(self, sock: Socket, name: str, session: bytes, ours: bytes, theirs: bytes, most: int) -> None:
        self.name, self.most = name, most
        self.sent = self.received = 0  # bytes, with all that a frame needs
        self._sock, self._keys = sock, (session + ours, session + theirs)
        self._counts = [0, 0]  # frames sent and received
        self._outgoing = memoryview(b"")
        self._incoming = bytearray()
        self._expected: tuple[int, int, bytes] | None = None  # length, request and tag of the frame that is coming
        sock.setblocking(False)

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    @property
    def sending(self) -> bool:
        """Something waits for the socket to take it."""
        return bool(self._outgoing)

    def send(self, request: int, data: bytes) -> None:
        """Put a frame on its way, behind those before it."""
        head = FRAME.pack(len(data), request)
        self._outgoing = memoryview(b"".join((self._outgoing, head, self._tag(0, head, data), data)))
        self.flush()

    def flush(self) -> None:
        """Send on, as much as the socket takes."""
        while self._outgoing:
            try:
                taken = self._sock.send(self._outgoing)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            self._outgoing = self._outgoing[taken:]
            self.sent += taken

    def receive(self) -> tuple[int, bytes] | None:
        """The next frame (request, data), or None while it is not all there.

        Raises:
            EOFError: the other end is gone.
            LinkError: what came is no frame of the other end's.
        """
        while True:
            want = HEAD if self._expected is None else self._expected[0]
            while len(self._incoming) < want:
                try:
                    part = self._sock.recv(min(CHUNK, want - len(self._incoming)))
                except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    return None
                if not part:
                    raise EOFError(f"{self.name} has gone")
                self._incoming += part
                self.received += len(part)
            found, self._incoming = bytes(self._incoming), bytearray()
            if self._expected is not None:
                length, request, tag = self._expected
                self._expected = None
                if not hmac.compare_digest(tag, self._tag(1, FRAME.pack(length, request), found)):
                    raise LinkError(f"a frame of {self.name} was changed on its way, or is not its own")
                return request, found
            length, request = FRAME.unpack_from(found)
            if length > self.most:
                raise LinkError(f"{self.name} sends {length} bytes, and at most {self.most} are taken")
            self._expected = length, request, found[FRAME.size :]

    def wait(self, seconds: float | None = None) -> None:
        """Until there is something to do, at most so long."""
        pending = getattr(self._sock, "pending", lambda: 0)()
        if not pending:
            select.select([self], [self] if self.sending else [], [], seconds)

    def _tag(self, direction: int, head: bytes, data: bytes) -> bytes:
        number = self._counts[direction]
        self._counts[direction] += 1
        made = hmac.new(self._keys[direction], number.to_bytes(8, "little") + head, hashlib.sha256)
        made.update(data)
        return made.digest()


def greet_silo(sock: Socket, secrets: dict[str, bytes], most: int) -> Link:
    """The server's half of the handshake: which silo is it?"""
    deadline = time.monotonic() + HANDSHAKE
    a = os.urandom(RANDOM)
    sock.sendall(MAGIC + a)
    b, proof, length = (_exactly(sock, number, deadline) for number in (RANDOM, TAG, 1))
    raw = _exactly(sock, length[0], deadline)
    name = raw.decode("utf-8", "replace")
    secret = secrets.get(name) or os.urandom(RANDOM)  # unknown names fail as wrong secrets do
    if not hmac.compare_digest(proof, _proof(secret, b"silo", a, b, raw)):
        raise LinkError(f"somebody who calls himself {name[:50]!r} does not have that silo's key")
    sock.sendall(_proof(secret, b"server", a, b, raw))
    return Link(sock, name, _proof(secret, b"session", a, b, raw), b"server", b"silo", most)


def greet_server(sock: Socket, name: str, secret: bytes, most: int) -> Link:
    """The silo's half of the handshake: is it the server whose secret we share?"""
    deadline = time.monotonic() + HANDSHAKE
    if _exactly(sock, len(MAGIC), deadline) != MAGIC:
        raise LinkError("whoever listens there is no server of numpyro_fed")
    a, b, raw = _exactly(sock, RANDOM, deadline), os.urandom(RANDOM), name.encode()
    if len(raw) > MOST_NAME:
        raise LinkError(f"a silo's name has at most {MOST_NAME} bytes, got {len(raw)}")
    sock.sendall(b + _proof(secret, b"silo", a, b, raw) + bytes([len(raw)]) + raw)
    try:
        answer = _exactly(sock, TAG, deadline)
    except EOFError:
        raise LinkError(f"the server does not know {name!r} by this key: compare the key files of both ends") from None
    if not hmac.compare_digest(answer, _proof(secret, b"server", a, b, raw)):
        raise LinkError("whoever listens there does not have the server's key")
    return Link(sock, "the server", _proof(secret, b"session", a, b, raw), b"silo", b"server", most)


def _proof(secret: bytes, *parts: bytes) -> bytes:
    """Of the parts, each with its length before it."""
    made = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        made.update(len(part).to_bytes(2, "little") + part)
    return made.digest()


def _exactly(sock: Socket, number: int, deadline: float) -> bytes:
    """So many bytes, within the time for the whole handshake, however slowly they drip."""
    found = b""
    while len(found) < number:
        left = deadline - time.monotonic()
        if left <= 0:
            raise LinkError(f"no handshake within {HANDSHAKE:.0f} s")
        sock.settimeout(left)
        part = sock.recv(number - len(found))
        if not part:
            raise EOFError("gone in the middle of the handshake")
        found += part
    return found


def tuned(sock: Socket) -> Socket:
    """Frames go at once; a machine that has lost its power is noticed in two minutes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)
    return sock
