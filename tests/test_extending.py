"""What users add without touching the library: a method, a guide, a solver, an engine. Public names alone.

What stands between the marks is shown in docs/extending.md.
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
from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm, Phase, Program
from numpyro_fed.keys import SERVER, START, fold_in_name, identity

KEY = jax.random.key(0)
HERE = Path(__file__)
pytestmark = pytest.mark.filterwarnings("ignore::numpyro_fed.VerdictWarning")


# [method]
class Normals(NamedTuple):
    loc: dict
    log_sd: dict
    optim: tuple  # the optimiser's state

    def sample(self, key):
        return jax.tree.map(lambda m, s: m + jnp.exp(s) * jax.random.normal(key, m.shape), self.loc, self.log_sd)


@dataclass(frozen=True)
class MeanField(nf.Method):
    """Variational inference with independent normals: the globals' at the server, the locals' in the silos."""

    rate: float = 0.05

    def compile(self, split, survey, plan):
        optim = optax.adam(self.rate)

        def fresh(loc):
            start = loc, jax.tree.map(lambda leaf: jnp.full_like(leaf, -2.0), loc)
            return Normals(*start, optim.init(start))

        def uphill(q, gradient):
            steps, state = optim.update(jax.tree.map(jnp.negative, gradient), q.optim)
            return Normals(*optax.apply_updates((q.loc, q.log_sd), steps), state)

        def silo_step(key, broadcast, q, data):
            def bound(z, loc, log_sd):
                z_local = q._replace(loc=loc, log_sd=log_sd).sample(key)
                real = split.evaluate(z, z_local, split.theta, data).active  # padded rows have no entropy
                entropy = sum(jnp.sum(jnp.where(real[group], log_sd[group], 0.0)) for group in log_sd)
                return split.log_silo(z, z_local, split.theta, data) + entropy

            value, (g_z, *own) = jax.value_and_grad(bound, (0, 1, 2))(broadcast.common, q.loc, q.log_sd)
            return (value, g_z), uphill(q, tuple(own))

        def server_step(key, q, silos):
            z, pull = jax.vjp(lambda loc, log_sd: q._replace(loc=loc, log_sd=log_sd).sample(key), q.loc, q.log_sd)
            value, g_z = jax.value_and_grad(split.log_prior)(z, split.theta)
            loc, log_sd = pull(g_z + silos[1])
            info = {"loss": -(value + silos[0] + jnp.sum(q.log_sd))}
            return uphill(q, (loc, log_sd + 1.0)), info  # 1: of the entropy

        rounds = FederatedAlgorithm(
            init=lambda key: fresh(0.1 * jax.random.normal(key, (split.dim,))),
            init_silo=lambda key, broadcast, data: fresh(split.near_zero_local(data.mask)),
            broadcast=lambda key, q: Broadcast(q.sample(key)),
            silo_step=silo_step,
            aggregate=lambda messages, cohort: jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), messages),
            server_step=server_step,
        )
        return Program((Phase("rounds", rounds, num_rounds=plan.num_rounds or 2000),), MeanFieldPosterior())


class MeanFieldPosterior:
    def sample(self, key, q):
        return q.sample(key)

    def sample_local(self, key, z, q, silo, data):
        return silo.sample(key)

    def theta(self, q):
        return {}

    def normal(self, q):
        return nf.Normal(q.loc, jnp.exp(q.log_sd))


# [guide]
@dataclass(frozen=True)
class Students:
    """Student's t in every direction: tails that a normal does not have."""

    degrees: float = 5.0

    def init_params(self, key, split):
        return {"loc": 0.1 * jax.random.normal(key, (split.dim,)), "log_scale": jnp.full(split.dim, -2.0)}

    def rsample_with_log_prob(self, key, params, split):
        q = dist.StudentT(self.degrees, params["loc"], jnp.exp(params["log_scale"])).to_event(1)
        z = q.rsample(key)
        return z, q.log_prob(z)

    def init_local_params(self, key, split, data):
        return {g: (loc, jnp.full_like(loc, -1.0)) for g, loc in split.near_zero_local(data.mask).items()}

    def rsample_local_with_log_prob(self, key, params, z, split, data):
        q = {g: dist.Normal(loc, jnp.exp(log_scale)).to_event(1) for g, (loc, log_scale) in params.items()}
        z_local = {g: one.rsample(key) for g, one in q.items()}
        return z_local, {g: q[g].log_prob(z_local[g]) for g in q}


