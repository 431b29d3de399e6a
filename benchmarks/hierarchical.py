"""EP on small and large hierarchies, before and after the correction round, against NUTS.

Eight schools (Rubin 1981; non-centred, tau ~ HalfCauchy(5), three silos of whole schools) has a posterior that no
normal fits; radon (919 houses in 85 counties, long format, five silos of whole counties, HalfNormal scales) has one
that nearly does. Printed: shift of every global's mean in NUTS's sds and ratio of sds, for EP and for EP followed by
``fit.correct``, with NUTS's own Monte Carlo error.

Run it with ``python -m benchmarks.hierarchical``.
"""

import argparse

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size

import numpyro_fed as nf
from benchmarks.common import table

EFFECT = np.array([28, 8, -3, 7, -1, 1, 18, 12], np.float32)
ERROR = np.array([15, 10, 16, 11, 9, 11, 10, 18], np.float32)


def schools(sigma, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", sigma.shape[0]):
        u = numpyro.sample("u", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + tau * u, sigma), obs=y)


def school_silos():
    return nf.split(np.array(["a", "a", "a", "b", "b", "b", "c", "c"]), sigma=ERROR, y=EFFECT)


def radon(floor, county, num_counties, log_radon=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    beta = numpyro.sample("beta", dist.Normal(0, 5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("counties", num_counties):
        a = numpyro.sample("a", dist.Normal(0, 1))
    alpha = numpyro.deterministic("alpha", mu + tau * a)
    with numpyro.plate("homes", floor.shape[0]):
        numpyro.sample("log_radon", dist.Normal(alpha[county] + beta * floor, sigma), obs=log_radon)


def radon_silos(seed=0):
    data = nf.datasets.radon()
    silo = np.random.default_rng(seed).integers(0, 5, 85)[data.county]
    columns = dict(floor=data.floor, log_radon=data.log_radon, county=data.county, num_counties=85)
    return nf.split(np.char.add("region ", silo.astype(str)), groups=dict(county="num_counties"), **columns)


def judged(name, model, silos, seeds, num_samples):
    reference = nf.nuts(
        model, silos, rng_key=jax.random.key(100), num_warmup=1000, num_samples=num_samples, progress_bar=False
    )
    draws = reference.get_samples(group_by_chain=True)
    error = {
        site: 1 / np.sqrt(float(np.min(effective_sample_size(np.asarray(value)))))
        for site, value in draws.items()
        if np.ndim(value) == 2
    }
    rows = []
    for seed in range(seeds):
        fit = nf.EP(model).run(jax.random.key(seed), silos, 15, progress_bar=False)
        fits = {"EP": fit}
        for points in (2048, 8192):
            fits[f"EP, corrected with {points}"] = fit.correct(jax.random.key(10 + seed), num_points=points)
        found = nf.compare(fits, reference=reference, num_samples=20_000).table
        for method, one in fits.items():
            mine = found[found["method"] == method].set_index("parameter")
            for parameter in mine.index:
                weights = getattr(one, "correction", None)
                note = "" if weights is None else f"{weights.ess:.0f}, {weights.pareto_k:.2f}"
                rows.append(
                    [name, seed, method, parameter, f"{mine.loc[parameter, 'mean_shift']:.3f}"]
                    + [f"{mine.loc[parameter, 'sd_ratio']:.3f}", f"{error.get(parameter, np.nan):.3f}"]
                    + [fit.num_rounds, note]
                )
                print(" | ".join(map(str, rows[-1])), flush=True)
    return rows


def main(args):
    rows = []
    if "schools" in args.only:
        rows += judged("eight schools", schools, school_silos(), args.seeds, args.num_samples)
    if "radon" in args.only:
        rows += judged("radon", radon, radon_silos(), args.seeds, args.num_samples)
    columns = ["model", "seed", "method", "parameter", "shift", "sd ratio", "NUTS's error", "rounds", "ESS, k-hat"]
    print("\n" + table(columns, rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", default=["schools", "radon"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--num-samples", type=int, default=10_000, help="of each of four chains of NUTS")
    main(parser.parse_args())
