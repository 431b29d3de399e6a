r"""A network's layers, read off a split model: where its weights lie, their prior, and that they are what users say.

The certificate. With :math:`c` the gradient of a row's log density by the network's outputs, back-propagation through
the layers gives the gradient by every weight. Whatever the likelihood is, :math:`c` can be read off the last layer's:
so the model's own gradients, at random weights and rows, must be those of the layers' forward pass.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.data.padding import SiloData
from numpyro_fed.gi import Activation, Layer
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.normal.families import as_family
from numpyro_fed.normal.prior import normal_prior
from numpyro_fed.pieces import jit

Array = jax.Array
POINTS = 6  # random weights and rows at which the certificate looks
WIDE = 3.0  # every other one with weights so many times as wide as the prior
CLOSE = 1e-6  # of float64 gradients through a network, relative


class Filling(NamedTuple):
    """Made-up values of the model's other arguments: outcomes, exposures, sizes. One that has a density will do."""

    floats: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
    ints: int


FILLINGS = tuple(
    Filling(floats, ints)
    for ints in (0, 1)
    for floats in (
        lambda draws, shape: draws.normal(size=shape),
        lambda draws, shape: 0.1 + np.abs(draws.normal(size=shape)),
        lambda draws, shape: draws.uniform(0.1, 0.9, size=shape),
    )
)


class Dense(NamedTuple):
    """A layer; its weights are one matrix, the bias its last row."""

    kernel: str
    bias: str | None
    activation: Activation
    mean: np.ndarray  # (D, units): the prior's
    sd: np.ndarray  # (D, units)

    @property
    def units(self) -> int:
        return int(self.mean.shape[1])

    @property
    def alike(self) -> bool:
        """Whether all units have one prior."""
        return bool(np.allclose(self.sd, self.sd[:, :1], rtol=1e-9))

    def inputs(self, x: Array) -> Array:
        """Rows as the weights meet them, (..., D)."""
        return x if self.bias is None else jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)

    def after(self, x: Array, weights: Array) -> Array:
        """What the next layer gets of the rows x."""
        return self.activation(self.before(x, weights))

    def before(self, x: Array, weights: Array) -> Array:
        """Its outputs, before the activation."""
        if self.bias is None:
            return x @ weights
        return x @ weights[:-1] + weights[-1]


