"""A fit to a file, without the data.

The file is an ``.npz``: one array per leaf of the state and the history, the shared arguments, and a JSON header with
all the rest (:mod:`numpyro_fed.results.codec`). Of the silos' own arguments it has shapes and types alone.
:func:`numpyro_fed.load` reads it.
"""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from numpyro_fed.algorithm import Posterior
from numpyro_fed.files import replace_file
from numpyro_fed.host import real_dtype
from numpyro_fed.model.fingerprint import fingerprint
from numpyro_fed.model.partition_table import Partition, Site
from numpyro_fed.results.codec import encode, keep_in
from numpyro_fed.results.value import Fitted

FORMAT, VERSION = "numpyro_fed.Fit", 5
HEADER = "header"


def save(fit: Fitted, path: str | Path) -> Path:
    """See :meth:`numpyro_fed.results.fit.Fit.save`."""
    arrays: dict[str, np.ndarray] = {}
    silos = fit.any_silos
    silos = silos.example() if silos.lazy else silos
    header = {
        "format": FORMAT,
        "version": VERSION,
        "method": fit.state.method,
        "corrected": fit.correction is not None,
        "family": family(fit.posterior),
        "x64": x64(),
        "sites": sites(fit.split.partition),
        "prior": encode(fingerprint(fit.split), keep_in(arrays)),
        "silos": {name: encode(silos.own(name), shape_leaf) for name in silos.names},
        "own_counts": sorted(silos.own_counts),
        "shared": encode(silos.shared, keep_in(arrays)),
        "names": _names(fit.state.names, arrays),
        "buckets": fit.state.buckets,
        "padded": fit.padded,
        "round": fit.state.round,
        "seconds": fit.seconds,
        "state": encode((fit.state.server, fit.state.silos), keep_in(arrays)),
        "history": encode(fit.history, keep_in(arrays)),
        "survey": encode(fit.survey, keep_in(arrays)),
        "records": encode(fit.records, keep_in(arrays)),
        "sent": encode(fit.sent, keep_in(arrays)),
        "left": fit.left,
        "reasons": fit.reasons,
        "moving": fit.moving,
        "hints": fit.hints,
        "evidence": encode(fit.evidence, keep_in(arrays)),
    }
    path = Path(path)
    path = path if path.suffix == ".npz" else path.with_name(path.name + ".npz")
    contents: dict[str, Any] = {HEADER: np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays}
    body = io.BytesIO()
    np.savez(body, **contents)
    replace_file(path, body.getbuffer())
    return path


def x64() -> bool:
    return real_dtype() == np.float64


def family(posterior: Posterior) -> str:
    """What the state's numbers mean: the guide or family of the posterior, without addresses in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(getattr(posterior, "family", None)))


def sites(part: Partition) -> list[list[Any]]:
    """The partition's table, as JSON returns it. The silos' own lengths are told by the silos' shapes."""

    def shape(site: Site) -> list[int | str]:
        own = {len(site.shape.value) + dim: f"n[{axis}]" for axis, dim in site.value_axes}
        return [own.get(i, size) for i, size in enumerate(site.shape.value)]

    return [
        [site.name, site.role, "server" if site.at_server else "silo", shape(site), site.shape.distribution]
        for site in part.sites
    ]


def _names(names: Any, arrays: dict[str, np.ndarray]) -> Any:
    """All silos' names; of a store, their number and the array they are in."""
    if not getattr(names, "lazy", False):
        return names
    return {"count": len(names), "labels": None if names.labels is None else keep_in(arrays)(names.labels)}


def shape_leaf(leaf: Any) -> dict[str, Any]:
    return {"shape": list(np.shape(leaf)), "dtype": str(leaf.dtype)}
