"""Discrete local latents: summed out exactly, drawn exactly, refused where that cannot be done."""

import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from given import given_fit
from models import MODELS, classes, gaussian_mixture, normal, real, rows
from numpyro import handlers
from numpyro.infer.util import log_density

import numpyro_fed as nf
from numpyro_fed.data.padding import SiloData, silo_data
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.stack import stack_of
from numpyro_fed.judge.nuts import nuts
from numpyro_fed.judge.pooled import origin, potential
from numpyro_fed.model import discrete as enum
from numpyro_fed.model import enumeration
from numpyro_fed.model.build import split_model
from numpyro_fed.model.rows import find_components, how_rows_lie
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.precision import unoptimised


def run(function: Any, *args: Any) -> Any:
    """A program that runs once: compiled without optimisation, in a third of the time."""
    return jax.jit(function).lower(*args).compile(compiler_options=unoptimised())(*args)


def split_of(name: str) -> tuple[Silos, SplitModel]:
    case = MODELS[name]
    silos = case.silos()
    return silos, split_model(case.model, silos, **case.options, check=False)


def padded(silos: Silos, split: SplitModel, name: str) -> SiloData:
    """A silo's data with some padded rows."""
    lengths = {axis.name: axis.lengths[name] + 3 for axis in split.partition.axes}
    return silo_data(silos, name, split.spec, split.partition.axes, lengths)


# --- densities ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_densities_and_derivatives_are_those_of_the_mixture(x64: None) -> None:
    """Row by row, under vmap over ragged silos: value, gradient and Hessian."""
    silos = rows(3, 6, 2)()
    by_rows, by_hand = (split_model(model, silos) for model in (classes, gaussian_mixture))
    z = jnp.array([0.3, -0.8, 0.5])

    def all_silos(split: SplitModel, z: Any) -> Any:
        ((args, mask),) = stack_of(silos, silos, split.spec, split.partition.axes).arrays
        data = lambda args, mask: SiloData(args, mask, ())
        return jax.vmap(lambda args, mask: split.evaluate(z, {}, {}, data(args, mask)).terms["y"])(args, mask)

    def derivatives(split: SplitModel) -> Any:
        terms = lambda z: all_silos(split, z)
        return run(lambda z: (terms(z), jax.jacrev(terms)(z), jax.jacfwd(jax.jacrev(terms))(z)), z)

    for ours, theirs in zip(derivatives(by_rows), derivatives(by_hand), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("classes", {"y": "rows"}),
        ("class and intercept", {"y": "rows", "offset": "rows", "x": "rows"}),
        ("several discrete", {"a": "rows", "y": "rows"}),
        ("chain of classes", {"y_0": "rows"}),
        ("classes of visits", {"frail": "patients"}),
        ("classes of items", {"kind": "students"}),
        ("classes of counties", {"kind": "counties"}),
        ("class of silo", {"kind": None}),
    ],
)
def test_sites_that_meet_in_a_discrete_latent_are_one_term_with_an_entry_per_row(name: str, expected: dict) -> None:
    silos, split = split_of(name)
    data = padded(silos, split, silos.names[0])
    at_ones = lambda data: split.evaluate(jnp.ones(split.dim), split.zeros_local(data.mask), split.theta, data).terms
    terms = run(at_ones, data)
    assert set(terms) == set(expected)
    for site, axis in expected.items():
        term = np.asarray(terms[site])
        dims = dict(split.partition[site].axes)
        assert set(dims) == ({axis} if axis else set())
        if axis:
            assert term.shape[dims[axis]] == term.size == data.mask[axis].shape[0]
            assert np.array_equal(term.reshape(-1) != 0, np.asarray(data.mask[axis]))


@pytest.mark.parametrize("name", ["class and intercept", "classes of counties"])
def test_rows_find_their_terms(name: str) -> None:
    """So that each row has importance weights of its own."""
    silos, split = split_of(name)
    data = padded(silos, split, silos.names[0])
    found = run(lambda data: find_components(split, data, 0.3 * jnp.ones(split.dim), {}), data)
    assert bool(found.separable)
    assert how_rows_lie(split, data, found)[1]


