"""Observations outside of their distribution's support, found before anything is run."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import constraints

from numpyro_fed.data.padding import SiloData, silo_data
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.stack import stack_of
from numpyro_fed.model.layout import user_mask
from numpyro_fed.model.observations import counted
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import PartitionError, label
from numpyro_fed.precision import compiled_once

Array = jax.Array


def supported(split: SplitModel, trace: dict[str, dict]) -> dict[str, Array]:
    """Of a silo's traced sites: which observe possible values only. Masked observations may have any value.

    Sites whose support depends on a latent are left to inference.
    """
    return {name: jnp.all(_in_support(trace[name])) for name in split.partition.static_support}


def _in_support(site: dict) -> Array:
    fn, value = site["fn"], site["value"]
    if fn.support is constraints.simplex:  # NumPyro's own check asks for 1e-6, more than float32 data can keep
        fine = jnp.all(value >= 0, axis=-1) & (jnp.abs(jnp.sum(value, axis=-1) - 1) < 1e-3)
    else:
        fine = fn.support(value)
    return fine if user_mask(fn) is None else fine | ~counted(site)


def check_support(split: SplitModel, silos: Silos) -> None:
    """Raise when an observation is impossible: a 3 where a Bernoulli needs 0 or 1. NumPyro itself computes on."""
    if not split.partition.static_support:
        return
    stack = stack_of(silos, silos, split.spec, split.partition.axes)
    inside = lambda args, mask: supported(split, split.trace_at_zero(SiloData(args, mask, split.shared)))
    for bucket, arrays in zip(stack.buckets, stack.arrays, strict=True):
        for name, fine in compiled_once(jax.vmap(inside), *arrays).items():
            if not np.all(np.asarray(fine)):
                raise PartitionError(outside(split, silos, bucket.names[int(np.argmin(np.asarray(fine)))], name))


def outside(split: SplitModel, silos: Silos, silo: str, name: str) -> str:
    """The message for the first impossible observation of a silo's site."""
    site = split.trace_at_zero(silo_data(silos, silo, split.spec, split.partition.axes))[name]
    fn, value = site["fn"], np.asarray(site["value"])
    bad = np.argwhere(~np.asarray(_in_support(site)))
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
