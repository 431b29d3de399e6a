r"""What federated and posterior averaging share: silos without a state, and work that is linear in d.

The parameters are one flat vector :math:`w = (z_G, \theta)`. A silo starts at the server's w, takes steps on its own
mean loss

.. math:: f_k(w) = -\frac{1}{n_k} \log p(y_k \mid w)

and answers with :math:`\Delta_k`, which has the sign of a gradient. The server steps against the mean of all answers,
weighed by the numbers of observations :math:`n_k`.

Losses are means, as in the papers, so that steps are of a size that does not depend on the amount of data; a silo's
posterior in these units is :math:`\propto p(y_k \mid w)^{1 / n_k}`, whose covariance is :math:`n_k` times that of
:math:`p(y_k \mid w)`.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Lost, Phase, Plan, Program
from numpyro_fed.checks import check_count, is_number
from numpyro_fed.data.padding import SiloData
from numpyro_fed.local import minibatch
from numpyro_fed.local.descent import NOTHING, Beside, Goal, Task, walk_from
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.local.walk import Flat, flat
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.methods.base import Method
from numpyro_fed.methods.closing import climb
from numpyro_fed.model.initial import initial
from numpyro_fed.model.observations import num_observations
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.normal.curvature import largest_curvature
from numpyro_fed.optim import check_optim, with_horizon
from numpyro_fed.run.mode import MAX_DIM, MAX_ROUNDS, mode_phases

Array = jax.Array
NEAR_ZERO = 0.1  # sd of the location where nobody says where to begin
FORGET = 0.9  # of the curvatures heard of, in a round
MANY = 10_000  # weights: from here on rounds take longer than compiling them well


class AveragingBroadcast(NamedTuple):
    """All that a silo receives."""

    w: Array  # (d,)
    averaging: Array  # bool: this round is one of federated averaging
    total: Array  # observations in all silos, as far as they are known: the prior is shared out by them
    curvature: Array  # the largest of any silo's loss, for steps of one size everywhere; 0 if it is not known yet


class AveragingMessage(NamedTuple):
    """All that leaves a silo."""

    delta: Array  # (d,)
    value: Array  # - log p(y | w), from one minibatch where there are such
    rows: Array  # its number of observations
    curvature: Array  # the largest of its mean loss, or of its posterior's precision; 0 if nobody asks


class AveragingServer(NamedTuple):
    """The point that is averaged, and what its steps need."""

    z: Array  # the unconstrained globals
    theta: dict[str, Any]  # the model's params, unconstrained
    opt_state: Any
    round: Array
    total: Array  # observations in all silos
    heard: Array  # (2,): observations and messages so far; total is guessed from them where silos are not all known
    curvature: Array  # (2,): the largest heard of, of losses and of precisions
    posterior: Any = ()  # set after the last round
    beside: Any = ()  # what a method keeps beside the point


class Made(NamedTuple):
    """The method for one model and its silos."""

    task: Task
    rounds: FederatedAlgorithm


def epoch(task: Task, without: int) -> int:
    """Steps in which the largest silo sees its rows once; another number where every step sees them all."""
    batching = task.batching
    return without if batching is None else max(1, -(-max(task.survey.sizes) // batching.size))


@dataclass(frozen=True)
class Averaging(Method):
    """What FedAvg and FedPA share; the fields are described there."""

    optim: Any = None
    server_optim: Any = None
    batch_size: int | None = None
    local_steps: int | None = None
    proximal: float = 0.0
    prior: bool = True
    init_loc_fn: Any = None
    start_rounds: int = MAX_ROUNDS
    local: Any = None
    shared: Any = None

    stateless: ClassVar[bool] = True
    fewest: ClassVar[int] = 2
    remedy: ClassVar[str] = "pass a smaller step: optim=optax.adam(1e-3)"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("optim", "server_optim"):
            if getattr(self, name) is not None:
                check_optim(getattr(self, name), name)
        check_count("batch_size", self.batch_size, optional=True)
        check_count("local_steps", self.local_steps, optional=True)
        check_count("start_rounds", self.start_rounds, least=0)
        if not is_number(self.proximal) or not self.proximal >= 0:
            raise ValueError(f"proximal must be a number of at least 0, got {self.proximal!r}")
        if not isinstance(self.prior, bool):
            raise TypeError(
                f"prior is True (the target is the posterior) or False (the likelihood), got {self.prior!r}"
            )
        if self.init_loc_fn is not None and not callable(self.init_loc_fn):
            raise TypeError(
                f"init_loc_fn is a NumPyro initialisation strategy, got {self.init_loc_fn!r}: pass init_to_sample"
            )

    # --- what the subclasses say ------------------------------------------------------------------------------------

    def _averaging_rounds(self) -> int | None:
        """Rounds of federated averaging at the beginning; None: all of them."""
        return None

    def _rounds(self, sweep: int) -> int:
        """By default."""
        raise NotImplementedError

    def _batching(self, flat: Flat, survey: Survey, size: int | None = None) -> Batching | None:
        """Minibatches of ``batch_size`` rows; None: all of them."""
        size = self.batch_size if size is None else size
        return None if size is None else minibatch.plan(flat.split, survey, "whole", size)

    def _steps(self, task: Task) -> int:
        """Of a silo in a round of federated averaging."""
        raise NotImplementedError

    def _posterior_delta(self, task: Task, key: Array, w: Array, data: SiloData) -> tuple[Array, Array, Array]:
        """Delta, loss and curvature of a round of posterior averaging."""
        raise NotImplementedError

    def _server_default(self) -> Any:
        """The server's optimiser for rounds of posterior averaging."""
        raise NotImplementedError

    # --- the program ------------------------------------------------------------------------------------------------

    def compile(self, split: SplitModel, survey: Survey, plan: Plan) -> Program:
        self._check_model(split)
        make = lambda: self._made(split, survey)
        made = remembered(make, self._core(), ByIdentity(split), survey)
        rounds = self._rounds(plan.sweep) if plan.num_rounds is None else plan.num_rounds
        phase = Phase(
            "rounds",
            made.rounds,
            begin=lambda left, fresh: self._begin(made.task, rounds, left, fresh),
            num_rounds=rounds,
            effort="most" if made.task.flat.size >= MANY else "some",
            remedy=self.remedy,
        )
        start = mode_phases(split, self.start_rounds) if self._can_start(split, plan) else ()
        return Program((*start, phase, *self._checks(made, plan)), self.posterior_of(split, survey))

    def _can_start(self, split: SplitModel, plan: Plan) -> bool:
        """A mode is looked for where every silo takes part, and a Hessian is cheap."""
        everyone = plan.cohort is None
        return everyone and self.init_loc_fn is None and self.start_rounds > 0 and flat(split).size <= MAX_DIM

    def _core(self) -> "Averaging":
        """The settings that are part of the compiled program."""
        return replace(self, start_rounds=0)

    def _made(self, split: SplitModel, survey: Survey) -> Made:
        own = flat(split)
        batching = self._batching(own, survey)
        once = lambda function: jax.jit(function, inline=True)  # traced once, used many times
        task = Task(
            own,
            once(own.log_likelihood),
            None if batching is None else once(partial(own.estimate, batching)),
            once(partial(num_observations, split)),
            batching,
            survey,
        )
        return Made(task, self.algorithm(task))

    def _goal(self) -> Goal:
        return Goal(self.optim, self.prior, self.proximal)

    def _checks(self, made: Made, plan: Plan) -> tuple[Phase, ...]:
        """Closing rounds, of a method that has some."""
        return ()

    def _climbing(self, made: Made) -> FederatedAlgorithm:
        """Rounds in which silos tell gradient and Hessian at one point."""
        make = lambda: climb(made.task, self.prior)
        return remembered(make, "climb", ByIdentity(made.task.flat.split), made.task.survey, self.prior)

    def _check_model(self, split: SplitModel) -> None:
        name = type(self).__name__
        if split.groups:
            sites = ", ".join(repr(site.name) for group in split.groups for site in group.sites)
            raise PartitionError(
                f"nf.{name} averages global parameters, and this model has local latents ({sites}), of which every "
                "silo has its own: use nf.SFVI, nf.EP, nf.PVI or nf.SEP, which take them"
            )
        if flat(split).size == 0:
            raise PartitionError(
                f"nf.{name} averages global parameters, and this model has none: each silo is a problem of its own "
                "(nf.Independent)"
            )

    def _averaged(
        self, task: Task, key: Array, sent: AveragingBroadcast, data: SiloData, beside: Beside = NOTHING
    ) -> tuple[Array, Array, Array, Any]:
        """A silo's round of federated averaging: delta, the first loss, the curvature, and what it learned beside."""
        walk = walk_from(task, self._goal(), key, sent.w, data, sent.total, sent.curvature, beside=beside, apart=True)
        (x, state), loss = walk.go((sent.w, walk.state), key, self._steps(task))
        return sent.w - x, loss, walk.curvature, state.params

    def algorithm(self, task: Task) -> FederatedAlgorithm:
        """The method as pure functions; see :mod:`numpyro_fed.algorithm`."""
        own: Flat = task.flat
        optim = self._server_default() if self.server_optim is None else self.server_optim
        plain_rounds = self._averaging_rounds()
        always = plain_rounds is None

        def init(key: Array) -> AveragingServer:
            dtype = jnp.zeros(()).dtype
            if self.init_loc_fn is None:
                z = NEAR_ZERO * jax.random.normal(key, (own.split.dim,))
            else:
                z = initial(own.split, self.init_loc_fn, key)
            w = jnp.concatenate([z.astype(dtype), own.start])
            nothing = jnp.zeros(2, dtype)
            total = jnp.asarray(task.survey.total, dtype)
            return AveragingServer(*own.parts(w), optim.init(w), jnp.zeros((), jnp.int32), total, nothing, nothing)

        def averaging(server: AveragingServer) -> Array:
            return jnp.ones((), bool) if plain_rounds is None else server.round < plain_rounds

        def broadcast(key: Array, server: AveragingServer) -> Broadcast:
            return Broadcast(
                AveragingBroadcast(own.joined(server), averaging(server), server.total, server.curvature[0])
            )

        def silo_step(key: Array, broadcast: Broadcast, silo: tuple, data: SiloData) -> tuple[AveragingMessage, tuple]:
            sent = broadcast.common
            number = task.count(data)

            def average(key: Array) -> tuple[Array, Array, Array]:
                delta, loss, steepest, _ = self._averaged(task, key, sent, data)
                return delta, loss, steepest

            def posterior(key: Array) -> tuple[Array, Array, Array]:
                return self._posterior_delta(task, key, sent.w, data)

            found = average(key) if always else jax.lax.cond(sent.averaging, average, posterior, key)
            delta, loss, steepest = found
            return AveragingMessage(delta, number * loss, number, steepest), silo

        def aggregate(messages: AveragingMessage, cohort: Cohort) -> AveragingMessage:
            share = messages.rows / jnp.sum(messages.rows)
            mean = lambda leaf: jnp.tensordot(share, leaf, axes=1)
            return AveragingMessage(
                mean(messages.delta),
                jnp.sum(messages.value),
                jnp.stack([jnp.sum(messages.rows), jnp.asarray(len(cohort.index), share.dtype)]),
                jnp.stack([jnp.max(messages.curvature), mean(messages.curvature)]),
            )

        def server_step(key: Array, server: AveragingServer, found: AveragingMessage) -> tuple[AveragingServer, dict]:
            plain, w = averaging(server), own.joined(server)
            rows, heard = found.rows[0], server.heard + found.rows
            total = server.total if task.survey.known else task.survey.num_silos * heard[0] / heard[1]
            prior, uphill = jax.value_and_grad(own.log_prior)(w)
            gradient = found.delta
            heard_of = jnp.where(jnp.array([plain, ~plain]), found.curvature, 0.0)
            largest = jnp.maximum(heard_of, jnp.where(heard_of > 0, FORGET, 1.0) * server.curvature)
            if not always:
                pull = -uphill / total if self.prior else jnp.zeros_like(uphill)
                gradient = jnp.where(plain, gradient, gradient + pull)
            if self.server_optim is not None:
                moves, opt_state = optim.update(gradient, server.opt_state, w)
                new = w + moves
            elif always:
                new, opt_state = w - gradient, server.opt_state
            else:
                steepest = largest[1]
                if self.prior:
                    prior_gradient = lambda away: -jax.grad(own.log_prior)(w + away)
                    steepest = steepest + largest_curvature(key, prior_gradient, w.shape) / total
                moves, opt_state = optim.update(gradient / jnp.maximum(steepest, 1e-20), server.opt_state, w)
                new = jnp.where(plain, w - gradient, w + moves)
                opt_state = jax.tree.map(lambda now, old: jnp.where(plain, old, now), opt_state, server.opt_state)
            info = {
                "loss": total / rows * found.value - (prior if self.prior else 0.0),
                "step": jnp.linalg.norm(new - w),
            }
            return AveragingServer(*own.parts(new), opt_state, server.round + 1, total, heard, largest), info

        def turned(server: AveragingServer, message: AveragingMessage) -> AveragingMessage:
            """From a step to the point it leads to, and back: a step belongs to a place that the server has left."""
            delta = message.delta
            return message._replace(delta=jnp.where(averaging(server), own.joined(server) - delta, delta))

        nothing = lambda key, broadcast, data: ()
        lost = Lost(
            hold=True,
            absorb=lambda key, server, message: turned(server, message),
            server_step=lambda key, server, found: server_step(key, server, turned(server, found)),
            void=None if plain_rounds is None else lambda server: server.round == plain_rounds,
        )
        return FederatedAlgorithm(init, nothing, broadcast, silo_step, aggregate, server_step, lost)

    # --- where rounds begin -------------------------------------------------------------------------------------------

    def _begin(self, task: Task, rounds: int, left: Left, fresh: AveragingServer) -> Begun:
        server = fresh if left.server is None else left.server._replace(posterior=())  # which is looked for anew
        if left.server is not None and task.survey.known:  # silos may have left since
            server = server._replace(total=jnp.asarray(task.survey.total, server.total.dtype))
        if left.server is None and left.warm is not None:
            warm, like = left.warm, lambda new, old: jnp.asarray(new, old.dtype)
            theta = jax.tree.map(like, warm.theta, server.theta) if warm.theta else server.theta
            server = server._replace(z=like(warm.loc, server.z), theta=theta)
        first = max(0, (self._averaging_rounds() or 0) - int(server.round))
        return Begun(server._replace(opt_state=with_horizon(server.opt_state, max(1, rounds - first))))