def test_axes_whose_rows_must_stay_together() -> None:
    """Minibatches of them would be biased."""
    whole = {name: split_of(name)[1].enumeration.whole for name in ("classes", "classes of counties", "class of silo")}
    assert whole == {"classes": {}, "classes of counties": {"rows": "kind"}, "class of silo": {"rows": "kind"}}


def test_nothing_but_numpyro_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPyro's own enumeration needs funsor, and global vectors in to_event, and models that broadcast."""
    monkeypatch.setitem(sys.modules, "funsor", None)

    def model(x, y):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2, 2]))
        with numpyro.plate("rows", y.shape[0]):
            kind = numpyro.sample("kind", dist.Bernoulli(0.3))
            numpyro.sample("y", dist.Normal((x * beta[kind]).sum(-1), 1), obs=y)

    split_model(model, Silos([dict(x=normal(j, n, 2), y=normal(j + 9, n)) for j, n in enumerate((3, 5))]))


@pytest.mark.slow
def test_every_discrete_model_has_a_certificate() -> None:
    for name in ("several discrete", "classes of counties", "masked classes"):
        case = MODELS[name]
        split_model(case.model, case.silos(), **case.options)


def test_a_site_of_its_own_plate_is_found_in_long_format_whatever_the_values() -> None:
    """Rows of 9 counties; some rows tell two classes apart only, some none."""
    county = np.random.default_rng(0).integers(0, 9, 40)
    effect = np.zeros((40, 3))
    effect[:20, 1] = 1.0  # value 2 looks like value 0
    effect[20:35] = [0.0, -2.0, 0.3]
    variable = enumeration.Variable("kind", (4, 5, 7), frozenset())

    def probe(chosen: dict[str, Any]) -> dict[str, Any]:
        """At two points, at each of which half of the rows do not move."""
        kind = jnp.broadcast_to(chosen["kind"], (9,))[county]
        moved = jnp.where(kind == 4, effect[:, 0], jnp.where(kind == 5, effect[:, 1], effect[:, 2]))
        even = np.arange(40) % 2 == 0
        return {"y": jnp.stack([jnp.where(even, moved, 0.3), jnp.where(even, 0.3, moved)])}

    found = np.asarray(enum.owners(variable, (9,), probe, "y"))
    assert np.array_equal(found[:35], county[:35])


# --- what cannot be summed out --------------------------------------------------------------------------------------


def neighbours(y):
    p = numpyro.sample("p", dist.Beta(1, 1))
    with numpyro.plate("rows", y.shape[0]):
        kind = numpyro.sample("kind", dist.Bernoulli(p))
        numpyro.sample("y", dist.Normal(kind + jnp.roll(kind, 1), 1), obs=y)


def crossed(a, b, y):
    p = numpyro.sample("p", dist.Beta(1, 1))
    rows, columns = numpyro.plate("rows", a.shape[0], dim=-2), numpyro.plate("columns", b.shape[0], dim=-1)
    with rows:
        of_row = numpyro.sample("of_row", dist.Bernoulli(p))
    with columns:
        of_column = numpyro.sample("of_column", dist.Bernoulli(p))
    with rows, columns:
        numpyro.sample("cell", dist.Normal(of_row + of_column, 1), obs=a[:, None] + b)
    with numpyro.plate("extra", y.shape[0]):
        numpyro.sample("y", dist.Normal(p, 1), obs=y)


def two_levels(county, num_counties, y):
    p = numpyro.sample("p", dist.Beta(1, 1))
    with numpyro.plate("counties", num_counties):
        kind = numpyro.sample("kind", dist.Bernoulli(p))
    with numpyro.plate("rows", y.shape[0]):
        own = numpyro.sample("own", dist.Bernoulli(p))
        numpyro.sample("y", dist.Normal(kind[county] + own, 1), obs=y)


def too_many(y):
    p = numpyro.sample("p", dist.Dirichlet(jnp.ones(10)))
    with numpyro.plate("rows", y.shape[0]):
        all_ = [numpyro.sample(f"kind_{i}", dist.Categorical(p)) for i in range(6)]
        numpyro.sample("y", dist.Normal(sum(all_), 1), obs=y)


