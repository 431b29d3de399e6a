"""The split is exact: log_prior + sum_j log_silo_j is NumPyro's own log density of the pooled model."""

from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import MODELS, Case, normal, real
from numpyro import handlers
from numpyro.contrib.funsor import config_enumerate, enum
from numpyro.infer.util import constrain_fn, potential_energy
from tiers import tiers

from numpyro_fed.data import stack as stack_module
from numpyro_fed.data.axis import Axis
from numpyro_fed.data.padding import SiloData, silo_data
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.stack import Stack, bucket_names, stack_of
from numpyro_fed.model import certificate
from numpyro_fed.model.build import split_model
from numpyro_fed.model.certificate import certify
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import PartitionError

# Programs that run once: compiled without optimisation, in a third of the time.
QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Point(NamedTuple):
    """z_G, theta, and each silo's z_L by name, for its padded rows too."""

    z: Any
    theta: dict[str, Any]
    local: dict[str, dict[str, Any]]


def run(function: Any, *args: Any) -> Any:
    return jax.jit(function).lower(*args).compile(compiler_options=QUICK)(*args)


def padded_data(silos: Silos, split: SplitModel) -> dict[str, SiloData]:
    """Each silo's data as its bucket pads them."""
    stack = stack_for(silos, split)
    return {name: stack.data(name) for name in silos.names}


def stack_for(silos: Silos, split: SplitModel) -> Stack:
    return stack_of(silos, silos, split.spec, split.partition.axes)


def random_point(split: SplitModel, data: dict[str, SiloData], seed: int = 0) -> Point:
    draws = np.random.default_rng(seed)
    noise = lambda shape: real(0.5 * draws.normal(size=shape))
    return Point(
        noise(split.dim),
        jax.tree.map(lambda start: start + noise(jnp.shape(start)), split.theta),
        {
            name: {group.name: noise((group.num_rows(one.mask), group.size)) for group in split.groups}
            for name, one in data.items()
        },
    )


def real_rows(split: SplitModel, local: dict[str, Any], mask: dict[str, Any]) -> dict[str, Any]:
    """z_L without its padded rows."""
    return {group.name: local[group.name][np.asarray(split.row_mask(group, mask))] for group in split.groups}


def terms(split: SplitModel, stack: Stack, point: Point) -> tuple[Any, dict[str, Any]]:
    """log_prior, and log_silo by name, computed as an engine does: bucket by bucket, vmapped."""
    found: dict[str, Any] = {}
    for bucket, arrays in zip(stack.buckets, stack.arrays, strict=True):
        local = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(point.local[name] for name in bucket.names))
        log_silo = lambda z_local, args, mask: split.log_silo(
            point.z, z_local, point.theta, SiloData(args, mask, split.shared)
        )
        values = jax.vmap(log_silo)(local, *arrays)
        found |= dict(zip(bucket.names, values, strict=True))
    return split.log_prior(point.z, point.theta), found


def pooled_log_density(case: Case, split: SplitModel, silos: Silos, point: Point, cut: dict[str, Any]) -> Any:
    """What NumPyro says of all the data together; ``cut`` has the silos' z_L without padded rows."""
    plain = {name: silo_data(silos, name, split.spec, split.partition.axes).mask for name in silos.names}
    by_silo = [split.unpack(cut[name], plain[name]) for name in silos.names]
    values = split.unravel(point.z) | split.constrain_theta(point.theta) | split.constants
    for site in split.partition.local_sites:
        together = case.join(site, [values_j[site] for values_j in by_silo])
        values |= together if isinstance(together, dict) else {site: together}
    model = case.pooled_model or case.model
    by_funsor = bool(case.enumerated_sites) and case.pooled_model is None
    if by_funsor:
        model = enum(config_enumerate(model), first_available_dim=-3)
    seeded = handlers.seed(model, jax.random.PRNGKey(0))
    return -potential_energy(seeded, (), case.pooled(silos), values, enum=by_funsor)


def case_at_random(name: str) -> tuple[Case, Silos, SplitModel, dict[str, SiloData], Point]:
    return _case_at_random(name, jax.config.read("jax_enable_x64"))


@cache
def _case_at_random(name: str, x64: bool) -> tuple[Case, Silos, SplitModel, dict[str, SiloData], Point]:
    case = MODELS[name]
    silos = case.silos()
    split = split_model(case.model, silos, **case.options, check=False)
    data = padded_data(silos, split)
    return case, silos, split, data, random_point(split, data)


# --- exactness ------------------------------------------------------------------------------------------------------


SOME = ["glmm", "long format", "nested plates", "crossed own plates", "obs_mask", "reshape", "weights"]
DISCRETE = [name for name, case in MODELS.items() if case.enumerated_sites]


