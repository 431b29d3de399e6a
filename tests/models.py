"""Small models, one for each way in which a NumPyro model can meet silos.

A case knows its silos, where each of its sites must live, and the pooled call: how NumPyro itself would see all the
data at once. ``join`` lays the silos' values of a local site together in the order of the pooled model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import nnx
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.contrib.module import nnx_module, random_nnx_module
from numpyro.distributions import constraints, transforms
from numpyro.infer.reparam import LocScaleReparam

from numpyro_fed.data.silos import Silos
from numpyro_fed.data.split import split


@dataclass(frozen=True)
class Case:
    """A model, its silos (made when called, in the precision of the moment), and what is true of them."""

    model: Callable[..., Any]
    silos: Callable[[], Silos]
    global_sites: tuple[str, ...]
    local_sites: tuple[str, ...] = ()
    enumerated_sites: tuple[str, ...] = field(default=(), kw_only=True)
    observed_sites: tuple[str, ...] = ("y",)
    params: tuple[str, ...] = ()
    silo_plates: tuple[str, ...] = ()
    server_terms: tuple[str, ...] = ()  # observed sites and factors that the server counts, once
    pooled: Callable[[Silos], dict[str, Any]] = field(default=lambda silos: joined(silos))
    pooled_model: Callable[..., Any] | None = None
    join: Callable[[str, Sequence[Any]], Any] = field(default=lambda site, values: jnp.concatenate(values))
    options: dict[str, Any] = field(default_factory=dict)  # local= and shared=


def joined(silos: Silos) -> dict[str, Any]:
    """All silos' rows below one another; counts add up."""
    return silos.shared | jax.tree.map(
        lambda *leaves: sum(leaves) if isinstance(leaves[0], int) else np.concatenate(leaves),
        *(silos.own(name) for name in silos.names),
    )


def joined_with_offsets(**counts: str) -> Callable[[Silos], dict[str, Any]]:
    """As `joined`, indices renumbered: ``joined_with_offsets(county="num_counties")``."""

    def pooled(silos: Silos) -> dict[str, Any]:
        out = joined(silos)
        for index, count in counts.items():
            start, parts = 0, []
            for name in silos.names:
                own = silos.own(name)
                parts.append(own[index] + start)
                start += own[count]
            out[index] = np.concatenate(parts)
        return out

    return pooled


def real(array: Any) -> np.ndarray:
    """In the precision of the moment."""
    return np.asarray(array, jnp.zeros(()).dtype)


def normal(seed: int, *shape: int) -> np.ndarray:
    return real(np.random.default_rng(seed).normal(size=shape))


def binary(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2, shape).astype(np.int32)


def regression(*sizes: int) -> Callable[[], Silos]:
    """Silos with x (n, 2) and y (n,)."""
    return lambda: Silos({f"s{j}": dict(x=normal(j, n, 2), y=normal(j + 50, n)) for j, n in enumerate(sizes)})


def rows(*sizes: int) -> Callable[[], Silos]:
    """Silos with y (n,) alone."""
    return lambda: Silos({f"s{j}": dict(y=normal(j, n)) for j, n in enumerate(sizes)})


# --- the models -----------------------------------------------------------------------------------------------------


def glmm(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 2).expand([2]).to_event(1))
    omega = numpyro.sample("omega", dist.HalfNormal(1.0))
    with numpyro.plate("children", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, omega))
        numpyro.sample("y", dist.Bernoulli(logits=x @ beta + b), obs=y)


