"""What the server learns before the first round, over all kinds of models."""

from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from models import MODELS
from numpyro import handlers
from tiers import tiers

import numpyro_fed as nf
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.stack import stack_of
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.model.build import split_model
from numpyro_fed.model.partition import partition
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.run import survey
from numpyro_fed.run.prepare import prepare

FEW = ["glmm", "long format", "obs_mask", "reshape"]


@pytest.mark.parametrize("name", tiers(MODELS, *FEW))
def test_everyones_answers_together_are_those_of_single_silos(name: str) -> None:
    """Padded in buckets and all at once, or each by itself."""
    case = MODELS[name]
    silos = case.silos()
    split = split_model(case.model, silos, **case.options, check=False)
    stack = stack_of(silos, silos, split.spec, split.partition.axes)
    together, _ = survey.take(split, stack, Vmap(), None)
    alone = [answer_alone(split, silos, name) for name in silos.names]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *alone)
    jax.tree.map(np.testing.assert_array_equal, together, stacked)
    assert survey.combined(split, together, stack).sizes == tuple(
        max(1, sum(int(count) for count in one.observations.values())) for one in alone
    )


def answer_alone(split: SplitModel, silos: Silos, name: str) -> survey.Answer:
    one = silos.only(name)
    axes = tuple(axis._replace(lengths={name: axis.lengths[name]}, free=False) for axis in split.partition.axes)
    data = stack_of(one, one, split.spec, axes).data(name)
    return jax.device_get(jax.jit(lambda data: survey.answer(split, None, data))(data))


# --- how many observations there are ----------------------------------------------------------------------------------


def crossed(x, z):
    """A term for every pupil and every teacher."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("pupils", x.shape[0], dim=-2), numpyro.plate("teachers", z.shape[0], dim=-1):
        numpyro.sample("y", dist.Normal(mu, 1), obs=x[:, None] * z)


def twice(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(mu, 1), obs=x)
        numpyro.sample("y", dist.Normal(x + mu, 1), obs=y)


def missing(present, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y, obs_mask=present)


def masked(present, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]), handlers.mask(mask=present):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def factors(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.factor("term", -((y - mu) ** 2))


def events(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, 1).expand([3]).to_event(1), obs=y)


ones = lambda *shape: np.ones(shape, np.float32)
some_present = lambda n: np.arange(n) % 2 == 0  # 3 of 5, and 1 of 2
COUNTED: dict[str, tuple[Any, list[dict[str, Any]], tuple[int, ...]]] = {
    "crossed own plates": (crossed, [dict(x=ones(n), z=ones(m)) for n, m in ((4, 5), (2, 3))], (20, 6)),
    "two sites on one axis": (twice, [dict(x=ones(n), y=ones(n)) for n in (5, 2)], (10, 4)),
    "obs_mask": (missing, [dict(y=ones(n), present=some_present(n)) for n in (5, 2)], (3, 1)),
    "handlers.mask": (masked, [dict(y=ones(n), present=some_present(n)) for n in (5, 2)], (3, 1)),
    "nothing present": (masked, [dict(y=ones(n), present=np.zeros(n, bool)) for n in (5, 2)], (1, 1)),  # at least 1
    "factors": (factors, [dict(y=ones(n)) for n in (5, 2)], (5, 2)),
    "events count once": (events, [dict(y=ones(n, 3)) for n in (5, 2)], (5, 2)),
}


@pytest.mark.parametrize("name", COUNTED)
def test_observations_are_counted(name: str) -> None:
    model, silos, sizes = COUNTED[name]
    assert prepare(model, nf.Silos(silos)).survey.sizes == sizes


# --- what shapes cannot tell ------------------------------------------------------------------------------------------

# Models of tests/models.py of which a user is asked, for a plate could be each silo's own or shared by all. Values
# could tell more than shapes, but the server does not see them. (More questions are in test_partition.py.)
ASKED: list[str] = []


def asks(name: str) -> bool:
    case = MODELS[name]
    try:
        partition(case.model, case.silos())
    except nf.PartitionError as error:
        return "global or local?" in str(error)
    return False


def test_who_is_asked() -> None:
    """Those without options are divided without any in test_partition.py."""
    assert [name for name, case in MODELS.items() if case.options and asks(name)] == ASKED
