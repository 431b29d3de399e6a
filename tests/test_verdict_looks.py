"""What points around q do not see, the verdict looks at apart: locals given the globals, other modes, theta."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from tiers import tiers

import numpyro_fed as nf
from benchmarks.verdict import Given, asked
from numpyro_fed.engines.loopback import Loopback
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.guides.posterior import GuidePosterior
from numpyro_fed.results.importance import pareto_k, pareto_smoothed
from numpyro_fed.results.looks import LocalLook, Looks, ModesLook
from numpyro_fed.results.verdict import Evidence, Verdict, globals_at, judged
from numpyro_fed.run.check import checked
from numpyro_fed.run.locals import HasLocals, fixed_points
from numpyro_fed.run.runner import Runner
from numpyro_fed.schedules import as_schedule

KEY = jax.random.key(0)


def verdict(
    model: Any, silos: nf.Silos, posterior: Any, normal: nf.Normal, engine: Any = None, schedule: Any = None
) -> tuple[Verdict, Evidence, Runner]:
    """On a posterior whose silos keep nothing."""
    split, survey, stack, _ = nf.SFVI(model).prepare(silos)
    runner = Runner(engine or Vmap(), KEY, stack, split, as_schedule(schedule), False, "Given")
    evidence = checked(runner, posterior, survey, normal, False, tuple(() for _ in stack.buckets))
    assert isinstance(evidence, Evidence)
    draws = globals_at(split, posterior.theta(normal), evidence.points)
    return judged(evidence, normal, draws, (), False), evidence, runner


# --- Pareto's k -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [64, 256])
def test_pareto_k_is_that_of_arviz(num: int) -> None:
    """Many sets of weights at once, light tails and heavy ones, and one where a single weight is all there is."""
    rng = np.random.default_rng(0)
    scale = np.array([0.1, 0.5, 2.0, 40.0])
    log_weights = np.concatenate([scale * rng.normal(size=(num, 4)), rng.exponential(size=(num, 2)) * [0.3, 0.9]], 1)
    expected = [pareto_smoothed(column)[1] for column in log_weights.T]
    with jax.enable_x64(True):  # the same formulas, so rounding alone; sums of up to 48 terms
        np.testing.assert_allclose(pareto_k(jnp.asarray(log_weights)), expected, atol=1e-8)
    assert float(pareto_k(jnp.zeros(num))) == -np.inf


# --- locals -----------------------------------------------------------------------------------------------------------


def intercepts(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 3))
    with numpyro.plate("units", y.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(a, 1), obs=y)


SIZES = (5, 9, 7)
Y = [np.random.default_rng(j).normal(1.0, np.sqrt(2), n).astype(np.float32) for j, n in enumerate(SIZES)]
PRECISION = sum(SIZES) / 2 + 1 / 9
RIGHT = nf.Normal(np.array([sum(y.sum() for y in Y) / 2 / PRECISION]), np.array([[PRECISION**-0.5]]))


class Intercepts(Given):
    """a given mu is N((mu + y) / 2, 1 / 2); here it is off by so many sds, in the rows that are named."""

    def __init__(self, off: float, rows: slice = slice(None)) -> None:
        self.off, self.rows = off, rows

    def local_context(self, server: Any) -> tuple:
        return ()

    def sample_local_with_log_prob(self, key: Any, z: Any, context: Any, silo: Any, data: Any) -> tuple[dict, dict]:
        (y,), sd = data.args, np.sqrt(0.5)
        eps = jax.random.normal(key, y.shape)
        mean = ((z[0] + y) / 2).at[self.rows].add(self.off * sd)
        log_q = -0.5 * eps**2 - 0.5 * jnp.log(2 * jnp.pi) - jnp.log(sd)
        (mask,) = data.mask.values()
        return {"units": (mean + sd * eps)[:, None]}, {"units": jnp.where(mask, log_q, 0.0)}


SILOS = nf.Silos([dict(y=y) for y in Y])


def test_locals_that_are_right_have_equal_weights() -> None:
    found, _, runner = verdict(intercepts, SILOS, Intercepts(0.0), RIGHT)
    assert isinstance(Intercepts(0.0), HasLocals) and found.ok, found
    row = found.table.loc["units"]
    assert row["role"] == "local" and row["low_share"] == 0 and np.isnan(row["shift"])
    assert row["pareto_k"] < 0.7  # in float32 weights differ by rounding; a tail of rounding errors is light
    assert np.isnan(found.table.loc["mu", "pareto_k"]) and "locals of 'units'" in repr(found)
    sent = next(record for record in runner.books.records if record.phase == "locals")
    assert sent.rounds == 1 and 3 * 3 * 4 <= sent.bytes_up < 200  # three numbers of each silo


def test_locals_that_are_off_are_a_reason() -> None:
    """Weights of a normal that is off by m sds have an effective share of exp(-m^2): 1e-4 at three."""
    found, _, _ = verdict(intercepts, SILOS, Intercepts(3.0, slice(0, 2)), RIGHT)
    assert found.status == "not to be trusted" and found.table.loc["mu", "shift"] == pytest.approx(0, abs=1e-3)
    assert found.table.loc["units", "low_share"] == pytest.approx(2 * 3 / sum(SIZES))  # padded rows do not count
    assert "locals of plate 'units': in 29% of its rows" in found.reasons[0] and "nf.EP" in found.reasons[0]


def test_a_few_rows_and_whole_silos_are_told_and_no_reason() -> None:
    assert Looks({"units": LocalLook(2.0, 0.04, True)}).reasons() == ()
    assert Looks({"silo": LocalLook(2.0, 1.0, False)}).reasons() == ()
    assert "100.0% of silos" in Looks({"silo": LocalLook(2.0, 1.0, False)}).notes()[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", [nf.EP, nf.SFVI], ids=["EP", "SFVI"])
def test_a_run_looks_at_its_locals(method: Any) -> None:
    """The locals are normal given the globals, so that both have them exactly: SFVI up to its last steps."""
    fit = method(intercepts).run(KEY, SILOS, progress_bar=False, check=True)
    assert fit.verdict.ok, fit.verdict
    assert fit.verdict.table.loc["units", "low_share"] == 0
    corrected = fit.correct(jax.random.key(1), 512)
    assert corrected.verdict.ok and corrected.verdict.table.loc["units", "role"] == "local"


# --- other modes ------------------------------------------------------------------------------------------------------


def mirrored(y: Any) -> None:
    a = numpyro.sample("a", dist.Normal(0, 2))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a**2, 1), obs=y)


MIRRORED = nf.Silos(
    [dict(y=np.random.default_rng(j).normal(2.2, 1, n).astype(np.float32)) for j, n in enumerate(SIZES)]
)


def around_one_mode() -> nf.Normal:
    """The posterior's mean and sd over a > 0."""
    grid, y = np.linspace(0.01, 4, 4000), np.concatenate([silo["y"] for silo in MIRRORED.values()]).astype(float)
    log_p = -(grid**2) / 8 - 0.5 * np.sum((y[:, None] - grid**2) ** 2, axis=0)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = p @ grid
    return nf.Normal(np.array([mean]), np.array([[np.sqrt(p @ (grid - mean) ** 2)]]))


