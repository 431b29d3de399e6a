"""A loss that is not finite: the last good round is found, whenever it was, in few steps."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import numpyro_fed as nf
from numpyro_fed.algorithm import Broadcast, FederatedAlgorithm, Phase, Program
from numpyro_fed.data.axis import Axis
from numpyro_fed.data.padding import call_spec
from numpyro_fed.data.stack import Stack, stack_of
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.run.diagnose import PATIENCE, REFUSED, all_finite, first_bad, last_good

KEY = jax.random.key(0)


def breaks(state: int, loss: int) -> FederatedAlgorithm:
    """A server that counts its rounds: round ``state`` leaves NaN in it, and round ``loss`` tells."""

    def server_step(key: Any, server: Any, found: Any) -> Any:
        at, value = server
        told = jnp.where(at >= loss, jnp.nan, 0.0)
        return (at + 1, jnp.where(at >= state, jnp.nan, value + found)), {"loss": told}

    return FederatedAlgorithm(
        init=lambda key: (jnp.zeros((), jnp.int32), jnp.zeros(())),
        init_silo=lambda key, broadcast, data: (),
        broadcast=lambda key, server: Broadcast(()),
        silo_step=lambda key, broadcast, silo, data: (jnp.sum(data.args[0]), silo),
        aggregate=lambda messages, cohort: jnp.sum(messages),
        server_step=server_step,
    )


class Counting(Vmap):
    calls = 0

    def rounds(self, *args: Any, **options: Any) -> Any:
        type(self).calls += 1
        return super().rounds(*args, **options)


@pytest.fixture
def stack() -> Stack:
    silos = nf.Silos([dict(x=np.ones(2, np.float32))] * 2)
    axes = (Axis("rows", ("x",), (), {name: 2 for name in silos.names}),)
    return stack_of(silos, silos, call_spec(silos, axes), axes)


@pytest.mark.parametrize(
    ("state", "loss"), [(100, 100), (99, 100), (0, 0), (0, 400), (1, 400), (377, 400), (399, 400)], ids=str
)
def test_the_last_good_round_is_found(stack: Stack, state: int, loss: int) -> None:
    """Rounds before ``state`` leave numbers; the search asks for about log2 of 512 rounds, and mostly for two."""
    engine, algorithm = Counting(), breaks(state, loss)
    server, states = engine.start(algorithm, KEY, stack)
    chunk = (algorithm, KEY, stack, server, states, 0, None)
    _, _, info = engine.rounds(*chunk, 512, "least")
    assert int(np.flatnonzero(~np.isfinite(info["loss"]))[0]) == loss
    Counting.calls = 0
    good, (server, _, info) = last_good(engine, chunk, loss, "least")
    assert good == state and int(server[0]) == state and all_finite(server)
    assert float(server[1]) == 4 * state and len(info["loss"]) == state
    assert Counting.calls <= (2 if state >= loss else 11)


@dataclass(frozen=True)
class Breaking(nf.Method):
    """Its loss is a number for three rounds."""

    accepts_stale: ClassVar[bool] = True

    def compile(self, split: Any, survey: Any, plan: Any) -> Program:
        return Program((Phase("rounds", breaks(3, 3), num_rounds=plan.num_rounds),), Counted())


class Counted:
    def sample(self, key: Any, server: Any) -> Any:
        return server[1][None]

    def sample_local(self, key: Any, z: Any, server: Any, silo: Any, data: Any) -> dict:
        return {}

    def theta(self, server: Any) -> dict:
        return {}

    def normal(self, server: Any) -> None:
        return None


def one_mean(x: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("x", dist.Normal(mu, 1), obs=x)


@pytest.mark.parametrize("schedule", [None, "asynchronous"])
def test_the_last_good_state_is_a_fit(schedule: str | None) -> None:
    """Also where silos worked from what they last received."""
    silos = nf.Silos([dict(x=np.ones(2, np.float32))] * 2)
    with pytest.raises(nf.NonFiniteError, match="round 3") as told:
        Breaking(one_mean).run(KEY, silos, 5, schedule=schedule, progress_bar=False)
    assert told.value.fit.state.round == 3
    heard = 2 if schedule is None else 1  # silos in a round, each with a sum of 2
    np.testing.assert_allclose(told.value.fit.sample(KEY, 2)["mu"], 3 * 2 * heard)


def edged(y: Any) -> None:
    """Beyond 1.9 there is no density, which is 2.9 % of the draws; elsewhere the posterior is the prior."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(0 * jnp.log(1.9 - mu), 1), obs=y)


