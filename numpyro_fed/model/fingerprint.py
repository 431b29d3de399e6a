"""Is it the same prior? A model's log prior at a few fixed points, to be kept in a file and compared.

Two programs of the same model agree up to rounding, so numbers are kept, not a hash of them. Log densities tell most
priors apart, but hardly N(0, 1000) from N(1, 1000): their gradients do.
"""

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import compiled_once

Array = jax.Array
POINTS = 3
MOST = 1000  # globals of which gradients are kept
CLOSE = 1e-3  # far above rounding, also of another machine's float32
Fingerprint = dict[str, dict[str, np.ndarray]]


def fingerprint(split: SplitModel) -> Fingerprint:
    """``values``: the log density of each of the server's sites at each point; ``gradient``: of their sum, by site."""
    draws, dtype = np.random.default_rng(0), jnp.zeros(()).dtype
    noise = lambda *shape: jnp.asarray(draws.normal(scale=0.5, size=shape), dtype)
    z = noise(POINTS, split.dim)
    theta = jax.tree.map(lambda start: noise(*jnp.shape(start)), split.theta)  # wherever the model starts it
    data = split.spec.dummy()._replace(shared=split.shared)
    server = [site.name for site in split.partition.sites if site.at_server]

    def densities(z: Array) -> tuple[Array, dict[str, Array]]:
        found, _ = split._log_probs(split.unravel(z), theta, data)
        by_site = {name: jnp.sum(found[name]) for name in server if name in found}
        return sum(by_site.values(), jnp.zeros(())), by_site

    if split.dim > MOST:
        return {"values": _on_host(compiled_once(jax.vmap(lambda z: densities(z)[1]), z)), "gradient": {}}
    gradient, values = compiled_once(jax.vmap(jax.grad(densities, has_aux=True)), z)
    return {"values": _on_host(values), "gradient": _on_host(jax.vmap(split.unravel)(gradient))}


def _on_host(tree: dict[str, Array]) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in tree.items()}


def differing(before: Fingerprint, now: Fingerprint) -> str | None:
    """A site whose prior is another, or None.

    Where terms cancel, a gradient is nothing but rounding: it must differ at two points.
    """
    for name, value in before["values"].items():
        other = now["values"].get(name)
        if other is None or not np.allclose(value, other, rtol=CLOSE, atol=CLOSE, equal_nan=True):
            return name
    for name, slope in before["gradient"].items():
        other = now["gradient"].get(name)
        if other is None or other.shape != slope.shape:
            return name
        if np.any(np.sum(~np.isclose(slope, other, rtol=CLOSE, atol=0.0, equal_nan=True), axis=0) > 1):
            return name
    return next((name for name in now["values"] if name not in before["values"]), None)