# [solver]
@dataclass(frozen=True)
class Grid:
    """Moments on a grid, for one global parameter."""

    num_points: int = 201
    noisy = False
    samples_locals = False

    def step(self, d, family):
        return 1.0

    def init_state(self, family, q):
        return ()

    def solve(self, key, tilted, factor, frame, state):
        family, (mean, root) = tilted.family, nf.solvers.to_user_dtype(tilted.family.moments(tilted.q))
        frame = factor.refit(mean, frame, 4)
        points = mean + 6 * root * jnp.linspace(-1, 1, self.num_points)[:, None]
        cavity = nf.solvers.to_user_dtype(tilted.family.dense(tilted.cavity))
        log_f = jax.vmap(lambda z: factor.log_f(z, frame, factor.nodes(None)))(points)
        z = points[:, 0]
        weight = jax.nn.softmax(log_f + cavity.shift * z - 0.5 * cavity.precision[0, 0] * z**2)
        centre = weight @ z
        found = family.project(centre[None], (weight @ (z - centre) ** 2)[None, None])
        return nf.solvers.Projection(found, jnp.zeros(()), jnp.ones(()), jnp.ones((), bool), frame)


# [engine]
def at_row(tree, at):
    return jax.tree.map(lambda leaf: leaf[at], tree)


class Told:
    """One silo after another, in this process, telling who is asked."""

    chunk, holds_states, reads_store = 8, True, False

    def __init__(self):
        self.log = []

    @nf.engines.engine_in_x64
    def start(self, algorithm, key, stack):
        key = jax.random.fold_in(key, START)
        server_key = jax.random.fold_in(key, SERVER)
        server = algorithm.init(server_key)
        broadcast = algorithm.broadcast(server_key, server)

        def begin(name):
            own_key = fold_in_name(key, identity(name))
            return algorithm.init_silo(own_key, nf.engines.sent_to(broadcast, stack.index(name)), stack.data(name))

        return server, tuple(nf.engines.stacked([begin(name) for name in bucket.names]) for bucket in stack.buckets)

    @nf.engines.engine_in_x64
    def rounds(self, algorithm, key, stack, server, silos, first, cohorts, count, effort="most"):
        infos = []
        for i in range(count):
            round_key = jax.random.fold_in(key, first + i)
            server_key = jax.random.fold_in(round_key, SERVER)
            broadcast = algorithm.broadcast(server_key, server)
            cohort = np.arange(len(stack.names)) if cohorts is None else cohorts[i]
            messages = []
            for j in cohort:
                name = stack.names[j]
                self.log.append((first + i, name))
                b, at = stack.place(name)
                state = at_row(silos[b], at)
                own_key = fold_in_name(round_key, identity(name))
                message, state = algorithm.silo_step(own_key, nf.engines.sent_to(broadcast, j), state, stack.data(name))
                messages.append(message)
                moved = jax.tree.map(lambda leaf, new, at=at: leaf.at[at].set(new), silos[b], state)
                silos = (*silos[:b], moved, *silos[b + 1 :])
            replies = algorithm.aggregate(nf.engines.stacked(messages), Cohort(jnp.asarray(cohort), len(stack.names)))
            server, info = algorithm.server_step(server_key, server, replies)
            infos.append(info)
        return server, silos, {name: np.stack([info[name] for info in infos]) for name in infos[0]}

    def in_silos(self, function, given, stack, *states):
        def one(b, at):
            return function(given, *[None if state is None else at_row(state[b], at) for state in states])

        sizes = [len(bucket.names) for bucket in stack.buckets]
        return tuple(nf.engines.stacked([one(b, at) for at in range(size)]) for b, size in enumerate(sizes))


# [end]
def shown(mark: str) -> str:
    """The code behind a mark."""
    return HERE.read_text().split(f"# [{mark}]\n")[1].split("\n# [")[0].strip()


@pytest.mark.parametrize("mark", ["method", "guide", "solver", "engine"])
def test_the_page_shows_this_code(mark):
    assert shown(mark) in (HERE.parent.parent / "docs" / "extending.md").read_text()


def test_a_method_is_short():
    assert len([line for line in shown("method").splitlines() if line.strip()]) <= 60


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