def no_locals(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def item_response(y):
    with numpyro.plate("items", y.shape[1]):
        difficulty = numpyro.sample("difficulty", dist.Normal(0, 1))
    with numpyro.plate("students", y.shape[0]):
        ability = numpyro.sample("ability", dist.Normal(0, 1))
    with numpyro.plate("students_", y.shape[0], dim=-2), numpyro.plate("items_", y.shape[1], dim=-1):
        numpyro.sample("y", dist.Bernoulli(logits=ability[:, None] - difficulty), obs=y)


def counties(county, num_counties, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("counties", num_counties):
        alpha = numpyro.sample("alpha", dist.Normal(mu, tau))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(alpha[county], 1.0), obs=y)


COUNTY = np.array([0, 3, 3, 1, 2, 5, 5, 4, 0, 1, 6])
STATE = np.array(["n", "s", "s", "n", "s", "w", "w", "n", "n", "n", "w"])
COUNTIES_OF = {"n": [0, 1, 4], "s": [2, 3], "w": [5, 6]}


def counties_split() -> Silos:
    return split(STATE, groups=dict(county="num_counties"), county=COUNTY, num_counties=7, y=normal(0, 11))


def into_counties(site: str, values: Sequence[Any]) -> Any:
    out = jnp.zeros(7)
    for where, value in zip(COUNTIES_OF.values(), values, strict=True):
        out = out.at[np.array(where)].set(value)
    return out


def county_covariates(county, uranium, y):
    gamma = numpyro.sample("gamma", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("counties", uranium.shape[0]):
        alpha = numpyro.sample("alpha", dist.Normal(uranium @ gamma, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(alpha[county], 1.0), obs=y)


def theta(x, y):
    sigma = numpyro.param("sigma", 1.5, constraint=constraints.positive)
    weights = numpyro.param("weights", jnp.full(3, 1 / 3), constraint=constraints.simplex)
    slope = numpyro.param("slope", jnp.ones(2))
    numpyro.param("unused", 2.0)
    mu = numpyro.sample("mu", dist.Normal(weights[0], 1.0))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(mu, sigma))
        numpyro.sample("y", dist.Normal(b + x @ slope, weights[1]), obs=y)


def supports(x, y):
    scale = numpyro.sample("scale", dist.HalfNormal(jnp.ones(2)).to_event(1))
    mixture = numpyro.sample("mixture", dist.Dirichlet(jnp.ones(3)))
    cut = numpyro.sample(
        "cut", dist.TransformedDistribution(dist.Normal(0, 1).expand([3]).to_event(1), transforms.OrderedTransform())
    )
    chol = numpyro.sample("chol", dist.LKJCholesky(2, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.MultivariateNormal(jnp.zeros(2), scale_tril=scale[:, None] * chol))
        numpyro.sample("y", dist.OrderedLogistic((x * b).sum(-1) + mixture[0], cut), obs=y)


def uniform_bounds(y):
    low = numpyro.sample("low", dist.Normal(0, 1))
    width = numpyro.sample("width", dist.Uniform(0.5, 2.0))
    mu = numpyro.sample("mu", dist.Uniform(low, low + width))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Uniform(mu - 1, mu + 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def constrained_locals(x, y):
    shape = numpyro.sample("shape", dist.Gamma(2.0, 1.0))
    with numpyro.plate("rows", y.shape[0]):
        rate = numpyro.sample("rate", dist.Gamma(shape, 1.0))
        parts = numpyro.sample("parts", dist.Dirichlet(jnp.array([1.0, 2.0])))
        numpyro.sample("y", dist.Poisson(rate * (x**2 * parts).sum(-1)), obs=y)


def patients_and_nurses(patient_y, nurse_y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("patients", patient_y.shape[0]):
        a = numpyro.sample("a", dist.Normal(mu, 1))
        numpyro.sample("patient_y", dist.Normal(a, 1), obs=patient_y)
    with numpyro.plate("nurses", nurse_y.shape[0]):
        b = numpyro.sample("b", dist.LogNormal(mu, 1))
        numpyro.sample("nurse_y", dist.Normal(0, b), obs=nurse_y)


def districts(district, num_districts, y):
    tau = numpyro.sample("tau", dist.HalfNormal(jnp.ones(2)))
    with numpyro.plate("districts", num_districts):
        d = numpyro.sample("d", dist.Normal(0, tau[0]))
    with numpyro.plate("patients", y.shape[0]):
        p = numpyro.sample("p", dist.Normal(d[district], tau[1]))
        numpyro.sample("y", dist.Normal(p, 1), obs=y)


def crossed_own(teacher_x, pupil_x, teacher, pupil, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    teachers = numpyro.plate("teachers", teacher_x.shape[0], dim=-2)
    pupils = numpyro.plate("pupils", pupil_x.shape[0], dim=-1)
    with pupils:
        skill = numpyro.sample("skill", dist.Normal(pupil_x, 1))
    with teachers, pupils:
        match = numpyro.sample("match", dist.Normal(0, tau).expand([2]).to_event(1))
    with numpyro.plate("marks", y.shape[0]):
        numpyro.sample("y", dist.Normal(match[teacher, pupil].sum(-1) + skill[pupil] + teacher_x[teacher], 1), obs=y)


def crossed_silos(teachers: Sequence[int], pupils: Sequence[int], marks: Sequence[int]) -> Callable[[], Silos]:
    def make() -> Silos:
        silos = {}
        for j, (t, p, n) in enumerate(zip(teachers, pupils, marks, strict=True)):
            draws = np.random.default_rng(j)
            silos[f"school{j}"] = dict(
                teacher_x=normal(j, t),
                pupil_x=normal(j + 10, p),
                teacher=draws.integers(0, t, n),
                pupil=draws.integers(0, p, n),
                y=normal(j + 20, n),
            )
        return Silos(silos)

    return make


def crossed_own_pooled(schools):
    """The same model over all schools: pairs of teacher and pupil exist within a school only."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    for name, data in schools.items():
        with handlers.scope(prefix=name), handlers.block(hide=["tau"]), handlers.condition(data={"tau": tau}):
            crossed_own(**data)


def pairs(x, sender, receiver, y):
    """A silo's people twice: as senders and as receivers."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("senders", x.shape[0], dim=-2), numpyro.plate("receivers", x.shape[0], dim=-1):
        tie = numpyro.sample("tie", dist.Normal(x, tau))
    with numpyro.plate("letters", y.shape[0]):
        numpyro.sample("y", dist.Normal(tie[sender, receiver], 1), obs=y)


def pairs_silos() -> Silos:
    people = lambda j, n, m: np.random.default_rng(j).integers(0, n, m)
    return Silos(
        {
            f"s{j}": dict(x=normal(j, n), sender=people(j, n, m), receiver=people(j + 9, n, m), y=normal(j + 20, m))
            for j, (n, m) in enumerate([(2, 5), (3, 4)])
        }
    )


def pairs_pooled(silos):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    for name, data in silos.items():
        with handlers.scope(prefix=name), handlers.block(hide=["tau"]), handlers.condition(data={"tau": tau}):
            pairs(**data)


def visits(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("visits", 4, dim=-1):
        trend = numpyro.sample("trend", dist.Normal(0, 1))
    with numpyro.plate("patients", y.shape[0], dim=-2):
        level = numpyro.sample("level", dist.Normal(mu, 1))
        with numpyro.plate("visits_", 4, dim=-1):
            noise = numpyro.sample("noise", dist.Gamma(2.0, jnp.exp(trend)))
            numpyro.sample("y", dist.Normal(level, noise), obs=y)


def silo_level(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    a = numpyro.sample("a", dist.Normal(mu, 1))
    s = numpyro.sample("s", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a + x @ s[:2], 1), obs=y)


def silo_level_pooled(x, y, silo):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("silos", 3):
        a = numpyro.sample("a", dist.Normal(mu, 1))
        s = numpyro.sample("s", dist.Dirichlet(jnp.ones(3)))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a[silo] + (x * s[silo, :2]).sum(-1), 1), obs=y)


def hospitals(hospital, num_hospitals, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("hospital", num_hospitals):
        a = numpyro.sample("a", dist.Normal(mu, 1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(a[hospital], 1), obs=y)


def hospitals_split() -> Silos:
    hospital = np.array([2, 0, 0, 1, 2, 2])
    return split(hospital, groups=dict(hospital="num_hospitals"), hospital=hospital, num_hospitals=3, y=normal(0, 6))


def scaled(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with handlers.scale(scale=0.5), numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Gamma(jnp.exp(mu), 1.0))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def weighted(y, weight):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]), handlers.scale(scale=weight):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def masked(y, present):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        with handlers.mask(mask=present):
            b = numpyro.sample("b", dist.LogNormal(mu, 1))
            numpyro.sample("y", dist.Normal(b, 1), obs=y)


def imputed(x, y, present):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y, obs_mask=present)


def with_present(*sizes: int, columns: bool = False) -> Callable[[], Silos]:
    return lambda: Silos(
        {
            f"s{j}": dict(y=normal(j, n), present=np.arange(n) % 3 != j % 3)
            | (dict(x=normal(j, n, 2)) if columns else {})
            for j, n in enumerate(sizes)
        }
    )


def censored(time, event):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("rows", time.shape[0]):
        frailty = numpyro.sample("frailty", dist.Gamma(3.0, 3.0))
        hazard = rate * frailty
        numpyro.factor("survival", jnp.where(event, jnp.log(hazard), 0) - hazard * time)


def censored_silos() -> Silos:
    return Silos(
        {f"s{j}": dict(time=np.abs(normal(j, n)), event=np.arange(n) % 2 == 0) for j, n in enumerate((3, 5, 2))}
    )


def factor_at_server(y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([3]))
    numpyro.factor("smooth", -0.5 * jnp.sum(jnp.diff(beta) ** 2))
    numpyro.factor("rows", dist.Normal(beta.sum(), 1).log_prob(y))


def without_plate(x, y):
    beta = numpyro.sample("beta", dist.Normal(jnp.zeros(2), 1).to_event(1))
    numpyro.sample("y", dist.Normal(x @ beta, 1.0), obs=y)


def deterministics(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    numpyro.deterministic("odds", jnp.exp(beta))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, 1))
        mean = numpyro.deterministic("mean", x @ beta + b)
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def reshaped(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    visits = y.reshape(-1, 4)
    dose = x.reshape(-1, 4, 2).sum(-1)
    with numpyro.plate("patients", visits.shape[0], dim=-2):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        with numpyro.plate("visits", 4, dim=-1):
            numpyro.sample("y", dist.Normal(b + dose, 1), obs=visits)


def nested_arguments(data, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1))
    with numpyro.plate("rows", y["time"].shape[0]):
        b = numpyro.sample("b", dist.Normal(data["a"] * beta + data["b"][0].sum(-1), 1))
        numpyro.sample("y", dist.Normal(b, 1), obs=y["time"])


def nested_silos() -> Silos:
    return Silos(
        [
            dict(data={"a": normal(j, n), "b": (normal(j, n, 3),)}, y={"time": normal(j + 9, n)})
            for j, n in enumerate((2, 4, 1))
        ]
    )


def splines(x, y, knots, degree):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([knots.shape[0]]))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.maximum(x[:, :1] - knots, 0) ** degree @ beta, 1), obs=y)


