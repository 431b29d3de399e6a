r"""What a guide of your own has to say.

.. math:: q(z) = q(z_G) \prod_j q(z_{Lj} \mid z_G)

on unconstrained vectors: a draw of the globals with its log density, at the server, and in each silo a draw of its
locals given the globals with the log density of each row. Parameters are any pytrees; those of a silo stay in it. The
library's own guides (:class:`~numpyro_fed.guides.StructuredNormal`, :class:`~numpyro_fed.guides.Amortized`) say more:
they start from a mode, take minibatches, and can be continued by other methods.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from numpyro_fed.algorithm import Key, PyTree
from numpyro_fed.data.padding import SiloData
from numpyro_fed.guides.auto import drawn_moments
from numpyro_fed.guides.normal import GlobalBase
from numpyro_fed.model.split_model import SplitModel

Array = jax.Array


@runtime_checkable
class Guide(Protocol):
    """A variational family as four functions. A frozen value: it is part of the compiled program."""

    def init_params(self, key: Key, split: SplitModel) -> PyTree:
        """Where the parameters of q(z_G) start. At the server, which has no data."""
        ...

    def rsample_with_log_prob(self, key: Key, params: PyTree, split: SplitModel) -> tuple[Array, Array]:
        """A draw of z_G, (d,), and log q(z_G); gradients flow through both."""
        ...

    def init_local_params(self, key: Key, split: SplitModel, data: SiloData) -> PyTree:
        """Where a silo's own parameters start. In the silo."""
        ...

    def rsample_local_with_log_prob(
        self, key: Key, params: PyTree, z: Array, split: SplitModel, data: SiloData
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """A draw of z_L given z_G = z, {group: (rows, k)}, and log q by row, {group: (rows,)}. In the silo."""
        ...


@dataclass(frozen=True)
class UserGuide:
    """A guide of a user's own, as methods take guides."""

    guide: Any

    local_cov, local_params, can_start, needs_data, arbitrary = "block", True, False, True, True
    shared_params = ()

    def __post_init__(self) -> None:
        if not isinstance(self.guide, Hashable):
            raise TypeError(f"guide {type(self.guide).__name__} cannot be hashed: make it a @dataclass(frozen=True)")

    def __repr__(self) -> str:
        return repr(self.guide)

    def bind(self, split: SplitModel) -> "BoundUserGuide":
        """The guide for one model."""
        return BoundUserGuide(self.guide, split)


class BoundUserGuide:
    """All that methods ask of a guide, from the four functions of :class:`Guide`."""

    local_cov, local_params, needs_data, arbitrary = "block", True, True, True
    can_start, shared_params = False, ()

    def __init__(self, guide: Guide, split: SplitModel) -> None:
        self.guide, self.split = guide, split

    def start_global(self, key: Key, split: SplitModel, found: Any = None) -> tuple[PyTree, GlobalBase]:
        return {"guide": self.guide.init_params(key, split)}, GlobalBase(jnp.zeros(split.dim), jnp.ones(split.dim))

    def noise(self, key: Key, d: int) -> Key:
        return key

    def rsample_with_log_prob(self, params: PyTree, base: GlobalBase, eps: Key) -> tuple[Array, Array]:
        return self.guide.rsample_with_log_prob(eps, params["guide"], self.split)

    def context(self, params: PyTree, base: GlobalBase) -> tuple:
        """Silos need nothing of the guide over the globals."""
        return ()

    frozen_context = context

    def moments(self, params: PyTree, base: GlobalBase) -> tuple[Array, Array | None, Array]:
        return drawn_moments(self, params, base)

    def start_local(self, key: Key, split: SplitModel, data: SiloData) -> tuple[PyTree, tuple]:
        return self.guide.init_local_params(key, split, data), ()

    def draw_with_density(
        self,
        key: Key,
        split: SplitModel,
        params: PyTree,
        base: Any,
        z: Array,
        context: Any,
        theta: dict,
        data: SiloData,
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """z_L given z_G = z, and log q by row, padded rows at zero."""
        z_local, log_q = self.guide.rsample_local_with_log_prob(key, params, z, split, data)
        masks = {group.name: split.row_mask(group, data.mask) for group in split.groups}
        return z_local, {group: jnp.where(masks[group], rows, 0.0) for group, rows in log_q.items()}

    def take_rows(self, base: Any, take: Any) -> Any:
        raise ValueError(
            "batch_size= needs to know which parameters belong to which row, and a guide of your own does not tell: "
            "leave batch_size= out, or use nf.guides.StructuredNormal"
        )

    def adopt_local(self, split: SplitModel, params: PyTree, base: Any, mode: Any, given: Any) -> tuple[PyTree, Any]:
        return params, base

    def recentred(self, params: PyTree, base: Any, old: Any, new: Any) -> tuple[PyTree, Any]:
        return params, base
