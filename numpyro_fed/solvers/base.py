"""What a silo is asked, and what it answers: the interface of all solvers."""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from numpyro_fed.algorithm import PyTree
from numpyro_fed.checks import check_count
from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal.families import Family, Natural, quotient

Array = jax.Array
MARGINALS = ("normal", "quadrature", "importance_weighted", "joint")


class Start(NamedTuple):
    """Where a solver that looks for no mode begins."""

    unheard: Array  # bool: nobody has been heard, q is the prior
    place: Array  # (d,): in q's coordinates; a standard normal draw, the same in all silos, if so, else zeros


class Tilted(NamedTuple):
    """A tilted distribution, q / site x the silo's factor: all of it but the factor, and how far things have come."""

    family: Family
    q: Natural
    site: Natural
    warming_up: Array  # bool: not every silo has been heard yet, so q says little
    q_is_known: bool = False  # it never says little: there was a start
    q_is_close: bool = True  # once settled the tilted distribution is near q; not where sites are tied
    start: Start | None = None  # of a solver that is told where to begin

    @property
    def cavity(self) -> Natural:
        """q without the silo's site."""
        return quotient(self.q, self.site)


class Projection(NamedTuple):
    """The family's member nearest to the tilted distribution, q / site x factor."""

    natural: Natural
    value: Array  # log of the integral of the tilted distribution, with naturals' own constants; float64
    ess: Array  # effective share of the points or draws, 1 where there are none
    ok: Array  # bool: it can be trusted
    frame: Any  # of the locals, where they are looked for next time; private, as all below
    local_posterior: Any = None  # the locals' mean and covariance given the globals, where the solver found them itself
    solver_state: Any = ()  # what the solver keeps between rounds


@runtime_checkable
class Solver(Protocol):
    """A way to project a tilted distribution onto the family. Any object with these members is one.

    It must be hashable, as a frozen dataclass is, for it is part of the compiled program. Where locals are to be
    integrated out in a way of its own, it has ``marginal`` and ``num_nodes``, too, where it takes minibatches
    ``batch_size``, and where silos must begin alike ``is_told_where``: see :class:`BaseSolver`.
    """

    @property
    def noisy(self) -> bool:
        """Whether answers have Monte Carlo error; the server's steps then fall with every visit."""

    @property
    def samples_locals(self) -> bool:
        """Whether it can draw the locals with the globals (:attr:`~numpyro_fed.local.integrate.Factor.joint`)."""

    def step(self, d: int, family: Family) -> float:
        """The longest step of the server, at most 1, that is stable."""

    def init_state(self, family: Family, q: Natural) -> PyTree:
        """What the silo keeps between rounds, beside its locals' frame; ``q`` is where the run begins."""

    def solve(self, key: Array, tilted: Tilted, factor: Factor, frame: Any, solver_state: PyTree) -> Projection:
        """The projection, from where the silo's locals were last time and from what the solver kept."""


@dataclass(frozen=True)
class BaseSolver:
    """What the solvers of this folder share, and defaults for those of yours."""

    marginal: str | None = None  # one of MARGINALS, or None: whatever suits the model
    num_nodes: int | None = None  # per dimension of a row, or draws a row
    name = ""
    noisy = False
    samples_locals = False
    begins_at_q = False  # once q says something; until then at the tilted mode, which costs a search and its program
    minimises_free_energy = False  # KL(q || tilted), for PVI; else moments are matched, or tried to

    def __post_init__(self) -> None:
        if self.marginal not in (None, *MARGINALS):
            raise ValueError(f"marginal must be one of {', '.join(map(repr, MARGINALS))}, got {self.marginal!r}")
        for field in fields(self):  # num_nodes and, of solvers that build on this one, num_samples, num_steps, ...
            if field.name.startswith("num_"):
                least = 0 if field.name == "num_warmup" else 1
                check_count(field.name, getattr(self, field.name), least, optional=field.default is None)

    def is_told_where(self, d: int) -> bool:
        """Whether silos are told where to begin (:class:`Start`): what has symmetries must begin alike everywhere."""
        return False

    def step(self, d: int, family: Family) -> float:
        return 1.0

    def init_state(self, family: Family, q: Natural) -> PyTree:
        return ()

    def solve(self, key: Array, tilted: Tilted, factor: Factor, frame: Any, solver_state: PyTree) -> Projection:
        raise NotImplementedError
