r"""Where to start: a few rounds of Newton's method, counted like any other round.

A prior N(0, 100) says little about an answer of 242, so a start needs data. What is searched for is the mode of

.. math:: \log p(z_G) + \sum_j \log f_j(z_G; \theta), \qquad
    f_j(z_G; \theta) = \int p(y_j, z_{Lj} \mid z_G, \theta)\, dz_{Lj}

over :math:`x = (z_G, \theta)`, the locals integrated out by a few quadrature nodes or draws around their modes
(:mod:`numpyro_fed.local.integrate`): the joint density of a hierarchical model has its (useless) mode where a variance
is zero. A silo sends the value, gradient and Hessian of :math:`\log f_j`: O(d^2) numbers for at most ``MAX_ROUNDS``
rounds. The server takes damped Newton steps (Levenberg and Marquardt, with the absolute values of the curvatures), of
which only those stand that lead uphill; the curvature at the end is the first guess of the posterior's covariance.
A search that does not get there is made again, from other points.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.infer import init_to_median, init_to_sample

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Left, Phase
from numpyro_fed.data.padding import SiloData
from numpyro_fed.host import concrete, real_dtype
from numpyro_fed.keys import digest
from numpyro_fed.local.conditional import LocalLaplace
from numpyro_fed.local.integrate import Factor, Marginal, choose, silo_factor, start_frame
from numpyro_fed.local.start import WarmStart
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.initial import initial
from numpyro_fed.model.provenance import provenance
from numpyro_fed.model.rows import Components, components_of
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.normal.matrices import lower_half, symmetric
from numpyro_fed.normal.newton import (
    Search,
    advance,
    derivatives,
    floored_inverse_root,
    start_search,
    unit_diagonal,
)
from numpyro_fed.pieces import jit
from numpyro_fed.precision import in_x64, to_user_dtype, unoptimised

Array = jax.Array
LEAST_CURVATURE = 1e-5  # in units of the diagonal's: globals may be correlated to all but that
LOOK = 5  # rounds between two looks at whether it has converged
MAX_ROUNDS = 40
MAX_DIM = 200  # above this a dense Hessian costs more than it gives
NODES = {1: 9, 2: 5}  # per dimension of a row: enough to find a mode
DRAWS = 8  # of the locals, where there is no quadrature
LOCAL_STEPS = 12
JITTER = 0.1  # of the first point: components of a mixture that begin alike would stay alike
ATTEMPTS = 3
SLACK = 1.0  # units of log density
CONVERGED = 0.05  # expected gain of the next step, in log density: a third of a posterior sd


class ModeServer(NamedTuple):
    """The search over (z_G, theta), (d + p,), whose ``trial`` is what is sent next."""

    search: Search
    accepted: Array  # bool: the trial before


class ModeSilo(NamedTuple):
    """Private to the silo: its locals at the last trial, as a start, and at the last one that was accepted."""

    loc: dict[str, Array]
    scale: dict[str, Array]
    coupling: dict[str, Array]
    accepted: LocalLaplace | tuple
    tried: LocalLaplace | tuple
    components: Components | None
    own: tuple = ()

    @property
    def frame(self) -> LocalLaplace | tuple:
        """The locals around the last trial, as they were found."""
        return self.tried


class ModeBroadcast(NamedTuple):
    trial: Array  # (d + p,)
    accepted: Array  # bool: the trial before


class ModeMessage(NamedTuple):
    value: Array
    gradient: Array  # (d + p,)
    precision: Array  # minus the Hessian, the lower triangle of it


def newton_start(split: SplitModel, marginal: Marginal) -> FederatedAlgorithm:
    """Mode finding as a federated algorithm. Its final states start the variational methods."""
    theta_flat, unravel_theta = ravel_pytree(split.theta) if split.theta else (np.zeros(0, real_dtype()), lambda _: {})
    d, size = split.dim, split.dim + theta_flat.shape[0]
    free = np.concatenate([np.ones(d, bool), *(np.full(n, not held) for n, held in _held(split))])

    def parts(x: Array) -> tuple[Array, dict]:
        return x[:d], unravel_theta(x[d:])

    def init(key: Array) -> ModeServer:
        first = jnp.concatenate([JITTER * jax.random.normal(key, (d,)), theta_flat])
        return ModeServer(start_search(first), jnp.array(False))

    def broadcast(key: Array, server: ModeServer) -> Broadcast:
        return Broadcast(ModeBroadcast(server.search.trial, server.accepted))

    def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> ModeSilo:
        frame = start_frame(split, data)
        components = components_of(split, data) if marginal.rows == "indexed" else None
        return _silo(frame, frame, components)

    def silo_step(key: Array, broadcast: Broadcast, silo: ModeSilo, data: SiloData) -> tuple[ModeMessage, ModeSilo]:
        x, accepted = broadcast.common
        before = jax.tree.map(lambda new, old: jnp.where(accepted, new, old), silo.tried, silo.accepted)

        def factor_at(theta: dict) -> Factor:
            return silo_factor(split, marginal, data, silo.components, theta)

        z, theta = parts(x)
        factor = factor_at(theta)
        frame = factor.refit(z, before, LOCAL_STEPS)

        def log_f(x: Array) -> Array:
            z, theta = parts(x)
            factor = factor_at(theta)
            return factor.log_f(z, frame, factor.nodes(None))

        found = derivatives(log_f, x) if theta else factor.derivatives(z, frame, factor.nodes(None))
        value, gradient, precision = found
        return ModeMessage(value, gradient, lower_half(precision)), _silo(before, frame, silo.components)

    def aggregate(messages: ModeMessage, cohort: Cohort) -> ModeMessage:
        return jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), messages)

    def server_step(key: Array, server: ModeServer, silos: ModeMessage) -> tuple[ModeServer, dict]:
        search = server.search
        prior_value, prior_gradient, prior_precision = derivatives(lambda x: split.log_prior(*parts(x)), search.trial)
        value = silos.value + prior_value
        gradient = jnp.where(free, silos.gradient + prior_gradient, 0.0)
        precision = jnp.where(free[:, None] & free, prior_precision + symmetric(silos.precision, size), jnp.eye(size))
        # where locals are drawn, values are those of draws around other modes; in any case they are rounded
        slack = 1e-2 + 1e-5 * jnp.abs(search.value)
        if marginal.kind == "importance_weighted":
            slack = slack + jnp.minimum(search.gain, SLACK)
        new, accepted = advance(search, value, gradient, precision, slack)
        new = new._replace(value=jnp.maximum(search.value, new.value))
        return ModeServer(new, accepted), {"loss": -value, "_gain": new.gain, "_best": new.value}

    return FederatedAlgorithm(init, init_silo, broadcast, silo_step, aggregate, server_step).traced_once()


def another_point(split: SplitModel, key: Array, attempt: int) -> Array:
    """Where the prior's medians are, then a draw of it, both moved a little; theta where the user put it."""
    places = (init_to_median, init_to_sample)
    place = initial(split, places[(attempt - 1) % len(places)](), key)
    away = JITTER * jax.random.normal(key, (split.dim,))
    return jnp.concatenate([jnp.where(jnp.isfinite(place), place, 0.0) + away, ravel_pytree(split.theta)[0]])


