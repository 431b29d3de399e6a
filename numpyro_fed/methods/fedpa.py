r"""Federated posterior averaging (Al-Shedivat, Gillenwater, Xing and Rostamizadeh 2021).

If every silo's posterior were normal, :math:`N(\mu_k, \Sigma_k)`, the mode of their product would solve

.. math:: \sum_k n_k \Sigma_k^{-1} (w - \mu_k) = 0

so a silo that samples its own posterior around the server's w and answers with
:math:`\Delta_k = \hat\Sigma_k^{-1} (w - \hat\mu_k)` gives the server a gradient whose zero is that mode, however much
the silos work between two rounds. Federated averaging takes the identity for :math:`\Sigma_k`, and stops elsewhere.
Covariances are shrunk estimates from few samples (:mod:`numpyro_fed.normal.moments`), and nothing in a silo is larger
than samples times dimensions.

Where we deviate. The paper has no prior: here the server adds its gradient, so that the target is the posterior's mode
(in unconstrained space); ``prior=False`` gives the paper's. Samples of averaged stochastic gradients are rescaled to
the units of mean losses: averages of K iterates with minibatches of B have the covariance of the posterior of K B
observations (Mandt, Hoffman and Blei 2017). Where silos use all of their rows, gradients have no noise, and Langevin's
is added. In the end one more round asks for the silos' precisions at the mode; their sum is a normal posterior.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from numpyro_fed.algorithm import Begun, Broadcast, FederatedAlgorithm, Left, Phase, Plan
from numpyro_fed.checks import check_count
from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.descent import Task, walk_from
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.local.walk import Flat, flat
from numpyro_fed.methods.averaging import Averaging, AveragingServer, Made, epoch
from numpyro_fed.methods.fedavg import LOCAL_STEPS, MOST_ROUNDS, ROUNDS
from numpyro_fed.methods.fedpa_posterior import DENSE, PrecisionsPosterior, dense, low_rank
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.normal import moments
from numpyro_fed.optim import falling
from numpyro_fed.precision import to_user_dtype
from numpyro_fed.solvers.draws import SAMPLERS

Array = jax.Array
FEW, MANY = 20, 100  # dimensions: up to which there are plenty of samples, and from which there are few
BATCH, RHO = 20, 1e-3  # in many dimensions
PLENTY = 10  # samples for each dimension, so that a covariance needs no shrinking
THINNING, WARMUP = 10, 200  # steps of Langevin dynamics: between two samples, and before the first
MOST_SAMPLED = 500  # dimensions in which a Hessian is still a good idea
MOST_ASKED = 100  # silos of a store, in the closing round
MOST_NUMBERS = 50_000_000  # in all messages of the closing round in many dimensions
MOMENTUM = 0.8


class Drawn(NamedTuple):
    draws: Array  # (l, d)
    gradients: Array | None  # (l, d), of the mean loss, where all of the silo's rows are used
    loss: Array  # the mean loss at the server's point


class Precisions(NamedTuple):
    """All that leaves a silo in the closing round: its precision diag(e) + Q' diag(q) Q, in units of mean losses."""

    diagonal: Array  # (d,): e
    weights: Array  # (r,): q
    directions: Array  # (r, d): Q
    rows: Array


class Closing(NamedTuple):
    server: AveragingServer
    found: Precisions  # stacked


