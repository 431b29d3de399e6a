r"""What the factors of EP and PVI give for free: who moved the posterior, who disagrees, who leaves and who joins.

The server holds :math:`q = t_0 \prod_j t_j`, a site for each silo. Without silo j it is the cavity :math:`q / t_j`, a
subtraction of natural parameters: no silo is asked, nothing is sent. The others' sites were found in its company, so
the quotient is exact where factors are normal and a first-order answer elsewhere; more rounds give the answer itself.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from numpyro_fed import schedules
from numpyro_fed.algorithm import PyTree
from numpyro_fed.checks import VerdictWarning, check_count, check_key, unsaid
from numpyro_fed.data.inputs import shared_digest
from numpyro_fed.data.silos import Silos
from numpyro_fed.model.layout import real_rows
from numpyro_fed.model.survey import Survey
from numpyro_fed.normal.families import Family, Natural, product, quotient, summed
from numpyro_fed.results.influence_tables import Influence
from numpyro_fed.results.state import Fresh, State
from numpyro_fed.results.value import Fitted

F = TypeVar("F", bound=Fitted)
Rows = dict[str, tuple[np.ndarray, np.ndarray]]  # {group: places of a silo's real rows in an old state, in a new one}


class Factors(NamedTuple):
    """What a posterior is a product of."""

    family: Family
    prior: Natural  # t_0
    each: Natural  # t_j, stacked over silos

    @property
    def product(self) -> Natural:
        """q."""
        return product(self.prior, summed(self.each))


@runtime_checkable
class HasParts(Protocol):
    """A posterior that has something of each silo: silos may leave and join."""

    def reordered(self, server: PyTree, order: list[int]) -> PyTree:
        """A server state whose silos come in another order, or are fewer."""
        ...

    def joined(self, fresh: PyTree, old: PyTree, places: np.ndarray) -> PyTree:
        """A fresh server state of more silos, in which those at ``places`` have their old factors."""
        ...

    def joined_silo(self, fresh: PyTree, old: PyTree, rows: Rows) -> PyTree:
        """A silo's old state where its rows are padded otherwise."""
        ...


@runtime_checkable
class HasSites(HasParts, Protocol):
    """A posterior with a factor for each silo, a normal of all globals."""

    def sites(self, server: PyTree) -> Factors | None:
        """None where one factor stands for all."""
        ...


def without(fit: F, names: str | Sequence[str], num_rounds: int, rng_key: Any) -> F:
    """See :meth:`numpyro_fed.results.fit.Fit.without`."""
    posterior = with_parts(fit, "without")
    began = time.perf_counter()
    gone = (names,) if isinstance(names, str) else tuple(names)
    for name in gone:
        if name not in fit.state.names:
            raise ValueError(f"no silo is named {name!r}; the silos are {', '.join(map(repr, fit.state.names))}")
    rest = tuple(name for name in fit.state.names if name not in gone)
    if not rest or not gone:
        raise ValueError(
            f"without({', '.join(map(repr, gone))}) would leave {'nobody' if gone else 'everybody'}: name at least one "
            "silo, and leave at least one"
        )
    _check_rounds(num_rounds)
    server = posterior.reordered(fit.state.server, [fit.state.names.index(name) for name in rest])
    factors = posterior.sites(server) if isinstance(posterior, HasSites) else None
    proper = factors is None or bool(factors.family.proper(factors.product))
    if num_rounds == 0:
        if not proper:
            raise ValueError(
                f"without {', '.join(map(repr, gone))} the posterior is improper: the others' sites, as they are, do "
                "not determine it. Let them find it anew: without(..., num_rounds=8)"
            )
        return _cut(fit, rest, server, time.perf_counter() - began)
    fit.need_silos("further rounds")
    key = jax.random.key(0) if rng_key is None else check_key(rng_key)
    silos = fit.any_silos.only(*rest)
    # sites that are no posterior together are no start: they begin anew
    state = _moved(fit, posterior, silos, key)._replace(server=server) if proper else None
    found = fit.need_again().run(key, silos, num_rounds, init_state=state)
    return replace(found, seconds=time.perf_counter() - began)


