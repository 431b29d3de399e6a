"""Silos that are asked through bytes, as if they were in processes of their own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpyro_fed as nf
from numpyro_fed.remote.policy import PHASES, Policy
from numpyro_fed.remote.silos import RemoteSilos, connect
from numpyro_fed.remote.site import Site
from numpyro_fed.remote.transport import Direct, Failure
from numpyro_fed.remote.worker import Worker

ALL = Policy(phases=tuple(PHASES), least_rows=1, check_rows=1)


class Sites(Direct):
    """Silos in this process, each with a folder of its own. They can be killed, and be away.

    Args:
        fresh: every request is answered by a new worker, which knows what is in its folder.
        policy: of all of them, or ``{silo: Policy}``.
    """

    def __init__(self, study: Any, silos: nf.Silos, folder: Path | None, fresh: bool = False, policy: Any = ALL):
        self.study, self.data, self.folder, self.fresh = study, silos, folder, fresh
        self.policies = policy if isinstance(policy, dict) else {name: policy for name in silos.names}
        self.away: dict[str, Any] = {}  # {silo: (request number) -> whether it does not answer}
        self.asked, self.request = 0, b""
        self.requests: list[tuple[str, bytes, bytes]] = []
        self.sites = {name: self.site(name) for name in silos.names}
        super().__init__({name: self.sites[name].handle for name in silos.names})

    def site(self, name: str) -> Site:
        folder = None if self.folder is None else self.folder / name
        counts = dict(own_counts=self.data.own_counts, renumbered=self.data.renumbered)
        self.worker = Worker(name, self.data.own(name), self.study, folder, **counts)
        where = folder if folder is not None else Path("/dev/null")
        return Site(self.worker, self.study.digest, "table", where, self.policies[name])

    def ask(self, requests: Any, timeout: float) -> dict[str, Any]:
        self.asked += 1
        found: dict[str, Any] = {}
        for name, request in requests.items():
            self.request = request
            if name in self.away and self.away[name](self.asked):
                found[name] = Failure("timeout", "it did not answer in time")
                continue
            site = self.site(name) if self.fresh else self.sites[name]
            found[name] = site.handle(request)
            self.requests.append((name, request, found[name]))
        return found


def study_of(**methods: Any) -> Any:
    return SimpleNamespace(shared={}, methods=methods, digest="ab" * 32)


def elsewhere(method: Any, silos: nf.Silos, folder: Path, **options: Any) -> RemoteSilos:
    """The same silos behind bytes."""
    study = study_of(it=method)
    keep = {name: options.pop(name) for name in ("quorum", "patience", "timeout") if name in options}
    return connect(study, Sites(study, silos, folder, **options), **keep)