def _silo(accepted: Any, tried: Any, components: Components | None) -> ModeSilo:
    if tried == ():  # there are no locals
        return ModeSilo({}, {}, {}, accepted, tried, components)
    return ModeSilo(tried.loc, tried.conditional_sds(), tried.coupling, accepted, tried, components)


def _held(split: SplitModel) -> list[tuple[int, bool]]:
    """Of each theta its size, and whether it shapes the globals' prior.

    There a point has no mode: as the scale of a prior goes to zero with the globals, the density goes to infinity.
    Such a theta stays at its start until inference integrates over the globals.
    """
    if not split.theta:
        return []
    found = provenance(lambda **theta: split.log_prior(jnp.zeros(split.dim), theta), split.theta)
    return [
        (int(sum(np.size(leaf) for leaf in jax.tree.leaves(v))), n in found) for n, v in sorted(split.theta.items())
    ]


def for_start(split: SplitModel, survey: Survey | None) -> Marginal:
    """How locals are integrated out: with few nodes, where there are nodes."""
    if not split.groups or survey is None:
        return Marginal("none")
    found = choose(split, survey)
    if found.kind == "quadrature":
        return found._replace(num=NODES[max(group.size for group in split.groups)])
    return found._replace(num=DRAWS) if found.kind == "importance_weighted" else found


def mode_phases(split: SplitModel, num_rounds: int, survey: Survey | None = None) -> tuple[Phase, ...]:
    """A search, and others that are made where it did not converge; the best of them is the start.

    Each takes at most so many rounds. What is left is a warm start, the silos' half of which are their own states.
    """
    return tuple(mode_phase(split, num_rounds, survey, attempt) for attempt in range(ATTEMPTS))


def mode_phase(split: SplitModel, num_rounds: int, survey: Survey | None = None, attempt: int = 0) -> Phase:
    """One of these searches."""
    marginal = for_start(split, survey)

    def begin(left: Left, fresh: ModeServer) -> Begun:
        if not attempt:
            return Begun(fresh)
        key = jax.random.key(digest(f"\0mode {attempt}"))
        return Begun(fresh._replace(search=start_search(another_point(split, key, attempt))))

    def finish(left: Left, server: ModeServer, info: dict[str, Any]) -> Left | None:
        value, sure = float(server.search.value), converged(info)
        if not np.isfinite(value):
            return None
        if left.warm is not None and not sure and value <= left.reached:
            return left
        return left._replace(warm=mode_to_warm_start(split, server), reached=value, unsure=not sure)

    return Phase(
        "mode",
        remembered(lambda: newton_start(split, marginal), "mode", ByIdentity(split), marginal),
        begin=begin,
        num_rounds=num_rounds,
        done=converged,
        finish=finish,
        role="start",
        effort="least",
        look=LOOK,
    )


def converged(info: dict[str, Any]) -> bool:
    return float(info["_gain"][-1]) < CONVERGED


def mode_to_warm_start(split: SplitModel, server: ModeServer) -> WarmStart:
    """The end of mode finding as a start: its point, and the inverse of its curvature given theta."""
    d, search = split.dim, server.search

    @in_x64
    def spread(precision: Array) -> tuple[Array, Array]:
        root = floored_inverse_root(precision[:d, :d], LEAST_CURVATURE)
        return jnp.linalg.cholesky(root @ root.T), unit_diagonal(precision)[1]

    def parts(x: Array, precision: Array) -> tuple[Array, ...]:
        chol, scale = to_user_dtype(spread(precision))
        return x[:d], chol, scale[:d], x[d:], scale[d:]

    if concrete(search):  # on the host it is one program, elsewhere a part of another
        parts = jit(parts, compiler_options=unoptimised())
    loc, chol, sd, theta, theta_sd = parts(search.x, search.precision)
    unravel = ravel_pytree(split.theta)[1] if split.theta else lambda _: {}
    return WarmStart(loc, chol, sd, unravel(theta), unravel(theta_sd))
