r"""Federated neural propagation (Wu, Huang, Ding, Wang, Wang and Xu 2023): federated averaging with an auxiliary loss.

All silos' data are thought of as drawn from one distribution, which a private latent :math:`z \in R^L` stands for. Of
it the server keeps

.. math:: q(z) \propto N(z; 0, I) \prod_k t_k(z)

with a site :math:`t_k` for each silo, normal and elementwise. Silo k receives its cavity
:math:`q_{-k} \propto N(0, I) \prod_{j \ne k} t_j`, and the data that it has say of z

.. math:: \phi(z, X_k) = \prod_{l=1}^L \sigma(f_l(X_k)\, z_l), \qquad
    f(X_k) = \frac{1}{n_k} \sum_i V' \tanh(U' h_i + u) + v

with :math:`h_i` the features of row i. The hybrid :math:`q_{-k}\, \phi` has the moments
:math:`N(z_m, z_s)` (:mod:`numpyro_fed.normal.propagation`), from which a natural-parameter network predicts a normal
over the parameters of the model's head, :math:`\theta_k`; the silo takes its steps on

.. math:: J(w) + \lambda\, \mathrm{KL}\left[ \mathrm{NPN}(z_m, z_s) \,\|\, N(\theta_k, \epsilon) \right]

with J the silo's mean loss, of federated averaging. So its head is pulled to where the network predicts it, with a
strength of :math:`\lambda / \epsilon`, while the network learns to predict it. At the end of a visit the hybrid divided
by the cavity is the silo's new site. The server averages w and the networks, weighed by observations, and keeps the
sites.

**Proper by construction.** Since :math:`\log \sigma` is concave, sites with exact moments have precisions from 0 to
:math:`f^2 / 4`. Approximate moments can have any, so the hybrid's variance is put between these bounds in the silo, and
a site's precision at 0 or above at the server, where a site that is not finite is not taken: then every cavity is a
normal of at least unit precision, whoever takes part. ``fit.history["clipped"]`` counts numbers that were changed.

Where we deviate. The paper's prior of z is uniform, and its first cavities are standard normals: here the standard
normal stays, as the prior, for a product of sigmoids alone need not be proper (if all :math:`f_l(X_k)` have one sign it
is not). The moments are exact by default (``moments="quadrature"``). f has a value for each element of z. The networks'
parameters are averaged with the rest, so silos keep nothing between rounds; they begin by predicting the server's first
point, so that the pull begins with nothing.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Lost
from numpyro_fed.checks import check_count, is_number
from numpyro_fed.data.padding import SiloData
from numpyro_fed.local import minibatch
from numpyro_fed.local.descent import Beside, Task
from numpyro_fed.local.features import Features, Head, features_of, head_of
from numpyro_fed.methods.averaging import AveragingBroadcast, AveragingMessage, AveragingServer
from numpyro_fed.methods.fedavg import FedAvg
from numpyro_fed.methods.fedpa_posterior import PointPosterior
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.normal import propagation
from numpyro_fed.normal.propagation import KINDS, LatentSite, Moments, Networks
from numpyro_fed.optim import check_optim

Array = jax.Array
NETWORK_STEP = 1e-2  # of Adam, for the networks


class PropagationBroadcast(NamedTuple):
    """What all silos receive; each gets its own cavity, a LatentSite, beside it."""

    point: AveragingBroadcast
    networks: Networks


class PropagationMessage(NamedTuple):
    """All that leaves a silo."""

    point: AveragingMessage
    networks: Networks  # how far they moved; with the sign of a gradient
    site: LatentSite  # (latent,)
    clipped: Array  # how many of the site's variances were outside of their bounds
    divergence: Array  # the KL at the end of the visit


class Propagation(NamedTuple):
    """What the server keeps beside the point."""

    networks: Networks
    sites: LatentSite  # (silos, latent)


class PropagationPosterior(PointPosterior):
    """The point; sites of the private latent follow the order of the silos."""

    def reordered(self, server: Any, order: list[int]) -> Any:
        server = super().reordered(server, order)
        if not isinstance(server.beside, Propagation):
            return server
        sites = jax.tree.map(lambda leaf: leaf[jnp.asarray(order)], server.beside.sites)
        return server._replace(beside=server.beside._replace(sites=sites))

    def known_to(self, server: Any, place: int) -> Any:
        """The server state for one of its silos: without the others' sites, which draws do not need."""
        if not isinstance(server.beside, Propagation):
            return server
        sites = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[place], leaf.shape), server.beside.sites)
        return server._replace(beside=server.beside._replace(sites=sites))


class Auxiliary(NamedTuple):
    """The auxiliary loss of one model."""

    features: Features
    head: Head
    epsilon: float
    moments: str

    def hybrid(self, networks: Networks, cavity: LatentSite, w: Array, data: SiloData) -> tuple[Moments, Array]:
        """Of the private latent, from these rows; and which variances were outside of their bounds."""
        before, slope = propagation.moments_of(cavity), propagation.slopes(networks.slope, *self.features.read(w, data))
        return propagation.bounded(propagation.hybrid(before, slope, self.moments), before, slope)

    def divergence(self, networks: Networks, z: Moments, w: Array) -> Array:
        """From the prediction to the head."""
        predicted = propagation.predicted(networks, z, self.moments)
        return propagation.kl_to_point(predicted, self.head.of(w), self.epsilon)


