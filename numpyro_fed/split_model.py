r"""The model, split: all that a method knows of the user's NumPyro model.

.. math::

    \log p(y, z \mid \theta) = \log p(z_G \mid \theta) + \sum_j \log p(z_{Lj}, y_j \mid z_G, \theta)

``log_prior`` is the first term, ``log_silo`` one term of the sum, both on unconstrained vectors with each Jacobian
counted once. Law: their sum is NumPyro's own log density of the pooled model; :func:`certify` checks it on the user's
model and data whenever a split is made.

Local latents are arranged by rows: ``z_L[group]`` has shape (rows, size of a row). A group is a silo plate (or a pair
of crossed ones); latents that a silo has once form the group ``"silo"`` with a single row.

Discrete local latents are not part of z_L: they are summed out (:mod:`numpyro_fed.enumeration`), and all densities are
those of the model without them.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import MaskedDistribution, biject_to, constraints
from numpyro.distributions.distribution import validation_enabled
from numpyro.infer.util import _unconstrain_reparam, compute_log_probs, potential_energy

from numpyro_fed import enumeration as enum
from numpyro_fed.enumeration import Enumeration, resized
from numpyro_fed.keys import digest
from numpyro_fed.padding import CallSpec, SiloData, call_spec, round_up, shared_arrays, silo_data, stack
from numpyro_fed.partition import Axis, Partition, PartitionError, Site, partition
from numpyro_fed.silos import Silos
from numpyro_fed.tracing import UNOPTIMISED, Model, init_to_zero, label, traced

Array = Any
NEAR_ZERO = 1e-5  # where searches begin
GOLDEN = 0.6180339887498949  # multiples of it, modulo one, are all different


class Evaluation(NamedTuple):
    """The silo's log densities at one point, site by site, padded rows at zero, and which local elements are real.

    Sites that depend on a discrete latent are one term with it, named after the observed site in its rows (or after
    the latent itself, when there is none).
    """

    terms: dict[str, Array]
    active: dict[str, Array]  # {group: bool (rows, size of a row)}


class LocalSite(NamedTuple):
    name: str
    positions: tuple[int, ...]  # of the row axes in the unconstrained value, in the group's order
    rest: tuple[int, ...]  # the other axes' sizes
    batch_rank: int
    dims: tuple[int, ...]  # of the row axes in the log density

    @property
    def size(self) -> int:
        return int(np.prod(self.rest))


class Group(NamedTuple):
    """Local latents that share their rows."""

    name: str
    axes: tuple[tuple[str, Fraction], ...]  # axis, and rows per element of it
    sites: tuple[LocalSite, ...]

    @property
    def size(self) -> int:
        """Length of one row."""
        return sum(site.size for site in self.sites)

    def row_shape(self, mask: dict[str, Array]) -> tuple[int, ...]:
        return tuple(int(mask[axis].shape[-1] * ratio) for axis, ratio in self.axes)

    def num_rows(self, mask: dict[str, Array]) -> int:
        return int(np.prod(self.row_shape(mask)))


class SplitModel(NamedTuple):
    """A NumPyro model divided between a server and silos. Make one with :func:`split_model`."""

    model: Model
    partition: Partition
    spec: CallSpec
    shared: tuple[Array, ...]
    global_shapes: dict[str, tuple[int, ...]]  # unconstrained
    groups: tuple[Group, ...]
    theta: dict[str, Array]  # the params' start, unconstrained
    constraints: dict[str, Any]
    constants: dict[str, Any]  # params that no density depends on
    enumeration: Enumeration = enum.NOTHING  # how discrete local latents are summed out

    # --- layout of the vectors ---------------------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Length of z_G."""
        return sum(int(np.prod(shape)) for shape in self.global_shapes.values())

    def unravel(self, z: Array) -> dict[str, Array]:
        """z_G as {global site: unconstrained value}."""
        if not self.global_shapes:
            return {}
        sizes = [int(np.prod(shape)) for shape in self.global_shapes.values()]
        parts = jax.lax.split(jnp.asarray(z), sizes)  # unlike slices, whose gradients are padded and added up
        return {
            name: part.reshape(shape) for (name, shape), part in zip(self.global_shapes.items(), parts, strict=True)
        }

    def ravel(self, values: dict[str, Array]) -> Array:
        parts = [jnp.ravel(values[name]) for name in self.global_shapes]
        return jnp.concatenate(parts) if parts else jnp.zeros(0)

    def unpack(self, z_local: dict[str, Array], mask: dict[str, Array]) -> dict[str, Array]:
        """z_L as {local site: unconstrained value}."""
        out = {}
        for group in self.groups:
            rows, start = group.row_shape(mask), 0
            for site in group.sites:
                value = z_local[group.name][:, start : start + site.size].reshape(rows + site.rest)
                out[site.name] = jnp.moveaxis(value, range(len(rows)), site.positions)
                start += site.size
        return out

    def pack(self, values: dict[str, Array], mask: dict[str, Array]) -> dict[str, Array]:
        """The inverse of `unpack`."""
        return {
            group.name: jnp.concatenate(
                [
                    jnp.moveaxis(values[s.name], s.positions, range(len(s.positions))).reshape(group.num_rows(mask), -1)
                    for s in group.sites
                ],
                axis=1,
            )
            for group in self.groups
        }

    def zeros_local(self, mask: dict[str, Array]) -> dict[str, Array]:
        return {group.name: jnp.zeros((group.num_rows(mask), group.size)) for group in self.groups}

    def zeros_locals(self, mask: dict[str, Array], num: int) -> dict[str, Array]:
        """Those of ``num`` silos, stacked; there may be no axis that pads."""
        return jax.vmap(self.zeros_local, axis_size=num)(mask)

    def near_zero_local(self, mask: dict[str, Array]) -> dict[str, Array]:
        """Where a search for locals begins: all different, none exactly zero.

        NumPyro's gradients of Binomial and Bernoulli logits are wrong where a logit is exactly zero, as that of a
        random intercept, or of the difference of two, would be. Padding changes no row's place.
        """
        out, offset = {}, 0
        for group in self.groups:
            shape = (*group.row_shape(mask), group.size)
            steps = [np.arange(1, size + 1) * GOLDEN ** (k + 1) for k, size in enumerate(shape)]
            place = sum(np.ix_(*steps), np.asarray(0.37 * offset)) % 1.0
            values = NEAR_ZERO * (0.5 + place).reshape(-1, group.size)
            out[group.name] = jnp.asarray(values, jnp.zeros(()).dtype)
            offset += 1
        return out

    def row_mask(self, group: Group, mask: dict[str, Array]) -> Array:
        """Which rows of a group are real, (rows,)."""
        valid = jnp.ones((), bool)
        for axis, ratio in group.axes:
            valid = valid[..., None] & resized(mask[axis], int(mask[axis].shape[-1] * ratio))
        return valid.reshape(-1)

    # --- densities ---------------------------------------------------------------------------------------------------

    def constrain_theta(self, theta: dict[str, Array]) -> dict[str, Array]:
        return {name: biject_to(self.constraints[name])(value) for name, value in theta.items()}

    def _substituted(
        self, values: dict[str, Array], theta: dict[str, Array], discrete: dict[str, Array] | None = None
    ) -> Callable[..., Any]:
        params = self.constrain_theta(theta) | self.constants
        model = handlers.substitute(self.model, data=params) if params else self.model
        model = handlers.substitute(model, substitute_fn=partial(filled, values, discrete or {}))
        return handlers.seed(model, jax.random.PRNGKey(0))

    def _log_probs(
        self,
        values: dict[str, Array],
        theta: dict[str, Array],
        data: SiloData,
        discrete: dict[str, Array] | None = None,
    ) -> tuple[dict, dict]:
        model = self._substituted(values, theta, discrete)
        with validation_enabled(False):  # padded and dummy rows need not be valid
            log_probs, trace = compute_log_probs(model, (), self.spec.kwargs(data), {}, sum_log_prob=False)
        for name in values:  # the Jacobian of a constrained latent belongs to its site
            log_det = log_probs.pop(f"_{name}_log_det", None)
            if log_det is not None:
                log_probs[name] = log_probs[name] + log_det
        return log_probs, trace

    def _trace(
        self,
        values: dict[str, Array],
        theta: dict[str, Array],
        data: SiloData,
        discrete: dict[str, Array] | None = None,
    ) -> dict[str, dict]:
        with validation_enabled(False):
            return handlers.trace(self._substituted(values, theta, discrete)).get_trace(**self.spec.kwargs(data))

    def log_prior(self, z: Array, theta: dict[str, Array]) -> Array:
        """The server's term: log p(z_G | theta), with what observations depend on no silo."""
        log_probs, _ = self._log_probs(self.unravel(z), theta, self.spec.dummy()._replace(shared=self.shared))
        own = [site.name for site in self.partition.sites if site.at_server and site.name in log_probs]
        return sum((jnp.sum(log_probs[name]) for name in own), jnp.zeros(()))

    def evaluate(self, z: Array, z_local: dict[str, Array], theta: dict[str, Array], data: SiloData) -> Evaluation:
        """The silo's log densities, site by site, unsummed."""
        found = self.densities(z, z_local, theta, data)
        terms = {
            site.name: _masked(found[site.name], site, data.mask)
            for site in self.partition.sites
            if site.name in found and site.name not in self.enumeration.joined
        }
        for component, tables in self._components(found, data):
            term, _ = enum.eliminate(self.enumeration, component, tables, data.mask)
            terms[component.name] = _masked(term, self.partition[component.name], data.mask)
        active = {}
        for group in self.groups:
            columns = [self._active(group, site, self._mask_of(site.name, found), data.mask) for site in group.sites]
            active[group.name] = jnp.concatenate(columns, axis=1)
        return Evaluation(terms, active)

    def densities(
        self, z: Array, z_local: dict[str, Array], theta: dict[str, Array], data: SiloData, plain: bool = False
    ) -> dict[str, Array]:
        """The silo's log densities as they are, padded rows too, and the masks that the model puts on latents.

        Those that depend on discrete sites are tables over these sites' values, which are their leading axes. An
        element of a discrete site that the model's mask leaves out weighs 1/K, or 1 if ``plain``.
        """
        run = self._run(self.unravel(z) | self.unpack(z_local, data.mask), theta, data, plain)
        return enum.tables(self.enumeration, run)

    def _run(self, values: dict[str, Array], theta: dict[str, Array], data: SiloData, plain: bool = False) -> enum.Run:
        latent = [site for site in self.partition.sites if site.role in ("local", "enumerated")]
        own = [site.name for site in self.partition.sites if not site.at_server]

        def run(discrete: dict[str, Array]) -> dict[str, Array]:
            log_probs, trace = self._log_probs(values, theta, data, discrete)
            out = {name: log_probs[name] for name in own if name in log_probs}
            for site in latent:
                mask = user_mask(trace[site.name]["fn"])
                if mask is None:
                    continue
                out[_mask_name(site.name)] = mask
                if site.role == "enumerated" and not plain:
                    out[site.name] = jnp.where(mask, out[site.name], -np.log(len(site.shape.support or ())))
            return out

        return run

    def _components(self, found: dict[str, Array], data: SiloData) -> list[tuple[enum.Component, list[enum.Placed]]]:
        probe = self._run(*self._probe(data.mask), data) if self.enumeration.components else None
        plan = self.enumeration
        return [(one, enum.placed(plan, one, found, data.mask, probe)) for one in plan.components]

    def _probe(self, mask: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        """A fixed point at which classes differ, though they may all be equal where a method starts."""
        draws, dtype = np.random.default_rng(0), jnp.zeros(()).dtype
        noise = lambda *shape: jnp.asarray(draws.normal(scale=0.5, size=shape), dtype)
        z, local = noise(self.dim), {g.name: noise(g.num_rows(mask), g.size) for g in self.groups}
        theta = jax.tree.map(lambda start: start + noise(*jnp.shape(start)), self.theta)
        return self.unravel(z) | self.unpack(local, mask), theta

    def _mask_of(self, name: str, found: dict[str, Array]) -> Array | None:
        own, read = found.get(_mask_name(name)), self.enumeration.reads.get(_mask_name(name), ())
        return own if own is None or not read else jnp.any(own, axis=tuple(range(len(read))))

    def _active(self, group: Group, site: LocalSite, own: Array | None, mask: dict[str, Array]) -> Array:
        rows = self.row_mask(group, mask)
        valid = jnp.broadcast_to(rows[:, None], (rows.shape[0], site.size))
        if own is None:
            return valid
        # a mask has the log density's axes, or (inside to_event) some of the event's too
        rank = len(site.positions) + len(site.rest)
        own = jnp.reshape(own, (1,) * (site.batch_rank - jnp.ndim(own)) + jnp.shape(own))
        own = jnp.reshape(own, jnp.shape(own) + (1,) * (rank - jnp.ndim(own)))
        own = jnp.moveaxis(own, site.positions, range(len(site.positions)))
        own = jnp.broadcast_to(own, group.row_shape(mask) + site.rest)
        return valid & own.reshape(rows.shape[0], site.size)

    def log_silo(self, z: Array, z_local: dict[str, Array], theta: dict[str, Array], data: SiloData) -> Array:
        """The silo's term: log p(z_L, y | z_G, theta); padded rows are left out."""
        terms = self.evaluate(z, z_local, theta, data).terms
        return sum((jnp.sum(term) for term in terms.values()), jnp.zeros(()))

    def sample_discrete(
        self, z: Array, z_local: dict[str, Array], theta: dict[str, Array], data: SiloData, key: Array
    ) -> dict[str, Array]:
        """One draw of the silo's discrete sites from their posterior given the other latents and the data; padded."""
        if not self.enumeration.variables:
            return {}
        found = self.densities(z, z_local, theta, data)
        out: dict[str, Array] = {}
        for component, tables in self._components(found, data):
            _, steps = enum.eliminate(self.enumeration, component, tables, data.mask)
            positions = enum.draw(self.enumeration, component, steps, enum.gumbel(key))
            out |= enum.values(self.enumeration, component, positions)
        return out

    # --- back to named sites -----------------------------------------------------------------------------------------

    def constrain_global(self, z: Array, theta: dict[str, Array]) -> dict[str, Array]:
        """One draw of the global sites and of the deterministic sites that depend on them alone."""
        trace = self._trace(self.unravel(z), theta, self.spec.dummy()._replace(shared=self.shared))
        shown = [s.name for s in self.partition.sites if s.at_server and s.role in ("global", "deterministic")]
        return {name: trace[name]["value"] for name in shown}

    def constrain_local(
        self, z: Array, z_local: dict[str, Array], theta: dict[str, Array], data: SiloData, key: Array | None = None
    ) -> dict[str, Array]:
        """One draw of the silo's local sites and deterministics, padded.

        Discrete sites are drawn with ``key`` from their posterior given all else. Without a key they are left out, with
        the deterministic sites that depend on them.
        """
        roles = ("local", "deterministic") if key is None else ("local", "deterministic", "enumerated")
        hidden = self.enumeration.drawn if key is None else frozenset()
        discrete = {} if key is None else self.sample_discrete(z, z_local, theta, data, key)
        trace = self._trace(self.unravel(z) | self.unpack(z_local, data.mask), theta, data, discrete)
        shown = [s.name for s in self.partition.sites if s.role in roles and not s.at_server and s.name not in hidden]
        return {name: trace[name]["value"] for name in shown}

    def unpadded(self, values: dict[str, Array], lengths: dict[str, int], padded: dict[str, int]) -> dict[str, Array]:
        """Cut the padded rows off named values; leading axes (draws) are allowed."""
        out = {}
        for name, value in values.items():
            for axis, dim in self.partition[name].value_axes:
                keep = value.shape[dim] * lengths[axis] // padded[axis]
                value = jax.lax.slice_in_dim(value, 0, keep, axis=value.ndim + dim)
            out[name] = value
        return out

    def unpadded_local(
        self, z_local: dict[str, Array], lengths: dict[str, int], padded: dict[str, int]
    ) -> dict[str, Array]:
        """z_L without its padded rows; leading axes (draws) are allowed.

        With the silo's own data, unpadded, it gives `constrain_local` what NumPyro would see: deterministic sites that
        mix rows (a mean over them) are then right, too.
        """
        return {g.name: z_local[g.name][..., _real_rows(g, lengths, padded), :] for g in self.groups}

    def coordinate_names(self) -> list[str]:
        """Names of z_G's coordinates: ``beta[0]``; of the unconstrained value when the site is constrained."""
        names = []
        for name, shape in self.global_shapes.items():
            names += (
                [name] if shape == () else [f"{name}[{', '.join(map(str, index))}]" for index in np.ndindex(*shape)]
            )
        return names


def filled(values: dict[str, Array], discrete: dict[str, Array], site: dict) -> Array | None:
    """A substitute_fn: continuous latents from unconstrained values, discrete ones from values that are broadcast."""
    value = discrete.get(site["name"])
    if value is None:
        return _unconstrain_reparam(values, site)
    shape = site["fn"].shape(site["kwargs"].get("sample_shape", ()))
    index = site["infer"].get("_scan_current_index")  # in a scan, all steps' values may be given
    value = value[index] if index is not None and jnp.ndim(value) > len(shape) else value
    return jnp.broadcast_to(value, shape)


def _mask_name(site: str) -> str:
    return f"mask of {site}"


def user_mask(fn: Any) -> Array | None:
    """The mask that handlers.mask or obs_mask put on a distribution, or None."""
    found = None
    while fn is not None:
        if isinstance(fn, MaskedDistribution) and fn._mask is not True:
            found = jnp.asarray(fn._mask) if found is None else found & fn._mask
        fn = getattr(fn, "base_dist", None)
    return found


def _real_rows(group: Group, lengths: dict[str, int], padded: dict[str, int]) -> np.ndarray:
    """Which rows of the padded group are real, from lengths alone."""
    valid = np.ones((), bool)
    for axis, ratio in group.axes:
        valid = valid[..., None] & (np.arange(int(padded[axis] * ratio)) < int(lengths[axis] * ratio))
    return np.flatnonzero(valid)


def _masked(log_prob: Array, site: Site, mask: dict[str, Array]) -> Array:
    for axis, dim in site.axes:
        along = resized(mask[axis], log_prob.shape[dim])
        log_prob = jnp.where(along.reshape(along.shape + (1,) * (-dim - 1)), log_prob, 0)
    return log_prob


# --- making one -----------------------------------------------------------------------------------------------------


def split_model(model: Model, silos: Silos, local: Any = None, shared: Any = None, check: bool = True) -> SplitModel:
    """Split ``model`` over ``silos``; raises when the split would not be exact."""
    part = partition(model, silos, local, shared)
    spec = call_spec(silos, part)
    split = from_spec(model, part, spec, shared_arrays(silos))
    if not check:
        return split
    check_support(split, silos)
    # Silos of equal size are padded for speed alone: where rows mix, they need not be.
    equal = {axis.name for axis in part.axes if axis.free and len(set(axis.lengths.values())) == 1}
    try:
        certify(split, silos)
    except PartitionError:
        if not equal:
            raise
        axes = tuple(axis._replace(free=axis.free and axis.name not in equal) for axis in part.axes)
        split = split._replace(partition=replace(part, axes=axes))
        certify(split, silos)
    return split


def from_spec(model: Model, part: Partition, spec: CallSpec, shared: tuple[Array, ...]) -> SplitModel:
    """A split from what the server knows: shapes, shared arguments and the partition. Needs no data."""
    unconstrained = {s.name: tuple(s.shape.unconstrained or ()) for s in part.sites if s.role == "global"}
    params = {s.name for s in part.sites if s.role in ("param", "constant")}
    values: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    if params:
        with validation_enabled(False):  # the dummy's zeros need not be valid data
            trace = traced(model, spec.kwargs(spec.dummy()._replace(shared=shared)), start=init_to_zero)
        for name in params:
            values[name] = trace[name]["value"]
            limits[name] = trace[name]["kwargs"].get("constraint", constraints.real)
    theta = {s.name: biject_to(limits[s.name]).inv(values[s.name]) for s in part.sites if s.role == "param"}
    # a Python number (numpyro.param("t", 0.0)) would turn float64 in an engine's program; flax's weights are float32
    # under x64, too, and would meet float64 gradients
    real = jnp.zeros(()).dtype
    theta = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.promote_types(jnp.asarray(leaf).dtype, real)), theta)
    for name, start in theta.items():
        if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(start)):
            raise PartitionError(
                f"param {name!r} starts at {values[name]}, at or beyond the edge of its constraint {limits[name]}: "
                "start it inside."
            )
    constants = {s.name: values[s.name] for s in part.sites if s.role == "constant"}
    split = SplitModel(
        model,
        part,
        spec,
        shared,
        unconstrained,
        _groups(part),
        theta,
        {name: limits[name] for name in theta},
        constants,
    )
    return split._replace(enumeration=_enumeration(split))