class Exactness(NamedTuple):
    """One program a model."""

    ours: Any  # log_prior + sum of log_silo
    theirs: Any  # NumPyro's log density of the pooled model
    gradient: Point  # of ours
    together: tuple[Any, dict[str, Any]]  # log_prior, and log_silo by name
    apart: tuple[Any, dict[str, Any]] | None  # the same with silos in another order, each padded by itself


def computed(name: str) -> tuple[SplitModel, dict[str, SiloData], Exactness]:
    case, silos, split, data, point = case_at_random(name)
    cut = {silo: real_rows(split, point.local[silo], data[silo].mask) for silo in silos.names}
    alone, moved = None, point
    if name in (*SOME, *DISCRETE):
        assert any(not np.all(mask) for one in data.values() for mask in one.mask.values()), "nothing is padded here"
        alone, moved = otherwise_padded(split, silos, point, cut)

    def everything(point: Point, cut: dict[str, Any], moved: Point) -> Exactness:
        def ours(point: Point) -> Any:
            found = terms(split, stack_for(silos, split), point)
            return found[0] + sum(found[1].values()), found

        (value, together), gradient = jax.value_and_grad(ours, has_aux=True)(point)
        theirs = pooled_log_density(case, split, silos, point, cut)
        apart = None if alone is None else terms(split, alone, moved)
        return Exactness(value, theirs, gradient, together, apart)

    return split, data, run(everything, point, cut, moved)


def otherwise_padded(split: SplitModel, silos: Silos, point: Point, cut: dict[str, Any]) -> tuple[Stack, Point]:
    """Silos backwards, each in a bucket of its own; the same values in real rows, others in padded ones."""
    backwards = Silos({silo: silos.own(silo) for silo in reversed(silos.names)}, shared=silos.shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack_module, "bucket_names", lambda names, axes: [[name] for name in names])
        stack = stack_for(backwards, split)
    data = {name: stack.data(name) for name in silos.names}
    local = random_point(split, data, seed=1).local
    for silo in silos.names:
        for group in split.groups:
            local[silo][group.name][np.asarray(split.row_mask(group, data[silo].mask))] = cut[silo][group.name]
    return stack, point._replace(local=local)


@pytest.mark.parametrize("name", tiers(MODELS, *list(MODELS)[::2]))  # all of them, with the slow tests
def test_sum_of_terms_is_the_pooled_log_density(name: str, x64: None) -> None:
    """To ten digits; gradients are finite, those of padded rows zero; padding, buckets and order change nothing."""
    split, data, found = computed(name)
    assert found.ours.dtype == np.float64 and np.isfinite(found.theirs)
    np.testing.assert_allclose(found.ours, found.theirs, rtol=1e-10)
    check_gradient(split, data, found.gradient)
    if found.apart is not None:
        np.testing.assert_allclose(found.together[0], found.apart[0], rtol=1e-12)
        for silo in data:
            np.testing.assert_allclose(found.together[1][silo], found.apart[1][silo], rtol=1e-10)


@pytest.mark.parametrize("name", [*SOME, "class and intercept"])
def test_sum_of_terms_in_float32(name: str) -> None:
    split, data, found = computed(name)
    assert found.ours.dtype == np.float32
    np.testing.assert_allclose(found.ours, found.theirs, rtol=1e-5)
    check_gradient(split, data, found.gradient)


def check_gradient(split: SplitModel, data: dict[str, SiloData], gradient: Point) -> None:
    for leaf in jax.tree.leaves(gradient):
        assert np.all(np.isfinite(leaf))
    for silo, one in data.items():
        for group in split.groups:
            padded_rows = ~np.asarray(split.row_mask(group, one.mask))
            assert not np.any(np.asarray(gradient.local[silo][group.name])[padded_rows])


def test_active_elements_are_those_that_the_density_depends_on() -> None:
    for name in ("mask", "obs_mask"):
        _, _, split, data, point = case_at_random(name)
        gradient, active = run(partial(gradient_and_active, split), point, data["s0"])
        for group in split.groups:
            assert np.array_equal(np.asarray(gradient[group.name]) != 0, np.asarray(active[group.name]))


def gradient_and_active(split: SplitModel, point: Point, data: SiloData) -> tuple[Any, Any]:
    local = point.local["s0"]
    gradient = jax.grad(split.log_silo, argnums=1)(point.z, local, point.theta, data)
    return gradient, split.evaluate(point.z, local, point.theta, data).active


