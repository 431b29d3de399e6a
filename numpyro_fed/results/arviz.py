"""A fit as ArviZ sees it: named dimensions, all silos side by side.

The groups are plain xarray datasets, so the two majors of ArviZ differ in their container alone.
"""

from typing import Any

import jax

from numpyro_fed.data.silos import at_silo
from numpyro_fed.keys import identity
from numpyro_fed.results import predict
from numpyro_fed.results.dims import Dims
from numpyro_fed.results.draws import data_of, global_draws, silo_draws, unpadded
from numpyro_fed.results.value import Fitted

Array = jax.Array


def to_arviz(
    fit: Fitted, key: Array, num_samples: int, local: bool, log_likelihood: bool, posterior_predictive: bool
) -> Any:
    """See :meth:`numpyro_fed.results.fit.Fit.to_arviz`."""
    for wanted, what in ((log_likelihood, "log likelihoods"), (posterior_predictive, "replicates")):
        if wanted:
            fit.need_silos(what)
    names, sites = fit.state.names, fit.split.partition.sites
    dims = Dims(fit.split, fit.programs.event_dims)
    keys = jax.random.split(key, num_samples)
    observed = [site for site in sites if site.role == "observed" and not site.at_server]

    posterior = {name: dims.of_server(name, value) for name, value in global_draws(fit, keys).items()}
    if local and any(site.role in ("local", "enumerated", "deterministic") and not site.at_server for site in sites):
        by_silo = {silo: silo_draws(fit, keys, silo) for silo in names}
        shown = [name for name in by_silo[names[0]] if name not in posterior]
        posterior |= {name: dims.joined(name, {silo: by_silo[silo][name] for silo in names}) for name in shown}
    groups = {"posterior": posterior}
    if posterior_predictive:
        draws = {silo: predict.predict(fit, keys, None, silo) for silo in names}
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


def _observations(fit: Fitted, silo: str) -> dict[str, tuple[Array, Array]]:
    """``{observed site: (its values, which of them count)}``, unpadded."""
    with at_silo(silo):
        data, own = data_of(fit, silo)
        data = data if own is None else own
        values, counts = fit.programs.observations(data)
        values, counts = unpadded(fit, values, silo, data), unpadded(fit, counts, silo, data, densities=True)
    return {name: (values[name], counts[name]) for name in values}


def _log_likelihoods(fit: Fitted, keys: Array, silo: str) -> dict[str, Array]:
    state, _ = fit.state.silo(silo)
    server = fit.state.server
    z = fit.programs.z(keys, server)
    with at_silo(silo):
        padded, own = data_of(fit, silo)
        found = fit.programs.log_likelihoods(keys, z, identity(silo), server, state, padded, own)
        return unpadded(fit, found, silo, padded if own is None else own, densities=True)
