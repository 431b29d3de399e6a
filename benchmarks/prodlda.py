r"""Topics of 20 Newsgroups in three silos: section 4.2 of the SFVI paper, with its Figure 4.

ProdLDA (Srivastava and Sutton 2017): document i has the words :math:`c_i`, counted over a vocabulary, and

.. math::

    T_k \sim N(0, \beta^{-1} I), \quad w_i \sim N(\alpha 1, I), \quad
    c_i \sim \mathrm{Multinomial}(\mathrm{softmax}(T^\top \mathrm{softmax}(w_i)))

The paper writes :math:`T_k \sim \mathrm{Dirichlet}(\beta 1)`. Taken literally, logits between 0 and 1 cannot tell words
apart; topics are therefore read as natural parameters, and the prior is the normal (Laplace) approximation of that
Dirichlet in them. :math:`\theta = (\alpha, \beta)` is learned. The multinomial's coefficient, a constant, is not in
the bound, so the bound per token is a log probability per word.

Each document's topic weights :math:`w_i` have their own normal, or one read off the document by an encoder that all
silos train together (amortised). Compared are SFVI, SFVI-Avg and silos on their own, by

- the evidence bound per token, also against rounds of communication;
- UMass coherence (Mimno et al. 2011) of each topic's ten first words, in all documents;
- the share of distinct words among the topics' first ten. Topics of common words are coherent and all alike: UMass
  *falls* as topics become distinct, so the three belong together.

Run it with ``python -m benchmarks.prodlda``, or with ``--quick``.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import init_to_sample

import numpyro_fed as nf
from benchmarks import common

SOURCE = (
    "news20_bow2000.npz holds a bag of words of 20 Newsgroups (http://qwone.com/~jason/20Newsgroups) in CSR form: the "
    "arrays data, indices, indptr and shape of (documents, words), and vocab, the words. Stop words are removed, words "
    "are lemmatised, and the 2,000 commonest are kept."
)
NUM_TOP = 10


def topic_model(num_topics):
    """ProdLDA with a number of topics."""

    def model(counts):
        alpha = numpyro.param("alpha", 0.0)
        beta = numpyro.param("beta", 1.0, constraint=dist.constraints.positive)
        prior = dist.Normal(0, beta**-0.5).expand([num_topics, counts.shape[1]]).to_event(2)
        topics = numpyro.sample("topics", prior)
        with numpyro.plate("documents", counts.shape[0]):
            weights = numpyro.sample("weights", dist.Normal(alpha, 1).expand([num_topics]).to_event(1))
            logits = jax.nn.softmax(weights) @ topics
            # sum_v counts_v log softmax(logits)_v, in the order that is fastest
            normaliser = jnp.sum(counts, axis=-1) * jax.nn.logsumexp(logits, axis=-1)
            numpyro.factor("words", jnp.vecdot(counts, logits) - normaliser)

    return model


def encoder(num_words, num_topics, num_hidden, seed=0):
    """Reads means and log-scales of a document's topic weights off its counts."""
    from flax import nnx

    rngs = nnx.Rngs(seed)
    return nnx.Sequential(
        jnp.log1p,  # a word that comes ten times does not count ten times as much
        nnx.Linear(num_words, num_hidden, rngs=rngs),
        nnx.softplus,
        nnx.Linear(num_hidden, 2 * num_topics, rngs=rngs),
    )


# --- data -------------------------------------------------------------------------------------------------------------


class Corpus(NamedTuple):
    counts: np.ndarray  # (documents, words) float32
    vocabulary: np.ndarray  # (words,) str


def load():
    """All documents that have a word in the vocabulary."""
    with np.load(common.find("news20_bow2000.npz", SOURCE)) as file:
        counts = np.zeros(file["shape"], np.float32)
        rows = np.repeat(np.arange(len(counts)), np.diff(file["indptr"]))
        counts[rows, file["indices"]] = file["data"]
        return Corpus(counts[np.any(counts > 0, axis=1)], file["vocab"])


def cut(corpus, num_documents, num_words):
    """A smaller corpus: its first documents and their commonest words."""
    counts = corpus.counts[:num_documents]
    words = np.sort(np.argsort(-np.sum(counts, axis=0), kind="stable")[:num_words])
    counts = counts[:, words]
    return Corpus(counts[np.any(counts > 0, axis=1)], corpus.vocabulary[words])


def make_silos(corpus, num_silos, seed):
    """Documents dealt out at random, equally many to each silo (or one more)."""
    order = np.random.default_rng(seed).permutation(len(corpus.counts))
    return nf.Silos({f"silo {j}": dict(counts=corpus.counts[order[j::num_silos]]) for j in range(num_silos)})


# --- topics -----------------------------------------------------------------------------------------------------------


def top_words(topics, number=NUM_TOP):
    """The words of each topic (topics, words) in the order of their probability, the first few."""
    return np.argsort(-np.asarray(topics), axis=1, kind="stable")[:, :number]


