"""A fit as ArviZ sees it: named dimensions, all silos side by side.

The groups are plain xarray datasets, so the two majors of ArviZ differ in their container alone.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

from numpyro_fed.data.padding import SiloData
from numpyro_fed.keys import identity
from numpyro_fed.model.layout import user_mask
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import ONCE
from numpyro_fed.results import predict
from numpyro_fed.results.dims import Dims

if TYPE_CHECKING:
    from numpyro_fed.results.fit import Fit

Array = Any


def to_arviz(
    fit: "Fit", key: Array, num_samples: int, local: bool, log_likelihood: bool, posterior_predictive: bool
) -> Any:
    """See :meth:`numpyro_fed.results.fit.Fit.to_arviz`."""
    for wanted, what in ((log_likelihood, "log likelihoods"), (posterior_predictive, "replicates")):
        if wanted:
            fit.need_silos(what)
    names, sites = fit.state.names, fit.split.partition.sites
    dims = Dims(fit.split, fit._event_dims)
    keys = jax.random.split(key, num_samples)
    observed = [site for site in sites if site.role == "observed" and not site.at_server]

    posterior = {name: dims.of_server(name, value) for name, value in fit.sample(key, num_samples).items()}
    if local and any(site.role in ("local", "enumerated", "deterministic") and not site.at_server for site in sites):
        by_silo = {silo: fit.sample_local(key, num_samples, silo=silo) for silo in names}
        shown = [name for name in by_silo[names[0]] if name not in posterior]
        posterior |= {name: dims.joined(name, {silo: by_silo[silo][name] for silo in names}) for name in shown}
    groups = {"posterior": posterior}
    if posterior_predictive:
        draws = {silo: predict.own_units(fit, keys, silo) for silo in names}
        groups["posterior_predictive"] = {
            site.name: dims.joined(site.name, {silo: draws[silo][site.name] for silo in names}) for site in observed
        }
    if fit.silos is not None and observed:
        data = {silo: _observations(fit, silo) for silo in names}
        if log_likelihood:
            logs = {silo: _log_likelihoods(fit, keys, silo) for silo in names}
            groups["log_likelihood"] = {
                site.name: dims.densities(
                    site, {s: logs[s][site.name] for s in names}, {s: data[s][site.name][1] for s in names}
                )
                for site in observed
                if site.name in logs[names[0]]
            }
        groups["observed_data"] = {
            site.name: dims.joined(site.name, {s: data[s][site.name][0] for s in names}, sample=False)
            for site in observed
        }
    return container({name: group for name, group in groups.items() if group}, fit.state.method)


def container(groups: dict[str, dict[str, Any]], method: str) -> Any:
    """ArviZ's own: InferenceData before 1.0, xarray's DataTree since."""
    import arviz
    import xarray

    attrs = {"inference_library": "numpyro_fed", "inference_method": method}
    datasets = {name: xarray.Dataset(group, attrs=attrs) for name, group in groups.items()}
    if arviz.__version__.startswith("0."):
        return arviz.InferenceData(None, False, **datasets)
    owners: dict[str, Any] = {}
    for (
        name,
        dataset,
    ) in datasets.items():  # arviz.summary stacks variables, and xarray then allows index coordinates alone
        extra = [coord for coord in dataset.coords if coord not in dataset.dims]
        owners |= {str(coord): dataset[coord].reset_coords(drop=True) for coord in extra}
        datasets[name] = dataset.drop_vars(extra)
    if owners:
        datasets["constant_data"] = xarray.Dataset(owners, attrs=attrs)
    return xarray.DataTree.from_dict(datasets)


# --- what is observed -------------------------------------------------------------------------------------------------


def _observations(fit: "Fit", silo: str) -> dict[str, tuple[Array, Array]]:
    """``{observed site: (its values, which of them count)}``, unpadded."""
    _, data = fit._data(silo)
    values, counts = fit._observations(data)
    values, counts = fit._unpad(values, silo, data), _cut(fit, counts, silo, data)
    return {name: (values[name], counts[name]) for name in values}


def observations(split: SplitModel) -> Any:
    """``data -> ({observed site: values}, {observed site: which of them the model's mask lets count})``, compiled."""

    def run(data: SiloData) -> tuple[dict[str, Array], dict[str, Array]]:
        trace = _trace(split, jnp.zeros(split.dim), split.zeros_local(data.mask), split.theta, data)
        values, counts = {}, {}
        for name, site in trace.items():
            shape = np.broadcast_shapes(jnp.shape(site["value"]), site["fn"].shape())
            mask = user_mask(site["fn"])
            values[name] = jnp.broadcast_to(site["value"], shape)
            counts[name] = _within(
                jnp.ones((), bool) if mask is None else mask, shape[: len(shape) - site["fn"].event_dim]
            )
        return values, counts

    return jax.jit(run, compiler_options=ONCE)


def _within(mask: Array, batch: tuple[int, ...]) -> Array:
    """A mask in the shape of the log density; one inside to_event counts where any of the event does."""
    extra = jnp.ndim(mask) - len(batch)
    return jnp.any(mask, axis=tuple(range(-extra, 0))) if extra > 0 else jnp.broadcast_to(mask, batch)


def _log_likelihoods(fit: "Fit", keys: Array, silo: str) -> dict[str, Array]:
    mask, data = fit._data(silo)
    state, _ = fit.state.silo(silo)
    found = fit._log_likelihoods(keys, identity(silo), fit.state.server, state, mask, data)
    return _cut(fit, found, silo, data)


def log_likelihoods(fit: "Fit") -> Any:
    """``(keys, identity, server, silo, mask, data) -> {observed site: log densities}``, compiled.

    Where discrete latents are summed out, a row has one log density for all sites that depend on them, under the name
    of the first; if a continuous latent depends on them too, or if they have other rows than the observations, these
    sites have none.
    """
    split = fit.split
    joined = split.enumeration.joined

    def one(key: Array, identity: Any, server: Any, state: Any, mask: dict, data: SiloData) -> dict[str, Array]:
        z, z_local = fit.latents(key, identity, server, state, mask, data)
        theta = fit.method.theta(server)
        trace = _trace(split, z, z_local, theta, data)
        found = {name: site["fn"].log_prob(site["value"]) for name, site in trace.items() if name not in joined}
        if joined:
            terms = split.evaluate(z, z_local, theta, data).terms
            found |= {name: terms[name] for name in _summed_out(split)}
        return found

    return jax.jit(jax.vmap(one, in_axes=(0, None, None, None, None, None)), compiler_options=ONCE)


def _summed_out(split: SplitModel) -> list[str]:
    """Components' terms that are likelihoods of rows: no site of theirs is a continuous latent."""
    role = {site.name: site.role for site in split.partition.sites}
    plain = [
        one
        for one in split.enumeration.components
        if all(role[f.site] in ("observed", "enumerated") for f in one.factors)
    ]
    return [one.name for one in plain if role[one.name] == "observed"]


def _trace(split: SplitModel, z: Array, z_local: dict, theta: dict, data: SiloData) -> dict[str, dict]:
    """The silo's observed sites as the model meets them."""
    model = split._substituted(split.unravel(z) | split.unpack(z_local, data.mask), theta)
    trace = handlers.trace(model).get_trace(**split.spec.kwargs(data))
    return {s.name: trace[s.name] for s in split.partition.sites if s.role == "observed" and not s.at_server}


def _cut(fit: "Fit", values: dict[str, Array], silo: str, data: SiloData) -> dict[str, Array]:
    """Log densities (or masks of them) without padded rows."""
    lengths = {axis.name: axis.lengths[silo] for axis in fit.split.partition.axes}
    out = {}
    for name, value in values.items():
        for axis, dim in fit.split.partition[name].axes:
            keep = value.shape[dim] * lengths[axis] // data.mask[axis].shape[-1]
            value = jax.lax.slice_in_dim(value, 0, keep, axis=value.ndim + dim)
        out[name] = value
    return out
