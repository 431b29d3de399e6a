"""Minibatches: unbiased, and rows that are not drawn do not move."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed.data.padding import silo_data
from numpyro_fed.guides import StructuredNormal
from numpyro_fed.local import minibatch
from numpyro_fed.local.bound import Weighting, silo_bound
from numpyro_fed.local.integrate import Marginal, silo_factor
from numpyro_fed.methods.site_rounds import start_of
from numpyro_fed.model.build import split_model
from numpyro_fed.model.rows import find_components
from numpyro_fed.model.survey import Survey
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.normal.families import Family


def rows(x, y):
    """A latent a row, a parameter, and a term of the silo's own that no row has."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    tau = numpyro.sample("tau", dist.LogNormal(0.0, 0.5))
    drift = numpyro.param("drift", jnp.array(0.1))
    with numpyro.plate("rows", x.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Poisson(jnp.exp(a + drift * x)), obs=y)


def flat(x, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(beta[0] + beta[1] * x)), obs=y)


def with_silo(x, y):
    """A latent that the silo has once beside one for each row."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    site = numpyro.sample("site", dist.Normal(mu, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Poisson(jnp.exp(a + site + 0.1 * x)), obs=y)


def long(x, y, group, num_groups):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", num_groups):
        a = numpyro.sample("a", dist.Normal(mu, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(a[group] + 0.1 * x)), obs=y)


def fours(x, y):
    """Four consecutive elements make a row."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("children", x.shape[0] // 4):
        a = numpyro.sample("a", dist.Normal(mu, 1.0))
        rate = jnp.exp(a[:, None] + 0.1 * x.reshape(-1, 4))
        numpyro.sample("y", dist.Poisson(rate).to_event(1), obs=y.reshape(-1, 4))


def pair(n, extra=None):
    rng = np.random.default_rng(n)
    make = lambda n: dict(x=rng.normal(size=n), y=rng.integers(0, 5, n), **((extra or {}).get(n, {})))
    return nf.Silos([make(n), make(n + (4 if extra is None else 3))])


GROUPED = {
    6: dict(group=np.array([1, 0, 2, 1, 1, 0]), num_groups=3),
    9: dict(group=np.array([0, 1, 2, 3, 3, 3, 0, 1, 4]), num_groups=5),
}
CASES = {
    "no locals": (flat, lambda: pair(5), None, 1, "whole"),
    "rows, one draw": (rows, lambda: pair(5), None, 1, "aligned"),
    "rows, weighted": (rows, lambda: pair(5), None, 4, "aligned"),
    "rows and silo": (with_silo, lambda: pair(5), ["site"], 1, "whole"),
    "long format": (long, lambda: pair(6, GROUPED), None, 4, "indexed"),
    "rows of four": (fours, lambda: pair(12), None, 3, "aligned"),
}