def _enumeration(split: SplitModel) -> Enumeration:
    data = split.spec.dummy()._replace(shared=split.shared)
    values = split.unravel(jnp.zeros(split.dim)) | split.unpack(split.zeros_local(data.mask), data.mask)
    shown = [site.name for site in split.partition.sites if site.role == "deterministic"]

    def computed(discrete: dict[str, Array]) -> dict[str, Array]:
        trace = split._trace(values, split.theta, data, discrete)
        return {name: trace[name]["value"] for name in shown}

    return enum.plan(split.partition, split._run(values, split.theta, data), computed)


def _groups(part: Partition) -> tuple[Group, ...]:
    lengths = {axis.name: axis.lengths[part.reference] for axis in part.axes}
    found: dict[tuple, list[LocalSite]] = {}
    for site in part.sites:
        if site.role != "local":
            continue
        # the unconstrained value is the log density's axes followed by event axes
        batch, shape = site.shape.log_prob or (), site.shape.unconstrained or ()
        axes = sorted(site.axes)
        positions = tuple(len(batch) + dim for _, dim in axes)
        key = tuple((axis, Fraction(batch[dim], lengths[axis])) for axis, dim in axes)
        rest = tuple(size for i, size in enumerate(shape) if i not in positions)
        found.setdefault(key, []).append(
            LocalSite(site.name, positions, rest, len(batch), tuple(dim for _, dim in axes))
        )
    groups, taken = [], set()
    for key, sites in found.items():
        name = "*".join(axis for axis, _ in key) or "silo"
        while name in taken:
            name += "'"
        taken.add(name)
        groups.append(Group(name, key, tuple(sites)))
    return tuple(groups)