@pytest.fixture(scope="module")
def exact(silos) -> tuple[float, float]:
    """alpha integrates out: y ~ N(mu, 2). Mean and sd of mu."""
    y = np.concatenate([silos[name]["y"] for name in silos])
    variance = 1 / (1 / 25 + len(y) / 2)
    return variance * y.sum() / 2, np.sqrt(variance)


@pytest.mark.merge
def test_an_outside_method_does_all_that_a_fit_does(fit, silos, exact, tmp_path):
    mean, sd = exact
    draws = np.asarray(fit.sample(KEY, 4000)["mu"])
    assert abs(draws.mean() - mean) < 0.25 * sd and draws.std() < 0.9 * sd  # mean field: right mean, too narrow
    local = fit.sample_local(KEY, 100, silo="york")
    assert local["alpha"].shape == (100, 5)
    np.testing.assert_allclose(local["double"], 2 * local["alpha"], rtol=1e-6)
    assert fit.predict(KEY, silo="york", num_samples=10)["y"].shape == (10, 5)
    assert fit.predict(KEY, dict(y=np.zeros(3, "f")), num_samples=10)["y"].shape == (10, 3)
    assert "mu" in fit.summary(num_samples=100).index
    assert fit.to_arviz(num_samples=20).posterior["alpha"].shape == (1, 20, 13)
    np.testing.assert_allclose(fit.normal().mean, fit.state.server.loc)
    assert "MeanField" in repr(fit) and fit.history["bytes_up"].sum() > 0

    loaded = nf.load(fit.save(tmp_path / "fit"), MeanField(random_intercepts))
    np.testing.assert_array_equal(loaded.sample(KEY, 5)["mu"], fit.sample(KEY, 5)["mu"])
    again = loaded.sample_local(KEY, 100, silo="york")
    np.testing.assert_array_equal(again["alpha"], local["alpha"])

    corrected = fit.correct(KEY, 256)
    draws = np.asarray(corrected.sample(KEY, 4000)["mu"])
    assert abs(draws.mean() - mean) < 0.1 * sd and abs(draws.std() / sd - 1) < 0.1
    reference = {"mu": np.random.default_rng(1).normal(mean, sd, 4000)}
    table = nf.compare({"ours": fit, "corrected": corrected}, reference=reference).table
    assert list(table["method"]) == ["ours", "corrected"]


@pytest.mark.merge
def test_an_outside_method_goes_on_and_starts_others(fit, silos, exact):
    on = MeanField(random_intercepts).run(KEY, silos, 3, init_state=fit.state, progress_bar=False)
    assert on.state.round == fit.state.round + 3
    begun = nf.EP(random_intercepts).run(KEY, silos, 3, init_state=fit, progress_bar=False)
    assert abs(float(begun.normal().mean[0]) - exact[0]) < 0.05 * exact[1]


@pytest.mark.slow
def test_an_outside_guide(silos, exact):
    method = nf.SFVI(random_intercepts, guide=Students(), importance_samples=10, optim=optax.adam(0.02))
    found = method.run(KEY, silos, 1500, progress_bar=False)
    draws = np.asarray(found.sample(KEY, 4000)["mu"])
    assert abs(draws.mean() - exact[0]) < 0.3 * exact[1] and 0.7 < draws.std() / exact[1] < 1.4
    assert found.sample_local(KEY, 3, silo="york")["alpha"].shape == (3, 5)
    with pytest.raises(ValueError, match="no normal posterior"):
        found.normal()


@pytest.mark.merge
def test_an_outside_solver(silos, exact):
    found = nf.EP(random_intercepts, solver=Grid()).run(KEY, silos, 6, progress_bar=False).normal()
    assert abs(float(found.mean[0]) - exact[0]) < 0.01 * exact[1] and abs(found.sds[0] / exact[1] - 1) < 0.01


@pytest.mark.slow
def test_an_outside_engine(silos):
    engine, settings = Told(), dict(schedule="sequential", progress_bar=False)
    told = nf.EP(random_intercepts).run(KEY, silos, 2, engine=engine, **settings)
    plain = nf.EP(random_intercepts).run(KEY, silos, 2, engine=nf.engines.Loopback(), **settings)
    np.testing.assert_allclose(told.normal().mean, plain.normal().mean, rtol=1e-5)  # float32, compiled otherwise
    assert (0, "leeds") in engine.log and (1, "york") in engine.log
