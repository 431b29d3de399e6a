"""Sixty bad inputs, by number: each gives an error that names the silo, site or argument, and says what to type.

None of them is found by a program of the method: what is wrong is said before one is compiled.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import optax.contrib
import pandas as pd
import pytest
from given import Given, given_fit
from models import MODELS, binary, no_locals, normal, regression, rows
from numpyro import handlers
from numpyro.infer.autoguide import AutoIAFNormal
from numpyro.primitives import mutable

import numpyro_fed as nf
from numpyro_fed import schedules
from numpyro_fed.checks import check_cohorts
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.split import split
from numpyro_fed.engines.places import places_of
from numpyro_fed.model.build import split_model
from numpyro_fed.model.partition import partition
from numpyro_fed.model.trace import PartitionError

KEY = jax.random.key(0)
NOTHING, SURVEY, SINGLE = "nothing", "the survey", "single operations, on a handful of numbers"


class Bad(NamedTuple):
    action: Callable[[], Any]
    error: type[Exception]  # a warning is one in these tests
    words: tuple[str, ...]  # all of them stand in the message
    compiled: str = NOTHING  # by then


_programs: list[str] = []  # names of all programs that were compiled, or read from the cache on disk
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **told: _programs.append(str(told.get("fun_name"))) if "backend_compile" in event else None
)


@contextmanager
def programs() -> Iterator[list[str]]:
    """The programs that are compiled meanwhile."""
    found: list[str] = []
    before = len(_programs)
    yield found
    found += _programs[before:]


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
    with programs() as compiled, pytest.raises(bad.error) as caught:
        bad.action()
    message = str(caught.value)
    print(f"\n    {message}")
    missing = [word for word in bad.words if word not in message]
    assert not missing, f"{missing} not in: {message}"
    if bad.compiled == NOTHING:  # but for numbers in a model that become arrays, where no test before had such
        assert not set(compiled) - {"jit(convert_element_type)", "jit(broadcast_in_dim)"}
    # the survey is one round of all silos; a method begins with a program that makes its states
    assert "jit(_start)" not in compiled and compiled.count("jit(_run_rounds)") <= (bad.compiled == SURVEY)


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


def bad(
    model: Any,
    silos: Any,
    *words: str,
    error: type[Exception] = PartitionError,
    compiled: str = NOTHING,
    **options: Any,
) -> Bad:
    return Bad(lambda: split_model(model, silos(), **options), error, words, compiled)


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
        compiled=SURVEY,
    ),
    "16 Poisson": bad(
        partial(likelihood, distribution=lambda mu: dist.Poisson(jnp.exp(mu))),
        lambda: with_y([0, 1], [0, -1]),
        "silo 'york'",
        "-1 (row 1)",
        "Poisson (0, 1, 2, ...)",
        compiled=SURVEY,
    ),
    "16 Gamma": bad(
        partial(likelihood, distribution=lambda mu: dist.Gamma(jnp.exp(mu), 1.0)),
        lambda: with_y(np.ones(2, "f"), np.zeros(2, "f")),
        "0. (row 0)",
        "Gamma (numbers above 0)",
        compiled=SURVEY,
    ),
    "16 Beta": bad(
        partial(likelihood, distribution=lambda mu: dist.Beta(jnp.exp(mu), 1.0)),
        lambda: with_y(np.full(2, 0.5, "f"), np.full(3, 1.5, "f")),
        "1.5 (row 0)",
        "Beta (numbers from 0.0 to 1.0)",
        compiled=SURVEY,
    ),
    "16 Categorical": bad(
        partial(likelihood, distribution=lambda mu: dist.Categorical(logits=mu * jnp.arange(3.0))),
        lambda: with_y([0, 1], [3, 1]),
        "3 (row 0)",
        "integers from 0 to 2",
        compiled=SURVEY,
    ),
    "16 Binomial, bounds by row": bad(
        binomial,
        lambda: Silos([dict(y=np.array([1, 3]), n=np.array([3, 2])), dict(y=np.array([1]), n=np.array([1]))]),
        "silo '0'",
        "3 (row 1)",
        "integers from 0 to 2",
        compiled=SURVEY,
    ),
    "16 Dirichlet": bad(
        partial(likelihood, distribution=lambda mu: dist.Dirichlet(jnp.exp(mu) * jnp.ones(2))),
        lambda: with_y(np.full((2, 2), 0.5, "f"), np.full((1, 2), 0.7, "f")),
        "[0.7, 0.7] (row 0)",
        "add up to 1",
        compiled=SURVEY,
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
        prior_from_number_of_rows, ragged, "'mu'", "size of a silo's data", "another prior", "shared=", compiled=SURVEY
    ),
    "36 discrete global": bad(
        discrete_global,
        ragged,
        "'z'",
        "discrete",
        "Bernoulli",
        "no silo",
        "MixtureSameFamily",
        "local=['z']",
        compiled=SINGLE,
    ),
    "36 global below discrete": bad(
        discrete_global_below_local, ragged, "'z' is local", "global site 'mu'", "before", compiled=SINGLE
    ),
    "36 discrete without end": bad(discrete_unbounded, ragged, "'z'", "Poisson", "infinitely many", "sum it out"),
    "36 discrete from data": bad(discrete_from_data, ragged, "'z'", "Binomial", "depends on data", "total_count"),
    "38 subsample_size": bad(subsampled, ragged, "'rows'", "subsample_size=2", "batch_size="),
    "39 plate dims clash": bad(clashing_dims, ragged, "silo 's0'", "y (4,)", "same dim", "dim=-2"),
    "40 param in a silo's plate": bad(
        param_in_plate, ragged, "'scale'", "plate 'rows'", "out of the plate", "numpyro.sample"
    ),
    "40 param per row": bad(param_per_row, ragged, "'scale'", "each row", "numpyro.sample"),
    "40 param from data": bad(param_from_data, ragged, "'scale'", "starts from", "'y'", "shared="),
    "40 param at the edge": bad(param_at_edge, ragged, "'scale'", "0.0", "edge", "inside", compiled=SINGLE),
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
    "mixes rows": bad(centred, ragged, "silo 's1'", "site 'y'", "mixes rows", "beforehand", compiled=SURVEY),
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


# --- settings, runs and results -------------------------------------------------------------------------------------


def latent_rows(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(a, 1), obs=y)


def guide_without_a(y):
    numpyro.sample("mu", dist.Normal(numpyro.param("loc", 0.0), 1.0))


def wide(y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2500]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(w.sum(), 1), obs=y)


def flat_and_unused(y):
    mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
    numpyro.sample("nu", dist.Normal(0, 1).mask(False))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def two_flat(y):
    mu = numpyro.sample("mu", dist.ImproperUniform(dist.constraints.real, (), ()))
    nu = numpyro.sample("nu", dist.ImproperUniform(dist.constraints.real, (), ()))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu + nu, 1), obs=y)


def imputed_by_index(x, y, missing):
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    with numpyro.plate("missing", missing.shape[0]):
        drawn = numpyro.sample("drawn", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(beta * x.at[missing].set(drawn), 1), obs=y)


def with_missing(*missing: list[int]) -> Silos:
    arguments = lambda j, found: dict(x=normal(j, 3 + j), y=normal(j, 3 + j), missing=np.array(found, np.int32))
    return Silos(
        {name: arguments(j, found) for j, (name, found) in enumerate(zip(("leeds", "york"), missing, strict=True))}
    )


def at_most_six(y, how="raise", inner=latent_rows):
    if how == "raise" and y.shape[0] > 6:
        raise ValueError("at most six rows, please")
    if how == "assert":
        assert y.shape[0] <= 6, "at most six rows, please"
    if how == "bare" and y.shape[0] > 6:
        raise AssertionError
    if how == "lookup":
        _ = {3: "few", 4: "several"}[y.shape[0]]
    inner(y)


def run(method: Any, silos: Any = ragged, key: Any = KEY, num_rounds: Any = 2, **options: Any) -> Any:
    return method.run(key, silos(), num_rounds, progress_bar=False, **options)


def setting(make: Callable[[], Any], *words: str, error: type[Exception] = ValueError, compiled: str = NOTHING) -> Bad:
    return Bad(make, error, words, compiled)


def private(clip: float) -> Any:
    """Clips the gradient of each row."""
    aggregate = optax.contrib.differentially_private_aggregate(clip, noise_multiplier=1.0, key=0)
    return optax.chain(aggregate, optax.sgd(1e-2))


class Asks(NamedTuple):
    """A schedule of one's own."""

    silos: Any

    def cohorts(self, key: Any, names: Any, first: int, count: int) -> Any:
        return np.tile(np.asarray(self.silos), (count, 1))


