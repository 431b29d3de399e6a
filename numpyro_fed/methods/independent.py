"""Each silo alone: what federation is to be measured against.

Every silo runs SFVI with itself as the only silo, all of them side by side in one compiled program. Nothing is shared
but the model: each silo has its own start, its own posterior of the globals and its own theta.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Plan, Program
from numpyro_fed.data.silos import Silos
from numpyro_fed.engines.base import Engine
from numpyro_fed.guides.posterior import GuidePosterior
from numpyro_fed.memo import remembered
from numpyro_fed.methods.rest import still_falling
from numpyro_fed.methods.sfvi import SFVI
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.state import State
from numpyro_fed.run.diagnose import NonFiniteError
from numpyro_fed.run.mode import mode_to_warm_start

Array = jax.Array


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
        total = {"loss": jnp.sum(info["loss"])} | (
            {"_gain": jnp.max(info["_gain"]), "_best": jnp.min(info["_best"])} if "_best" in info else {}
        )
        return server, {**total, **{f"{name}_by_silo": rows for name, rows in info.items() if name[0] != "_"}}

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

        >>> fits = nf.Independent(model).run(jax.random.key(0), silos, 300)
        >>> comparison = nf.compare({"together": fit, **fits}, reference=ref)
        >>> comparison.table["method"].unique().tolist()
        ['together', 'leeds', 'york']
    """

    patient: ClassVar[bool] = False

    def compile(self, split: SplitModel, survey: Survey, plan: Plan) -> Program:
        together = super().compile(split, survey.only(0), plan)
        starts, blocks = ([phase for phase in together.phases if phase.role == role] for role in ("start", "rounds"))
        begin = blocks[0]  # silos that come to rest at different times would wait for one another
        phases = [phase._replace(algorithm=_alone(phase.algorithm)) for phase in (*starts[:1], begin)]
        if starts:
            phases[0] = phases[0]._replace(begin=lambda left, fresh: Begun(fresh), finish=_all_started)

        def begin_silo(given: tuple, state: Alone, local: Alone | None) -> Alone:
            warm = None if local is None else mode_to_warm_start(split, local.server)
            begun = begin.begin(Left(warm=warm), state.server)
            assert begun is not None
            server, own = begun
            return Alone(server, begin.begin_silo(own, state.silo, None if local is None else local.silo))

        phases[-1] = phases[-1]._replace(
            begin=lambda left, fresh: Begun(fresh), begin_silo=begin_silo, finish=_finish, shorter=None
        )
        return Program(tuple(phases), AlonePosterior(self.posterior_of(split, survey)))

    def run(self, rng_key: Any, silos: Silos, num_rounds: int | None = None, **options: Any) -> Fits:  # type: ignore[override]
        """Fit the model to each silo by itself; the arguments are those of :meth:`numpyro_fed.Method.run`."""
        if options.get("init_state") is not None:
            raise ValueError("Independent takes no init_state: silos that start from a common fit are not independent")
        if options.get("schedule") is not None:
            raise ValueError("Independent takes no schedule: every silo works by itself")
        if hasattr(silos, "engine"):
            raise ValueError(
                "a silo's own fit is made in the silo, and stays there: `numpyro-fed alone --site site.toml`, or "
                "nf.SFVI(model).run(key, nf.Silos({name: arguments})) where its data are"
            )
        try:
            return self._each(super().run(rng_key, silos, num_rounds, **options), options.get("engine"))
        except NonFiniteError as error:
            if error.fit is not None:
                error.fit = self._each(error.fit, options.get("engine"))
            raise

    def _each(self, fit: Fit, engine: Engine | None) -> Fits:
        return Fits({name: self._one(fit, name, engine) for name in fit.state.names})

    def _one(self, fit: Fit, name: str, engine: Engine | None) -> Fit:
        state, bucket = fit.state.silo(name)
        local = jax.tree.map(lambda leaf: leaf[None], state.silo)
        at = fit.state.names.index(name)
        loss = fit.history["loss_by_silo"][:, at] if fit.history else np.zeros(0)
        nothing = np.zeros(len(loss), int)
        started = fit.history["start"] if fit.history else np.zeros(0, bool)
        return replace(
            fit,
            posterior=self.posterior_of(fit.split, fit.survey),
            state=State("SFVI", (name,), ((name,),), state.server, (local,), fit.state.round),
            history={"loss": loss, "bytes_up": nothing, "bytes_down": nothing, "start": started},
            padded=(fit.padded[bucket],),
            silos=None if fit.silos is None else fit.silos.only(name),
            survey=fit.survey.only(at),
            records=(),
            sent=(),
            evidence="a silo's own fit is not checked",
            again=SFVI(**{field.name: getattr(self, field.name) for field in fields(SFVI)}).again(engine),
        )


def _alone(algorithm: FederatedAlgorithm) -> FederatedAlgorithm:
    return remembered(lambda: alone(algorithm), "alone", algorithm)


def _finish(left: Left, server: tuple, info: dict[str, Any]) -> Left:
    reason = still_falling(info["loss"])
    return left._replace(server=server, reasons=(reason,) if reason else (), moving=bool(reason))


def _all_started(left: Left, server: tuple, info: dict[str, Any]) -> Left | None:
    """Whether every silo met a finite density."""
    return left if np.isfinite(info["_best"][-1]) else None


class AlonePosterior:
    """Of all silos at once there is none; each silo's states have their own. For the watch in the loop alone."""

    def __init__(self, inner: GuidePosterior) -> None:
        self.inner = inner

    def sample(self, key: Array, server: tuple) -> Array:
        return jnp.full(self.inner.split.dim, jnp.nan)

    def sample_local(self, key: Array, z: Array, server: tuple, silo: Alone, data: Any) -> dict[str, Array]:
        return self.inner.sample_local(key, z, silo.server, silo.silo, data)

    def theta(self, server: tuple) -> dict[str, Any]:
        return {}

    def normal(self, server: tuple) -> None:
        return None
