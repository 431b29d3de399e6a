"""The figure of the front page: silos alone, all of them by EP, and NUTS on the pooled rows.

Run it with ``python -m docs.figures.front``; it takes about a minute on two cores.
"""

from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import gaussian_kde

import numpyro_fed as nf
from examples.six_cities import model, six_cities_silos

NAMES = {
    "beta[0]": "intercept",
    "beta[3]": "smoking x age",
    "omega": "children (omega)",
}
STYLES = {
    "silo A alone": dict(color="#d98b3a", lw=1.4),
    "silo B alone": dict(color="#5b9e6b", lw=1.4),
    "EP over both": dict(color="#2a5db0", lw=2.4),
    "NUTS, pooled": dict(color="black", lw=1.2, ls="--"),
}


def columns(draws):
    """(sample, global) under the names of NAMES."""
    flat = {f"beta[{i}]": np.asarray(draws["beta"])[:, i] for i in range(4)} | {"omega": np.asarray(draws["omega"])}
    return {name: flat[name] for name in NAMES}


def fits():
    silos = six_cities_silos()
    run = lambda data: nf.EP(model).run(jax.random.key(0), data, progress_bar=False)
    found = {f"silo {name} alone": run(silos.only(name)) for name in silos.names} | {"EP over both": run(silos)}
    reference = nf.nuts(model, silos, rng_key=jax.random.key(2), num_warmup=500, num_samples=4000, num_chains=4)
    draws = {name: columns(fit.sample(jax.random.key(1), 16_000)) for name, fit in found.items()}
    return draws | {"NUTS, pooled": columns(reference.get_samples())}


def draw(found, path):
    figure, panels = plt.subplots(1, len(NAMES), figsize=(7.5, 2.7), layout="constrained")
    for panel, (name, label) in zip(panels, NAMES.items(), strict=True):
        values = np.concatenate([draws[name] for draws in found.values()])
        grid = np.linspace(*np.quantile(values, [0.001, 0.999]), 300)
        for method, style in STYLES.items():
            panel.plot(grid, gaussian_kde(found[method][name])(grid), label=method, **style)
        panel.set(title=label, yticks=[], ylim=(0, None))
        panel.title.set_fontsize(10.5)
        panel.tick_params(labelsize=9)
        panel.locator_params(axis="x", nbins=5)
        panel.spines[["top", "right", "left"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9.5)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    draw(fits(), Path(__file__).with_name("front.png"))
