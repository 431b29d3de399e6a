r"""Structured normal guides.

.. math::

    z_G    &= \mu_G + \sigma_G \odot (L_G \epsilon_G) \\
    z_{Lj} &= \bar\mu_j + C_j (z_G - \mu_G) + \sigma_j \odot (L_j \epsilon_j)

with unit lower triangular :math:`L` (Tan, Bhaskaran and Nott 2020; section 3.4 of the SFVI paper).
"""

from dataclasses import dataclass, replace
from typing import Any

import jax

from numpyro_fed.guides.auto import AutoGlobals, check_factory
from numpyro_fed.guides.local import LocalNormal
from numpyro_fed.guides.normal import GlobalNormal, check_global
from numpyro_fed.model.split_model import SplitModel

Array = jax.Array


@dataclass(frozen=True)
class StructuredNormal(GlobalNormal, LocalNormal):
    """A normal over the globals, and over each silo's locals given the globals.

    Args:
        global_cov: ``"full"``, ``"diagonal"`` or ``"low_rank"`` (diagonal plus ``rank`` factors).
        local_cov: ``"block"`` (rows independent given z_G, each with its own covariance), ``"diagonal"``, or ``"full"``
            over all locals of a silo.
        coupling: local means move linearly with z_G.
        scale_coupling: local log-scales move with z_G too, linearly up to a factor of about exp(2).
        rank: of the low-rank part; by default the square root of the dimension.
        global_guide: a NumPyro AutoGuide over the globals in place of the normal, as a class or a function of a model:
            ``AutoIAFNormal``, ``lambda model: AutoLowRankMultivariateNormal(model, rank=5)``. It is built on the model
            with locals and observations left out.
    """

    global_cov: str = "full"
    local_cov: str = "block"
    coupling: bool = True
    scale_coupling: bool = False
    rank: int | None = None
    global_guide: Any = None

    def __post_init__(self) -> None:
        check_global(self.global_cov, self.rank)
        allowed = ("block", "diagonal", "full")
        if self.local_cov not in allowed:
            raise ValueError(f"local_cov is {self.local_cov!r}; use one of {', '.join(map(repr, allowed))}")
        check_factory(self.global_guide)

    def bind(self, split: SplitModel) -> Any:
        """The guide for one model."""
        if not split.groups and (self.coupling or self.scale_coupling):
            return replace(self, coupling=False, scale_coupling=False).bind(split)
        return self if self.global_guide is None else AutoGlobals(self, split)

    def context(self, params: dict[str, Array], base: Any) -> Any:
        """What of the guide over the globals the silos need: its centre mu_G, where locals move around it."""
        return self.mean_global(params, base) if self.coupling or self.scale_coupling else ()

    def frozen_context(self, params: dict[str, Array], base: Any) -> tuple:
        """The same where silos keep to the start's centre (which gives the same family)."""
        return ()
