"""What a message may depend on: sums over rows, and never a row as it is."""

from typing import Any

import jax
import numpy as np
import pytest
from runs import KEY, Runs, every_method

import numpyro_fed as nf
from numpyro_fed.engines import loopback, wire

pytestmark = pytest.mark.usefixtures("x64")
ROWS = 24  # of york
DRAWN = ("SFVI", "SFVI, minibatches", "SFVIAvg", "PVI, minibatches", "EP, Fisher", "FedPA", "FedAvg", "FedNP", "GIPVI")


def twice(args: dict[str, Any]) -> dict[str, Any]:
    """Every row two times."""
    return {name: value if isinstance(value, int) else np.concatenate([value, value]) for name, value in args.items()}


def sent_by(runs: Runs, silos: nf.Silos, patch: pytest.MonkeyPatch, num_rounds: int = 2) -> list[Any]:
    """All messages and broadcasts of a run that go through bytes."""
    seen = []

    def watched(tree: Any) -> bytes:
        seen.append(jax.tree.map(np.asarray, tree))
        return wire.encode(tree)

    with patch.context() as patched:
        patched.setattr(loopback, "encode", watched)
        runs.run(silos, num_rounds, engine=nf.engines.Loopback())
    return seen


@pytest.mark.parametrize(
    "runs", every_method("EP", "SFVI", "SFVI, no locals", "EP, Fisher", "SEP", "FedPA"), indirect=True, scope="session"
)
def test_shapes_do_not_tell_the_number_of_rows(runs: Runs) -> None:
    silos = runs.silos
    more = nf.Silos({name: twice(silos.own(name)) for name in silos.names})
    tables = [nf.partition(runs.method.model, own).messages(runs.method) for own in (silos, more)]
    assert not tables[0].attrs["refused"]
    # the description tells shapes: that is what it is for
    first, second = (table[table["field"] != "description"] for table in tables)
    assert first.equals(second) and len(first) > 10


def test_no_number_of_the_data_occurs_in_a_message(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a silo of 20 rows or more; and nothing has an axis as long as the rows or the locals."""
    rows = runs.silos.own("york")
    assert len(rows["y"]) == ROWS
    data = np.unique(np.concatenate([rows["x"], rows["y"]]))
    either = np.concatenate([data, data.astype(np.float32).astype(np.float64)])
    found = sent_by(runs, runs.silos, monkeypatch)
    assert len(found) > 6
    for leaf in jax.tree.leaves(found):
        assert not (np.issubdtype(leaf.dtype, np.floating) and np.any(np.isin(leaf.astype(np.float64), either)))
        assert ROWS not in leaf.shape


@pytest.mark.parametrize(
    "runs", [p for p in every_method("EP") if p.values[0] not in DRAWN], indirect=True, scope="session"
)
def test_the_order_of_rows_changes_nothing(runs: Runs) -> None:
    """Rows go into sums: methods that draw nothing for a row send the same of rows in another order."""
    turn = lambda value: value if isinstance(value, int) else value[::-1].copy()
    turned = nf.Silos({n: {k: turn(v) for k, v in runs.silos.own(n).items()} for n in runs.silos.names})
    a, b = (runs.run(silos, 2, engine=nf.engines.Loopback()).sample(KEY, 3) for silos in (runs.silos, turned))
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-6, atol=1e-8)
