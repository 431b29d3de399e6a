r"""Weights of a network given pseudo-observations of every layer (Ober and Aitchison 2021).

A table of rows says of each layer what its outputs are at some inputs, and how precisely: inputs U, outputs
:math:`V_\ell`, precisions :math:`\Lambda_\ell`. Given the weights of the layers below, rows that reach layer
:math:`\ell` as X are observations of a linear model, so each unit's weights are normal:

.. math:: P = S^{-1} + X^\top \Lambda_\ell X, \qquad P m = S^{-1} m_0 + X^\top \Lambda_\ell V_\ell

with the prior :math:`N(m_0, S)`. Rows of several silos are rows of one table: a product of their factors is one after
another of them, and a row whose precision is zero says nothing.

All is done in coordinates in which the prior is standard normal, so that no precision is below one. Units that share
precisions and prior share P, and are one group; else every unit is a group of its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.normal.lapack import cholesky, solve_lower
from numpyro_fed.normal.network import Dense, Network

Array = jax.Array


class Rows(NamedTuple):
    """Pseudo-observations."""

    inputs: Array  # (M, D_0): U
    outputs: tuple[Array, ...]  # (M, units) of each layer: V
    precisions: tuple[Array, ...]  # (1, M), or (units, M) where units have their own: Lambda


class Told(NamedTuple):
    """What rows say of a layer's weights: natural parameters, the prior's left out."""

    precision: Array  # (groups, D, D)
    shift: Array  # (groups, D, units of a group)


class Weights(NamedTuple):
    """Normals of a layer's weights. The precision is I + told.precision."""

    told: Told
    root: Array  # (groups, D, D): A, lower triangular, with A' A the covariance
    mean: Array  # (groups, D, units of a group)

    def sample(self, layer: Dense, noise: Array) -> Array:
        """Weights (D, units) from standard normals of that shape."""
        groups, _, size = self.mean.shape
        grouped = noise.T.reshape(groups, size, -1)
        return _ungrouped(layer, self.mean + jnp.einsum("gij,gki->gjk", self.root, grouped))


@jax.custom_vjp
def inverse_root(precision: Array) -> Array:
    """A lower triangular, with A' A the inverse."""
    return solve_lower(cholesky(precision), jnp.eye(precision.shape[-1], dtype=precision.dtype))


def _forward(precision: Array) -> tuple[Array, Array]:
    root = inverse_root(precision)
    return root, root


def _backward(root: Array, towards: Array) -> tuple[Array]:
    r"""With P = L L' and A its inverse root, :math:`dA = -\Phi(A\, dP\, A^\top) A`; :math:`\Phi` halves the diagonal
    of the lower triangle."""
    lower = jnp.tril(towards @ root.T)
    pulled = root.T @ (lower - 0.5 * jnp.diag(jnp.diag(lower))) @ root
    return (-0.5 * (pulled + pulled.T),)


inverse_root.defvjp(_forward, _backward)


def told(layer: Dense, x: Array, outputs: Array, precisions: Array) -> Told:
    """What rows say that reach a layer as x, (M, inputs)."""
    x = layer.inputs(x)
    sd = jnp.asarray(layer.sd, x.dtype)
    off = (outputs - x @ jnp.asarray(layer.mean, x.dtype)).T  # (units, M)
    if layer.alike and precisions.shape[0] == 1:
        scaled, off = x * sd[:, 0], off[None]  # one group of all units
        weighted = precisions[0][:, None] * scaled
        return Told((weighted.T @ scaled)[None], jnp.einsum("md,gkm->gdk", weighted, off))
    weighted = jnp.broadcast_to(precisions, (layer.units, x.shape[0]))
    scale = sd.T  # (units, D)
    each = jnp.einsum("um,md,me->ude", weighted, x, x) * scale[:, :, None] * scale[:, None, :]
    return Told(each, ((weighted * off) @ x * scale)[:, :, None])


def together(a: Told, b: Told) -> Told:
    """What two tables say."""
    return Told(a.precision + b.precision, a.shift + b.shift)


def given(found: Told) -> Weights:
    """The weights' normals given what rows say."""
    root = jax.vmap(inverse_root)(jnp.eye(found.precision.shape[-1], dtype=found.precision.dtype) + found.precision)
    return Weights(found, root, _covariance_times(root, found.shift))