@pytest.mark.parametrize("case", tiers(CASES, "no locals", "rows, weighted"))
def test_mean_over_all_minibatches_is_the_whole_silo(x64, case):
    """Every possible minibatch of two, each as likely: value and gradients average to those of all rows, to 1e-12.

    The draws are held: a row has the same standard normals in every batch.
    """
    model, made, own, num, kind = CASES[case]
    silos = made()
    split = split_model(model, silos, local=own, check=False)
    lengths = {axis.name: axis.lengths["0"] + 4 for axis in split.partition.axes}  # with padded rows
    data = silo_data(silos, "0", split.spec, split.partition.axes, lengths)
    guide, weighting = StructuredNormal(scale_coupling=True), Weighting(num, kind)
    params, base = guide.start_local(jax.random.key(0), split, data)
    noise = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf + jnp.asarray(noise.normal(scale=0.3, size=leaf.shape)), params)
    z = jnp.asarray(noise.normal(scale=0.3, size=split.dim))
    found = None
    if split.groups:
        found = find_components(split, data, z, split.theta)
    eps = {g.name: jnp.asarray(noise.normal(size=(num, g.num_rows(data.mask), g.size))) for g in split.groups}
    room, apart = minibatch.rows_apart(split, 2, data, found)
    assert all(apart.values())
    plan = minibatch.plan(split, Survey(2, room=int(room)), kind, 2)
    drawn = tuple(g.name for g in split.groups if g.axes)

    def bound(taken=None):
        held = eps
        if taken is not None and taken.place is not None:
            take = lambda name: minibatch.gather({name: jnp.moveaxis(eps[name], 1, 0)}, taken, drawn)[name]
            held = {name: jnp.moveaxis(take(name), 0, 1) for name in eps}
        own_params = params if taken is None else minibatch.gather(params, taken, drawn)
        take = (lambda tree: tree) if taken is None else (lambda tree: minibatch.gather(tree, taken, drawn))
        own_base = guide.take_rows(base, take) if split.groups else base
        given = (data, found, None) if taken is None else (taken.data, taken.components, taken.batch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("numpyro_fed.local.conditional.draw_rows", lambda *_: held)
            out = silo_bound(
                split, guide, weighting, jax.random.key(0), own_params, own_base, z, z + 0.1, split.theta, *given
            )
        if taken is None:
            return out
        zeros = jax.tree.map(jnp.zeros_like, params)
        return out._replace(params=minibatch.scatter(zeros, out.params, taken, drawn) if split.groups else out.params)

    if plan.limit:
        heads = np.unique(np.asarray(found.rows["groups"])[: silos["0"]["num_groups"]])
        number, pairs = found.rows["groups"].shape[0], itertools.combinations(heads, 2)
        choices = np.array([np.isin(np.arange(number), some) for some in pairs])
        take = lambda choice: minibatch.take_groups(split, plan, data, found, choice, len(heads))
    else:
        total = silos["0"]["y"].shape[0] // plan.rows
        choices = np.array(list(itertools.combinations(range(total), 2)))
        take = lambda choice: minibatch.take_rows(split, plan, data, found, choice, jnp.array(total))
    whole = jax.jit(bound)()
    mean = jax.tree.map(lambda leaf: leaf.mean(axis=0), jax.jit(jax.vmap(lambda c: bound(take(c))))(choices))
    for field in ("value", "z", "context", "theta", "params"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), *(
            getattr(v, field) for v in (mean, whole)))  # fmt: skip


def test_every_set_of_rows_is_equally_likely():
    """Ten sets of three out of five, 20,000 draws: counts within five standard errors; padding is never drawn."""
    keys = jax.random.split(jax.random.key(0), 20_000)
    drawn = np.sort(np.asarray(jax.jit(jax.vmap(lambda key: minibatch.draw(key, jnp.array(5), 3)))(keys)), axis=1)
    sets, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(sets) == 10 and drawn.max() < 5
    assert np.all(np.abs(counts - 2000) < 5 * np.sqrt(2000 * 0.9))


