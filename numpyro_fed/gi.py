r"""Bayesian networks as :class:`~numpyro_fed.GIPVI` reads them: a list of layers over an ordinary NumPyro model.

A :class:`Layer` names the sample sites of one dense layer,

.. math:: F_\ell = \phi_{\ell-1}(F_{\ell-1})\, W_\ell + b_\ell, \qquad F_0 = x

and the activation that follows it. :func:`mlp` writes the model and its layers in one call:

>>> import jax, numpyro_fed as nf
>>> model, layers = nf.gi.mlp([1, 20, 20, 1], likelihood="normal", scale=0.1)
>>> [layer.kernel for layer in layers]
['W1', 'W2', 'W3']
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

from numpyro_fed.checks import check_count, is_number

Array = jax.Array
Activation = Callable[[Array], Array]
ACTIVATIONS: dict[str, Activation] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "gelu": jax.nn.gelu,
    "softplus": jax.nn.softplus,
    "linear": lambda x: x,
}
LIKELIHOODS = ("bernoulli", "categorical", "normal")


class Layer(NamedTuple):
    """One dense layer: the names of its sample sites, and the activation after it."""

    kernel: str  # a site of shape (inputs, units)
    bias: str | None = None  # a site of shape (units,)
    activation: str | Activation = "linear"

    @property
    def function(self) -> Activation:
        """The activation itself."""
        return self.activation if callable(self.activation) else ACTIVATIONS[self.activation]


def as_layers(layers: Any) -> tuple[Layer, ...]:
    """Layers from what a user gave: tuples ``(kernel, bias, activation)``, the last two may be left out.

    >>> as_layers([("W1", "b1", "relu"), ("W2",)])[1]
    Layer(kernel='W2', bias=None, activation='linear')
    """
    hint = 'pass layers=[("W1", "b1", "relu"), ("W2", "b2")], names of sample sites and an activation each'
    if isinstance(layers, str) or not isinstance(layers, Sequence) or not layers:
        raise TypeError(f"layers is a list of the network's layers, got {layers!r}: {hint}")
    found = []
    for layer in layers:
        parts = (layer,) if isinstance(layer, str) else layer
        if not isinstance(parts, tuple | list) or not 1 <= len(parts) <= 3 or not isinstance(parts[0], str):
            raise TypeError(f"a layer is (kernel, bias, activation), got {layer!r}: {hint}")
        one = Layer(*parts)
        if one.bias is not None and not isinstance(one.bias, str):
            raise TypeError(f"a layer's bias is the name of a sample site or None, got {one.bias!r}: {hint}")
        if not callable(one.activation) and one.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation is one of {', '.join(map(repr, ACTIVATIONS))} or a function of arrays, got "
                f"{one.activation!r}"
            )
        found.append(one)
    return tuple(found)


def mlp(
    widths: Sequence[int], likelihood: str = "bernoulli", *, activation: str | Activation = "relu", scale: float = 1.0
) -> tuple[Callable[..., Any], tuple[Layer, ...]]:
    r"""A fully connected network, ``model(x, y=None)``, and its layers.

    Weights and biases have Neal's prior, normal with variance one over the number of a layer's inputs.

    Args:
        widths: numbers of inputs, of each hidden layer's units, and of outputs: ``[108, 50, 50, 1]``.
        likelihood: of ``y`` given the outputs: ``"bernoulli"`` (one output, the logit), ``"categorical"`` (logits of
            as many classes as there are outputs) or ``"normal"`` (the mean; ``y`` has shape (rows,) with one output).
        activation: of the hidden layers.
        scale: of the normal likelihood, its sd.

    Example:
        >>> model, layers = nf.gi.mlp([2, 3, 1])
        >>> [layer.activation for layer in layers]
        ['relu', 'linear']
    """
    if isinstance(widths, int) or len(widths) < 2:
        raise ValueError(f"widths are [inputs, hidden units ..., outputs], got {widths!r}: pass [108, 50, 50, 1]")
    sizes = tuple(check_count("widths", width) for width in widths)
    if likelihood not in LIKELIHOODS:
        raise ValueError(f"likelihood is one of {', '.join(map(repr, LIKELIHOODS))}, got {likelihood!r}")
    if likelihood == "bernoulli" and sizes[-1] != 1:
        raise ValueError(f"a Bernoulli likelihood has one output, its logit; got {sizes[-1]}: end widths with 1")
    if not is_number(scale) or not scale > 0:
        raise ValueError(f"scale must be a positive number, got {scale!r}")
    last = len(sizes) - 1
    layers = as_layers([(f"W{i}", f"b{i}", activation if i < last else "linear") for i in range(1, last + 1)])

    def model(x: Array, y: Array | None = None) -> None:
        outputs = x
        for layer, inputs, units in zip(layers, sizes[:-1], sizes[1:], strict=True):
            prior = dist.Normal(0.0, inputs**-0.5)
            kernel = numpyro.sample(layer.kernel, prior.expand([inputs, units]).to_event(2))
            bias = numpyro.sample(layer.bias, prior.expand([units]).to_event(1))
            outputs = layer.function(outputs @ kernel + bias)
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", _observed(likelihood, outputs, scale), obs=y)

    return model, layers


def _observed(likelihood: str, outputs: Array, scale: float) -> dist.Distribution:
    if likelihood == "categorical":
        return dist.Categorical(logits=outputs)
    one = outputs[:, 0] if outputs.shape[-1] == 1 else outputs
    if likelihood == "bernoulli":
        return dist.Bernoulli(logits=one)
    found = dist.Normal(one, scale)
    return found if outputs.shape[-1] == 1 else found.to_event(1)
