"""A fit from a file that ``fit.save`` wrote.

The model is traced on zeros of the silos' shapes; when its sites and its prior are those of the file, the state is put
back as it was, bit by bit.
"""

import json
import zipfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from numpyro_fed.algorithm import Posterior
from numpyro_fed.checks import format_names, unsaid
from numpyro_fed.data.inputs import leaves, shared_digest
from numpyro_fed.data.names import LazyNames
from numpyro_fed.data.padding import call_spec, shared_arrays
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.store import SiloStore
from numpyro_fed.model.build import from_spec
from numpyro_fed.model.fingerprint import Fingerprint, differing, fingerprint
from numpyro_fed.model.partition import partition
from numpyro_fed.model.partition_table import Partition
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import Model, PartitionError
from numpyro_fed.results.codec import decode, encode, read_from
from numpyro_fed.results.correction import CorrectedPosterior
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.save import FORMAT, HEADER, VERSION, family, shape_leaf, sites, x64
from numpyro_fed.results.state import Again, State


class MadeBy(Protocol):
    """What a file asks of the method it was made by."""

    @property
    def model(self) -> Model: ...

    def posterior_of(self, split: SplitModel, survey: Any = None) -> Posterior: ...

    def again(self) -> Again: ...


def load(path: str | Path, method: MadeBy, silos: Silos | SiloStore | None = None) -> Fit:
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
    tell = lambda on: "float64 (x64)" if on else "float32"
    _check_same(path, "method", header["method"], type(method).__name__)
    hint = f": call numpyro.enable_x64({header['x64']}) first"
    _check_same(path, "precision", tell(header["x64"]), tell(x64()), hint)
    read = read_from(arrays)
    shapes = _zeros(header, decode(header["shared"], read))
    names = _read_names(header["names"], arrays)
    if silos is not None:
        _check_silos(path, shapes, names, silos)
    part = _partition(path, method, header["sites"], shapes)
    split = from_spec(method.model, part, call_spec(shapes, part.axes), shared_arrays(shapes))
    _check_prior(path, decode(header["prior"], read), split)
    survey = decode(header["survey"], read)
    posterior = method.posterior_of(split, survey)
    _check_same(path, "variational family", header["family"], family(posterior))
    server, states = decode(header["state"], read)
    return Fit(
        CorrectedPosterior(posterior) if header["corrected"] else posterior,
        split,
        State(header["method"], names, tuple(map(tuple, header["buckets"])), server, states, header["round"]),
        {name: np.asarray(rows) for name, rows in decode(header["history"], read).items()},
        header["seconds"],
        tuple(header["padded"]),
        silos,
        shapes,
        survey,
        decode(header["records"], read),
        decode(header["sent"], read),
        tuple(header["left"]),
        tuple(header["reasons"]),
        header["moving"],
        decode(header["evidence"], read),
        method.again(),
        tuple(header["hints"]),
    )


def _check_same(path: Path, what: str, saved: str, now: str, hint: str = "") -> None:
    if saved != now:
        raise ValueError(f"{path} has another {what}: {saved} in the file, {now} now{hint}")


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
    if header["version"] == 4:  # which had no ledger
        header |= {"version": VERSION, "sent": {"tuple": []}, "left": []}
    if header["version"] != VERSION:
        raise ValueError(
            f"{path} has format version {header['version']}, this numpyro_fed reads version {VERSION}: "
            + ("upgrade numpyro_fed" if header["version"] > VERSION else "fit and save it again")
        )
    return header, arrays, path


# --- what a fit belongs to --------------------------------------------------------------------------------------------


def _partition(path: Path, method: MadeBy, saved_sites: list[list[Any]], shapes: Silos) -> Partition:
    """The model's partition, from shapes, when it is the file's."""
    try:
        part = partition(method.model, shapes, getattr(method, "local", None), getattr(method, "shared", None))
    except PartitionError as error:
        raise ValueError(f"{path} is of another model: this one cannot be traced as that one was: {error}") from error
    saved = {row[0]: row[1:] for row in saved_sites}
    now = {row[0]: row[1:] for row in sites(part)}
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


def _check_prior(path: Path, saved: Fingerprint, split: SplitModel) -> None:
    now = fingerprint(split)
    name = differing(saved, now)
    if name is not None:
        tell = lambda found: ", ".join(f"{value:.6g}" for value in found["values"].get(name, ())) or "none"
        raise ValueError(
            f"{path} is of another model: the prior of site {name!r} is another one (its log density at the same "
            f"points: {tell(saved)} in the file, {tell(now)} now). Load it with the model that was fitted; a posterior "
            "under another prior must be fitted again."
        )


def _read_names(saved: Any, arrays: dict[str, np.ndarray]) -> Any:
    if not isinstance(saved, dict):
        return tuple(saved)
    return LazyNames(saved["count"], None if saved["labels"] is None else read_from(arrays)(saved["labels"]))


def _check_silos(path: Path, saved: Silos, names: Any, silos: Any) -> None:
    lazy = getattr(names, "lazy", False)
    if getattr(silos, "lazy", None) is not lazy:
        kind = "nf.SiloStore" if lazy else "nf.Silos"
        raise TypeError(f"silos must be an {kind}, got a {type(silos).__name__}")
    if lazy:
        if silos.names != names:
            raise ValueError(
                f"{path} has {len(names)} silos, {format_names(names)}; silos= has {format_names(silos.names)}"
            )
        silos = silos.only(*saved)
    if set(saved) != set(silos):
        raise ValueError(f"{path} has the silos {', '.join(saved)}; silos= has {', '.join(silos)}")
    for name in saved:
        before, now = (encode(one.own(name), shape_leaf) for one in (saved, silos))
        if before != now:
            raise ValueError(
                f"{path} has other data: silo {name!r} is {_told(saved, name)} in the file, {_told(silos, name)} now"
            )
    if shared_digest(saved.shared) != shared_digest(silos.shared):
        raise ValueError(f"{path} has other shared arguments than silos=")


def _told(silos: Silos, name: str) -> str:
    described = (
        (path, leaf if isinstance(leaf, int) else f"{leaf.dtype}{list(leaf.shape)}")
        for path, leaf in leaves(silos.own(name))
    )
    return ", ".join(f"{path} {what}" for path, what in described)


def _zeros(header: dict[str, Any], shared: Any) -> Silos:
    """Silos in the shapes of the file's."""
    zeros = lambda leaf: np.broadcast_to(np.zeros((), leaf["dtype"]), leaf["shape"])  # takes no memory
    with unsaid(UserWarning):  # said when the fit was made
        silos = Silos({name: decode(args, zeros) for name, args in header["silos"].items()}, shared=shared)
    silos.own_counts = frozenset(header["own_counts"])
    return silos
