r"""How well a model predicts what it has not seen: leave-one-out cross-validation, without leaving anything out.

For each unit :math:`i` of a silo (:mod:`numpyro_fed.local.units`: a row, or all observations that share local latents)

.. math::

    \mathrm{elpd}_i = \log p(y_i \mid y_{-i}) = \log \frac{\sum_s r_{is}\, p(y_i \mid z_s)}{\sum_s r_{is}},
    \qquad r_{is} = \frac{w_s}{p(y_i \mid z_s)}

over draws :math:`z_s` of the globals' posterior, with locals integrated out and the largest ratios :math:`r_{is}`
Pareto smoothed (Vehtari, Gelman and Gabry 2017). The weights :math:`w_s` are those of a correction; draws of other
fits weigh the same, and elpd is then that of the fit's posterior, as good as it is (Magnusson et al. 2019 weigh by
:math:`p / q`; that is what ``fit.correct`` does).

One round. Silos are sent the draws; what leaves a silo are sums over its units and how many of their Pareto k-hats lie
where. elpd by unit stays in the silo. Of a silo with one unit the sums are that unit's.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.scipy.special import logsumexp

from numpyro_fed.algorithm import Broadcast, Cohort, FederatedAlgorithm
from numpyro_fed.checks import check_key
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.silos import at_silo
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines.base import Engine, Traffic, sent
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.host import put, zeros_like
from numpyro_fed.local import units as left_out
from numpyro_fed.local.integrate import Marginal, choose, silo_factor, start_frame
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.rows import components_of
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import in_x64, zeros
from numpyro_fed.results.draws import check_keys, fit_stack
from numpyro_fed.results.importance import smoothed_sets
from numpyro_fed.results.value import Fitted

Array = jax.Array
EDGES = (0.5, 0.7, 1.0)  # of Pareto k-hats: above .7 elpd_i is not to be trusted
BINS = ("k <= 0.5", "0.5 < k <= 0.7", "0.7 < k <= 1", "k > 1")
DRAWS = 256  # of a unit's locals, where they are not integrated by quadrature
LOCAL_STEPS = 30  # of Newton's method to the locals' modes at the posterior mean, from nowhere
LEAST = -1e8  # a log likelihood below this is no number to divide by


class LooBroadcast(NamedTuple):
    """All that a silo receives."""

    points: Array  # (S, d): draws of the globals
    log_weights: Array  # (S,) float64
    centre: Array  # (d,): where it looks for its locals
    theta: dict[str, Array]


class LooMessage(NamedTuple):
    """All that leaves a silo: sums over its units."""

    units: Array  # int: how many there are
    elpd: Array
    elpd_squared: Array
    lpd: Array  # log p(y_i | y), with the unit's own data
    noise: Array  # Monte Carlo variance of elpd
    pareto_k: Array  # (4,) int: units by their k-hat


class LooSilo(NamedTuple):
    """Private to the silo."""

    elpd: Array  # (units,) float64
    size: Array  # (units,) int: observations of each; 0: it is none
    first: Array  # (units,) int: the place of its first observation


class LooServer(NamedTuple):
    sent: LooBroadcast
    heard: LooMessage  # of all silos, stacked in their order


def loo_round(
    split: SplitModel, marginal: Marginal, by: str | None, num_points: int, num_silos: int
) -> FederatedAlgorithm:
    """The round as pure functions; see :mod:`numpyro_fed.algorithm`."""
    rows = "none" if marginal.kind == "none" else marginal.rows

    def units_of(data: SiloData) -> tuple[left_out.Units, Any]:
        components = components_of(split, data) if rows == "indexed" else None
        return left_out.find_units(split, rows, by, data, components), components

    def init(key: Array) -> LooServer:
        sent = (jnp.zeros((num_points, split.dim)), zeros((num_points,), np.float64), jnp.zeros(split.dim))
        return LooServer(LooBroadcast(*sent, split.theta), unheard(num_silos))

    def init_silo(key: Array, broadcast: Broadcast, data: SiloData) -> LooSilo:
        num = units_of(data)[0].num
        return LooSilo(zeros((num,), np.float64), *(jnp.zeros(num, jnp.int32),) * 2)

    def silo_step(key: Array, broadcast: Broadcast, silo: LooSilo, data: SiloData) -> tuple[LooMessage, LooSilo]:
        sent: LooBroadcast = broadcast.common
        units, components = units_of(data)
        factor = silo_factor(split, marginal, data, components, sent.theta)
        frame = factor.refit(sent.centre, start_frame(split, data), LOCAL_STEPS)
        likelihoods = left_out.log_likelihoods(split, units, factor, frame, sent.theta, data)
        nodes = factor.nodes(key)
        each = jax.lax.map(lambda z: likelihoods(z, nodes), sent.points, batch_size=factor.batch_of(num_points))
        count, first = left_out.sizes(split, units, data)
        message, elpd = _summed(each, sent.log_weights, count)
        return message, LooSilo(elpd, count.astype(jnp.int32), first.astype(jnp.int32))

    def aggregate(messages: LooMessage, cohort: Cohort) -> LooMessage:
        order = jnp.argsort(jnp.asarray(cohort.index))  # engines stack messages by bucket
        return jax.tree.map(lambda leaf: leaf[order], messages)

    def server_step(key: Array, server: LooServer, heard: LooMessage) -> tuple[LooServer, dict]:
        return server._replace(heard=heard), {}

    return FederatedAlgorithm(
        init, init_silo, lambda key, server: Broadcast(server.sent), silo_step, aggregate, server_step
    ).traced_once()


@in_x64
def _summed(each: Array, log_weights: Array, count: Array) -> tuple[LooMessage, Array]:
    """A silo's sums, and elpd by unit, from log likelihoods (S, units); float64."""
    real, each = count > 0, jnp.maximum(jnp.where(jnp.isnan(each), LEAST, each), LEAST)
    weights, k = smoothed_sets(log_weights[:, None] - each)
    elpd = logsumexp(weights + each, axis=0)
    lpd = logsumexp(log_weights[:, None] + each, axis=0) - logsumexp(log_weights)
    noise = jnp.sum(jnp.exp(2 * weights) * (jnp.exp(jnp.minimum(each - elpd, 50.0)) - 1) ** 2, axis=0)
    total = lambda values: jnp.sum(jnp.where(real, values, 0.0))
    bins = jnp.searchsorted(jnp.asarray(EDGES), jnp.where(jnp.isnan(k), jnp.inf, k))
    counts = jnp.stack([jnp.sum(real & (bins == b)) for b in range(len(BINS))])
    whole = lambda numbers: numbers.astype(jnp.int32)
    message = LooMessage(whole(jnp.sum(real)), total(elpd), total(elpd**2), total(lpd), total(noise), whole(counts))
    return message, jnp.where(real, elpd, 0.0)


