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

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.local import minibatch
from numpyro_fed.local.bound import Weighting
from numpyro_fed.local.walk import Flat, Steps, Walk, flat
from numpyro_fed.methods.base import Method
from numpyro_fed.methods.fedpa_posterior import NEAR_ZERO, PointPosterior
from numpyro_fed.model.initial import initial
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.normal.curvature import largest_curvature
from numpyro_fed.optim import check_optim, with_horizon
from numpyro_fed.run import warm_start
from numpyro_fed.run.prepare import Prepared

Array = Any
FORGET = 0.9  # of the curvatures heard of, in a round
STEP, SMALL_STEP = 1.0, 0.2  # over the largest curvature: with all of the silo's rows, with minibatches


class Sent(NamedTuple):
    """All that a silo receives."""

    w: Array  # (d,)
    averaging: Array  # bool: this round is one of federated averaging
    total: Array  # observations in all silos, as far as they are known: the prior is shared out by them
    curvature: Array  # the largest of any silo's loss, for steps of one size everywhere; 0 if it is not known yet


class Message(NamedTuple):
    """All that leaves a silo."""

    delta: Array  # (d,)
    value: Array  # - log p(y | w), from one minibatch where there are such
    rows: Array  # its number of observations
    curvature: Array  # the largest of its mean loss, or of its posterior's precision; 0 if nobody asks


class Server(NamedTuple):
    z: Array  # the unconstrained globals
    theta: dict[str, Any]  # the model's params, unconstrained
    opt_state: Any
    round: Array
    total: Array  # observations in all silos
    heard: Array  # (2,): observations and messages so far; total is guessed from them where silos are not all known
    curvature: Array  # (2,): the largest heard of, of losses and of precisions
    posterior: Any = ()  # set after the last round


