r"""Searches for modes, several at once: what a silo says of several points in a round, and where the server looks next.

What is searched for are modes of the density of the globals with the locals integrated out,

.. math:: \log p(z_G) + \sum_j \log f_j(z_G)

never of the joint one, whose modes are useless where scales are free. A silo sends value, gradient and half of the
Hessian of its :math:`\log f_j` at each of K points. The server takes Levenberg and Marquardt's steps
(:mod:`numpyro_fed.normal.newton`), in one of two ways. Apart: each point is a search of its own
(:mod:`numpyro_fed.run.modes` asks so whether there are other modes). Together: all points are trials of one search,
with longer and shorter steps from the best point so far (:mod:`numpyro_fed.methods.laplace_start` finds a start so, in
fewer rounds than with one trial each). It is one program for both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.data.padding import SiloData
from numpyro_fed.equations import works
from numpyro_fed.host import put, real_dtype, zeros_like
from numpyro_fed.local.conditional import LocalLaplace
from numpyro_fed.local.integrate import Marginal, silo_factor, start_frame
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.rows import components_of
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.matrices import lower_half, symmetric
from numpyro_fed.normal.newton import Search, advance, derivatives
from numpyro_fed.precision import finite
from numpyro_fed.run.mode import JITTER, MAX_DIM, NODES

Array = jax.Array
DRAWS = 32  # of a row's locals, the same at every point, where there is no quadrature
SEARCHES = ((20, 6), (50, 3), (MAX_DIM, 2))  # up to so many dimensions, so many
DAMPING = 0.3  # of the first step: starts are far from any mode, and a refused step costs a round
LADDER = np.array([0, 1, 10, 0.1, 100, 0.01])  # trials of one search: the damping of each, in units of the search's
LEAST_RUNG = 0.05  # of the damping before, after a step without any
HOME = 1.0  # sds of q from its mean, within which a search is where q is
LOCAL_STEPS = 8  # of Newton's method to the locals' modes, from those of the round before
CONVERGED = 1e-2  # expected gain of the next step, in log density


class SearchBroadcast(NamedTuple):
    """All that a silo receives."""

    points: Array  # (K, d)
    ended: Array  # bool (K,): nothing is asked of these any more
    theta: dict[str, Array]


class SearchMessage(NamedTuple):
    value: Array  # (K,)
    gradient: Array  # (K, d)
    precision: Array  # (K, d (d + 1) / 2): the lower triangle of minus the Hessian


class SearchServer(NamedTuple):
    search: Search  # K of them, stacked; trials of one search have all but ``trial`` in common
    theta: dict[str, Array]
    mean: Array  # (d,): q's; NaN: there is none yet
    whitening: Array  # (d, d): of what is off that, to standard normals
    together: Array  # bool: they are trials of one search
    each: SearchMessage  # of every silo, (J, ...): at the last trial of one search that was accepted


class SearchSilo(NamedTuple):
    """Private to the silo."""

    locs: dict[str, Array]  # {group: (K, rows, k)}: the locals' modes, where they are looked for next
    frame: LocalLaplace | tuple  # the locals around the first point, as they were found last; () where there are none

    @property
    def loc(self) -> dict[str, Array]:
        """As :class:`~numpyro_fed.local.start.LocalStart` has it: what rounds begin with."""
        return self.frame.loc if isinstance(self.frame, LocalLaplace) else {}


def searches(split: SplitModel, marginal: Marginal, num: int, num_silos: int) -> FederatedAlgorithm:
    """So many searches, the same object for whoever asks; its own beginning is one search, near zero."""
    make = partial(_searches, split, marginal, num, num_silos)
    return remembered(make, "searches", ByIdentity(split), marginal, num, num_silos)


def _searches(split: SplitModel, marginal: Marginal, num: int, num_silos: int) -> FederatedAlgorithm:
    """As pure functions; see :mod:`numpyro_fed.algorithm`."""
    d = split.dim

    def init(key: Array) -> SearchServer:
        near = JITTER * jax.random.normal(key, (1, d))
        points = jnp.concatenate([near, jax.random.normal(jax.random.fold_in(key, 1), (num - 1, d))])
        same = lambda value: jnp.broadcast_to(value, (num, *np.shape(value)))
        dtype = points.dtype
        far = same(jnp.asarray(np.inf, dtype))
        search = Search(points, points, -far, same(jnp.eye(d)), jnp.zeros((num, d)), same(jnp.full((), DAMPING)), far)
        nowhere = jnp.full(d, np.nan, dtype)
        each = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), _each_shapes(split, num_silos))
        return SearchServer(search, split.theta, nowhere, jnp.eye(d), jnp.ones((), bool), each)

    def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> SearchSilo:
        same = lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape))
        return SearchSilo(jax.tree.map(same, split.near_zero_local(data.mask)), start_frame(split, data))

    def broadcast(key: Array, server: SearchServer) -> Broadcast:
        return Broadcast(SearchBroadcast(server.search.trial, _ended(server), server.theta))

    def silo_step(
        key: Array, broadcast: Broadcast, silo: SearchSilo, data: SiloData
    ) -> tuple[SearchMessage, SearchSilo]:
        sent: SearchBroadcast = broadcast.common
        components = components_of(split, data) if marginal.rows == "indexed" else None
        factor = silo_factor(split, marginal, data, components, sent.theta)
        nodes, unknown = factor.nodes(None), start_frame(split, data)

        def look(ended: Array, z: Array, frame: Any) -> SearchMessage:
            value, gradient, precision = factor.derivatives(z, frame, nodes)
            return SearchMessage(value, gradient, lower_half(precision))

        frames: Any = ()
        if split.groups:
            refit = lambda ended, z, loc: factor.refit(z, unknown._replace(loc=loc), LOCAL_STEPS)
            found = _each(lambda ended, z, loc: unknown._replace(loc=loc), refit, sent.ended, sent.points, silo.locs)
            # a step that was too long must not stay: the next one starts from here
            locs = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(new), new, old), found.loc, silo.locs)
            first = jax.tree.map(lambda leaf: leaf[0], found)
            stays = sent.ended[0] | ~finite(first)
            silo = SearchSilo(locs, jax.tree.map(lambda new, old: jnp.where(stays, old, new), first, silo.frame))
            frames = found._replace(coupling={})  # nodes need not move with z to be differentiated
        nothing = SearchMessage(jnp.zeros(()), jnp.zeros(d), jnp.zeros(d * (d + 1) // 2))
        return works(partial(_each, lambda *_: nothing, look))(sent.ended, sent.points, frames), silo

    def aggregate(messages: SearchMessage, cohort: Cohort) -> tuple[SearchMessage, SearchMessage]:
        order = jnp.argsort(jnp.asarray(cohort.index))
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), messages)
        return total, jax.tree.map(lambda leaf: leaf[order], messages)

    def server_step(
        key: Array, server: SearchServer, heard: tuple[SearchMessage, SearchMessage]
    ) -> tuple[SearchServer, dict]:
        (silos, apart), old, together = heard, server.search, server.together
        prior = jax.vmap(lambda z: derivatives(lambda z: split.log_prior(z, server.theta), z))(old.trial)
        whole = jax.vmap(lambda lower: symmetric(lower, d))(silos.precision)
        found = old.trial, prior[0] + silos.value, prior[1] + silos.gradient, prior[2] + whole
        fine = jnp.all(jnp.stack([jnp.isfinite(leaf.reshape(num, -1)).all(axis=1) for leaf in found]), axis=0)
        best = jnp.argmax(jnp.where(fine, found[1], -jnp.inf))
        slack = 1e-3 + 1e-5 * jnp.abs(old.value)  # rounding
        rises = fine[best] & (found[1][best] >= old.value[0] - slack[0])
        ladder = jnp.asarray(LADDER[:num], old.damping.dtype)
        rung = jnp.where(rises, jnp.maximum(ladder[best], LEAST_RUNG), jnp.max(ladder))
        damping = old.damping * jnp.where(jnp.isfinite(old.value[0]), rung, 1.0)  # first trials are of no ladder
        chosen = lambda of_best, own: jnp.where(together, jnp.broadcast_to(of_best, own.shape), own)
        trial, value, gradient, precision = (chosen(leaf[best], leaf) for leaf in found)
        asked = old._replace(trial=trial, damping=chosen(damping, old.damping))
        search, _ = jax.vmap(advance)(asked, value, gradient, precision, slack, chosen(ladder, jnp.ones_like(ladder)))
        best_yet = jnp.maximum(old.value[0], search.value)  # slack is for one step, not for one after another
        search = search._replace(gain=chosen(search.gain[0], search.gain), value=chosen(best_yet, search.value))
        ended = _ended(server)
        keep = lambda new, old: jnp.where(ended.reshape(-1, *(1,) * (new.ndim - 1)), old, new)
        search = jax.tree.map(keep, search, old)
        taken = together & rises & ~ended[0]
        each = jax.tree.map(lambda new, old: jnp.where(taken, new[:, best], old), apart, server.each)
        server = server._replace(search=search, each=each)
        return server, {"loss": -found[1][best], "_gain": search.gain[0], "_ended": _ended(server)}

    return FederatedAlgorithm(init, init_silo, broadcast, silo_step, aggregate, server_step).traced_once()


def _each(if_ended: Callable[..., Any], look: Callable[..., Any], ended: Array, points: Array, given: Any) -> Any:
    """One search after another: of those that have ended nothing is asked."""
    return jax.lax.map(lambda one: jax.lax.cond(one[0], if_ended, look, *one), (ended, points, given))


def _ended(server: SearchServer) -> Array:
    """Searches that have come to an end, or to where q is, stay there: bool (K,)."""
    off = (server.search.x - server.mean) @ server.whitening.T
    home = (abs(server.search.value) < np.inf) & ((off**2).sum(axis=1) <= HOME**2)
    return home | (server.search.gain <= CONVERGED)


def _each_shapes(split: SplitModel, num_silos: int) -> SearchMessage:
    shape: Any = lambda *own: jax.ShapeDtypeStruct((num_silos, *own), real_dtype())
    return SearchMessage(shape(), shape(split.dim), shape(split.dim * (split.dim + 1) // 2))


def begun(
    split: SplitModel,
    num_silos: int,
    points: np.ndarray,
    theta: dict[str, Array],
    mean: np.ndarray,
    whitening: np.ndarray,
) -> SearchServer:
    """Searches of their own from these points, (K, d), of which those end that come to a normal q."""
    (num, d), dtype = points.shape, points.dtype
    unknown, curvature = np.full(num, np.inf, dtype), np.broadcast_to(np.eye(d, dtype=dtype), (num, d, d))
    damping = np.full(num, DAMPING, dtype)
    search = put((points, points, -unknown, curvature, np.zeros_like(points), damping, unknown))
    centre, root, together = put((mean.astype(dtype), whitening.astype(dtype), np.zeros((), bool)))
    return SearchServer(Search(*search), theta, centre, root, together, zeros_like(_each_shapes(split, num_silos)))


def with_few_nodes(marginal: Marginal, split: SplitModel) -> Marginal:
    """As the check integrates locals, but with fewer nodes."""
    size = max((group.size for group in split.groups), default=1)
    return marginal._replace(num={"quadrature": NODES.get(size, 1), "importance_weighted": DRAWS}.get(marginal.kind, 1))


def num_searches(split: SplitModel) -> int:
    return next(number for most, number in SEARCHES if split.dim <= most)


def looks(split: SplitModel, marginal: Marginal, num: int) -> int:
    """At the data, of some rounds."""
    return 10 * num * (2 * split.dim + 2) * marginal.evaluations(split)