def unheard(num_silos: int) -> LooMessage:
    number: Any = lambda dtype, *shape: jax.ShapeDtypeStruct((num_silos, *shape), dtype)
    real = number(np.float64)
    return zeros_like(LooMessage(number(np.int32), real, real, real, real, number(np.int32, len(BINS))))


@dataclass(frozen=True, repr=False)
class Loo:
    """Leave-one-out cross-validation of a fit. Make one with :meth:`numpyro_fed.Fit.loo`.

    Attributes:
        elpd: the sum of log p(y_i | y without i) over all units; higher is better.
        se: its standard error, as an estimate of what new units of the same kind would give.
        p_loo: the effective number of parameters: log p(y_i | y) - elpd_i, summed.
        monte_carlo_error: of elpd, from the draws.
        pareto_k: units by their Pareto k-hat. Above 0.7 a unit's elpd is not to be trusted.
        table: by silo: ``units``, ``elpd``, ``se``, ``p_loo``, and ``above`` 0.7, the units whose k-hat is.
        by: what is left out together; None: the smallest that can be.
        bytes_up, bytes_down: what it cost.
    """

    table: pd.DataFrame
    elpd: float
    se: float
    p_loo: float
    monte_carlo_error: float
    pareto_k: pd.Series
    by: str | None
    sites: tuple[str, ...]
    bytes_up: int
    bytes_down: int
    states: tuple = field(compare=False)  # of the silos, which stay there
    stack: Stack = field(compare=False)

    @property
    def num_units(self) -> int:
        return int(self.table["units"].sum())

    def notes(self) -> list[str]:
        """What to know before it is used."""
        above = int(self.pareto_k.iloc[2:].sum())
        left = "the observations of a silo" if self.by == left_out.SILO else "rows, or groups that share local latents"
        left = left if self.by in (None, left_out.SILO) else f"what has the same number in {self.by!r}"
        lines = [f"Left out at a time: {left}; {self.num_units} in all."]
        if above:
            lines.append(
                f"{above} of {self.num_units} have a Pareto k above 0.7: their elpd is not to be trusted. Draw more "
                "(num_samples=4000), correct the fit first (fit.correct(key).loo()), or fit again without them."
            )
        return lines

    def __repr__(self) -> str:
        head = f"elpd {self.elpd:.1f} (se {self.se:.1f}), p_loo {self.p_loo:.1f}"
        return "\n".join([head, self.table.head(20).round(2).to_string(), *self.notes()])

    def _repr_html_(self) -> str:
        shown = self.table.head(20).to_html(border=0, float_format="%.2f")
        head = f"<p><b>elpd</b> {self.elpd:.1f} (se {self.se:.1f}), p_loo {self.p_loo:.1f}</p>"
        return head + shown + "".join(f"<p>{line}</p>" for line in self.notes())

    def in_silo(self, silo: str) -> tuple[np.ndarray, np.ndarray]:
        """elpd of a silo's units, by their first observation, and their sizes. Call it in the silo's room."""
        b, position = self.stack.place(silo)
        own: LooSilo = jax.tree.map(lambda leaf: np.asarray(leaf)[position], self.states[b])
        order = np.argsort(np.where(own.size > 0, own.first, np.iinfo(np.int32).max), kind="stable")
        order = order[: int(np.sum(own.size > 0))]
        return np.asarray(own.elpd)[order], np.asarray(own.size)[order]