def silos_of(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return nf.Silos([dict(x=rng.normal(size=n).astype("f"), y=rng.integers(0, 5, n)) for n in sizes])


@pytest.mark.slow
def test_rows_that_are_not_drawn_do_not_move():
    """One round of two rows: the others keep parameters and optimiser state, count included, bit for bit."""
    silos = silos_of((7, 9))
    method = nf.SFVI(rows, batch_size=2, importance_samples=3)
    before = method.run(jax.random.key(0), silos, 1, progress_bar=False)
    after = method.run(jax.random.key(1), silos, 1, init_state=before.state, progress_bar=False)
    for name in silos.names:
        old, new = before.state.silo(name)[0], after.state.silo(name)[0]
        count = np.asarray(new.opt_state.rows["rows"][0].count) - np.asarray(old.opt_state.rows["rows"][0].count)
        moved = np.flatnonzero(count)
        assert len(moved) == 2 and np.all(moved < silos[name]["y"].shape[0])
        still = np.setdiff1d(np.arange(len(count)), moved)
        for x, y in zip(*(jax.tree.leaves(state.params) for state in (old, new)), strict=True):
            np.testing.assert_array_equal(x[still], y[still])
            assert np.all(np.asarray(x)[moved] != np.asarray(y)[moved])
        adam = lambda state: jax.tree.leaves(state.opt_state.rows["rows"][0])  # both moments of each parameter, count
        for x, y in zip(adam(old), adam(new), strict=True):
            np.testing.assert_array_equal(x[still], y[still])
            assert np.all(np.asarray(x)[moved] != np.asarray(y)[moved])
        steps = np.asarray(new.opt_state.rows["rows"][1].count)  # of the schedule, which begins anew with a run
        np.testing.assert_array_equal(np.flatnonzero(steps), moved)


def test_small_silos_use_all_their_rows(x64):
    """A silo with fewer rows than a batch: the batch is the silo, and its terms count once."""
    silos = silos_of((3, 50))
    split = split_model(flat, silos, check=False)
    data = silo_data(silos, "0", split.spec, split.partition.axes, {"rows": 50})
    taken = minibatch.take(split, minibatch.Batching("rows", 8, 1), jax.random.key(0), data, None)
    assert float(taken.batch.factor) == 1.0
    np.testing.assert_array_equal(np.sort(np.asarray(taken.data.args[1])[:3]), np.sort(silos["0"]["y"]))
    assert int(taken.data.mask["rows"].sum()) == 3


@pytest.mark.slow
def test_minibatches_reach_the_posterior():
    """Conjugate, 4 of 20 and 30 rows a step: mean within 0.1 sd, sd within 10 %, which is the noise of the steps."""

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 3.0))
        with numpyro.plate("rows", y.shape[0]):
            a = numpyro.sample("a", dist.Normal(mu, 1.0))
            numpyro.sample("y", dist.Normal(a, 0.5), obs=y)

    rng = np.random.default_rng(0)
    silos = nf.Silos([dict(y=rng.normal(2, 1.1, n).astype("f")) for n in (20, 30)])
    fit = nf.SFVI(model, batch_size=4).run(jax.random.key(0), silos, 6000, progress_bar=False)
    y = np.concatenate([silos[name]["y"] for name in silos.names])
    precision = 1 / 9 + len(y) / 1.25
    assert abs(float(fit.normal().mean[0]) - y.sum() / 1.25 / precision) < 0.1 / precision**0.5
    assert abs(float(fit.normal().covariance[0, 0] * precision) ** 0.5 - 1) < 0.1


@pytest.mark.slow
def test_bad_batches():
    silos = silos_of((7, 9))
    with pytest.raises(ValueError, match='local_cov="full" ties them together: use local_cov="block"'):
        guide = nf.guides.StructuredNormal(local_cov="full")
        nf.SFVI(rows, guide=guide, batch_size=2).run(jax.random.key(0), silos, 2, progress_bar=False)
    with pytest.raises(ValueError, match="here they meet: pass importance_samples=1"):
        nf.SFVI(with_silo, local=["site"], importance_samples=5, guide=nf.guides.StructuredNormal(), batch_size=2).run(
            jax.random.key(0), nf.Silos([dict(x=np.ones(3, "f"), y=np.ones(3, int))] * 1), 2, progress_bar=False
        )


@pytest.mark.merge
def test_rows_that_look_at_others_are_refused():
    """A random walk: without its neighbours a row has another density."""

    def walk(y):
        step = numpyro.sample("step", dist.HalfNormal(1.0))
        with numpyro.plate("times", y.shape[0]):
            before = jnp.concatenate([jnp.zeros(1), y[:-1]])
            numpyro.sample("y", dist.Normal(before, step), obs=y)

    silos = nf.Silos([dict(y=np.cumsum(np.ones(6, "f"))), dict(y=np.arange(6, dtype="f"))])
    nf.SFVI(walk).run(jax.random.key(0), silos, 2, progress_bar=False)
    with pytest.raises(ValueError, match=r"batch_size=: the log densities of site 'y'.*change when other rows"):
        nf.SFVI(walk, batch_size=2).run(jax.random.key(0), silos, 2, progress_bar=False)


# --- in the gradient solver of PVI ------------------------------------------------------------------------------------


def logistic(x, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("people", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def people(*sizes, d=3):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(sizes), d)).astype(jnp.result_type(float))
    y = (rng.random(len(x)) < 1 / (1 + np.exp(0.5 * x[:, 1] - x[:, 0]))).astype(np.int32)
    return nf.split(np.repeat(np.arange(len(sizes)), sizes), x=x, y=y)


