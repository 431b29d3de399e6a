"""Is it the same run? Settings, model, key and data as short digests, to be kept in a file and compared."""

import platform
from dataclasses import fields
from importlib import metadata
from typing import Any

import jax

from numpyro_fed.data.silos import at_silo
from numpyro_fed.host import real_dtype
from numpyro_fed.run.digests import digest_of


def identity(method: Any, key: Any, silos: Any, asked: dict[str, Any], init_state: Any) -> dict[str, dict[str, str]]:
    """What makes a run this one: ``{what: {name: digest, or a word}}``."""
    settings = {field.name: digest_of(getattr(method, field.name)) for field in fields(method)}
    given = {name: digest_of(value) for name, value in asked.items()}
    # a state's structure is another's business: its numbers are its identity
    start = init_state if init_state is None else jax.tree.leaves(getattr(init_state, "state", init_state))
    some, own = silos.example() if silos.lazy else silos, {}
    for name in some.names:
        if hasattr(some, "described"):  # silos elsewhere notice themselves that their data have changed
            own[name] = digest_of(dict(some.described)[name])
            continue
        with at_silo(name):
            own[name] = digest_of(dict(some.own(name)))
    return {
        "method": {type(method).__name__: str(real_dtype())},
        "settings": settings,
        "arguments": {"rng_key": digest_of(key), **given, "init_state": digest_of(start)},
        "silos": own,
        "data": {
            "shared": digest_of(dict(silos.shared)),
            "number of silos": str(len(silos.names)),
            # states are stacked in it
            "the order of silos": "" if silos.lazy else digest_of(tuple(silos.names)),
            "which ints are counts": digest_of((silos.own_counts, getattr(silos, "renumbered", frozenset()))),
        },
    }


def versions() -> dict[str, str]:
    """Of what numbers depend on to the last bit."""
    found = {name: metadata.version(name) for name in ("numpyro_fed", "jax", "jaxlib", "numpy", "numpyro", "optax")}
    return {**found, "Python": platform.python_version(), "platform": jax.default_backend()}


def difference(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> str | None:
    """What a run is asked for that another was not, in words; None: they are the same."""
    if before["method"] != now["method"]:
        tell = lambda one: " in ".join(next(iter(one["method"].items())))
        return f"it is of {tell(before)}, and this is {tell(now)}"
    if set(before["silos"]) != set(now["silos"]):
        gone, new = (sorted(set(a["silos"]) - set(b["silos"])) for a, b in ((before, now), (now, before)))
        told = [f"missing now: {', '.join(gone)}"] * bool(gone) + [f"not in the file: {', '.join(new)}"] * bool(new)
        return f"it has other silos ({'; '.join(told)})"
    for name, found in before["silos"].items():
        if now["silos"][name] != found:
            return f"the data of silo {name!r} are others now"
    for name, found in before["settings"].items():
        if now["settings"].get(name) != found:
            return "the model is another" if name == "model" else f"the setting {name} is another"
    for group in ("arguments", "data"):
        for name, found in before[group].items():
            if now[group].get(name) != found:
                return f"{name} is another"
    return None
