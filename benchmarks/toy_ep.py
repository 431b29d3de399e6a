"""The toy of FedEP's Table 4: two silos, each with a normal likelihood of two numbers, a flat prior, 200 problems.

The family cannot hold the silos' correlations (diagonal, or one variance), so averaging misses the pooled mean, and EP
finds it by passing messages: its first round is FedPA with the diagonal family and FedAvg with sites of fixed variance
(the paper's scaled identity). Printed: the mean over problems of the distance to the pooled mean, by round.

Covariances are drawn as Sigma_k ~ InvWishart(7, Psi) / 0.2 and means as mu_k ~ N(0, Sigma_k) (Guo et al. 2023, section
3.1), with one random Psi whose eigenvalues lie between 1 and 2. The silos' projections are exact, so the algebra of
``numpyro_fed.normal.families`` and ``numpyro_fed.normal.sites`` is all that runs.

Run it with ``python -m benchmarks.toy_ep``.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import invwishart

from benchmarks.common import table
from numpyro_fed.normal.families import Family, Natural, inverse, product, quotient, summed

DIAGONAL, IDENTITY = Family("diagonal"), Family("identity")
FAMILIES = {"diagonal": DIAGONAL, "one variance": IDENTITY, "fixed variance": None}
SHOWN = (1, 2, 3, 5, 10, 20, 50)


def problems(num, seed=0, num_silos=2):
    """Means (num, K, 2) and precisions (num, K, 2, 2) of the silos' likelihoods."""
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.normal(size=(2, 2)))[0]
    psi = (turn * (1 + rng.uniform(size=2))) @ turn.T
    cov = invwishart(7, psi).rvs(size=num * num_silos, random_state=rng).reshape(num, num_silos, 2, 2) / 0.2
    mean = np.einsum("nkij,nkj->nki", np.linalg.cholesky(cov), rng.normal(size=(num, num_silos, 2)))
    return mean, np.linalg.inv(cov)


def ep(family, mean, precision, num_rounds):
    """Means of the posterior after every round, (rounds, 2): undamped, synchronous, all flat at the start.

    ``family`` None is FedEP's scaled identity: sites have a fixed precision, and only their means are found.
    """
    fixed, family = family is None, family or IDENTITY
    flat = family.flat(2)
    likelihood = Natural(precision, jnp.einsum("kij,kj->ki", precision, mean))

    def project(cavity, factor):
        dense = product(family.dense(cavity), factor)
        cov = inverse(dense.precision)
        if fixed:
            return Natural(cavity.precision + 1.0, (cavity.precision + 1.0) * (cov @ dense.shift))
        return family.project(cov @ dense.shift, cov)

    def one(each, _):
        q = summed(each)
        cavities = jax.vmap(lambda site: quotient(q, site))(each)
        tilted = jax.vmap(project)(cavities, likelihood)
        each = jax.vmap(quotient)(tilted, cavities)
        return each, family.mean(summed(each))

    start = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(mean), *leaf.shape)), flat)
    return jax.lax.scan(one, start, None, num_rounds)[1]


def distances(num=200, num_rounds=50, seed=0):
    """{method: mean distance by round}, float64."""
    with jax.enable_x64(True):
        mean, precision = map(jnp.asarray, problems(num, seed))
        exact = jax.vmap(lambda m, p: jnp.linalg.solve(p.sum(0), jnp.einsum("kij,kj->i", p, m)))(mean, precision)
        out = {}
        for name, family in FAMILIES.items():
            found = jax.jit(jax.vmap(lambda m, p, f=family: ep(f, m, p, num_rounds)))(mean, precision)
            far = jnp.linalg.norm(found - exact[:, None], axis=-1)
            out[name] = np.asarray(jnp.mean(far, axis=0))
        average = jnp.linalg.norm(mean.mean(axis=1) - exact, axis=-1)
        out["average of means"] = np.array([float(jnp.mean(average))])
        return out


def main(args):
    found = distances(args.num_problems, seed=args.seed)
    rows = []
    for name in FAMILIES:
        rows.append([f"EP, {name}", *(f"{found[name][r - 1]:.1e}" for r in SHOWN)])
    print(table(["distance after round", *map(str, SHOWN)], rows))
    print(f"\nFedAvg (means averaged): {found['average of means'][0]:.3f}, FedPA (diagonal, one round): ", end="")
    print(f"{found['diagonal'][0]:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--num-problems", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
