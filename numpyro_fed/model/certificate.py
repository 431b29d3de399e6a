"""The certificate: on real silos, the split model's log density is NumPyro's own.

Where it is not, the error names the site, and why.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer.util import potential_energy

from numpyro_fed import ahead
from numpyro_fed.data.axis import Axis
from numpyro_fed.data.padding import SiloData, silo_data
from numpyro_fed.data.silos import Silos, at_silo
from numpyro_fed.data.stack import round_up
from numpyro_fed.host import real_dtype
from numpyro_fed.keys import digest
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model import discrete as enum
from numpyro_fed.model.layout import with_mask
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.pieces import jit
from numpyro_fed.precision import compiled_once, unoptimised

Array = jax.Array
ASKED = 4  # silos, at most
BY_INDEX = (
    " If it puts drawn values in the places of missing ones (x.at[missing].set(drawn)): pass a bool for each row in "
    "place of the indices, and write numpyro.sample(..., obs=y, obs_mask=present), or draw a value for every row and "
    "take jnp.where(present, x, drawn)."
)
DRAWN = np.arange(
    4, dtype=np.int32
)  # keys of the discrete values at which a split is checked: few rows might have equal values


def certify(
    split: SplitModel,
    silos: Silos,
    max_silos: int = ASKED,
    seed: int = 0,
    meanwhile: Callable[[], object] = lambda: None,
) -> PartitionError | None:
    """Check on real silos that log_prior + log_silo is NumPyro's own log density of the unpadded model.

    The padded split is evaluated at a random point with random values in the padded rows; NumPyro evaluates the
    unpadded model at the same point, and at discrete values drawn row by row. Each silo does so in its own room, and
    tells whether the two agree. Returns an error that names the sites that differ, if any. ``meanwhile`` is done while
    the programs are compiled.
    """
    asked = {}
    for name in certifying(silos, split.partition.axes, max_silos, seed):
        with at_silo(name):
            plain, padded = _both_data(split, silos, name)
            asked[name] = (*_point(split, seed, plain, padded), plain, padded)
            if ahead.worthwhile():
                ahead.begin(_program(split, asked[name]), partial(_both_of(split).lower, *asked[name]))
    meanwhile()
    for name, arguments in asked.items():
        with at_silo(name):
            failed = _differs(split, name, arguments, seed)
        if failed:
            return PartitionError(failed)
    return None


def _program(split: SplitModel, arguments: tuple) -> Hashable:
    return ahead.program(split, "certificate", arguments)


def _both_of(split: SplitModel) -> Any:
    """One program for silos of the same shapes."""
    make = lambda: jit(partial(_both, split), compiler_options=unoptimised())
    return remembered(make, "certificate", ByIdentity(split))


def _both_data(split: SplitModel, silos: Silos, name: str) -> tuple[SiloData, SiloData]:
    """A silo's data as they are, and padded."""
    axes = split.partition.axes
    longest = {axis.name: (round_up if axis.free else int)(max(axis.lengths.values())) for axis in axes}
    own = {axis.name: axis.lengths[name] for axis in axes}
    # four times the rows at most: a small silo in a bucket of large ones may have more, but no other padding
    lengths = {a: min(longest[a], 4 * own[a]) for a in own}
    return silo_data(silos, name, split.spec, axes), silo_data(silos, name, split.spec, axes, lengths)


def _differs(split: SplitModel, name: str, arguments: tuple, seed: int) -> str:
    """What is wrong in a silo; nothing, where its certificate holds."""
    ahead.wait(_program(split, arguments))
    ours, theirs, size = _both_of(split)(*arguments)
    tolerance = (1e-9 if ours.dtype == np.float64 else 2e-5) * (1 + float(size))
    ours, theirs = float(ours), float(theirs)
    if np.isfinite(theirs) and np.isfinite(ours) and abs(ours - theirs) <= tolerance:
        return ""
    return _explain(split, name, arguments[-2], arguments[-1], seed, ours, theirs)


def certifying(silos: Silos, axes: tuple[Axis, ...], count: int = ASKED, seed: int = 0) -> list[str]:
    """The silos that are asked: the smallest, the largest, and some by chance."""
    rows = {name: sum(axis.lengths[name] for axis in axes) for name in silos.names}
    names = sorted(silos.names, key=rows.__getitem__)
    if len(names) <= count:
        return names
    middle = np.random.default_rng(seed).choice(len(names) - 2, count - 2, replace=False) + 1
    return [names[0], names[-1], *(names[i] for i in middle)]


