r"""Amortized guides: an encoder reads a row's data and gives its q.

.. math:: q(z_i \mid y_i, z_G) = N(m_\phi(y_i), \mathrm{diag}\, s_\phi(y_i)^2)

The encoder's weights :math:`\phi` are variational parameters that all silos share: the server sends them and learns
them from the silos' gradients. No row has parameters of its own, so a unit that nobody has seen needs no fitting
(Kingma and Welling 2014; named as an extension in section 5 of the SFVI paper).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.data.padding import SiloData
from numpyro_fed.guides.auto import AutoGlobals, check_factory
from numpyro_fed.guides.normal import GlobalNormal, check_global
from numpyro_fed.local.conditional import Conditional
from numpyro_fed.model.layout import Group
from numpyro_fed.model.provenance import provenance
from numpyro_fed.model.split_model import SplitModel

Array = jax.Array
LOG_SCALE_RANGE = 5.0  # log-scales saturate here: a network that has not learned yet may say anything


class Encoder(NamedTuple):
    """Pure functions: ``init(key, x) -> weights``, ``apply(weights, x) -> output`` for one row x."""

    init: Callable[[Array, Array], Any]
    apply: Callable[[Any, Array], Array]


def as_encoder(encoder: Any) -> Encoder:
    """An encoder from a flax nnx module, an object with ``init`` and ``apply``, or a pair of these functions."""
    if isinstance(encoder, type):
        raise TypeError(
            f"encoder is the class {encoder.__name__}: make it, as in {encoder.__name__}(..., rngs=nnx.Rngs(0)) for a "
            "flax nnx module"
        )
    if isinstance(encoder, tuple) and len(encoder) == 2 and all(map(callable, encoder)):
        return Encoder(_any_init(encoder[0]), encoder[1])
    if callable(getattr(encoder, "init", None)) and callable(getattr(encoder, "apply", None)):
        return Encoder(encoder.init, encoder.apply)
    if any(cls.__module__.startswith("flax.nnx") for cls in type(encoder).__mro__):
        return _from_nnx(encoder)
    raise TypeError(
        "encoder must be a flax nnx module (nnx.Linear(5, 2, rngs=nnx.Rngs(0))) or a pair of functions (init(key, x), "
        f"apply(weights, x)), got a {type(encoder).__name__}"
    )


def _any_init(init: Callable) -> Callable:
    """``init(key, x)``, or as jax.example_libraries.stax has it ``init(key, shape) -> (shape, weights)``."""

    def start(key: Array, x: Array) -> Any:
        try:
            return init(key, x)
        except (TypeError, ValueError, IndexError):
            return init(key, x.shape)[1]

    return start


def _from_nnx(module: Any) -> Encoder:
    from flax import nnx

    graph, *states = nnx.split(module, nnx.Param, ...)
    params, rest = states
    is_variable = lambda value: isinstance(value, nnx.Variable)
    others = sorted({type(leaf).__name__ for leaf in jax.tree.leaves(rest, is_leaf=is_variable)})
    if others:
        raise TypeError(
            f"the encoder has state besides its weights ({', '.join(others)}), as BatchNorm and Dropout do: it would "
            "change with the data of one silo. Use layers without state (nnx.LayerNorm)."
        )
    start = nnx.to_pure_dict(params)

    def apply(weights: Any, x: Array) -> Array:
        state = jax.tree.map(lambda leaf: leaf, params)
        nnx.replace_by_pure_dict(state, weights)
        return nnx.merge(graph, state, rest)(x)

    return Encoder(lambda key, x: jax.tree.map(jnp.asarray, start), apply)


@dataclass(frozen=True, repr=False)
class Amortized(GlobalNormal):
    """A normal over the globals, and an encoder that gives each local row's q from the row's own data.

    Args:
        encoder: a flax nnx module, or a pair ``(init(key, x), apply(weights, x))``. It gets one row's data as a vector
            and returns 2k numbers, the means and log-scales of the row's k local latents (unconstrained).
        inputs: names of the arguments that make up a row's vector (one after another, flattened), or a function of the
            dict of a row's arguments that gives it. By default all arguments that have a row for each unit, in
            alphabetical order.
        use_globals: z_G is appended to the encoder's input.
        global_cov, rank, global_guide: as in :class:`~numpyro_fed.guides.StructuredNormal`.

    With this guide ``fit.predict(key, data)`` and ``fit.sample_local(key, data=data)`` read the latents of new units
    off their data.

    Example:
        >>> from flax import nnx
        >>> Amortized(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), inputs=["y"])
        Amortized(Linear, inputs=('y',), global_cov='full')
    """

    encoder: Any
    inputs: Any = None
    use_globals: bool = False
    global_cov: str = "full"
    rank: int | None = None
    global_guide: Any = None

    local_cov = "diagonal"
    needs_data = True
    arbitrary = False
    can_start = True
    local_params = False
    shared_params = ("encoder",)

    def __post_init__(self) -> None:
        check_global(self.global_cov, self.rank)
        check_factory(self.global_guide)
        object.__setattr__(self, "functions", as_encoder(self.encoder))
        if self.inputs is not None and not callable(self.inputs):
            names = (self.inputs,) if isinstance(self.inputs, str) else tuple(self.inputs)
            object.__setattr__(self, "inputs", names)

    def __repr__(self) -> str:
        kind = type(self.encoder).__name__
        inputs = getattr(self.inputs, "__name__", self.inputs)
        shown = {
            "inputs": inputs,
            "use_globals": self.use_globals,
            "rank": self.rank,
            "global_guide": self.global_guide,
        }
        told = [f"{name}={value!r}" for name, value in shown.items() if value]
        return f"Amortized({', '.join([kind, *told, f'global_cov={self.global_cov!r}'])})"

    def __hash__(self) -> int:
        return hash((id(self.encoder), self.inputs, self.use_globals, self.global_cov, self.rank, self.global_guide))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Amortized) and self.encoder is other.encoder and hash(self) == hash(other)

    def bind(self, split: SplitModel) -> Any:
        """The guide for one model."""
        if split.groups:
            self._check(split)
        bound = _Bound(**{name: getattr(self, name) for name in self.__dataclass_fields__})
        object.__setattr__(bound, "split", split)
        object.__setattr__(bound, "family", self)
        return bound if self.global_guide is None else AutoGlobals(bound, split)

    def _check(self, split: SplitModel) -> None:
        if len(split.groups) > 1 or len(split.groups[0].axes) != 1:
            where = ", ".join(g.name for g in split.groups)
            raise ValueError(
                f"Amortized encodes the rows of one silo plate; this model has local latents along {where}. Use "
                "nf.guides.StructuredNormal(), or marginalise some of them."
            )
        given, group = self._arguments(split), split.groups[0]
        if not given:
            raise ValueError(
                f"Amortized: local latents lie along {group.name!r}, and no argument has a row for each of them, so "
                "there is nothing to encode. Use nf.guides.StructuredNormal()."
            )
        if self.inputs is not None and not callable(self.inputs):
            wrong = [name for name in self.inputs if name not in given]
            if wrong:
                raise ValueError(
                    f"Amortized: inputs= names {wrong[0]!r}, but the arguments with a row for each of {group.name!r} "
                    f"are {', '.join(given)}"
                )
        row = jnp.zeros(self._row_size(split))
        try:
            weights = jax.eval_shape(self.functions.init, jax.random.key(0), row)  # type: ignore[attr-defined]
            shape = jax.eval_shape(self.functions.apply, weights, row).shape  # type: ignore[attr-defined]
        except Exception as error:
            raise ValueError(
                f"Amortized: the encoder cannot read a row of {row.size} numbers ({', '.join(given)}"
                f"{' and z_G' if self.use_globals else ''}): {str(error).strip().splitlines()[0]}"
            ) from error
        if shape != (2 * group.size,):
            raise ValueError(
                f"Amortized: the encoder gives an output of shape {shape} where ({2 * group.size},) is needed: a mean "
                f"and a log-scale for each of the {group.size} local latents of a row "
                f"({', '.join(site.name for site in group.sites)})"
            )

    def _arguments(self, split: SplitModel) -> list[str]:
        axis = split.groups[0].axes[0][0]
        return [leaf.path for leaf in split.spec.own if leaf.dtype is not None and leaf.axis == axis]

    def argument_names(self, split: SplitModel) -> tuple[str, ...]:
        """Paths of the arguments that the encoder may read."""
        found = self._arguments(split)
        if self.inputs is None or not callable(self.inputs):
            return tuple(self.inputs or found)
        rows = {
            leaf.path: jnp.zeros((leaf.shape or ())[1:], leaf.dtype) for leaf in split.spec.own if leaf.path in found
        }
        used = provenance(lambda **row: {"x": self.inputs(row)}, rows)["x"]
        return tuple(name for name in found if name in used)

    def _row_size(self, split: SplitModel) -> int:
        data = split.dummy()
        return int(jax.eval_shape(lambda: self.features(split, split.groups[0], data)).shape[1]) + (
            split.dim if self.use_globals else 0
        )

    def features(self, split: SplitModel, group: Group, data: SiloData) -> Array:
        """The encoder's input, (rows, size)."""
        axis, rows = group.axes[0][0], group.num_rows(data.mask)
        arrays = [leaf for leaf in split.spec.own if leaf.dtype is not None]
        found = {leaf.path: a for leaf, a in zip(arrays, data.args, strict=True) if leaf.axis == axis}
        by_row = {name: array.reshape(rows, -1, *array.shape[1:]) for name, array in found.items()}
        by_row = {name: a[:, 0] if a.shape[1] == 1 else a for name, a in by_row.items()}
        if callable(self.inputs):
            return jax.vmap(lambda row: jnp.ravel(self.inputs(row)))(by_row)
        names = self.inputs or tuple(by_row)
        return jnp.concatenate([by_row[name].reshape(rows, -1).astype(jnp.zeros(()).dtype) for name in names], axis=1)


