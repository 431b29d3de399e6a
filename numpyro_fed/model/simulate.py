r"""Data that a model could have had: globals from the prior, locals and observations given them, on the silos' design.

.. math:: z_G \sim p(z_G), \qquad z_{Lj}, y_j \sim p(z_{Lj}, y_j \mid z_G, x_j)

Covariates, numbers of rows and what is masked are the silos'; what is observed is drawn anew, and put back where the
model reads it (:mod:`numpyro_fed.model.copied`).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to

from numpyro_fed.data.padding import SiloData, cut
from numpyro_fed.data.silos import Silos, inside
from numpyro_fed.data.stack import Stack, stack_of
from numpyro_fed.host import folded, put
from numpyro_fed.keys import SERVER, fold_in_name, identities
from numpyro_fed.model.copied import NOWHERE, copied, real_elements
from numpyro_fed.model.forward import event_dims, forward_trace
from numpyro_fed.model.observations import silo_terms
from numpyro_fed.model.provenance import provenance
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.pieces import jit
from numpyro_fed.precision import ONCE
from numpyro_fed.threads import unvalidated

Array = jax.Array


class Simulated(NamedTuple):
    """One draw of everything."""

    z: np.ndarray  # (d,): the globals, unconstrained
    sites: dict[str, np.ndarray]  # the globals and the deterministics of them, constrained
    local: dict[str, np.ndarray]  # the latents of the silo that was named
    silos: Silos  # with the observations that were drawn


class Read(NamedTuple):
    """An argument that is observed."""

    argument: int  # its position in SiloData.args
    sites: tuple[str, ...]  # that observe it


Targets = tuple[tuple[Array, ...], ...]  # for each Read, for each of its sites: places in the argument, or NOWHERE


class Simulator:
    """Draws data sets of one design, with one program for each bucket of silos.

    Args:
        split: the model.
        silos: the design; the values of what is observed do not matter.
        silo: whose latents are kept, or None.
    """

    def __init__(self, split: SplitModel, silos: Silos, silo: str | None = None) -> None:
        self.split, self.silos, self.silo = split, silos, silo
        _check_terms(split)
        self.stack: Stack = stack_of(silos, silos, split.spec, split.partition.axes)
        self.arrays = [leaf for leaf in split.spec.own if leaf.dtype is not None]
        read = _read(split)
        observed = frozenset().union(*read.by_site.values()) - read.elsewhere
        self.free = tuple(i for i, leaf in enumerate(self.arrays) if leaf.path in observed)
        for site, sources in read.by_site.items():
            _check_source(site, sources, [self.arrays[i].path for i in self.free], site in read.weighted)
        found = [self._places(b) for b in range(len(self.stack.buckets))]
        pairs = dict.fromkeys(pair for of_bucket in found for pair, at in of_bucket.items() if np.any(at != NOWHERE))
        self.reads = tuple(Read(i, tuple(s for j, s in pairs if j == i)) for i in dict.fromkeys(i for i, _ in pairs))
        self.targets: list[Targets] = [
            put(tuple(tuple(places[read.argument, s] for s in read.sites) for read in self.reads)) for places in found
        ]
        self._prior = jit(partial(prior_draw, split), compiler_options=ONCE)
        self._bucket = jit(self._simulated, compiler_options=ONCE)

    def draw(self, key: Array, theta: dict[str, Array], z: Array | None = None) -> Simulated:
        """A data set.

        Args:
            key: a JAX key.
            theta: the model's params, unconstrained.
            z: the globals, unconstrained; None: a draw of their prior.
        """
        with unvalidated():
            try:
                z, sites = self._prior(folded(key, SERVER), theta, z)
                drawn = [self._of_bucket(b, key, z, theta) for b in range(len(self.stack.buckets))]
            except NotImplementedError:
                raise PartitionError(_improper(self.split)) from None
        args: dict[str, list[np.ndarray]] = {}
        latent: dict[str, Any] = {}
        for bucket, (arguments, values) in zip(self.stack.buckets, drawn, strict=True):
            for i, name in enumerate(bucket.names):
                args[name] = [array[i] for array in arguments]
                if name == self.silo:
                    own: dict[str, Any] = {site: x[i] for site, x in values.items()}
                    latent = self.split.unpadded(own, self.split.partition.lengths(name), bucket.lengths)
        return Simulated(np.asarray(z), jax.device_get(sites), latent, self.silos.changed(partial(self._put, args)))

    def _of_bucket(self, b: int, key: Array, z: Array, theta: dict) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        args, mask = self.stack.arrays[b]
        words = identities(self.stack.buckets[b].names)
        return jax.device_get(self._bucket(key, z, theta, self.stack.shared, words, args, mask, self.targets[b]))

    def _simulated(
        self, key: Array, z: Array, theta: dict, shared: tuple, words: Array, args: tuple, mask: dict, to: Targets
    ) -> tuple[list[Array], dict[str, Array]]:
        """Of all silos of a bucket: the arguments that are observed, and the latents."""
        split = self.split
        latent = [s.name for s in split.partition.sites if s.role in ("local", "enumerated")]

        def one(words: Array, args: tuple, mask: dict, to: Targets) -> tuple[list[Array], dict[str, Array]]:
            kwargs = split.spec.kwargs(SiloData(args, mask, shared))
            trace = forward_trace(split, split.unravel(z), theta, kwargs, fold_in_name(key, words))
            new = []
            for read, places in zip(self.reads, to, strict=True):
                drawn = [(trace[s]["value"], at) for s, at in zip(read.sites, places, strict=True)]
                for name, (value, at) in zip(read.sites, drawn, strict=True):
                    _check_shapes(name, at.shape, value.shape)
                new.append(put_back(args[read.argument], drawn))
            return new, {name: trace[name]["value"] for name in latent}

        return jax.vmap(one)(words, args, mask, to)

    def _put(self, args: dict[str, list[np.ndarray]], own: dict[str, Any]) -> dict[str, Any]:
        """A silo's own arguments with what was drawn for it, without padding."""
        name = str(inside())
        lengths = self.split.partition.lengths(name)
        padded = self.stack.buckets[self.stack.place(name)[0]].lengths
        flat, structure = jax.tree.flatten(own)
        position = [i for i, leaf in enumerate(self.split.spec.own) if leaf.dtype is not None]
        for read, new in zip(self.reads, args[name], strict=True):
            axis = self.arrays[read.argument].axis
            rows = new if axis is None else cut(new, [(axis, -new.ndim)], lengths, padded)
            flat[position[read.argument]] = rows
        return jax.tree.unflatten(structure, flat)

    # --- where observations are read ----------------------------------------------------------------------------------

    def _places(self, b: int) -> dict[tuple[int, str], np.ndarray]:
        """``{(argument, observed site): places in the argument}``, for all silos of a bucket, stacked.

        An error where a site's values are not copies of arguments' elements.
        """
        split, events, (args, mask) = self.split, event_dims(self.split), self.stack.arrays[b]

        def one(args: tuple, mask: dict) -> tuple[dict[int, dict[str, Array]], dict[str, Array]]:
            data = SiloData(args, mask, self.stack.shared)
            found = {i: copied(split, i, data) for i in self.free}
            valid = {}
            for site in silo_terms(split, "observed"):
                shape = next(iter(found.values()))[site.name].shape
                valid[site.name] = real_elements(site, shape, events, mask)
            return found, valid

        places, valid = jax.device_get(jit(jax.vmap(one), compiler_options=ONCE)(args, mask))
        out = {(i, s): np.where(valid[s], at, NOWHERE) for i, found in places.items() for s, at in found.items()}
        for site, real in valid.items():
            sources = np.sum([at != NOWHERE for (_, s), at in out.items() if s == site], axis=0)
            if not np.all(sources[real] == 1):
                raise PartitionError(
                    f"observed site {site!r} observes something that is computed from the silo's arguments, or partly "
                    "a latent, so what is simulated for it cannot be put back: compute it beforehand, and pass it as "
                    "the argument that is observed, obs=y"
                )
        for j, name in enumerate(self.stack.buckets[b].names):
            for i in self.free:
                flat = np.concatenate([at[j].ravel() for (k, _), at in out.items() if k == i])
                flat = flat[flat != NOWHERE]
                if len(np.unique(flat)) < len(flat):
                    raise PartitionError(
                        f"silo {name!r}: an element of {self.arrays[i].path!r} is observed twice (sites "
                        f"{', '.join(valid)}), so there is no one value to simulate for it: give every observation an "
                        "element of its own"
                    )
        return out


