r"""Are the locals right, given the globals? One round of the check; see :mod:`numpyro_fed.run.check`.

The check's densities have the locals integrated out, so they say nothing of :math:`q(z_L \mid z_G)`, of which draws of
the locals and predictions of a silo's own units are made. So every silo draws its locals at a few draws of the globals
and weighs them, row by row, by

.. math:: w_i = \frac{p(z_{Li}, y_i \mid z_G)}{q(z_{Li} \mid z_G)}

whose effective share is found at each z_G; a row's is the middle one of these. (Globals that are themselves at the edge
of their posterior, such as a scale near zero, may well have locals that no normal follows.) Where locals are made of
standard normals, and rows have nothing to do with one another, these are fixed points, the same in every row
(:mod:`numpyro_fed.normal.points`); else they are drawn. Of each local plate it
returns three numbers: the Pareto k of the row whose share is the least, the middle one again, how many rows have an
effective share below :data:`LOW`, and how many rows there are. (The largest k of all rows would be that of the row with
the most noise: with 128 draws k has an sd of .2.) Where rows meet in a term the silo's locals have one weight together.
"""

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from numpyro_fed.algorithm import Begun, Broadcast, Cohort, FederatedAlgorithm, Key, Left, Phase, Posterior, PyTree
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.stack import Stack
from numpyro_fed.equations import works
from numpyro_fed.host import folded, put, real_dtype, shapes_of
from numpyro_fed.keys import digest
from numpyro_fed.local.bound import Weighting, combined, row_weights
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.rows import components_of
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.normal.points import normal_points
from numpyro_fed.precision import to_user_dtype
from numpyro_fed.results.importance import pareto_k
from numpyro_fed.results.looks import LocalLook
from numpyro_fed.run.foresee import foresee, fresh_shapes
from numpyro_fed.run.runner import Runner

Array = jax.Array
GLOBALS = 7  # draws of z_G; an odd number, which has a middle one
DRAWS = 128  # of the locals at each
FEWEST = 16
LOW = 0.1  # effective share of a row's weights
MOST_WEIGHTS = 2**24  # in all silos, beyond which fewer draws are made
MOST_ELEMENTS = 2**21  # of log densities that are evaluated at once
LOCALS = digest("\0locals")


