"""Laws of the wire codec: what goes in comes out, bit by bit, or a ValueError says why not."""

import struct
import time
import tracemalloc
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from numpyro_fed.engines.wire import decode, encode, num_bytes


class Site(NamedTuple):
    linear: np.ndarray
    precision: np.ndarray


@jax.tree_util.register_dataclass
@dataclass
class Message:
    gradient: np.ndarray
    site: Site


REAL_DTYPES = ["float16", ml_dtypes.bfloat16, "float32", "float64"]
INTEGER_DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
SPECIAL_VALUES = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.141592653589793]

TREES = {
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "jax array": jnp.arange(5),
    "scalar": np.float32(1.5),
    "zero-dimensional": np.array(7, np.int64),
    "python numbers": {"bool": True, "int": 3, "float": 0.5, "complex": 1j},
    "empty dict": {},
    "empty tuple": (),
    "none": None,
    "none beside arrays": {"a": None, "b": np.ones(2), "c": [None, np.zeros(1)]},
    "no elements": {"a": np.zeros((0, 3), np.float32), "b": np.zeros(0, bool)},
    "bool": np.array([[True, False], [False, True]]),
    "integers": {str(t): np.array([np.iinfo(t).min, np.iinfo(t).max], t) for t in INTEGER_DTYPES},
    "reals": [np.array(SPECIAL_VALUES).astype(t) for t in REAL_DTYPES],
    "complex": [np.array([1 + 2j, -0.5j], t) for t in ("complex64", "complex128")],
    "transposed": np.arange(6.0).reshape(2, 3).T,
    "strided": np.arange(10, dtype=np.int16)[::3],
    "big-endian": np.array([1, 2, 3], ">f4"),
    "key": jax.random.key(3),
    "keys": {impl: jax.random.split(jax.random.key(1, impl=impl), 3) for impl in ("threefry2x32", "rbg", "unsafe_rbg")},
    "raw key": jax.random.PRNGKey(0),
    "namedtuple": Site(np.zeros(2), np.eye(2)),
    "dataclass": Message(np.ones(3, np.float32), Site(np.zeros(2), np.eye(2))),
    "nested": [{"a": (np.ones(1), [np.zeros((2, 1))])}, Site(None, np.eye(1))],
}


