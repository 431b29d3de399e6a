"""Messages as files, signed with Ed25519: for silos that no network reaches.

=============  ================================================================
bytes          what
=============  ================================================================
4              the letters ``NFS1``
32             the signer's public key
64             signature of :data:`CONTEXT` and the SHA-256 of the rest
the rest       the message, see :mod:`numpyro_fed.remote.envelope`
=============  ================================================================

Keys are pinned: each end has the names and public keys that it believes, exchanged by hand. A message counts if it was
signed with the key of the very name that it gives as its sender. A signature tells who wrote a message and that nobody
changed it; it hides nothing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     public = make_keys(Path(folder) / "york.key")
    ...     private = private_key(Path(folder) / "york.key")
    >>> public
    'ed25519:...'
    >>> message = envelope.pack(
    ...     envelope.Envelope("hello", envelope.NO_RUN, 0, "york", "server", 64 * "0", "0.1.0", "", {}, b"")
    ... )
    >>> opened(signed(message, private), {"york": public}) == message
    True

This is the only file that needs ``cryptography``: ``pip install "numpyro-fed[remote]"``.
"""

import base64
import binascii
import hashlib
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpyro_fed.remote import envelope
from numpyro_fed.remote.envelope import MOST_PAYLOAD
from numpyro_fed.remote.errors import ToldError

MAGIC = b"NFS1"
CONTEXT = b"numpyro_fed signed message\n"  # so that nothing else that a key signs is taken for a message
PREFIX = "ed25519:"  # of a public key, written
_SEAL = struct.Struct("<4s32s64s")  # magic, public key, signature


class NotSigned(ToldError, ValueError):
    """A file without a signature, or with one that is not believed."""


def make_keys(path: Path) -> str:
    """Make a pair of keys: the private one in ``path``, for its owner's eyes, the public one in ``path`` + ``.pub``.

    Returns:
        The public key, as it is written in that file and in the other ends' settings.

    Raises:
        FileExistsError: a key is never overwritten: what was signed with it would be believed no more.
    """
    serialization, ed25519 = _cryptography()
    made = ed25519.Ed25519PrivateKey.generate()
    secret = made.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = _written(made.public_key().public_bytes_raw())
    for one in (path, _beside(path)):
        if one.exists():
            raise FileExistsError(f"there is a key in {str(one)!r} already: give another path, or move it away")
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as private:
        private.write(secret)
    _beside(path).write_text(public + "\n")
    return public


def private_key(path: Path) -> Any:
    """The private key in a file that :func:`make_keys` made.

    Raises:
        PermissionError: when others may read it.
        ValueError: when it holds no such key.
    """
    serialization, ed25519 = _cryptography()
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise PermissionError(f"others may read the private key in {str(path)!r}: type chmod 600 {path}")
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ValueError(f"{str(path)!r} holds no private key: make one with numpyro-fed keygen")
    return key


def public_key(text: str) -> bytes:
    """The 32 bytes of a public key as it is written: "ed25519:" and 43 letters.

    >>> len(public_key("ed25519:" + 43 * "A"))
    32
    """
    text = text.strip()
    try:
        raw = base64.b64decode(text.removeprefix(PREFIX) + "=", validate=True) if text.startswith(PREFIX) else b""
    except binascii.Error:
        raw = b""
    if len(raw) != 32 or _written(raw) != text:
        raise ValueError(
            f"a public key is written {PREFIX!r} and 43 letters, got {text[:60]!r}: copy the line of the .pub file "
            "that numpyro-fed keygen made"
        )
    return raw


def signed(data: bytes, private: Any) -> bytes:
    """A message with its signature.

    Args:
        data: the message, packed.
        private: of :func:`private_key`.
    """
    return _SEAL.pack(MAGIC, private.public_key().public_bytes_raw(), private.sign(_signed_part(data))) + data


def opened(data: bytes, public_keys: Mapping[str, str], most_payload: int = MOST_PAYLOAD) -> bytes:
    """The message in a signed file, if it is believed.

    Args:
        data: the file's bytes.
        public_keys: of each name that is believed, ``"server"`` or a silo's, its public key as it is written.
        most_payload: bytes that the message's payload may have.

    Raises:
        NotSigned: a ValueError that says whether there is no signature, an unknown key, a changed message, or another
            sender than signer.
        Malformed: likewise a ValueError, of what is signed and yet no message.
    """
    _, ed25519 = _cryptography()
    if data[:4] == envelope.MAGIC:
        raise NotSigned("the message is not signed: sign it with its sender's key")
    if len(data) < _SEAL.size or data[:4] != MAGIC:
        raise NotSigned("this is no signed message of numpyro_fed: it does not begin with NFS1, a key and a signature")
    envelope.total(memoryview(data)[_SEAL.size :], most_payload)
    _, raw, signature = _SEAL.unpack_from(data)
    signers = {name for name, text in public_keys.items() if public_key(text) == raw}
    if not signers:
        known = ", ".join(sorted(public_keys)) or "nobody"
        raise NotSigned(f"the message is signed with an unknown key, {_written(raw)}: keys are known of {known}")
    message = data[_SEAL.size :]
    if not _verified(ed25519, raw, signature, message):
        raise NotSigned(f"the message was changed after it was signed with the key of {sorted(signers)[0]!r}")
    sender = envelope.unpack(message, most_payload).sender
    if sender not in signers:
        raise NotSigned(
            f"the message says it is of {sender!r}, and it is signed with the key of {sorted(signers)[0]!r}"
        )
    return message


def _verified(ed25519: Any, raw: bytes, signature: bytes, message: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        ed25519.Ed25519PublicKey.from_public_bytes(raw).verify(signature, _signed_part(message))
    except InvalidSignature:
        return False
    return True


def _signed_part(data: bytes) -> bytes:
    return CONTEXT + hashlib.sha256(data).digest()


def _written(raw: bytes) -> str:
    return PREFIX + base64.b64encode(raw).decode().rstrip("=")


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".pub")


def _cryptography() -> tuple[Any, Any]:
    """Its modules of keys in files, and of Ed25519."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ImportError('signed files need cryptography: pip install "numpyro-fed[remote]"') from None
    return serialization, ed25519