class Network(NamedTuple):
    """All layers, and the argument that the first reads."""

    layers: tuple[Dense, ...]
    inputs: str  # path of an argument
    place: int  # of it among a silo's arrays
    axis: str  # that its rows lie along

    def rows(self, data: SiloData) -> Array:
        """The silo's inputs, (rows, D_0); padded rows too."""
        x = data.args[self.place]
        return x if x.ndim == 2 else x[:, None]

    def sites(self, weights: tuple[Array, ...]) -> dict[str, Array]:
        """Weights as values of the model's sample sites."""
        found = {}
        for layer, weight in zip(self.layers, weights, strict=True):
            found[layer.kernel] = weight if layer.bias is None else weight[:-1]
            if layer.bias is not None:
                found[layer.bias] = weight[-1]
        return found

    def weights(self, sites: dict[str, Array]) -> tuple[Array, ...]:
        """The inverse."""
        return tuple(_weight(sites, layer.kernel, layer.bias) for layer in self.layers)

    def from_standard(self, noise: tuple[Array, ...]) -> tuple[Array, ...]:
        """Weights from numbers that are standard normal under the prior."""
        each = zip(self.layers, noise, strict=True)
        return tuple(jnp.asarray(one.mean, eps.dtype) + jnp.asarray(one.sd, eps.dtype) * eps for one, eps in each)

    def to_standard(self, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """The inverse."""
        each = zip(self.layers, weights, strict=True)
        return tuple((w - jnp.asarray(one.mean, w.dtype)) / jnp.asarray(one.sd, w.dtype) for one, w in each)

    def outputs(self, x: Array, weights: tuple[Array, ...]) -> tuple[Array, ...]:
        """Every layer's outputs at the rows x, before the activation."""
        found = []
        for layer, weight in zip(self.layers, weights, strict=True):
            found.append(layer.before(x, weight))
            x = layer.activation(found[-1])
        return tuple(found)


def _weight(sites: dict[str, Array], kernel: str, bias: str | None) -> Array:
    return sites[kernel] if bias is None else jnp.concatenate([sites[kernel], sites[bias][None]])


def read_network(split: SplitModel, layers: tuple[Layer, ...], inputs: str | None) -> Network:
    """The layers over this model, or an error that says what does not fit."""
    _check_sites(split, layers)
    mean, sd = _prior(split)
    dense = tuple(
        Dense(
            layer.kernel,
            layer.bias,
            layer.function,
            np.asarray(_weight(mean, layer.kernel, layer.bias)),
            np.asarray(_weight(sd, layer.kernel, layer.bias)),
        )
        for layer in layers
    )
    tried = [Network(dense, path, place, axis) for path, place, axis in _candidates(split, dense[0], inputs)]
    doubts = []
    for network in tried:
        doubt = _uncertified(split, network)
        if doubt is None:
            return network
        doubts.append(f"with {network.inputs!r} as inputs, {doubt}")
    raise PartitionError(
        f"the layers' forward pass is not that of the model: {'; '.join(doubts)}. List all dense layers in order, each "
        'with the activation that follows it, layers=[("W1", "b1", "relu"), ("W2", "b2")], and name the argument that '
        "the first layer reads, inputs='x', as it is: scale it before, nf.prepare.standardize(silos, 'x'). "
        "nf.gi.mlp(widths) writes a model and its layers"
    )


def _check_sites(split: SplitModel, layers: tuple[Layer, ...]) -> None:
    if split.groups or split.enumeration.variables:
        raise PartitionError("nf.GIPVI is for networks: this model has local latents. Use nf.SFVI, nf.EP or nf.PVI")
    if split.theta:
        raise PartitionError(
            f"nf.GIPVI has no way to learn numpyro.param {', '.join(map(repr, split.theta))}: give it a value, or use "
            "nf.SFVI, which learns params"
        )
    shapes, named = split.global_shapes, [name for layer in layers for name in layer[:2] if name is not None]
    missing = [name for name in named if name not in shapes]
    if missing or len(set(named)) < len(named):
        what = f"no global sample site {missing[0]!r}" if missing else "a site in two layers"
        raise PartitionError(f"layers name {what}; the model's are {', '.join(map(repr, shapes))}")
    left = [name for name in shapes if name not in named]
    if left:
        raise PartitionError(
            f"nf.GIPVI approximates the weights of the layers, and {', '.join(map(repr, left))} "
            f"{'is' if len(left) == 1 else 'are'} in none: add the layer, give the site a value, or use "
            "nf.PVI(model, family='diagonal')"
        )
    width = None
    for layer in layers:
        shape = shapes[layer.kernel]
        expected = "(inputs, units)" if width is None else f"({width}, units)"
        if len(shape) != 2 or (width is not None and shape[0] != width):
            hint = f", {layer.kernel!r}: .expand([{shape[0]}, 1]).to_event(2)" if len(shape) == 1 else ""
            raise PartitionError(f"kernel {layer.kernel!r} has shape {shape}, where {expected} is needed{hint}")
        width = shape[1]
        if layer.bias is not None and shapes[layer.bias] != (width,):
            raise PartitionError(f"bias {layer.bias!r} has shape {shapes[layer.bias]}, where ({width},) is needed")


def _prior(split: SplitModel) -> tuple[dict[str, Array], dict[str, Array]]:
    """Mean and sd of every weight, float64."""
    prior = normal_prior(split, as_family("diagonal"))
    precision, shift = (np.asarray(leaf, np.float64) for leaf in prior.factor)
    if not prior.exact or not np.all(precision > 0):
        raise PartitionError(
            "nf.GIPVI needs weights that are normal and independent of one another under the prior, "
            "numpyro.sample('W1', dist.Normal(0, sd).expand([inputs, units]).to_event(2)), and this model's are not. "
            "Use nf.PVI(model, family='diagonal'), which takes any prior"
        )
    with jax.enable_x64(True):
        return split.unravel(jnp.asarray(shift / precision)), split.unravel(jnp.asarray(precision**-0.5))


def _candidates(split: SplitModel, first: Dense, inputs: str | None) -> list[tuple[str, int, str]]:
    """Arguments that the first layer may read: path, place, axis."""
    width = first.mean.shape[0] - (first.bias is not None)
    arrays = [leaf for leaf in split.spec.own if leaf.dtype is not None]
    found = []
    for place, leaf in enumerate(arrays):
        if inputs is not None and leaf.path != inputs:
            continue
        shape = leaf.shape or ()
        fits = shape[1:] == (width,) or (width == 1 and len(shape) == 1)
        if leaf.axis is not None and str(leaf.dtype).startswith("float") and fits:
            found.append((leaf.path, place, leaf.axis))
    if not found:
        which = f"inputs={inputs!r} is not one" if inputs is not None else "there is none"
        raise PartitionError(
            f"the first layer, {first.kernel!r}, reads an argument of floats with shape (rows, {width}) of the silos' "
            f"own, and {which}; their arguments are {', '.join(leaf.path for leaf in arrays)} (of ints: "
            "x.astype('float32'))"
        )
    return found


def _uncertified(split: SplitModel, network: Network) -> str | None:
    """Why the model's gradients are not those of the layers; None: they are."""
    try:
        return _differs(split, network)
    except TypeError:  # see normal_prior: a model with NumPy arrays of doubles
        with jax.disable_jit():
            return _differs(split, network)


def _differs(split: SplitModel, network: Network) -> str | None:
    draws = np.random.default_rng(0)
    with jax.enable_x64(True):  # no draws of the model are made here
        own = jit(jax.grad(lambda z, data: split.log_silo(z, {}, split.theta, data)))
        doubt = "the log density does not depend on the weights, or is not finite, at made-up data"
        for filling in FILLINGS:
            seen = 0
            for point in range(POINTS):
                data = _random_row(split, network, draws, filling)
                weights = _random_weights(network, draws, WIDE if point % 2 else 1.0)
                gradient = network.weights(split.unravel(own(split.ravel(network.sites(weights)), data)))
                x = network.rows(data)[:1]
                carried = network.layers[-1].inputs(_hidden(network, x, weights))[0]
                size = max(float(jnp.max(jnp.abs(one))) for one in gradient)
                if not np.isfinite(size) or size == 0 or not float(carried @ carried):
                    continue
                seen += 1
                towards = carried @ gradient[-1] / (carried @ carried)
                expected = _pulled_back(network, x, towards)(weights)
                for layer, got, needed in zip(network.layers, gradient, expected, strict=True):
                    if not float(jnp.max(jnp.abs(got - needed))) <= CLOSE * size:
                        return f"the log density depends on {layer.kernel!r} in another way"
            if seen >= POINTS // 2:
                return None
        return doubt


def _hidden(network: Network, x: Array, weights: tuple[Array, ...]) -> Array:
    for layer, weight in zip(network.layers[:-1], weights[:-1], strict=True):
        x = layer.after(x, weight)
    return x


def _pulled_back(network: Network, x: Array, towards: Array) -> Callable[[Any], Any]:
    last = network.layers[-1]
    return jax.grad(lambda weights: last.before(_hidden(network, x, weights), weights[-1])[0] @ towards)


def _random_weights(network: Network, draws: np.random.Generator, wide: float) -> tuple[Array, ...]:
    return tuple(jnp.asarray(one.mean + wide * one.sd * draws.normal(size=one.mean.shape)) for one in network.layers)


def _random_row(split: SplitModel, network: Network, draws: np.random.Generator, filling: Filling) -> SiloData:
    """Data of no silo: normals for the inputs, the filling for the rest; the first row alone counts."""
    data = split.dummy()

    def made(place: int, leaf: Array) -> Array:
        if place == network.place:
            return jnp.asarray(draws.normal(size=leaf.shape))
        if leaf.dtype.kind == "f":
            return jnp.asarray(filling.floats(draws, leaf.shape))
        return jnp.ones_like(leaf) if leaf.dtype.kind == "b" else jnp.full_like(leaf, filling.ints)

    only = {**data.mask, network.axis: jnp.arange(data.mask[network.axis].shape[0]) == 0}
    return data._replace(args=tuple(made(place, leaf) for place, leaf in enumerate(data.args)), mask=only)
