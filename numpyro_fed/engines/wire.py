"""The wire codec: pytrees of arrays to bytes and back, without pickle.

Both ends know the structure of what crosses, from ``jax.eval_shape``; so the bytes carry the numbers and just enough of
the structure to notice, and to explain, that the ends disagree. All integers are little-endian, and so are the leaves.

========================  ======================================================================================
bytes                     what
========================  ======================================================================================
3                         the letters ``NFW``
1                         version of the format, 1
4                         CRC-32 of all that follows
4                         number of leaves; ``None`` counts as a leaf
6 + 8 a axis, each leaf   CRC-32 of the leaf's path (4), code of its dtype (1), number of axes (1), their sizes (8 each)
the rest                  the leaves one after the other, in C order, without gaps
========================  ======================================================================================

A checksum guards against accidents, not against an adversary: authentication belongs to the transport.

    >>> import jax, jax.numpy as jnp
    >>> step = lambda z: {"gradient": 2 * z, "num_rows": jnp.int32(3)}
    >>> like = jax.eval_shape(step, jnp.zeros(2))
    >>> data = encode(step(jnp.ones(2)))
    >>> len(data) == num_bytes(like)
    True
    >>> decode(data, like)
    {'gradient': array([2., 2.], dtype=float32), 'num_rows': array(3, dtype=int32)}

What does not fit is refused, leaf by leaf:

    >>> decode(data, jax.eval_shape(step, jnp.zeros(5)))
    Traceback (most recent call last):
    ...
    ValueError: The message has the wrong length, it is truncated: got 44 bytes, expected 56. It differs:
      leaf ['gradient']: got float32[2], expected float32[5]
"""

import math
import struct
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MAGIC = b"NFW"
VERSION = 1
MOST_TOLD = 10  # leaves of which an error speaks
_PREAMBLE = struct.Struct("<3sBI")  # magic, version, checksum of all that follows
_COUNT = struct.Struct("<I")  # number of leaves
_LEAF = struct.Struct("<IBB")  # checksum of the path, code of the dtype, number of axes; the sizes follow
# Typed keys travel as their words (uint32): the dtype's name, JAX's name for the implementation, words a key.
KEYS = {
    "key<fry>": ("threefry2x32", 2),
    "key<rbg>": ("rbg", 4),
    "key<urbg>": ("unsafe_rbg", 4),
}
# A dtype's code is its place here, so new ones go to the end.
_DTYPES = (
    "None",
    "bool",
    *("int8", "int16", "int32", "int64"),
    *("uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128"),
    *KEYS,
)


class LeafSpec(NamedTuple):
    """What both ends must agree on about one leaf."""

    path: str  # as jax.tree_util.keystr writes it: "['beta'][0]"
    dtype: str  # one of _DTYPES
    shape: tuple[int, ...]

    @property
    def header(self) -> bytes:
        """This leaf's part of the header."""
        name = zlib.crc32(self.path.encode())
        code = _DTYPES.index(self.dtype)
        return _LEAF.pack(name, code, len(self.shape)) + struct.pack(f"<{len(self.shape)}Q", *self.shape)

    @property
    def buffer(self) -> tuple[np.dtype, tuple[int, ...]]:
        """Dtype and shape of the numbers that are sent for this leaf."""
        if self.dtype == "None":
            return np.dtype(np.uint8), (0,)
        if self.dtype in KEYS:
            return np.dtype(np.uint32), (*self.shape, KEYS[self.dtype][1])
        return jnp.dtype(self.dtype), self.shape


def encode(tree: Any) -> bytes:
    """Write a pytree of arrays as bytes.

    Args:
        tree: a pytree of NumPy or JAX arrays, typed keys, numbers and ``None``. Python's own numbers take the dtype
            that JAX gives them, so that what a function returns always agrees with its ``jax.eval_shape``.

    Returns:
        bytes that :func:`decode` reads back, exactly ``num_bytes(tree)`` of them.

    Raises:
        ValueError: when a leaf has a dtype that cannot be sent; the leaf is named.
    """
    leaves, specs, _ = _flatten(tree)
    body = _header(specs) + b"".join(_to_bytes(leaf, spec) for leaf, spec in zip(leaves, specs, strict=True))
    return _PREAMBLE.pack(MAGIC, VERSION, zlib.crc32(body)) + body