# --- the certificate ------------------------------------------------------------------------------------------------

DRAWN = np.arange(4)  # keys of the discrete values at which a split is checked: few rows might have equal values


def certify(split: SplitModel, silos: Silos, max_silos: int = 4, seed: int = 0) -> None:
    """Check on real silos that log_prior + log_silo is NumPyro's own log density of the unpadded model.

    The padded split is evaluated at a random point with random values in the padded rows; NumPyro evaluates the
    unpadded model at the same point, and at discrete values drawn row by row. Raises :class:`PartitionError` naming the
    sites that differ.
    """
    axes = split.partition.axes
    names = _chosen(silos, axes, max_silos, seed)
    longest = {axis.name: (round_up if axis.free else int)(max(axis.lengths.values())) for axis in axes}
    both = jax.jit(partial(_both, split), compiler_options=UNOPTIMISED)  # one program for silos of the same shapes
    for name in names:
        own = {axis.name: axis.lengths[name] for axis in axes}
        plain = silo_data(silos, name, split.spec, axes)
        # twice the rows at most: what a bucket may pad to
        padded = silo_data(silos, name, split.spec, axes, {a: min(longest[a], 2 * own[a]) for a in own})
        ours, theirs, size = both(*_point(split, seed, plain, padded), plain, padded)
        tolerance = (1e-9 if jnp.asarray(ours).dtype == jnp.float64 else 2e-5) * (1 + float(size))
        if np.isfinite(theirs) and np.isfinite(ours) and abs(float(ours - theirs)) <= tolerance:
            continue
        raise PartitionError(_explain(split, name, plain, padded, seed, float(ours), float(theirs)))


