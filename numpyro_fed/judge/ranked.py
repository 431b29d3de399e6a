"""One simulated data set: a posterior of it, and the rank of the truth among the posterior's draws."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import biject_to
from scipy.stats import norm

from numpyro_fed.algorithm import Broadcast
from numpyro_fed.checks import unsaid
from numpyro_fed.data.inputs import leaves
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.silos import Silos, at_silo
from numpyro_fed.data.stack import Stack
from numpyro_fed.host import folded, put
from numpyro_fed.judge.calibration import GLOBAL, LIKELIHOOD, LOCAL
from numpyro_fed.judge.sbc_file import Done
from numpyro_fed.keys import digest, fold_in_name, identities
from numpyro_fed.local.integrate import Marginal, silo_factor, start_frame
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.rows import components_of
from numpyro_fed.model.simulate import Simulated
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.pieces import jit
from numpyro_fed.precision import ONCE
from numpyro_fed.results.draws import fit_stack, global_draws, silo_draws
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.scalars import scalars
from numpyro_fed.run.prepare import prepare
from numpyro_fed.run.target import LOCAL_STEPS, TargetBroadcast, exact_marginal, target_round
from numpyro_fed.threads import unvalidated

Array = jax.Array
ALL = "log p(all silos)"
MOST_DIMS = 200  # of globals, above which draws do not tell a covariance
DRAWS, TIES, NOISE = (digest(f"\0sbc {name}") for name in ("draws", "ties", "noise"))


class Drawn(NamedTuple):
    """Draws of a posterior, and of what they are."""

    sites: dict[str, Any]  # of the globals, constrained, (L, ...)
    z: Array  # (L, d), the same, unconstrained
    local: dict[str, Any]  # of the named silo's latents
    split: SplitModel
    survey: Survey
    stack: Stack
    posterior: Any
    verdict: str


class Posteriors:
    """Of simulated data sets, each by the same method.

    Args:
        method: with ``run``, or a function of a key and silos.
        split: the model on the design.
        theta: of the simulations.
        silo: whose latents are ranked, or None.
        num_draws: L.
        likelihoods: whether likelihoods are ranked, too.
        options: of ``run``.
    """

    def __init__(
        self,
        method: Any,
        split: SplitModel,
        theta: dict[str, Array],
        silo: str | None,
        num_draws: int,
        likelihoods: bool,
        options: dict[str, Any],
    ) -> None:
        self.method, self.split, self.theta, self.silo = method, split, theta, silo
        self.num_draws, self.likelihoods = num_draws, likelihoods and split.dim > 0
        self.options = {"check": False, "progress_bar": False} | options
        self._first: Fit | None = None

    def kinds(self, simulated: Simulated) -> dict[str, str]:
        """All quantities that are ranked, in order, and what each is."""
        found = dict.fromkeys(_scalars(simulated.sites), GLOBAL)
        found |= dict.fromkeys((f"{self.silo}: {name}" for name in _scalars(simulated.local)), LOCAL)
        names = (ALL, *(f"log p({name})" for name in simulated.silos.names)) if self.likelihoods else ()
        return found | dict.fromkeys(names, LIKELIHOOD)

    def looked_at(self, simulated: Simulated, key: Array) -> Done:
        """The posterior of one data set, and where the truth lies in it."""
        began, kinds = time.perf_counter(), self.kinds(simulated)
        verdict, failure = "", ""
        rows = np.full((len(kinds), 5), np.nan)
        try:
            _check_finite(simulated)
            drawn = self._drawn(simulated, key)
            verdict = drawn.verdict
            rows = np.array(self._rows(simulated, drawn, key), float)
        except (FloatingPointError, ValueError, np.linalg.LinAlgError) as error:
            failure = str(error) or type(error).__name__
        ranks = (np.zeros(len(rows)) if failure else rows[:, 0]).astype(int)
        return Done(
            ranks, rows[:, 1], rows[:, 2], rows[:, 3], rows[:, 4], verdict, failure, time.perf_counter() - began
        )

    def _rows(self, simulated: Simulated, drawn: Drawn, key: Array) -> list[tuple[int, float, float, float, float]]:
        """Rank, mean, sd, truth and step of each quantity."""
        words = np.asarray(jax.random.key_data(folded(key, TIES))).ravel().tolist()
        ties = np.random.default_rng(words)
        truths = {**_scalars(simulated.sites), **{f"{self.silo}: {n}": x for n, x in _scalars(simulated.local).items()}}
        draws = {**scalars(drawn.sites), **{f"{self.silo}: {n}": x for n, x in scalars(drawn.local).items()}}
        z = np.asarray(drawn.z, np.float64)
        away, score, out = z - z.mean(axis=0), self._score(simulated, drawn), []
        for name, truth in truths.items():
            x = np.asarray(draws[name], np.float64)
            if not np.all(np.isfinite(x)):
                raise FloatingPointError(f"draws of {name} are not finite")
            sd = x.std(ddof=1)
            step = (x - x.mean()) @ away / (len(x) - 1) @ score / sd if sd > 0 else np.nan
            out.append((rank(truth, x, ties), x.mean(), sd, float(truth), step))
        if self.likelihoods:
            each = self._log_likelihoods(simulated, drawn, key)
            for values in (each.sum(axis=0), *each):
                found = rank(values[-1], values[:-1], ties)
                # draws and truth as normal scores among one another: likelihoods may be zero, and have no scale
                out.append((found, 0.0, 1.0, norm.ppf((found + 0.5) / (self.num_draws + 1)), np.nan))
        return out

    # --- draws --------------------------------------------------------------------------------------------------------

    def _drawn(self, simulated: Simulated, key: Array) -> Drawn:
        silos = simulated.silos
        with unsaid(UserWarning):  # what fits say of themselves is counted
            if hasattr(self.method, "run"):
                fit = self.method.run(key, silos, **self.options)
            else:
                fit = self.method(key, silos)
        keys = jax.random.split(folded(key, DRAWS), self.num_draws)
        if hasattr(fit, "posterior"):
            return self._of_fit(fit, keys)
        if not isinstance(fit, Mapping) or any(hasattr(x, "sample") for x in fit.values()):
            raise TypeError(
                f"nf.sbc ranks the truth among draws of one posterior of all silos, and the method returned a "
                f"{type(fit).__name__}: return a fit, or {{site: draws}}"
            )
        return self._of_dict(fit, silos)

    def _of_fit(self, fit: Fit, keys: Array) -> Drawn:
        if hasattr(self.method, "run"):
            self._share_programs(fit)
        z = fit.programs.z(keys, fit.state.server)
        local = {} if self.silo is None else silo_draws(fit, keys, self.silo)
        sites = global_draws(fit, keys)
        return Drawn(
            sites, z, local, fit.split, fit.survey, fit_stack(fit), fit.uncorrected.posterior, fit.verdict.status
        )

    def _share_programs(self, fit: Fit) -> None:
        """Fits of one method have the same programs where it compiled from the same model and survey."""
        first = self._first
        if first is None or fit.split is not first.split or fit.survey != first.survey:
            self._first = fit
        else:
            object.__setattr__(fit, "programs", first.programs)

    def _of_dict(self, found: Mapping[str, Any], silos: Silos) -> Drawn:
        prepared = prepare(
            self.split.model, silos, getattr(self.method, "local", None), getattr(self.method, "shared", None)
        )
        split = prepared.split
        sites = {name: np.asarray(value) for name, value in found.items()}
        num = {name: len(value) for name, value in sites.items()}
        lacking = [name for name in split.global_shapes if name not in sites]
        if lacking or not num or min(num.values()) < self.num_draws:
            raise TypeError(
                f"the method must return at least {self.num_draws} draws (num_draws=) of every global site "
                f"({', '.join(split.global_shapes)}); it returned "
                + (", ".join(f"{count} of {name}" for name, count in num.items()) or "none")
            )
        thinned = {n: x[np.linspace(0, len(x) - 1, self.num_draws).astype(int)] for n, x in sites.items()}
        vectors = remembered(lambda: _vectors(split), "vectors of sites", ByIdentity(split))
        z, computed = vectors(put({name: thinned[name] for name in split.global_shapes}), self.theta)
        return Drawn({**computed, **thinned}, z, thinned, split, prepared.survey, prepared.stack, None, "")

    # --- likelihoods --------------------------------------------------------------------------------------------------

    def _score(self, simulated: Simulated, drawn: Drawn) -> np.ndarray:
        """The gradient of log p(z_G, y) at the truth, (d,); NaN where locals are not integrated exactly."""
        split, marginal = drawn.split, exact_marginal(drawn.split, drawn.survey, drawn.posterior)
        if marginal.kind not in ("none", "normal", "quadrature") or not 0 < split.dim <= MOST_DIMS:
            return np.full(split.dim, np.nan)
        make = partial(_score_program, split, marginal)
        program = remembered(make, "score", ByIdentity(split), marginal)
        truth = jnp.asarray(simulated.z, drawn.z.dtype)
        centre = jnp.mean(drawn.z, axis=0)
        return np.asarray(program(truth, centre, self.theta, drawn.stack.shared, drawn.stack.arrays), np.float64)

    def _log_likelihoods(self, simulated: Simulated, drawn: Drawn, key: Array) -> np.ndarray:
        """log p(y_j | z) of each silo, (J, L + 1), locals integrated out; the truth comes last.

        Where locals are drawn for that, they are drawn anew at every point, so that draws and truth are alike.
        """
        marginal = exact_marginal(drawn.split, drawn.survey, drawn.posterior)
        points = jnp.concatenate([jnp.asarray(drawn.z), jnp.asarray(simulated.z, drawn.z.dtype)[None]])
        sent = TargetBroadcast(points, put(np.zeros((), np.int32)), jnp.mean(points, axis=0), self.theta)
        program = remembered(
            partial(_program, drawn.split, marginal, len(points)),
            "likelihoods",
            ByIdentity(drawn.split),
            marginal,
            len(points),
        )
        found: dict[str, np.ndarray] = {}
        for bucket, (args, mask) in zip(drawn.stack.buckets, drawn.stack.arrays, strict=True):
            words = identities(bucket.names)
            values = program(folded(key, NOISE), sent, drawn.stack.shared, words, args, mask)
            found |= dict(zip(bucket.names, np.asarray(values, np.float64), strict=True))
        return np.nan_to_num(np.stack([found[name] for name in simulated.silos.names]), nan=-np.inf, neginf=-np.inf)


def _score_program(split: SplitModel, marginal: Marginal) -> Any:
    """``(z, centre, theta, shared, buckets) -> gradient of log p(z, y)``, locals integrated out around ``centre``."""

    def run(z: Array, centre: Array, theta: dict, shared: tuple, buckets: tuple) -> Array:
        def of_silo(args: tuple, mask: dict) -> Array:
            data = SiloData(args, mask, shared)
            components = components_of(split, data) if marginal.rows == "indexed" else None
            factor = silo_factor(split, marginal, data, components, theta)
            frame = factor.refit(centre, start_frame(split, data), LOCAL_STEPS)
            return jax.grad(lambda z: factor.log_f(z, frame, factor.nodes(None)))(z)

        found = jax.grad(lambda z: split.log_prior(z, theta))(z)
        return sum((jnp.sum(jax.vmap(of_silo)(*arrays), axis=0) for arrays in buckets), found)

    return jit(run, compiler_options=ONCE)


def _program(split: SplitModel, marginal: Marginal, num: int) -> Any:
    step = target_round(split, marginal, num).silo_step

    def run(key: Array, sent: TargetBroadcast, shared: tuple, words: Array, args: tuple, mask: dict) -> Array:
        def one(words: Array, args: tuple, mask: dict) -> Array:
            return step(fold_in_name(key, words), Broadcast(sent), (), SiloData(args, mask, shared))[0][:num]

        return jax.vmap(one)(words, args, mask)

    return jit(run)


def rank(truth: Any, draws: np.ndarray, ties: np.random.Generator) -> int:
    """How many draws are below the truth; of those that equal it, a random number.

    >>> rank(0.5, np.array([0.1, 0.7, 0.4]), np.random.default_rng(0))
    2
    """
    equal = int(np.sum(draws == truth))
    return int(np.sum(draws < truth)) + (int(ties.integers(0, equal + 1)) if equal else 0)


def _scalars(sites: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """{name: number} of one draw."""
    return {n: x[0] for n, x in scalars({name: np.asarray(value)[None] for name, value in sites.items()}).items()}


def _vectors(split: SplitModel) -> Any:
    """``({site: draws}, theta) -> (vectors z_G, {site: draws})``, with the deterministics of the globals."""

    def one(values: dict[str, Array], theta: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        model = handlers.substitute(split.model, data=values | split.constrain_theta(theta) | split.constants)
        kwargs = split.spec.kwargs(split.dummy())
        with unvalidated():
            trace = handlers.trace(handlers.seed(model, jax.random.PRNGKey(0))).get_trace(**kwargs)
        z = split.ravel({name: biject_to(trace[name]["fn"].support).inv(values[name]) for name in values})
        return z, split.constrain_global(z, theta)

    return jit(jax.vmap(one, in_axes=(0, None)), compiler_options=ONCE)


def _check_finite(simulated: Simulated) -> None:
    """Raises where the prior's draws or the data are not numbers."""
    if not np.all(np.isfinite(simulated.z)):
        raise FloatingPointError("a draw of the prior is not finite: narrow the prior")
    for name in simulated.silos.names:
        with at_silo(name):
            for path, leaf in leaves(simulated.silos.own(name)):
                if not isinstance(leaf, int) and not np.all(np.isfinite(leaf)):
                    raise FloatingPointError(
                        f"what was simulated for {path!r} is not finite: the prior reaches values at which the model "
                        "overflows, so narrow it"
                    )
