"""Which site lives where: the labels, the questions, the table."""

from functools import partial, wraps
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import MODELS, binary, counties, hospitals, item_response, no_locals, normal, regression, rows
from sealed import sealed

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.split import split
from numpyro_fed.model.partition import partition
from numpyro_fed.model.partition_table import Partition
from numpyro_fed.model.trace import PartitionError


@pytest.mark.parametrize("name", MODELS)
def test_labels(name: str) -> None:
    """Also from shapes alone: arrays that nobody may read are divided alike."""
    case = MODELS[name]
    silos = case.silos()
    found = partition(case.model, silos, **case.options)
    assert partition(case.model, sealed(silos), **case.options) == found
    assert found.global_sites == case.global_sites
    assert found.local_sites == case.local_sites
    assert found.enumerated_sites == case.enumerated_sites
    assert found.observed_sites == case.observed_sites
    assert found.params == case.params
    assert set(found.silo_plates) == set(case.silo_plates)
    assert len(found.silo_plates) == len(set(found.silo_plates))
    terms = [site for site in found.sites if site.role in ("observed", "factor")]
    assert tuple(site.name for site in terms if site.at_server) == case.server_terms
    assert found.num_silos == silos.num_silos


def test_every_argument_lies_on_at_most_one_axis() -> None:
    for name in ("one row each", "crossed own plates of equal sizes", "long format", "nested arguments"):
        case = MODELS[name]
        placed = [path for axis in partition(case.model, case.silos()).axes for path in axis.arguments]
        assert len(placed) == len(set(placed)), name


# --- one silo, equal silos, equal covariates ------------------------------------------------------------------------


def groups(x, y):
    """Group effects over the rows of x, seen in y."""
    with numpyro.plate("groups", x.shape[0]):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a.sum(), 1), obs=y)


def same_covariates(*sizes: int) -> Silos:
    return Silos([dict(x=normal(0, n, 2), y=normal(j, n)) for j, n in enumerate(sizes)])


def random_effects(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(x @ beta, 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


@pytest.mark.parametrize("sizes", [(4,), (4, 4), (1, 1), (2, 2, 2)], ids=str)
def test_equal_silos_with_equal_covariates_keep_their_rows(sizes: tuple[int, ...]) -> None:
    found = partition(random_effects, same_covariates(*sizes))
    assert found.global_sites == ("beta",)
    assert found.local_sites == ("b",)
    assert found.silo_plates == ("rows",)
    assert [axis.arguments for axis in found.axes] == [("x", "y")]


def test_features_as_many_as_rows_are_not_rows() -> None:
    """x (3, 3), and a vector of 3 prior scales beside 3 rows: only the rows grow together."""

    def model(x, y, scales):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]))
        with numpyro.plate("rows", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(x @ (beta * scales), 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    silos = Silos([dict(x=normal(j, 3, 3), y=normal(j, 3), scales=normal(9, 3)) for j in range(2)])
    found = partition(model, silos)
    assert (found.global_sites, found.local_sites) == (("beta",), ("b",))
    assert [axis.arguments for axis in found.axes] == [("x", "y")]


def test_many_arguments_of_one_length_with_a_stranger_among_them() -> None:
    def model(stranger, y, **columns):
        beta = numpyro.sample("beta", dist.Normal(0, 1).expand([4]))
        with numpyro.plate("rows", y.shape[0]):
            mean = sum(columns.values()) * (beta @ stranger)
            numpyro.sample("y", dist.Normal(mean, 1), obs=y)

    columns = {f"c{i}": normal(i, 4) for i in range(11)}
    found = partition(model, Silos([dict(stranger=normal(0, 4), y=normal(j, 4), **columns) for j in range(2)]))
    assert [set(axis.arguments) for axis in found.axes] == [{"y", *columns}]


# --- questions ------------------------------------------------------------------------------------------------------


def counted(num_groups, idx, y):
    with numpyro.plate("groups", num_groups):
        a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a[idx], 1), obs=y)


