"""A small study in three silos, and its run without FLARE."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

import numpyro_fed as nf
from numpyro_fed.remote.study import Study

HERE = Path(__file__).parent
SILOS = ("leeds", "york", "hull")

STUDY = """
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(x, y=None):
    a = numpyro.sample("a", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Normal(0, 2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)


name = "trial"
"""
SITE = 'name = "{name}"\nstudy = "study.py"\ndata = "table.csv"\nfolder = "state"\n'

# In one process, through the same bytes.
DIRECT = """
import json
import sys
from pathlib import Path

import jax

from numpyro_fed.remote.config import open_site, read_site
from numpyro_fed.remote.silos import connect
from numpyro_fed.remote.study import Study
from numpyro_fed.remote.transport import Direct

folder, method, rounds, check, out, names = json.loads(sys.argv[1])
study = Study.load(Path(folder) / names[0] / "study.py")
sites = {name: open_site(read_site(Path(folder) / name / "site.toml")).handle for name in names}
silos = connect(study, Direct(sites))
study.method(method).run(jax.random.key(0), silos, rounds, check=check, progress_bar=False).save(out)
"""


def write(folder: Path) -> None:
    """``folder/silos/<name>/`` with site.toml, study.py and table.csv; the server's copy of the study."""
    for seed, name in enumerate(SILOS):
        own, draws = folder / "silos" / name, random.Random(seed)
        own.mkdir(parents=True)
        (own / "study.py").write_text(STUDY)
        (own / "site.toml").write_text(SITE.format(name=name))
        x = [draws.gauss(0, 1) for _ in range(40 + 10 * seed)]
        rows = (f"{value:.7f},{int(draws.random() < 0.5 + 0.2 * (value > 0))}\n" for value in x)
        (own / "table.csv").write_text("x,y\n" + "".join(rows))
    (folder / "server" / "studies").mkdir(parents=True)
    (folder / "server" / "studies" / "trial.py").write_text(STUDY)


def environment(**own: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH")]))
    return os.environ | dict(PYTHONPATH=path) | own


def direct(folder: Path, method: str, rounds: int | None, check: bool = True) -> Path:
    """The fit of the same study, of silos of its own."""
    write(folder)
    told = json.dumps([str(folder / "silos"), method, rounds, check, str(folder / "fit.npz"), SILOS])
    subprocess.run([sys.executable, "-c", DIRECT, told], env=environment(), check=True, timeout=240)
    return folder / "fit.npz"


def same(one: Path, other: Path, study: Path, method: str) -> bool:
    """To the last bit, all that the server knows."""
    how = Study.load(study).method(method)
    states = [jax.tree.leaves(nf.load(path, how).state.server) for path in (one, other)]
    return len(states[0]) > 0 and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(*states, strict=True)
    )


def values(folder: Path, name: str) -> Sequence[bytes]:
    """How a silo's first rows would show in a file: as text, and as numbers, two rows at a time."""
    text = [line.split(",")[0] for line in (folder / "silos" / name / "table.csv").read_text().splitlines()[1:9]]
    numbers = np.array(text, float)
    packed = [numbers[i : i + 2].astype(kind).tobytes() for kind in ("f4", "f8") for i in range(0, 8, 2)]
    return [*(one.lstrip("-0.").encode() for one in text), *packed]