def prior_draw(split: SplitModel, key: Array, theta: dict[str, Array], z: Array | None) -> tuple[Array, dict]:
    """The globals, unconstrained, and as sites with the deterministics of them; ``z`` takes the place of a draw."""
    if z is None:
        trace = forward_trace(split, {}, theta, split.spec.kwargs(split.dummy()), key)
        inverse = lambda site: biject_to(site["fn"].support).inv(site["value"])
        z = split.ravel({name: inverse(trace[name]) for name in split.global_shapes})
    return z, split.constrain_global(z, theta)


def put_back(argument: Array, drawn: list[tuple[Array, Array]]) -> Array:
    """An argument with drawn values at their places. Whole numbers that a continuous site observes become real ones.

    >>> put_back(jnp.array([[1, 2], [3, 4]]), [(jnp.array([7, 8]), jnp.array([0, 3]))]).tolist()
    [[7, 2], [3, 8]]
    """
    real = any(jnp.issubdtype(value.dtype, jnp.floating) for value, _ in drawn)
    if real and not jnp.issubdtype(argument.dtype, jnp.floating):
        argument = argument.astype(jnp.zeros(()).dtype)
    flat = argument.ravel()
    for value, places in drawn:
        at = places.ravel()
        at = jnp.where(at == NOWHERE, flat.size, at)  # a negative index would count from the end
        flat = flat.at[at].set(value.ravel().astype(flat.dtype), mode="drop")
    return flat.reshape(argument.shape)


