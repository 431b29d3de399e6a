"""One step of structured variational inference, in pieces.

:class:`~numpyro_fed.SFVI` divides them between server and silos, :class:`~numpyro_fed.SFVIAvg` takes them all in the
silo.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from numpyro_fed.algorithm import Broadcast
from numpyro_fed.data.padding import SiloData
from numpyro_fed.guides.normal import GlobalBase
from numpyro_fed.guides.posterior import theta_of
from numpyro_fed.local import minibatch
from numpyro_fed.local.bound import Weighting, silo_bound
from numpyro_fed.local.minibatch import Batching
from numpyro_fed.local.row_optim import RowOptim
from numpyro_fed.methods.rest import watched
from numpyro_fed.model.initial import initial
from numpyro_fed.model.rows import Components, components_of
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import finite, tree_where
from numpyro_fed.run.diagnose import REFUSED

Array = jax.Array


class SFVIServer(NamedTuple):
    """The guide over the globals, theta, and the server's optimiser."""

    params: dict[str, Any]  # of q(z_G), and what all silos share of q(z_L | z_G)
    theta: dict[str, Array]  # in units of theta_base
    base: GlobalBase
    theta_base: tuple[dict[str, Array], dict[str, Array]]  # location, scale
    opt_state: Any


class SFVISilo(NamedTuple):
    """Private to the silo."""

    params: Any  # of q(z_L | z_G)
    base: Any
    opt_state: Any
    components: Components | None


class SFVIMessage(NamedTuple):
    """All that leaves a silo: the gradient of its bound at the draws, and the bound itself."""

    z: Array  # (num_particles, d)
    context: Any  # of what it was sent of the guide: (d,) for the centre, the weights of an encoder
    theta: dict[str, Array]
    value: Array


class SFVIBroadcast(NamedTuple):
    """All that a silo receives."""

    z: Array  # (num_particles, d)
    context: Any
    theta: dict[str, Array]


class Pulled(NamedTuple):
    """A message at the server: the gradient in the guide's own parameters, through the draw it belongs to."""

    params: dict[str, Array]
    theta: dict[str, Array]
    value: Array


class Optims(NamedTuple):
    server: optax.GradientTransformation
    silo: RowOptim


class Parts(NamedTuple):
    """SFVI's step in pieces."""

    init: Any  # (key) -> SFVIServer
    init_silo: Any  # (key, broadcast, data) -> SFVISilo
    draws: Any  # (key) -> standard normals of z_G
    sent: Any  # (SFVIServer, draws) -> SFVIBroadcast
    silo_step: Any  # (key, broadcast, SFVISilo, data) -> (SFVIMessage, SFVISilo)
    update: Any  # (SFVIServer, draws, SFVIMessage) -> (SFVIServer, info)
    pulled: Any  # (SFVIServer, draws, SFVIMessage) -> Pulled: the same in two halves
    moved: Any  # (SFVIServer, draws, Pulled) -> (SFVIServer, info)