def _point(split: SplitModel, seed: int, plain: SiloData, padded: SiloData) -> tuple[Any, dict, dict]:
    """A random point: z_G, z_L with values in the padded rows too, and z_L without padded rows."""
    draws = np.random.default_rng(seed)
    dtype = real_dtype()
    z = draws.normal(scale=0.5, size=split.dim).astype(dtype)
    full: dict[str, Any] = {
        group.name: draws.normal(scale=0.5, size=(group.num_rows(padded.mask), group.size)).astype(dtype)
        for group in split.groups
    }
    sizes = [{axis: mask.shape[-1] for axis, mask in data.mask.items()} for data in (plain, padded)]
    return z, full, split.unpadded_local(full, *sizes)


def _both(
    split: SplitModel, z: Array, full: dict, cut: dict, plain: SiloData, padded: SiloData
) -> tuple[Array, Array, Array]:
    prior = split.log_prior(z, split.theta)
    values = split.unravel(z) | split.unpack(cut, plain.mask) | split.constrain_theta(split.theta) | split.constants

    def compare(terms: dict, discrete: dict) -> tuple[Array, Array, Array]:
        ours = prior + sum((jnp.sum(term) for term in terms.values()), jnp.zeros(()))
        model = handlers.substitute(split.model, data=discrete) if discrete else split.model
        theirs = -potential_energy(handlers.seed(model, jax.random.PRNGKey(0)), (), split.spec.kwargs(plain), values)
        size = abs(prior) + sum((jnp.sum(jnp.abs(term)) for term in terms.values()), jnp.zeros(()))
        return ours, theirs, size

    if not split.enumeration.variables:
        return compare(split.evaluate(z, full, split.theta, padded).terms, {})
    found = jax.vmap(lambda key: compare(*_at_drawn(split, z, full, plain, padded, key)))(DRAWN)
    error = jnp.abs(found[0] - found[1])
    worst = jnp.argmax(jnp.where(jnp.isfinite(error), error, jnp.inf))
    return jax.tree.map(lambda values: values[worst], found)


