"""The sites of a model and where each lives, as a value that prints as a table."""

from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from numpyro_fed.data.axis import Axis
from numpyro_fed.model.trace import SiteShape


class Site(NamedTuple):
    """Where a site lives. Dims are counted from the right, of the log density and of the value."""

    name: str
    role: str  # global, local, enumerated, observed, factor, deterministic, param, constant
    at_server: bool
    axes: tuple[tuple[str, int], ...]  # (axis, dim of the log density)
    value_axes: tuple[tuple[str, int], ...]
    shape: SiteShape


@dataclass(frozen=True)
class Partition:
    """The sites of a model, divided between the server and the silos. Prints as a table."""

    sites: tuple[Site, ...]
    axes: tuple[Axis, ...]
    silo_plates: tuple[str, ...]
    num_silos: int
    reference: str = ""  # the silo whose shapes the sites show
    static_support: tuple[str, ...] = ()  # observed sites whose support depends on no latent
    named: tuple[str, ...] = ()  # plates and sites named in local=
    notes: tuple[str, ...] = ()  # what might not be meant; shown below the table
    shared: tuple[str, ...] = field(default=(), compare=False)  # plates and sites named in shared=
    foretell: Any = field(default=None, compare=False, repr=False)  # (methods) -> what they would send

    def messages(self, *methods: Any) -> pd.DataFrame:
        """What each method would send in a round, before anything is: method, phase, direction, field, shape, bytes.

        Of one silo and one round of each phase, after a survey; of the check the round at points, not the looks that
        follow it. A run's own ledger is :meth:`numpyro_fed.results.fit.Fit.ledger`.

        Args:
            methods: such as ``nf.EP(model, family="diagonal")``; by default one of each kind, as it comes.
        """
        if self.foretell is None:
            raise ValueError("this partition is of a fit, and has no silos to ask: use nf.partition(model, silos)")
        return self.foretell(methods or None)

    def lengths(self, silo: str) -> dict[str, int]:
        """Of a silo's axes, without padding."""
        return {axis.name: axis.lengths[silo] for axis in self.axes}

    def _names(self, role: str) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites if site.role == role)

    @property
    def global_sites(self) -> tuple[str, ...]:
        return self._names("global")

    @property
    def local_sites(self) -> tuple[str, ...]:
        return self._names("local")

    @property
    def enumerated_sites(self) -> tuple[str, ...]:
        """Discrete latents of the silos, which are summed out."""
        return self._names("enumerated")

    @property
    def observed_sites(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites if site.role in ("observed", "factor"))

    @property
    def params(self) -> tuple[str, ...]:
        return self._names("param")

    def __getitem__(self, name: str) -> Site:
        return next(site for site in self.sites if site.name == name)

    def _rows(self) -> list[tuple[str, ...]]:
        shown = [site for site in self.sites if site.role != "constant"]
        return [
            (
                site.name,
                _role(site),
                ", ".join(plate for plate, _, _ in site.shape.plates) or "-",
                _shape_text(site),
                "nothing" if site.role == "deterministic" and not site.at_server else LEAVES.get(site.role, "?"),
            )
            for site in shown
        ]

    def _suggestion(self) -> str:
        size = sum(int(np.prod(site.shape.unconstrained or ())) for site in self.sites if site.role == "global")
        own = self.local_sites or self.enumerated_sites
        why = "local latents stay in their silos" if own else "no local latents"
        if self.params:
            why += ", numpyro.param values"
        answers = {"local": self.named, "shared": self.shared}
        model = "".join(["model", *(f", {word}={list(names)}" for word, names in answers.items() if names)])
        method = _method(size, self.params, model)
        return f"{size} global dimensions, {why}: try nf.{method}.run(jax.random.key(0), silos)"

    @property
    def table(self) -> str:
        """The sites, their roles and shapes, as text."""
        rows = [HEAD, *self._rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
        rows.insert(1, tuple("-" * width for width in widths))
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def __str__(self) -> str:
        below = [self._suggestion()] + ["what each method would send: part.messages()"] * (self.foretell is not None)
        return "\n".join([self.table, *(f"note: {note}" for note in self.notes), *below])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        line = lambda row, tag: "".join(f"<{tag} style='text-align:left'>{escape(cell)}</{tag}>" for cell in row)
        body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in self._rows())
        below = "".join(f"<p>note: {escape(note)}</p>" for note in self.notes)
        return (
            f"<table><thead><tr>{line(HEAD, 'th')}</tr></thead><tbody>{body}</tbody></table>"
            f"{below}<p>{escape(self._suggestion())}</p>"
        )


def _method(size: int, params: tuple[str, ...], model: str) -> str:
    """A few rounds where EP can: its messages are quadratic in the globals, and it has no place for theta."""
    if 0 < size <= FEW_GLOBALS and not params:
        return f"EP({model})"
    guide = "" if size <= FULL_COVARIANCE else ', guide=nf.guides.StructuredNormal(global_cov="diagonal")'
    return f"SFVI({model}{guide})"


FEW_GLOBALS = 200  # as many as EP was measured with (docs/accuracy.md), and a start is looked for in
FULL_COVARIANCE = 500
HEAD = ("site", "role", "plates", "shape", "what leaves the silo")
LEAVES = {
    "global": "a gradient or a factor",
    "local": "nothing",
    "enumerated": "nothing",
    "observed": "nothing",
    "factor": "nothing",
    "deterministic": "-",
    "param": "a gradient",
}


def _role(site: Site) -> str:
    if site.role in ("observed", "factor"):
        return f"{site.role} (server, once)" if site.at_server else site.role
    if site.role == "deterministic":
        return "deterministic of globals" if site.at_server else "deterministic, local"
    return {"param": "param (theta)", "enumerated": "local, summed out"}.get(site.role, site.role)


def _shape_text(site: Site) -> str:
    along = {len(site.shape.value) + dim: axis for axis, dim in site.value_axes}
    cells = [f"n[{along[i]}]" if i in along else str(size) for i, size in enumerate(site.shape.value)]
    return "(" + ", ".join(cells) + ("," if len(cells) == 1 else "") + ")"