def _prior_like(found: Told) -> Weights:
    nothing = jax.tree.map(jnp.zeros_like, found)
    eye = jnp.eye(found.precision.shape[-1], dtype=found.precision.dtype)
    return Weights(nothing, jnp.broadcast_to(eye, found.precision.shape), nothing.shift)


def given_also(cavity: Weights, own: Told) -> tuple[Weights, Array]:
    r"""The normals given also other rows, and their divergence from before, :math:`KL[q \| c]`, of all units.

    .. math:: m_q - m_c = P_q^{-1} (h - P m_c), \qquad
        KL = \tfrac12 \big[\log|P_q| - \log|P_c| - tr(P P_q^{-1}) + (m_q - m_c)^\top P_c (m_q - m_c)\big]
    """
    both = together(cavity.told, own)
    eye = jnp.eye(both.precision.shape[-1], dtype=both.precision.dtype)
    root = jax.vmap(inverse_root)(eye + both.precision)
    change = _covariance_times(root, own.shift - own.precision @ cavity.mean)
    log_dets = 2 * (_log_diagonal(cavity.root) - _log_diagonal(root))
    trace = jnp.sum(root * (root @ own.precision), axis=(-2, -1))
    quadratic = jnp.sum(change * (change + cavity.told.precision @ change))
    size = change.shape[-1]
    divergence = 0.5 * (size * jnp.sum(log_dets - trace) + quadratic)
    return Weights(both, root, cavity.mean + change), divergence


def _covariance_times(root: Array, shift: Array) -> Array:
    return jnp.einsum("gji,gjk->gik", root, root @ shift)


def _log_diagonal(root: Array) -> Array:
    return jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)), axis=-1)


def _ungrouped(layer: Dense, standard: Array) -> Array:
    """Weights (D, units) from the groups', in which the prior is standard normal."""
    flat = jnp.moveaxis(standard, 1, 0).reshape(standard.shape[1], -1)
    return jnp.asarray(layer.mean, flat.dtype) + jnp.asarray(layer.sd, flat.dtype) * flat


def noise_for(network: Network, key: Array) -> tuple[Array, ...]:
    """Standard normals for one draw of all weights."""
    keys = jax.random.split(key, len(network.layers))
    return tuple(jax.random.normal(one, layer.mean.shape) for one, layer in zip(keys, network.layers, strict=True))


def sample(network: Network, table: Rows, noise: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
    """One draw of all weights, layer by layer; and the divergence from the prior along it, right on average."""
    x, weights, divergence = table.inputs, [], jnp.zeros(())
    for layer, outputs, precisions, eps in zip(network.layers, *table[1:], noise, strict=True):
        found = told(layer, x, outputs, precisions)
        q, more = given_also(_prior_like(found), found)
        weights.append(q.sample(layer, eps))
        divergence = divergence + more
        x = layer.after(x, weights[-1])
    return tuple(weights), divergence


class Cavity(NamedTuple):
    """The others' rows, and their first layer, which does not change while a silo works."""

    table: Rows
    first: Weights


def cavity_of(network: Network, table: Rows) -> Cavity:
    first = told(network.layers[0], table.inputs, table.outputs[0], table.precisions[0])
    return Cavity(table, given(first))


def sample_tilted(
    network: Network, cavity: Cavity, own: Rows, noise: tuple[Array, ...]
) -> tuple[tuple[Array, ...], Array]:
    """One draw of all weights given the others' rows and a silo's own, and the divergence from the others' along it."""
    x, others, weights, divergence = own.inputs, cavity.table.inputs, [], jnp.zeros(())
    for place, layer in enumerate(network.layers):
        outputs, precisions = cavity.table.outputs[place], cavity.table.precisions[place]
        before = cavity.first if place == 0 else given(told(layer, others, outputs, precisions))
        q, more = given_also(before, told(layer, x, own.outputs[place], own.precisions[place]))
        weights.append(q.sample(layer, noise[place]))
        divergence = divergence + more
        if place + 1 < len(network.layers):
            x, others = layer.after(x, weights[-1]), layer.after(others, weights[-1])
    return tuple(weights), divergence
