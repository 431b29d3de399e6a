"""Each silo alone: what federation is to be measured against.

Every silo runs SFVI with itself as the only silo, all of them side by side in one compiled program. Nothing is shared
but the model: each silo has its own start, its own posterior of the globals and its own theta.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.stack import Stack
from numpyro_fed.methods.sfvi import SFVI
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.state import State
from numpyro_fed.run import warm_start
from numpyro_fed.run.diagnose import NonFiniteError
from numpyro_fed.run.prepare import Prepared

Array = Any


class Alone(NamedTuple):
    """A silo that is its own server."""

    server: Any
    silo: Any


def alone(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
    """Every silo runs the algorithm with itself. What a silo tells is its row of the history, and nobody acts on it."""

    def init_silo(key: Array, broadcast: Broadcast, data: Any) -> Alone:
        server = algorithm.init(key)
        return Alone(server, algorithm.init_silo(key, algorithm.broadcast(key, server), data))

    def silo_step(key: Array, broadcast: Broadcast, state: Alone, data: Any) -> tuple[dict, Alone]:
        at_server, in_silo = jax.random.split(key)
        message, silo = algorithm.silo_step(in_silo, algorithm.broadcast(at_server, state.server), state.silo, data)
        one = jax.tree.map(lambda leaf: leaf[None], message)
        found = algorithm.aggregate(one, Cohort(jnp.zeros(1, int), 1))
        server, info = algorithm.server_step(at_server, state.server, found)
        return info, Alone(server, silo)

    def server_step(key: Array, server: tuple, info: dict) -> tuple[tuple, dict]:
        total = {"loss": jnp.sum(info["loss"])} | ({"gain": jnp.max(info["gain"])} if "gain" in info else {})
        return server, {**total, **{f"{name}_by_silo": rows for name, rows in info.items()}}

    return FederatedAlgorithm(
        init=lambda key: (),
        init_silo=init_silo,
        broadcast=lambda key, server: Broadcast(()),
        silo_step=silo_step,
        aggregate=lambda messages, cohort: messages,
        server_step=server_step,
    ).traced_once()


class Fits(Mapping[str, Fit]):
    """The silos' fits, by name, each an ordinary :class:`~numpyro_fed.Fit`."""

    def __init__(self, fits: dict[str, Fit]) -> None:
        self._fits = fits

    def __getitem__(self, silo: str) -> Fit:
        if silo not in self._fits:
            raise KeyError(f"no silo is named {silo!r}; the silos are {', '.join(map(repr, self._fits))}")
        return self._fits[silo]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fits)

    def __len__(self) -> int:
        return len(self._fits)

    def __repr__(self) -> str:
        names = list(self._fits)
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        return f"Fits of {len(names)} silos, each alone: {shown}"


@dataclass(frozen=True)
class Independent(SFVI):
    """Each silo alone, with the settings of :class:`~numpyro_fed.SFVI`.

    ``run`` returns ``{silo: Fit}``, which goes straight into a comparison:

        >>> fits = nf.Independent(model).run(jax.random.key(0), silos)  # doctest: +SKIP
        >>> nf.compare({"together": fit, **fits}, reference=ref)  # doctest: +SKIP
    """

    def prepare(self, split: SplitModel, stack: Stack) -> Prepared:
        prepared = super().prepare(split, stack)
        mode = None if prepared.mode is None else alone(prepared.mode)
        return prepared._replace(algorithm=alone(prepared.algorithm), mode=mode)

    def started(self, split: SplitModel, server: Any, silos: tuple) -> list | None:
        """By bucket, each silo's own start."""
        by_bucket = []
        for states in silos:
            if not np.all(np.isfinite(states.server.value)):
                return None
            each = [jax.tree.map(lambda leaf, j=j: leaf[j], states) for j in range(states.server.value.shape[0])]
            add_axis = lambda tree: jax.tree.map(lambda leaf: leaf[None], tree)
            by_bucket.append([warm_start.found(split, one.server, (add_axis(one.silo),)) for one in each])
        return by_bucket

    def adopt(self, split: SplitModel, server: Any, silos: tuple, found: Any) -> tuple[Any, tuple]:
        out = []
        for states, starts in zip(silos, found, strict=True):
            adopted = []
            for j, one in enumerate(starts):
                own = jax.tree.map(lambda leaf, j=j: leaf[j], states.server)
                state = jax.tree.map(lambda leaf, j=j: leaf[j : j + 1], states.silo)
                new, (state,) = super().adopt(split, own, (state,), one)
                adopted.append(Alone(new, jax.tree.map(lambda leaf: leaf[0], state)))
            out.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *adopted))
        return server, tuple(out)

    def with_rounds(self, server: Any, silos: tuple, num_rounds: int, share: float = 1.0) -> tuple[Any, tuple]:
        out = []
        for states in silos:
            own, (silo,) = super().with_rounds(states.server, (states.silo,), num_rounds)
            out.append(Alone(own, silo))
        return server, tuple(out)

    def run(self, rng_key: Any, silos: Silos, num_rounds: int | None = None, **options: Any) -> Fits:  # type: ignore[override]
        """Fit the model to each silo by itself; the arguments are those of :meth:`numpyro_fed.SFVI.run`."""
        if options.get("init_state") is not None:
            raise ValueError("Independent takes no init_state: silos that start from a common fit are not independent")
        if options.get("schedule") is not None:
            raise ValueError("Independent takes no schedule: every silo works by itself")
        try:
            return self._each(super().run(rng_key, silos, num_rounds, **options), options.get("engine"))
        except NonFiniteError as error:
            if error.fit is not None:
                error.fit = self._each(error.fit, options.get("engine"))
            raise

    def _each(self, fit: Fit, engine: Any) -> Fits:
        method = SFVI(**{field.name: getattr(self, field.name) for field in fields(SFVI)})
        again = method.again(engine)
        return Fits({name: self._one(replace(fit, again=again), name) for name in fit.state.names})

    def _one(self, fit: Fit, name: str) -> Fit:
        state, bucket = fit.state.silo(name)
        local = jax.tree.map(lambda leaf: leaf[None], state.silo)
        at = fit.state.names.index(name)
        loss = fit.history["loss_by_silo"][:, at] if fit.history else np.zeros(0)
        nothing = np.zeros(len(loss), int)
        started = fit.history["start"] if fit.history else np.zeros(0, bool)
        history = {"loss": loss, "bytes_up": nothing, "bytes_down": nothing, "start": started}
        only = State("SFVI", (name,), ((name,),), state.server, (local,), fit.state.round)
        silos = None if fit.silos is None else fit.silos.only(name)
        return replace(fit, state=only, history=history, padded=(fit.padded[bucket],), silos=silos)
