"""Guides that users write: ordinary NumPyro functions of the model's arguments.

A guide samples the model's latent sites, with its own ``numpyro.param``. Its global sites are drawn at the server,
which has no data; its local sites, those in the silo's plates, in the silo. Parameters with a value for each row of a
silo stay in it; the others are the server's, which sends to the silos those that local sites use.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from numpyro.infer.autoguide import AutoGuide

from numpyro_fed.data.padding import SiloData
from numpyro_fed.guides.auto import drawn_moments, rebuilt
from numpyro_fed.guides.base import Guide, UserGuide
from numpyro_fed.guides.normal import GlobalBase
from numpyro_fed.guides.structured import StructuredNormal
from numpyro_fed.guides.traced import (
    constrained_params,
    guide_trace,
    log_densities,
    param_constraints,
    unconstrained_params,
)
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.initial import unconstrained
from numpyro_fed.model.provenance import dependence
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import growth, trace_silo

Array = jax.Array


def as_guide(guide: Any) -> Any:
    """The guide a user passed, or an error that says what to pass."""
    if guide is None or (hasattr(guide, "bind") and not isinstance(guide, type)):
        return guide
    if isinstance(guide, Guide) and not isinstance(guide, type):
        return UserGuide(guide)
    if isinstance(guide, AutoGuide):
        return AutoInstance(guide)
    if inspect.isclass(guide) and issubclass(guide, AutoGuide):
        raise TypeError(
            f"guide is the class {guide.__name__}: write guide=nf.guides.StructuredNormal(global_guide="
            f"{guide.__name__}), which leaves the locals to the silos"
        )
    if inspect.isfunction(guide) or (callable(guide) and not isinstance(guide, type)):
        return GuideFunction(guide)
    got = repr(guide) if isinstance(guide, str) else f"a {type(guide).__name__}"
    raise TypeError(
        "guide must be nf.guides.StructuredNormal(...), nf.guides.Amortized(...), a NumPyro guide function, or an "
        f"object with the functions of nf.guides.Guide, got {got}"
    )


@dataclass(frozen=True)
class AutoInstance:
    """An AutoGuide that a user built on the pooled model: right only where there are no locals."""

    guide: AutoGuide

    local_cov, local_params, can_start, needs_data, arbitrary = "block", True, True, False, False
    shared_params = ()

    def __repr__(self) -> str:
        return type(self.guide).__name__

    def bind(self, split: SplitModel) -> Any:
        name = type(self.guide).__name__
        if split.groups:
            sites = ", ".join(split.partition.local_sites)
            raise ValueError(
                f"guide is an {name} over the whole model, but {sites} live in the silos: their parameters would have "
                f"to leave them. Write guide=nf.guides.StructuredNormal(global_guide={name}), or StructuredNormal("
                f"global_guide=lambda model: {name}(model, ...)) with options."
            )
        return StructuredNormal(global_guide=_factory(self.guide)).bind(split)


def _factory(guide: AutoGuide) -> Callable:
    """One factory for one instance, so that it is built once."""
    return remembered(lambda: rebuilt(guide), "factory", ByIdentity(guide))


@dataclass(frozen=True)
class GuideFunction:
    """A NumPyro guide, as an ordinary function of the model's arguments."""

    function: Callable

    local_cov, local_params, can_start, needs_data, arbitrary = "block", True, False, True, True
    shared_params = ()

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def bind(self, split: SplitModel) -> "_BoundFunction":
        """The guide for one model."""
        return _BoundFunction(self, split)