def step_parts(
    split: SplitModel,
    guide: Any,
    optims: Optims,
    weighting: Weighting,
    batching: Batching | None,
    num_particles: int,
    init_loc_fn: Any = None,
    moving_centre: bool = True,
    tempered: bool = False,
    patient: bool = False,
) -> Parts:
    """What a step is made of.

    Args:
        guide: bound to the model.
        moving_centre: the locals' centre is the guide's mean, which moves; else the start's.
        tempered: the silo's density is raised to the power that it is sent in ``each``.
        patient: a round whose gradients are not finite is left out, and says so; else they go on, and end the run.
    """
    d, (optim, silo_optim) = split.dim, optims
    context_of = guide.context if moving_centre else guide.frozen_context

    def draws(key: Array) -> Array:
        if num_particles == 1:
            return guide.noise(key, d)[None]
        return jax.vmap(lambda key: guide.noise(key, d))(jax.random.split(key, num_particles))

    def paths(params: dict, base: GlobalBase, eps: Array) -> tuple[Array, Array]:
        return jax.vmap(lambda eps: guide.rsample_with_log_prob(params, base, eps))(eps)

    def init(key: Array) -> SFVIServer:
        params, base = guide.start_global(key, split)
        if init_loc_fn is not None:
            params |= {"loc": initial(split, init_loc_fn, key)}
        theta = jax.tree.map(jnp.zeros_like, split.theta)
        units = jax.tree.map(jnp.ones_like, split.theta)
        return SFVIServer(params, theta, base, (split.theta, units), optim.init((params, theta)))

    def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> SFVISilo:
        params, base = guide.start_local(key, split, data)
        found = components_of(split, data) if weighting.rows == "indexed" else None
        return SFVISilo(params, base, silo_optim.init(params), found)

    def sent_at(server: SFVIServer, eps: Array) -> SFVIBroadcast:
        z, _ = paths(server.params, server.base, eps)
        return SFVIBroadcast(z, context_of(server.params, server.base), theta_of(server))

    def silo_step(key: Array, broadcast: Broadcast, silo: SFVISilo, data: SiloData) -> tuple[SFVIMessage, SFVISilo]:
        sent = broadcast.common
        power = broadcast.each if tempered else None
        params, base, components, batch, taken = silo.params, silo.base, silo.components, None, None
        if batching is not None:
            taken = minibatch.take(split, batching, jax.random.fold_in(key, 1), data, components)
            data, components, batch = taken.data, taken.components, taken.batch
            if guide.local_params:
                take = lambda tree: minibatch.gather(tree, taken, silo_optim.rows)
                params, base = take(params), guide.take_rows(base, take)

        def one(key: Array, z: Array) -> Any:
            return silo_bound(
                split, guide, weighting, key, params, base, z, sent.context, sent.theta, data, components, batch, power
            )

        if num_particles == 1:
            found = jax.tree.map(lambda leaf: leaf[None], one(key, sent.z[0]))
        else:
            found = jax.vmap(one)(jax.random.split(key, num_particles), sent.z)
        average = lambda tree: jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), tree)
        message = SFVIMessage(
            found.z / num_particles, average(found.context), average(found.theta), average(found.value)
        )
        if not split.groups or not guide.local_params:
            return message, silo
        downhill = jax.tree.map(lambda leaf: -jnp.mean(leaf, axis=0), found.params)
        if patient:
            # what is not finite pulls nowhere; the server is to hear of it, and leaves the round out. (To leave the
            # silo's step out as well, all rows would have to be gone over once more before any of them moves.)
            unknown = sum(jnp.sum(0 * leaf) for leaf in jax.tree.leaves(downhill))
            message = message._replace(value=message.value + unknown)
            downhill = jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0.0), downhill)
        params, opt_state = silo_optim.step(downhill, silo.opt_state, silo.params, params, taken)
        return message, silo._replace(params=params, opt_state=opt_state)

    def update(server: SFVIServer, eps: Array, silos: SFVIMessage) -> tuple[SFVIServer, dict]:
        _, pull_context = jax.vjp(lambda params: context_of(params, server.base), server.params)
        return step(server, eps, silos.z, pull_context(silos.context)[0], silos.theta, silos.value)

    def pulled(server: SFVIServer, eps: Array, message: SFVIMessage) -> Pulled:
        _, pull = jax.vjp(lambda params: paths(params, server.base, eps)[0], server.params)
        _, pull_context = jax.vjp(lambda params: context_of(params, server.base), server.params)
        gradient = jax.tree.map(jnp.add, pull(message.z)[0], pull_context(message.context)[0])
        return Pulled(gradient, message.theta, message.value)

    def moved(server: SFVIServer, eps: Array, silos: Pulled) -> tuple[SFVIServer, dict]:
        return step(server, eps, jnp.zeros(()), silos.params, silos.theta, silos.value)

    def step(
        server: SFVIServer, eps: Array, by_z: Array, by_params: dict, by_theta: dict, log_silos: Array
    ) -> tuple[SFVIServer, dict]:
        """Uphill: the prior's gradients and the silos', those in z_G pulled back through the guide.

        Draws may fall where a density is beyond the numbers of a computer (a sigmoid of 20 is 1 in float32): then
        the server does not move, and the next round draws others.
        """
        (z, log_q), pull = jax.vjp(lambda params: paths(params, server.base, eps), server.params)

        def prior(z: Array, theta: dict) -> Array:
            return jnp.mean(jax.vmap(lambda z: split.log_prior(z, theta_of(server, theta)))(z))

        value, (g_z, g_theta) = jax.value_and_grad(prior, argnums=(0, 1))(z, server.theta)
        weight = jnp.full(num_particles, -1.0 / num_particles, log_q.dtype)
        g_params = jax.tree.map(jnp.add, pull((g_z + by_z, weight))[0], by_params)
        g_theta = jax.tree.map(lambda g, m, unit: g + m * unit, g_theta, by_theta, server.theta_base[1])
        downhill = jax.tree.map(jnp.negative, (g_params, g_theta))
        updates, opt_state = optim.update(downhill, server.opt_state, (server.params, server.theta))
        params, theta = jax.tree.map(lambda p, u: p + u, (server.params, server.theta), updates)
        loss, new = (
            jnp.mean(log_q) - value - log_silos,
            server._replace(params=params, theta=theta, opt_state=opt_state),
        )
        if not patient:
            return new, {"loss": loss, **watched(params)}
        fine = finite((loss, downhill))
        server = tree_where(fine, new, server)
        return server, {"loss": jnp.where(fine, loss, jnp.nan), REFUSED: ~fine, **watched(server.params)}

    return Parts(init, init_silo, draws, sent_at, silo_step, update, pulled, moved)
