"""What a silo does with its factor: a way to integrate out its locals, and a projection onto the family."""

from typing import Any

from numpyro_fed.precision import to_user_dtype
from numpyro_fed.solvers.base import BaseSolver, Projection, Solver, Start, Tilted
from numpyro_fed.solvers.gradient import Gradient
from numpyro_fed.solvers.hmc import HMC, NUTS
from numpyro_fed.solvers.iasg import IASG
from numpyro_fed.solvers.importance import Importance
from numpyro_fed.solvers.laplace import Laplace
from numpyro_fed.solvers.linear import NGVI, Fisher, Identity
from numpyro_fed.solvers.natural import NaturalGradient
from numpyro_fed.solvers.stein import Stein

SOLVERS: dict[str, type[BaseSolver]] = {
    kind.name: kind
    for kind in (Importance, Stein, HMC, NUTS, Laplace, NaturalGradient, Gradient, IASG, Fisher, NGVI, Identity)
}


def as_solver(solver: Any) -> Solver:
    """A solver from its name, any object that is one, or an error that says what to type."""
    if isinstance(solver, Solver) and not isinstance(solver, type):
        return solver
    if isinstance(solver, str) and solver in SOLVERS:
        return SOLVERS[solver]()
    raise ValueError(
        f"solver must be one of {', '.join(map(repr, SOLVERS))}, an nf.solvers object, or an object with the members "
        f"of nf.solvers.Solver, got {solver!r}"
    )


__all__ = [
    "HMC",
    "IASG",
    "NGVI",
    "NUTS",
    "BaseSolver",
    "Fisher",
    "Gradient",
    "Identity",
    "Importance",
    "Laplace",
    "NaturalGradient",
    "Projection",
    "Solver",
    "Start",
    "Stein",
    "Tilted",
    "as_solver",
    "to_user_dtype",
]