def sum_to_zero(y):
    with numpyro.plate("items", y.shape[1]):
        beta = numpyro.sample("beta", dist.Normal(0, 1))
    numpyro.sample("zero", dist.Normal(beta.sum(), 0.1), obs=0.0)
    numpyro.sample("y", dist.Normal(beta, 1), obs=y)


@handlers.reparam(config={"b": LocScaleReparam(0.0), "beta": LocScaleReparam(0.3)})
def reparametrised(x, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    beta = numpyro.sample("beta", dist.Normal(jnp.ones(2), tau))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Normal(x @ beta, tau))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def transformed(y):
    affine = transforms.AffineTransform(1.0, 2.0, domain=constraints.unit_interval)
    mu = numpyro.sample("mu", dist.TransformedDistribution(dist.Normal(0, 1), transforms.ExpTransform()))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.TransformedDistribution(dist.Beta(2.0, mu), affine))
        numpyro.sample("y", dist.Normal(b, 1), obs=y)


def states_in_time(y):
    drift = numpyro.sample("drift", dist.Normal(0, 0.1))
    n = y.shape[0]

    def step(state, y_now):
        with numpyro.plate("patients", n):
            state = numpyro.sample("state", dist.Normal(0.9 * state + drift, 1.0))
            numpyro.sample("y", dist.Normal(state, 1.0), obs=y_now)
        return state, None

    scan(step, jnp.zeros(n), y.T)


