"""Partitioned variational inference for Bayesian networks, by global inducing points (Bronckers 2022)."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
import optax

from numpyro_fed.algorithm import Begun, FederatedAlgorithm, Left, Phase, Plan, Program
from numpyro_fed.checks import check_count, is_number, silos_named, warn_user
from numpyro_fed.gi import as_layers
from numpyro_fed.local import minibatch
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.methods.base import Method
from numpyro_fed.methods.gi_posterior import GIPosterior
from numpyro_fed.methods.gi_rounds import LEAST, LITTLE, UNKNOWN, GIServer, gi_rounds
from numpyro_fed.methods.gi_visit import PARTS, Work
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.normal.network import Network, read_network
from numpyro_fed.optim import check_optim

FAR = 100.0  # of inputs: squares of these, times precisions and rows, are beyond float32's seven digits
STEP = 0.03  # Adam's first, of a visit
SWEEPS = 10  # visits of each silo at most, by default
INITS = ("normal", "data")
PRECISIONS = ("layer", "unit")


@dataclass(frozen=True)
class GIPVI(Method):
    r"""Partitioned variational inference for Bayesian networks: every silo owns a few pseudo-rows.

    .. math:: q(W) = \prod_\ell q(W_\ell \mid W_1, \dots, W_{\ell-1}), \qquad
        q(W_\ell \mid \dots) \propto p(W_\ell) \prod_k N(V_k^\ell;\, \phi(F_k^{\ell-1}) W_\ell,\, (\Lambda_k^\ell)^{-1})

    where :math:`F_k^{\ell}` is what the layers below make of silo k's inducing inputs :math:`U_k`. So layers depend on
    one another, which a mean field leaves out. A silo improves its own :math:`(U_k, V_k, \Lambda_k)` by steps on its
    local free energy against the others' (thesis, chapter 4).

    **What leaves a silo**: ``num_inducing`` pseudo-rows, to the server *and to all other silos*. They begin as draws
    from a normal with the silo's means and sds, and move to where they describe the silo's likelihood best; they
    are no rows of the data, and no promise of privacy either. What goes down grows with the number of silos.

    Args:
        model: an ordinary NumPyro model of a network, called as ``model(**silos[name])``; its latents are the weights,
            normal and independent under the prior. ``nf.gi.mlp(widths)`` writes one, and its layers.
        layers: ``[("W1", "b1", "relu"), ("W2", "b2")]``: sites of each dense layer, and the activation after it.
        num_inducing: pseudo-rows of a silo.
        precision: ``"layer"``: units of a layer share a row's precision; ``"unit"``: each has its own, at many times
            the cost.
        local_steps: of the optimiser in a visit.
        batch_size: rows of a silo that a step looks at; by default all.
        damping: the share of a silo's change that the server accepts, in (0, 1]; by default all.
        optim: an optax optimiser, begun afresh at every visit; by default Adam, its steps falling from .03 to zero.
        num_particles: draws of the weights that a step averages over, in mirrored pairs.
        inputs: the argument that the first layer reads; by default the one that fits.
        init: ``"normal"``, or ``"data"``: inducing inputs begin at rows of the data, which leave the silo then.
        start_precision: of pseudo-rows at the beginning.
        local, shared: names of sites or plates, where the automatic partition is to be overridden.

    The verdict's best is ``"not checked"``: no normal is there to compare. It says if silos' bounds still rose, or
    their likelihoods still changed between visits.

    Example:
        >>> network, layers = nf.gi.mlp([1, 3, 1], likelihood="normal", scale=0.5)
        >>> x = np.linspace(-1, 1, 24, dtype="f")[:, None]
        >>> apart = nf.Silos([dict(x=x[i], y=x[i, 0]) for i in (slice(12), slice(12, 24))])
        >>> method = nf.GIPVI(network, layers, num_inducing=3, local_steps=200)
        >>> fit = method.run(jax.random.key(0), apart, schedule="sequential", progress_bar=False)
        >>> fit.sample(jax.random.key(1), 5)["W1"].shape
        (5, 1, 3)
    """

    layers: Any = ()
    num_inducing: int = 100
    precision: str = "layer"
    local_steps: int = 1000
    batch_size: int | None = None
    damping: float | None = None
    optim: Any = None
    num_particles: int = 2
    inputs: str | None = None
    init: str = "normal"
    start_precision: float = 10.0
    local: Any = None
    shared: Any = None

    stateless: ClassVar[bool] = True
    accepts_stale: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", as_layers(self.layers))
        for name in ("num_inducing", "local_steps", "num_particles"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        check_count("batch_size", self.batch_size, optional=True)
        for name, allowed in (("precision", PRECISIONS), ("init", INITS)):
            if getattr(self, name) not in allowed:
                options = " or ".join(map(repr, allowed))
                raise ValueError(f"{name} is {options}, got {getattr(self, name)!r}")
        if self.damping is not None and not (is_number(self.damping) and 0 < self.damping <= 1):
            raise ValueError(f"damping is the share of a change that is accepted, in (0, 1], got {self.damping!r}")
        if not is_number(self.start_precision) or not self.start_precision > 0:
            raise ValueError(f"start_precision must be a positive number, got {self.start_precision!r}")
        if self.optim is not None:
            check_optim(self.optim)
        if self.inputs is not None and not isinstance(self.inputs, str):
            raise TypeError(f"inputs is the name of an argument of the model, got {self.inputs!r}")

    # --- the program ------------------------------------------------------------------------------------------------

    def compile(self, split: SplitModel, survey: Survey, plan: Plan) -> Program:
        network = self._network(split)
        if self.init == "data" and plan.names:
            warn_user(
                f"nf.GIPVI(init='data') sends {self.num_inducing} rows of every silo's data to the server and to all "
                "silos: leave init= out, unless they may leave"
            )
        core = replace(self, damping=None)  # which is in the server's state
        rounds = remembered(lambda: core._rounds(split, network, survey), core, ByIdentity(split), survey)
        phase = Phase(
            "rounds",
            rounds,
            begin=lambda left, fresh: self._begin(split, network, left, fresh),
            num_rounds=SWEEPS * plan.sweep if plan.num_rounds is None else plan.num_rounds,
            done=lambda info: bool(info["moving"][-1] < 1),
            finish=lambda left, server, info: self._finish(survey, plan, left, server),
            look=1,
            looks_at_data=self._looks(survey),
            remedy="standardise the inputs, or pass a smaller step: optim=optax.adam(1e-3)",
        )
        return Program((phase,), GIPosterior(split, network))

    def _looks(self, survey: Survey) -> int:
        """In four visits, as a rule, and three passes for a gradient; inducing points of all silos are rows, too."""
        rows = max(survey.total / survey.num_silos, 1.0)
        seen = min(self.batch_size or rows, rows) + self.num_inducing * survey.num_silos
        return int(4 * 3 * self.local_steps * self.num_particles * seen / rows)

    def posterior_of(self, split: SplitModel, survey: Survey) -> GIPosterior:
        return GIPosterior(split, self._network(split))

    def _network(self, split: SplitModel) -> Network:
        read = lambda: read_network(split, self.layers, self.inputs)
        return remembered(read, "network", self.layers, self.inputs, ByIdentity(split))

    def _rounds(self, split: SplitModel, network: Network, survey: Survey) -> FederatedAlgorithm:
        batching = None if self.batch_size is None else minibatch.plan(split, survey, "whole", self.batch_size)
        optim = self.optim
        if optim is None:
            optim = optax.adam(optax.cosine_decay_schedule(STEP, self.local_steps))
        work = Work(
            split,
            network,
            self.num_inducing,
            tuple(1 if self.precision == "layer" else layer.units for layer in network.layers),
            float(self.start_precision),
            self.init,
            optim,
            self.local_steps,
            self.num_particles,
            batching,
        )
        return gi_rounds(work, survey.num_silos).traced_once()

    # --- where rounds begin and end -----------------------------------------------------------------------------------

    def _begin(self, split: SplitModel, network: Network, left: Left, fresh: GIServer) -> Begun:
        server = fresh if left.server is None else left.server
        if left.server is None and left.warm is not None:
            weights = network.weights(split.unravel(jnp.asarray(left.warm.loc, server.start.dtype)))
            start = split.ravel(network.sites(network.to_standard(weights)))
            server = server._replace(start=start, warm=jnp.ones((), bool))
        damping = 1.0 if self.damping is None else self.damping
        return Begun(server._replace(damping=jnp.asarray(damping, server.start.dtype)))

    def _finish(self, survey: Survey, plan: Plan, left: Left, server: GIServer) -> Left:
        """Whether everybody was heard, and bounds and likelihoods are at rest."""
        visits, moving, climbs = (np.asarray(leaf) for leaf in (server.visits, server.moving, server.climbs))
        named = lambda where: silos_named([plan.names[j] for j in np.flatnonzero(where).tolist()])
        more = "run more rounds, run(..., init_state=fit.state)"
        lost, reasons = np.asarray(server.lost) > 0, []
        little = np.maximum(LITTLE, LEAST / np.array(survey.sizes)) if survey.known else LITTLE
        if np.any(lost):
            reasons.append(
                f"the last answer of {named(lost)} was not finite, and was left out: standardise the inputs, "
                "nf.prepare.standardize(silos, 'x'), or pass a smaller step, optim=optax.adam(1e-3)"
            )
        elif np.any(visits == 0):
            reasons.append(f"nobody asked {named(visits == 0)}: the posterior is not yet that of all silos: {more}")
        elif len(visits) > 1 and np.any(moving >= UNKNOWN):
            reasons.append(
                f"{named(moving >= UNKNOWN)} took part once, so nobody knows whether the posterior is at rest: {more}"
            )
        elif len(visits) > 1 and np.any(moving > 1):
            reasons.append(
                f"the likelihood of {named(moving > 1)} changed by up to {(little * moving).max():.2g} nats an "
                f"observation in its last visit: {more}"
            )
        if np.any(climbs > 1):
            reasons.append(
                f"the bound of {named(climbs > 1)} still rose by up to {(little * climbs).max():.2g} nats an "
                f"observation in the last quarter of its steps: pass local_steps={2 * self.local_steps}, or {more}"
            )
        if self.local_steps < 2 * PARTS:
            reasons.append(f"local_steps={self.local_steps} are too few to tell whether bounds still rise: pass more")
        restless = left.moving or bool(reasons)
        large = float(jnp.max(jnp.abs(server.table.inputs)))
        if large > FAR and server.start.dtype == jnp.float32:
            reasons.append(
                f"inducing inputs are as large as {large:.2g}, where float32 loses what rows say: standardise the "
                "inputs, nf.prepare.standardize(silos, 'x')"
            )
        return left._replace(server=server, reasons=(*left.reasons, *reasons), moving=restless)
