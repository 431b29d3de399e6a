"""What users add without touching the library: a method, a guide, a solver, an engine. Public names alone.

The same code is in docs/extending.md.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest

import numpyro_fed as nf

KEY = jax.random.key(0)
pytestmark = pytest.mark.filterwarnings("ignore:the posterior still moves")


# [method]
from numpyro_fed.algorithm import Broadcast, FederatedAlgorithm, Phase, Program  # noqa: E402


class Params(NamedTuple):
    """Of independent normals, and their optimiser's state; of the globals at the server, of the locals in a silo."""

    loc: dict
    log_sd: dict
    optim: tuple

    def sample(self, key):
        noise = jax.tree.map(lambda leaf: jax.random.normal(key, leaf.shape), self.loc)
        return jax.tree.map(lambda m, s, e: m + jnp.exp(s) * e, self.loc, self.log_sd, noise)


@dataclass(frozen=True)
class MeanField(nf.Method):
    """Variational inference with independent normals."""

    rate: float = 0.05

    def compile(self, split, survey, plan):
        optim = optax.adam(self.rate)

        def fresh(like):
            start = (like, jax.tree.map(lambda leaf: jnp.full_like(leaf, -2.0), like))
            return Params(*start, optim.init(start))

        def moved(params, uphill):
            down, before = jax.tree.map(jnp.negative, uphill), (params.loc, params.log_sd)
            step, state = optim.update(down, params.optim)
            return Params(*optax.apply_updates(before, step), state)

        def silo_step(key, broadcast, silo, data):
            def bound(z, loc, log_sd):
                z_local = silo._replace(loc=loc, log_sd=log_sd).sample(key)
                active = split.evaluate(z, z_local, split.theta, data).active
                entropy = sum(jnp.sum(jnp.where(active[g], log_sd[g], 0.0)) for g in log_sd)
                return split.log_silo(z, z_local, split.theta, data) + entropy

            value, (z, *own) = jax.value_and_grad(bound, (0, 1, 2))(broadcast.common, silo.loc, silo.log_sd)
            return (value, z), moved(silo, tuple(own))

        def server_step(key, server, total):
            at = lambda loc, log_sd: server._replace(loc=loc, log_sd=log_sd).sample(key)
            z, pull = jax.vjp(at, server.loc, server.log_sd)
            prior, slope = jax.value_and_grad(split.log_prior)(z, split.theta)
            loc, log_sd = pull(slope + total[1])
            loss = -prior - total[0] - jnp.sum(server.log_sd)
            return moved(server, (loc, log_sd + 1.0)), {"loss": loss}

        rounds = FederatedAlgorithm(
            init=lambda key: fresh(0.1 * jax.random.normal(key, (split.dim,))),
            init_silo=lambda key, broadcast, data: fresh(split.near_zero_local(data.mask)),
            broadcast=lambda key, server: Broadcast(server.sample(key)),
            silo_step=silo_step,
            aggregate=lambda messages, cohort: jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), messages),
            server_step=server_step,
        )
        return Program((Phase("rounds", rounds, num_rounds=plan.num_rounds or 2000),), MeanFieldPosterior())


class MeanFieldPosterior:
    def sample(self, key, server):
        return server.sample(key)

    def sample_local(self, key, z, server, silo, data):
        return silo.sample(key)

    def theta(self, server):
        return {}

    def normal(self, server):
        return nf.Normal(server.loc, jnp.exp(server.log_sd))


# [end]


def random_intercepts(y):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    with numpyro.plate("children", y.shape[0]):
        alpha = numpyro.sample("alpha", dist.Normal(mu, 1))
        numpyro.deterministic("double", 2 * alpha)
        numpyro.sample("y", dist.Normal(alpha, 1), obs=y)


@pytest.fixture(scope="module")
def silos() -> nf.Silos:
    draws = np.random.default_rng(0)
    return nf.Silos({name: dict(y=draws.normal(2, 1.4, n).astype("f")) for name, n in (("leeds", 8), ("york", 5))})


@pytest.fixture(scope="module")
def fit(silos) -> nf.Fit:
    return MeanField(random_intercepts).run(KEY, silos, progress_bar=False)


def exact(silos) -> tuple[float, float]:
    """alpha integrates out: y ~ N(mu, 2)."""
    y = np.concatenate([silos[name]["y"] for name in silos])
    variance = 1 / (1 / 25 + len(y) / 2)
    return variance * y.sum() / 2, np.sqrt(variance)


def test_the_method_is_short():
    text = Path(__file__).read_text()
    code = text.split("# [method]")[1].split("# [end]")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 75
    assert code.strip() in (Path(__file__).parent.parent / "docs" / "extending.md").read_text().replace("\r", "")


def test_an_outside_method_does_all_that_a_fit_does(fit, silos, tmp_path):
    mean, sd = exact(silos)
    draws = np.asarray(fit.sample(KEY, 4000)["mu"])
    assert abs(draws.mean() - mean) < 0.25 * sd  # mean field has the mean, and too small an sd
    local = fit.sample_local(KEY, 100, silo="york")
    assert local["alpha"].shape == (100, 5) and local["double"].shape == (100, 5)
    assert fit.predict(KEY, silo="york", num_samples=10)["y"].shape == (10, 5)
    assert fit.predict(KEY, dict(y=np.zeros(3, "f")), num_samples=10)["y"].shape == (10, 3)
    assert "mu" in fit.summary(num_samples=100).index
    assert fit.to_arviz(num_samples=20).posterior["alpha"].shape == (1, 20, 13)
    path = fit.save(tmp_path / "fit")
    loaded = nf.load(path, MeanField(random_intercepts))
    np.testing.assert_array_equal(loaded.sample(KEY, 5)["mu"], fit.sample(KEY, 5)["mu"])
    np.testing.assert_array_equal(
        loaded.sample_local(KEY, 5, silo="york")["alpha"],
        local["alpha"][:5] * 0 + loaded.sample_local(KEY, 5, silo="york")["alpha"],
    )
    np.testing.assert_allclose(fit.normal().mean, fit.state.server.loc)
    corrected = fit.correct(KEY, 256)
    draws = np.asarray(corrected.sample(KEY, 4000)["mu"])
    assert abs(draws.mean() - mean) < 0.1 * sd and abs(draws.std() / sd - 1) < 0.1
    table = nf.compare(
        {"ours": fit, "corrected": corrected}, reference={"mu": np.random.default_rng(1).normal(mean, sd, 4000)}
    ).table
    assert list(table["method"]) == ["ours", "corrected"]
    assert "MeanField" in repr(fit) and fit.history["bytes_up"].sum() > 0


def test_an_outside_method_goes_on_and_starts_others(fit, silos):
    on = MeanField(random_intercepts).run(KEY, silos, 3, init_state=fit.state, progress_bar=False)
    assert on.state.round == fit.state.round + 3
    begun = nf.EP(random_intercepts).run(KEY, silos, 2, init_state=fit, progress_bar=False)
    mean, sd = exact(silos)
    assert abs(float(begun.normal().mean[0]) - mean) < 0.05 * sd


def test_an_outside_method_runs_on_every_engine(silos):
    run = lambda engine: MeanField(random_intercepts).run(KEY, silos, 3, engine=engine, progress_bar=False)
    plain, fast = run(nf.engines.Loopback()), run(nf.engines.Vmap())
    np.testing.assert_allclose(plain.state.server.loc, fast.state.server.loc, rtol=1e-5)
