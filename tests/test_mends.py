"""Mistakes that must not come back: each was a wrong posterior, or a run that failed."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

import numpyro_fed as nf
from numpyro_fed import keys
from numpyro_fed.host import shapes_of


def prevalence(y):
    """Logits are exactly zero where globals and locals are: NumPyro's gradient is wrong there."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("villages", y.shape[0]):
        numpyro.sample("y", dist.Binomial(1000, logits=mu), obs=y)


def villages(y):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("villages", y.shape[0]):
        effect = numpyro.sample("effect", dist.Normal(0, spread))
        numpyro.sample("y", dist.Binomial(1000, logits=effect), obs=y)


def scalar_trials(effect, error):
    """One trial a silo, its numbers without rows: nothing pads."""
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    theta = numpyro.sample("theta", dist.Normal(mu, 1))
    numpyro.sample("effect", dist.Normal(theta, error), obs=effect)


def regression(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta), obs=y)


def regression_silos(num=20):
    draws = np.random.default_rng(0)
    x = [draws.normal(size=(num, 2)).astype("f") for _ in range(2)]
    return nf.Silos([dict(x=one, y=(one[:, 0] > 0).astype("i4")) for one in x])


def rare() -> nf.Silos:
    return nf.Silos([dict(y=np.array([5, 8, 3], "i4")), dict(y=np.array([6, 4], "i4"))])


def grid_posterior(log_density, grid):
    weight = np.exp(log_density - log_density.max())
    weight /= weight.sum()
    mean = weight @ grid
    return mean, np.sqrt(weight @ (grid - mean) ** 2)


def test_logits_that_start_at_zero(x64):
    """EP used to stop at mu = 0, where NumPyro's gradient has the wrong sign; the posterior lies near -5."""
    fit = nf.EP(prevalence).run(jax.random.key(0), rare(), progress_bar=False)
    grid = np.linspace(-7, -4, 4001)
    total = 26
    mean, sd = grid_posterior(total * grid - 5000 * np.logaddexp(0, grid) - 0.5 * grid**2, grid)
    draws = np.asarray(fit.sample(jax.random.key(1), 4000)["mu"])
    assert abs(draws.mean() - mean) < 4 * sd / np.sqrt(4000) + 0.02 * sd
    assert abs(draws.std() / sd - 1) < 0.05


@pytest.mark.slow
def test_locals_that_start_at_zero():
    fit = nf.EP(villages).run(jax.random.key(0), rare(), progress_bar=False)
    rates = jax.nn.sigmoid(fit.sample_local(jax.random.key(1), 500, silo="0")["effect"])
    assert np.all(np.asarray(rates).mean(axis=0) < 0.03)  # 5, 8 and 3 of 1000


def test_where_searches_begin_no_two_locals_are_alike():
    from numpyro_fed.model.build import split_model

    split = split_model(villages, rare())
    few, many = (split.near_zero_local({"villages": jnp.ones(n, bool)})["villages"] for n in (3, 8))
    assert np.all(np.asarray(many) != 0) and len(np.unique(many)) == 8
    np.testing.assert_array_equal(few, many[:3])  # padding moves nobody


def test_a_posterior_that_still_moves_says_so(tmp_path):
    settings = dict(solver=nf.solvers.Importance(num_points=64))
    with pytest.warns(nf.VerdictWarning, match=r"still moves by .* sds a sweep.*init_state=fit.state"):
        fit = nf.EP(regression, **settings).run(jax.random.key(0), regression_silos(), 1, progress_bar=False)
    assert "verdict still moving: The posterior still moves by" in repr(fit) and "still moves" in fit._repr_html_()
    assert len(fit.reasons) == 1 and nf.load(fit.save(tmp_path / "fit"), nf.EP(regression)).reasons == fit.reasons
    fit = nf.EP(regression, **settings).run(jax.random.key(0), regression_silos(), 20, progress_bar=False)
    assert "verdict not checked" in repr(fit) and fit.reasons == ()


