"""A fit in the silo: the posterior that the server has brought, with this silo's own data and states.

Draws of a silo's latents are made here, and stay here.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from numpyro_fed.remote.errors import ToldError
from numpyro_fed.remote.states import Elsewhere, as_name
from numpyro_fed.remote.worker import Worker
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.load import load


class NoFit(ToldError, ValueError):
    """There is no finished run in the silo's folder, or not all of it."""


def saved_for(fit: Fit, silo: str) -> bytes:
    """The file of a fit that one of its silos is brought: the posterior, and nothing that another silo alone has sent.

    Sites of the others are pooled (``Posterior.known_to``), and columns of the history with a number for each silo are
    left out. Names, shapes and numbers of observations are told when a run is opened.
    """
    known = getattr(fit.posterior, "known_to", lambda server, place: server)
    server = known(fit.state.server, fit.state.names.index(silo))
    history = {name: column for name, column in fit.history.items() if np.ndim(column) == 1}
    with tempfile.TemporaryDirectory() as folder:
        told = replace(fit, state=fit.state._replace(server=server), history=history)
        return told.save(Path(folder) / "fit.npz").read_bytes()


def own_fit(worker: Worker, run: str | None = None) -> Fit:
    """The fit of a run that has ended, as far as this silo knows it.

    Its ``sample``, ``summary`` and ``predict(key, data)`` are the server's; ``sample_local``, ``predict`` and
    ``summary`` with ``silo=`` work for this silo.

    Args:
        worker: of the silo, with its folder.
        run: which one, 16 hexadecimal digits; by default the last that has ended.
    """
    ended = worker.ended()
    if not ended:
        raise NoFit("no run has ended here yet: the server brings the fit when its run is done")
    if run is not None and run not in ended:
        raise NoFit(f"no run {run} has ended here; those that have: {', '.join(ended)}")
    chosen, path = next((name, path) for name, path in ended.items() if run in (None, name))
    here = worker.opened_run(chosen)
    method: Any = here.opened.method
    fit = load(path, method)
    state, _ = fit.state.silo(worker.name)
    if isinstance(state, Elsewhere):
        kept = here.states.get(as_name(state.name))
        if kept is None:
            raise NoFit(f"the states of run {chosen} are not in this folder any more: run it again")
        state = kept.state
    with jax.enable_x64(True):  # what is wider stays so
        alone = jax.tree.map(lambda leaf: leaf[None], state)
    lengths = dict(here.settled.stack.buckets[0].lengths)
    mine = fit.state._replace(buckets=((worker.name,),), silos=(alone,))
    return replace(fit, state=mine, padded=(lengths,), silos=here.silos)
