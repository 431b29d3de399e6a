"""The posterior of EP, SEP and PVI: a product of sites, and in each silo a normal over its locals given the globals."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Key, PyTree
from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.conditional import LocalLaplace, draw_rows
from numpyro_fed.local.integrate import DRAWS, Marginal, silo_factor
from numpyro_fed.local.start import LocalStart, WarmStart
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal import sites
from numpyro_fed.normal.families import Natural, as_family
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.precision import to_user_dtype
from numpyro_fed.results.influence import Factors

Array = jax.Array


class SitesPosterior:
    """The posterior that a server's sites multiply to.

    Args:
        split: the model.
        family: of the sites, a name or a family.
        tied: there is one site for all silos.
        marginal: how locals are integrated out; None where that is not known, and then there is no bound.
    """

    def __init__(self, split: SplitModel, family: Any, tied: bool = False, marginal: Marginal | None = None) -> None:
        self.split, self.family, self.tied = split, as_family(family), tied
        if marginal is not None and marginal.kind == "joint":  # a sampler integrates nothing out
            marginal = Marginal("importance_weighted", DRAWS, marginal.rows)
        self.marginal = marginal

    def q(self, server: Any) -> Natural:
        """The posterior of the globals."""
        return sites.posterior(server.sites, self.tied)

    def sample(self, key: Key, server: Any) -> Array:
        return self._normal(server).sample(key)

    def sample_with_log_prob(self, key: Key, server: Any) -> tuple[Array, Array]:
        normal = self._normal(server)
        z = normal.sample(key)
        return z, normal.log_prob(z)

    def sample_local(self, key: Key, z: Array, server: Any, silo: PyTree, data: SiloData) -> dict[str, Array]:
        if not self.split.groups:
            return {}
        eps = jax.tree.map(lambda leaf: leaf[0], draw_rows(key, self.split, data.mask, 1))
        return silo.local_posterior.at(z, eps)

    @property
    def local_program(self) -> tuple:
        return type(self), self.family, self.tied

    def local_context(self, server: Any) -> tuple:
        """Silos need nothing: their locals' normal is their own."""
        return ()

    def sample_local_with_log_prob(
        self, key: Key, z: Array, context: tuple, silo: PyTree, data: SiloData
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        eps = jax.tree.map(lambda leaf: leaf[0], draw_rows(key, self.split, data.mask, 1))
        return self.local_from_normals(eps, z, context, silo, data)

    def local_from_normals(
        self, eps: dict[str, Array], z: Array, context: tuple, silo: PyTree, data: SiloData
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        split, own = self.split, silo.local_posterior
        z_local = own.at(z, eps)
        return z_local, own.log_prob(eps, split.evaluate(z, z_local, split.theta, data).active)

    def theta(self, server: Any) -> dict[str, Any]:
        return {}

    def normal(self, server: Any) -> Normal:
        """In float64; NaN where the sites' product is improper."""
        return Normal(*self.family.moments(self.q(server)))

    def _normal(self, server: Any) -> Normal:
        """In the precision of the user's program."""
        return Normal(*to_user_dtype(self.family.moments(self.q(server))))

    def silo_elbo(self, key: Key, z: Array, server: Any, silo: PyTree, data: SiloData) -> Array:
        if self.marginal is None:
            raise ValueError("how a silo's rows lie is not known, so neither is the bound: fit the model to the silos")
        factor = silo_factor(self.split, self.marginal, data, silo.components)
        return factor.log_f(z, silo.frame, factor.nodes(key))

    # --- a factor a silo --------------------------------------------------------------------------------------------

    def sites(self, server: Any) -> Factors | None:
        """The prior's factor and each silo's; None where one stands for all."""
        return None if self.tied else Factors(self.family, server.sites.prior, server.sites.each)

    def reordered(self, server: Any, order: list[int]) -> Any:
        """A server state whose silos come in another order (or are fewer)."""
        take, everyone = lambda leaf: leaf[np.array(order)], len(order) == server.visits.shape[0]
        with jax.enable_x64(True):
            each = server.sites.each if self.tied else jax.tree.map(take, server.sites.each)
            return server._replace(
                sites=server.sites._replace(each=each),
                visits=take(server.visits),
                moving=take(server.moving),
                values=server.values[np.array([*order, -1])],
                rest=server.rest if everyone else jax.tree.map(jnp.zeros_like, server.rest),  # of another posterior
            )

    def known_to(self, server: Any, place: int) -> Any:
        """The server state for one of its silos: its own site, and in the others' places the mean of theirs.

        The product is the same, and a silo reads no other's site off it; of two silos, each knows the other's.
        """
        own = np.arange(server.visits.shape[0]) == place

        def pooled(leaf: Any) -> Any:
            mine = own.reshape(-1, *(1,) * (leaf.ndim - 1))
            return jnp.where(mine, leaf, jnp.sum(jnp.where(mine, 0, leaf), axis=0) / max(own.size - 1, 1))

        with jax.enable_x64(True):
            each = server.sites.each if self.tied else jax.tree.map(pooled, server.sites.each)
            values = jnp.append(pooled(server.values[:-1]), server.values[-1])
            return server._replace(
                sites=server.sites._replace(each=each),
                moving=pooled(server.moving).astype(server.moving.dtype),
                values=values.astype(server.values.dtype),
            )

    def joined(self, fresh: Any, old: Any, places: np.ndarray) -> Any:
        """A fresh server state of more silos, in which those at ``places`` have their old sites."""
        grown = lambda new, was: new.at[places].set(was)
        with jax.enable_x64(True):
            return old._replace(
                sites=old.sites._replace(each=jax.tree.map(grown, fresh.sites.each, old.sites.each)),
                visits=grown(fresh.visits, old.visits),
                moving=grown(fresh.moving, old.moving),
                values=fresh.values.at[places].set(old.values[: len(places)]).at[-1].set(old.values[-1]),
                rest=fresh.rest,
            )

    def joined_silo(self, fresh: PyTree, old: PyTree, rows: dict[str, tuple[np.ndarray, np.ndarray]]) -> PyTree:
        """A silo's old state where rows are padded otherwise: ``rows`` of each group in the old, and in the fresh."""

        def repadded(new: Any, was: Any) -> Any:
            if not rows:
                return new
            put = lambda name: {
                group: getattr(new, name)[group].at[now].set(getattr(was, name)[group][before])
                for group, (before, now) in rows.items()
            }
            return LocalLaplace(was.centre, put("loc"), put("coupling"), put("root"), put("curvature"))

        frame, local = repadded(fresh.frame, old.frame), repadded(fresh.local_posterior, old.local_posterior)
        return fresh._replace(frame=frame, local_posterior=local, solver_state=old.solver_state)

    # --- as the start of another run --------------------------------------------------------------------------------

    def to_warm_start(self, server: Any) -> WarmStart:
        q = self.q(server)
        mean, root = to_user_dtype(self.family.moments(q))
        theta = dict(self.split.theta)
        if root.ndim < 2:
            return WarmStart(mean, None, jnp.broadcast_to(root, mean.shape), theta, {})
        return WarmStart(mean, root, jax.lax.rsqrt(jnp.diagonal(to_user_dtype(q.precision))), theta, {})

    def local_start(self, warm: WarmStart, silo: PyTree) -> LocalStart | None:
        if not self.split.groups:
            return None
        local = silo.local_posterior
        return LocalStart(local.mean(warm.loc), local.sds(), local.coupling)