def counted_silos(*counts: int) -> Silos:
    return Silos(
        [dict(num_groups=k, idx=np.arange(n) % k, y=normal(n, n)) for n, k in zip((5, 7), counts, strict=True)]
    )


def hospital_covariates(w, y):
    with numpyro.plate("covariates", w.shape[0]):
        gamma = numpyro.sample("gamma", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(w @ gamma, 1), obs=y)


def hospital_silos(*sizes: int) -> Silos:
    return Silos([dict(w=normal(j, 3), y=normal(j, n)) for j, n in enumerate(sizes)])


QUESTIONS: dict[str, tuple[Any, Any, str, str]] = {
    "an int": (counted, partial(counted_silos, 2, 2), "groups", "a"),
    "one silo": (counted, lambda: Silos([counted_silos(2, 2)["0"]]), "groups", "a"),
    "a vector": (hospital_covariates, partial(hospital_silos, 3, 5), "covariates", "gamma"),
    "a vector as long as the rows": (hospital_covariates, partial(hospital_silos, 3, 3), "covariates", "gamma"),
    "groups that nothing counts": (groups, partial(same_covariates, 4), "groups", "a"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_asks_where_shapes_cannot_tell(name: str) -> None:
    model, silos, plate, latent = QUESTIONS[name]
    with pytest.raises(PartitionError) as caught:
        partition(model, silos())
    message = str(caught.value)
    for words in (
        f"local=['{plate}']",
        f"shared=['{plate}']",
        f"latents: {latent}",
        "the same size",
        "nf.Silos(..., shared=)",
    ):
        assert words in message
    table = message.split("\n\n")[1]
    assert f"{latent}  " in table
    assert "global or local?" in table


@pytest.mark.parametrize("name", QUESTIONS)
def test_answers(name: str) -> None:
    model, silos, plate, latent = QUESTIONS[name]
    for answer in (plate, latent):
        assert partition(model, silos(), local=answer).local_sites == (latent,)
        assert partition(model, silos(), shared=[answer]).global_sites == (latent,)
    assert plate in partition(model, silos(), local=plate).silo_plates
    assert plate not in partition(model, silos(), shared=plate).silo_plates


def test_counts_that_differ_are_the_silos_own() -> None:
    assert partition(counted, counted_silos(2, 3)).local_sites == ("a",)


def test_counts_in_shared_are_shared() -> None:
    silos = Silos([dict(idx=np.arange(n) % 2, y=normal(n, n)) for n in (5, 7)], shared=dict(num_groups=2))
    assert partition(counted, silos).global_sites == ("a",)


def test_counts_of_split_are_the_silos_own_even_when_equal() -> None:
    county = np.array([0, 1, 2, 3])
    silos = split(
        ["n", "n", "s", "s"], groups=dict(county="num_counties"), county=county, num_counties=4, y=normal(0, 4)
    )
    assert {silos[name]["num_counties"] for name in silos.names} == {2}
    assert partition(counties, silos).local_sites == ("alpha",)


def test_index_left_out_of_groups_stays_global() -> None:
    hospital = np.array([0, 0, 1, 1, 1])
    silos = split(hospital, hospital=hospital, num_hospitals=2, y=normal(0, 5))
    assert partition(hospitals, silos).global_sites == ("mu", "a")


def test_latents_whose_prior_uses_the_silos_own_values_cannot_be_shared() -> None:
    """Two groups in each silo, with covariates of their own. Whether these differ the server does not see: it asks."""

    def model(u, idx, y):
        with numpyro.plate("groups", u.shape[0]):
            a = numpyro.sample("a", dist.Normal(u, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(a[idx], 1), obs=y)

    silos = Silos([dict(u=normal(seed, 2), idx=np.array([0, 1, 1]), y=normal(3, 3)) for seed in range(2)])
    with pytest.raises(PartitionError, match=r"local=\['groups'\].*shared=\['groups'\]"):
        partition(model, silos)
    assert partition(model, silos, local="groups").local_sites == ("a",)
    with pytest.raises(PartitionError, match="each silo would have another prior"):
        partition(model, silos, shared="groups")


# --- overrides ------------------------------------------------------------------------------------------------------


def test_local_names_a_site_or_a_plate() -> None:
    silos = Silos([dict(y=binary(j, n, 3)) for j, n in enumerate((2, 4))])
    assert partition(item_response, silos, local=["items"]).local_sites == ("difficulty", "ability")
    assert partition(item_response, silos, local="difficulty").local_sites == ("difficulty", "ability")
    assert partition(item_response, silos, local=["items"]).silo_plates == ("students", "students_", "items")


def test_shared_rows_are_global() -> None:
    """The same 4 subjects seen by every laboratory."""
    found = partition(random_effects_of_subjects, Silos([dict(y=normal(j, 4)) for j in range(3)]), shared=["subjects"])
    assert found.global_sites == ("b",)
    assert found.silo_plates == ()
    assert not found["y"].at_server


def random_effects_of_subjects(y):
    with numpyro.plate("subjects", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


# --- whose term it is -----------------------------------------------------------------------------------------------


def test_ragged_arguments_that_the_model_ignores_are_padded_all_the_same() -> None:
    def model(x, y, ids):
        no_locals(x, y)

    silos = Silos([dict(x=normal(j, 3, 2), y=normal(j, 3), ids=np.arange(j + 1)) for j in range(2)])
    assert ("ids",) in [axis.arguments for axis in partition(model, silos).axes]


def test_support_that_depends_on_a_latent_is_left_to_inference() -> None:
    def model(y):
        top = numpyro.sample("top", dist.HalfNormal(1.0))
        edge = numpyro.param("edge", 1.0)
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("latent", dist.Uniform(-1, top), obs=y)
            numpyro.sample("theta", dist.Uniform(-1, edge), obs=y)
            numpyro.sample("fixed", dist.Uniform(-1, 1), obs=y)

    assert partition(model, rows(3, 2)()).static_support == ("fixed",)


def test_a_distribution_without_support_can_be_observed() -> None:
    class Bare(dist.Distribution):
        def __init__(self, loc: Any) -> None:
            self.loc = loc
            super().__init__(jnp.shape(loc), ())

        def log_prob(self, value: Any) -> Any:
            return -((value - self.loc) ** 2)

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", Bare(mu + jnp.zeros(y.shape[0])), obs=y)

    found = partition(model, rows(3, 2)())
    assert found.observed_sites == ("y",)
    assert found.static_support == ()


def test_params_may_be_trees() -> None:
    """As those of a neural network are."""

    def model(x, y):
        net = numpyro.param("net", {"w": jnp.ones(2), "b": jnp.zeros(())})
        with numpyro.plate("rows", y.shape[0]):
            b = numpyro.sample("b", dist.Normal(x @ net["w"] + net["b"], 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)

    found = partition(model, regression(3, 2)())
    assert (found.params, found.local_sites) == (("net",), ("b",))


# --- the table ------------------------------------------------------------------------------------------------------

TABLE = """\
site   role                      plates    shape             what leaves the silo
-----  ------------------------  --------  ----------------  ----------------------
mu     global                    -         ()                a gradient or a factor
tau    global                    -         ()                a gradient or a factor
alpha  local                     counties  (n[counties],)    nothing
y      observed                  rows      (n[rows],)        nothing
2 global dimensions, local latents stay in their silos: try nf.EP(model).run(jax.random.key(0), silos)"""


def table_of(name: str) -> Partition:
    case = MODELS[name]
    return partition(case.model, case.silos(), **case.options)


def test_table() -> None:
    printed = str(table_of("long format"))
    squeeze = lambda text: [" ".join(line.replace("-", "").split()) for line in text.splitlines()]
    assert squeeze(printed) == squeeze(TABLE)
    assert repr(table_of("long format")) == printed
    starts = {
        line.index(word)
        for line, word in zip(printed.splitlines()[:4], ["role", "--", "global", "global"], strict=False)
    }
    assert len(starts) <= 2  # columns are aligned


def test_table_shows_the_server_params_and_deterministics() -> None:
    assert "factor (server, once)" in str(table_of("factors"))
    assert "param (theta)" in str(table_of("theta"))
    assert "unused" not in str(table_of("theta"))
    table = str(table_of("deterministics"))
    assert "deterministic of globals" in table
    assert "deterministic, local" in table


def test_table_shows_what_is_summed_out() -> None:
    (line,) = [line for line in str(table_of("classes")).splitlines() if line.startswith("kind")]
    assert " ".join(line.split()) == "kind local, summed out rows (n[rows],) nothing"
    assert "local latents stay in their silos" in str(table_of("classes"))


def test_table_in_a_notebook() -> None:
    html = table_of("long format")._repr_html_()
    assert html.startswith("<table>")
    assert html.count("<tr>") == 5
    assert "<td style='text-align:left'>alpha</td>" in html
    assert "nf.EP(model)" in html


@pytest.mark.parametrize(
    "size, theta, method",
    [
        (2, False, "EP(model)"),
        (200, False, "EP(model)"),
        (201, False, "SFVI(model)"),
        (501, False, 'SFVI(model, guide=nf.guides.StructuredNormal(global_cov="diagonal"))'),
        (2, True, "SFVI(model)"),  # EP has no place for theta
    ],
)
def test_the_last_line_names_a_method_that_takes_the_model(size: int, theta: bool, method: str) -> None:
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1).expand([size]).to_event(1))
        scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive) if theta else 1.0
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(mu.sum(), scale), obs=y)

    last = str(partition(model, rows(3, 4)())).splitlines()[-1]
    assert last.startswith(f"{size} global dimensions, no local latents")
    assert ("numpyro.param" in last) == theta
    assert last.endswith(f": try nf.{method}.run(jax.random.key(0), silos)")


def test_the_last_line_has_the_answers_that_were_given() -> None:
    """It can be pasted: without them it would be of another model."""

    def model(y):
        s = numpyro.sample("s", dist.HalfNormal(1))
        u = numpyro.sample("u", dist.Normal(0, s))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(u, 1), obs=y)

    silos = rows(3, 4)()
    assert "try nf.EP(model, local=['u']).run(" in str(partition(model, silos, local="u"))
    assert "try nf.EP(model, shared=['u']).run(" in str(partition(model, silos, shared=["u"]))


# --- work ----------------------------------------------------------------------------------------------------------


def test_the_model_is_traced_about_once_for_each_shape() -> None:
    calls = []

    @wraps(random_effects)
    def counted(x, y):
        calls.append(len(y))
        return random_effects(x, y)

    found = partition(counted, Silos([dict(x=normal(n, n, 2), y=normal(n, n)) for n in range(1, 31)]))
    assert found.local_sites == ("b",)
    assert len(calls) <= 30 + 5  # and a few times with other lengths


def test_an_axis_that_does_not_grow_says_why() -> None:
    def written_in_the_model(x, y):
        weight = {2: 1.0, 3: 2.0}[x.shape[0]]
        numpyro.sample("y", dist.Normal(weight * numpyro.sample("mu", dist.Normal(0, 1)), 1), obs=y)

    silos = Silos({"leeds": dict(x=normal(0, 2), y=normal(0)), "york": dict(x=normal(0, 3), y=normal(1))})
    with pytest.raises(PartitionError, match=r"twice as many: does .* With twice as many: KeyError: [46]"):
        partition(written_in_the_model, silos)