# --- what cannot be simulated -----------------------------------------------------------------------------------------


class _Sources(NamedTuple):
    by_site: dict[str, frozenset[str]]  # {observed site: arguments that its value is made from}
    elsewhere: frozenset[str]  # arguments that a draw of the model depends on
    weighted: tuple[str, ...]  # observed sites under handlers.scale


def _read(split: SplitModel) -> _Sources:
    """Who reads which of a silo's own arguments, from shapes alone."""
    data, names = split.dummy(), [leaf.path for leaf in split.spec.own if leaf.dtype is not None]
    observed = [site.name for site in silo_terms(split, "observed")]
    latent = [s.name for s in split.partition.sites if s.role in ("local", "enumerated")]

    weighted: set[str] = set()

    def run(**arrays: Any) -> tuple[dict, dict]:
        given = data._replace(args=tuple(arrays[name] for name in names))
        trace = split.trace_at_zero(given)
        weighted.update(s for s in observed if not _is_one(trace[s].get("scale")))
        values = split.unravel(jnp.zeros(split.dim))
        drawn = forward_trace(split, values, split.theta, split.spec.kwargs(given), jax.random.key(0))
        return {s: trace[s]["value"] for s in observed}, {s: drawn[s]["value"] for s in (*observed, *latent)}

    with unvalidated():
        try:
            by_site, drawn = provenance(run, dict(zip(names, data.args, strict=True)))
        except NotImplementedError:
            raise PartitionError(_improper(split)) from None
    return _Sources(by_site, frozenset().union(*drawn.values()), tuple(sorted(weighted)))


def _is_one(scale: Any) -> bool:
    return scale is None or (isinstance(scale, int | float) and scale == 1)


def _check_terms(split: SplitModel) -> None:
    for site in split.partition.sites:
        if site.role == "factor":
            raise PartitionError(
                f"{site.name!r} is a numpyro.factor, a density without a distribution: nothing can be simulated from "
                "it. Write it as an observed site, numpyro.sample(name, distribution, obs=y)"
            )
        if site.role == "observed" and site.at_server:
            raise PartitionError(
                f"observed site {site.name!r} depends on no silo's own arguments, so what is simulated for it cannot "
                "be put back: hand its values to the silos as an argument, or leave it out"
            )
    if not silo_terms(split, "observed"):
        raise PartitionError("the model observes nothing in the silos, so there are no data to simulate")


def _check_source(site: str, sources: frozenset[str], free: list[str], weighted: bool) -> None:
    if weighted:
        raise PartitionError(
            f"observed site {site!r} is weighted by handlers.scale, and a weighted likelihood is no distribution of "
            "data: nothing can be simulated from it. Leave the weights out, numpyro.sample(name, distribution, obs=y)"
        )
    if not sources:
        raise PartitionError(
            f"observed site {site!r} reads no argument of a silo's own, so what is simulated for it cannot be put "
            "back: pass its values as an argument, obs=y"
        )
    if not sources & set(free):
        raise PartitionError(
            f"observed site {site!r} reads {', '.join(map(repr, sorted(sources)))}, which other draws of the model "
            "depend on, too (a lagged value, a covariate that is modelled itself), so simulated values would change "
            "what they are simulated from: pass the observed values and the others as two arguments, if they are two"
        )


def _check_shapes(site: str, observed: tuple[int, ...], drawn: tuple[int, ...]) -> None:
    if observed != drawn:
        raise PartitionError(
            f"observed site {site!r} observes values of shape {observed} where its distribution draws {drawn}, so what "
            "is simulated cannot be put back: give both the same shape"
        )


def _improper(split: SplitModel) -> str:
    latent = [s for s in split.partition.sites if s.role in ("global", "local")]
    flat = [s.name for s in latent if "Improper" in s.shape.distribution]
    named = (
        f"site {', '.join(map(repr, flat))} has an improper prior" if flat else "a site's prior cannot be drawn from"
    )
    return (
        f"{named}, so no truth can be simulated from it: give it a proper one, such as dist.Normal(0, 10), or simulate "
        "from a posterior, nf.sbc(method, silos, given=fit)"
    )
