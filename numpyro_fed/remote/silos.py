"""Silos that are elsewhere, in the place of an :class:`~numpyro_fed.Silos`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpyro_fed.data.inputs import shared_digest
from numpyro_fed.data.silos import Silos, inside
from numpyro_fed.remote.engine import AWAY, Remote, RemoteError
from numpyro_fed.remote.envelope import NO_RUN
from numpyro_fed.remote.opening import Description, silos_like, zeros
from numpyro_fed.remote.post import Post
from numpyro_fed.remote.runs import shared_of
from numpyro_fed.remote.transport import Failure, Transport


class DataElsewhere(RuntimeError):
    """The data, and the latents, of a silo are asked for where they are not."""


class RemoteSilos(Silos):
    """What the server knows of silos elsewhere: names, shapes, types and ints. Made by :func:`connect`.

    It goes where an :class:`~numpyro_fed.Silos` goes: ``study.methods["EP"].run(key, silos)``. What is made of a silo's
    data or latents is made there; asked for here, it says so.
    """

    study: Any
    engine: Remote
    described: list[tuple[str, Description]]
    told: dict[str, list[str]]
    missing: tuple[str, ...] = ()  # who did not answer when the silos were first asked

    def name_of(self, method: Any) -> str:
        """What the study file calls a method."""
        for name, own in self.study.methods.items():
            if own is method or own == method:
                return name
        raise ValueError(
            f"the study file has no such {type(method).__name__}, so silos do not know it: add it to its methods = "
            "{...} at every end"
        )

    def own(self, name: str) -> dict[str, Any]:
        if inside() == name:
            raise DataElsewhere(
                f"the data and the latents of {name!r} are in {name!r}: draws of them are made there, `numpyro-fed fit "
                "--site site.toml`. Here are the globals: fit.sample, fit.summary(), fit.to_arviz(local=False)"
            )
        return super().own(name)

    def only(self, *names: str) -> "RemoteSilos":
        chosen = {name: described for name, described in self.described if name in names}
        missing = [name for name in names if name not in chosen]
        if missing:
            raise KeyError(f"no silo is named {missing[0]!r}; the silos are {', '.join(map(repr, self.names))}")
        found = _made(self.study, self.engine, [(name, chosen[name]) for name in names], self.told)
        found.missing = self.missing
        return found

    def joined(self, others: Silos) -> "RemoteSilos":
        if not isinstance(others, RemoteSilos):
            raise TypeError("a new silo of a run elsewhere is elsewhere, too: nf.remote.connect(study, transport)")
        told = {what: sorted({*self.told[what], *others.told[what]}) for what in self.told}
        return _made(self.study, self.engine, [*self.described, *others.described], told)

    def changed(self, change: Any) -> Silos:
        raise DataElsewhere("the silos' data are elsewhere: change them there, before the study begins")

    def sharing(self, **arguments: Any) -> Silos:
        raise DataElsewhere("shared arguments are the study file's, at every end: add them there")

    @property
    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes that went up and down for each silo, envelopes and handshakes included."""
        return dict(self.engine.post.traffic)


def connect(
    study: Any,
    transport: Transport,
    *,
    names: tuple[str, ...] | None = None,
    timeout: float = 600.0,
    quorum: int | None = None,
    patience: int = 3,
    seed: str = "",
) -> RemoteSilos:
    """Ask the silos of a transport who they are, and what shapes their data have.

    Args:
        study: the study file, :meth:`numpyro_fed.remote.Study.load`; silos have the same.
        transport: how they are reached.
        names: of the silos; by default all that the transport knows.
        timeout: seconds that any reply is waited for: also for a silo whose process is started again meanwhile.
        quorum: silos without which a run stops, with the fit so far. By default all of them: a run without one is
            another posterior.
        patience: times, one after the other, that a silo is not heard before it is lost for good.
        seed: where a sequence of processes does one run: what its names are made of.

    Returns:
        silos for ``study.methods["EP"].run(key, silos)``.
    """
    chosen = transport.names if names is None else tuple(names)
    least = len(chosen) if quorum is None else quorum
    if not 1 <= least <= len(chosen):
        raise ValueError(f"quorum must be a number of silos, from 1 to {len(chosen)}, got {quorum!r}")
    engine = Remote(Post(transport, study.digest, NO_RUN), timeout, least, patience, seed=seed)
    said = engine.told("hello", {name: ({}, b"") for name in chosen})
    shared = shared_digest(shared_of(study))
    missing: list[str] = []
    described, told = [], dict[str, set[str]](own_counts=set(), renumbered=set())
    for name in chosen:
        answer = said[name]
        if isinstance(answer, Failure) and answer.kind in AWAY:
            missing.append(name)
            continue
        if isinstance(answer, Failure):
            raise RemoteError(f"silo {name!r} cannot take part: {answer.told}")
        body, _ = answer
        if not _is_description(body):
            raise RemoteError(f"silo {name!r} describes its data in another form than this version's")
        if body.get("shared") != shared:
            raise RemoteError(f"silo {name!r} has other shared arguments: its study file reads them from elsewhere")
        described.append((name, body["silo"]))
        for what, known in told.items():
            known.update(body[what])
    if len(described) < least:
        away = " and ".join(f"{name!r} ({said[name].told})" for name in missing)
        raise RemoteError(
            f"silo {away} did not answer, and the {len(described)} that did are fewer than quorum={least}: start the "
            "missing ones, wait longer, timeout=, or go on without them, quorum="
        )
    found = _made(study, engine, described, {what: sorted(known) for what, known in told.items()})
    found.missing = tuple(missing)
    return found


def _is_description(body: Mapping[str, Any]) -> bool:
    """Whether this is what a silo answers to a hello: a silo could say anything."""
    words = [body.get(what) for what in ("own_counts", "renumbered")]
    if not all(isinstance(found, list) and all(isinstance(one, str) for one in found) for found in words):
        return False
    try:
        return isinstance(zeros(body.get("silo", 0)), dict)
    except (ValueError, TypeError, KeyError, AttributeError):
        return False


def _made(
    study: Any, engine: Remote, described: list[tuple[str, Description]], told: Mapping[str, list[str]]
) -> RemoteSilos:
    plain = silos_like(dict(described), shared_of(study), told)
    silos = object.__new__(RemoteSilos)
    silos.__dict__.update(plain.__dict__)
    silos.study, silos.engine, silos.told = study, replace(engine, memory=None), dict(told)
    silos.described = [(name, one) for name, one in described]
    return silos