@dataclass(frozen=True)
class FedPA(Averaging):
    r"""Posterior averaging: silos sample their own posteriors, the server finds the mode of the product.

    Args:
        model: an ordinary NumPyro model without local latents, called as ``model(**silos[name])``.
        optim: the silos' optax optimiser, whose state is carried on within a visit. By default gradient steps of one
            over the largest curvature of the silo's loss (a fifth of that with minibatches), found by power iteration.
        server_optim: the server's optax optimiser; it is given the gradient of the mean loss (in rounds of federated
            averaging, the mean of :math:`w - w_k`). By default momentum with steps of one over the largest curvature
            that silos report, falling on a cosine.
        batch_size: rows of a silo that a step looks at, drawn with replacement. By default all of them, with Langevin's
            noise; above 100 dimensions 20.
        local_steps: of the rounds of federated averaging at the beginning; by default 10, with minibatches as many as
            the later rounds have.
        proximal: FedProx's mu, in the rounds of federated averaging.
        prior: with the prior of the model, which the server owns; False for the mode of the likelihood, as the paper.
        init_loc_fn: a NumPyro initialisation strategy (``init_to_sample``) for the globals; by default near zero.
        sampler: ``"iasg"`` (iterate-averaged stochastic gradients, the paper's Algorithm 4), ``"laplace"`` or
            ``"nuts"`` (in up to 500 dimensions, where silos' likelihoods have a mode), or a function
            (:mod:`numpyro_fed.solvers.draws`).
        num_samples: l; by default 100, in up to 20 dimensions at least ten times as many, above 100 dimensions 10.
        shrinkage: of the sample covariances: ``"oas"`` or ``"rblw"`` choose from the samples; a number is the paper's
            :math:`\rho`, with :math:`\hat\Sigma = I / (1 + (\ell - 1) \rho) + \dots`, in units of mean losses (0 is the
            identity); ``math.inf`` takes the sample covariance as it is, for more samples than dimensions, and is the
            default with ten times as many. Else that is ``"oas"``, and .001 above 100 dimensions, where silos' samples
            say little of their posteriors' scales.
        thinning: K; by default an epoch of the largest silo, or 10 steps with Langevin's noise.
        num_warmup: steps before the first sample of a visit; by default an epoch, or 200.
        averaging_rounds: rounds of federated averaging at the beginning.
        stein: correct :math:`\Delta_k` by the gradients at the samples (Stein's identity), which takes most of their
            noise away. By default where steps use all of a silo's rows. With minibatches it costs about another epoch
            for each sample, and removes what the walk's own covariance has wrong; False for the paper's.
        posterior: whether a closing round looks for the posterior around the mode. Its message is l vectors.
        local, shared: names of sites or plates, where the automatic partition is to be overridden.

    Draws of the fit are those of a normal around the mode, whose precision is the prior's (above 200 dimensions: the
    diagonal of it) and the sum of the silos' shrunk estimates: as good as their samples are. The model's params stay
    at the mode.

    Example:
        >>> fit = nf.FedPA(model).run(jax.random.key(0), silos, 10)
        >>> fit.normal().covariance.shape
        (2, 2)
    """

    sampler: Any = "iasg"
    num_samples: int | None = None
    shrinkage: Any = None
    thinning: int | None = None
    num_warmup: int | None = None
    averaging_rounds: int = 5
    stein: bool | None = None
    posterior: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shrinkage is not None:
            moments.check_rho(self.shrinkage)
        check_count("num_samples", self.num_samples, least=2, optional=True)
        check_count("thinning", self.thinning, optional=True)
        check_count("num_warmup", self.num_warmup, least=0, optional=True)
        check_count("averaging_rounds", self.averaging_rounds, least=0)
        if not callable(self.sampler) and self.sampler not in ("iasg", *SAMPLERS):
            raise ValueError(
                f"sampler is {self.sampler!r}; use 'iasg', 'laplace', 'nuts', or a function sampler(rng_key, start, "
                "log_density, num_samples)"
            )
        if self.sampler == "iasg" and self.optim is not None and self.batch_size is None:
            raise ValueError(
                "the samples' spread comes from minibatches, and with all rows an optimiser of yours has no noise: "
                "pass batch_size=20, or leave optim= out (gradient steps with Langevin's noise)"
            )

    remedy: ClassVar[str] = (
        "pass init_loc_fn= (a better start), or batch_size=20 with an optimiser of smaller steps, optax.sgd(1e-3)"
    )

    def _core(self) -> "FedPA":
        return replace(self, posterior=True)

    def _averaging_rounds(self) -> int:
        return self.averaging_rounds

    def _rounds(self, sweep: int) -> int:
        return self.averaging_rounds + min(ROUNDS * sweep, MOST_ROUNDS)

    def posterior_of(self, split: SplitModel, survey: Survey) -> PrecisionsPosterior:
        return PrecisionsPosterior(split)

    def _check_model(self, split: SplitModel) -> None:
        super()._check_model(split)
        size = flat(split).size
        if self.shrinkage == math.inf and self._num(flat(split)) <= size:
            raise ValueError(
                f"shrinkage=math.inf needs more samples than the {size} dimensions: pass num_samples={PLENTY * size}, "
                "or shrinkage='oas'"
            )
        if self.sampler in SAMPLERS and split.dim > MOST_SAMPLED:
            raise PartitionError(
                f"the model has {split.dim} global dimensions, too many for sampler={self.sampler!r}, which looks at a "
                "Hessian: use sampler='iasg'"
            )

    # --- sizes ------------------------------------------------------------------------------------------------------

    def _num(self, flat: Flat) -> int:
        if self.num_samples is not None:
            return self.num_samples
        return 10 if flat.size > MANY else max(100, PLENTY * flat.size if flat.size <= FEW else 0)

    def _rho(self, flat: Flat, closing: bool = False) -> Any:
        if self.shrinkage is not None:
            return self.shrinkage
        if self._num(flat) >= PLENTY * flat.size:
            return math.inf
        return RHO if flat.size > MANY and not closing else "oas"  # which has a scale of its own

    def batch_size_for(self, split: SplitModel) -> int | None:
        own = flat(split)
        return BATCH if self.batch_size is None and self.sampler == "iasg" and own.size > MANY else self.batch_size

    def _batching(self, flat: Flat, survey: Survey, size: int | None = None) -> Batching | None:
        """Above many dimensions a silo's posterior is flat in most of them, and Langevin's noise would go astray."""
        if self.batch_size is not None or self.sampler != "iasg" or flat.size <= MANY:
            return super()._batching(flat, survey, size)
        try:
            return super()._batching(flat, survey, BATCH)
        except ValueError:  # rows that cannot be taken apart; nobody asked for it
            return None

    def _walked(self, task: Task) -> tuple[int, int, int]:
        """Steps before the first sample, samples, and steps for each."""
        before = epoch(task, WARMUP) if self.num_warmup is None else self.num_warmup
        return before, self._num(task.flat), self.thinning or epoch(task, THINNING)

    def _steps(self, task: Task) -> int:
        if self.local_steps is not None:
            return self.local_steps
        before, num, each = self._walked(task)
        return LOCAL_STEPS if task.batching is None else before + num * each

    def _server_default(self) -> Any:
        return optax.chain(optax.trace(MOMENTUM, nesterov=True), falling(0.5, 0.0005))

    # --- samples ----------------------------------------------------------------------------------------------------

    def _draws(self, task: Task, key: Array, w: Array, data: SiloData, stein: bool | None) -> Drawn:
        """Samples of the silo's posterior, in units of mean losses."""
        own: Flat = task.flat
        number = task.count(data)
        density = lambda x: task.whole(x, data)
        if self.sampler != "iasg":
            sampler = SAMPLERS[self.sampler] if isinstance(self.sampler, str) else self.sampler
            draws, loss, spread = sampler(key, w, density, self._num(own)), -density(w) / number, number
        else:
            draws, loss, spread = self._iterates(task, key, w, data, number)
        wider = lambda x: (centre := jnp.mean(x, axis=0)) + jnp.sqrt(spread) * (x - centre)
        gradients = None
        if stein or (stein is None and task.batching is None):
            gradients = wider(jax.lax.map(jax.grad(lambda x: -density(x) / number), draws))
        return Drawn(wider(draws), gradients, loss)

    def _iterates(self, task: Task, key: Array, w: Array, data: SiloData, number: Array) -> tuple[Array, Array, Array]:
        """Averages of successive iterates, the loss at the first, and the posterior's variance over theirs."""
        begin, num, each = self._walked(task)
        batching = task.batching
        curvature_key, before, after = jax.random.split(key, 3)
        # without minibatches gradients have no noise, and Langevin's is added
        walk = walk_from(task, self._goal(), curvature_key, w, data, None, None, noise=batching is None)
        draws, loss = walk.samples(w, (before, after), begin, num, each, pairs=batching is None)
        spread = number if batching is None else jnp.asarray(batching.size * each, number.dtype)
        return draws, loss, spread

    def _posterior_delta(self, task: Task, key: Array, w: Array, data: SiloData) -> tuple[Array, Array, Array]:
        draws, gradients, loss = self._draws(task, key, w, data, self.stein)
        rho = self._rho(task.flat)
        shrunk = moments.shrinkage(draws, rho)
        delta = moments.delta(w, draws, rho, shrunk)
        if gradients is not None:
            delta = moments.corrected(delta, draws, gradients, shrunk)
        return to_user_dtype(delta), loss, to_user_dtype(moments.largest(draws, shrunk, gradients))

    # --- the posterior ----------------------------------------------------------------------------------------------

    def _checks(self, made: Made, plan: Plan) -> tuple[Phase, ...]:
        if not self.posterior or made.last is None:
            return ()
        asked = self._asked(made.task, plan)
        look = Phase(
            "posterior",
            made.last,
            begin=lambda left, fresh: Begun(self._opening(made.task, left.server, asked)),
            finish=lambda left, state, info: self._closed(made.task, left, state),
            cohort=asked,
            role="check",
            effort="least",
            lacks="; it has a mode and no posterior around it",
        )
        return (look,)

    def _asked(self, task: Task, plan: Plan) -> int:
        """Everyone where that is cheap; in many dimensions no more than fit into memory."""
        own, num_silos = task.flat, task.survey.num_silos
        cohort = num_silos if plan.cohort is None or not (plan.random or not task.survey.known) else plan.cohort
        if own.size <= DENSE:
            return num_silos if task.survey.known else max(cohort, min(num_silos, MOST_ASKED))
        return max(1, min(cohort, MOST_NUMBERS // (own.size * self._num(own))))

    def _last_look(self, task: Task) -> FederatedAlgorithm:
        own: Flat = task.flat

        def broadcast(key: Array, state: Closing) -> Broadcast:
            return Broadcast(own.joined(state.server))

        def silo_step(key: Array, broadcast: Broadcast, silo: tuple, data: SiloData) -> tuple[Precisions, tuple]:
            # averages of minibatch steps have the spread of the rows' gradients; those of all rows know the curvature
            stein = True if self.stein is None and own.size <= MANY else self.stein
            draws, gradients, _ = self._draws(task, key, broadcast.common, data, stein)
            found = moments.precision(draws, moments.shrinkage(draws, self._rho(own, closing=True)), gradients)
            diagonal, weights, directions = to_user_dtype(found)
            return Precisions(diagonal, weights, directions, task.count(data)), silo

        def server_step(key: Array, state: Closing, found: Precisions) -> tuple[Closing, dict]:
            return Closing(state.server, found), {}

        aggregate = lambda messages, cohort: messages
        return FederatedAlgorithm(
            lambda key: (), lambda key, broadcast, data: (), broadcast, silo_step, aggregate, server_step
        )

    def _opening(self, task: Task, server: AveragingServer, num_asked: int) -> Closing:
        own = task.flat
        rank = min(self._num(own), own.size)
        zeros = lambda *shape: jnp.zeros((num_asked, *shape), server.z.dtype)
        return Closing(server, Precisions(zeros(own.size), zeros(rank), zeros(rank, own.size), zeros()))

    def _closed(self, task: Task, left: Left, state: Closing) -> Left:
        own, server = task.flat, left.server
        found = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.found)
        rows = found.rows * float(server.total) / found.rows.sum()  # those who were asked stand for all
        weights = (rows[:, None] * found.weights).reshape(-1)
        every = own.size <= DENSE or own.size == found.weights.shape[1]
        make = dense if every else low_rank
        around, doubt = make(
            own, own.joined(server), rows @ found.diagonal, weights, found.directions.reshape(-1, own.size), self.prior
        )
        around = jax.tree.map(lambda leaf: jnp.asarray(leaf, server.z.dtype), around)
        return left._replace(server=server._replace(posterior=around), reasons=(*left.reasons, *doubt))