def trend_in_time(y):
    """A state of the world, the same for all silos, seen by each in its own rows."""
    n = y.shape[0]

    def step(level, y_now):
        level = numpyro.sample("level", dist.LogNormal(level, 1.0))
        with numpyro.plate("rows", n):
            numpyro.sample("y", dist.Normal(level, 1.0), obs=y_now)
        return level, None

    scan(step, jnp.zeros(()), y.T)


def gaussian_mixture(y):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    means = numpyro.sample("means", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(means, 1.0)), obs=y)


def correlated(x, y):
    scale = numpyro.sample("scale", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0], dim=-2):
        with numpyro.plate("outcomes", 2, dim=-1):
            b = numpyro.sample("b", dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)))
    with numpyro.plate("rows_", y.shape[0]):
        numpyro.sample("y", dist.MultivariateNormal((b * x[:, None]).sum(-1), jnp.diag(scale)), obs=y)


def sample_shape(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1), sample_shape=(2,))
    b = numpyro.sample("b", dist.Gamma(2.0, jnp.exp(mu.sum())), sample_shape=(y.shape[0],))
    numpyro.sample("y", dist.Normal(b, 1), obs=y)


def exposure(y, offset, prior_scale):
    rate = numpyro.sample("rate", dist.HalfNormal(prior_scale))
    with numpyro.plate("rows", y.shape[0]):
        b = numpyro.sample("b", dist.Gamma(rate, 1.0))
        numpyro.sample("y", dist.Poisson(offset * b), obs=y)


def exposure_silos() -> Silos:
    return Silos(
        [dict(y=binary(j, n) + j, offset=real(j + 0.5)) for j, n in enumerate((3, 2, 4))], shared=dict(prior_scale=2.0)
    )


def eight_schools(effect, error):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("schools", effect.shape[0]):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("effect", dist.Normal(theta, error), obs=effect)


def residuals(x, y):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("residual", dist.Normal(y - x @ beta, 1), obs=0.0)


# --- with discrete latents --------------------------------------------------------------------------------------------