def test_nuts_where_nothing_pads():
    trials = [dict(effect=np.float32(e), error=np.float32(1)) for e in (1.0, 2.0, 0.0)]
    silos = nf.Silos([{name: np.asarray(value) for name, value in one.items()} for one in trials])
    ref = nf.nuts(
        scalar_trials, silos, local=["theta"], num_warmup=300, num_samples=500, num_chains=2, progress_bar=False
    )
    # theta integrates out: effect ~ N(mu, 2), so mu given three of them is normal
    variance = 1 / (1 / 25 + 3 / 2)
    draws = np.asarray(ref.get_samples()["mu"])
    assert abs(draws.mean() - variance * 3.0 / 2) < 0.15 and abs(draws.std() / np.sqrt(variance) - 1) < 0.15


def test_identities_have_64_bits_and_must_differ(monkeypatch):
    names = [str(i) for i in range(100_000)]
    assert len(np.unique(keys.identities(names), axis=0)) == 100_000
    same = lambda name: np.array([1, 2], np.uint32)
    monkeypatch.setattr(keys, "identity", same)
    with pytest.raises(ValueError, match=r"silos 'a' and 'b' would draw the same random numbers.*rename"):
        keys.identities(["a", "b"])


# --- found by random models -------------------------------------------------------------------------------------------


def test_a_param_beside_weights() -> None:
    """A param's start was read off a call with weights of zero, which NumPyro refuses."""

    def model(y, weight):
        shift = numpyro.param("shift", 0.1)
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]), handlers.scale(scale=weight):
            numpyro.sample("y", dist.Normal(mu + shift, 1), obs=y)

    silos = nf.Silos([dict(y=np.ones(n, "f"), weight=np.full(n, 0.5, "f")) for n in (2, 3)])
    split, *_ = nf.SFVI(model).prepare(silos)
    np.testing.assert_allclose(split.theta["shift"], 0.1, rtol=1e-6)


@pytest.mark.parametrize("num_silos", [1, 2])
def test_one_row_in_every_silo(num_silos: int) -> None:
    """One row broadcasts: x alone can be doubled, but lies along the same axis as y."""

    def model(x, y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        b = numpyro.sample("b", dist.Normal(0, 1).expand([y.shape[0]]))
        numpyro.factor("y", dist.Normal(mu + b + x, 1).log_prob(y))

    one = np.ones(1, "f")
    part = nf.partition(model, nf.Silos([dict(x=one, y=one)] * num_silos))
    assert part.local_sites == ("b",)
    (axis,) = part.axes
    assert set(axis.arguments) == {"x", "y"}


def test_one_group_in_every_silo_of_one_row() -> None:
    """A count that is one everywhere is no axis of the rows, which are one everywhere, too: it is asked about."""

    def model(num_groups, group, y):
        with numpyro.plate("groups", num_groups):
            b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(b[group], 1), obs=y)

    silos = nf.Silos([dict(num_groups=1, group=np.zeros(1, int), y=np.ones(1, "f"))] * 2)
    with pytest.raises(nf.PartitionError, match=r"local=\['groups'\]"):
        nf.partition(model, silos)
    assert nf.partition(model, silos, shared="groups").global_sites == ("b",)


def counted(k, x, y):
    with numpyro.plate("items", k):
        b = numpyro.sample("b", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(b.sum() + x, 1), obs=y)


def grouped(num_regions, region, u, v, at, y):
    """Groups in regions, as many of each as there are rows; something is seen of groups and rows."""
    with numpyro.plate("regions", num_regions):
        m = numpyro.sample("m", dist.Normal(0, 1))
    with numpyro.plate("groups", u.shape[0]):
        b = numpyro.sample("b", dist.Normal(m[region] + u, 1))
        numpyro.sample("v", dist.Normal(b, 1), obs=v)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(b[at], 1), obs=y)


