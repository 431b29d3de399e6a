"""Signed files: each way not to be believed has its own message."""

import sys
from pathlib import Path

import pytest
from guarded import request

from numpyro_fed.remote import envelope, signing
from numpyro_fed.remote.errors import Malformed

pytest.importorskip("cryptography")
MESSAGE = envelope.pack(request())


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """Of each name the private and the public key."""
    folder = tmp_path_factory.mktemp("keys")
    made = {}
    for name in ("server", "york", "leeds"):
        public = signing.make_keys(folder / f"{name}.key")
        assert (folder / f"{name}.key.pub").read_text().strip() == public
        made[name] = (signing.private_key(folder / f"{name}.key"), public)
    return made


def public(keys: dict[str, tuple], *names: str) -> dict[str, str]:
    return {name: keys[name][1] for name in names}


def test_what_is_signed_is_opened(keys: dict[str, tuple]) -> None:
    data = signing.signed(MESSAGE, keys["server"][0])
    assert signing.opened(data, public(keys, "server", "york")) == MESSAGE
    assert len(data) == len(MESSAGE) + 100
    assert data == signing.signed(MESSAGE, keys["server"][0]), "the same message, the same file"


def test_every_changed_byte_is_noticed(keys: dict[str, tuple]) -> None:
    data, pinned = bytearray(signing.signed(MESSAGE, keys["server"][0])), public(keys, "server")
    for place in range(len(data)):
        data[place] ^= 1
        with pytest.raises(ValueError) as error:
            signing.opened(bytes(data), pinned)
        if place >= 100 + envelope.PREAMBLE.size:  # in the message itself, behind its lengths
            assert "was changed after it was signed with the key of 'server'" in str(error.value)
        data[place] ^= 1
    signing.opened(bytes(data), pinned)


def test_a_change_with_its_checksum_repaired_is_noticed_as_well(keys: dict[str, tuple]) -> None:
    seal = signing.signed(MESSAGE, keys["server"][0])[:100]
    with pytest.raises(signing.NotSigned, match="was changed after it was signed"):
        signing.opened(seal + envelope.pack(request(round=2)), public(keys, "server"))


def test_each_way_not_to_be_believed_has_its_own_message(keys: dict[str, tuple]) -> None:
    signed = signing.signed(MESSAGE, keys["server"][0])
    with pytest.raises(signing.NotSigned, match="the message is not signed: sign it with its sender's key"):
        signing.opened(MESSAGE, public(keys, "server"))
    with pytest.raises(signing.NotSigned, match="this is no signed message of numpyro_fed"):
        signing.opened(b"PK" + signed, public(keys, "server"))
    with pytest.raises(signing.NotSigned, match=r"an unknown key, ed25519:.*: keys are known of leeds, york"):
        signing.opened(signed, public(keys, "york", "leeds"))
    with pytest.raises(signing.NotSigned, match="says it is of 'server', and it is signed with the key of 'york'"):
        signing.opened(signing.signed(MESSAGE, keys["york"][0]), public(keys, "server", "york"))
    with pytest.raises(Malformed, match="the payload is too long"):
        signing.opened(signed, public(keys, "server"), most_payload=10)
    with pytest.raises(Malformed, match="no message of numpyro_fed"):
        signing.opened(signing.signed(b"something else that is longer", keys["server"][0]), public(keys, "server"))


def test_key_files_are_their_owners(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "york.key"
    signing.make_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"there is a key in .* already"):
        signing.make_keys(path)
    assert path.read_bytes() == before
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="type chmod 600"):
        signing.private_key(path)
    path.with_name("york.key.pub").chmod(0o600)
    with pytest.raises(ValueError, match="holds no private key: make one with numpyro-fed keygen"):
        signing.private_key(path.with_name("york.key.pub"))


@pytest.mark.parametrize("text", ["", "ed25519:", 43 * "A", "ed25519:" + 42 * "A", "ed25519:" + 42 * "A" + "B", "é"])
def test_a_public_key_is_written_in_one_way(text: str) -> None:
    with pytest.raises(ValueError, match=r"a public key is written 'ed25519:' and 43 letters"):
        signing.public_key(text)


def test_messages_need_no_cryptography_signatures_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r'signed files need cryptography: pip install "numpyro-fed\[remote\]"'):
        signing.opened(b"", {})
    for path in Path(signing.__file__).parent.glob("*.py"):
        assert path.name == "signing.py" or "import cryptography" not in path.read_text().replace("from", "import")
