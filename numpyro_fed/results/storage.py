"""A fit in a file, without the data.

The file is an ``.npz``: one array per leaf of the state and the history, the shared arguments, and a JSON header with
all the rest. Nothing in it is pickled, so reading it runs no code. Of the silos' own arguments it has shapes and types
alone; :func:`load` traces the model on zeros of these shapes, checks that its sites are those of the file, and puts the
state back as it was, bit by bit.
"""

import json
import os
import re
import sys
import warnings
import zipfile
from collections import namedtuple
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.checks import told
from numpyro_fed.data.inputs import leaves
from numpyro_fed.data.names import Names
from numpyro_fed.data.padding import call_spec, shared_arrays
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.store import SiloStore
from numpyro_fed.model.build import from_spec
from numpyro_fed.model.partition import partition
from numpyro_fed.model.partition_table import Partition, Site
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.results.correction import CorrectedMethod
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.state import CORRECTED, State

FORMAT, VERSION = "numpyro_fed.Fit", 1
HEADER = "header"


def save(fit: Fit, path: str | Path) -> Path:
    """See :meth:`numpyro_fed.results.fit.Fit.save`."""
    arrays: dict[str, np.ndarray] = {}
    silos = fit.any_silos
    silos = silos.example() if isinstance(silos, SiloStore) else silos
    header = {
        "format": FORMAT,
        "version": VERSION,
        "method": fit.state.method,
        "family": _family(fit.method),
        "x64": _x64(),
        "sites": _sites(fit.split.partition),
        "silos": {name: encode(silos.own(name), _shape_leaf) for name in silos.names},
        "own_counts": sorted(silos.own_counts),
        "shared": encode(silos.shared, keep_in(arrays)),
        "names": _names(fit.state.names, arrays),
        "buckets": fit.state.buckets,
        "padded": fit.padded,
        "round": fit.state.round,
        "seconds": fit.seconds,
        "state": encode((fit.state.server, fit.state.silos), keep_in(arrays)),
        "history": encode(fit.history, keep_in(arrays)),
    }
    path = Path(path)
    path = path if path.suffix == ".npz" else path.with_name(path.name + ".npz")
    partial = path.with_name(f".{path.name}.{os.getpid()}")  # never half a file under the final name
    try:
        with open(partial, "wb") as file:
            contents: dict[str, Any] = {HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays}
            np.savez(file, **contents)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def load(path: str | Path, method: Any, silos: Silos | SiloStore | None = None) -> Fit:
    """Read a fit that ``fit.save`` wrote.

    Args:
        path: the file, with or without its suffix ``.npz``.
        method: the method it was made by, with the same model: ``nf.SFVI(model)``.
        silos: the data it was fitted to, an nf.Silos or an nf.SiloStore. Without them the fit can still sample, predict
            for new units and silos, and be an ``init_state``; predictions for the silos' own units and log likelihoods
            need them.

    Raises:
        ValueError: when the file is not of this method, model or format; the message says which differs.
    """
    if not hasattr(method, "model") or isinstance(method, type):
        raise TypeError(f"method must be the method of the fit, such as nf.SFVI(model), got {method!r}")
    header, arrays, path = _read(path)
    for what, saved, now in (
        ("method", header["method"].removesuffix(CORRECTED), type(method).__name__),
        ("variational family", header["family"], _family(method)),
        ("precision", *("float64 (x64)" if on else "float32" for on in (header["x64"], _x64()))),
    ):
        if saved != now:
            hint = f": call numpyro.enable_x64({header['x64']}) first" if what == "precision" else ""
            raise ValueError(f"{path} has another {what}: {saved} in the file, {now} now{hint}")
    shapes = _zeros(header, decode(header["shared"], read_from(arrays)))
    names = _read_names(header["names"], arrays)
    if silos is not None:
        _check_silos(path, shapes, names, silos)
    part = _partition(path, method, header["sites"], shapes)
    split = from_spec(method.model, part, call_spec(shapes, part.axes), shared_arrays(shapes))
    server, states = decode(header["state"], read_from(arrays))
    state = State(header["method"], names, tuple(map(tuple, header["buckets"])), server, states, header["round"])
    method = CorrectedMethod(method) if state.method.endswith(CORRECTED) else method
    history = {name: np.asarray(rows) for name, rows in decode(header["history"], read_from(arrays)).items()}
    return Fit(method, split, state, history, header["seconds"], tuple(header["padded"]), silos, shapes)