def test_a_count_that_happens_to_be_the_number_of_rows_is_asked_about() -> None:
    """Whatever its name: it was taken for the rows where it came first in the alphabet."""
    real, index = np.ones(3, "f"), np.zeros(3, int)
    with pytest.raises(nf.PartitionError, match=r"local=\['items'\]"):
        nf.partition(counted, nf.Silos([dict(k=3, x=real, y=real)] * 2))
    silos = nf.Silos([dict(num_regions=3, region=index, u=real, v=real, at=index, y=real)] * 2)
    with pytest.raises(nf.PartitionError, match=r"local=\['regions'\]"):
        nf.partition(grouped, silos)
    part = nf.partition(grouped, silos, shared="regions")
    assert (part.global_sites, part.local_sites) == (("m",), ("b",))
    assert [sorted(axis.arguments) for axis in part.axes] == [["at", "y"], ["region", "u", "v"]]


def test_counts_of_two_plates_that_happen_to_be_equal() -> None:
    """Something is seen of each region; of the groups, which lie in regions, nothing, so they are asked about."""

    def model(num_groups, num_regions, region, v, at, y):
        with numpyro.plate("regions", num_regions):
            m = numpyro.sample("m", dist.Normal(0, 1))
            numpyro.sample("v", dist.Normal(m, 1), obs=v)
        with numpyro.plate("groups", num_groups):
            b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal((m[region] + b)[at], 1), obs=y)

    real, index = np.ones(3, "f"), np.zeros(3, int)
    silos = nf.Silos([dict(num_groups=3, num_regions=3, region=index, v=real, at=index[:2], y=real[:2])] * 2)
    with pytest.raises(nf.PartitionError, match=r"local=\['groups'\]"):
        nf.partition(model, silos)
    axes = nf.partition(model, silos, local="groups").axes
    found = sorted(sorted(axis.arguments) for axis in axes)
    assert found == [["at", "y"], ["num_groups", "region"], ["num_regions", "v"]]


@pytest.mark.merge
def test_shapes_that_are_asked_for_leave_nothing_behind() -> None:
    """JAX keeps a trace for each ``eval_shape`` of a function that lives on: some 70 kB a run of EP."""
    kept = lambda x: x + 1

    def traces() -> int:
        gc.collect()
        return sum(type(one).__name__ == "PjitInfo" for one in gc.get_objects())

    shapes_of(kept, np.zeros(3))
    before = traces()
    for _ in range(4):
        assert shapes_of(kept, np.zeros(3)).shape == (3,)
    assert traces() == before


def test_a_covariate_of_groups_as_many_as_rows_is_asked_about() -> None:
    """It stands in the rows' own term, but grows by itself."""

    def model(at, u, y):
        with numpyro.plate("groups", u.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal((u + b)[at], 1), obs=y)

    real, index = np.ones(3, "f"), np.zeros(3, int)
    with pytest.raises(nf.PartitionError, match=r"local=\['groups'\]"):
        nf.partition(model, nf.Silos([dict(at=index, u=real, y=real)] * 2))


def test_arrays_of_groups_as_many_as_rows_are_asked_about_together() -> None:
    """Neither grows without the other; both stand in the rows' own term."""

    def model(at, region, u, v, y):
        with numpyro.plate("regions", v.shape[0]):
            m = numpyro.sample("m", dist.Normal(0, 1))
            numpyro.sample("v", dist.Normal(m, 1), obs=v)
        with numpyro.plate("groups", u.shape[0]):
            b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal((m[region] + u + b)[at], 1), obs=y)

    rows = dict(at=np.array([1, 0, 2]), region=np.array([1, 0, 0]), u=np.ones(3, "f"), v=np.ones(2, "f"))
    silos = nf.Silos({name: dict(rows, y=np.ones(3, "f")) for name in ("leeds", "york")})
    with pytest.raises(nf.PartitionError, match=r"local=\['groups'\] if each silo has its own"):
        nf.partition(model, silos)
    assert nf.partition(model, silos, local=["groups"]).local_sites == ("m", "b")
