"""Simulations that are done, in a file: what is interrupted goes on where it was.

The file is an ``.npz`` without pickled objects, written under another name and then renamed, so it is never half
there. Its header says of what the simulations are; those of another model, design, method or key are refused.
"""

import io
import json
import zipfile
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_fed.data.silos import Silos, at_silo
from numpyro_fed.files import replace_file
from numpyro_fed.host import real_dtype
from numpyro_fed.model.simulate import Simulated
from numpyro_fed.run.digests import digest_of

FORMAT, VERSION = "numpyro_fed.sbc", 1


class Done(NamedTuple):
    """One simulation."""

    ranks: np.ndarray  # (Q,) int
    means: np.ndarray  # (Q,)
    sds: np.ndarray  # (Q,)
    truths: np.ndarray  # (Q,)
    steps: np.ndarray  # (Q,): a Newton step from the truth, in posterior sds; NaN where there is none
    verdict: str
    failure: str  # "": none, and the numbers above mean something
    seconds: float


class SimulationFile:
    """Where finished simulations are kept.

    Args:
        path: of the file; ".npz" is added where it is missing.
        about: ``{what: text}``: all that the simulations depend on.
    """

    def __init__(self, path: str | Path, about: dict[str, str]) -> None:
        path = Path(path)
        self.path = path if path.suffix == ".npz" else path.with_name(path.name + ".npz")
        self.about = about

    def read(self) -> dict[int, Done]:
        """The simulations in the file; none where there is none. Raises where they are of something else."""
        if not self.path.exists():
            return {}
        try:
            with open(self.path, "rb") as file, np.load(file, allow_pickle=False) as found:
                header = json.loads(str(found["header"]))
                columns = {name: found[name] for name in (*Done._fields, "simulation")}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{self.path} cannot be read as simulations of nf.sbc ({error}): give another path"
            ) from None
        if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
            raise ValueError(f"{self.path} is no file of nf.sbc in the format of this version: give another path")
        differing = [what for what, told in self.about.items() if header["about"].get(what) != told]
        if differing:
            raise ValueError(
                f"the simulations in {self.path} are of another {' and '.join(differing)}, so they cannot be gone on "
                "with: give another path, or remove the file"
            )
        rows = zip(*(columns[name] for name in Done._fields), strict=True)
        made = (Done(r, m, s, z, w, str(v), str(f), float(c)) for r, m, s, z, w, v, f, c in rows)
        return {int(s): done for s, done in zip(columns["simulation"], made, strict=True)}

    def write(self, done: dict[int, Done]) -> None:
        """All of them; the file before is replaced at once."""
        if not done:
            return
        columns: dict[str, Any] = {n: np.array([getattr(one, n) for one in done.values()]) for n in Done._fields}
        header = json.dumps({"format": FORMAT, "version": VERSION, "about": self.about})
        body = io.BytesIO()
        np.savez(body, header=np.array(header), simulation=np.array(list(done)), **columns)
        replace_file(self.path, body.getbuffer())


def about(
    method: Any, options: dict[str, Any], settings: tuple[Any, ...], silos: Silos, first: Simulated, key: Any
) -> dict[str, str]:
    """All that simulations depend on, as texts that two processes agree on.

    The model is known by the first data set that it makes.
    """
    return {
        # a function may count its calls or keep a table: its code tells it
        "method": digest_of((method if is_dataclass(method) else getattr(method, "__code__", type(method)), options)),
        "number of draws, silo or kind of simulation": repr(settings),
        "design": _digests(silos),
        "key or precision": f"{np.asarray(jax.random.key_data(key)).tolist()} {real_dtype()}",
        "model, prior or version of JAX": digest_of(first.z) + _digests(first.silos),
    }


def _digests(silos: Silos) -> str:
    """Of all arguments, each silo's made in its room."""
    found = []
    for name in silos.names:
        with at_silo(name):
            found.append((name, digest_of(dict(silos[name]))))
    return digest_of(found)
