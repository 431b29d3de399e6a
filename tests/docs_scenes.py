"""What the names on pages stand for that do not say it themselves: "model", "silos", "x", "fit" of a reader's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf

Names = dict[str, Any]


def libraries() -> Names:
    return dict(jax=jax, jnp=jnp, np=np, numpyro=numpyro, dist=dist, nf=nf, key=jax.random.key(0))


def logistic(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=beta * x), obs=y)


def mixed(x, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 2))
    with numpyro.plate("rows", x.shape[0]):
        a = numpyro.sample("a", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(beta * x + a, 1), obs=y)


def other(x, y=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(mean, 2), obs=y)


def cities(binary: bool = True) -> tuple[Names, nf.Silos]:
    rng = np.random.default_rng(0)
    x1, x2 = rng.normal(size=12).astype("f"), rng.normal(size=16).astype("f")
    y1, y2 = ((x + rng.logistic(size=x.size)).astype("f") for x in (x1, x2))
    if binary:
        y1, y2 = ((y > 0).astype("i") for y in (y1, y2))
    names = dict(x1=x1, y1=y1, x2=x2, y2=y2, new_x=x1[:3], x_test=x1, y_test=y1)
    return names, nf.Silos({"leeds": dict(x=x1, y=y1), "york": dict(x=x2, y=y2)})


def york() -> Names:
    """A logistic regression in Leeds and York, and a fit of it."""
    names, silos = cities()
    fit = nf.SFVI(logistic).run(jax.random.key(0), silos)
    return libraries() | names | dict(model=logistic, silos=silos, fit=fit, beta=0.1, settings={})


def units() -> Names:
    """The same places, every row with a latent of its own; a fit by SFVI, one of another model, and NUTS."""
    names, silos = cities(binary=False)
    fits = dict(fit=nf.SFVI(mixed).run(jax.random.key(0), silos), other=nf.EP(other).run(jax.random.key(0), silos))
    return libraries() | names | fits | dict(model=mixed, silos=silos, reference=nf.nuts(mixed, silos))


def rows() -> Names:
    """Columns of pooled rows, and a folder of silos."""
    rng = np.random.default_rng(0)
    names, silos = cities()
    county_idx = np.repeat(np.arange(85), 2)
    x = rng.normal(size=170).astype("f")
    Path("stackoverflow/train").mkdir(parents=True)
    for i in range(60):
        np.savez(f"stackoverflow/train/user{i}.npz", x=x[:4], y=(x[:4] > 0).astype("i"))
    columns = dict(hospital=county_idx % 12, state=county_idx // 30, county_idx=county_idx, x=x, y=(x > 0).astype("i"))
    return libraries() | names | columns | dict(knots=x[:3], uranium=x[:85], model=logistic, silos=silos)


def classes() -> Names:
    rng = np.random.default_rng(0)
    data = lambda n: dict(y=(rng.normal(size=n) + 3 * rng.integers(0, 2, n)).astype("f"))
    return libraries() | dict(silos=nf.Silos({"leeds": data(10), "york": data(12)}))


def children() -> Names:
    """Six cities, as on the front page."""
    from examples.six_cities import model, six_cities_silos

    data = nf.datasets.six_cities()
    return libraries() | dict(model=model, silos=six_cities_silos(), smoke=data.smoke[:3], wheeze=data.wheeze[:3])


# The scene of each page, or of each section of a page; what a section leaves behind, the next ones in its scene have.
SCENES: dict[str, Callable[[], Names] | dict[str, Callable[[], Names]]] = {
    "docs/calibration.md": york,
    "docs/design.md": libraries,
    "docs/experiments.md": york,
    "docs/faults.md": york,
    "docs/speed.md": york,
    "docs/guide.md": {
        "Data that stay apart": rows,
        "Very many silos": rows,
        "Preparation without pooling": dict,
        "Fitting": york,
        "A run on disk": york,
        "Where it starts, and when it stops": york,
        "The second time": york,
        "SFVI-Avg": york,
        "Do the silos agree?": york,
        "When it is biased": york,
        "A few rounds instead of thousands": children,
        "How a silo integrates": york,
        "Schedules and steps": children,
        "When it stops": children,
        "The correction round": children,
        "Who moved the posterior, and who disagrees": children,
        "Very many parameters": york,
        "Bayesian networks by inducing points": libraries,
        "A network that predicts the head": libraries,
        "Each silo alone": units,
        "Minibatches": children,
        "Guides": children,
        "Discrete local latents": classes,
        "Results": units,
        "The verdict": units,
        "Is it right?": units,
        "Predicted classes": york,
        "Does the model fit?": units,
    },
}