@pytest.mark.slow
def test_rows_find_their_element_where_their_density_is_flat_nearly_everywhere(x64: None) -> None:
    """A clipped predictor: most points near zero do not tell whose a row is."""

    def clipped(group: Any, num_groups: int, x: Any, y: Any = None) -> None:
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("groups", num_groups):
            kind = numpyro.sample("kind", dist.Bernoulli(0.3))
        with numpyro.plate("rows", x.shape[0]):
            eta = jnp.clip(mu + x + 0.5 * kind[group], -1, 1)
            numpyro.sample("y", dist.Normal(eta, 1), obs=y)

    silos = nf.Silos(
        {
            "a": dict(group=np.array([0, 1, 1]), num_groups=2, x=np.array([2.5, -2.5, 0.0]), y=np.array([1.0, -1, 0])),
            "b": dict(group=np.array([1, 0]), num_groups=3, x=np.array([-3.0, 3.0]), y=np.array([0.5, 0.2])),
        }
    )
    split, owners = split_model(clipped, silos), enum.owners
    for name in silos.names:
        data = padded(silos, split, name)
        found: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patch:
            spy = lambda *args, found=found: found.setdefault("at", owners(*args))
            patch.setattr(enum, "owners", spy)
            split.log_silo(jnp.array([0.1]), {}, {}, data)
        group = silos[name]["group"]
        np.testing.assert_array_equal(np.asarray(found["at"])[: len(group)], group)


def test_rows_that_look_at_other_rows_are_refused() -> None:
    with pytest.raises(PartitionError, match=r"site 'y' depends on more than one element .*'kind'.*state_\{t\}"):
        split_model(neighbours, rows(5, 3)())


def test_crossed_plates_are_refused() -> None:
    silos = Silos([dict(a=normal(0, n), b=normal(1, m), y=normal(2, 2)) for n, m in [(3, 2), (2, 4)]])
    with pytest.raises(PartitionError, match=r"of_row, of_column lie in crossed plates.*nest"):
        split_model(crossed, silos)


def test_two_levels_of_long_format_are_refused() -> None:
    silos = Silos([dict(county=np.arange(n) % c, num_counties=c, y=normal(0, n)) for n, c in [(5, 2), (4, 3)]])
    with pytest.raises(PartitionError, match=r"'y' .axes rows. depends on .*'kind'.*counties.* and on own.*logsumexp"):
        split_model(two_levels, silos)


def test_sums_that_are_too_long_are_refused() -> None:
    with pytest.raises(PartitionError, match="1000000 terms per row"):
        split_model(too_many, rows(2, 3)())


# --- draws ----------------------------------------------------------------------------------------------------------

DRAWS = 4000


def draws_of(split: SplitModel, data: SiloData, z: Any) -> dict[str, np.ndarray]:
    keys = jax.random.split(jax.random.key(1), DRAWS)
    one = lambda key: split.sample_discrete(z, split.zeros_local(data.mask), split.theta, data, key)
    return jax.tree.map(np.asarray, run(jax.vmap(one), keys))


def within(found: Any, probability: Any) -> None:
    """Frequencies agree with probabilities, to 4.5 standard errors."""
    error = np.sqrt(probability * (1 - probability) / DRAWS)
    assert np.all(np.abs(found - probability) <= 4.5 * error + 1e-6), (found, probability)


def test_draws_of_classes_have_their_posterior_probabilities() -> None:
    silos, split = split_of("classes")
    data = padded(silos, split, "s1")
    z = jnp.array([0.4, -1.0, 1.0])
    values = split.constrain_global(z, {})
    log_joint = jnp.log(values["weights"]) + dist.Normal(values["means"], 1).log_prob(silos["s1"]["y"][:, None])
    within(draws_of(split, data, z)["kind"][:, :6].mean(0), np.asarray(jax.nn.softmax(log_joint)[:, 1]))


