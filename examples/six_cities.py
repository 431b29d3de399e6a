"""Wheezing children in two silos: a logistic mixed model, fitted without pooling the data.

The six-cities study followed 537 children of the ages 7 to 10 (Fitzmaurice and Laird 1993). Whether child i wheezed in
year t depends on the mother's smoking, the child's age and the child's own disposition b_i, a random intercept. The
children lie in two silos that may not show each other their rows. What is shared are the coefficients beta and omega,
the log precision (halved) of the random intercepts; each b_i stays in its silo.

The example prints where every site lives, fits the model with EP (a few rounds) and with SFVI (thousands), runs NUTS on
the pooled data for comparison (which a user with real silos could not), and draws the marginals of all three over one
another.

Run it with ``make demo``, or ``python examples/six_cities.py --help``.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

import numpyro_fed as nf


def model(smoke, age, wheeze=None):
    beta = numpyro.sample("beta", dist.Normal(0, 10).expand([4]).to_event(1))
    omega = numpyro.sample("omega", dist.Normal(0, 10))
    with numpyro.plate("children", smoke.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, jnp.exp(-omega)))
        smoke = smoke[:, None]
        logits = beta[0] + beta[1] * smoke + beta[2] * age + beta[3] * smoke * age + b[:, None]
        numpyro.sample("wheeze", dist.Bernoulli(logits=logits).to_event(1), obs=wheeze)


def six_cities_silos():
    data = nf.datasets.six_cities()
    return nf.split(data.silo, shared=dict(age=data.age), smoke=data.smoke, wheeze=data.wheeze)


def main(args):
    silos = six_cities_silos()
    print(silos, end="\n\n")
    print(nf.partition(model, silos), end="\n\n")

    ep = nf.EP(model).run(jax.random.key(args.seed), silos)
    print(ep, end="\n\n")
    print(ep.summary().round(3), end="\n\n")
    print("Do the silos agree?")
    print(ep.conflict(), end="\n\n")

    method = nf.SFVI(model, importance_samples=args.importance_samples)
    sfvi = method.run(jax.random.key(args.seed), silos, args.num_rounds)
    print(sfvi, end="\n\n")

    print("NUTS on the pooled data, for comparison:")
    reference = nf.nuts(
        model,
        silos,
        rng_key=jax.random.key(args.seed + 1),
        num_warmup=args.num_warmup,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
    )
    comparison = nf.compare({"EP": ep, "SFVI": sfvi}, reference=reference)
    print(comparison, end="\n\n")

    path = Path(args.out) / "six_cities.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    comparison.plot()[0].figure.savefig(path, dpi=150)
    print(f"figure: {path}")
    return comparison


def parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-rounds", type=int, default=3000, help="of SFVI; EP stops by itself")
    parser.add_argument("--importance-samples", type=int, default=30, help="of SFVI, for each child's intercept")
    parser.add_argument("--num-warmup", type=int, default=500)
    parser.add_argument("--num-samples", type=int, default=2000)
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--out", default="out", help="folder for the figure")
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
