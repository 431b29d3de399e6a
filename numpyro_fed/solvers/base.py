"""What a silo is asked, and what it answers: the interface of all solvers."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal.families import Family, Natural, quotient

Array = Any


class Tilted(NamedTuple):
    """A tilted distribution, q / site x the silo's factor: all of it but the factor, and how far things have come."""

    family: Family
    q: Natural
    site: Natural
    warming_up: Array  # bool: not every silo has been heard yet, so q says little
    q_is_close: bool = True  # once settled the tilted distribution is near q; not where sites are tied

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


@dataclass(frozen=True)
class Solver:
    """A way to project a tilted distribution. A frozen value: part of the compiled program."""

    marginal: Any = None  # "quadrature", "iw", "joint" or None: whatever suits the model
    num_nodes: int | None = None  # per dimension of a row, or draws a row
    name = ""
    samples_locals = False  # it can sample locals with the globals
    noisy = False  # its answers have Monte Carlo error

    def __post_init__(self) -> None:
        if self.marginal not in (None, "quadrature", "iw", "joint"):
            raise ValueError(f"marginal must be 'quadrature', 'iw' or 'joint', got {self.marginal!r}")
        num = self.num_nodes
        if num is not None and (isinstance(num, bool) or not isinstance(num, int) or num < 1):
            raise ValueError(f"num_nodes must be an int of at least 1, got {num!r}")

    def step(self, d: int, family: Family) -> float:
        """The longest stable step."""
        return 1.0

    def start(self, family: Family, d: int) -> Any:
        """What the silo keeps between rounds, beside its locals' frame."""
        return ()

    def solve(self, key: Array, tilted: Tilted, factor: Factor, frame: Any, solver_state: Any) -> Projection:
        raise NotImplementedError
