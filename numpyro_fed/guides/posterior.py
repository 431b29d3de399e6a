r"""The posterior that a guide stands for: :math:`q(z_G) \prod_j q(z_{Lj} \mid z_G)`."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Key, PyTree
from numpyro_fed.data.padding import SiloData
from numpyro_fed.guides.normal import GlobalBase, GlobalNormal
from numpyro_fed.host import concrete, put
from numpyro_fed.local import conditional
from numpyro_fed.local.bound import Weighting, silo_bound
from numpyro_fed.local.start import LocalStart, WarmStart
from numpyro_fed.model.rows import Components
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.normal.gaussian import Normal

Array = jax.Array


class GuideServer(Protocol):
    """What of a server's state the guide is in."""

    @property
    def params(self) -> dict[str, Any]: ...  # of q(z_G), and what all silos share of q(z_L | z_G)
    @property
    def theta(self) -> dict[str, Any]: ...  # in units of theta_base
    @property
    def base(self) -> GlobalBase: ...
    @property
    def theta_base(self) -> tuple[dict[str, Any], dict[str, Any]]: ...  # location, scale


class GuideSilo(Protocol):
    """What of a silo's state the guide is in."""

    @property
    def params(self) -> Any: ...  # of q(z_L | z_G)
    @property
    def base(self) -> Any: ...
    @property
    def components(self) -> Components | None: ...


def theta_of(server: GuideServer, theta: dict[str, Any] | None = None) -> dict[str, Any]:
    """The model's params (or ``theta`` in their place), unconstrained, in their own units."""
    location, scale = server.theta_base
    return jax.tree.map(lambda a, b, t: a + b * t, location, scale, server.theta if theta is None else theta)


class GuidePosterior:
    """A guide for one model.

    Args:
        split: the model.
        guide: :class:`~numpyro_fed.guides.StructuredNormal`, :class:`~numpyro_fed.guides.Amortized` or another.
        weighting: how the bound weighs a silo's rows; None where that is not known, and then there is no bound.
        moving_centre: the locals move around the guide's mean; else around the start's centre.
    """

    def __init__(
        self, split: SplitModel, guide: Any, weighting: Weighting | None = None, moving_centre: bool = True
    ) -> None:
        self.split, self.family, self.guide = split, guide, guide.bind(split)
        self.weighting, self.moving_centre = weighting, moving_centre
        self.reads_data = bool(split.groups) and bool(self.guide.needs_data)
        named = getattr(guide, "argument_names", None)
        self.inputs: tuple[str, ...] = () if named is None or not split.groups else named(split)

    def own(self, silo: PyTree) -> GuideSilo:
        """The guide's part of a silo's state."""
        return silo

    def context(self, server: GuideServer) -> Any:
        """What of the guide over the globals the silos need."""
        return (self.guide.context if self.moving_centre else self.guide.frozen_context)(server.params, server.base)

    def sample(self, key: Key, server: GuideServer) -> Array:
        return self.sample_with_log_prob(key, server)[0]

    def sample_with_log_prob(self, key: Key, server: GuideServer) -> tuple[Array, Array]:
        return self.guide.rsample_with_log_prob(server.params, server.base, self.guide.noise(key, self.split.dim))

    def sample_local(self, key: Key, z: Array, server: GuideServer, silo: PyTree, data: SiloData) -> dict[str, Array]:
        split, guide, own, context = self.split, self.guide, self.own(silo), self.context(server)
        if not split.groups:
            return {}
        if guide.arbitrary:
            theta = theta_of(server)
            return guide.draw_with_density(key, split, own.params, own.base, z, context, theta, data)[0]
        eps = jax.tree.map(lambda leaf: leaf[0], conditional.draw_rows(key, split, data.mask, 1))
        return conditional.sample(guide.condition(own.params, own.base, z, context, data), eps)

    @property
    def local_program(self) -> tuple:
        return type(self), self.family, self.moving_centre

    def local_context(self, server: GuideServer) -> tuple[Any, dict[str, Any]]:
        return self.context(server), theta_of(server)

    def sample_local_with_log_prob(
        self, key: Key, z: Array, context: tuple[Any, dict[str, Any]], silo: PyTree, data: SiloData
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        split, guide, own = self.split, self.guide, self.own(silo)
        if guide.arbitrary:
            centre, theta = context
            return guide.draw_with_density(key, split, own.params, own.base, z, centre, theta, data)
        eps = jax.tree.map(lambda leaf: leaf[0], conditional.draw_rows(key, split, data.mask, 1))
        return self._from_normals(eps, z, context, silo, data)

    @property
    def local_from_normals(self) -> Any:
        """None also where a row is made of other rows' normals."""
        mixed = getattr(self.family, "local_cov", None) == "full"
        return None if self.guide.arbitrary or mixed else self._from_normals

    def _from_normals(
        self, eps: dict[str, Array], z: Array, context: tuple[Any, dict[str, Any]], silo: PyTree, data: SiloData
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        split, guide, own, (centre, theta) = self.split, self.guide, self.own(silo), context
        given = guide.condition(own.params, own.base, z, centre, data)
        spread = conditional.spread(given, eps)
        z_local = jax.tree.map(jnp.add, given.loc, spread)
        active = split.evaluate(z, z_local, theta, data).active
        return z_local, conditional.log_prob_spread(given, spread, active)

    def theta(self, server: GuideServer) -> dict[str, Any]:
        return theta_of(server)

    def normal(self, server: GuideServer) -> Normal | None:
        guide, params, base = self.guide, server.params, server.base
        if not isinstance(guide, GlobalNormal):
            return None
        known = concrete((params, base))
        module: Any = np if known else jnp  # the host compiles nothing
        params, base = jax.tree.map(module.asarray, (params, base))
        with np.errstate(all="ignore"):
            mean, scale, factor = guide.mean_global(params, base), module.exp(params["log_scale"]), None
            if guide.global_cov == "full":
                unit = module.tril(params["tril"], -1) + module.eye(self.split.dim, dtype=mean.dtype)
                root = base.scale @ (scale[:, None] * unit)
            else:
                root = base.scale * scale
            if guide.global_cov == "low_rank":
                factor = (base.scale[:, None] * params["factor"]).T
        return Normal(*(put((mean, root, factor)) if known else (mean, root, factor)))

    def silo_elbo(self, key: Key, z: Array, server: GuideServer, silo: PyTree, data: SiloData) -> Array:
        if self.weighting is None:
            raise ValueError("how a silo's rows lie is not known, so neither is the bound: fit the model to the silos")
        own, context, theta = self.own(silo), self.context(server), theta_of(server)
        return silo_bound(
            *(self.split, self.guide, self.weighting, key, own.params, own.base),
            *(z, context, theta, data, own.components),
        ).value

    # --- as the start of another run --------------------------------------------------------------------------------

    def to_warm_start(self, server: GuideServer) -> WarmStart:
        loc, chol, sd = self.guide.moments(server.params, server.base)
        source = (self.family, server.params, server.base)
        return WarmStart(loc, chol, sd, theta_of(server), server.theta_base[1], self.context(server), source)

    def local_start(self, warm: WarmStart, silo: PyTree) -> LocalStart | None:
        """None where silos keep nothing of the guide; a guide that reads the data has its parameters alone to give."""
        own, guide = self.own(silo), self.guide
        if not self.split.groups or not guide.local_params:
            return None
        if guide.needs_data:
            return LocalStart({}, {}, {}, (own.params, own.base))
        loc, scale, coupling = guide.summary_local(own.params, own.base, warm.loc, warm.context)
        return LocalStart(loc, scale, coupling, (own.params, own.base))