def decode(data: bytes, like: Any) -> Any:
    """Read a pytree from the bytes of :func:`encode`.

    Law: ``decode(encode(tree), like=tree)`` equals ``tree`` in structure, dtypes, shapes and every bit.

    Args:
        data: the bytes.
        like: a pytree of arrays or of ``jax.ShapeDtypeStruct``, with the expected structure, shapes and dtypes.

    Returns:
        a pytree with the structure of ``like``. Its leaves are NumPy arrays, so that float64 survives where JAX's x64
        mode is off; typed keys are JAX arrays.

    Raises:
        ValueError: when the bytes are not a message, are incomplete or damaged, or when a leaf's path, shape or dtype
            differs from what ``like`` says; every such leaf is named with what was got and what was expected.
    """
    _, specs, structure = _flatten(like)
    header = _header(specs)
    expected_length = _PREAMBLE.size + len(header) + _payload_bytes(specs)

    body = _checked_body(memoryview(data), expected_length, specs)
    if body[: len(header)] != header:
        raise ValueError(f"The message does not fit the expected structure. {_explain(body, specs)}")

    leaves = []
    offset = len(header)
    for spec in specs:
        dtype, shape = spec.buffer
        size = math.prod(shape)
        leaves.append(_from_numbers(np.frombuffer(body, dtype, size, offset).reshape(shape), spec))
        offset += size * dtype.itemsize
    return jax.tree.unflatten(structure, leaves)


class Field(NamedTuple):
    """One leaf of what crosses, and the bytes that it takes, its part of the header included."""

    name: str  # "gradient['beta']"
    shape: tuple[int, ...]
    bytes: int


def fields(like: Any) -> tuple[Field, ...]:
    """What ``encode(tree)`` is made of, for any ``tree`` with these shapes and dtypes; the rest is its envelope.

    Law: their bytes sum to :func:`num_bytes`.

    >>> fields({"gradient": jax.ShapeDtypeStruct((5,), "float32")})
    (Field(name="['gradient']", shape=(5,), bytes=34), Field(name='envelope', shape=(), bytes=12))
    """
    _, specs, _ = _flatten(like)
    found = (
        Field(spec.path.removeprefix(".") or "value", spec.shape, len(spec.header) + _payload_bytes([spec]))
        for spec in specs
    )
    return *found, Field("envelope", (), _PREAMBLE.size + _COUNT.size)


class Told(NamedTuple):
    """What a message itself says of a leaf."""

    checksum: int  # CRC-32 of its path: whoever knows the path can tell that it is meant
    dtype: str
    shape: tuple[int, ...]  # of ten axes at most