TYPE_KEY = "pass jax.random.key(0)"
TYPE_ADAM = "pass optax.adam(1e-2)"
METHODS = (nf.EP, nf.SEP, nf.PVI, nf.SFVI, nf.SFVIAvg, nf.FedPA, nf.FedAvg, nf.FedNP)

BAD_SETTINGS: dict[str, Bad] = {
    "18 an int as key": setting(lambda: run(nf.EP(plain), key=0), "rng_key", "a int", TYPE_KEY, error=TypeError),
    "18 no key": setting(lambda: run(nf.SFVI(plain), key=None), "rng_key", "nothing", TYPE_KEY, error=TypeError),
    "19 a generator as key": setting(
        lambda: run(nf.FedPA(plain), key=np.random.default_rng(0)), "rng_key", "Generator", TYPE_KEY, error=TypeError
    ),
    "20 optimiser by name": setting(
        lambda: nf.SFVI(plain, optim="adam"), "optim", "'adam'", TYPE_ADAM, error=TypeError
    ),
    "20 the silos' optimiser": setting(
        lambda: nf.SFVI(plain, silo_optim="adam"), "silo_optim", "'adam'", TYPE_ADAM, error=TypeError
    ),
    "20 the server's optimiser": setting(
        lambda: nf.EP(plain, server_optim="sgd"), "server_optim", "'sgd'", TYPE_ADAM, error=TypeError
    ),
    "21 an optimiser's class": setting(
        lambda: nf.FedAvg(plain, optim=optax.adam), "optim", "adam", TYPE_ADAM, error=TypeError
    ),
    "22 a line search": setting(
        lambda: nf.SFVI(plain, optim=optax.lbfgs()),
        *("optim", "needs more than gradients", "optax.adam(1e-2), optax.sgd(1e-2) or optax.adamw(1e-2)"),
        error=TypeError,
    ),
    "23 no step": setting(
        lambda: nf.SFVI(plain, optim=optax.adam(0.0)), "optim", "downhill", "positive?", compiled=SINGLE
    ),
    "23 uphill": setting(
        lambda: nf.FedAvg(plain, server_optim=optax.sgd(-0.1)), "server_optim", "downhill", compiled=SINGLE
    ),
    "23 NaN": setting(lambda: nf.SFVI(plain, optim=optax.adam(np.nan)), "optim", "nan", compiled=SINGLE),
    "24 no rounds": setting(lambda: run(nf.EP(plain), num_rounds=0), "num_rounds", "at least 1", "got 0"),
    "24 minus three rounds": setting(lambda: run(nf.SFVI(plain), num_rounds=-3), "num_rounds", "got -3"),
    "24 half a round": setting(lambda: run(nf.PVI(plain), num_rounds=1.5), "num_rounds", "an int", "got 1.5"),
    "24 a round that is true": setting(lambda: run(nf.PVI(plain), num_rounds=True), "num_rounds", "got True"),
    "24 no local steps": setting(lambda: nf.SFVIAvg(plain, local_steps=0), "local_steps", "at least 1", "got 0"),
    "24 local steps of FedAvg": setting(lambda: nf.FedAvg(plain, local_steps=2.5), "local_steps", "an int", "got 2.5"),
    "25 no damping": setting(lambda: nf.EP(plain, damping=0.0), "damping", "(0, 1]", "got 0.0"),
    "25 too much": setting(lambda: nf.PVI(plain, damping=1.5), "damping", "(0, 1]", "got 1.5"),
    "25 NaN": setting(lambda: nf.SEP(plain, damping=np.nan), "damping", "(0, 1]", "got nan"),
    "25 text": setting(lambda: nf.EP(plain, damping="0.5"), "damping", "(0, 1]", "got '0.5'"),
    "26 rho": setting(lambda: nf.FedPA(plain, shrinkage=-1.0), "shrinkage", "-1.0", "at least 0", "'oas'"),
    "27 one sample": setting(lambda: nf.FedPA(plain, num_samples=1), "num_samples", "at least 2", "got 1"),
    "37 improper": bad(flat_and_unused, ragged, "'nu'", "improper", "no other site depends", "dist.Normal(0, 10)"),
    "46 a guide without a site": setting(
        lambda: run(nf.SFVI(latent_rows, guide=guide_without_a)),
        *("guide", "lacks the latent site 'a'", "numpyro.sample('a', ...)"),
        compiled=SURVEY,
    ),
    "47 low rank": setting(
        lambda: run(nf.SFVIAvg(plain, guide=nf.guides.StructuredNormal(global_cov="low_rank"))),
        *("SFVIAvg", "full or diagonal", "low_rank", 'global_cov="diagonal"', "nf.SFVI"),
        compiled=SURVEY,
    ),
    "47 a flow": setting(
        lambda: run(nf.SFVIAvg(plain, guide=nf.guides.StructuredNormal(global_guide=AutoIAFNormal))),
        *("SFVIAvg", "full or diagonal", "AutoIAFNormal", "nf.SFVI"),
        compiled=SURVEY,
    ),
    "48 full covariance": setting(
        lambda: run(nf.SFVI(wide)), "2500", "GB", 'global_cov="low_rank"', '"diagonal"', compiled=SURVEY
    ),
    "48 of EP": setting(lambda: run(nf.EP(wide)), "2500", "family='diagonal'", error=PartitionError, compiled=SURVEY),
    "50 negative weights": setting(
        lambda: nf.SFVIAvg(plain, weights=[-1, 2]), "weights", "[-1, 2]", "'size'", "'equal'"
    ),
    "50 all zero": setting(lambda: nf.SFVIAvg(plain, weights=[0, 0]), "weights", "[0, 0]", "'size'", "'equal'"),
    "52 other silos": setting(
        lambda: run(nf.EP(plain), init_state=given_fit(plain, Silos({"hull": dict(y=normal(0, 3))})).state),
        *("init_state", "missing now: hull", "not in the state: s0, s1"),
        compiled=SURVEY,
    ),
    "52 no state": setting(
        lambda: run(nf.EP(plain), init_state=3), "init_state", "fit.state", "int", error=TypeError, compiled=SURVEY
    ),
    "53 a silo nobody knows": setting(
        lambda: run(nf.EP(plain), schedule=Asks([7])),
        *("schedule", "number 7", "there are 2", "0 's0', 1 's1'", "nf.schedules.fixed"),
    ),
    "53 counted from the end": setting(lambda: run(nf.EP(plain), schedule=Asks([-1])), "number -1", "0 's0', 1 's1'"),
    "53 one silo twice": setting(lambda: run(nf.EP(plain), schedule=Asks([1, 1])), "twice", "[1, 1]"),
    "53 by name": setting(lambda: run(nf.EP(plain), schedule=Asks(["s0"])), "ints of shape", "<U2"),
    "54 clip <= 0": setting(lambda: nf.SFVI(plain, optim=private(-1.0)), "optim", "no differential privacy"),
    "55 no terms by row": setting(
        lambda: nf.FedAvg(plain, optim=private(1.0)),
        *("optim", "shape ()", "(3,)", "whole loss", "no axis of rows", TYPE_ADAM, "no differential privacy"),
    ),
    "58 a cohort's silo": setting(
        lambda: run(nf.EP(plain), schedule=schedules.fixed([["hull"]])), "schedule names 'hull'", "'s0', 's1'"
    ),
    "58 a speed's silo": setting(
        lambda: run(nf.EP(plain), schedule=schedules.asynchronous({"hull": 2.0})), "names 'hull'", "'s0', 's1'"
    ),
    "59 predictions": Bad(
        lambda: given_fit(plain, ragged()).predict(KEY, silo="hull"), KeyError, ("'hull'", "'s0', 's1'"), SINGLE
    ),
    "59 draws of locals": Bad(
        lambda: given_fit(latent_rows, ragged()).sample_local(KEY, silo="hull"),
        KeyError,
        ("'hull'", "'s0', 's1'"),
        SINGLE,
    ),
    "no such engine": setting(
        lambda: run(nf.EP(plain), engine="vmap"), "engine", "'vmap'", "engine=nf.engines.Vmap()", error=TypeError
    ),
    "an engine's class": setting(
        lambda: run(nf.EP(plain), engine=nf.engines.Loopback),
        *("the class Loopback", "engine=nf.engines.Loopback()"),
        error=TypeError,
    ),
    "no silo misses nothing": setting(
        lambda: with_missing([0, 2], []), "silo 'york'", "'missing' has 0 rows", "'x' has 4", "obs_mask", "jnp.where"
    ),
    "imputed by index": bad(
        imputed_by_index,
        lambda: with_missing([0, 2], [1]),
        *(
            "silo 'york'",
            "site 'y' mixes rows",
            "x.at[missing].set",
            "obs_mask=present",
            "jnp.where(present, x, drawn)",
        ),
        compiled=SURVEY,
    ),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings(name: str) -> None:
    check(BAD_SETTINGS[name])


@pytest.mark.parametrize("method", METHODS)
def test_54_there_is_no_privacy_to_ask_for(method: Any) -> None:
    """No argument that sounds like it is taken and then ignored."""
    for name in ("clip", "noise_multiplier", "delta", "dp", "privacy"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            method(plain, **{name: 0.5})


@pytest.mark.parametrize("how", ["raise", "assert", "bare", "lookup"])
def test_what_the_model_says_of_twice_as_many_rows_is_told(how: str) -> None:
    """Rows are doubled to see whose latents are; swallowed, a model's own refusal would make them everybody's."""
    words = {"bare": "AssertionError: raise AssertionError", "lookup": "KeyError: 8"}.get(
        how, "at most six rows, please"
    )
    model = partial(at_most_six, how=how)
    silos = rows(4, 4)
    check(bad(model, silos, "site 'a'", "'y'", "refuses twice as many", words, "local=['rows']", "shared=['rows']"))
    assert partition(model, silos(), local=["rows"]).local_sites == ("a",)
    assert partition(model, silos(), shared=["rows"]).global_sites == ("mu", "a")
    without = partition(partial(at_most_six, how=how, inner=plain), silos())  # no latents of whom one could ask
    assert words in str(without) and "neither padded nor" in str(without)
    if how != "lookup":
        check(bad(model, rows(4, 3), "differ between silos", "With twice as many", words))


def test_a_bare_assert_of_the_model_is_no_clash_of_plates() -> None:
    def tabular(y):
        if y.ndim != 2:
            raise AssertionError  # as `assert` does, which pytest rewrites

    check(bad(tabular, ragged, "silo 's0'", "y (4,)", "AssertionError: raise AssertionError"))


# --- warnings -------------------------------------------------------------------------------------------------------


class Told(Exception):
    """A warning, caught where it points at."""


@contextmanager
def warnings_raised() -> Iterator[None]:
    """The run ends there: nothing has to be compiled to see where a warning points at."""

    def tell(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        raise Told(str(message), filename, lineno)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = tell
        yield


def one(method: Any) -> Any:
    return run(method, rows(3))


WARNED: dict[str, Bad] = {
    "12 float64": Bad(
        lambda: Silos([dict(y=np.ones(3))]),
        UserWarning,
        ("y is float64", "float32", "numpyro.enable_x64()"),
    ),
    "12 two of them": Bad(lambda: Silos([dict(y=np.ones(3), x=np.ones(3))]), UserWarning, ("x, y are float64",)),
    "17 large values": Bad(
        lambda: Silos([dict(y=np.full(3, 2e8, "f"))]),
        UserWarning,
        ("y has values above 1e+08", "standardise it", "nf.prepare.standardize"),
    ),
    "17 two of them": Bad(
        lambda: Silos([dict(y=np.full(3, 2e8, "f"), x=np.full(3, 2e8, "f"))]),
        UserWarning,
        ("x, y have values", "standardise them"),
    ),
    "56 FedAvg": Bad(lambda: one(nf.FedAvg(plain)), UserWarning, ("FedAvg has one silo", "nf.SFVI(model)"), SURVEY),
    "56 FedPA": Bad(lambda: one(nf.FedPA(plain)), UserWarning, ("FedPA has one silo", "nf.SFVI(model)"), SURVEY),
    "56 SFVIAvg": Bad(lambda: one(nf.SFVIAvg(plain)), UserWarning, ("SFVIAvg has one silo", "nf.SFVI(model)"), SURVEY),
    "56 FedNP": Bad(lambda: one(nf.FedNP(plain)), UserWarning, ("FedNP has one silo", "nf.SFVI(model)"), SURVEY),
    "a group without rows": Bad(
        lambda: split(["a", "b"], groups=dict(c="n"), c=np.array([0, 2]), n=3, y=normal(0, 2)),
        UserWarning,
        ("1 of 3 groups of 'c' has no rows and is left out",),
    ),
    "groups without rows": Bad(
        lambda: split(["a", "b"], groups=dict(c="n"), c=np.array([0, 2]), n=4, y=normal(0, 2)),
        UserWarning,
        ("2 of 4 groups of 'c' have no rows and are left out",),
    ),
}


@pytest.mark.parametrize("name", WARNED)
def test_warnings(name: str) -> None:
    check(WARNED[name])


@pytest.mark.parametrize("name", WARNED)
def test_warnings_point_at_the_users_line(name: str) -> None:
    """However deep they are raised: the line of this file that called the library."""
    with warnings_raised(), pytest.raises(Told) as caught:
        WARNED[name].action()
    _, filename, lineno = caught.value.args
    assert filename == __file__
    line = Path(__file__).read_text().splitlines()[lineno - 1]
    assert re.search(r"Silos\(|split\(|\.run\(", line), line


def test_warnings_point_past_what_calls_back() -> None:
    """A warning from inside of a traced function has JAX's lines between the library's and the user's."""

    def deep() -> int:
        code = compile("from numpyro_fed.checks import warn_user\nwarn_user('deep')", "inside.py", "exec")
        exec(code, {"__name__": "numpyro_fed.somewhere"})
        return 0

    with warnings_raised(), pytest.raises(Told) as caught:
        jax.eval_shape(deep)
    assert caught.value.args[1] == __file__


def test_several_reasons_are_sentences() -> None:
    from numpyro_fed.checks import sentences

    assert sentences(["it moves", "nobody asked for a check: run(..., check=True)"]) == (
        "It moves. Nobody asked for a check: run(..., check=True)."
    )


# --- what is no mistake ---------------------------------------------------------------------------------------------

WORKS: dict[str, Callable[[], Any]] = {
    "15 integer features": lambda: split_model(
        no_locals, Silos([dict(x=binary(j, n, 2), y=normal(j, n)) for j, n in enumerate((3, 2))])
    ),
    "30 a likelihood without a plate": lambda: split_model(*_of("without plate")),
    "37 improper, and determined": lambda: split_model(two_flat, rows(3, 4)()),
    "41 constrained supports": lambda: split_model(*_of("supports")),
    "42 correlations": lambda: split_model(*_of("correlated")),
    "45 factors": lambda: split_model(*_of("factors")),
    "56 EP of one silo": lambda: nf.EP(plain).prepare(rows(3)()),
    "57 cohorts of any size": lambda: check_cohorts(np.array([[0, 2], [1, 2]]), ("a", "b", "c")),
    "58 silos that the table does not name": lambda: schedules.fixed([["a"]]).cohorts(None, ("a", "b"), 0, 2),
}


def _of(name: str) -> tuple[Any, Silos]:
    return MODELS[name].model, MODELS[name].silos()


@pytest.mark.parametrize("name", WORKS)
def test_no_mistake(name: str) -> None:
    WORKS[name]()


def test_57_silos_need_not_divide_a_mesh() -> None:
    """An engine over devices fills buckets up; devices that are not there are refused before anything is compiled."""
    engines = {
        name for name, value in vars(nf.engines).items() if isinstance(value, type) and hasattr(value, "in_silos")
    }
    assert engines - {"Engine"} == {"Loopback", "Sharded", "Streamed", "Vmap"}
    places = places_of(("a", "b", "c"), (("a", "b", "c"),), multiple=2)
    assert [len(bucket) for bucket in places.of_bucket] == [4] and len(places.words) == 3
    with pytest.raises(
        ValueError, match=r"devices=99, and JAX has .* cpu .*XLA_FLAGS=--xla_force_host_platform_device"
    ):
        nf.engines.Sharded(devices=99)


def test_float64_data_in_a_float64_program_do_not_warn(x64: None) -> None:
    assert Silos([dict(y=np.ones(3))])["0"]["y"].dtype == np.float64


def test_one_missing_value_for_each_row_may_be_drawn() -> None:
    """What the error of an imputation by index proposes."""

    def model(x, y, present):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0]):
            drawn = numpyro.sample("drawn", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(beta * jnp.where(present, x, drawn), 1), obs=y)

    arguments = lambda n, gone: dict(x=normal(n, n), y=normal(n, n), present=~np.isin(np.arange(n), gone))
    split = split_model(model, Silos([arguments(4, [0, 2]), arguments(3, [])]))
    assert split.partition.local_sites == ("drawn",)


# --- files, and rounds that go wrong ---------------------------------------------------------------------------------


def test_51_a_file_says_what_differs(tmp_path: Path) -> None:
    silos = ragged()
    path = given_fit(plain, silos).save(tmp_path / "fit")
    cases = {
        "method": (nf.EP(plain), None, "another method: Given in the file, EP now"),
        "model": (Given(one_prior_more), None, "another model: site 'nu' is not there in the file"),
        "prior": (Given(partial(plain_with, scale=2.0)), None, "the prior of site 'mu' is another one"),
        "silos": (Given(plain), rows(4, 2, 3)(), "has the silos s0, s1; silos= has s0, s1, s2"),
        "rows": (Given(plain), rows(4, 3)(), "silo 's1' is y float32[2] in the file, y float32[3] now"),
    }
    for method, data, words in cases.values():
        with programs() as compiled, pytest.raises(ValueError, match=re.escape(words)):
            nf.load(path, method, silos=data)
        assert "jit(_start)" not in compiled and "jit(_run_rounds)" not in compiled
    path.write_bytes(b"another file")
    with pytest.raises(ValueError, match=r"not a file of fit\.save"):
        nf.load(path, Given(plain))


def plain_with(y, scale=1.0):
    mu = numpyro.sample("mu", dist.Normal(0, scale))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def one_prior_more(y):
    numpyro.sample("nu", dist.Normal(0, 1))
    plain(y)


def test_49_a_loss_that_is_not_finite_names_silo_and_site_and_keeps_the_last_good_fit() -> None:
    def fragile(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", y.shape[0]):
            # log of a number that turns negative once mu has moved: a bug a user could write
            numpyro.factor("penalty", jnp.log(1.0 - jnp.where(y > 5, mu, 0.0)))
            numpyro.sample("y", dist.Normal(10 * mu, 1.0), obs=y)

    silos = Silos({"fine": dict(y=np.zeros(3, "f")), "broken": dict(y=np.full(4, 30.0, "f"))})
    with pytest.raises(nf.NonFiniteError, match=r"round \d+, from silo 'broken' \(site 'penalty'\)") as caught:
        nf.SFVI(fragile, start_rounds=0, optim=optax.adam(0.5)).run(KEY, silos, 1000, progress_bar=False)
    good = caught.value.fit
    assert np.all(np.isfinite(good.history["loss"])) and np.all(np.isfinite(good.sample(KEY, 10)["mu"]))


@pytest.mark.slow
@pytest.mark.parametrize("method", [nf.EP, nf.PVI])
def test_37_flat_priors_that_no_silo_determines_are_named(method: Any) -> None:
    """Two rows' sum determines mu + nu alone: no silo's first tilted distribution is proper."""
    fit = nf.Method.run(method(two_flat), KEY, rows(3, 4)(), 4, progress_bar=False, check=False)
    (reason, *_) = fit.verdict.reasons
    assert not fit.verdict.ok and "'mu' and 'nu' is improper" in reason and "dist.Normal(0, 10)" in reason


# --- all of them ----------------------------------------------------------------------------------------------------


def test_all_sixty_are_here() -> None:
    """By the numbers that their cases begin with, or their tests' names."""
    cases = [*BAD_DATA, *BAD_MODELS, *BAD_SETTINGS, *WARNED, *WORKS]
    tests = [name.removeprefix("test_") for name in globals() if name.startswith("test_")]
    found = {int(match[0]) for name in cases + tests if (match := re.match(r"\d+", name))}
    assert found == set(range(1, 61))


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
            lambda: schedules.sampled(3).cohorts(KEY, ("a", "b"), 0, 1), ValueError, ("3", "2 silos")
        ),
        "cohorts of two sizes": Bad(lambda: schedules.fixed([["a"], ["a", "b"]]), ValueError, ("one size", "[1, 2]")),
        "no such schedule": Bad(
            lambda: schedules.as_schedule("random"), ValueError, ("'random'", "'sequential'", "nf.schedules.sampled")
        ),
        "no schedule at all": Bad(lambda: schedules.as_schedule(3), TypeError, ("int", "'sequential'")),
    }
    for case in bad_schedules.values():
        check(case)