def test_a_draw_where_nothing_is_finite_is_left_out() -> None:
    """Nothing moves in its round; where there are many, the verdict says so."""
    silos = nf.Silos([dict(y=np.array([0.3], np.float32)), dict(y=np.array([0.6], np.float32))])
    method = nf.SFVI(edged)
    with pytest.warns(nf.VerdictWarning):
        fit = method.run(KEY, silos, 600, progress_bar=False, check=False)
    lost = ~np.isfinite(fit.history["loss"])
    expected = 600 * 0.0287  # +- 4.1; q is a little narrower without these draws
    assert expected - 16 < lost.sum() < expected + 13
    assert 0.8 < np.std(fit.sample(KEY, 1000)["mu"]) < 1.1
    assert fit.verdict.status in ("still moving", "not to be trusted")
    assert any("of the rounds the density or its gradient was not finite" in why for why in fit.verdict.reasons)


@pytest.mark.parametrize("size", [1, 3, 7, 512], ids=lambda size: f"chunks of {size}")
@pytest.mark.parametrize(
    ("refused", "bad"),
    [
        ([0] * 50, None),
        ([1] + [0] * 49, None),
        ([0] * 10 + [1] * (PATIENCE - 1) + [0] * 10, None),
        ([0] * 10 + [1] * PATIENCE + [0] * 10, 9 + PATIENCE),
        ([1] * 5, 4),  # all there are
        ([0, 1, 1], None),
    ],
)
def test_how_long_rounds_may_stand_still(refused: list[int], bad: int | None, size: int) -> None:
    """However many rounds are done between two looks."""
    flags = np.array(refused, bool)
    info = {"loss": np.where(flags, np.nan, 1.0), REFUSED: flags}
    before: list[dict] = []
    for start in range(0, len(flags), size):
        chunk = {name: rows[start : start + size] for name, rows in info.items()}
        count = len(chunk["loss"])
        found = first_bad((np.zeros(1), (), chunk), count, before, len(flags))
        assert (found is not None) == (bad is not None and start <= bad < start + size)
        if found is not None:
            assert chunk[REFUSED][found]
            break
        before.append(chunk)


def test_a_loss_for_which_nothing_was_refused() -> None:
    info = {"loss": np.array([1.0, 1.0, np.inf, 1.0]), REFUSED: np.zeros(4, bool)}
    assert first_bad((np.zeros(1), (), info), 4, [], 4) == 2


def test_looks_at_the_run_do_not_change_it(tmp_path: Any) -> None:
    """With a look after every round, too, single rounds are left out and the run goes on."""
    silos = nf.Silos([dict(y=np.array([0.3, 0.6], np.float32))])
    with pytest.warns(nf.VerdictWarning):
        plain, looked = (
            nf.SFVI(edged).run(KEY, silos, 100, progress_bar=False, **options)
            for options in ({}, dict(checkpoint=tmp_path / "run.nfc", checkpoint_every=1))
        )
    assert np.isnan(plain.history["loss"]).sum() > 0
    np.testing.assert_array_equal(plain.history["loss"], looked.history["loss"])


@pytest.mark.parametrize("make", [nf.SFVIAvg, nf.Independent, partial(nf.SFVI, batch_size=1)], ids=str)
def test_others_end_there(make: Any) -> None:
    """Where nobody would hear which row or silo is left out again and again."""
    silos = nf.Silos([dict(y=np.array([0.3, 0.6], np.float32))] * 2)
    with pytest.raises(nf.NonFiniteError):
        make(edged).run(KEY, silos, 400, progress_bar=False)


def hidden(y: Any) -> None:
    """The value is finite, and the derivative in the first row's own latent is not."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        root = jnp.where(y > 5, 0.0, jnp.sqrt(jnp.where(y > 5, 0 * b, 1.0)))
        numpyro.sample("y", dist.Normal(mu + b + root, 1), obs=y)


def test_a_silo_that_cannot_move_is_not_left_alone() -> None:
    """Its parameters are its own; the server hears that their gradient was not finite."""
    silos = nf.Silos([dict(y=np.array([9.0, 0.3], np.float32)), dict(y=np.array([0.6], np.float32))])
    guide = nf.guides.StructuredNormal(coupling=False, local_cov="diagonal")
    with pytest.raises(nf.NonFiniteError):
        nf.SFVI(hidden, guide=guide, start_rounds=0).run(KEY, silos, 60, progress_bar=False)