def test_a_masked_local_site_of_events_is_inactive_as_a_whole() -> None:
    def model(y, present):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            with handlers.mask(mask=present):
                numpyro.sample("whole", dist.Dirichlet(jnp.ones(3)))
            numpyro.sample("parts", dist.Normal(jnp.zeros((y.shape[0], 2)), 1).mask(present[:, None]).to_event(1))
            with handlers.mask(mask=False):
                numpyro.sample("never", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(mu, 1), obs=y)

    silos = Silos(
        [dict(y=normal(0, 3), present=np.array([True, False, True])), dict(y=normal(0, 1), present=np.ones(1, bool))]
    )
    split = split_model(model, silos, check=False)
    data = padded_data(silos, split)["0"]
    active = run(lambda data: split.evaluate(jnp.zeros(1), split.zeros_local(data.mask), {}, data).active, data)
    expected = np.array([[1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0]], bool)
    assert np.array_equal(np.asarray(active["rows"])[:3], expected)
    assert not np.any(np.asarray(active["rows"])[3:])


# --- layout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_pack_and_unpack_are_inverse(name: str) -> None:
    _, silos, split, data, point = case_at_random(name)
    np.testing.assert_array_equal(split.ravel(split.unravel(point.z)), point.z)
    assert len(split.coordinate_names()) == split.dim
    for silo in silos.names:
        values = split.unpack(point.local[silo], data[silo].mask)
        assert set(values) == set(split.partition.local_sites)
        again = split.pack(values, data[silo].mask)
        for group in split.groups:
            np.testing.assert_array_equal(again[group.name], point.local[silo][group.name])


CONSTRAINED = ["supports", "uniform bounds", "constrained locals", "deterministics", "reparametrised", "reshape"]


@pytest.mark.parametrize("name", [*CONSTRAINED, "crossed own plates", "scan", "theta", "silo level"])
def test_constrained_values_are_numpyros(name: str) -> None:
    case, silos, split, data, point = case_at_random(name)
    axes = split.partition.axes
    silo = min(silos.names, key=lambda name: sum(axis.lengths[name] for axis in axes))
    lengths = {axis.name: axis.lengths[silo] for axis in axes}
    padded = {axis: mask.shape[0] for axis, mask in data[silo].mask.items()}
    plain = silo_data(silos, silo, split.spec, axes)

    def both(point: Point) -> tuple[dict[str, Any], dict[str, Any]]:
        cut = split.unpadded_local(point.local[silo], lengths, padded)
        params = split.constrain_theta(point.theta) | split.constants
        model = handlers.seed(handlers.substitute(case.model, data=params), jax.random.PRNGKey(0))
        values = split.unravel(point.z) | split.unpack(cut, plain.mask)
        theirs = constrain_fn(model, (), silos[silo], values, return_deterministic=True)
        local = split.constrain_local(point.z, point.local[silo], point.theta, data[silo])
        ours = split.constrain_global(point.z, point.theta) | split.unpadded(local, lengths, padded)
        return ours, theirs

    ours, theirs = run(both, point)
    assert set(ours) == set(theirs)
    for site, value in theirs.items():
        np.testing.assert_allclose(ours[site], value, rtol=1e-6, atol=1e-6, err_msg=site)


def test_the_server_needs_no_valid_data() -> None:
    """Its terms are traced on zeros, here as the standard errors of observations, and NumPyro validates scales."""
    _, _, split, _, point = case_at_random("known errors")
    with numpyro.validation_enabled():
        assert np.isfinite(split.log_prior(point.z, point.theta))
        assert set(split.constrain_global(point.z, point.theta)) == {"mu", "tau"}


def test_deterministics_that_mix_rows_are_right_without_padded_rows() -> None:
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(mu, 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)
        numpyro.deterministic("average", b.mean())

    silos = Silos({"small": dict(y=normal(0, 2)), "large": dict(y=normal(1, 3))})
    split = split_model(model, silos, check=False)
    data = padded_data(silos, split)["small"]
    num_rows = data.mask["rows"].shape[0]
    z_local = np.full((2, num_rows, 1), 50.0, "f")  # two draws, with nonsense in padded rows
    z_local[:, :2, 0] = [[1, 2], [3, 4]]
    cut = split.unpadded_local({"rows": z_local}, {"rows": 2}, {"rows": num_rows})
    plain = silo_data(silos, "small", split.spec, split.partition.axes)
    for draw, expected in enumerate([1.5, 3.5]):
        one = {group: rows[draw] for group, rows in cut.items()}
        assert split.constrain_local(jnp.zeros(1), one, {}, plain)["average"] == expected


# --- the certificate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["long format", "theta", "factors", "obs_mask", "silo level", "exposure"])
def test_certificate_is_given(name: str) -> None:
    case = MODELS[name]
    silos = case.silos()
    assert certify(split_model(case.model, silos, **case.options, check=False), silos) is None


def mean_of_rows(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y - y.mean())


def neighbours(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(b + jnp.roll(b, 1), 1), obs=y)


def number_of_rows(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.factor("y", dist.Normal(mu, 1).log_prob(y) / y.shape[0])


def sum_of_locals(y):
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)
    numpyro.factor("zero", -(b.sum() ** 2))


