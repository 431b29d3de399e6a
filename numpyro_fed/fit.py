"""What comes back from a run."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from numpyro_fed.engines.base import Stack
from numpyro_fed.keys import check_key
from numpyro_fed.padding import SiloData, silo_data
from numpyro_fed.silos import Silos
from numpyro_fed.split_model import SplitModel

Array = Any


class State(NamedTuple):
    """Everything a run can go on from. The silos' part is private to them; it is in here because they are simulated here."""

    method: str
    names: tuple[str, ...]
    buckets: tuple[tuple[str, ...], ...]
    server: Any
    silos: tuple  # over buckets, stacked over the bucket's silos
    round: int

    def silo(self, name: str) -> tuple[Any, int]:
        """One silo's state, and its bucket."""
        for b, bucket in enumerate(self.buckets):
            if name in bucket:
                return jax.tree.map(lambda leaf: leaf[bucket.index(name)], self.silos[b]), b
        raise KeyError(f"no silo is named {name!r}; the silos are {', '.join(map(repr, self.names))}")

    def arranged(self, stack: Stack) -> tuple:
        """The silos' states in another stack's buckets and order."""
        out = []
        for bucket in stack.buckets:
            found = [self.silo(name)[0] for name in bucket.names]
            out.append(jax.tree.map(lambda *leaves: jnp.stack(leaves), *found))
        return tuple(out)


@dataclass(frozen=True)
class Fit:
    """A fitted model: draws, summaries, predictions. See the methods."""

    method: Any
    split: SplitModel
    state: State
    history: dict[str, np.ndarray]  # one row a round, those of the start included
    seconds: float  # wall time of the run, compilation included
    padded: tuple[dict[str, int], ...]  # each bucket's padded axis lengths
    silos: Silos | None = None  # None after nf.load

    @property
    def num_rounds(self) -> int:
        """Rounds of communication, the start's included."""
        return len(next(iter(self.history.values()))) if self.history else self.state.round

    @property
    def params(self) -> dict[str, np.ndarray]:
        """theta: the model's numpyro.param values, constrained."""
        return jax.tree.map(np.asarray, self.split.constrain_theta(self.method.theta(self.state.server)))

    # --- draws ------------------------------------------------------------------------------------------------------------

    def sample(self, rng_key: Any, num_samples: int = 1000) -> dict[str, Array]:
        """Draws of the global sites, and of deterministic sites that depend on them alone, constrained."""
        keys = jax.random.split(check_key(rng_key), _count(num_samples))
        return self._global_draws(keys, self.state.server)

    @cached_property
    def _global_draws(self) -> Any:
        method, split = self.method, self.split

        def one(key: Array, server: Any) -> dict[str, Array]:
            return split.constrain_global(method.sample_global(split, server, key), method.theta(server))

        return jax.jit(jax.vmap(one, in_axes=(0, None)))

    def sample_local(self, rng_key: Any, num_samples: int = 1000, *, silo: str) -> dict[str, Array]:
        """Joint draws of the global sites and of one silo's local sites (with deterministics), unpadded.

        With the same key, the global draws are those of :meth:`sample`.
        """
        data = self._data(silo)
        state, _ = self.state.silo(silo)
        keys = jax.random.split(check_key(rng_key), _count(num_samples))
        draws = self._local_draws(keys, self.state.server, state, data)
        return {**draws[0], **self._unpad(draws[1], silo, data)}

    @cached_property
    def _local_draws(self) -> Any:
        return jax.jit(jax.vmap(self._one_local, in_axes=(0, None, None, None)))

    def _one_local(self, key: Array, server: Any, state: Any, data: SiloData) -> tuple[dict, dict]:
        method, split = self.method, self.split
        z = method.sample_global(split, server, key)
        z_local = method.sample_local(split, server, state, jax.random.fold_in(key, 1), z, data.mask)
        theta = method.theta(server)
        return split.constrain_global(z, theta), split.constrain_local(z, z_local, theta, data)

    def _data(self, silo: str) -> SiloData:
        """The silo's data, padded as in the run; without data (after nf.load) only shapes, which is enough for latents."""
        _, b = self.state.silo(silo)
        if self.silos is not None:
            return silo_data(self.silos, silo, self.split.spec, self.split.partition.axes, self.padded[b])
        lengths = self.padded[b]
        dummy = self.split.spec._replace(example=lengths).dummy()
        own = {axis.name: axis.lengths[silo] for axis in self.split.partition.axes}
        mask = {axis: jnp.arange(n) < own[axis] for axis, n in lengths.items()}
        return SiloData(dummy.args, mask, self.split.shared)

    def _unpad(self, values: dict[str, Array], silo: str, data: SiloData) -> dict[str, Array]:
        lengths = {axis.name: axis.lengths[silo] for axis in self.split.partition.axes}
        return self.split.unpadded(values, lengths, {axis: mask.shape[-1] for axis, mask in data.mask.items()})

    # --- what it says -----------------------------------------------------------------------------------------------------

    def summary(self, rng_key: Any = None, num_samples: int = 4000, hdi_prob: float = 0.9) -> pd.DataFrame:
        """Mean, sd, median and a highest-density interval of every global scalar, with theta below."""
        from numpyro.diagnostics import hpdi

        draws = self.sample(jax.random.key(0) if rng_key is None else rng_key, num_samples)
        low, high = f"hdi_{50 * (1 - hdi_prob):g}%", f"hdi_{100 - 50 * (1 - hdi_prob):g}%"
        rows = {}
        for name, label, column in scalars(draws):
            interval = hpdi(column, hdi_prob)
            rows[label] = {
                "role": "global" if name in self.split.partition.global_sites else "deterministic",
                "mean": column.mean(),
                "sd": column.std(ddof=1),
                "median": np.median(column),
                low: interval[0],
                high: interval[1],
            }
        for _, label, column in scalars({name: np.asarray(value)[None] for name, value in self.params.items()}):
            rows[label] = {"role": "param", "mean": float(column[0]), "sd": np.nan, "median": np.nan, low: np.nan, high: np.nan}
        return pd.DataFrame.from_dict(rows, orient="index")

    def __repr__(self) -> str:
        name = type(self.method).__name__
        sent = sum(int(np.sum(self.history[k])) for k in ("bytes_up", "bytes_down") if k in self.history)
        loss = f", loss {np.mean(self.history['loss'][-100:]):.4g}" if "loss" in self.history else ""
        return (
            f"Fit by {name}: {len(self.state.names)} silos, {self.num_rounds} rounds, {_bytes(sent)} sent, "
            f"{self.seconds:.1f} s{loss}\nglobal sites: {', '.join(self.split.partition.global_sites)}"
            + (f"\nlocal sites: {', '.join(self.split.partition.local_sites)}" if self.split.partition.local_sites else "")
        )


def scalars(draws: dict[str, Array]) -> list[tuple[str, str, np.ndarray]]:
    """Every scalar among named draws: (site, label such as ``beta[0]``, draws)."""
    out = []
    for name, value in draws.items():
        value = np.asarray(value)
        for index in np.ndindex(*value.shape[1:]):
            label = name if index == () else f"{name}[{', '.join(map(str, index))}]"
            out.append((name, label, value[(slice(None), *index)]))
    return out


def _bytes(size: int) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000  # type: ignore[assignment]
    raise AssertionError


def _count(num_samples: Any) -> int:
    if isinstance(num_samples, bool) or not isinstance(num_samples, int | np.integer) or num_samples < 1:
        raise ValueError(f"num_samples must be an int of at least 1, got {num_samples!r}")
    return int(num_samples)


