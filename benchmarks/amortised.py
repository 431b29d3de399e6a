"""A step of ProdLDA with an encoder, against the same step written by hand in plain JAX.

Three silos of documents, a minibatch of each in a step (:mod:`benchmarks.prodlda` has the model). By hand there are no
silos: the documents of all minibatches are one array, and one function is the bound.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpyro.infer import init_to_sample

import numpyro_fed as nf
from benchmarks import prodlda, speed

NUM_SILOS, BATCH, STEP = 3, 128, 1e-2


def corpus(num_documents, num_words, seed=0):
    """Documents of about forty words."""
    rng = np.random.default_rng(seed)
    rates = rng.dirichlet(np.full(num_words, 0.1), size=20)
    return rng.poisson(40 * rates[rng.integers(20, size=num_documents)]).astype(np.float32)


def federated(counts, num_topics, num_hidden, steps):
    """SFVI, so many rounds in one compiled loop. Returns (run, seconds to compile)."""
    network = prodlda.encoder(counts.shape[1], num_topics, num_hidden)
    guide = nf.guides.Amortized(network, inputs=("counts",), global_cov="diagonal")
    method = nf.SFVI(
        prodlda.topic_model(num_topics),
        guide=guide,
        optim=optax.adam(STEP),
        batch_size=BATCH,
        importance_samples=1,
        init_loc_fn=init_to_sample,
    )
    silos = nf.split(np.arange(len(counts)) % NUM_SILOS, counts=counts)
    _, stack, phase = speed.prepared(method, silos)
    engine, key = nf.engines.Vmap(), jax.random.key(0)
    server, states = engine.start(phase.algorithm, key, stack)
    run = lambda count: engine.rounds(phase.algorithm, key, stack, server, states, 0, None, count)
    seconds = speed.timed(lambda: run(1))
    return lambda: run(steps), seconds


def plain(counts, num_topics, num_hidden, steps):
    """The same bound and optimiser by hand. Returns (run, seconds to compile)."""
    rng, num_words = np.random.default_rng(0), counts.shape[1]
    layer = lambda n, m: (jnp.asarray(rng.normal(size=(n, m)) / np.sqrt(n), jnp.float32), jnp.zeros(m))
    params = dict(
        loc=jnp.asarray(rng.normal(size=(num_topics, num_words)), jnp.float32),
        log_scale=jnp.full((num_topics, num_words), -1.0),
        encoder=(layer(num_words, num_hidden), layer(num_hidden, 2 * num_topics)),
        alpha=jnp.zeros(()),
        log_beta=jnp.zeros(()),
    )
    optim = optax.adam(STEP)

    def loss(params, key, documents, scale):
        topics_key, weights_key = jax.random.split(key)
        topics = params["loc"] + jnp.exp(params["log_scale"]) * jax.random.normal(topics_key, params["loc"].shape)
        beta = jnp.exp(params["log_beta"])
        prior = -0.5 * beta * jnp.sum(topics**2) + 0.5 * topics.size * params["log_beta"]
        (w1, b1), (w2, b2) = params["encoder"]
        out = jax.nn.softplus(jnp.log1p(documents) @ w1 + b1) @ w2 + b2
        mean, log_sd = out[:, :num_topics], 5 * jnp.tanh(out[:, num_topics:] / 5)
        eps = jax.random.normal(weights_key, mean.shape)
        weights = mean + jnp.exp(log_sd) * eps
        logits = jax.nn.softmax(weights) @ topics
        words = jnp.vecdot(documents, logits) - jnp.sum(documents, axis=-1) * jax.nn.logsumexp(logits, axis=-1)
        local = words + jnp.sum(-0.5 * (weights - params["alpha"]) ** 2 + log_sd + 0.5 * eps**2, axis=1)
        return -(prior + jnp.sum(params["log_scale"]) + scale * jnp.sum(local))

    def step(data, i, carry):
        params, state, losses = carry
        rows_key, key = jax.random.split(jax.random.fold_in(jax.random.key(0), i))
        rows = jax.random.randint(rows_key, (NUM_SILOS * BATCH,), 0, len(data))
        value, gradient = jax.value_and_grad(loss)(params, key, data[rows], len(data) / len(rows))
        moves, state = optim.update(gradient, state, params)
        return optax.apply_updates(params, moves), state, losses.at[i].set(value)

    @partial(jax.jit, static_argnums=2)
    def loop(params, data, room, count):
        return jax.lax.fori_loop(0, count, partial(step, data), (params, optim.init(params), jnp.zeros(room)))

    data = jnp.asarray(counts)
    seconds = speed.timed(lambda: loop(params, data, speed.CHUNK, 1))
    return lambda: jax.block_until_ready(loop(params, data, speed.CHUNK, steps)), seconds