def _chosen(silos: Silos, axes: tuple[Axis, ...], count: int, seed: int) -> list[str]:
    rows = {name: sum(axis.lengths[name] for axis in axes) for name in silos.names}
    names = sorted(silos.names, key=rows.__getitem__)
    if len(names) <= count:
        return names
    middle = np.random.default_rng(seed).choice(len(names) - 2, count - 2, replace=False) + 1
    return [names[0], names[-1], *(names[i] for i in middle)]


def _point(split: SplitModel, seed: int, plain: SiloData, padded: SiloData) -> tuple[Array, dict, dict]:
    """A random point: z_G, z_L with values in the padded rows too, and z_L without padded rows."""
    draws = np.random.default_rng(seed)
    dtype = jnp.zeros(()).dtype
    z = draws.normal(scale=0.5, size=split.dim).astype(dtype)
    full = {
        group.name: draws.normal(scale=0.5, size=(group.num_rows(padded.mask), group.size)).astype(dtype)
        for group in split.groups
    }
    sizes = [{axis: mask.shape[-1] for axis, mask in data.mask.items()} for data in (plain, padded)]
    return z, full, split.unpadded_local(full, *sizes)


def _compiled_once(function: Callable[..., Any], *args: Any) -> Any:
    """Run a program that is used a single time."""
    return jax.jit(function).lower(*args).compile(compiler_options=UNOPTIMISED)(*args)


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
    terms = {s.name: _masked(found[s.name], s, padded.mask) for s in own if s.name not in split.enumeration.joined}
    discrete: dict[str, Array] = {}
    for component, tables in split._components(found, padded):
        _, steps = enum.eliminate(split.enumeration, component, tables, padded.mask)
        positions = enum.draw(split.enumeration, component, steps, partial(_loud, seed))
        terms |= enum.at(component, tables, positions, padded.mask)
        discrete |= enum.values(split.enumeration, component, positions)
    sizes = [{axis: mask.shape[-1] for axis, mask in data.mask.items()} for data in (plain, padded)]
    return terms, split.unpadded(discrete, *sizes)


