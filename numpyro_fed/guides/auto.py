"""NumPyro's AutoGuides over the globals.

An AutoGuide is given as a factory and built on the model with local latents and observations left out, so it knows the
globals alone; a silo's locals stay with the structured guide. Such a guide need not have a mean: the locals move around
the start's centre instead, which gives the same family.
"""

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import init_to_value
from numpyro.infer.autoguide import AutoGuide

from numpyro_fed.guides.normal import GlobalBase
from numpyro_fed.guides.traced import (
    constrained_params,
    guide_trace,
    log_densities,
    param_constraints,
    unconstrained_params,
)
from numpyro_fed.memo import remembered
from numpyro_fed.model.initial import unconstrained
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.pieces import jit

Array = jax.Array
DRAWS = 1000  # for mean and covariance of a guide that cannot tell them


def check_factory(factory: Any) -> None:
    """Raises unless it is None, an AutoGuide class or a function of a model."""
    if factory is None or (callable(factory) and not isinstance(factory, AutoGuide)):
        return
    got = type(factory).__name__
    if isinstance(factory, AutoGuide):
        raise TypeError(
            f"global_guide is an {got} that was built already; pass the class, global_guide={got}, or a function of "
            f"the model, global_guide=lambda model: {got}(model, ...)"
        )
    raise TypeError(f"global_guide must be an AutoGuide class or a function of a model, got a {got}")


def rebuilt(guide: AutoGuide) -> Callable[[Any], AutoGuide]:
    """A factory that gives the same AutoGuide for another model."""

    def factory(model: Any) -> AutoGuide:
        new = copy.copy(guide)
        new.model, new.prototype_trace = model, None
        new._prototype_frames, new._prototype_frame_full_sizes = {}, {}
        return new

    return factory


def globals_model(split: SplitModel) -> Callable[[], Any]:
    """The model with everything left out but its global sites (and plates)."""
    data = split.dummy()
    params = split.constrain_theta(split.theta) | split.constants
    seeded = handlers.seed(handlers.substitute(split.model, data=params), jax.random.PRNGKey(0))
    hidden = lambda site: site["type"] != "plate" and site["name"] not in split.global_shapes
    return handlers.block(lambda: seeded(**split.spec.kwargs(data)), hide_fn=hidden)


def _prototype(factory: Callable, split: SplitModel) -> AutoGuide:
    """The guide with its prototype made, outside of any trace: it remembers arrays."""
    make = lambda: _built_at(factory, split, None)
    return remembered(make, "prototype", factory, split.model, tuple(split.global_shapes.items()))


def _built_at(factory: Callable, split: SplitModel, loc: Array | None) -> AutoGuide:
    with jax.ensure_compile_time_eval():
        guide = factory(globals_model(split))
        if not isinstance(guide, AutoGuide):
            raise TypeError(f"global_guide must give an AutoGuide, got a {type(guide).__name__}: pass the class itself")
        if loc is not None:
            values = split.constrain_global(loc, split.theta)
            guide.init_loc_fn = init_to_value(values={name: values[name] for name in split.global_shapes})
        handlers.seed(guide, jax.random.PRNGKey(0))()
    return guide


class AutoGlobals:
    """A guide whose globals are an AutoGuide's and whose locals are ``structured``'s."""

    def __init__(self, structured: Any, split: SplitModel) -> None:
        self.structured, self.split = structured, split
        self.guide = _prototype(structured.global_guide, split)
        self.limits = param_constraints(self._trace(jax.random.key(0)))

    def __getattr__(self, name: str) -> Any:
        """All that concerns the locals is the structured guide's."""
        return getattr(self.__dict__["structured"], name)

    def _trace(self, key: Array, params: dict | None = None, guide: Any = None) -> dict[str, dict]:
        return guide_trace(guide or self.guide, {}, params or {}, key)

    def start_global(self, key: Array, split: SplitModel, found: Any = None) -> tuple[dict[str, Any], GlobalBase]:
        guide = self.guide if found is None else _built_at(self.structured.global_guide, split, found.loc)
        params = unconstrained_params(self._trace(key, guide=guide))
        own = self.structured.init_context(key, split)
        centre = jnp.zeros(split.dim) if found is None else found.loc
        return {"auto": params, **own}, GlobalBase(centre, jnp.ones(split.dim))

    def noise(self, key: Array, d: int) -> Array:
        return key

    def rsample_with_log_prob(self, params: dict[str, Any], base: GlobalBase, eps: Array) -> tuple[Array, Array]:
        """A draw and its log density; gradients flow through both."""
        trace = self._trace(eps, constrained_params(params["auto"], self.limits))
        values = {name: trace[name]["value"] for name in self.split.global_shapes}
        log_q = sum((jnp.sum(value) for value in log_densities(trace).values()), jnp.zeros(()))
        data = self.split.dummy()
        flat, log_det = unconstrained(self.split, values, self.split.theta, data)
        return self.split.ravel(flat), log_q + sum((jnp.sum(value) for value in log_det.values()), jnp.zeros(()))

    def sample_global(self, params: dict[str, Any], base: GlobalBase, eps: Array) -> Array:
        return self.rsample_with_log_prob(params, base, eps)[0]

    def context(self, params: dict[str, Any], base: GlobalBase) -> Any:
        return self.structured.frozen_context(params, base)

    frozen_context = context

    def moments(self, params: dict[str, Any], base: GlobalBase) -> tuple[Array, Array | None, Array]:
        """Mean, Cholesky factor of the covariance and conditional sds, from draws."""
        return drawn_moments(self, params, base)


def drawn_moments(guide: Any, params: dict, base: GlobalBase) -> tuple[Array, Array | None, Array]:
    """Mean, Cholesky factor of the covariance (None above ``DRAWS`` / 4 dimensions) and conditional sds, from draws."""
    keys = jax.random.split(jax.random.key(0), DRAWS)
    draws = np.asarray(jit(jax.vmap(lambda key: guide.rsample_with_log_prob(params, base, key)[0]))(keys), np.float64)
    loc, d = draws.mean(axis=0), draws.shape[1]
    sd = np.maximum(draws.std(axis=0), 1e-3)  # a point has no spread, but a start needs one
    as_array = lambda value: jnp.asarray(value, base.loc.dtype)
    if d * 4 > DRAWS:
        return as_array(loc), None, as_array(sd)
    covariance = np.atleast_2d(np.cov(draws.T)) * (1 - 1e-6 * np.ones((d, d)) + 1e-6 * np.eye(d))
    covariance[np.diag_indices(d)] = np.maximum(np.diagonal(covariance), sd**2)
    conditional = 1 / np.sqrt(np.diagonal(np.linalg.inv(covariance)))
    return as_array(loc), as_array(np.linalg.cholesky(covariance)), as_array(conditional)