@pytest.mark.parametrize("engine", [Vmap(), pytest.param(Loopback(), marks=pytest.mark.slow)], ids=["vmap", "loopback"])
def test_a_mirror_image_is_another_mode(engine: Any) -> None:
    """Right around one mode, of which there are two, with half of the mass each; all silos are asked."""
    found, evidence, runner = verdict(mirrored, MIRRORED, Given(), around_one_mode(), engine, nf.schedules.sampled(2))
    assert found.status == "not to be trusted" and "another mode" in found.reasons[0], found
    look: ModesLook = evidence.looks.modes
    assert look.other is not None
    np.testing.assert_allclose(look.share[look.other], 1, rtol=0.1)  # Laplace's, of a skewed density of 21 rows
    assert found.table.loc["a", "shift"] == pytest.approx(0, abs=0.2)  # which is why the points see nothing
    modes = next(record for record in runner.books.records if record.phase == "modes")
    per_round = 3 * 6 * 3 * 4  # silos, searches; value, gradient and curvature in one dimension
    assert per_round * modes.rounds <= modes.bytes_up < (per_round + 300) * modes.rounds


@pytest.mark.slow
def test_one_mode_is_found_from_everywhere() -> None:
    found = asked(intercepts, SILOS, RIGHT, KEY)
    assert found.ok, found
    assert any("searches for other modes" in note for note in found.notes)


def classes(y: Any) -> None:
    """Two classes without an order, each with its own share of ones in four items."""
    p = numpyro.sample("p", dist.Beta(1, 1).expand([2, 4]).to_event(2))
    w = numpyro.sample("w", dist.Beta(2, 2))
    with numpyro.plate("rows", y.shape[0]):
        c = numpyro.sample("c", dist.Bernoulli(w))
        numpyro.sample("y", dist.Bernoulli(p[c]).to_event(1), obs=y)


@pytest.mark.slow
def test_labels_that_can_change_places_are_other_modes() -> None:
    rng, silos = np.random.default_rng(0), []
    for n in (60, 70, 80):
        shares = np.where(rng.uniform(size=(n, 1)) < 0.4, [0.9, 0.8, 0.85, 0.3], [0.2, 0.1, 0.3, 0.6])
        silos.append(dict(y=(rng.uniform(size=(n, 4)) < shares).astype(np.int32)))
    with pytest.warns(nf.VerdictWarning, match="another mode"):
        fit = nf.EP(classes).run(KEY, nf.Silos(silos), progress_bar=False, check=True)
    look = fit.evidence.looks.modes
    assert 0.5 < look.share[look.other] < 2  # alike by symmetry; q's own mass is one of importance sampling


# --- theta ------------------------------------------------------------------------------------------------------------


def scaled(y: Any) -> None:
    mu = numpyro.sample("mu", dist.Normal(0, 100))
    s = numpyro.param("s", 1.0, constraint=dist.constraints.positive)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(mu, s), obs=y)