def add(fit: F, rng_key: Any, silos: Silos, num_rounds: int) -> F:
    """See :meth:`numpyro_fed.results.fit.Fit.add`."""
    posterior = with_parts(fit, "add")
    began, key = time.perf_counter(), check_key(rng_key)
    if getattr(silos, "lazy", True):
        raise TypeError(
            f"silos must be an nf.Silos, got a {type(silos).__name__}: wrap it as nf.Silos({{name: arguments}})"
        )
    _check_rounds(num_rounds)
    fit.need_silos("rounds with new silos")
    everyone = _joined(fit.any_silos, silos)
    state = _moved(fit, posterior, everyone, key)
    places = np.array([everyone.names.index(name) for name in fit.state.names])
    state = state._replace(server=posterior.joined(state.server, fit.state.server, places))
    run = fit.need_again().run
    first = {"check": False} if num_rounds else {}
    with unsaid(*[VerdictWarning] * bool(num_rounds)):  # what doubts are left is said at the end
        found = run(key, everyone, 1, schedule=schedules.fixed([silos.names]), init_state=state, **first)
    if num_rounds:
        on = run(key, everyone, num_rounds, init_state=found.state)
        history = {name: np.concatenate([rows, on.history[name]]) for name, rows in found.history.items()}
        sent = (*found.sent, *(entry.moved(found.num_rounds) for entry in on.sent))
        found = replace(on, history=history, records=(*found.records, *on.records), sent=sent)
    return replace(found, seconds=time.perf_counter() - began)


def with_parts(fit: Fitted, what: str) -> HasParts:
    """The posterior, when silos may leave it and join."""
    posterior = fit.posterior
    return posterior if isinstance(posterior, HasParts) and hasattr(posterior, "no_factors") else with_sites(fit, what)


def with_sites(fit: Fitted, what: str) -> HasSites:
    """The posterior, when it has a factor for each silo."""
    if fit.correction is not None:
        raise TypeError(f"a corrected posterior has no sites: use fit.uncorrected.{what}(...)")
    posterior = fit.posterior
    if isinstance(posterior, HasSites) and posterior.sites(fit.state.server) is not None:
        return posterior
    has = "one site for all silos" if isinstance(posterior, HasSites) else "no sites"
    has = f"none such: {posterior.no_factors}" if hasattr(posterior, "no_factors") else has
    raise TypeError(
        f"fit.{what} reads a factor for each silo off the fit, and nf.{fit.state.method} has {has}: fit with "
        "nf.EP(model) or nf.PVI(model), which have a site for each"
    )


def factors_of(posterior: HasSites, server: PyTree) -> Factors:
    factors = posterior.sites(server)
    assert factors is not None, "asked for by with_sites"
    return factors


def _check_rounds(num_rounds: Any) -> None:
    check_count("num_rounds", num_rounds, least=0)


def _joined(old: Silos, new: Silos) -> Silos:
    """All silos; the new ones come last."""
    both = sorted(set(old) & set(new))
    if both:
        raise ValueError(
            f"silo {both[0]!r} is in the fit already: give new silos names of their own, or take it out first: "
            f"fit.without({both[0]!r})"
        )
    if shared_digest(old.shared) != shared_digest(new.shared):
        raise ValueError(
            f"the new silos have other shared arguments ({', '.join(new.shared) or 'none'}) than the fit "
            f"({', '.join(old.shared) or 'none'}), or other values: pass nf.Silos(..., shared=fit.silos.shared)"
        )
    return old.joined(new)


def _cut(fit: F, rest: tuple[str, ...], server: Any, seconds: float) -> F:
    """The fit of the remaining silos, their buckets and padding as they were.

    Doubts that name a silo which left are gone with it; those that name nobody stay.
    """
    gone = [name for name in fit.state.names if name not in rest]
    state = fit.state.only(rest, server)
    padded = [own for names, own in zip(fit.state.buckets, fit.padded, strict=True) if set(names) & set(rest)]
    some = lambda silos: None if silos is None else silos.only(*rest)
    return replace(
        fit,
        state=state,
        history={},
        seconds=seconds,
        padded=tuple(padded),
        survey=_asked(fit, rest),
        records=(),
        sent=(),
        left=(),
        moving=False,
        hints=(),
        evidence="silos left, and nobody was asked since: run a few rounds, fit.without(name, num_rounds=3)",
        reasons=tuple(reason for reason in fit.reasons if not any(repr(name) in reason for name in gone)),
        silos=some(fit.silos),
        shapes=some(fit.shapes),
    )