@pytest.mark.parametrize(
    ("model", "site"), [(mean_of_rows, "y"), (neighbours, "y"), (number_of_rows, "y"), (sum_of_locals, "zero")]
)
def test_certificate_is_refused_to_a_model_that_mixes_rows(model: Any, site: str) -> None:
    silos = Silos({"leeds": dict(y=normal(0, 5)), "york": dict(y=normal(1, 3))})
    with pytest.raises(PartitionError, match=f"silo 'york'.*site '{site}' mixes rows.*beforehand"):
        split_model(model, silos)


def process(y):
    """All rows of a silo in one event: a latent path, and its observations."""
    n = y.shape[0]
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    path = numpyro.sample("path", dist.MultivariateNormal(jnp.zeros(n), scale_tril=scale * jnp.tri(n)))
    numpyro.sample("y", dist.Normal(path, 1).to_event(1), obs=y)


@pytest.mark.parametrize("model", [mean_of_rows, neighbours, process])
def test_rows_may_mix_in_silos_of_equal_size(model: Any) -> None:
    """There no row need be padded, and none is, though 5 would be rounded up to 8 for speed."""
    silos = Silos([dict(y=normal(0, 5)), dict(y=normal(1, 5))])
    split = split_model(model, silos)
    ((args, _),) = stack_for(silos, split).arrays
    assert args[0].shape == (2, 5)


def test_lengths_are_rounded_up_where_rows_do_not_mix() -> None:
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        mean = numpyro.deterministic("mean", mu + jnp.zeros_like(y))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    silos = Silos([dict(y=normal(0, 13)), dict(y=normal(1, 13))])
    split = split_model(model, silos)
    ((args, _),) = stack_for(silos, split).arrays
    assert args[0].shape == (2, 16)


def test_a_density_that_is_not_finite_is_named() -> None:
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu, jnp.exp(y)), obs=y)

    silos = Silos({"leeds": dict(y=normal(0, 3)), "york": dict(y=real([1.0, -500.0]))})
    with pytest.raises(PartitionError, match=r"silo 'york'.*log density is (nan|-inf).*sites: y.*scale"):
        split_model(model, silos)


def test_only_four_silos_are_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    original = certificate.silo_data

    def looked_at(silos: Silos, name: str, *rest: Any) -> SiloData:
        seen.add(name)
        return original(silos, name, *rest)

    monkeypatch.setattr(certificate, "silo_data", looked_at)
    silos = Silos({f"s{n}": dict(y=normal(n, n)) for n in range(1, 8)})
    assert certify(split_model(neighbourless, silos, check=False), silos) is None
    assert len(seen) == 4
    assert {"s1", "s7"} <= seen


def neighbourless(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


# --- buckets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_padding_at_most_doubles_the_rows(seed: int) -> None:
    """However ragged, and however unlike the axes are."""
    draws = np.random.default_rng(seed)
    names = tuple(f"s{j}" for j in range(60))
    axes = tuple(
        Axis(
            f"axis{i}", (), (), {name: int(n) for name, n in zip(names, draws.lognormal(3, 1 + i, 60) + 1, strict=True)}
        )
        for i in range(1 + seed % 3)
    )
    buckets = bucket_names(names, axes)
    assert sorted(name for bucket in buckets for name in bucket) == sorted(names)
    longest = lambda bucket: sum(max(axis.lengths[name] for name in bucket) for axis in axes)
    rows, padded = sum(sum(a.lengths.values()) for a in axes), sum(len(bucket) * longest(bucket) for bucket in buckets)
    assert padded <= 2 * rows
    assert len(buckets) <= 6


def test_few_rows_are_not_worth_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times the rows are allowed, as long as they are few: 4,800, 9,600 and 19,200 of them with one size."""
    sizes = lambda times: {f"s{j}": times * (10 if j % 4 else 80) for j in range(60)}
    number = lambda times: len(bucket_names(tuple(sizes(times)), (Axis("rows", (), (), sizes(times)),)))
    assert [number(times) for times in (1, 2, 4)] == [2, 2, 2]  # as for the other tests
    monkeypatch.setattr(stack_module, "LITTLE_ROWS", 2**14)
    assert [number(times) for times in (1, 2, 4)] == [1, 1, 2]


def test_buckets_of_many_silos_are_few() -> None:
    draws = np.random.default_rng(0)
    names = tuple(map(str, range(5000)))
    axes = tuple(
        Axis(axis, (), (), {name: int(n) for name, n in zip(names, draws.lognormal(3, 2, 5000) + 1, strict=True)})
        for axis in ("rows", "groups")
    )
    assert len(bucket_names(names, axes[:1])) <= 8
    assert len(bucket_names(names, axes)) <= 64  # two axes that have nothing to do with one another
