"""Partitioned variational inference (Ashman et al. 2022): EP's algebra with free energies for moments."""

from dataclasses import dataclass
from typing import Any, ClassVar

from numpyro_fed.methods.factorised import Factorised
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.families import as_family
from numpyro_fed.solvers import Gradient, NaturalGradient, Solver, as_solver

MOST_NATURAL = 200  # dimensions in which fixed points are still enough for a full covariance


@dataclass(frozen=True)
class PVI(Factorised):
    """Partitioned variational inference: every silo minimises its local free energy against its cavity.

    Its fixed points are those of variational inference on the pooled data. Schedules make its three variants:
    sequential, synchronous, asynchronous.

    Args:
        model: an ordinary NumPyro model, called as ``model(**silos[name])``.
        family: ``"full"``, ``"diagonal"`` or ``"identity"``: the normal over the unconstrained globals.
        damping: the share of a proposed change that the server accepts, in (0, 1].
        solver: ``"natural"`` (natural gradients, exact in one step where a factor is normal; the default) or
            ``"gradient"`` (reparametrised gradients; the default above 200 dimensions and for families without
            correlations), or an object such as
            ``nf.solvers.NaturalGradient(num_points=256)``. Local latents are integrated by quadrature where rows
            allow; ``marginal="importance_weighted", num_nodes=K`` takes a bound with K draws a row instead.
        server_optim, tolerance, local, shared: as for :class:`~numpyro_fed.EP`.

    A mean-field Bayesian network is ``nf.PVI(model, family="diagonal", damping=0.2, solver=solver)`` with ``solver =
    nf.solvers.Gradient(num_steps=1000, num_particles=2, batch_size=256)``: time and memory are linear in its weights.

    Example:
        >>> fit = nf.PVI(model).run(jax.random.key(0), silos, schedule="sequential", progress_bar=False)
        >>> fit.summary().index.tolist()
        ['beta[0]', 'beta[1]']
    """

    more_draws: ClassVar[str] = "nf.solvers.Gradient(num_particles=16)"

    def _check_solver(self, solver: Any) -> Solver:
        found = as_solver(solver)
        if not getattr(found, "minimises_free_energy", False):
            raise ValueError(f"nf.PVI's solver is 'natural' or 'gradient', got {solver!r}, which is nf.EP's")
        return found

    def _default_solver(self, split: SplitModel, quadrature: bool) -> Solver:
        # without correlations a natural-gradient step is Jacobi's, which swings on correlated globals
        full = as_family(self.family).kind == "full"
        return NaturalGradient() if full and split.dim <= MOST_NATURAL else Gradient()