def umass(top, counts):
    r"""UMass coherence of each topic, averaged over pairs of its words.

    .. math:: \binom{M}{2}^{-1} \sum_{m=2}^M \sum_{l=1}^{m-1} \log \frac{D(v_m, v_l) + 1}{D(v_l)}

    where :math:`v_1, v_2, \dots` are the topic's words, the likeliest first, and D counts documents that have all of
    the words (Mimno et al. 2011, who give the sum).
    """
    scores = []
    for words in np.asarray(top):
        present = (counts[:, words] > 0).astype(np.float64)
        together = present.T @ present
        pairs = [np.log((together[m, l] + 1) / together[l, l]) for m in range(1, len(words)) for l in range(m)]
        scores.append(np.mean(pairs))
    return np.array(scores)


def distinct(top):
    """The share of distinct words among the topics' first ones."""
    return len(np.unique(top)) / np.size(top)


# --- runs -------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    elbo: float  # per token
    umass: float
    distinct: float
    rounds: int
    megabytes_up: float
    seconds: float
    milliseconds: float  # a step of all silos
    stages: list  # [(rounds, elbo per token)]
    topics: np.ndarray  # (topics, NUM_TOP): words' places in the vocabulary


def mean_topics(fit, num_samples=100):
    return np.mean(fit.sample(jax.random.key(1), num_samples)["topics"], axis=0)


def tokens(silos):
    return sum(float(np.sum(silos[name]["counts"])) for name in silos.names)


def per_token(fit, silos, num_samples):
    return float(fit.elbo(jax.random.key(2), num_samples=num_samples)) / tokens(silos)