def epoch(notes: dict[str, Any], without: int) -> int:
    """Steps in which the largest silo sees its rows once; another number where every step sees them all."""
    batching = notes["batching"]
    return without if batching is None else max(1, -(-notes["most_rows"] // batching.size))


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
    local: Any = None
    shared: Any = None

    stateless = True
    effort = "some"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("optim", "server_optim"):
            if getattr(self, name) is not None:
                check_optim(getattr(self, name), name)
        self._check_counts(batch_size=1, local_steps=1)
        if not isinstance(self.proximal, int | float) or isinstance(self.proximal, bool) or not self.proximal >= 0:
            raise ValueError(f"proximal must be a number of at least 0, got {self.proximal!r}")
        if not isinstance(self.prior, bool):
            raise TypeError(
                f"prior is True (the target is the posterior) or False (the likelihood), got {self.prior!r}"
            )
        if self.init_loc_fn is not None and not callable(self.init_loc_fn):
            raise TypeError(
                f"init_loc_fn is a NumPyro initialisation strategy, got {self.init_loc_fn!r}: pass init_to_sample"
            )

    def _check_counts(self, **least: int) -> None:
        for name, smallest in least.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < smallest):
                raise ValueError(f"{name} must be an int of at least {smallest}, got {value!r}")

    # --- what the subclasses say ------------------------------------------------------------------------------------

    def _averaging_rounds(self) -> int | None:
        """Rounds of federated averaging at the beginning; None: all of them."""
        return None

    def _batching(self, flat: Flat, stack: Stack, size: int | None = None) -> minibatch.Batching | None:
        """Minibatches of ``batch_size`` rows; None: all of them."""
        size = self.batch_size if size is None else size
        if size is None:
            return None
        batching = minibatch.plan(flat.split, stack, Weighting(1), size, None)
        minibatch.certify(flat.split, stack, batching, None)
        return batching

    def _steps(self, notes: dict[str, Any]) -> int:
        """Of a silo in a round of federated averaging."""
        raise NotImplementedError

    def _posterior_delta(
        self, notes: dict[str, Any], key: Array, w: Array, data: SiloData
    ) -> tuple[Array, Array, Array]:
        """Delta, loss and curvature of a round of posterior averaging."""
        raise NotImplementedError

    def _server_default(self) -> Any:
        """The server's optimiser for rounds of posterior averaging."""
        raise NotImplementedError

    # --- what the base class asks for -------------------------------------------------------------------------------

    def prepare(self, split: SplitModel, stack: Stack) -> Prepared:
        self._check_model(split)
        own = flat(split)
        batching = self._batching(own, stack.example)
        counts = lambda bucket: np.atleast_1d(jax.vmap(own.rows, axis_size=len(bucket.names))(bucket.mask))
        rows = np.concatenate([counts(bucket) for bucket in stack.buckets])
        num = len(stack.names)
        once = lambda function: jax.jit(function, inline=True)  # traced once, used many times
        notes = {
            "flat": own,
            "whole": once(own.log_likelihood),
            "part": None if batching is None else once(partial(own.estimate, batching)),
            "batching": batching,
            "total": float(rows.mean() * num),
            "known": stack.source is None,  # else these are examples from a store
            "most_rows": int(rows.max()),
            "num_silos": num,
        }
        return Prepared(split, self.algorithm(notes), None, notes)

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

    def algorithm(self, notes: dict[str, Any]) -> FederatedAlgorithm:
        """The method as pure functions; see :mod:`numpyro_fed.algorithm`."""
        own: Flat = notes["flat"]
        optim = self._server_default() if self.server_optim is None else self.server_optim
        steps = self._steps(notes)
        plain_rounds = self._averaging_rounds()
        always = plain_rounds is None

        def init(key: Array) -> Server:
            dtype = jnp.zeros(()).dtype
            if self.init_loc_fn is None:
                z = NEAR_ZERO * jax.random.normal(key, (own.split.dim,))
            else:
                z = initial(own.split, self.init_loc_fn, key)
            w = jnp.concatenate([z.astype(dtype), own.start])
            nothing = jnp.zeros(2, dtype)
            total = jnp.asarray(notes["total"], dtype)
            return Server(*own.parts(w), optim.init(w), jnp.zeros((), jnp.int32), total, nothing, nothing)

        def averaging(server: Server) -> Array:
            return jnp.ones((), bool) if always else server.round < plain_rounds

        def broadcast(key: Array, server: Server) -> Broadcast:
            return Broadcast(Sent(own.joined(server), averaging(server), server.total, server.curvature[0]))

        def silo_step(key: Array, broadcast: Broadcast, silo: tuple, data: SiloData) -> tuple[Message, tuple]:
            sent = broadcast.common
            number = own.rows(data.mask)

            def average(key: Array) -> tuple[Array, Array, Array]:
                walk = self.walk(notes, key, sent.w, data, sent.total, sent.curvature)
                (x, _), loss = walk.go((sent.w, walk.state), key, steps)
                return sent.w - x, loss, walk.curvature

            def posterior(key: Array) -> tuple[Array, Array, Array]:
                return self._posterior_delta(notes, key, sent.w, data)

            found = average(key) if always else jax.lax.cond(sent.averaging, average, posterior, key)
            delta, loss, steepest = found
            return Message(delta, number * loss, number, steepest), silo

        def aggregate(messages: Message, cohort: Cohort) -> Message:
            share = messages.rows / jnp.sum(messages.rows)
            mean = lambda leaf: jnp.tensordot(share, leaf, axes=1)
            return Message(
                mean(messages.delta),
                jnp.sum(messages.value),
                jnp.stack([jnp.sum(messages.rows), jnp.asarray(len(cohort.index), share.dtype)]),
                jnp.stack([jnp.max(messages.curvature), mean(messages.curvature)]),
            )

        def server_step(key: Array, server: Server, found: Message) -> tuple[Server, dict]:
            plain, w = averaging(server), own.joined(server)
            rows, heard = found.rows[0], server.heard + found.rows
            total = server.total if notes["known"] else notes["num_silos"] * heard[0] / heard[1]
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
            return Server(*own.parts(new), opt_state, server.round + 1, total, heard, largest), info

        return FederatedAlgorithm(init, lambda key, broadcast, data: (), broadcast, silo_step, aggregate, server_step)

    # --- what a silo does -------------------------------------------------------------------------------------------

    def walk(
        self,
        notes: dict[str, Any],
        key: Array,
        w: Array,
        data: SiloData,
        total: Array | None,
        steepest_of_all: Array | None,
        noise: bool = False,
    ) -> Walk:
        """Steps on the silo's mean loss, from w.

        Args:
            total: observations in all silos, where the silo's share of the prior belongs to its loss; None for the
                likelihood alone.
            steepest_of_all: the largest curvature of any silo's loss, on which the default optimiser's steps depend:
                silos whose steps differ would meet elsewhere. None for the silo's own.
            noise: of the size that makes the walk's stationary distribution the silo's posterior (Langevin).
        """
        own, batching = notes["flat"], notes["batching"]
        number = own.rows(data.mask)
        share = 1 / total if self.prior and total is not None else None

        def loss(x: Array, key: Array | None) -> tuple[Array, Array]:
            if batching is None or key is None:
                value = -notes["whole"](x, data) / number
            else:
                value = -notes["part"](x, data, key) / number
            rest = 0.5 * self.proximal * jnp.sum((x - w) ** 2)
            if share is not None:
                rest = rest - share * own.log_prior(x)
            return value + rest, value

        optim, rate, steepest = self.optim, jnp.zeros(()), jnp.zeros(())
        if optim is None:
            gradient = lambda away: jax.grad(loss, has_aux=True)(w + away, None)[0]
            steepest = largest_curvature(key, gradient, w.shape)
            common = steepest if steepest_of_all is None else jnp.maximum(steepest_of_all, steepest)
            rate = (STEP if batching is None else SMALL_STEP) / common

        if optim is not None:

            def given(x: Array, state: Any, key: Array) -> tuple[Array, Any, Array]:
                (_, value), gradient = jax.value_and_grad(loss, has_aux=True)(x, key)
                moves, state = optim.update(gradient, state, x)
                return x + moves, state, value

            return Walk(given, optim.init(w), steepest)

        # how much a loss may rise in a step: not at all; by what noise does; or, with other rows, to many times itself
        tame = lambda value: (5 * own.size + 10) / number if noise else 1e-6 * jnp.abs(value)
        allowed = tame if batching is None else lambda value: 10 * (1 + jnp.abs(value))

        def step(x: Array, state: Steps, key: Array) -> tuple[Array, Steps, Array]:
            batch_key, noise_key = jax.random.split(key)
            (total, value), gradient = jax.value_and_grad(loss, has_aux=True)(x, batch_key)
            fine = jnp.isfinite(total) & jnp.all(jnp.isfinite(gradient))
            fine = fine & (total <= state.total + allowed(state.total))
            # a step that went too far is taken again, half as long: the curvature was another where it began
            keep = lambda new, old: jnp.where(fine, new, old)
            now = Steps(keep(x, state.x), keep(gradient, state.gradient), keep(total, state.total), state.rate)
            now = now._replace(rate=jnp.where(fine, state.rate, 0.5 * state.rate))
            x = now.x - now.rate * now.gradient
            if noise:
                x = x + jnp.sqrt(2 * now.rate / number) * jax.random.normal(noise_key, x.shape)
            return x, now, keep(value, state.total)

        start = Steps(w, jnp.zeros_like(w), jnp.full((), jnp.inf, w.dtype), rate)
        return Walk(step, start, steepest)

    # --- states -----------------------------------------------------------------------------------------------------

    def with_rounds(self, server: Server, silos: tuple, num_rounds: int, share: float = 1.0) -> tuple[Server, tuple]:
        left = max(0, (self._averaging_rounds() or 0) - int(server.round))
        rounds = max(1, num_rounds - left)
        return server._replace(opt_state=with_horizon(server.opt_state, rounds)), silos

    def with_schedule(self, prepared: Prepared, server: Server, schedule: Any, names: tuple[str, ...]) -> Server:
        if len(names) == 1:
            name = type(self).__name__
            warnings.warn(f"{name} has one silo, so there is nothing to average: nf.SFVI(model) fits it", stacklevel=3)
        return server

    def adopt(self, split: SplitModel, server: Server, silos: tuple, found: warm_start.Found) -> tuple[Server, tuple]:
        like = lambda new, old: jnp.asarray(new, old.dtype)
        theta = jax.tree.map(like, found.theta, server.theta) if found.theta else server.theta
        return server._replace(z=like(found.loc, server.z), theta=theta), silos

    def posterior_of(self, split: SplitModel, survey: Any = None) -> PointPosterior:
        return PointPosterior(split)