@runtime_checkable
class HasLocals(Protocol):
    """A posterior whose locals have a density given the globals.

    It may also have ``local_program``, any hashable value: of one model, posteriors with equal ones share a compiled
    program of what is below. And it may have ``local_from_normals``, which is ``sample_local_with_log_prob`` with
    standard normals, {group: (rows, k)}, in the place of the key (or None, where locals are not made of such).
    """

    def local_context(self, server: PyTree) -> PyTree:
        """What a silo needs of the server's state for its locals. At the server."""
        ...

    def sample_local_with_log_prob(
        self, key: Key, z: Array, context: PyTree, silo: PyTree, data: SiloData
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """A draw of z_L given z_G = z, {group: (rows, k)}, and log q by row, {group: (rows,)}. In the silo."""
        ...


class LocalsServer(NamedTuple):
    """All that a silo receives, and what they answered."""

    z: Array  # (Z, d): draws of the globals
    theta: dict[str, Array]
    context: PyTree
    found: "LocalsMessage"


class LocalsMessage(NamedTuple):
    """Of each local plate."""

    pareto_k: dict[str, Array]  # of the row whose effective share is the least
    low: dict[str, Array]  # rows whose effective share is low
    rows: dict[str, Array]


def locals_round(split: SplitModel, posterior: Any, rows: str, num: int) -> FederatedAlgorithm:
    """The round as pure functions; ``rows`` says how terms find their rows, ``num`` is the number of draws."""
    weighting = Weighting(num, rows)

    def broadcast(key: Array, server: LocalsServer) -> Broadcast:
        return Broadcast((server.z, server.theta, server.context))

    def silo_step(key: Array, broadcast: Broadcast, silo: Any, data: SiloData) -> tuple[LocalsMessage, Any]:
        z, theta, context = broadcast.common
        components = components_of(split, data) if rows == "indexed" else None

        fixed = fixed_points(split, posterior, rows, num)

        def weight(given: tuple[Array, Array]) -> Array:
            own, z = given
            if fixed is None:
                z_local, log_q = posterior.sample_local_with_log_prob(own, z, context, silo, data)
            else:
                eps = {g.name: jnp.broadcast_to(own, (g.num_rows(data.mask), g.size)) for g in split.groups}
                z_local, log_q = posterior.local_from_normals(eps, z, context, silo, data)
            terms = split.evaluate(z, z_local, theta, data).terms
            return combined(split, weighting, terms, log_q, data, components, None, None)

        own = jax.random.split(key, len(z) * num) if fixed is None else jnp.tile(fixed, (len(z), 1))
        places = own, jnp.repeat(z, num, axis=0)
        all_ = works(lambda *all_: jax.lax.map(weight, all_, batch_size=_batch(data, num)))
        each = all_(*places).reshape(len(z), num, -1)
        each = jnp.where(jnp.isfinite(each), each, -jnp.inf)
        worst, low, count = {}, {}, {}
        for group in split.groups:
            of_group = lambda log_w, group=group: row_weights(split, weighting, log_w, group.name, data, components)
            log_w = jnp.moveaxis(jax.vmap(of_group)(each), 1, 0)  # (draws, Z, rows)
            real = split.row_mask(group, data.mask)
            share = _middle(jnp.exp(2 * logsumexp(log_w, axis=0) - logsumexp(2 * log_w, axis=0)) / num)
            least = jnp.argmin(jnp.where(real, jnp.where(jnp.isnan(share), -jnp.inf, share), jnp.inf))
            k = _middle(to_user_dtype(pareto_k(log_w[:, :, least])))
            worst[group.name] = jnp.where(jnp.any(real), k, -jnp.inf)
            low[group.name] = jnp.sum(jnp.where(real, ~(share >= LOW), False))
            count[group.name] = jnp.sum(real)
        return LocalsMessage(worst, low, count), silo

    def aggregate(messages: LocalsMessage, cohort: Cohort) -> LocalsMessage:
        total = partial(jax.tree.map, lambda leaf: jnp.sum(leaf, axis=0))
        worst = {group: jnp.max(k, axis=0) for group, k in messages.pareto_k.items()}
        return LocalsMessage(worst, total(messages.low), total(messages.rows))

    def server_step(key: Array, server: LocalsServer, found: LocalsMessage) -> tuple[LocalsServer, dict]:
        return server._replace(found=found), {}

    # it begins with the states that the rounds left
    fresh, fresh_silo = lambda key: (), lambda key, broadcast, data: ()
    return FederatedAlgorithm(fresh, fresh_silo, broadcast, silo_step, aggregate, server_step).traced_once()


def fixed_points(split: SplitModel, posterior: Any, rows: str, num: int) -> Array | None:
    """(num, k): standard normals of a row's locals, the same in all; None: they have to be drawn."""
    alone = len(split.groups) == 1 and rows != "whole" and 2 * split.groups[0].size <= num
    if not alone or getattr(posterior, "local_from_normals", None) is None:
        return None
    return jnp.asarray(normal_points(split.groups[0].size, num), real_dtype())


def _middle(values: Array) -> Array:
    """Of an odd number of rows."""
    return jnp.sort(values, axis=0)[len(values) // 2]


def _batch(data: SiloData, num: int) -> int:
    """Draws that are evaluated at once: a power of two, as ``num`` is."""
    sizes = [int(np.prod(leaf.shape)) for leaf in jax.tree.leaves((data.args, data.mask)) if np.ndim(leaf)]
    batch = 1
    while 2 * batch <= num and 2 * batch * max(sizes, default=1) <= MOST_ELEMENTS:
        batch *= 2
    return batch


def num_draws(split: SplitModel, stack: Stack) -> int:
    """Of the locals at each z_G: fewer where there are very many rows."""
    masks = [(len(bucket.names), stack.shapes(b).mask) for b, bucket in enumerate(stack.buckets)]
    rows = sum(number * group.num_rows(mask) for number, mask in masks for group in split.groups)
    num = DRAWS
    while num > FEWEST and num * GLOBALS * rows > MOST_WEIGHTS:
        num //= 2
    return num


def _phase(runner: Runner, posterior: Any, rows: str) -> Phase:
    """How it begins is left open."""
    split, num = runner.split, num_draws(runner.split, runner.stack)
    make = partial(locals_round, split, posterior, rows, num)
    return Phase(
        "locals",
        remembered(make, "locals", ByIdentity(split), _program(posterior), rows, num),
        cohort=len(runner.stack.names),
        role="check",
        effort="some",
        looks_at_data=GLOBALS * num,
        watched=False,  # a Pareto k of exact weights is minus infinity
        recipe=("locals", num),
    )


def _program(posterior: Any) -> Hashable:
    return getattr(posterior, "local_program", ByIdentity(posterior))


def _unknown(split: SplitModel) -> LocalsMessage:
    """Before silos have answered."""
    counts = {group.name: np.zeros((), jnp.result_type(int)) for group in split.groups}
    return LocalsMessage(*put(({group: np.zeros((), real_dtype()) for group in counts}, counts, counts)))


def foresee_locals(runner: Runner, posterior: Posterior, rows: str, rounds: Phase) -> None:
    """Begin to compile the look at the locals, for states such as the rounds will leave."""
    split = runner.split
    if split.groups and isinstance(posterior, HasLocals):
        server, states = fresh_shapes(runner, rounds.variant(rounds.likely).algorithm)
        x64 = jax.config.read("jax_enable_x64")

        def sent(server: PyTree) -> tuple:
            with jax.enable_x64(x64):
                return posterior.theta(server), posterior.local_context(server)

        with jax.enable_x64(True):  # elsewhere a shape of float64 is cut to float32
            theta, context = shapes_of(sent, server)
        z: Any = jax.ShapeDtypeStruct((GLOBALS, split.dim), real_dtype())
        begun = LocalsServer(z, theta, context, _unknown(split))
        foresee(runner, _phase(runner, posterior, rows), scheduled=False, shapes=(begun, states))


def look_at_locals(
    runner: Runner, posterior: Posterior, normal: Normal, rows: str, server: PyTree, states: tuple
) -> dict[str, LocalLook] | str | None:
    """What silos find of their locals, by plate; or why they were not asked. None: interrupted."""
    split = runner.split
    if not split.groups:
        return {}
    if not isinstance(posterior, HasLocals) or not states:
        return f"nf.{runner.label} has no density of the locals given the globals, so they were not looked at"
    words = np.asarray(jax.random.key_data(folded(runner.key, LOCALS))).ravel().tolist()
    z = put(normal.drawn(np.random.default_rng(words), GLOBALS).astype(real_dtype()))
    begun = LocalsServer(z, posterior.theta(server), posterior.local_context(server), _unknown(split))
    phase = _phase(runner, posterior, rows)._replace(begin=lambda left, fresh: Begun(begun))
    left, _ = runner.run((phase,), Left(), states, None)
    if left.interrupted:
        return None
    found: LocalsMessage = left.server.found
    of = lambda group: LocalLook(
        float(found.pareto_k[group]), int(found.low[group]) / max(int(found.rows[group]), 1), rows != "whole"
    )
    return {group.name: of(group.name) for group in split.groups}