def federated(method, rounds, silos, corpus, seed, args):
    """A row of SFVI or SFVI-Avg, with its course."""
    every = max(rounds // args.num_stages, 1)
    evaluate = lambda fit: per_token(fit, silos, args.num_samples)
    fit, stages = common.staged(method, jax.random.key(seed), silos, rounds - rounds % every, every, evaluate)
    top, last = top_words(mean_topics(fit)), stages[-1]
    milliseconds = last.seconds / (last.rounds * getattr(method, "local_steps", 1)) * 1e3
    course = [(stage.rounds, stage.elbo) for stage in stages]
    scores = (float(np.mean(umass(top, corpus.counts))), distinct(top))
    return Row(last.elbo, *scores, last.rounds, last.megabytes_up, last.seconds, milliseconds, course, top)


def alone(method, steps, silos, corpus, seed, args):
    """The row of silos on their own: bounds added up, topics' scores averaged."""
    began = time.perf_counter()
    fits = method.run(jax.random.key(seed), silos, steps, progress_bar=False)
    seconds = time.perf_counter() - began
    own = {name: nf.Silos({name: silos[name]}) for name in silos.names}
    bounds = [per_token(fits[name], own[name], args.num_samples) * tokens(own[name]) for name in silos.names]
    tops = [top_words(mean_topics(fits[name])) for name in silos.names]
    scores = (float(np.mean([umass(top, corpus.counts) for top in tops])), float(np.mean([distinct(t) for t in tops])))
    return Row(sum(bounds) / tokens(silos), *scores, 0, 0.0, seconds, seconds / steps * 1e3, [], tops[0])


def guides(corpus, args):
    """{name: (guide, SFVI's steps)}: of each document, or amortised."""
    network = encoder(corpus.counts.shape[1], args.num_topics, args.num_hidden)
    own = nf.guides.StructuredNormal(global_cov="diagonal", local_cov="diagonal", coupling=False)
    return {
        "per document": (own, args.steps),
        "amortised": (nf.guides.Amortized(network, inputs=("counts",), global_cov="diagonal"), args.amortised_steps),
    }


def report(corpus, rows, args):
    columns = ["q of a document", "method", "ELBO a token", "UMass", "distinct words", "rounds", "MB up", "seconds"]
    lines = [
        [
            guide,
            method,
            common.over_seeds([row.elbo for row in seeds], 3),
            common.over_seeds([row.umass for row in seeds], 2),
            common.over_seeds([row.distinct for row in seeds], 2),
            f"{seeds[0].rounds:,}",
            f"{np.mean([row.megabytes_up for row in seeds]):.0f}",
            f"{np.mean([row.seconds for row in seeds]):.0f}",
            f"{np.mean([row.milliseconds for row in seeds]):.1f}",
        ]
        for (guide, method), seeds in rows.items()
    ]
    common.write(args.out, "prodlda_table.md", common.table([*columns, "ms a step"], lines))
    words = lambda row: [f"- {' '.join(corpus.vocabulary[line])}" for line in row.topics]
    blocks = [f"{guide}, {method}\n" + "\n".join(words(seeds[0])) for (guide, method), seeds in rows.items()]
    common.write(args.out, "prodlda_topics.md", "\n\n".join(blocks))


def figure_4(rows, args):
    """The bound against rounds; SFVI's rounds are divided by SFVI-Avg's local steps, as in the paper."""
    names = list(dict.fromkeys(guide for guide, _ in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(5 * len(names), 3.5), squeeze=False, sharey=True)
    for axis, name in zip(axes[0], names, strict=True):
        for (guide, method), seeds in rows.items():
            if guide != name:
                continue
            if not seeds[0].stages:
                axis.axhline(seeds[0].elbo, color="grey", linestyle=":", label=method)
                continue
            unit = args.local_steps if method == "SFVI" else 1
            label = f"{method} (rounds / {unit:,})" if unit > 1 else method
            course = np.array(seeds[0].stages)
            axis.plot(course[:, 0] / unit, course[:, 1], marker=".", label=label)
        axis.set(title=f"q: {name}", xlabel="rounds of communication", ylabel="evidence bound a token")
        axis.legend()
    path = Path(args.out) / "prodlda_elbo.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    print(f"figure: {path}")


def main(args):
    corpus = load()
    if args.num_documents:
        corpus = cut(corpus, args.num_documents, args.num_words)
    print(f"{len(corpus.counts):,} documents, {len(corpus.vocabulary):,} words, {np.sum(corpus.counts):,.0f} tokens")
    model, optim, rows = topic_model(args.num_topics), optax.adam(args.step), {}
    for guide_name, (guide, steps) in guides(corpus, args).items():
        if guide_name.split()[0] not in args.guides:
            continue
        own = optax.adam(args.silo_step if guide_name == "per document" else args.encoder_step)
        settings = dict(guide=guide, optim=optim, silo_optim=own, batch_size=args.batch_size, importance_samples=1)
        settings["init_loc_fn"] = init_to_sample  # topics that start alike stay alike for long
        averaging = f"SFVI-Avg({args.local_steps:,})"
        num_rounds = args.rounds if guide_name == "per document" else args.amortised_rounds
        steps_alone = num_rounds * args.local_steps
        runs = {
            "SFVI": (federated, nf.SFVI(model, **settings), steps),
            averaging: (federated, nf.SFVIAvg(model, local_steps=args.local_steps, **settings), num_rounds),
            "Independent": (alone, nf.Independent(model, **settings), steps_alone),
        }
        for seed in range(args.seeds):
            silos = make_silos(corpus, args.num_silos, seed)
            for name, (run, method, rounds) in runs.items():
                if name.split("(")[0] in args.methods:
                    row = run(method, rounds, silos, corpus, seed, args)
                    rows.setdefault((guide_name, name), []).append(row)
                    print(f"{guide_name}, {name}, seed {seed}: {row[:7]}", flush=True)
    report(corpus, rows, args)
    figure_4(rows, args)
    return rows


def parse(given=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--guides", nargs="+", choices=["per", "amortised"], default=["per", "amortised"])
    names = ["SFVI", "SFVI-Avg", "Independent"]
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    parser.add_argument("--num-silos", type=int, default=3)
    parser.add_argument("--num-topics", type=int, default=21)
    parser.add_argument("--num-hidden", type=int, default=100, help="hidden units of the encoder")
    parser.add_argument("--num-documents", type=int, default=0, help="only so many documents; 0: all")
    parser.add_argument("--num-words", type=int, default=2000, help="with --num-documents: the commonest words")
    parser.add_argument("--steps", type=int, default=10_000, help="SFVI's rounds with a normal for each document")
    parser.add_argument("--amortised-steps", type=int, default=6000, help="SFVI's rounds with an encoder")
    parser.add_argument("--rounds", type=int, default=10, help="SFVI-Avg's rounds with a normal for each document")
    parser.add_argument("--amortised-rounds", type=int, default=6, help="... and with an encoder")
    parser.add_argument("--local-steps", type=int, default=1000, help="SFVI-Avg's steps between two rounds")
    parser.add_argument("--batch-size", type=int, default=128, help="documents of a silo in a step")
    parser.add_argument("--step", type=float, default=2e-2, help="Adam's step size")
    parser.add_argument("--silo-step", type=float, default=5e-2, help="... for the documents' own parameters")
    parser.add_argument("--encoder-step", type=float, default=2e-3, help="... for the encoder's weights")
    parser.add_argument("--num-stages", type=int, default=10, help="points of a curve")
    parser.add_argument("--num-samples", type=int, default=4, help="draws for the bound of all documents")
    parser.add_argument("--out", default="out", help="folder for tables and figures")
    args = parser.parse_args(given)
    if args.quick:
        args.num_documents, args.num_words, args.num_topics, args.num_hidden, args.seeds = 300, 200, 5, 10, 1
        args.steps, args.amortised_steps, args.rounds, args.amortised_rounds, args.local_steps = 40, 40, 2, 2, 20
        args.batch_size, args.num_stages, args.num_samples = 20, 1, 2
    return args


if __name__ == "__main__":
    main(parse())
