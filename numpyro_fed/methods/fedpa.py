r"""Federated posterior averaging (Al-Shedivat, Gillenwater, Xing and Rostamizadeh 2021).

If every silo's posterior were normal, :math:`N(\mu_k, \Sigma_k)`, the mode of their product would solve

.. math:: \sum_k n_k \Sigma_k^{-1} (w - \mu_k) = 0

so a silo that samples its own posterior around the server's w and answers with
:math:`\Delta_k = \hat\Sigma_k^{-1} (w - \hat\mu_k)` gives the server a gradient whose zero is that mode, however much
the silos work between two rounds. Federated averaging takes the identity for :math:`\Sigma_k`, and stops elsewhere.
Covariances are shrunk estimates from few samples (:mod:`numpyro_fed.normal.moments`), and nothing in a silo is larger
than samples times dimensions.

What that targets. The zero of the mean of all :math:`\Delta_k` is the mode of the product of the *normals*, each with
the mean and covariance of a silo's own posterior. Where likelihoods are normal, that is the posterior's mode. Where
they are not (a logistic regression in silos of twenty rows), silos look at their likelihoods far from where the others
are, and the answer is neither the posterior's mode nor its spread, however many rounds and samples there are: more than
one posterior sd off, where silos differ. So in up to 200 dimensions closing rounds look at one point together and take
Newton steps until the posterior's gradient is zero (:mod:`numpyro_fed.methods.closing`); ``closing="samples"`` keeps
the point of the paper's algorithm, and adds up the precisions of the silos' samples around it.

Where we deviate. The paper has no prior: here the server adds its gradient, so that the target is the posterior's mode
(in unconstrained space); ``prior=False`` gives the paper's. Averages of K iterates with minibatches of B have the
covariance of the posterior of K B observations (Mandt, Hoffman and Blei 2017), and are rescaled to the units of mean
losses; the paper's code takes them as they are, and so do we where ``shrinkage`` is its :math:`\rho`. Where silos use
all of their rows, gradients have no noise, and Langevin's is added.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax

from numpyro_fed.algorithm import Begun, Phase, Plan
from numpyro_fed.checks import check_count, is_number
from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.descent import Task, walk_from
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.local.walk import Flat, flat
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.methods.averaging import Averaging, Made, epoch
from numpyro_fed.methods.closing import MOST_ROUNDS as MOST_CLOSING
from numpyro_fed.methods.closing import arrived, climb_phase
from numpyro_fed.methods.fedavg import LOCAL_STEPS, MOST_ROUNDS, ROUNDS
from numpyro_fed.methods.fedpa_posterior import DENSE, PrecisionsPosterior
from numpyro_fed.methods.sampled_closing import closed, opening, sampled_look
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.normal import moments
from numpyro_fed.optim import falling
from numpyro_fed.precision import to_user_dtype
from numpyro_fed.solvers.draws import SAMPLERS

Array = jax.Array
FEW, MANY = 20, 100  # dimensions: up to which there are plenty of samples, and from which there are few
BATCH, RHO = 20, 1e-3  # in many dimensions; rho of samples in units of mean losses
CLOSINGS = ("newton", "samples")
PLENTY = 10  # samples for each dimension, so that a covariance needs no shrinking
THINNING, WARMUP = 10, 200  # steps of Langevin dynamics: between two samples, and before the first
MOST_SAMPLED = 500  # dimensions in which a Hessian is still a good idea
MOST_ASKED = 100  # silos of a store, in the closing round
MOST_NUMBERS = 50_000_000  # in all messages of the closing round in many dimensions
MOMENTUM = 0.8


class Drawn(NamedTuple):
    """Samples of a silo's posterior, spread as that of its mean loss is."""

    draws: Array  # (l, d)
    gradients: Array | None  # (l, d), of the mean loss, where all of the silo's rows are used
    loss: Array  # the mean loss at the server's point
    spread: Array | None  # variances over those of the paper's samples, averages of minibatch steps; None: as they are


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
        init_loc_fn: a NumPyro initialisation strategy (``init_to_sample``) for the globals; by default the posterior's
            mode, as far as ``start_rounds`` of Newton's method find it.
        start_rounds: at most so many rounds of mode finding before the first. With 0, above 200 dimensions, and where
            cohorts or stores leave silos out, the first point is near zero.
        sampler: ``"iasg"`` (iterate-averaged stochastic gradients, the paper's Algorithm 4), ``"laplace"`` or
            ``"nuts"`` (in up to 500 dimensions, where silos' likelihoods have a mode), or a function
            (:mod:`numpyro_fed.solvers.draws`).
        num_samples: l; by default 100, in up to 20 dimensions at least ten times as many, above 100 dimensions 10.
        shrinkage: of the sample covariances: ``"oas"`` or ``"rblw"`` choose from the samples; a number is the paper's
            :math:`\rho`, with :math:`\hat\Sigma = I / (1 + (\ell - 1) \rho) + \dots` (0 is the identity): of averaged
            minibatch steps as they are, of other samples in units of mean losses; ``math.inf`` takes the sample
            covariance as it is, for more samples than dimensions, and is the default with ten times as many. Else that
            is ``"oas"``, and above 100 dimensions, where silos' samples say little of their posteriors' scales, .001
            in units of mean losses (a :math:`\rho` of K B / 1000, and a server's step that is the smaller).
        thinning: K; by default an epoch of the largest silo, or 10 steps with Langevin's noise.
        num_warmup: steps before the first sample of a visit; by default an epoch, or 200.
        averaging_rounds: rounds of federated averaging at the beginning.
        stein: correct :math:`\Delta_k` by the gradients at the samples (Stein's identity), which takes most of their
            noise away. By default where steps use all of a silo's rows. With minibatches it costs about another epoch
            for each sample, and removes what the walk's own covariance has wrong; False for the paper's.
        posterior: whether closing rounds look for the posterior around the mode.
        closing: ``"newton"``: rounds (at most 20, mostly two or three) in which silos tell gradient and Hessian at the
            server's point, until the gradient is zero; the default in up to 200 dimensions where every silo takes part.
            ``"samples"``: one round, whose message is l vectors; the default elsewhere.
        local, shared: names of sites or plates, where the automatic partition is to be overridden.

    Draws of the fit are those of a normal. After Newton steps it is the Laplace approximation at the posterior's mode;
    else it is around the rounds' own point, its precision the prior's (above 200 dimensions: the diagonal of it) and
    the sum of the silos' shrunk estimates: as good as their samples are. The model's params stay at the mode.
    ``fit.state.server`` keeps the rounds' own point. A gradient that is not small in posterior sds is a reason in
    ``fit.verdict``.

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
    closing: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shrinkage is not None:
            moments.check_rho(self.shrinkage)
        check_count("num_samples", self.num_samples, least=2, optional=True)
        check_count("thinning", self.thinning, optional=True)
        check_count("num_warmup", self.num_warmup, least=0, optional=True)
        check_count("averaging_rounds", self.averaging_rounds, least=0)
        if self.closing is not None and self.closing not in CLOSINGS:
            raise ValueError(f"closing is {self.closing!r}; use 'newton' or 'samples', or leave it out")
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
        return replace(self, posterior=True, closing=None, start_rounds=0)

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
            averaged = None
        else:
            draws, loss, spread = self._iterates(task, key, w, data, number)
            averaged = None if task.batching is None else spread
        wider = lambda x: (centre := jnp.mean(x, axis=0)) + jnp.sqrt(spread) * (x - centre)
        gradients = None
        if stein or (stein is None and task.batching is None):
            gradients = wider(jax.lax.map(jax.grad(lambda x: -density(x) / number), draws))
        return Drawn(wider(draws), gradients, loss, averaged)

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
        draws, gradients, loss, _ = drawn = self._draws(task, key, w, data, self.stein)
        shrunk = self._shrunk(task.flat, drawn)
        delta = moments.delta(w, draws, None, shrunk)
        if gradients is not None:
            delta = moments.corrected(delta, draws, gradients, shrunk)
        return to_user_dtype(delta), loss, to_user_dtype(moments.largest(draws, shrunk, gradients))

    def _shrunk(self, flat: Flat, drawn: Drawn, closing: bool = False) -> moments.Shrinkage:
        """The covariance that stands for the silo's; a number is the paper's rho, of samples as its code takes them."""
        shrunk = moments.shrinkage(drawn.draws, self._rho(flat, closing))
        if drawn.spread is None or not (is_number(self.shrinkage) and math.isfinite(self.shrinkage)):
            return shrunk
        return moments.of_narrower(shrunk, drawn.spread, restored=closing)

    # --- the posterior ----------------------------------------------------------------------------------------------

    def _checks(self, made: Made, plan: Plan) -> tuple[Phase, ...]:
        if not self.posterior:
            return ()
        if self._closing(made.task, plan) == "newton":
            phase = climb_phase("posterior", self._climbing(made), made.task, MOST_CLOSING, arrived)
        else:
            phase = self._sampled(made.task, plan)
        return (phase._replace(lacks="; it has a mode and no posterior around it"),)

    def _closing(self, task: Task, plan: Plan) -> str:
        """How the posterior is looked for: from Hessians where every silo can be asked for one."""
        everyone = plan.cohort is None and task.survey.known
        if self.closing == "newton" and (task.flat.size > DENSE or not everyone):
            raise ValueError(
                f"closing='newton' asks every silo for a Hessian in each of a few rounds, at most {DENSE} dimensions "
                f"wide; here are {task.flat.size}, and silos that "
                f"{'all take part' if everyone else 'do not all take part'}: leave closing= out"
            )
        return self.closing or ("newton" if everyone and task.flat.size <= DENSE else "samples")

    def _sampled(self, task: Task, plan: Plan) -> Phase:
        asked = self._asked(task, plan)
        make = lambda: sampled_look(task, partial(self._precision, task))
        return Phase(
            "posterior",
            remembered(make, "samples", self._core(), ByIdentity(task.flat.split), task.survey),
            begin=lambda left, fresh: Begun(opening(task.flat, left.server, self._num(task.flat), asked)),
            finish=lambda left, state, info: closed(task, self.prior, left, state),
            cohort=asked,
            role="check",
            effort="least",
        )

    def _asked(self, task: Task, plan: Plan) -> int:
        """Everyone where that is cheap; in many dimensions no more than fit into memory."""
        own, num_silos = task.flat, task.survey.num_silos
        cohort = num_silos if plan.cohort is None or not (plan.random or not task.survey.known) else plan.cohort
        if own.size <= DENSE:
            return num_silos if task.survey.known else max(cohort, min(num_silos, MOST_ASKED))
        return max(1, min(cohort, MOST_NUMBERS // (own.size * self._num(own))))

    def _precision(self, task: Task, key: Array, w: Array, data: SiloData) -> moments.Precision:
        """Of the silo's samples, in units of mean losses."""
        # averages of minibatch steps have the spread of the rows' gradients; those of all rows know the curvature
        stein = True if self.stein is None and task.flat.size <= MANY else self.stein
        drawn = self._draws(task, key, w, data, stein)
        shrunk = self._shrunk(task.flat, drawn, closing=True)
        return moments.precision(drawn.draws, shrunk, drawn.gradients)