def shapes_of(tree):
    """The same tree, of ``jax.ShapeDtypeStruct``: what the other end knows."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if hasattr(leaf, "dtype") else leaf, tree
    )


def assert_identical(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(getattr(b, "dtype", None) or type(b), jax.dtypes.prng_key):
            assert a.dtype == b.dtype
            a, b = np.asarray(jax.random.key_data(a)), np.asarray(jax.random.key_data(b))
        else:
            assert isinstance(a, np.ndarray)
            b = np.asarray(b, jnp.result_type(b)) if isinstance(b, bool | int | float | complex) else np.asarray(b)
        assert a.shape == b.shape
        assert a.dtype == b.dtype.newbyteorder("=")
        assert a.tobytes() == b.astype(a.dtype).tobytes()  # every bit, the sign of zero and NaN too


@pytest.mark.parametrize("name", TREES)
def test_round_trip(name):
    tree = TREES[name]
    assert_identical(decode(encode(tree), tree), tree)


@pytest.mark.parametrize("name", TREES)
def test_round_trip_from_shapes_alone(name):
    tree = TREES[name]
    assert_identical(decode(encode(tree), shapes_of(tree)), tree)


@pytest.mark.parametrize("name", TREES)
def test_num_bytes_is_the_length(name):
    tree = TREES[name]
    assert num_bytes(tree) == num_bytes(shapes_of(tree)) == len(encode(tree))


def test_num_bytes_makes_no_arrays():
    assert num_bytes(jax.ShapeDtypeStruct((10**6, 10**6), jnp.float32)) == 4 * 10**12 + 34


def test_overhead_is_as_documented():
    assert len(encode({})) == 12
    assert len(encode({"a_long_name_of_a_site": np.zeros((2, 3), np.float32)})) == 12 + 6 + 2 * 8 + 6 * 4


def test_agrees_with_eval_shape():
    def step(key, z):
        return {"gradient": jnp.sin(z), "key": jax.random.split(key), "num_rows": 3, "weight": 0.5, "site": None}

    arguments = jax.random.key(0), jnp.ones(4)
    like = jax.eval_shape(step, *arguments)
    got = decode(encode(step(*arguments)), like)
    assert_identical(got, jax.jit(step)(*arguments))


def test_float64_survives_without_x64():
    value = np.array([1 + 1e-15, 1e300])
    with jax.enable_x64(False):
        got = decode(encode(value), jax.ShapeDtypeStruct((2,), np.dtype("float64")))
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, value)


def test_decoded_arrays_are_writable():
    got = decode(encode([np.int8(1), np.ones(3)]), [np.int8(0), np.zeros(3)])
    got[1][0] = 2.0
    assert got[1].flags.aligned


def test_encoding_is_deterministic_and_ignores_the_order_of_dict_keys():
    assert encode({"a": np.ones(2), "b": np.zeros(3)}) == encode({"b": np.zeros(3), "a": np.ones(2)})


MESSAGE = {"beta": np.arange(4, dtype=np.float32), "omega": np.float32(0.5)}


@pytest.mark.parametrize("position", range(len(encode(MESSAGE))))
def test_every_damaged_byte_is_noticed(position):
    data = bytearray(encode(MESSAGE))
    data[position] ^= 0x10
    with pytest.raises(ValueError, match=r"damaged|not a numpyro_fed message|version"):
        decode(bytes(data), MESSAGE)


@pytest.mark.parametrize("length", range(len(encode(MESSAGE))))
def test_every_truncation_is_noticed(length):
    with pytest.raises(ValueError, match=rf"truncated.*got {length} bytes, expected {num_bytes(MESSAGE)}"):
        decode(encode(MESSAGE)[:length], MESSAGE)


def test_overlong_is_noticed():
    with pytest.raises(ValueError, match="overlong"):
        decode(encode(MESSAGE) + b"\0", MESSAGE)


def with_valid_checksum(body: bytes) -> bytes:
    return b"NFW\x01" + struct.pack("<I", zlib.crc32(body)) + body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x01",
        struct.pack("<I", 2),
        struct.pack("<I", 2**32 - 1),
        struct.pack("<IIBB", 1, 0, 255, 0),
        struct.pack("<IIBB", 1, 0, 1, 9),
    ],
    ids=["no count", "half a count", "no leaves", "absurd count", "unknown dtype", "no sizes"],
)
def test_malformed_header_with_a_valid_checksum(body):
    with pytest.raises(ValueError, match="malformed header"):
        decode(with_valid_checksum(body), MESSAGE)


@pytest.mark.parametrize("change", [lambda body: body[:-1], lambda body: body + b"\0"], ids=["short", "long"])
def test_wrong_length_with_a_valid_checksum(change):
    with pytest.raises(ValueError, match="wrong length"):
        decode(with_valid_checksum(change(encode(MESSAGE)[8:])), MESSAGE)


def test_other_version():
    data = bytearray(encode(MESSAGE))
    data[3] = 9
    with pytest.raises(ValueError, match="version 9 of the wire format, expected 1"):
        decode(bytes(data), MESSAGE)


MISMATCHES = {
    "shape": (
        {"a": np.zeros(3, np.float32)},
        {"a": np.zeros(4, np.float32)},
        ["leaf ['a']: got float32[3], expected float32[4]"],
    ),
    "axes": (
        {"a": np.zeros((2, 2), np.float32)},
        {"a": np.zeros(4, np.float32)},
        ["leaf ['a']: got float32[2,2], expected float32[4]"],
    ),
    "dtype": (
        {"a": [np.zeros(3, np.float32)]},
        {"a": [np.zeros(3, np.int32)]},
        ["leaf ['a'][0]: got float32[3], expected int32[3]"],
    ),
    "dtype of the root": (
        np.zeros(3, np.float32),
        np.zeros(3, np.float64),
        ["the only leaf: got float32[3], expected float64[3]"],
    ),
    "missing": (
        {"a": np.zeros(3)},
        {"a": np.zeros(3), "b": np.zeros((), np.int32)},
        ["got 1 leaves, expected 2", "leaf ['b']: got nothing, expected int32[]"],
    ),
    "surplus": (
        {"a": np.zeros(3), "b": np.zeros(2)},
        {"a": np.zeros(3)},
        ["got 2 leaves, expected 1", "leaf number 1: got float64[2] under a name that is not expected"],
    ),
    "name": (
        {"alpha": np.zeros(3)},
        {"beta": np.zeros(3)},
        [
            "leaf ['beta']: got nothing, expected float64[3]",
            "leaf number 0: got float64[3] under a name that is not expected",
        ],
    ),
    "container": (
        {"linear": np.zeros(1), "precision": np.zeros(1)},
        Site(np.zeros(1), np.zeros(1)),
        ["leaf .linear: got nothing", "leaf .precision: got nothing"],
    ),
    "none": ({"a": None}, {"a": np.zeros(3)}, ["leaf ['a']: got None, expected float64[3]"]),
    "key implementation": (
        [jax.random.key(0, impl="rbg")],
        [jax.random.key(0, impl="threefry2x32")],
        ["leaf [0]: got key<rbg>[], expected key<fry>[]"],
    ),
    "raw key": ([jax.random.PRNGKey(0)], [jax.random.key(0)], ["leaf [0]: got uint32[2], expected key<fry>[]"]),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_names_the_leaf(name):
    sent, like, fragments = MISMATCHES[name]
    with pytest.raises(ValueError, match="It differs") as error:
        decode(encode(sent), like)
    for fragment in fragments:
        assert fragment in str(error.value)


def test_other_order():
    class Swapped(NamedTuple):
        precision: np.ndarray
        linear: np.ndarray

    with pytest.raises(ValueError, match="another order"):
        decode(encode(Swapped(np.zeros(1), np.zeros(1))), Site(np.zeros(1), np.zeros(1)))


@pytest.mark.parametrize(
    "leaf",
    ["text", np.array(["text"]), np.array([object()]), object()],
    ids=["str", "array of str", "array of objects", "object"],
)
def test_what_cannot_be_sent(leaf):
    with pytest.raises(ValueError, match=r"leaf \['a'\] cannot be sent: got .*, expected one of None, bool, int8"):
        encode({"a": leaf})


def test_a_hostile_header_is_refused_at_once() -> None:
    """Six million bytes that say they are half a million leaves: no copy is made, and ten leaves are told of."""
    leaf = struct.pack("<IBBQ", 7, 11, 1, 2**60)
    hostile = encode(MESSAGE)[:8] + struct.pack("<I", 430_000) + leaf * 430_000
    assert len(hostile) > 6_000_000
    tracemalloc.start()
    began = time.perf_counter()
    with pytest.raises(ValueError, match=r"overlong.*\n.*got 430000 leaves") as error:
        decode(hostile, MESSAGE)
    seconds, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 0.05 and peak < 20e6
    assert len(str(error.value)) < 2000


def test_at_most_ten_leaves_are_explained() -> None:
    wide = {f"w{i:03}": np.zeros(2, "f") for i in range(100)}
    with pytest.raises(ValueError) as error:
        decode(encode(wide), {name: np.zeros(3, "f") for name in wide})
    assert str(error.value).count("got float32[2]") == 10 and "and 90 more" in str(error.value)


@pytest.mark.parametrize("number", [3_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_fuzzed_messages_are_refused_or_whole(number: int) -> None:
    """Bits turned over, bytes cut out, put in, repeated: an error that says so, or (by a lucky checksum) a message."""
    draws, data = np.random.default_rng(0), encode(MESSAGE)
    refused = 0
    for _ in range(number):
        bad = bytearray(data)
        for _ in range(draws.integers(1, 4)):
            at, kind = int(draws.integers(0, len(bad) + 1)), draws.integers(0, 4)
            piece = bytes(draws.integers(0, 256, draws.integers(1, 20), dtype=np.uint8))
            if kind == 0 and at < len(bad):
                bad[at] ^= 1 << int(draws.integers(0, 8))
            elif kind == 1:
                bad[at : at + len(piece)] = b""
            elif kind == 2:
                bad[at:at] = piece
            else:
                bad[at:at] = bad[max(0, at - len(piece)) : at]
            if draws.random() < 0.5 and len(bad) > 8:  # with a checksum that is right
                bad[4:8] = struct.pack("<I", zlib.crc32(bytes(bad[8:])))
        try:
            found = decode(bytes(bad), MESSAGE)
        except ValueError:
            refused += 1
        else:
            assert jax.tree.structure(found) == jax.tree.structure(MESSAGE)
    assert refused > 0.5 * number