def _read(path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray], Path]:
    path = Path(path)
    if not path.exists() and path.with_name(path.name + ".npz").exists():
        path = path.with_name(path.name + ".npz")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        header = json.loads(arrays.pop(HEADER).tobytes())
        known = header["format"] == FORMAT
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a file of fit.save: {error}") from None
    if not known:
        raise ValueError(f"{path} is not a file of fit.save: its format is {header['format']!r}, expected {FORMAT!r}")
    if header["version"] != VERSION:
        raise ValueError(
            f"{path} has format version {header['version']}, this numpyro_fed reads version {VERSION}: "
            + ("upgrade numpyro_fed" if header["version"] > VERSION else "save it again with this version")
        )
    return header, arrays, path


# --- what a fit belongs to --------------------------------------------------------------------------------------------


def _x64() -> bool:
    return jnp.zeros(()).dtype == jnp.float64


def _family(method: Any) -> str:
    """What the state's numbers mean: the guide or family of the method, without addresses in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(getattr(method, "family", None)))


def _sites(part: Partition) -> list[list[Any]]:
    """The partition's table, as JSON returns it. The silos' own lengths are told by the silos' shapes."""

    def shape(site: Site) -> list[int | str]:
        own = {len(site.shape.value) + dim: f"n[{axis}]" for axis, dim in site.value_axes}
        return [own.get(i, size) for i, size in enumerate(site.shape.value)]

    return [
        [site.name, site.role, "server" if site.at_server else "silo", shape(site), site.shape.distribution]
        for site in part.sites
    ]


def _partition(path: Path, method: Any, sites: list[list[Any]], shapes: Silos) -> Partition:
    """The model's partition, from shapes, when it is the file's."""
    try:
        part = partition(method.model, shapes, getattr(method, "local", None), getattr(method, "shared", None))
    except PartitionError as error:
        raise ValueError(f"{path} is of another model: this one cannot be traced as that one was: {error}") from error
    saved = {row[0]: row[1:] for row in sites}
    now = {row[0]: row[1:] for row in _sites(part)}
    for name in [*saved, *now]:
        if saved.get(name) != now.get(name):
            tell = lambda row: (
                "not there" if row is None else f"{row[0]} ({row[1]}), shape ({', '.join(map(str, row[2]))}), {row[3]}"
            )
            raise ValueError(
                f"{path} is of another model: site {name!r} is {tell(saved.get(name))} in the file and "
                f"{tell(now.get(name))} in this model"
            )
    return part


def _names(names: Any, arrays: dict[str, np.ndarray]) -> Any:
    """All silos' names; of a store, their number and the array they are in."""
    if not isinstance(names, Names):
        return names
    return {"count": len(names), "labels": None if names.labels is None else keep_in(arrays)(names.labels)}


def _read_names(saved: Any, arrays: dict[str, np.ndarray]) -> Any:
    if not isinstance(saved, dict):
        return tuple(saved)
    return Names(saved["count"], None if saved["labels"] is None else read_from(arrays)(saved["labels"]))


def _check_silos(path: Path, saved: Silos, names: Any, silos: Any) -> None:
    kind = "nf.SiloStore" if isinstance(names, Names) else "nf.Silos"
    if not isinstance(silos, SiloStore if isinstance(names, Names) else Silos):
        raise TypeError(f"silos must be an {kind}, got a {type(silos).__name__}")
    if isinstance(silos, SiloStore):
        if silos.names != names:
            raise ValueError(f"{path} has {len(names)} silos, {told(names)}; silos= has {told(silos.names)}")
        silos = silos.only(*saved)
    if set(saved) != set(silos):
        raise ValueError(f"{path} has the silos {', '.join(saved)}; silos= has {', '.join(silos)}")
    for name in saved:
        before, now = (encode(one.own(name), _shape_leaf) for one in (saved, silos))
        if before != now:
            raise ValueError(
                f"{path} has other data: silo {name!r} is {_told(saved, name)} in the file, {_told(silos, name)} now"
            )
    before, now = (leaves(one.shared) for one in (saved, silos))
    if [p for p, _ in before] != [p for p, _ in now] or not all(
        np.array_equal(a, b) for (_, a), (_, b) in zip(before, now, strict=True)
    ):
        raise ValueError(f"{path} has other shared arguments than silos=")