def _at_drawn(
    split: SplitModel, z: Array, full: dict, plain: SiloData, padded: SiloData, seed: Any
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The padded silo's terms at discrete values drawn for each row among the possible ones, and these, unpadded.

    A sum over discrete sites is right when the tables that go into it are, and these are compared at a point.
    """
    found = split.densities(z, full, split.theta, padded, plain=True)
    own = [site for site in split.partition.sites if not site.at_server and site.name in found]
    terms = {s.name: with_mask(found[s.name], s, padded.mask) for s in own if s.name not in split.enumeration.joined}
    discrete: dict[str, Array] = {}
    for component, tables in split._components(found, padded):
        _, steps = enum.eliminate(split.enumeration, component, tables, padded.mask)
        positions = enum.draw(split.enumeration, component, steps, partial(_loud, seed))
        terms |= enum.at(component, tables, positions, padded.mask)
        discrete |= enum.values(split.enumeration, component, positions)
    sizes = [{axis: mask.shape[-1] for axis, mask in data.mask.items()} for data in (plain, padded)]
    return terms, split.unpadded(discrete, *sizes)


def _loud(seed: Any, name: str, shape: tuple[int, ...]) -> Array:
    """Noise for :func:`~numpyro_fed.model.discrete.draw` so loud that all possible values are drawn, likely or not."""
    noise = np.random.default_rng(digest(name)).gumbel(size=(len(DRAWN), *shape))
    chosen = (seed == DRAWN).reshape(-1, *(1,) * len(shape))  # an index would be of one precision's type
    return 1e9 * jnp.sum(jnp.where(chosen, noise.astype(real_dtype()), 0.0), axis=0)


def _explain(
    split: SplitModel, name: str, plain: SiloData, padded: SiloData, seed: int, ours: float, theirs: float
) -> str:
    z, full, cut = _point(split, seed, plain, padded)
    ours_by_site = {n: float(jnp.sum(t)) for n, t in split.evaluate(z, full, split.theta, padded).terms.items()}
    plain_by_site = {n: float(jnp.sum(t)) for n, t in split.evaluate(z, cut, split.theta, plain).terms.items()}
    if not np.isfinite(theirs):
        bad = [n for n, value in plain_by_site.items() if not np.isfinite(value)]
        return (
            f"silo {name!r}: the model's log density is {theirs} at a random point near zero of unconstrained space"
            + (f" (sites: {', '.join(bad)})" if bad else "")
            + ": check the scale of the data and the distributions' parameters"
        )
    seen = f"silo {name!r}: the split log density is {ours:.6g} where NumPyro's is {theirs:.6g}: "
    moved = [n for n, value in _server_terms(split, z, cut, plain).items() if not _close(*value)]
    if moved:
        return seen + (
            f"the server's site {moved[0]!r} changes with the size of a silo's data (x.shape[0], or an int argument, "
            "in its distribution): each silo would have another prior. Pass the number it needs in nf.Silos(..., "
            "shared=)."
        )
    mixed = [n for n in ours_by_site if not _close(ours_by_site[n], plain_by_site[n])]
    if mixed:
        return seen + (
            f"site {mixed[0]!r} mixes rows of the silo ({', '.join(a.name for a in split.partition.axes)}): with "
            "padded rows its log density changes. Give one log density per row, computed from that row; what needs all "
            "rows (a mean, a number of rows) compute beforehand and pass as an argument; with the mean and standard "
            "deviation of all silos: nf.prepare.standardize(silos, ['x'])."
            + (BY_INDEX if _scatters(split, cut, plain) else "")
        )
    for found, expected in _by_site(split, z, full, cut, plain, padded) if split.enumeration.variables else ():
        wrong = [site for site in found if not _close(float(found[site]), float(expected[site]))]
        if wrong:
            read = ", ".join(map(repr, split.enumeration.reads[wrong[0]]))
            return seen + (
                f"a log density of site {wrong[0]!r} depends on more than one element of a discrete latent ({read}), "
                "as in a chain along a plate or a scan, or where a row looks at other rows. Discrete latents are "
                "summed out row by row. Give every step of a short chain a site of its own (for t in range(4): "
                "numpyro.sample(f'state_{t}', ...)), or sum the latent out in the model."
            )
    return seen + "a term is counted twice or left out; list its site in local= or shared="


def _scatters(split: SplitModel, cut: dict, plain: SiloData) -> bool:
    """Whether the model puts values into an array by index; padded indices would put them there once more."""
    terms = lambda z, local: split._log_probs(split.unravel(z) | split.unpack(local, plain.mask), split.theta, plain)[0]
    return " scatter" in str(jax.make_jaxpr(terms)(jnp.zeros(split.dim), cut))


def _by_site(
    split: SplitModel, z: Array, full: dict, cut: dict, plain: SiloData, padded: SiloData
) -> list[tuple[dict[str, Array], dict[str, Array]]]:
    """The silo's log densities by site, at discrete values: from the tables, and as NumPyro has them."""

    def one(seed: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        terms, discrete = _at_drawn(split, z, full, plain, padded, seed)
        values = split.unravel(z) | split.unpack(cut, plain.mask)
        expected, _ = split._log_probs(values, split.theta, plain, discrete)
        return {n: jnp.sum(term) for n, term in terms.items()}, {n: jnp.sum(expected[n]) for n in terms}

    found = compiled_once(jax.vmap(one), DRAWN)
    return [jax.tree.map(lambda leaf, i=i: leaf[i], found) for i in DRAWN]


def _close(a: float, b: float) -> bool:
    return bool(np.isclose(a, b, rtol=1e-4, atol=1e-4))


def _server_terms(split: SplitModel, z: Array, cut: dict, plain: SiloData) -> dict[str, tuple[float, float]]:
    """The server's log densities as the server and as this silo would compute them."""
    values = split.unravel(z)
    dummy = split.spec.dummy()._replace(shared=split.shared)
    at_server, _ = split._log_probs(values, split.theta, dummy)
    in_silo, _ = split._log_probs(values | split.unpack(cut, plain.mask), split.theta, plain)
    names = [site.name for site in split.partition.sites if site.at_server and site.name in at_server]
    return {name: (float(jnp.sum(at_server[name])), float(jnp.sum(in_silo[name]))) for name in names}