class Scaled(Given):
    def __init__(self, log_s: float) -> None:
        self.log_s = log_s

    def theta(self, server: Any) -> dict:
        return {"s": jnp.asarray(self.log_s)}


@pytest.mark.parametrize("off", tiers([0.0, 0.1], 0.1))
def test_theta_off_its_maximum_is_a_reason(off: float) -> None:
    """With a flat prior of mu the evidence is largest at s^2 = SS / (n - 1). At log s + .1 its gradient with respect to
    log s is g = (n - 1) (e^-.2 - 1), its information I = 2 (n - 1) e^-.2, and the step is g / sqrt(I)."""
    rng = np.random.default_rng(0)
    y = [rng.normal(0.5, 2, n).astype(np.float32) for n in (30, 50, 40)]
    every = np.concatenate(y).astype(float)
    n, log_s = len(every), np.log(np.std(every, ddof=1)) + off
    normal = nf.Normal(np.array([every.mean()]), np.array([[np.exp(log_s) / np.sqrt(n)]]))
    found, evidence, _ = verdict(scaled, nf.Silos([dict(y=one) for one in y]), Scaled(log_s), normal)
    look = evidence.looks.theta
    expected = (n - 1) * np.expm1(-2 * off) / np.sqrt(2 * (n - 1) * np.exp(-2 * off))
    np.testing.assert_allclose(look.step, [expected], atol=4 * float(look.error[0]) + 0.01)  # and a prior, not flat
    assert look.names == ("s",) and found.ok is (off == 0), found
    if off:
        assert "standard errors away in s (numpyro.param)" in found.reasons[0]


class AtFixedPoints(Intercepts):
    """The same, made of standard normals."""

    def local_from_normals(self, eps: Any, z: Any, context: Any, silo: Any, data: Any) -> tuple[dict, dict]:
        (y,), sd, white = data.args, np.sqrt(0.5), eps["units"][:, 0]
        mean = ((z[0] + y) / 2).at[self.rows].add(self.off * sd)
        log_q = -0.5 * white**2 - 0.5 * jnp.log(2 * jnp.pi) - jnp.log(sd)
        (mask,) = data.mask.values()
        return {"units": (mean + sd * white)[:, None]}, {"units": jnp.where(mask, log_q, 0.0)}


def test_locals_at_fixed_points_say_what_drawn_ones_say() -> None:
    """Nothing is drawn, so the key does not matter; rows that are off are found, and no others."""
    found = [verdict(intercepts, SILOS, AtFixedPoints(3.0, slice(0, 2)), RIGHT)[0] for _ in range(2)]
    drawn, _, _ = verdict(intercepts, SILOS, Intercepts(3.0, slice(0, 2)), RIGHT)
    assert found[0].table.loc["units", "low_share"] == drawn.table.loc["units", "low_share"] == 6 / 21
    assert found[0].table.loc["units", "pareto_k"] == found[1].table.loc["units", "pareto_k"]
    right, _, _ = verdict(intercepts, SILOS, AtFixedPoints(0.0), RIGHT)
    assert right.ok and right.table.loc["units", "low_share"] == 0


def test_where_points_are_fixed() -> None:
    """Rows that meet need numbers of their own, and so do more latents than there are points."""
    split = nf.EP(intercepts).prepare(SILOS).split
    assert fixed_points(split, AtFixedPoints(0.0), "aligned", 128).shape == (128, 1)
    assert fixed_points(split, AtFixedPoints(0.0), "whole", 128) is None
    assert fixed_points(split, AtFixedPoints(0.0), "aligned", 1) is None
    assert fixed_points(split, Intercepts(0.0), "aligned", 128) is None


def test_rows_that_a_guide_mixes_are_drawn() -> None:
    """A row that is made of other rows' normals needs numbers of its own."""
    split = nf.EP(intercepts).prepare(SILOS).split
    of = lambda cov: fixed_points(
        split, GuidePosterior(split, nf.guides.StructuredNormal(local_cov=cov)), "aligned", 128
    )
    assert of("full") is None and of("block").shape == (128, 1)


def test_the_row_that_is_worst_tells_its_own_k() -> None:
    """Weights of a normal half as wide as the conditional have no variance; k is that row's, and not noise."""

    class Narrow(AtFixedPoints):
        def local_from_normals(self, eps: Any, z: Any, context: Any, silo: Any, data: Any) -> tuple[dict, dict]:
            (y,), white = data.args, eps["units"][:, 0]
            sd = jnp.full(y.shape, np.sqrt(0.5)).at[0].multiply(0.4)
            log_q = -0.5 * white**2 - 0.5 * jnp.log(2 * jnp.pi) - jnp.log(sd)
            (mask,) = data.mask.values()
            return {"units": ((z[0] + y) / 2 + sd * white)[:, None]}, {"units": jnp.where(mask, log_q, 0.0)}

    wide, narrow = (verdict(intercepts, SILOS, given, RIGHT)[0] for given in (AtFixedPoints(0.0), Narrow(0.0)))
    # log w grows as white^2 / 2 * (1 - .16): w has a Pareto tail with k = .84
    assert narrow.table.loc["units", "pareto_k"] > 0.5 > wide.table.loc["units", "pareto_k"]