def _loud(seed: Any, name: str, shape: tuple[int, ...]) -> Array:
    """Noise for :func:`enumeration.draw` so loud that all possible values are drawn, likely or not."""
    noise = np.random.default_rng(digest(name)).gumbel(size=(len(DRAWN), *shape))
    return 1e9 * jnp.asarray(noise, jnp.zeros(()).dtype)[seed]


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
            "rows (a mean, a number of rows) compute beforehand and pass as an argument."
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


def _by_site(
    split: SplitModel, z: Array, full: dict, cut: dict, plain: SiloData, padded: SiloData
) -> list[tuple[dict[str, Array], dict[str, Array]]]:
    """The silo's log densities by site, at discrete values: from the tables, and as NumPyro has them."""

    def one(seed: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        terms, discrete = _at_drawn(split, z, full, plain, padded, seed)
        values = split.unravel(z) | split.unpack(cut, plain.mask)
        expected, _ = split._log_probs(values, split.theta, plain, discrete)
        return {n: jnp.sum(term) for n, term in terms.items()}, {n: jnp.sum(expected[n]) for n in terms}

    found = _compiled_once(jax.vmap(one), DRAWN)
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


# --- observations in their distributions' support -------------------------------------------------------------------


def check_support(split: SplitModel, silos: Silos) -> None:
    """Raise when an observation is impossible: a 3 where a Bernoulli needs 0 or 1. NumPyro itself computes on.

    Sites whose support depends on a latent are left to inference; masked observations may have any value.
    """
    names = split.partition.static_support
    if not names:
        return

    def inside(args: Any, mask: Any) -> dict[str, Array]:
        trace = _trace_at_zero(split, SiloData(args, mask, split.shared))
        return {name: jnp.all(_in_support(trace[name]["fn"], trace[name]["value"])) for name in names}

    for bucket in stack(silos, split.spec, split.partition.axes):
        found = _compiled_once(jax.vmap(inside), bucket.args, bucket.mask)
        for name, fine in found.items():
            if not np.all(fine):
                silo = bucket.names[int(np.argmin(fine))]
                raise PartitionError(_outside(split, silos, silo, name))


def _trace_at_zero(split: SplitModel, data: SiloData) -> dict[str, dict]:
    values = split.unravel(jnp.zeros(split.dim)) | split.unpack(split.zeros_local(data.mask), data.mask)
    return split._trace(values, split.theta, data)


def _in_support(fn: Any, value: Array) -> Array:
    if fn.support is constraints.simplex:  # NumPyro's own check asks for 1e-6, more than float32 data can keep
        fine = jnp.all(value >= 0, axis=-1) & (jnp.abs(jnp.sum(value, axis=-1) - 1) < 1e-3)
    else:
        fine = fn.support(value)
    masked = user_mask(fn)
    return fine if masked is None else fine | ~masked


def _outside(split: SplitModel, silos: Silos, silo: str, name: str) -> str:
    """The message for the first impossible observation of a silo's site."""
    site = _trace_at_zero(split, silo_data(silos, silo, split.spec, split.partition.axes))[name]
    fn, value = site["fn"], np.asarray(site["value"])
    bad = np.argwhere(~np.asarray(_in_support(fn, site["value"])))
    row = tuple(int(i) for i in bad[0])
    where = f" (row {', '.join(map(str, row))})" if row else ""
    more = f"; {len(bad)} such values" if len(bad) > 1 else ""
    got = np.array2string(value[row] if row else value, separator=", ")
    return (
        f"silo {silo!r}, site {name!r}: observed value {got}{where} is outside the support of {label(fn)} "
        f"({_described(fn.support, row)}){more}. Recode these observations, or choose a distribution that allows them."
    )


def _described(support: Any, row: tuple[int, ...]) -> str:
    """A support in words; bounds that differ between rows are those of ``row``."""
    while isinstance(support, constraints.independent):
        support = support.base_constraint

    def bound(value: Any) -> str:
        array = np.asarray(value)
        return str(array[row[-array.ndim :]] if array.ndim else array)

    kind = type(support).__name__
    words = {
        "_Boolean": "0 or 1",
        "_IntegerNonnegative": "0, 1, 2, ...",
        "_IntegerPositive": "1, 2, 3, ...",
        "_Positive": "numbers above 0",
        "_SoftplusPositive": "numbers above 0",
        "_Nonnegative": "numbers from 0",
        "_Real": "finite numbers",
        "_Simplex": "numbers from 0 that add up to 1",
    }
    if kind in words:
        return words[kind]
    low, high = getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)
    what = "integers" if support.is_discrete else "numbers"
    if low is not None and high is not None:
        return f"{what} from {bound(low)} to {bound(high)}"
    if low is not None:
        return f"{what} {'above' if kind == '_GreaterThan' else 'from'} {bound(low)}"
    return str(support)