@pytest.mark.merge
@pytest.mark.parametrize("name", ["several discrete", "chain of classes", "classes of visits"])
def test_joint_draws_of_several_sites_have_their_posterior_probabilities(name: str) -> None:
    """Against NumPyro's log density of every combination, one row at a time."""
    silos, split = split_of(name)
    first = silos.names[0]
    data = silo_data(silos, first, split.spec, split.partition.axes)
    z = 0.5 * jnp.ones(split.dim)
    found = draws_of(split, data, z)
    shapes = {site: found[site].shape[2:] for site in found}
    sites = [(site, index) for site in found for index in np.ndindex(*shapes[site])]
    values = [range(len(split.enumeration.variables[site].support)) for site, _ in sites]
    constrained = split.constrain_global(z, {})
    row = {key: value[:1] for key, value in silos[first].items()}

    def log_joint(combination: Any) -> Any:
        discrete = {site: jnp.zeros((1, *shapes[site]), int) for site in found}
        for (site, index), value in zip(sites, combination, strict=True):
            discrete[site] = discrete[site].at[(0, *index)].set(value)
        model = handlers.seed(MODELS[name].model, 0)
        return log_density(model, (), row, constrained | discrete)[0]

    combinations = np.array(list(itertools.product(*values)))
    probability = np.asarray(jax.nn.softmax(run(jax.vmap(log_joint), combinations)))
    drawn = np.stack([found[site][(slice(None), 0, *index)] for site, index in sites], axis=1)
    for combination, expected in zip(combinations, probability, strict=True):
        within(np.mean(np.all(drawn == combination, axis=1)), expected)


def test_draws_of_a_silos_class_use_all_its_rows() -> None:
    silos, split = split_of("class of silo")
    data = padded(silos, split, "s0")
    y = silos["s0"]["y"]
    log_odds = np.sum(dist.Normal(1, 1).log_prob(y) - dist.Normal(0, 1).log_prob(y))  # p = 1/2
    within(draws_of(split, data, jnp.zeros(1))["kind"].mean(), np.asarray(jax.nn.sigmoid(log_odds)))


def test_draws_do_not_depend_on_padding() -> None:
    silos, split = split_of("class and intercept")
    plain = silo_data(silos, "s0", split.spec, split.partition.axes)
    one, other = (draws_of(split, data, jnp.ones(split.dim)) for data in (plain, padded(silos, split, "s0")))
    assert np.array_equal(one["kind"], other["kind"][:, :3])


def test_values_do_not_start_at_zero_and_deterministic_sites_see_them() -> None:
    silos, split = split_of("dice")
    data = padded(silos, split, "s0")
    draw = lambda key: split.constrain_local(jnp.zeros(1), {}, split.theta, data, key)
    drawn = run(jax.vmap(draw), jax.random.split(jax.random.key(0), 50))
    assert set(np.unique(drawn["die"])) == {1, 2, 3}
    assert np.array_equal(drawn["pips"], 2 * drawn["die"])
    assert split.constrain_local(jnp.zeros(1), {}, split.theta, data) == {}  # without a key there is nothing to show


# --- fits -----------------------------------------------------------------------------------------------------------


def apart(*sizes: int) -> Silos:
    """Two classes at -3 and 3, as many of one as of the other."""
    return Silos({f"s{j}": dict(y=normal(j, n) + real(np.where(np.arange(n) % 2, 3, -3))) for j, n in enumerate(sizes)})


def known_fit(silos: Silos) -> Any:
    """A posterior that is a point: equal weights, means -3 and 3."""
    fit = given_fit(classes, silos, scale=0.0)
    return fit.__class__(**{**fit.__dict__, "state": fit.state._replace(server=fit.state.server | {"loc": TRUTH})})


TRUTH = jnp.array([0.0, -3.0, 3.0])


def test_predictions_for_a_silos_units_keep_their_classes_and_new_units_have_any() -> None:
    silos = apart(6, 4)
    fit = known_fit(silos)
    own = np.asarray(fit.predict(jax.random.key(0), silo="s0", num_samples=300)["y"])
    assert np.array_equal(np.sign(own.mean(0)), np.sign(silos["s0"]["y"]))
    new = np.asarray(fit.predict(jax.random.key(0), dict(y=np.zeros(5, "f")), silo="s0", num_samples=300)["y"])
    assert np.all(np.abs(np.mean(new > 0, axis=0) - 0.5) < 4.5 * np.sqrt(0.25 / 300))