@dataclass(frozen=True)
class FedNP(FedAvg):
    r"""Federated neural propagation: averaging, with heads pulled to where a network of all silos predicts them.

    A point estimate with the interface of :class:`~numpyro_fed.FedAvg`, whose settings it has, too. See the module for
    the equations. With ``weight=0`` it is FedAvg, bit for bit.

    Args:
        model: an ordinary NumPyro model without local latents, called as ``model(**silos[name])``.
        head: names of the global sample sites and params that the network predicts, in unconstrained space: the last
            layer of a classifier. A param that is a tree may be named in part, ``"net$params.out.kernel"``. By default
            all of them. The network has ``hidden + 2`` numbers for each number of the head, and they are sent.
        features: of a silo's rows: names of arguments and of ``numpyro.deterministic`` sites (the backbone's output) in
            the plate of the observations, or a function of the model's arguments that returns an array with a row for
            each of them. By default all arguments with a row for each observation on whose values predictions depend.
            They should be of order one.
        latent: L, the dimension of the private latent.
        weight: :math:`\lambda`, of the auxiliary loss.
        epsilon: :math:`\epsilon`, the variance around the silo's own head.
        hidden: units of both networks.
        moments: ``"quadrature"``, ``"closed"`` (Stein's lemma with the paper's approximation) or ``"printed"`` (as the
            paper prints them).
        network_optim: the optax optimiser of the networks, on the same loss, begun afresh at every visit. By default
            ``optax.adam(1e-2)``. The server always takes the plain average of them.
        optim, server_optim, batch_size, local_steps, proximal, prior: as those of :class:`~numpyro_fed.FedAvg`. With
            minibatches f is the mean over a minibatch's rows.
        init_loc_fn, start_rounds, last_look, local, shared: the same.

    ``fit.history`` has the divergence at the end of the visits, and how many numbers of sites were clipped. The verdict
    of a point is "not checked" at best.

    Example:
        >>> fit = nf.FedNP(model, head="beta", latent=2).run(jax.random.key(0), silos, 10)
        >>> fit.sample(jax.random.key(1), 1)["beta"].shape
        (1, 2)
        >>> int(fit.history["clipped"][-1])
        0

    Reference:
        X. Wu, H. Huang, Y. Ding, H. Wang, Y. Wang, Q. Xu (2023), FedNP: Towards non-IID federated learning via
        federated neural propagation, AAAI.
    """

    head: Any = None
    features: Any = None
    latent: int = 10
    weight: float = 0.01
    epsilon: float = 0.1
    hidden: int = 10
    moments: str = "quadrature"
    network_optim: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("latent", self.latent)
        check_count("hidden", self.hidden)
        if not is_number(self.weight) or not 0 <= self.weight < math.inf:
            raise ValueError(f"weight must be a number of at least 0, got {self.weight!r}")
        if not is_number(self.epsilon) or not 0 < self.epsilon < math.inf:
            raise ValueError(f"epsilon must be a number above 0, got {self.epsilon!r}")
        if self.moments not in KINDS:
            raise ValueError(f"moments is {self.moments!r}: use {', '.join(map(repr, KINDS))}")
        if self.network_optim is not None:
            check_optim(self.network_optim, "network_optim")
        for name in ("head", "features"):
            value = getattr(self, name)
            if value is None or (name == "features" and callable(value)):
                continue
            names = tuple(value) if isinstance(value, list | tuple) else (value,)
            if not names or not all(isinstance(one, str) for one in names):
                raise TypeError(f'{name} is a name, or some of them, got {value!r}: pass {name}="beta"')
            object.__setattr__(self, name, names)

    def _check_model(self, split: SplitModel) -> None:
        super()._check_model(split)
        head_of(split, self.head)

    def posterior_of(self, split: SplitModel, survey: Survey) -> PropagationPosterior:
        return PropagationPosterior(split)

    def _pulled(self, steps: int) -> tuple[str, bool]:
        if self.weight == 0:
            return super()._pulled(steps)
        why = (
            "the auxiliary loss pulls" if steps == 1 else f"silos that take {steps} steps, and the auxiliary loss, pull"
        )
        return f"{why} it there. Use nf.FedPA(model), or nf.EP(model)", False

    def algorithm(self, task: Task) -> FederatedAlgorithm:
        """The method as pure functions; see :mod:`numpyro_fed.algorithm`."""
        plain = super().algorithm(task)
        if self.weight == 0:
            return plain
        own, split, batching = task.flat, task.flat.split, task.batching
        aside = Auxiliary(features_of(own, self.features), head_of(split, self.head), self.epsilon, self.moments)
        optim = optax.adam(NETWORK_STEP) if self.network_optim is None else self.network_optim

        def init(key: Array) -> AveragingServer:
            server = plain.init(key)
            start = aside.head.of(own.joined(server))
            sizes = aside.features.size, self.latent, self.hidden
            networks = propagation.fresh(jax.random.fold_in(key, 1), *sizes, start, self.epsilon)
            nothing = jnp.zeros((task.survey.num_silos, self.latent), start.dtype)
            return server._replace(beside=Propagation(networks, LatentSite(nothing, nothing)))

        def broadcast(key: Array, server: AveragingServer) -> Broadcast:
            sent = plain.broadcast(key, server).common
            return Broadcast(
                PropagationBroadcast(sent, server.beside.networks), propagation.cavities(server.beside.sites)
            )

        def silo_step(
            key: Array, broadcast: Broadcast, silo: tuple, data: SiloData
        ) -> tuple[PropagationMessage, tuple]:
            (sent, networks), cavity = broadcast.common, broadcast.each
            number = task.count(data)

            def term(x: Array, networks: Networks, key: Array | None) -> Array:
                rows = data
                if batching is not None and key is not None:  # those that the loss looks at
                    rows = minibatch.with_replacement(split, batching, key, data).data
                z, _ = aside.hybrid(networks, cavity, x, rows)
                return self.weight * aside.divergence(networks, z, x)

            beside = Beside(networks, term, optim)
            delta, loss, steepest, learned = self._averaged(task, key, sent, data, beside)
            x = sent.w - delta
            z, outside = aside.hybrid(learned, cavity, x, data)
            message = PropagationMessage(
                AveragingMessage(delta, number * loss, number, steepest),
                jax.tree.map(jnp.subtract, networks, learned),
                propagation.site_between(cavity, z),
                jnp.sum(outside, dtype=jnp.int32),
                aside.divergence(learned, z, x),
            )
            return message, silo

        def aggregate(messages: PropagationMessage, cohort: Cohort) -> tuple[PropagationMessage, Any]:
            share = messages.point.rows / jnp.sum(messages.point.rows)
            mean = lambda leaf: jnp.tensordot(share, leaf, axes=1)
            found = PropagationMessage(
                plain.aggregate(messages.point, cohort),
                jax.tree.map(mean, messages.networks),
                messages.site,
                jnp.sum(messages.clipped),
                mean(messages.divergence),
            )
            return found, jnp.asarray(cohort.index)

        def server_step(
            key: Array, server: AveragingServer, heard: tuple[PropagationMessage, Any]
        ) -> tuple[AveragingServer, dict]:
            found, who = heard
            new, info = plain.server_step(key, server, found.point)
            before: Propagation = server.beside
            networks = jax.tree.map(jnp.subtract, before.networks, found.networks)
            sites, refused = accepted(before.sites, found.site, who)
            info |= {"divergence": found.divergence, "clipped": found.clipped + refused}
            return new._replace(beside=Propagation(networks, sites)), info

        def turned(server: AveragingServer, message: PropagationMessage) -> PropagationMessage:
            """From steps to the points they lead to, and back: a step belongs to a place that the server has left."""
            point = message.point._replace(delta=task.flat.joined(server) - message.point.delta)
            networks = jax.tree.map(jnp.subtract, server.beside.networks, message.networks)
            return message._replace(point=point, networks=networks)

        lost = Lost(
            hold=True,
            absorb=lambda key, server, message: turned(server, message),
            server_step=lambda key, server, heard: server_step(key, server, (turned(server, heard[0]), heard[1])),
        )
        return FederatedAlgorithm(init, plain.init_silo, broadcast, silo_step, aggregate, server_step, lost)

    def _begin(self, task: Task, rounds: int, left: Left, fresh: AveragingServer) -> Begun:
        begun = super()._begin(task, rounds, left, fresh)
        server: AveragingServer = begun.server
        if left.server is not None or not isinstance(server.beside, Propagation):
            return begun
        # the networks predict the first point, wherever a start or another fit put it
        networks = server.beside.networks
        start = head_of(task.flat.split, self.head).of(task.flat.joined(server))
        networks = networks._replace(second=networks.second._replace(bias=start))
        return begun._replace(server=server._replace(beside=server.beside._replace(networks=networks)))


def accepted(sites: LatentSite, new: LatentSite, who: Array) -> tuple[LatentSite, Array]:
    """The sites with those of a cohort replaced, none of them of negative precision; and how many numbers were refused.

    >>> one = lambda eta, tau: LatentSite(jnp.array([[eta]]), jnp.array([[tau]]))
    >>> sites, refused = accepted(one(1.0, 2.0), one(jnp.nan, 3.0), jnp.array([0]))
    >>> float(sites.tau[0, 0]), int(refused)
    (2.0, 1)
    """
    fine = jnp.isfinite(new.eta) & jnp.isfinite(new.tau)
    keep = lambda now, before: before.at[who].set(jnp.where(fine, now, before[who]))
    found = LatentSite(keep(new.eta, sites.eta), keep(jnp.maximum(new.tau, 0.0), sites.tau))
    return found, jnp.sum(~fine | (new.tau < 0))
