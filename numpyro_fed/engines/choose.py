"""Which engine suits which silos."""

from typing import Any

from numpyro_fed.engines.base import Engine
from numpyro_fed.engines.streamed import Streamed
from numpyro_fed.engines.vmap import Vmap

MOST_AT_ONCE = 1000  # silos of a store that may take part in one round without the user's saying so


def default_engine(silos: Any) -> Engine:
    """All silos in one program, or each cohort read from a store, or silos elsewhere asked by their own engine."""
    own = getattr(silos, "engine", None)
    return own or (Streamed() if silos.lazy else Vmap())


def check_engine(engine: Any, method: str, stateless: bool, silos: Any, everyone: bool, stale: bool) -> Engine:
    """The engine, if it goes with the silos, the method and the schedule; else an error that says what to type."""
    if isinstance(engine, type) or not isinstance(engine, Engine):
        kind = "the class" if isinstance(engine, type) else "a"
        got = repr(engine) if isinstance(engine, str) else f"{kind} {_name(engine)}"
        raise TypeError(f"engine must be an engine, got {got}: pass engine=nf.engines.{_meant(engine)}()")
    name = f"nf.engines.{type(engine).__name__}"
    if hasattr(silos, "engine") and not hasattr(engine, "bound"):
        raise TypeError(f"these silos are elsewhere, and {name} needs their data here: leave engine= out")
    if not silos.lazy:
        if engine.reads_store:
            raise TypeError(f"{name} reads from an nf.SiloStore, got nf.Silos: leave engine= out")
        if not engine.holds_states and not stateless:
            raise TypeError(f"silos of nf.{method} keep a state between rounds, and {name} has none: leave engine= out")
        return engine
    if not stateless:
        raise TypeError(
            f"silos of nf.{method} keep a state between rounds, so it needs an nf.Silos, got an nf.SiloStore: use "
            "nf.FedPA, nf.FedAvg, nf.FedNP or nf.SEP, or hold the data in memory, nf.Silos({name: arguments})"
        )
    if not engine.reads_store:
        raise TypeError(
            f"{name} needs all data in memory, got an nf.SiloStore: leave engine= out, or pass "
            "engine=nf.engines.Streamed()"
        )
    if (everyone and silos.num_silos > MOST_AT_ONCE) or stale:
        raise ValueError(
            f"with {silos.num_silos} silos in a store, "
            + ("the server cannot hold what each received last" if stale else "all of them would be read each round")
            + ": pass schedule=nf.schedules.sampled(100)"
        )
    return engine


def _name(engine: Any) -> str:
    return engine.__name__ if isinstance(engine, type) else type(engine).__name__


def _meant(engine: Any) -> str:
    """The engine that a name or a class is like; else the default one."""
    given = engine.lower() if isinstance(engine, str) else _name(engine).lower()
    return next((name for name in ("Vmap", "Sharded", "Loopback", "Streamed") if name.lower() == given), "Vmap")
