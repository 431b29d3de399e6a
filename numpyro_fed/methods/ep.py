"""Expectation propagation (FedEP), and stochastic expectation propagation (FedSEP): Guo et al. 2023."""

from dataclasses import dataclass
from typing import Any, ClassVar

from numpyro_fed.methods.factorised import Factorised
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.solvers import HMC, Importance, Solver, Stein, as_solver


@dataclass(frozen=True)
class EP(Factorised):
    """Expectation propagation: every silo matches the moments of its tilted distribution.

    Args:
        model: an ordinary NumPyro model, called as ``model(**silos[name])``.
        family: ``"full"``, ``"diagonal"`` or ``"identity"`` (one variance): the normal over the unconstrained globals.
        damping: the share of a proposed change that the server accepts, in (0, 1]. By default 1 for exact solvers when
            all silos speak or one after another, 0.5 where cohorts are drawn or messages are stale, and falling with
            the number of visits where the solver draws samples.
        solver: how a silo finds moments: ``"importance"`` (importance sampling on fixed points; the default in up to 20
            dimensions where locals can be integrated row by row), ``"stein"`` (the same with gradients; the default in
            up to 500), ``"hmc"`` (the default otherwise), ``"nuts"``, ``"laplace"``, or an object such as
            ``nf.solvers.HMC(num_chains=100)``. For very many dimensions, with a ``"diagonal"`` or ``"identity"``
            family: ``"fisher"``, ``"ngvi"``, ``"iasg"``, ``"identity"`` (the paper's L, V, M and I), which take time
            and memory linear in their number.
        server_optim: an optax optimiser over the natural parameters, as adaptive damping; sites move with q.
        tolerance: the run stops when in a sweep over all silos no mean moves by this many sds (nor the root of the
            symmetrised KL by as much), after 50 sweeps at most; 0 never does. With solvers that draw, when the Monte
            Carlo error that they leave in the posterior is below five times this and nothing moves beyond that.
        max_move: from the second sweep on a silo moves no mean of the posterior by more than so many sds of its cavity
            in a round (``history["held_back"]``); by default there is no limit, for the only silo with a treatment
            arm must move a lot.
        local, shared: names of sites or plates, where the automatic partition is to be overridden.

    Example:
        >>> fit = nf.EP(model).run(jax.random.key(0), silos, progress_bar=False)
        >>> fit.summary().index.tolist()
        ['beta[0]', 'beta[1]']
    """

    def _check_solver(self, solver: Any) -> Solver:
        return as_solver(solver)

    def _default_solver(self, split: SplitModel, quadrature: bool) -> Solver:
        if not quadrature or split.dim > Stein.most_dims:
            return HMC()
        return Importance() if split.dim <= Importance.most_dims else Stein()


@dataclass(frozen=True)
class SEP(EP):
    """EP with stateless silos: one site for all, of which a silo takes out its share n_j / N.

    The server holds the prior and the product of all factors, whatever the number of silos. The answer is that of EP
    where silos are alike, and close to it where they are not. Arguments as for :class:`EP`.

    ``history["loss"]`` is no estimate of the evidence, as EP's is: each silo's term is measured against its share of
    the common site, and the terms of silos that differ do not add up (by .7 and .9 nats on models of a few rows). It
    tells whether the rounds come to rest, and nothing about which model is better.

    Models without local latents may be fitted to a :class:`~numpyro_fed.SiloStore`. How many observations all its silos
    have together is not known beforehand: N is estimated from those that were heard, first from an example of a few.
    """

    tied: ClassVar[bool] = True
    stateless: ClassVar[bool] = True
