"""From a model and its silos to a split model."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to, constraints

from numpyro_fed.data.padding import CallSpec, SiloData, call_spec, shared_arrays
from numpyro_fed.data.silos import Silos
from numpyro_fed.host import put, real_dtype
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model import enumeration
from numpyro_fed.model.certificate import certify
from numpyro_fed.model.enumeration import Enumeration
from numpyro_fed.model.layout import Group, LocalSite
from numpyro_fed.model.partition import partition
from numpyro_fed.model.partition_table import Partition
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.support import check_support
from numpyro_fed.model.trace import Model, PartitionError, init_to_zero, traced
from numpyro_fed.threads import unvalidated

Array = jax.Array


def split_model(model: Model, silos: Silos, local: Any = None, shared: Any = None, check: bool = True) -> SplitModel:
    """Split ``model`` over ``silos``; raises when the split would not be exact."""
    split = uncertified(model, silos, local, shared)
    if not check:
        return split
    split, failed = certified(split, silos)
    check_support(split, silos)
    if failed is not None:
        raise failed
    return split


def uncertified(model: Model, silos: Silos, local: Any, shared: Any) -> SplitModel:
    """The split, from shapes and shared arguments alone."""
    part = partition(model, silos, local, shared)
    return from_spec(model, part, call_spec(silos, part.axes), shared_arrays(silos))


def certified(
    split: SplitModel, silos: Silos, meanwhile: Callable[[], object] = lambda: None
) -> tuple[SplitModel, PartitionError | None]:
    """The split, and what its certificate says where it does not hold: impossible observations may be to blame.

    Silos of equal size are padded for speed alone: where rows mix, they need not be. ``meanwhile`` is done while the
    certificate's programs are compiled.
    """
    failed = certify(split, silos, meanwhile=meanwhile)
    if failed is None or not _equal(split):
        return split, failed
    plain = unpadded(split)
    return plain, certify(plain, silos)


def _equal(split: SplitModel) -> set[str]:
    """Axes that are as long in every silo, and padded for speed alone."""
    return {axis.name for axis in split.partition.axes if axis.free and len(set(axis.lengths.values())) == 1}


def unpadded(split: SplitModel) -> SplitModel:
    """The same split where silos of equal size are not padded."""
    part, equal = split.partition, _equal(split)
    axes = tuple(axis._replace(free=axis.free and axis.name not in equal) for axis in part.axes)
    make = lambda: split._replace(partition=replace(part, axes=axes))
    return remembered(make, "unpadded", ByIdentity(split))


def from_spec(model: Model, part: Partition, spec: CallSpec, shared: tuple[Array, ...]) -> SplitModel:
    """A split from what the server knows: shapes, shared arguments and the partition. Needs no data."""
    unconstrained = {s.name: tuple(s.shape.unconstrained or ()) for s in part.sites if s.role == "global"}
    params = {s.name for s in part.sites if s.role in ("param", "constant")}
    values: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    if params:
        with unvalidated():  # the dummy's zeros need not be valid data
            trace = traced(model, spec.kwargs(spec.dummy()._replace(shared=shared)), start=init_to_zero)
        for name in params:
            values[name] = trace[name]["value"]
            limits[name] = trace[name]["kwargs"].get("constraint", constraints.real)
    theta = {s.name: biject_to(limits[s.name]).inv(values[s.name]) for s in part.sites if s.role == "param"}
    # a Python number (numpyro.param("t", 0.0)) would turn float64 in an engine's program; flax's weights are float32
    # under x64, too, and would meet float64 gradients
    real = real_dtype()
    theta = jax.tree.map(lambda leaf: put(np.asarray(leaf, jnp.promote_types(jnp.result_type(leaf), real))), theta)
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
    shown = [site.name for site in split.partition.sites if site.role == "deterministic"]

    def at_zero() -> tuple[dict[str, Array], SiloData]:
        data = split.dummy()
        return split.unravel(jnp.zeros(split.dim)) | split.unpack(split.zeros_local(data.mask), data.mask), data

    def run(discrete: dict[str, Array]) -> dict[str, Array]:
        values, data = at_zero()
        return split._run(values, split.theta, data)(discrete)

    def computed(discrete: dict[str, Array]) -> dict[str, Array]:
        values, data = at_zero()
        trace = split._trace(values, split.theta, data, discrete)
        return {name: trace[name]["value"] for name in shown}

    return enumeration.plan(split.partition, run, computed)


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
