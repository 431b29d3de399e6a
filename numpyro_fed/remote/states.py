"""A silo's states, which stay in it, and their names, which the server holds in their place.

A state is named by the request that made it: the SHA-256 of that request. A step from state a is asked for as "from a,
with this broadcast", and what it leaves is named by these words. So nothing is done twice: a request that comes again
(the reply was lost, or the server goes on from its last checkpoint) is answered with the same reply and moves nothing;
another request from the same state begins where that state was. Both ends know the name without telling it.
"""

import hashlib
import json
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.engines import wire
from numpyro_fed.results import codec

PyTree = Any
NAME_BYTES = 16
_SIZES = struct.Struct("<4sIIQQ")  # magic, checksum; the lengths of the structure, of the reply and of the leaves
MAGIC = b"NFS2"


class Elsewhere(NamedTuple):
    """The server's part of silos' states: their names. Stacked over a bucket's silos, as states are."""

    name: Any  # uint8 (silos, NAME_BYTES)

    @property
    def elsewhere(self) -> bool:
        return True


def name_of(body: dict[str, Any], payload: bytes) -> str:
    """Of what a request makes: hex. What to keep of earlier states, and how to read the payload, are not part of it."""
    told = {key: value for key, value in body.items() if key not in ("keep", "like")}
    text = json.dumps(told, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(text + b"\0" + payload).hexdigest()[: 2 * NAME_BYTES]


def as_row(name: str) -> np.ndarray:
    return np.frombuffer(bytes.fromhex(name), np.uint8)


def as_name(row: Any) -> str:
    return np.asarray(row, np.uint8).tobytes().hex()


# --- trees in two parts: structure as text, numbers in wire format ----------------------------------------------------


def structure_of(tree: PyTree) -> str:
    """A tree's structure, types and shapes as JSON; numbers are arrays, as in wire format."""
    tree = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else np.zeros((), jnp.result_type(leaf)), tree)
    return json.dumps(codec.encode(tree, _shape), sort_keys=True, separators=(",", ":"))


def like_of(structure: str) -> PyTree:
    """The tree of that structure, a ``jax.ShapeDtypeStruct`` in the place of each array."""
    return codec.decode(json.loads(structure), _struct)


def _shape(leaf: Any) -> dict[str, Any]:
    return {"shape": list(np.shape(leaf)), "dtype": str(leaf.dtype)}


def _struct(note: dict[str, Any]) -> Any:
    if not isinstance(note.get("shape"), list) or not isinstance(note.get("dtype"), str):
        raise ValueError("what was sent has a leaf without shape or type")
    if note["dtype"].startswith("key<"):
        impl, words = wire.KEYS[note["dtype"]]
        return jax.eval_shape(partial(jax.random.wrap_key_data, impl=impl), _words((*note["shape"], words)))
    return jax.ShapeDtypeStruct(tuple(note["shape"]), jnp.dtype(note["dtype"]))


def _words(shape: tuple[int, ...]) -> Any:
    return jax.ShapeDtypeStruct(shape, np.uint32)


def arrays_of(data: bytes, like: PyTree) -> PyTree:
    """Bytes in wire format as JAX's arrays: float64 stays so in a float32 program."""
    with jax.enable_x64(True):
        return jax.tree.map(jnp.asarray, wire.decode(data, like))


# --- in the silo ------------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """A state, and the reply that was sent when it was made."""

    state: PyTree
    reply: bytes


class States:
    """States by name, in memory and, where there is a folder, on disk.

    A file is written under another name and renamed, so it is whole or not there. A process that is killed loses
    nothing; after a loss of power the last states may be missing or damaged, which the silo notices: a file whose
    checksum is another is none.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder, self._memory = folder, dict[str, Kept]()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str) -> Kept | None:
        found = self._memory.get(name)
        if found is None and self.folder is not None and (self.folder / name).exists():
            found = _read((self.folder / name).read_bytes())
            if found is not None:
                self._memory[name] = found
        return found

    def put(self, name: str, kept: Kept) -> None:
        self._memory[name] = kept
        if self.folder is None:
            return
        text, leaves = _text_of(kept.state), _numbers(kept.state)
        partial, content = self.folder / f".{name}", text + kept.reply + leaves
        with open(partial, "wb") as file:
            file.write(_SIZES.pack(MAGIC, zlib.crc32(content), len(text), len(kept.reply), len(leaves)))
            file.write(content)
        partial.replace(self.folder / name)

    def keep_only(self, names: set[str]) -> None:
        """Let go of all others."""
        for name in [name for name in self._memory if name not in names]:
            del self._memory[name]
        if self.folder is not None:
            for path in self.folder.iterdir():
                if path.name not in names:
                    path.unlink(missing_ok=True)


def _read(data: bytes) -> Kept | None:
    """None: the file is not whole, or damaged."""
    if len(data) < _SIZES.size:
        return None
    magic, checksum, *sizes = _SIZES.unpack_from(data)
    if magic != MAGIC or _SIZES.size + sum(sizes) != len(data):
        return None
    if zlib.crc32(memoryview(data)[_SIZES.size :]) != checksum:
        return None
    text, reply, leaves = (
        data[start : start + size] for start, size in zip(_SIZES.size + np.cumsum([0, *sizes[:-1]]), sizes, strict=True)
    )
    return Kept(_from_numbers(leaves, like_of(text.decode())), reply)


_texts: dict[Any, bytes] = {}  # structures that were written before: states of a run have few


def _text_of(state: PyTree) -> bytes:
    leaves, structure = jax.tree.flatten(state)
    known = structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
    if known not in _texts:
        if len(_texts) > 64:
            _texts.clear()
        _texts[known] = structure_of(state).encode()
    return _texts[known]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _numbers(state: PyTree) -> bytes:
    """All leaves, one after the other."""
    plain = [jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in jax.tree.leaves(state)]
    return b"".join(leaf.tobytes() for leaf in jax.device_get(plain))


def _from_numbers(data: bytes, like: PyTree) -> PyTree:
    at = 0

    def one(leaf: Any) -> Any:
        nonlocal at
        words = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        size = int(np.prod(words.shape))
        found = np.frombuffer(data, words.dtype, size, at).reshape(words.shape)
        at += found.nbytes
        own: Any = jnp.array(found, words.dtype)
        return jax.random.wrap_key_data(own, impl=wire.KEYS[str(leaf.dtype)][0]) if _is_key(leaf) else own

    with jax.enable_x64(True):
        return jax.tree.map(one, like)