def standard_error(number: Any, total: Any, squares: Any) -> Any:
    """Of a sum over units, from their number, their sum and that of their squares; NaN for fewer than two.

    >>> round(float(standard_error(4, 10.0, 30.0)), 3)  # of 1, 2, 3, 4
    2.582
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.maximum(squares - total**2 / number, 0.0)
        return np.where(np.asarray(number) > 1, np.sqrt(spread * number / (np.asarray(number) - 1.0)), np.nan)


def loo(fit: Fitted, rng_key: Any, num_samples: int, by: str | None, engine: Engine | None) -> Loo:
    """See :meth:`numpyro_fed.Fit.loo`."""
    fit.need_silos("likelihoods of what is left out")
    split, key = fit.split, check_key(rng_key)
    points, log_weights = _points(fit, key, num_samples)
    stack, marginal = fit_stack(fit), integrated(fit)
    if by is not None and by != left_out.SILO:
        left_out.argument(split, by, stack.shapes(0))
    engine = Vmap() if engine is None else engine
    theta = fit.posterior.theta(fit.state.server)
    centre = np.exp(log_weights) @ points.astype(np.float64) / np.sum(np.exp(log_weights))
    with jax.enable_x64(True):
        weights = jnp.asarray(log_weights)
    question = LooBroadcast(put(points), weights, put(centre.astype(points.dtype)), theta)
    make = partial(loo_round, split, marginal, by, len(points), len(stack.names))
    algorithm = remembered(make, "loo", ByIdentity(split), marginal, by, len(points), len(stack.names))
    _, states = engine.start(algorithm, key, stack)
    server = LooServer(question, unheard(len(stack.names)))
    silo = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), states[0])
    bytes_of: Traffic = sent(algorithm, server, silo, stack.shapes(0)).traffic
    server, states, _ = engine.rounds(algorithm, key, stack, server, states, 0, None, 1, "some")
    return _found(jax.tree.map(np.asarray, server.heard), fit, by, len(stack.names) * bytes_of, states, stack)


def _points(fit: Fitted, key: Array, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws of the globals and their log weights: of a corrected fit its points."""
    if fit.correction is not None:
        return np.asarray(fit.correction.points), np.asarray(fit.correction.log_weights, np.float64)
    keys = check_keys(key, num_samples)
    points = np.asarray(fit.programs.z(keys, fit.state.server))
    if fit.split.dim and len(points) > 1 and not np.any(np.ptp(points, axis=0)):
        raise ValueError(
            f"nf.{fit.state.method} has found a point, without a posterior to predict from: fit with nf.EP or nf.SFVI, "
            "or nf.FedPA(model, posterior=True), run to the end"
        )
    return points, np.zeros(len(points))


def integrated(fit: Fitted) -> Marginal:
    """How locals are integrated out: as exactly as the model allows."""
    found = choose(fit.split, fit.survey)
    if found.rows == "single":  # which observations depend on the row is asked here
        found = found._replace(rows="indexed")
    return found._replace(num=max(found.num, DRAWS)) if found.kind == "importance_weighted" else found


def _found(heard: LooMessage, fit: Fitted, by: str | None, sent: Traffic, states: tuple, stack: Stack) -> Loo:
    by_silo = pd.DataFrame(
        {
            "units": heard.units,
            "elpd": heard.elpd,
            "se": standard_error(heard.units, heard.elpd, heard.elpd_squared),
            "p_loo": heard.lpd - heard.elpd,
            "above": heard.pareto_k[:, 2:].sum(axis=1),
        },
        index=pd.Index(stack.names, name="silo"),
    )
    total: Any = jax.tree.map(lambda leaf: leaf.sum(axis=0), heard)
    return Loo(
        by_silo,
        float(total.elpd),
        float(standard_error(total.units, total.elpd, total.elpd_squared)),
        float(total.lpd - total.elpd),
        float(np.sqrt(total.noise)),
        pd.Series(total.pareto_k, index=list(BINS), name="units"),
        by,
        tuple(sorted(left_out.observed_terms(fit.split))),
        *(sent.up, sent.down, states, stack),
    )


class PairMessage(NamedTuple):
    """All that leaves a silo of two models' elpd by unit: sums of their differences."""

    same: bool  # both leave out the same numbers of observations at a time
    units: int
    total: float
    squared: float


def paired(one: Loo, other: Loo, silo: str) -> PairMessage:
    """The differences of two models in one silo, made in its room."""
    with at_silo(silo):
        (a, a_count), (b, b_count) = one.in_silo(silo), other.in_silo(silo)
        if not np.array_equal(a_count, b_count):
            return PairMessage(False, 0, 0.0, 0.0)
        off = a - b
        return PairMessage(True, len(off), float(np.sum(off)), float(np.sum(off**2)))