class _BoundFunction:
    """A guide function whose sites and parameters have been divided between the server and the silos."""

    local_cov, local_params, needs_data, arbitrary = "block", True, True, True
    can_start, shared_params = False, ()

    def __init__(self, family: GuideFunction, split: SplitModel) -> None:
        self.family, self.split, self.function = family, split, family.function
        data = split.dummy()
        kwargs = split.spec.kwargs(data)
        try:
            traced = trace_silo(self.function, "any", kwargs)
        except ValueError as error:
            raise ValueError(f"guide {family!r}: {error}".replace("silo 'any': the model", "it")) from error
        drawn = {name: site for name, site in traced.sites.items() if site.kind in ("latent", "observed")}
        _check_sites(split, drawn)
        params = [name for name, site in traced.sites.items() if site.kind == "param"]
        grown: set[str] = set()
        for axis, length in split.spec.example.items():
            longer = split.spec._replace(example={**split.spec.example, axis: 2 * length})
            bigger = trace_silo(self.function, "any", longer.kwargs(longer.dummy()._replace(shared=split.shared))).sites
            grown |= {name for name in params if growth(traced.sites[name].value, bigger[name].value)}
            _check_rows(split, drawn, bigger, axis)
        own = {leaf.path for leaf in split.spec.own}
        depends = dependence(self.function, kwargs, own, traced.sites).log_prob
        for name in split.global_shapes:
            wrong = [s for s in depends[name] if s.startswith("arg:") or s.removeprefix("param:") in grown]
            if wrong:
                raise ValueError(
                    f"the guide's site {name!r} is global but depends on the silo's own {wrong[0].split(':')[1]!r}: it "
                    "is drawn at the server, which has no data. Use parameters that do not."
                )
        used = {s.removeprefix("param:") for n in split.partition.local_sites for s in depends[n]}
        self.at_silo = tuple(name for name in params if name in grown)
        self.at_server = tuple(name for name in params if name not in grown)
        self.sent = tuple(name for name in self.at_server if name in used)
        self.local_params = bool(self.at_silo)
        found: dict[str, Any] = {}  # the constraints are no arrays: a run on shapes shows them

        def look() -> int:
            found.update(param_constraints(self._run(jax.random.key(0), {}, data)))
            return 0

        jax.eval_shape(look)
        self.limits = found

    def _run(self, key: Array, params: dict, data: SiloData, held: dict | None = None) -> dict[str, dict]:
        return guide_trace(self.function, self.split.spec.kwargs(data), params, key, held)

    # --- over the globals, at the server ----------------------------------------------------------------------------

    def _dummy(self) -> SiloData:
        return self.split.dummy()

    def start_global(self, key: Array, split: SplitModel, found: Any = None) -> tuple[dict[str, Any], GlobalBase]:
        params = unconstrained_params(self._run(key, {}, self._dummy()), self.at_server)
        return params, GlobalBase(jnp.zeros(split.dim), jnp.ones(split.dim))

    def noise(self, key: Array, d: int) -> Array:
        return key

    def rsample_with_log_prob(self, params: dict[str, Any], base: GlobalBase, eps: Array) -> tuple[Array, Array]:
        """A draw of the globals and its log density; gradients flow through both."""
        trace = self._run(eps, constrained_params(params, self.limits), self._dummy())
        names = tuple(self.split.global_shapes)
        values = {name: trace[name]["value"] for name in names}
        log_prob = log_densities(trace)
        flat, log_det = unconstrained(self.split, values, self.split.theta, self._dummy())
        log_q = sum((jnp.sum(log_prob[n]) + jnp.sum(log_det[n]) for n in names), jnp.zeros(()))
        return self.split.ravel(flat), log_q

    def context(self, params: dict[str, Any], base: GlobalBase) -> dict[str, Any]:
        return {name: params[name] for name in self.sent}

    frozen_context = context

    def moments(self, params: dict[str, Any], base: GlobalBase) -> tuple[Array, Array | None, Array]:
        return drawn_moments(self, params, base)

    # --- over a silo's locals ---------------------------------------------------------------------------------------

    def start_local(self, key: Array, split: SplitModel, data: SiloData) -> tuple[dict, tuple]:
        return unconstrained_params(self._run(key, {}, data), self.at_silo), ()

    def draw_with_density(
        self,
        key: Array,
        split: SplitModel,
        params: dict,
        base: Any,
        z: Array,
        context: dict,
        theta: dict,
        data: SiloData,
    ) -> tuple[dict, dict]:
        """z_L given z_G = z, and log q by row, {group: (rows,)}, padded rows at zero."""
        held = {name: value for name, value in split.constrain_global(z, theta).items() if name in split.global_shapes}
        trace = self._run(key, constrained_params({**context, **params}, self.limits), data, held)
        names = split.partition.local_sites
        values = {name: trace[name]["value"] for name in names}
        log_prob = log_densities(trace, held)
        flat, log_det = unconstrained(split, {**held, **values}, theta, data)
        z_local = split.pack({name: flat[name] for name in names}, data.mask)
        log_q = {}
        for group in split.groups:
            rows, number = split.row_mask(group, data.mask), group.num_rows(data.mask)
            total = jnp.zeros(number)
            for site in group.sites:
                by_site = log_prob[site.name] + log_det[site.name]
                total = total + jnp.sum(
                    jnp.moveaxis(by_site, site.dims, range(len(site.dims))).reshape(number, -1), axis=1
                )
            log_q[group.name] = jnp.where(rows, total, 0.0)
        return z_local, log_q

    def take_rows(self, base: Any, take: Any) -> Any:
        raise ValueError(
            "batch_size= needs to know which parameters belong to which row; a guide function does not tell. Use "
            "nf.guides.StructuredNormal or nf.guides.Amortized, or leave batch_size= out."
        )

    def adopt_local(self, split: SplitModel, params: dict, base: Any, mode: Any, found: Any) -> tuple:
        return params, base

    def recentred(self, params: dict, base: Any, old: Any, new: Any) -> tuple[dict, Any]:
        return params, base

    def summary_local(self, params: dict, base: Any, z: Array, context: Any) -> tuple[dict, dict, dict]:
        raise NotImplementedError("a guide function gives no summary of its locals")


def _check_sites(split: SplitModel, drawn: dict[str, Any]) -> None:
    part = split.partition
    wanted = {site.name: site for site in part.sites if site.role in ("global", "local")}
    missing = [name for name in wanted if name not in drawn]
    if missing:
        raise ValueError(
            f"the guide lacks the latent site {missing[0]!r} of the model: add numpyro.sample({missing[0]!r}, ...). It "
            f"has {', '.join(drawn) or 'no sample sites'}."
        )
    extra = [name for name in drawn if name not in wanted]
    summed = [name for name in extra if name in part.enumerated_sites]
    if summed:
        raise ValueError(
            f"the guide samples {summed[0]!r}, which is discrete and summed out: leave it out of the guide"
        )
    if extra:
        raise ValueError(f"the guide samples {extra[0]!r}, which is no latent site of the model ({', '.join(wanted)})")


def _check_rows(split: SplitModel, drawn: dict, bigger: dict, axis: str) -> None:
    """A local site has the rows of its silo plate in the guide as it has in the model."""
    for site in split.partition.sites:
        if site.role not in ("global", "local"):
            continue
        grows = bool(growth(drawn[site.name].log_prob, bigger[site.name].log_prob))
        if grows != (axis in dict(site.axes)):
            where = f"numpyro.plate({axis!r}, ...)"
            told = f"needs {where} around it" if not grows else f"is global: take it out of {where}"
            raise ValueError(f"site {site.name!r} {told} in the guide, as in the model")
