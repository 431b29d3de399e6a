"""The model run forward: given latents are held, everything else is drawn, observations too."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.distributions import Unit

from numpyro_fed.algorithm import Posterior, PyTree
from numpyro_fed.data.padding import SiloData, axis_lengths
from numpyro_fed.keys import fold_in_name
from numpyro_fed.model.layout import filled
from numpyro_fed.model.partition_table import Site
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import unwrapped
from numpyro_fed.pieces import jit
from numpyro_fed.precision import ONCE

Array = jax.Array


class Call(NamedTuple):
    """What a compiled prediction is specialised on: the ints among the arguments, and which locals are held."""

    ints: tuple[int | None, ...]  # None where an array stands
    structure: Any
    held: tuple[str, ...]  # local sites whose draws are the silo's
    lengths: tuple[tuple[str, int], ...]  # axes of these, without padding


class Request(NamedTuple):
    """Whose prediction it is, and for which arguments."""

    identity: Any  # of the silo's name, for its random numbers
    silo: PyTree  # its state, where latents are held
    arrays: tuple[Any, ...]  # among the model's arguments
    padded: SiloData | None = None  # what held latents are drawn from: the silo's data as in the run
    units: SiloData | None = None  # what held discrete latents are read off, with the rows of ``Call.lengths``


def predicted(
    posterior: Posterior, split: SplitModel, call: Call, key: Array, z: Array, server: PyTree, request: Request
) -> dict[str, Array]:
    """One draw of the observed and the deterministic sites, at z_G = z."""
    values, discrete, theta = split.unravel(z), {}, posterior.theta(server)
    own = local_key(key, request.identity)
    if call.held and request.padded is not None:
        lengths = dict(call.lengths)
        z_local = silo_latents(posterior, split, own, z, server, request.silo, request.padded, lengths)
        local = split.unpack(z_local, {axis: jnp.ones(n, bool) for axis, n in lengths.items()})
        values |= {name: local[name] for name in call.held if name in local}
        if request.units is not None:
            drawn = split.sample_discrete(z, z_local, theta, request.units, discrete_key(key, request.identity))
            discrete = {name: drawn[name] for name in call.held if name in drawn}
    arrays = iter(request.arrays)
    flat = [next(arrays) if value is None else value for value in call.ints]
    return forward(split, values, theta, jax.tree.unflatten(call.structure, flat), jax.random.fold_in(own, 1), discrete)


def silo_latents(
    posterior: Posterior,
    split: SplitModel,
    key: Array,
    z: Array,
    server: PyTree,
    silo: PyTree,
    padded: SiloData,
    lengths: dict[str, int],
) -> dict[str, Array]:
    """One draw of z_L given z_G = z, drawn with the run's padding, with rows for axes of these ``lengths``."""
    z_local, before = posterior.sample_local(key, z, server, silo, padded), axis_lengths(padded)
    return z_local if lengths == before else split.unpadded_local(z_local, lengths, before)


def predictor(posterior: Posterior, split: SplitModel) -> Callable[..., dict[str, Array]]:
    """``(call, keys, draws of z_G, server, request) -> {site: draws}``, compiled."""

    def run(call: Call, keys: Array, z: Array, server: PyTree, request: Request) -> dict[str, Array]:
        return jax.vmap(lambda key, z: predicted(posterior, split, call, key, z, server, request))(keys, z)

    return jit(run, static_argnums=0, compiler_options=ONCE)


def local_key(key: Array, identity: Any) -> Array:
    """Of one silo's locals, the globals being drawn from ``key``: silos are independent given the globals."""
    return fold_in_name(jax.random.fold_in(key, 1), identity)


def discrete_key(key: Array, identity: Any) -> Array:
    """Of one silo's discrete sites, all else being drawn from ``key``."""
    return jax.random.fold_in(local_key(key, identity), 2)


def forward(
    split: SplitModel, values: dict, theta: dict, kwargs: dict, key: Array, discrete: dict | None = None
) -> dict[str, Array]:
    """One run of the model: latents in ``values`` (unconstrained) and ``discrete`` are held, all else is drawn."""
    trace = forward_trace(split, values, theta, kwargs, key, discrete)
    shown = [site for site in split.partition.sites if site.role in ("observed", "deterministic")]
    return {site.name: trace[site.name]["value"] for site in shown}


def forward_trace(
    split: SplitModel, values: dict, theta: dict, kwargs: dict, key: Array, discrete: dict | None = None
) -> dict[str, dict]:
    """All sites of one such run."""
    model = handlers.condition(split.model, condition_fn=_forget)
    params = split.constrain_theta(theta) | split.constants
    model = handlers.substitute(model, data=params) if params else model
    model = handlers.substitute(model, substitute_fn=partial(filled, values, discrete or {}))
    return handlers.trace(handlers.seed(model, key)).get_trace(**kwargs)


def _forget(site: dict) -> None:
    """Take an observation away, so that the site is drawn. A condition_fn, since those reach inside NumPyro's scan."""
    fn, value = site["fn"], site["value"]
    if not site["is_observed"] or value is None or isinstance(unwrapped(fn), Unit):
        return
    if not site["kwargs"].get("sample_shape"):  # rows that share a distribution are drawn one by one
        shape = np.broadcast_shapes(jnp.shape(value), fn.shape())
        batch = shape[: len(shape) - fn.event_dim]
        site["fn"] = fn if batch == fn.batch_shape else fn.expand(batch)
    site["value"], site["is_observed"] = None, False
    if site["kwargs"]["rng_key"] is None:
        site["kwargs"]["rng_key"] = numpyro.prng_key()


def event_dims(split: SplitModel) -> dict[str, int]:
    """Of the observed sites: how many of a value's last axes one log density covers."""
    found: dict[str, int] = {}

    def run() -> int:
        kwargs = split.spec.kwargs(split.dummy())
        trace = forward_trace(split, split.unravel(jnp.zeros(split.dim)), split.theta, kwargs, jax.random.key(0))
        found.update({s.name: trace[s.name]["fn"].event_dim for s in split.partition.sites if s.role == "observed"})
        return 0

    jax.eval_shape(run)
    return found


def value_axes(site: Site, events: dict[str, int]) -> tuple[tuple[str, int], ...]:
    """The own axes of a site's value, when drawn (an observed constant would have none)."""
    if site.role != "observed":
        return site.value_axes
    return tuple((axis, dim - events[site.name]) for axis, dim in site.axes)


def call_of(kwargs: dict[str, Any], held: tuple[str, ...], lengths: dict[str, int]) -> tuple[Call, tuple]:
    flat, structure = jax.tree.flatten(kwargs)
    ints = tuple(leaf if isinstance(leaf, int) else None for leaf in flat)
    own = tuple(sorted(lengths.items())) if held else ()
    return Call(ints, structure, held, own), tuple(leaf for leaf in flat if not isinstance(leaf, int))


def unit_axes(split: SplitModel) -> set[str]:
    """The own axes along which data are observed; the others hold groups of units."""
    observed = [site for site in split.partition.sites if site.role in ("observed", "factor")]
    return {axis for site in observed for axis, _ in (*site.axes, *site.value_axes)}
