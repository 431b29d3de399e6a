"""Bad inputs: each gives an error that names the silo, site or argument, and says what to type."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from models import binary, no_locals, normal, regression, rows
from numpyro import handlers
from numpyro.primitives import mutable

from numpyro_fed import schedules
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.split import split
from numpyro_fed.model.build import split_model
from numpyro_fed.model.partition import partition
from numpyro_fed.model.trace import PartitionError


class Bad(NamedTuple):
    action: Callable[[], Any]
    error: type[Exception]
    words: tuple[str, ...]  # all of them stand in the message


def silos_with(**changes: Any) -> Silos:
    """Two silos of a regression, one argument of silo 'york' changed."""
    return Silos(
        {"leeds": dict(x=normal(0, 4, 2), y=normal(1, 4)), "york": dict(x=normal(2, 3, 2), y=normal(3, 3)) | changes}
    )


def at(position: int, value: float, size: int = 3) -> np.ndarray:
    array = normal(0, size)
    array[position] = value
    return array


BAD_DATA: dict[str, Bad] = {
    "1 no silos": Bad(lambda: Silos({}), ValueError, ("silos is empty", "at least one")),
    "1 empty list": Bad(lambda: Silos([]), ValueError, ("silos is empty",)),
    "2 arrays in place of silos": Bad(
        lambda: Silos(dict(x=normal(0, 3), y=normal(0, 3))),
        TypeError,
        ("x, y", "one dict of model arguments per silo", "nf.Silos([data])"),
    ),
    "2 an array a silo": Bad(lambda: Silos([normal(0, 3)]), TypeError, ("silo '0'", "dict of model arguments")),
    "3 a generator": Bad(
        lambda: Silos(dict(y=normal(0, 3)) for _ in range(2)), TypeError, ("re-readable", "generator", "list")
    ),
    "3 a table": Bad(lambda: Silos(pd.DataFrame({"y": [1.0]})), TypeError, ("DataFrame", "nf.split(labels")),
    "4 two silos of one name": Bad(
        lambda: Silos({1: dict(y=normal(0, 3)), "1": dict(y=normal(0, 3))}), ValueError, ("'1'", "own name")
    ),
    "4 two labels of one name": Bad(
        lambda: split(np.array([1, "1"], object), y=normal(0, 2)), ValueError, ("'1'", "own name")
    ),
    "5 no rows": Bad(
        lambda: silos_with(x=normal(0, 0, 2), y=normal(0, 0)), ValueError, ("silo 'york'", "'x'", "0 rows", "remove")
    ),
    "6 NaN": Bad(
        lambda: silos_with(y=at(1, np.nan)), ValueError, ("silo 'york'", "'y'", "NaN", "row 1", "obs_mask", "drop")
    ),
    "6 NaN in a number": Bad(
        lambda: Silos([dict(y=normal(0, 2), offset=float("nan"))]), ValueError, ("silo '0'", "'offset'", "NaN")
    ),
    "7 Inf": Bad(
        lambda: silos_with(x=np.stack([at(0, 1), at(2, np.inf)], 1)), ValueError, ("silo 'york'", "'x'", "Inf", "row 2")
    ),
    "10 columns": Bad(
        lambda: silos_with(x=normal(0, 3, 5)), ValueError, ("silo 'york'", "'x'", "5 columns", "2 columns")
    ),
    "11 dtypes": Bad(lambda: silos_with(y=np.ones(3, np.int32)), TypeError, ("silo 'york'", "'y'", "int32", "float32")),
    "11 int and bool": Bad(
        lambda: Silos([dict(y=normal(0, 2), k=2), dict(y=normal(0, 2), k=True)]), TypeError, ("'k'", "bool", "int")
    ),
    "13 strings": Bad(
        lambda: silos_with(x=np.array(["a", "b", "c"])), TypeError, ("silo 'york'", "'x'", "strings", "codes")
    ),
    "13 objects": Bad(lambda: silos_with(x=np.array([1, None, 2])), TypeError, ("silo 'york'", "'x'", "objects")),
    "13 dates": Bad(lambda: silos_with(x=np.array(["2020-01-01"] * 3, "M8[D]")), TypeError, ("'x'", "dates")),
    "13 an option": Bad(
        lambda: silos_with(link="logit"), TypeError, ("'link'", "functools.partial(model, link='logit')")
    ),
    "13 a function": Bad(lambda: silos_with(link=jnp.exp), TypeError, ("'link'", "functools.partial(model, link=...)")),
    "14 masked array": Bad(
        lambda: silos_with(y=np.ma.masked_array(normal(0, 3))), TypeError, ("'y'", "masked", "filled", "obs_mask")
    ),
    "14 nullable": Bad(
        lambda: silos_with(y=pd.Series([1, None, 2], dtype="Int64")),
        TypeError,
        ("'y'", "Int64", "to_numpy(dtype='float32')"),
    ),
    "14 categorical": Bad(
        lambda: silos_with(y=pd.Series(list("aba"), dtype="category")), TypeError, ("'y'", "cat.codes")
    ),
    "ragged lists": Bad(
        lambda: silos_with(x=[[1.0, 2.0], [3.0]]), ValueError, ("silo 'york'", "'x'", "different lengths")
    ),
    "arguments differ": Bad(lambda: silos_with(age=normal(0, 3)), ValueError, ("age, x, y", "x, y", "every silo")),
    "nesting differs": Bad(
        lambda: Silos([dict(d={"a": normal(0, 2)}), dict(d={"b": normal(0, 2)})]), ValueError, ("d['a']", "d['b']")
    ),
    "options differ": Bad(
        lambda: Silos([dict(y=normal(0, 2), robust=r) for r in (True, False)]),
        ValueError,
        ("'robust'", "'0'", "'1'", "np.asarray(True)"),
    ),
    "own and shared": Bad(
        lambda: Silos([dict(y=normal(0, 2))], shared=dict(y=normal(0, 2))), ValueError, ("'y'", "shared=", "keep one")
    ),
    "argument names": Bad(lambda: Silos([{1: normal(0, 2)}]), TypeError, ("silo '0'", "1", "strings")),
    "unknown silo": Bad(lambda: silos_with()["hull"], KeyError, ("'hull'", "'leeds', 'york'")),
    "split: labels": Bad(lambda: split(np.ones((2, 2)), y=normal(0, 2)), ValueError, ("one label per row", "(2, 2)")),
    "split: no label": Bad(
        lambda: split(np.array(["a", None], object), y=normal(0, 2)), ValueError, ("row 1", "no label")
    ),
    "split: NaN label": Bad(lambda: split(np.array([1.0, np.nan]), y=normal(0, 2)), ValueError, ("row 1", "no label")),
    "split: rows": Bad(
        lambda: split(["a", "b"], y=normal(0, 3)), ValueError, ("'y'", "3 rows", "2", "shared=dict(y=...)")
    ),
    "split: unknown group": Bad(
        lambda: split(["a", "b"], groups=dict(county="n"), y=normal(0, 2)), ValueError, ("'county'", "arguments are y")
    ),
    "split: index": Bad(
        lambda: split(["a", "b"], groups=dict(c=None), c=normal(0, 2), y=normal(0, 2)),
        ValueError,
        ("'c'", "one int per row", "float32"),
    ),
    "split: index too large": Bad(
        lambda: split(["a", "b"], groups=dict(c="n"), c=np.array([0, 2]), n=2, y=normal(0, 2)),
        ValueError,
        ("'c'", "0..1", "0..2"),
    ),
    "split: group in two silos": Bad(
        lambda: split(["a", "b"], groups=dict(c="n"), c=np.array([0, 0]), n=1, y=normal(0, 2)),
        ValueError,
        ("group 0", "'a' and 'b'", "whole groups", "global"),
    ),
    "split: which group": Bad(
        lambda: split(
            ["a", "a", "b"], groups=dict(c=None, d=None), c=np.array([0, 0, 1]), d=np.array([1, 1, 0]), u=normal(0, 2)
        ),
        ValueError,
        ("'u'", "'c'", "'d'", "groups=dict(d='u')"),
    ),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_bad_data(name: str) -> None:
    check(BAD_DATA[name])


def check(bad: Bad) -> None:
    with pytest.raises(bad.error) as caught:
        bad.action()
    message = str(caught.value)
    print(f"\n    {message}")
    missing = [word for word in bad.words if word not in message]
    assert not missing, f"{missing} not in: {message}"


# --- data that pass, with or without a warning ----------------------------------------------------------------------


def test_float64_data_in_a_float32_program_warn() -> None:
    with pytest.warns(UserWarning, match=r"y are float64.*numpyro.enable_x64\(\).*float32"):
        Silos([dict(y=np.ones(3))])


def test_float64_data_in_a_float64_program_do_not(x64: None) -> None:
    assert Silos([dict(y=np.ones(3))])["0"]["y"].dtype == np.float64


def test_large_values_warn() -> None:
    with pytest.warns(UserWarning, match="y have values above 1e[+]08.*standardise"):
        Silos([dict(y=np.full(3, 2e8, "f"))])


def test_integer_features_are_cast() -> None:
    silos = Silos([dict(x=binary(j, n, 2), y=normal(j, n)) for j, n in enumerate((3, 2))])
    assert split_model(no_locals, silos).dim == 3


def test_groups_without_rows_warn() -> None:
    with pytest.warns(UserWarning, match="1 of 3 groups of 'c' have no rows") as told:
        split(["a", "b"], groups=dict(c="n"), c=np.array([0, 2]), n=3, y=normal(0, 2))
    assert told[0].filename == __file__  # warnings point at the user's line, however deep they are raised


# --- models ---------------------------------------------------------------------------------------------------------


def plain(y):
    """The smallest model; the others below have one thing wrong."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def column(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2, 1]))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def column_without_plate(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2, 1]))
    numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def table_of_factors(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    numpyro.factor("y", -((y[:, None] - x @ beta) ** 2))


def no_latents(y):
    numpyro.sample("y", dist.Normal(0, 1), obs=y)


def no_observations(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.deterministic("residual", y - mu)


def observations_elsewhere(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    numpyro.sample("z", dist.Normal(beta.sum() + x.mean(), 1), obs=jnp.ones(3))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, 1), obs=y)


def ignores_data(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("z", dist.Normal(mu, 1), obs=jnp.ones(3))


def global_below_local(y):
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)
    numpyro.sample("mu", dist.Normal(b.sum(), 1))


def sites_differ(y):
    mu = numpyro.sample("mu" if y.shape[0] > 2 else "nu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def shapes_differ(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([min(y.shape[0], 3)]))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu.sum(), 1), obs=y)


def prior_from_data(y):
    mu = numpyro.sample("mu", dist.Normal(y.mean(), 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def prior_from_number_of_rows(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1 / y.shape[0]))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def discrete_global(y):
    p = numpyro.sample("p", dist.Beta(1, 1))
    z = numpyro.sample("z", dist.Bernoulli(p))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


def discrete_global_below_local(y):
    p = numpyro.sample("p", dist.Beta(1, 1))
    with numpyro.plate("rows", y.shape[0]):
        z = numpyro.sample("z", dist.Bernoulli(p))
        numpyro.sample("y", dist.Normal(z, 1), obs=y)
    numpyro.sample("mu", dist.Normal(z.sum(), 1))


def discrete_unbounded(y):
    rate = numpyro.sample("rate", dist.Gamma(1.0, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        z = numpyro.sample("z", dist.Poisson(rate))
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


def discrete_from_data(y):
    p = numpyro.sample("p", dist.Beta(1, 1))
    with numpyro.plate("rows", y.shape[0]):
        z = numpyro.sample("z", dist.Binomial(jnp.ceil(jnp.abs(y)).astype(int), p))
        numpyro.sample("y", dist.Normal(z, 1), obs=y)


def subsampled(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0], subsample_size=2) as i:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[i])


def clashing_dims(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("a", 2, dim=-1), numpyro.plate("rows", y.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def param_in_plate(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        scale = numpyro.param("scale", 1.0)
        numpyro.sample("y", dist.Normal(mu, scale), obs=y)


def param_per_row(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    scale = numpyro.param("scale", jnp.ones(y.shape[0]))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, scale), obs=y)


def param_from_data(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    scale = numpyro.param("scale", jnp.mean(y))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, scale), obs=y)


def param_at_edge(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    scale = numpyro.param("scale", 0.0, constraint=dist.constraints.positive)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1 + scale), obs=y)


def twice(y):
    numpyro.sample("mu", dist.Normal(0, 1))
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def stateful(y):
    state = mutable("batch_stats", {"mean": jnp.zeros(2)})
    state["mean"] = state["mean"] + 1
    plain(y)


def one_event(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu, 1).expand([y.shape[0]]).to_event(1), obs=y)


def total(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.factor("y", dist.Normal(mu, 1).log_prob(y).sum())


def autoregression(y):
    phi = numpyro.sample("phi", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(phi * y[:-1], 1), obs=y[1:])


def product_on_one_axis(a, b, y):
    z = numpyro.sample("z", dist.Normal(0, 1).expand([a.shape[0] * b.shape[0]]))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(z[0] + a[0] + b[0], 1), obs=y)


def counts(y, trials):
    p = numpyro.sample("p", dist.Beta(1, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Binomial(trials, p), obs=y)


def branching(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    scale = 2.0 if y.sum() > 0 else 1.0
    numpyro.sample("y", dist.Normal(mu, scale), obs=y)


def selecting(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu, 1), obs=y[y > 0])


def numpy_inside(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(mu, 1), obs=np.sort(y))


def ranged(y, k):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    for _ in range(k):
        mu = 2 * mu
    numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def centred(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y - y.mean())


def binomial(y, n):
    p = numpyro.sample("p", dist.Beta(1, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Binomial(n, p), obs=y)


def likelihood(y, distribution):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", distribution(mu), obs=y)


def with_y(*values: Any) -> Silos:
    return Silos({name: dict(y=np.asarray(y)) for name, y in zip(("leeds", "york"), values, strict=True)})


def bad(model: Any, silos: Any, *words: str, error: type[Exception] = PartitionError, **options: Any) -> Bad:
    return Bad(lambda: split_model(model, silos(), **options), error, words)


ragged = rows(4, 2)
BERNOULLI = partial(likelihood, distribution=lambda mu: dist.Bernoulli(logits=mu))

BAD_MODELS: dict[str, Bad] = {
    "8 lengths differ": bad(no_locals, lambda: silos_with(y=normal(0, 5)), "silo 'york'", "x (3, 2)", "y (5,)"),
    "8 one value for many rows": bad(
        column_without_plate,
        lambda: Silos([dict(x=normal(0, 3, 2), y=normal(0, 1, 1))]),
        "'y'",
        "(1, 1)",
        "(3, 1)",
        "3 times",
        "broadcast_to",
    ),
    "9 a column in place of a vector": bad(
        no_locals,
        lambda: Silos([dict(x=normal(j, n, 2), y=normal(j, n, 1)) for j, n in enumerate((4, 3))]),
        "'y'",
        "(4, 1)",
        "(4,)",
        "4 x 4",
    ),
    "9 a column of means": bad(column, regression(4, 3), "'y'", "(4,)", "(4, 4)", "x @ beta"),
    "9 a column of means, equal silos": bad(column_without_plate, regression(4, 4), "'y'", "(4,)", "(4, 1)", "4 x 4"),
    "9 a table of factors": bad(table_of_factors, regression(4, 3), "'y'", "n x n", "two plates"),
    "9 a table of factors, equal silos": bad(table_of_factors, regression(4, 4), "'y'", "n x n", "two plates"),
    "16 Bernoulli": bad(
        BERNOULLI,
        lambda: with_y([0, 1, 1], [0, 3, 2, 1]),
        "silo 'york'",
        "site 'y'",
        "observed value 3 (row 1)",
        "Bernoulli (0 or 1)",
        "2 such values",
    ),
    "16 Poisson": bad(
        partial(likelihood, distribution=lambda mu: dist.Poisson(jnp.exp(mu))),
        lambda: with_y([0, 1], [0, -1]),
        "silo 'york'",
        "-1 (row 1)",
        "Poisson (0, 1, 2, ...)",
    ),
    "16 Gamma": bad(
        partial(likelihood, distribution=lambda mu: dist.Gamma(jnp.exp(mu), 1.0)),
        lambda: with_y(np.ones(2, "f"), np.zeros(2, "f")),
        "0. (row 0)",
        "Gamma (numbers above 0)",
    ),
    "16 Beta": bad(
        partial(likelihood, distribution=lambda mu: dist.Beta(jnp.exp(mu), 1.0)),
        lambda: with_y(np.full(2, 0.5, "f"), np.full(3, 1.5, "f")),
        "1.5 (row 0)",
        "Beta (numbers from 0.0 to 1.0)",
    ),
    "16 Categorical": bad(
        partial(likelihood, distribution=lambda mu: dist.Categorical(logits=mu * jnp.arange(3.0))),
        lambda: with_y([0, 1], [3, 1]),
        "3 (row 0)",
        "integers from 0 to 2",
    ),
    "16 Binomial, bounds by row": bad(
        binomial,
        lambda: Silos([dict(y=np.array([1, 3]), n=np.array([3, 2])), dict(y=np.array([1]), n=np.array([1]))]),
        "silo '0'",
        "3 (row 1)",
        "integers from 0 to 2",
    ),
    "16 Dirichlet": bad(
        partial(likelihood, distribution=lambda mu: dist.Dirichlet(jnp.exp(mu) * jnp.ones(2))),
        lambda: with_y(np.full((2, 2), 0.5, "f"), np.full((1, 2), 0.7, "f")),
        "[0.7, 0.7] (row 0)",
        "add up to 1",
    ),
    "28 no latent sites": bad(no_latents, ragged, "no latent sites", "nothing to infer"),
    "29 no observed sites": bad(no_observations, ragged, "no observed site", "ignores the data", "obs="),
    "29 observations elsewhere": bad(ignores_data, ragged, "ignores the data", "(z)", "argument"),
    "30 counted once per silo": bad(
        observations_elsewhere, regression(4, 3), "'z'", "no silo's argument", "once per silo", "argument"
    ),
    "31 local=": bad(plain, ragged, "local= names 'b'", "not there", "mu", "rows", local=["b"]),
    "31 shared=": bad(plain, ragged, "shared= names 'b'", "not there", "mu", "rows", shared="b"),
    "31 shared= of an observed site": bad(plain, ragged, "'y'", "an observed site", "mu", shared=["y"]),
    "31 both": bad(plain, ragged, "'mu'", "local=", "shared=", "keep one", local=["mu"], shared=["mu"]),
    "31 shared= of a ragged plate": bad(
        plain, ragged, "'rows'", "differs between silos", "s0 4", "s1 2", shared=["rows"]
    ),
    "32 global below local": bad(global_below_local, ragged, "'b' is local", "global site 'mu'", "local=", "before"),
    "33 sites differ": bad(sites_differ, ragged, "mu, y", "nu, y", "'s0'", "'s1'", "same sites"),
    "34 shapes differ": bad(shapes_differ, ragged, "'mu'", "(3,)", "(2,)", "'s0'", "'s1'", "rows"),
    "35 prior from data": bad(prior_from_data, ragged, "global site 'mu'", "'y'", "another prior", "shared="),
    "35 prior from the number of rows": bad(
        prior_from_number_of_rows, ragged, "'mu'", "size of a silo's data", "another prior", "shared="
    ),
    "36 discrete global": bad(
        discrete_global, ragged, "'z'", "discrete", "Bernoulli", "no silo", "MixtureSameFamily", "local=['z']"
    ),
    "36 global below discrete": bad(discrete_global_below_local, ragged, "'z' is local", "global site 'mu'", "before"),
    "36 discrete without end": bad(discrete_unbounded, ragged, "'z'", "Poisson", "infinitely many", "sum it out"),
    "36 discrete from data": bad(discrete_from_data, ragged, "'z'", "Binomial", "depends on data", "total_count"),
    "38 subsample_size": bad(subsampled, ragged, "'rows'", "subsample_size=2", "batch_size="),
    "39 plate dims clash": bad(clashing_dims, ragged, "silo 's0'", "y (4,)", "same dim", "dim=-2"),
    "40 param in a silo's plate": bad(
        param_in_plate, ragged, "'scale'", "plate 'rows'", "out of the plate", "numpyro.sample"
    ),
    "40 param per row": bad(param_per_row, ragged, "'scale'", "each row", "numpyro.sample"),
    "40 param from data": bad(param_from_data, ragged, "'scale'", "starts from", "'y'", "shared="),
    "40 param at the edge": bad(param_at_edge, ragged, "'scale'", "0.0", "edge", "inside"),
    "43 duplicate site": bad(twice, ragged, "silo 's0'", "`mu`", "own name"),
    "44 mutable state": bad(stateful, ragged, "'batch_stats'", "mutable"),
    "60 arguments missing": bad(plain, regression(3, 2), "takes (y)", "give (x, y)"),
    "60 arguments unknown": bad(no_locals, ragged, "takes (x, y)", "give (y)", "'x'"),
    "60 through a handler": bad(handlers.scale(plain, scale=2.0), regression(3, 2), "takes (y)", "give (x, y)"),
    "not a model": bad("glmm", ragged, "model must be a NumPyro model", "str", error=TypeError),
    "not silos": Bad(lambda: partition(plain, {"a": dict(y=normal(0, 2))}), TypeError, ("nf.Silos", "dict")),  # type: ignore[arg-type]
    "rows in one event": bad(one_event, ragged, "'y'", "one event", "without to_event"),
    "rows summed up": bad(total, ragged, "'y'", "combined", "'s0' 4, 's1' 2", "one log density per row"),
    "rows shifted": bad(autoregression, ragged, "'y'", "a shift", "y[1:]"),
    "two axes on one": bad(
        product_on_one_axis,
        lambda: Silos([dict(a=normal(0, i), b=normal(1, j), y=normal(2, 2)) for i, j in [(2, 3), (4, 1)]]),
        "'z'",
        "two plates",
    ),
    "an int that is no size": bad(
        counts,
        lambda: Silos([dict(y=binary(j, 3), trials=j + 1) for j in range(2)]),
        "'trials'",
        "'0' 1, '1' 2",
        "trials=np.asarray(1)",
    ),
    "branches on data": bad(branching, ragged, "silo 's0'", "reads the values"),
    "selects rows": bad(selecting, ragged, "silo 's0'", "boolean", "obs_mask"),
    "uses NumPy": bad(numpy_inside, ragged, "silo 's0'", "jax.numpy"),
    "loops over an array": bad(
        ranged, lambda: Silos([dict(y=normal(0, 2), k=np.asarray(2))]), "silo '0'", "int argument"
    ),
    "mixes rows": bad(centred, ragged, "silo 's1'", "site 'y'", "mixes rows", "beforehand"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_models(name: str) -> None:
    check(BAD_MODELS[name])


def test_masked_observations_may_have_any_value() -> None:
    def model(y, present):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]), handlers.mask(mask=present):
            numpyro.sample("y", dist.Bernoulli(logits=mu), obs=y)

    split_model(model, Silos([dict(y=np.array([0, 9, 1]), present=np.array([True, False, True]))]))


def test_schedules_name_what_is_wrong() -> None:
    bad_schedules = {
        "a silo that is not there": Bad(
            lambda: schedules.fixed([["hull"]]).cohorts(None, ("leeds", "york"), 0, 1),
            ValueError,
            ("'hull'", "'leeds', 'york'"),
        ),
        "no cohort": Bad(lambda: schedules.sampled(0), ValueError, ("cohort_size", "0")),
        "half a cohort": Bad(lambda: schedules.sampled(1.5), ValueError, ("cohort_size", "1.5")),  # type: ignore[arg-type]
        "too large a cohort": Bad(
            lambda: schedules.sampled(3).cohorts(jax.random.key(0), ("a", "b"), 0, 1), ValueError, ("3", "2 silos")
        ),
        "cohorts of two sizes": Bad(lambda: schedules.fixed([["a"], ["a", "b"]]), ValueError, ("one size", "[1, 2]")),
        "no such schedule": Bad(
            lambda: schedules.as_schedule("random"), ValueError, ("'random'", "'sequential'", "nf.schedules.sampled")
        ),
        "no schedule at all": Bad(lambda: schedules.as_schedule(3), TypeError, ("int", "'sequential'")),
    }
    for one in bad_schedules.values():
        check(one)
