"""Runs whose silos are elsewhere, looked at by somebody who does not believe them."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.remote.envelope import unpack

sys.path.append(str(Path(__file__).parent.parent / "laws"))
from elsewhere import Sites, elsewhere
from test_runs import EP, KEY, SFVI, run, same, three

pytestmark = pytest.mark.filterwarnings("ignore:.*the verdict is")


def asked(silos: Any, type: str, name: str = "york") -> list[Any]:
    """All requests of a type to a silo."""
    found = [unpack(request) for silo, request, _ in silos.engine.post.transport.requests if silo == name]
    return [one for one in found if one.type == type]


# --- what is lost on the way ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [EP, SFVI], ids=["EP", "SFVI"])
def test_any_one_request_may_be_lost(method: Any, tmp_path: Path) -> None:
    """Also the first of a phase, which alone tells the structure of what is sent: nobody is lost for it."""
    whole = elsewhere(method, three(), tmp_path / "whole")
    run(method, whole, 3, check=False)
    works = [i for i, (name, request, _) in enumerate(whole.engine.post.transport.requests) if name == "york"]
    first = next(
        at + 1
        for at, i in enumerate(works)
        if (body := unpack(whole.engine.post.transport.requests[i][1]).body).get("do") == "step" and "from" in body
        if body["from"]
    )
    silos = elsewhere(method, three(), tmp_path / "again", quorum=2)
    silos.engine.post.transport.away["york"] = lambda number: number == first
    fit = run(method, silos, 3, check=False)
    assert fit.left == () and fit.history["took_part"][-1].all()


def test_data_that_do_not_fit_are_called_so(tmp_path: Path) -> None:
    """Not a silo that is lost."""

    def counts(x, y=None):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Poisson(jax.numpy.exp(b * x)), obs=y)

    own = {name: dict(x=np.ones(22, "f"), y=np.full(22, y, np.int32)) for name, y in (("leeds", 2), ("york", -3))}
    method = nf.EP(counts)
    with pytest.raises(PartitionError, match=r"'york' finds .* its own log says why, and `numpyro-fed check`"):
        run(method, elsewhere(method, nf.Silos(own), tmp_path))