def told(data: bytes, most: int) -> tuple[int, tuple[Told, ...]]:
    """How many leaves a message has, and the first ``most`` of them, for those who do not know its structure.

    >>> told(encode({"gradient": np.ones(5)}), most=10)
    (1, (Told(checksum=..., dtype='float64', shape=(5,)),))

    Raises:
        ValueError: when the bytes are not a message.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError("These bytes are not a numpyro_fed message.")
    count, leaves = _read_header(memoryview(data)[_PREAMBLE.size :], most)
    return count, tuple(Told(name, dtype, shape) for name, (dtype, shape) in leaves.items())


def num_bytes(like: Any) -> int:
    """The length of ``encode(tree)`` for any ``tree`` with these shapes and dtypes, without making one.

    Args:
        like: a pytree of arrays or of ``jax.ShapeDtypeStruct``.

    Example:
        >>> num_bytes(jax.ShapeDtypeStruct((1000, 1000), "float32"))
        4000034
    """
    _, specs, _ = _flatten(like)
    return _PREAMBLE.size + len(_header(specs)) + _payload_bytes(specs)


def _flatten(tree: Any) -> tuple[list[Any], list[LeafSpec], Any]:
    """Leaves, what is to be known of each, and the structure; ``None`` is a leaf, so its absence can be told."""
    with_path, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
    leaves = [leaf for _, leaf in with_path]
    return leaves, [_spec(jax.tree_util.keystr(path), leaf) for path, leaf in with_path], structure


def _spec(path: str, leaf: Any) -> LeafSpec:
    if leaf is None:
        return LeafSpec(path, "None", ())
    if isinstance(leaf, bool | int | float | complex) and not isinstance(leaf, np.generic):
        return LeafSpec(path, jnp.result_type(leaf).name, ())
    dtype = getattr(leaf, "dtype", type(leaf))
    name = getattr(dtype, "name", str(dtype))
    if name not in _DTYPES:
        raise ValueError(f"{_label(path)} cannot be sent: got {name}, expected one of {', '.join(_DTYPES)}.")
    return LeafSpec(path, name, tuple(leaf.shape))


def _header(specs: list[LeafSpec]) -> bytes:
    return _COUNT.pack(len(specs)) + b"".join(spec.header for spec in specs)


def _payload_bytes(specs: list[LeafSpec]) -> int:
    return sum(dtype.itemsize * math.prod(shape) for dtype, shape in (spec.buffer for spec in specs))


def _to_bytes(leaf: Any, spec: LeafSpec) -> bytes:
    if spec.dtype == "None":
        return b""
    numbers = jax.random.key_data(leaf) if spec.dtype in KEYS else leaf
    # The native byte order is the little-endian one wherever JAX runs; arrays in another order are converted here.
    return np.asarray(numbers, dtype=spec.buffer[0]).tobytes()


def _from_numbers(numbers: np.ndarray, spec: LeafSpec) -> Any:
    if spec.dtype == "None":
        return None
    owned = numbers.copy()  # aligned and writable, and the message can be let go
    if spec.dtype in KEYS:
        return jax.random.wrap_key_data(jnp.asarray(owned), impl=KEYS[spec.dtype][0])
    return owned


def _checked_body(data: memoryview, expected_length: int, specs: list[LeafSpec]) -> memoryview:
    """What follows the preamble, once the length is right and the preamble vouches for it.

    The length comes first: of what is too long no more is read than would tell the difference.
    """
    if len(data) < _PREAMBLE.size:
        raise ValueError(f"The message is truncated: got {len(data)} bytes, expected {expected_length}.")
    magic, version, checksum = _PREAMBLE.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"These bytes are not a numpyro_fed message: they begin with {magic!r}, expected {MAGIC!r}.")
    if version != VERSION:
        raise ValueError(
            f"The message has version {version} of the wire format, expected {VERSION}: "
            "install the same version of numpyro_fed at both ends."
        )
    body = data[_PREAMBLE.size :]
    if len(data) != expected_length:
        which = "truncated" if len(data) < expected_length else "overlong"
        raise ValueError(
            f"The message has the wrong length, it is {which}: got {len(data)} bytes, expected {expected_length}."
            f"{_told(body, specs)}"
        )
    if zlib.crc32(body) != checksum:
        raise ValueError(f"The message is damaged: its checksum is {zlib.crc32(body):08x}, expected {checksum:08x}.")
    return body


def _told(body: memoryview, specs: list[LeafSpec]) -> str:
    """How the structure differs, where the header of a message of another length can be read."""
    if body[: len(_header(specs))] == _header(specs):
        return ""
    try:
        return " " + _explain(body, specs)
    except ValueError:
        return " It has a malformed header."


def _explain(body: memoryview, specs: list[LeafSpec]) -> str:
    """Say, leaf by leaf, how the header of ``body`` differs from what is expected; of ten leaves at most."""
    expected = {zlib.crc32(spec.path.encode()): spec for spec in specs}
    count, got = _read_header(body, len(specs) + MOST_TOLD)
    problems = [] if count == len(specs) else [f"got {count} leaves, expected {len(specs)}"]
    for name, spec in expected.items():
        if name not in got:
            problems.append(f"{_label(spec.path)}: got nothing, expected {_describe(spec.dtype, spec.shape)}")
        elif got[name] != (spec.dtype, spec.shape):
            expectation = _describe(spec.dtype, spec.shape)
            problems.append(f"{_label(spec.path)}: got {_describe(*got[name])}, expected {expectation}")
    for position, (name, description) in enumerate(got.items()):
        if name not in expected:
            problems.append(f"leaf number {position}: got {_describe(*description)} under a name that is not expected")
    if not problems:
        problems = ["the leaves come in another order"]
    if len(problems) > MOST_TOLD:
        problems = [*problems[:MOST_TOLD], f"and {len(problems) - MOST_TOLD} more"]
    return "It differs:\n" + "\n".join(f"  {problem}" for problem in problems)


def _read_header(body: memoryview, most: int) -> tuple[int, dict[int, tuple[str, tuple[int, ...]]]]:
    """How many leaves a message says it has; dtype and shape of the first of them, by the checksum of their paths."""
    leaves = {}
    try:
        (count,) = _COUNT.unpack_from(body)
        offset = _COUNT.size
        for _ in range(min(count, most)):
            name, code, num_axes = _LEAF.unpack_from(body, offset)
            shape = struct.unpack_from(f"<{num_axes}Q", body, offset + _LEAF.size)
            leaves[name] = (_DTYPES[code], shape[:MOST_TOLD])
            offset += _LEAF.size + 8 * num_axes
    except (struct.error, IndexError) as error:
        raise ValueError("The message has a malformed header.") from error
    return count, leaves


def _label(path: str) -> str:
    return f"leaf {path}" if path else "the only leaf"


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return dtype if dtype == "None" else f"{dtype}[{','.join(map(str, shape))}]"