@pytest.mark.merge
def test_mean_over_rows_drawn_with_replacement_is_the_whole_silo(x64):
    """All 16 minibatches of two among four rows, as likely each: value and gradient to 1e-12. And as a solver sees it,
    4,000 random ones: within five standard errors in each of the four numbers."""
    silos = people(4, 9)
    split = split_model(logistic, silos, check=False)
    data = silo_data(silos, "0", split.spec, split.partition.axes, {"people": 9})  # five rows are padding
    plan, z = minibatch.plan(split, Survey(2), "whole", 2), jnp.array([0.4, -0.3, 0.8])
    factor = silo_factor(split, Marginal("none"), data, None, batching=plan)
    whole = jax.value_and_grad(lambda z: factor.log_f(z, (), ()))(z)

    def estimate(choice):
        taken = minibatch.take_rows(split, plan, data, None, choice, jnp.array(4))
        return jax.value_and_grad(lambda z: minibatch.log_silo(split, z, split.theta, taken))(z)

    every = jax.vmap(estimate)(jnp.array(list(itertools.product(range(4), repeat=2))))
    for mean, expected in zip(every, whole, strict=True):
        np.testing.assert_allclose(mean.mean(axis=0), expected, rtol=1e-12)
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = jax.jit(jax.vmap(jax.value_and_grad(lambda z, key: factor.part(key, z)), in_axes=(None, 0)))(z, keys)
    for each, expected in zip(drawn, whole, strict=True):
        error = np.std(each, axis=0) / np.sqrt(4000)
        assert np.all(error > 0) and np.all(np.abs(np.mean(each, axis=0) - expected) < 5 * error)


@pytest.mark.slow
@pytest.mark.parametrize("most", (200, 0), ids=("from the mode", "from a draw of the prior"))
def test_pvi_in_minibatches_agrees_with_all_rows(most):
    """Two sweeps over silos of 150 and 90 people, 50 rows a step, against all rows a step.

    In sds a minibatch's gradient has noise of sqrt(150 / 50) = 1.7, and Adam's falling steps average it over some 700
    minibatches (those after which the steps left to take sum to 1.7 sds): .065 sds. Four times that is allowed. Rows
    that count once instead of three times would make sds 1.7 times as large.
    """
    Solver = type("Solver", (nf.solvers.Gradient,), dict(most_newton=most))
    silos, found = people(150, 90), {}
    for size in (None, 50):
        solver = Solver(num_steps=3000, batch_size=size)
        method = nf.PVI(logistic, family="diagonal", damping=1.0, solver=solver)
        found[size] = method.run(jax.random.key(0), silos, 4, schedule="sequential", progress_bar=False).normal()
    whole, part = found[None], found[50]
    assert np.all(np.abs(part.mean - whole.mean) < 0.26 * whole.sds)
    assert np.all(np.abs(part.sds / whole.sds - 1) < 0.1)


def test_silos_are_told_where_to_begin_while_q_is_the_prior(x64):
    """The same place for the same seed, a standard normal draw; once anybody was heard, q's own centre."""
    family, seed = Family("diagonal"), jnp.array([1, 2], jnp.uint32)
    prior = family.project(jnp.zeros(4000), jnp.full(4000, 0.25))
    first, again = (start_of(seed, prior, prior) for _ in range(2))
    np.testing.assert_array_equal(first.place, again.place)
    assert first.unheard and abs(np.std(first.place) - 1) < 5 / np.sqrt(2 * 4000)
    assert not np.array_equal(first.place, start_of(seed + 1, prior, prior).place)
    later = start_of(seed, prior._replace(shift=prior.shift.at[7].add(1e-6)), prior)
    assert not later.unheard and np.all(later.place == 0)


def test_pvi_refuses_minibatches_of_local_latents():
    solver = nf.solvers.Gradient(batch_size=2)
    with pytest.raises(PartitionError, match=r"local latents \('a'\).*nf.SFVI\(model, batch_size=2\)"):
        nf.PVI(shifts, solver=solver).run(jax.random.key(0), silos_of((7, 9)), 2, progress_bar=False)
    with pytest.raises(ValueError, match="batch_size must be an int of at least 1, got 0"):
        nf.solvers.Gradient(batch_size=0)
    with pytest.raises(ValueError, match=r"start_sd is a share of the prior's sd, in \(0, 1\], got 2: start_sd=0.1"):
        nf.solvers.Gradient(start_sd=2)


def shifts(x, y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", x.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, 1.0))
        numpyro.sample("y", dist.Poisson(jnp.exp(a + 0.1 * x)), obs=y)