def _asked(fit: Fitted, rest: tuple[str, ...]) -> Survey:
    """What the remaining silos told."""
    if len(fit.survey.sizes) != len(fit.state.names):  # a fit that was not run has no survey
        return fit.survey
    return fit.survey.only(*(fit.state.names.index(name) for name in rest))


def _moved(fit: Fitted, posterior: HasParts, silos: Silos, key: Any) -> State:
    """A start of the method on other silos, in which those that the fit knows have their old states."""
    fresh = fit.need_again().prepare(key, silos)
    if fresh.split.global_shapes != fit.split.global_shapes or fresh.split.groups != fit.split.groups:
        raise ValueError(
            "with these silos the model's sites are divided otherwise than in the fit. Compare fit.split.partition "
            "with nf.partition(model, silos), and pass local= or shared= to the method of both"
        )
    states = tuple(_states(fit, posterior, fresh, b) for b in range(len(fresh.padded)))
    return fresh.state._replace(method=fit.state.method, silos=states, round=fit.state.round)


def _states(fit: Fitted, posterior: HasParts, fresh: Fresh, b: int) -> PyTree:
    """Old states in a new bucket, whose padding may be another; silos that are new keep the fresh ones."""
    out = []
    for name in fresh.state.buckets[b]:
        state, _ = fresh.state.silo(name)
        if name in fit.state.names:
            old, was = fit.state.silo(name)
            own = fresh.split.partition.lengths(name)
            place = lambda group, padded, own=own: real_rows(group, own, padded)
            rows = {g.name: (place(g, fit.padded[was]), place(g, fresh.padded[b])) for g in fresh.split.groups}
            here = not getattr(old, "elsewhere", False)
            state = posterior.joined_silo(state, old, rows) if here else old  # a silo elsewhere pads by itself
        out.append(state)
    with jax.enable_x64(True):
        return jax.tree.map(lambda *rows: jnp.stack(rows), *out)


# --- who moved the posterior ----------------------------------------------------------------------------------------


class Moments(NamedTuple):
    mean: np.ndarray  # (d,)
    covariance: np.ndarray  # (d, d)


def moments_of(family: Family, factor: Natural) -> Moments | None:
    """Of a proper factor, float64; None of an improper one."""
    if not bool(family.proper(factor)):
        return None
    covariance = np.asarray(family.covariance(factor), np.float64)
    return Moments(np.asarray(family.mean(factor)), covariance if covariance.ndim == 2 else np.diag(covariance))


def cavities(factors: Factors, names: tuple[str, ...]) -> tuple[Moments, list[tuple[str, Natural, Moments | None]]]:
    """The posterior, and of each silo its site and the posterior without it."""
    q = factors.product
    found = moments_of(factors.family, q)
    if found is None:
        raise ValueError("the posterior itself is improper, so nothing can be read off it: run more rounds")
    each = []
    for j, name in enumerate(names):
        with jax.enable_x64(True):
            site = jax.tree.map(lambda leaf, j=j: leaf[j], factors.each)
        each.append((name, site, moments_of(factors.family, quotient(q, site))))
    return found, each


def influence(fit: Fitted) -> Influence:
    """See :meth:`numpyro_fed.results.fit.Fit.influence`."""
    factors = factors_of(with_sites(fit, "influence"), fit.state.server)
    (mean, covariance), each = cavities(factors, fit.state.names)
    sd = np.sqrt(np.diagonal(covariance))
    nan = np.full(len(sd), np.nan)
    rows = []
    for name, _, cavity in each:
        shift = nan if cavity is None else (mean - cavity.mean) / sd
        ratio = nan if cavity is None else sd / np.sqrt(np.diagonal(cavity.covariance))
        rows += [
            {"silo": name, "parameter": parameter, "shift": s, "sd_ratio": r}
            for parameter, s, r in zip(fit.split.coordinate_names(), shift, ratio, strict=True)
        ]
    return Influence(pd.DataFrame(rows))