class _Bound(Amortized):
    """An amortised guide with its model."""

    split: SplitModel
    family: Amortized

    def init_context(self, key: Array, split: SplitModel) -> dict[str, Any]:
        """The encoder's weights at the start."""
        if not split.groups:
            return {"encoder": {}}
        row = jnp.zeros(self._row_size(split))
        return {"encoder": self.functions.init(jax.random.fold_in(key, 1), row)}  # type: ignore[attr-defined]

    def start_global(self, key: Array, split: SplitModel, found: Any = None) -> tuple[dict[str, Any], Any]:
        params, base = super().start_global(key, split, found)
        return {**params, **self.init_context(key, split)}, base

    def context(self, params: dict[str, Any], base: Any) -> Any:
        return params["encoder"]

    frozen_context = context

    def start_local(self, key: Array, split: SplitModel, data: SiloData) -> tuple[dict, tuple]:
        return {}, ()

    def condition(self, params: dict, base: Any, z: Array, context: Any, data: SiloData) -> Conditional:
        """q(z_L | z_G = z), from the data."""
        group = self.split.groups[0]
        x = self.features(self.split, group, data)
        if self.use_globals:
            x = jnp.concatenate([x, jnp.broadcast_to(z, (x.shape[0], z.shape[0]))], axis=1)
        out = jax.vmap(lambda row: self.functions.apply(context, row))(x)  # type: ignore[attr-defined]
        loc, log_scale = out[:, : group.size], out[:, group.size :]
        log_scale = LOG_SCALE_RANGE * jnp.tanh(log_scale / LOG_SCALE_RANGE)
        return Conditional({group.name: loc}, {group.name: log_scale}, {})

    def take_rows(self, base: Any, take: Any) -> Any:
        return base

    def recentred(self, params: dict, base: Any, old: Any, new: Any) -> tuple[dict, Any]:
        return params, base

    def adopt_local(self, split: SplitModel, params: dict, base: Any, mode: Any, found: Any) -> tuple:
        return params, base

    def summary_local(self, params: dict, base: Any, z: Array, context: Any) -> tuple[dict, dict, dict]:
        raise NotImplementedError("an encoder needs data")

    def init_local(self, *args: Any) -> tuple[dict, tuple]:
        return {}, ()