def classes(y):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    means = numpyro.sample("means", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        kind = numpyro.sample("kind", dist.Categorical(weights))
        numpyro.sample("y", dist.Normal(means[kind], 1.0), obs=y)


def class_and_intercept(x, y):
    """A class and an intercept of each row, whose spread depends on the class; observed twice."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        kind = numpyro.sample("kind", dist.Categorical(weights))
        level = numpyro.sample("level", dist.LogNormal(kind, scale[kind]))
        offset = numpyro.sample("offset", dist.Normal(0, scale[0]))
        numpyro.sample("x", dist.Normal(level[..., None] + offset[..., None], 1).to_event(1), obs=x)
        numpyro.sample("y", dist.Normal(offset, scale[kind]), obs=y)


def several_discrete(x, y):
    """Two that meet, one of them with a parent, and one by itself."""
    p = numpyro.sample("p", dist.Beta(2, 2))
    table = numpyro.sample("table", dist.Dirichlet(jnp.ones((2, 3))).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        ill = numpyro.sample("ill", dist.Bernoulli(p))
        stage = numpyro.sample("stage", dist.Categorical(table[ill]), infer={"enumerate": "parallel"})
        seen = numpyro.sample("seen", dist.Bernoulli(1 - p))
        numpyro.sample("a", dist.Normal(stage + ill, 1.0), obs=x[:, 0])
        numpyro.sample("b", dist.Normal(ill, 1.0), obs=x[:, 1])
        numpyro.sample("y", dist.Normal(p * seen, 1.0), obs=y)


def chain_of_classes(y):
    """Hidden states of three visits, each with a site of its own."""
    move = numpyro.sample("move", dist.Dirichlet(jnp.ones((2, 2))).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        state = 0
        for t in range(3):
            state = numpyro.sample(f"state_{t}", dist.Categorical(move[state]))
            numpyro.sample(f"y_{t}", dist.Normal(state, 1.0), obs=y[:, t])


def classes_of_visits(y):
    """A class of each patient, and one of each of its visits that depends on it."""
    p = numpyro.sample("p", dist.Beta(2, 2).expand([2]).to_event(1))
    with numpyro.plate("patients", y.shape[0], dim=-2):
        frail = numpyro.sample("frail", dist.Bernoulli(p[0]))
        with numpyro.plate("visits", 4, dim=-1):
            bad = numpyro.sample("bad", dist.Bernoulli(p[frail]))
            numpyro.sample("y", dist.Normal(bad - frail, 1.0), obs=y)


def classes_of_items(y):
    """Latent class analysis; rows have another dim where items are crossed with them."""
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    p = numpyro.sample("p", dist.Beta(1, 1).expand([3, 5]))
    with numpyro.plate("students", y.shape[0]):
        kind = numpyro.sample("kind", dist.Categorical(weights))
    with numpyro.plate("students_", y.shape[0], dim=-2), numpyro.plate("items", 5, dim=-1):
        numpyro.sample("y", dist.Bernoulli(p[kind]), obs=y)


def classes_of_items_summed(y):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    p = numpyro.sample("p", dist.Beta(1, 1).expand([3, 5]))
    with numpyro.plate("students", y.shape[0]):
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights), dist.Bernoulli(p).to_event(1)), obs=y)


def classes_of_counties(county, num_counties, y):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    means = numpyro.sample("means", dist.Normal(0, 1).expand([3]))
    with numpyro.plate("counties", num_counties):
        kind = numpyro.sample("kind", dist.Categorical(weights))
        level = numpyro.sample("level", dist.Normal(means[kind], 1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(level[county] + means[kind[county]], 1.0), obs=y)


def classes_of_counties_summed(county, num_counties, y):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(3)))
    means = numpyro.sample("means", dist.Normal(0, 1).expand([3]))
    with numpyro.plate("counties", num_counties):
        level = numpyro.sample("level", dist.ImproperUniform(constraints.real, (), ()))
    log_y = dist.Normal(level[county][:, None] + means, 1.0).log_prob(y[:, None])
    log_level = dist.Normal(means, 1.0).log_prob(level[:, None])
    of_county = jnp.zeros((num_counties, 3)).at[county].add(log_y) + log_level + jnp.log(weights)
    numpyro.factor("y", jax.nn.logsumexp(of_county, axis=1))


def class_of_silo(y):
    p = numpyro.sample("p", dist.Beta(2, 2))
    kind = numpyro.sample("kind", dist.Bernoulli(p))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(kind, 1.0), obs=y)


def class_of_silo_summed(silos):
    p = numpyro.sample("p", dist.Beta(2, 2))
    for name, y in silos.items():
        log_y = dist.Normal(jnp.arange(2), 1.0).log_prob(y[:, None]).sum(0)
        numpyro.factor(name, jax.nn.logsumexp(log_y + jnp.log(jnp.array([1 - p, p]))))


def imputed_binary(x, y, present):
    """What is missing is seen again, in x."""
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    with numpyro.plate("rows", y.shape[0]):
        y = numpyro.sample("y", dist.Bernoulli(logits=beta[0]), obs=y, obs_mask=present)
        numpyro.sample("x", dist.Normal(beta[1] * y, 1.0), obs=x)


def imputed_binary_summed(x, y, present):
    beta = numpyro.sample("beta", dist.Normal(0, 1).expand([2]))
    log_y = dist.Bernoulli(logits=beta[0]).log_prob
    log_x = lambda y: dist.Normal(beta[1] * y, 1.0).log_prob(x)
    summed = jnp.logaddexp(log_y(0) + log_x(0), log_y(1) + log_x(1))
    numpyro.factor("rows", jnp.where(present, log_y(y) + log_x(y), summed))


def masked_classes(y, present):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    with numpyro.plate("rows", y.shape[0]), handlers.mask(mask=present):
        kind = numpyro.sample("kind", dist.Categorical(weights))
        numpyro.sample("y", dist.Normal(kind, 1.0), obs=y)


def masked_classes_summed(y, present):
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.ones(2)))
    mixture = dist.MixtureSameFamily(dist.Categorical(weights), dist.Normal(jnp.arange(2.0), 1.0))
    with numpyro.plate("rows", y.shape[0]), handlers.mask(mask=present):
        numpyro.sample("y", mixture, obs=y)


def dice(y):
    """Values that do not start at zero, and a param."""
    scale = numpyro.param("scale", 1.0, constraint=constraints.positive)
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("rows", y.shape[0]):
        die = numpyro.sample("die", dist.DiscreteUniform(1, 3))
        pips = numpyro.deterministic("pips", 2 * die)
        numpyro.sample("y", dist.Normal(mu * pips, scale), obs=y)


def dice_summed(y):
    scale = numpyro.param("scale", 1.0, constraint=constraints.positive)
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    values = dist.Normal(mu * jnp.array([2.0, 4.0, 6.0]), scale)
    numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(jnp.ones(3) / 3), values), obs=y)


class Network(nnx.Module):
    """Two inputs, two hidden units, one output."""

    def __init__(self, seed=0):
        self.hidden = nnx.Linear(2, 2, rngs=nnx.Rngs(seed))
        self.out = nnx.Linear(2, 1, rngs=nnx.Rngs(seed + 1))

    def __call__(self, x):
        return self.out(jnp.tanh(self.hidden(x)))[:, 0]


NETWORK = Network()  # made outside of the model


def random_network(x, y):
    network = random_nnx_module("net", NETWORK, prior=dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=network(x)), obs=y)


def learned_network(x, y):
    network = nnx_module("net", Network())  # made inside of the model
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    with numpyro.plate("rows", x.shape[0]):
        b = numpyro.sample("b", dist.Normal(0, sigma))
        numpyro.sample("y", dist.Normal(network(x) + b, 1.0), obs=y)


def last_layer(x, y):
    prior = {"out.kernel": dist.Laplace(0, 1), "out.bias": dist.Normal(0, 1)}  # the hidden layer is learned
    network = random_nnx_module("net", NETWORK, prior=prior)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(network(x), 1.0), obs=y)


MODELS: dict[str, Case] = {
    "glmm": Case(
        glmm,
        lambda: Silos({f"s{j}": dict(x=normal(j, n, 2), y=binary(j, n)) for j, n in enumerate((3, 7, 4))}),
        ("beta", "omega"),
        ("b",),
        silo_plates=("children",),
    ),
    "no locals": Case(no_locals, regression(3, 5), ("beta", "sigma"), silo_plates=("rows",)),
    "one silo": Case(no_locals, regression(4), ("beta", "sigma"), silo_plates=("rows",)),
    "one row each": Case(
        glmm,
        lambda: Silos([dict(x=normal(j, 1, 2), y=binary(j, 1)) for j in range(3)]),
        ("beta", "omega"),
        ("b",),
        silo_plates=("children",),
    ),
    "items": Case(
        item_response,
        lambda: Silos([dict(y=binary(j, n, 20)) for j, n in enumerate((3, 5, 2))]),
        ("difficulty",),
        ("ability",),
        silo_plates=("students", "students_"),
    ),
    "20 students x 20 items": Case(
        item_response,
        lambda: Silos([dict(y=binary(j, 20, 20)) for j in range(2)]),
        ("difficulty",),
        ("ability",),
        silo_plates=("students", "students_"),
    ),
    "long format": Case(
        counties,
        counties_split,
        ("mu", "tau"),
        ("alpha",),
        silo_plates=("counties", "rows"),
        # silo by silo, so that the pooled rows come in the order of the pooled counties
        pooled=lambda silos: dict(county=COUNTY, num_counties=7, y=normal(0, 11)),
        join=into_counties,
    ),
    "county covariates": Case(
        county_covariates,
        lambda: split(STATE, groups=dict(county="uranium"), county=COUNTY, uranium=normal(1, 7, 2), y=normal(0, 11)),
        ("gamma",),
        ("alpha",),
        silo_plates=("counties", "rows"),
        pooled=lambda silos: dict(county=COUNTY, uranium=normal(1, 7, 2), y=normal(0, 11)),
        join=into_counties,
    ),
    "theta": Case(
        theta, regression(2, 4, 3), ("mu",), ("b",), params=("sigma", "weights", "slope"), silo_plates=("rows",)
    ),
    "supports": Case(
        supports,
        lambda: Silos([dict(x=normal(j, n, 2), y=binary(j, n) + binary(j + 5, n)) for j, n in enumerate((3, 4))]),
        ("scale", "mixture", "cut", "chol"),
        ("b",),
        silo_plates=("rows",),
    ),
    "uniform bounds": Case(uniform_bounds, rows(2, 3), ("low", "width", "mu"), ("b",), silo_plates=("rows",)),
    "constrained locals": Case(
        constrained_locals,
        lambda: Silos([dict(x=normal(j, n, 2), y=binary(j, n)) for j, n in enumerate((3, 2, 5))]),
        ("shape",),
        ("rate", "parts"),
        silo_plates=("rows",),
    ),
    "several plates": Case(
        patients_and_nurses,
        lambda: Silos(
            [dict(patient_y=normal(j, n), nurse_y=normal(j, m)) for j, (n, m) in enumerate([(3, 2), (2, 4)])]
        ),
        ("mu",),
        ("a", "b"),
        ("patient_y", "nurse_y"),
        silo_plates=("nurses", "patients"),
    ),
    "several plates of equal sizes": Case(
        patients_and_nurses,
        lambda: Silos([dict(patient_y=normal(j, n), nurse_y=normal(j, n)) for j, n in enumerate([3, 2])]),
        ("mu",),
        ("a", "b"),
        ("patient_y", "nurse_y"),
        silo_plates=("nurses", "patients"),
    ),
    "nested plates": Case(
        districts,
        lambda: Silos(
            [dict(district=np.arange(n) % d, num_districts=d, y=normal(d, n)) for n, d in [(5, 2), (3, 3), (4, 1)]]
        ),
        ("tau",),
        ("d", "p"),
        silo_plates=("districts", "patients"),
        pooled=joined_with_offsets(district="num_districts"),
    ),
    "crossed own plates": Case(
        crossed_own,
        crossed_silos((3, 2), (2, 4), (5, 6)),
        ("tau",),
        ("skill", "match"),
        silo_plates=("pupils", "teachers", "marks"),
        pooled=lambda silos: dict(schools={name: silos[name] for name in silos.names}),
        pooled_model=crossed_own_pooled,
        join=lambda site, values: {f"school{j}/{site}": value for j, value in enumerate(values)},
    ),
    "crossed own plates of equal sizes": Case(
        crossed_own,
        crossed_silos((3, 2), (3, 2), (5, 6)),
        ("tau",),
        ("skill", "match"),
        silo_plates=("pupils", "teachers", "marks"),
        pooled=lambda silos: dict(schools={name: silos[name] for name in silos.names}),
        pooled_model=crossed_own_pooled,
        join=lambda site, values: {f"school{j}/{site}": value for j, value in enumerate(values)},
    ),
    "pairs": Case(
        pairs,
        pairs_silos,
        ("tau",),
        ("tie",),
        silo_plates=("senders", "receivers", "letters"),
        pooled=lambda silos: dict(silos={name: silos[name] for name in silos.names}),
        pooled_model=pairs_pooled,
        join=lambda site, values: {f"s{j}/{site}": value for j, value in enumerate(values)},
    ),
    "visits": Case(
        visits,
        lambda: Silos([dict(y=normal(j, n, 4)) for j, n in enumerate((2, 4, 3))]),
        ("mu", "trend"),
        ("level", "noise"),
        silo_plates=("patients",),
    ),
    "silo level": Case(
        silo_level,
        regression(2, 4, 3),
        ("mu",),
        ("a", "s"),
        silo_plates=("rows",),
        pooled=lambda silos: joined(silos) | dict(silo=np.repeat(np.arange(3), [2, 4, 3])),
        pooled_model=silo_level_pooled,
        join=lambda site, values: jnp.stack(values),
        options=dict(local=["a", "s"]),
    ),
    "hospital plate": Case(
        hospitals,
        hospitals_split,
        ("mu",),
        ("a",),
        silo_plates=("rows", "hospital"),
        pooled=lambda silos: dict(hospital=np.array([2, 0, 0, 1, 2, 2]), num_hospitals=3, y=normal(0, 6)),
        join=lambda site, values: jnp.concatenate(values)[np.array([1, 2, 0])],  # the silos are "2", "0", "1"
    ),
    "scale": Case(scaled, rows(3, 2), ("mu",), ("b",), silo_plates=("rows",)),
    "weights": Case(
        weighted,
        lambda: Silos([dict(y=normal(j, n), weight=np.abs(normal(j + 3, n))) for j, n in enumerate((3, 2, 4))]),
        ("mu",),
        ("b",),
        silo_plates=("rows",),
    ),
    "mask": Case(masked, with_present(3, 5), ("mu",), ("b",), silo_plates=("rows",)),
    "obs_mask": Case(
        imputed,
        with_present(4, 2, 3, columns=True),
        ("beta", "sigma"),
        ("y_unobserved",),
        ("y_observed",),
        silo_plates=("rows",),
    ),
    "censored": Case(censored, censored_silos, ("rate",), ("frailty",), ("survival",), silo_plates=("rows",)),
    "factors": Case(factor_at_server, rows(3, 2), ("beta",), (), ("smooth", "rows"), server_terms=("smooth",)),
    "without plate": Case(without_plate, regression(3, 4), ("beta",)),
    "deterministics": Case(deterministics, regression(2, 3), ("beta",), ("b",), silo_plates=("rows",)),
    "reshape": Case(reshaped, regression(8, 4, 12), ("mu",), ("b",), silo_plates=("patients",)),
    "nested arguments": Case(nested_arguments, nested_silos, ("beta",), ("b",), silo_plates=("rows",)),
    "shared arguments": Case(
        splines,
        lambda: Silos([regression(n)()["s0"] for n in (3, 2)], shared=dict(knots=real([-1, 0, 1]), degree=2)),
        ("beta",),
        silo_plates=("rows",),
    ),
    "soft constraint": Case(
        sum_to_zero,
        lambda: Silos([dict(y=normal(j, n, 3)) for j, n in enumerate((2, 4))]),
        ("beta",),
        (),
        ("zero", "y"),
        server_terms=("zero",),
    ),
    "known errors": Case(
        eight_schools,
        lambda: Silos([dict(effect=normal(j, n), error=np.exp(normal(j, n))) for j, n in enumerate((3, 5))]),
        ("mu", "tau"),
        ("theta",),
        ("effect",),
        silo_plates=("schools",),
    ),
    "residuals": Case(residuals, regression(2, 4), ("beta",), (), ("residual",), silo_plates=("rows",)),
    "reparametrised": Case(
        reparametrised, regression(2, 4), ("tau", "beta_decentered"), ("b_decentered",), silo_plates=("rows",)
    ),
    "transformed": Case(transformed, rows(2, 4), ("mu",), ("b",), silo_plates=("rows",)),
    "scan": Case(
        states_in_time,
        lambda: Silos([dict(y=normal(j, n, 3)) for j, n in enumerate((2, 4))]),
        ("drift",),
        ("state",),
        silo_plates=("patients",),
        join=lambda site, values: jnp.concatenate(values, axis=1),
    ),
    "scan of a global state": Case(
        trend_in_time,
        lambda: Silos([dict(y=normal(j, n, 3)) for j, n in enumerate((2, 4))]),
        ("level",),
        silo_plates=("rows",),
    ),
    "mixture": Case(gaussian_mixture, rows(3, 2), ("weights", "means"), silo_plates=("rows",)),
    "correlated": Case(
        correlated,
        lambda: Silos([dict(x=normal(j, n, 2), y=normal(j + 5, n, 2)) for j, n in enumerate((2, 3))]),
        ("scale",),
        ("b",),
        silo_plates=("rows", "rows_"),
    ),
    "sample_shape": Case(sample_shape, rows(3, 2), ("mu",), ("b",)),
    "exposure": Case(
        exposure,
        exposure_silos,
        ("rate",),
        ("b",),
        silo_plates=("rows",),
        pooled=lambda silos: dict(
            y=np.concatenate([silos[name]["y"] for name in silos.names]),
            offset=np.repeat(real([0.5, 1.5, 2.5]), [3, 2, 4]),
            prior_scale=2.0,
        ),
    ),
    "classes": Case(classes, rows(3, 6, 2), ("weights", "means"), enumerated_sites=("kind",), silo_plates=("rows",)),
    "class and intercept": Case(
        class_and_intercept,
        regression(3, 5, 2),
        ("weights", "scale"),
        ("level", "offset"),
        ("x", "y"),
        enumerated_sites=("kind",),
        silo_plates=("rows",),
    ),
    "several discrete": Case(
        several_discrete,
        regression(3, 5),
        ("p", "table"),
        (),
        ("a", "b", "y"),
        enumerated_sites=("ill", "stage", "seen"),
        silo_plates=("rows",),
    ),
    "chain of classes": Case(
        chain_of_classes,
        lambda: Silos([dict(y=normal(j, n, 3)) for j, n in enumerate((3, 4))]),
        ("move",),
        (),
        ("y_0", "y_1", "y_2"),
        enumerated_sites=("state_0", "state_1", "state_2"),
        silo_plates=("rows",),
    ),
    "classes of visits": Case(
        classes_of_visits,
        lambda: Silos([dict(y=normal(j, n, 4)) for j, n in enumerate((3, 5))]),
        ("p",),
        enumerated_sites=("frail", "bad"),
        silo_plates=("patients",),
    ),
    "classes of items": Case(
        classes_of_items,
        lambda: Silos([dict(y=binary(j, n, 5)) for j, n in enumerate((3, 6))]),
        ("weights", "p"),
        enumerated_sites=("kind",),
        silo_plates=("students", "students_"),
        pooled_model=classes_of_items_summed,
    ),
    "classes of counties": Case(
        classes_of_counties,
        counties_split,
        ("weights", "means"),
        ("level",),
        enumerated_sites=("kind",),
        silo_plates=("counties", "rows"),
        pooled=lambda silos: dict(county=COUNTY, num_counties=7, y=normal(0, 11)),
        pooled_model=classes_of_counties_summed,
        join=into_counties,
    ),
    "class of silo": Case(
        class_of_silo,
        rows(3, 5),
        ("p",),
        enumerated_sites=("kind",),
        silo_plates=("rows",),
        pooled=lambda silos: dict(silos={name: silos[name]["y"] for name in silos.names}),
        pooled_model=class_of_silo_summed,
        options=dict(local=["kind"]),
    ),
    "binary obs_mask": Case(
        imputed_binary,
        lambda: Silos(
            [dict(x=normal(j, n), y=binary(j, n), present=np.arange(n) % 3 != j) for j, n in enumerate((4, 2, 5))]
        ),
        ("beta",),
        (),
        ("y_observed", "x"),
        enumerated_sites=("y_unobserved",),
        silo_plates=("rows",),
        pooled_model=imputed_binary_summed,
    ),
    "masked classes": Case(
        masked_classes,
        with_present(3, 5),
        ("weights",),
        enumerated_sites=("kind",),
        silo_plates=("rows",),
        pooled_model=masked_classes_summed,
    ),
    "dice": Case(
        dice,
        rows(3, 5),
        ("mu",),
        enumerated_sites=("die",),
        params=("scale",),
        silo_plates=("rows",),
        pooled_model=dice_summed,
    ),
    "random network": Case(
        random_network,
        lambda: Silos([dict(x=normal(j, n, 2), y=binary(j, n)) for j, n in enumerate((3, 5))]),
        ("net/hidden.bias", "net/hidden.kernel", "net/out.bias", "net/out.kernel"),
        silo_plates=("rows",),
    ),
    "learned network": Case(
        learned_network, regression(2, 4), ("sigma",), ("b",), params=("net$params",), silo_plates=("rows",)
    ),
    "last layer": Case(
        last_layer,
        regression(3, 5),
        ("net/out.bias", "net/out.kernel"),
        params=("net$params",),
        silo_plates=("rows",),
    ),
}