def test_predictions_for_new_rows_of_a_silos_counties_keep_the_counties_classes() -> None:
    def model(county, num_counties, y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("counties", num_counties):
            kind = numpyro.sample("kind", dist.Bernoulli(0.5))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu + 10 * kind[county], 1), obs=y)

    county = np.arange(12) % 3
    y = real(np.where(county == 1, 10.0, 0.0))
    silos = Silos([dict(county=county, num_counties=3, y=y), dict(county=county[:4] % 2, num_counties=2, y=y[:4])])
    fit = given_fit(model, silos, scale=0.0)
    new = fit.predict(jax.random.key(0), dict(county=np.array([1, 0]), y=np.zeros(2, "f")), silo="0", num_samples=50)
    assert np.all(np.round(np.asarray(new["y"]).mean(0) / 10) == [1, 0])


@pytest.mark.slow
def test_arviz_has_the_log_likelihood_of_the_mixture() -> None:
    silos = apart(6, 4)
    found = known_fit(silos).to_arviz(num_samples=2, log_likelihood=True, posterior_predictive=True)
    mixture = dist.MixtureSameFamily(dist.Categorical(jnp.ones(2) / 2), dist.Normal(TRUTH[1:], 1))
    expected = mixture.log_prob(np.concatenate([silos[name]["y"] for name in silos.names]))
    np.testing.assert_allclose(found["log_likelihood"]["y"].values[0, 0], expected, rtol=1e-4)
    assert found["posterior_predictive"]["y"].shape == (1, 2, 10)


def test_a_log_likelihood_with_a_latent_in_it_is_left_out() -> None:
    case = MODELS["class and intercept"]
    found = given_fit(case.model, case.silos()).to_arviz(num_samples=2, log_likelihood=True)
    assert set(found["log_likelihood"].data_vars) == {"x"}


@pytest.mark.merge
def test_pooled_nuts() -> None:
    silos = apart(9, 6)
    ours = nuts(classes, silos, num_warmup=50, num_samples=50, num_chains=1, progress_bar=False, rng_key=KEY)
    point = origin(ours.split, ours.data)
    by_hand = split_model(gaussian_mixture, silos, check=False)
    arrays = (ours.data.arrays, ())
    energies = [run(lambda point, s=split: potential(s, {}, *arrays, point), point) for split in (ours.split, by_hand)]
    np.testing.assert_allclose(*energies, rtol=1e-5)
    local = ours.sample_local("s1", group_by_chain=True)
    assert local["kind"].shape == (1, 50, 6)
    same = local["kind"] == local["kind"][..., :1]
    assert np.array_equal(same.mean((0, 1)) > 0.5, np.arange(6) % 2 == 0)  # every other row has the first one's class


@pytest.mark.slow
def test_a_fit_is_that_of_the_mixture() -> None:
    """The same key, the same draws, the same densities: the same path, up to rounding."""
    silos = apart(9, 6, 3)
    run = lambda model: nf.SFVI(model).run(KEY, silos, 30, progress_bar=False)
    ours, theirs = run(classes), run(gaussian_mixture)
    np.testing.assert_allclose(ours.history["loss"], theirs.history["loss"], rtol=1e-3)
    for site, draws in ours.sample(KEY, 50).items():
        np.testing.assert_allclose(draws, theirs.sample(KEY, 50)[site], rtol=1e-2, atol=1e-3)


KEY = jax.random.key(3)


@pytest.mark.slow
def test_components_that_start_alike_part():
    """Two clusters at -2 and 2: from the default start the components find them, not their common mean."""

    def mixture(y):
        weight = numpyro.sample("weight", dist.Beta(2.0, 2.0))
        with numpyro.plate("components", 2):
            mean = numpyro.sample("mean", dist.Normal(0.0, 3.0))
        with numpyro.plate("rows", y.shape[0]):
            k = numpyro.sample("k", dist.Bernoulli(weight))
            numpyro.sample("y", dist.Normal(mean[k], 0.5), obs=y)

    rng = np.random.default_rng(0)
    draw = lambda n: (np.where(rng.random(n) < 0.5, -2.0, 2.0) + 0.5 * rng.normal(size=n)).astype("f")
    silos = nf.Silos([dict(y=draw(n)) for n in (20, 30)])
    fit = nf.SFVI(mixture).run(jax.random.key(0), silos, 500, progress_bar=False)
    means = np.sort(np.asarray(fit.sample(jax.random.key(1), 200)["mean"]).mean(axis=0))
    np.testing.assert_allclose(means, [-2.0, 2.0], atol=0.4)