def _told(silos: Silos, name: str) -> str:
    described = (
        (path, leaf if isinstance(leaf, int) else f"{leaf.dtype}{list(leaf.shape)}")
        for path, leaf in leaves(silos.own(name))
    )
    return ", ".join(f"{path} {what}" for path, what in described)


def _shape_leaf(leaf: Any) -> dict[str, Any]:
    return {"shape": list(np.shape(leaf)), "dtype": str(leaf.dtype)}


def _zeros(header: dict[str, Any], shared: Any) -> Silos:
    """Silos in the shapes of the file's."""
    zeros = lambda leaf: np.broadcast_to(np.zeros((), leaf["dtype"]), leaf["shape"])  # takes no memory
    with warnings.catch_warnings():  # said when the fit was made
        warnings.simplefilter("ignore", UserWarning)
        silos = Silos({name: decode(args, zeros) for name, args in header["silos"].items()}, shared=shared)
    silos.own_counts = frozenset(header["own_counts"])
    return silos


# --- pytrees as JSON --------------------------------------------------------------------------------------------------


def encode(tree: Any, leaf: Callable[[Any], dict[str, Any]]) -> Any:
    """A pytree's structure as JSON. Python numbers stand in it, ``leaf`` says what stands for an array."""
    if tree is None or isinstance(tree, bool | int | str):
        return tree
    if isinstance(tree, float):
        return {"float": repr(tree)}
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise TypeError(f"cannot save a dict with keys other than strings: {list(tree)}")
        return {"dict": {key: encode(value, leaf) for key, value in tree.items()}}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        kind = f"{type(tree).__module__}:{type(tree).__qualname__}"
        return {"named": kind, "fields": list(tree._fields), "items": [encode(item, leaf) for item in tree]}
    if isinstance(tree, list | tuple):
        return {type(tree).__name__: [encode(item, leaf) for item in tree]}
    if isinstance(tree, jax.Array | np.ndarray | np.generic):
        return leaf(tree)
    raise TypeError(f"cannot save a {type(tree).__name__}: states are dicts, lists, (named) tuples, arrays and numbers")


def decode(node: Any, leaf: Callable[[dict[str, Any]], Any]) -> Any:
    """The inverse of `encode`."""
    if not isinstance(node, dict):
        return node
    if "dict" in node:
        return {key: decode(value, leaf) for key, value in node["dict"].items()}
    if "float" in node:
        return float(node["float"])
    if "named" in node:
        items = [decode(item, leaf) for item in node["items"]]
        return tuple.__new__(_named(node["named"], node["fields"]), items)
    for kind in (list, tuple):
        if kind.__name__ in node:
            return kind(decode(item, leaf) for item in node[kind.__name__])
    return leaf(node)


def _named(kind: str, fields: list[str]) -> Any:
    """The NamedTuple of that name among the modules already imported; one like it, where an upgrade has moved it."""
    module, _, name = kind.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and issubclass(found, tuple) and list(getattr(found, "_fields", ())) == fields:
        return found
    return namedtuple(name.split(".")[-1], fields)


def keep_in(arrays: dict[str, np.ndarray]) -> Callable[[Any], dict[str, Any]]:
    """Puts a leaf into ``arrays`` and tells where."""

    def keep(leaf: Any) -> dict[str, Any]:
        note: dict[str, Any] = {"array": str(len(arrays))}
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            note["key"] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        note["dtype"], note["host"] = str(leaf.dtype), not isinstance(leaf, jax.Array)
        arrays[note["array"]] = np.asarray(leaf)
        return note

    return keep


def read_from(arrays: dict[str, np.ndarray]) -> Callable[[dict[str, Any]], Any]:
    def read(note: dict[str, Any]) -> Any:
        array = arrays[note["array"]]
        if str(array.dtype) != note["dtype"]:  # bfloat16 and its like are bytes to NumPy
            array = array.view(jnp.dtype(note["dtype"]))
        if note["host"]:
            return array
        with jax.enable_x64(True):  # natural parameters are float64 in any program
            leaf = jnp.asarray(array)
        return jax.random.wrap_key_data(leaf, impl=note["key"]) if "key" in note else leaf

    return read
