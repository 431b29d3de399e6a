"""One of two processes that share a run (started by tests/test_sharded.py): its number, a port, a file for the fit.

With the number -1 all silos are in this process, on one device: what the two are compared with.
"""

import sys
from pathlib import Path

import jax
import numpy as np

number, port, out, *names = sys.argv[1:]
sys.path[:0] = [str(Path(__file__).parent / "laws"), str(Path(__file__).parents[1])]
if number != "-1":
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(number), initialization_timeout=120)

from table import METHODS, silos_for  # noqa: E402  JAX begins with the others

import numpyro_fed as nf  # noqa: E402

engine = nf.engines.Vmap() if number == "-1" else nf.engines.Sharded()
if number != "-1":
    assert [device.process_index for device in engine.devices] == [0, 1]
found, key = {}, jax.random.key(0)
for name in names:
    method = METHODS[name]
    silos, options = silos_for(method.model), dict(progress_bar=False, check=False, engine=engine)
    fit = method.run(key, silos, 3, **options)
    fit = method.run(key, silos, 2, init_state=fit.state, **options)
    for i, leaf in enumerate(jax.tree.leaves((fit.state.server, fit.state.silos))):
        found[f"{name} {i}"] = np.asarray(leaf)
    found[f"{name} drawn"] = fit.sample(key, 5)["beta"]  # each has the whole fit, and asks nobody
np.savez(out, **found)
if number != "-1":
    try:
        method.run(key, silos, 1, checkpoint=f"{out}.nfc", **options)
    except ValueError as error:
        assert "checkpoint" in str(error) and "2 processes" in str(error)
    else:
        raise AssertionError("two processes would write one file")
