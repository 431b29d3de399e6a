r"""Normals through sigmoids: the moments that natural-parameter networks and federated neural propagation need.

**The hybrid.** A cavity :math:`N(z; m, v)` times a sigmoid, :math:`h(z) \propto N(z; m, v)\, \sigma(f z)`. With
:math:`C = f z`, so that :math:`C \sim N(c_m, c_s)` with :math:`c_m = f m` and :math:`c_s = f^2 v`, and
:math:`r_d = E\,\sigma(C)^d / E\,\sigma(C)`, Stein's lemma gives

.. math::

    E_h z = m + v f (1 - r_2), \qquad
    \mathrm{var}_h z = v \left( 1 + f^2 v\, (2 r_3 - r_2 - r_2^2) \right)

Since :math:`\log \sigma` is concave, with a second derivative of at least -1/4, the variance is between

.. math:: \left( 1 / v + f^2 / 4 \right)^{-1} \le \mathrm{var}_h z \le v

so the factor that turns the cavity into a normal with the hybrid's moments, :math:`t = h / N(m, v)`, has a precision
from 0 to :math:`f^2 / 4`: it is never negative.

Three kinds of moments:

- ``"quadrature"``: Gauss-Hermite with 128 nodes. With :math:`\sqrt{c_s} \le 2.5` the error is below 1e-10 sds of the
  cavity, with 3 below 1e-9, with 5 below 1e-5.
- ``"closed"``: the equations above, with :math:`E\,\sigma^d(C) \approx
  \sigma(a (c_m + b) / \sqrt{1 + \tfrac{\pi}{8} a^2 c_s})`, :math:`a = 2 d (1 - 2^{-1/d})`,
  :math:`b = \log(2^{1/d} - 1)` (Theorem 2 of Wu et al. 2023, its constants from the appendix).
- ``"printed"``: the same with the second moment of Theorem 1 as it is printed,
  :math:`E_h z^2 = E[C \sigma^2(C)] / (E\,\sigma(C)\, f^2)`, which lacks terms, and is no second moment: its variance
  is negative more often than not.

**The network.** Layers take a vector of independent normals to another (Wang, Shi and Yeung 2016): with weights W, and
a bias that is itself normal, :math:`N(b, s)`,

.. math:: E\,o = W' E\,a + b, \qquad \mathrm{var}\,o = (W^2)' \mathrm{var}\,a + s

and between two of them a sigmoid, :math:`E\,\sigma(o)` and :math:`E\,\sigma^2(o) - (E\,\sigma(o))^2`. (Weights of that
paper have variances, too; those of FedNP's released code have none, as here.)
"""

import math
from functools import lru_cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import roots_hermitenorm

Array = jax.Array
KINDS = ("quadrature", "closed", "printed")
NODES = 128
ROUNDING = 1e-4  # of the cavity's variance: what is outside of its bounds by less is not counted


class Moments(NamedTuple):
    """Of independent numbers."""

    mean: Array
    variance: Array


@lru_cache(maxsize=4)
def _nodes(num: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and log weights for a standard normal, float64."""
    points, weights = roots_hermitenorm(num)
    return points, np.log(weights / np.sum(weights))


def nodes(x: Array) -> tuple[Array, Array]:
    """Gauss and Hermite's points and log weights for a standard normal, on an axis behind those of x."""
    behind = lambda values: jnp.asarray(values.reshape((1,) * x.ndim + (-1,)), x.dtype)
    points, log_weights = _nodes(NODES)
    return behind(points), behind(log_weights)


def log_mean_power(x: Moments, degree: int) -> Array:
    r"""Theorem 2: the log of :math:`E\,\sigma^d`, nearly; 0 > it, and finite for all finite moments."""
    a, b = 2 * degree * (1 - 2 ** (-1 / degree)), math.log(2 ** (1 / degree) - 1)
    return jax.nn.log_sigmoid(a * (x.mean + b) / jnp.sqrt(1 + math.pi / 8 * a**2 * x.variance))


def hybrid(cavity: Moments, slope: Array, kind: str = "quadrature") -> Moments:
    r"""Moments of :math:`N(z; m, v)\, \sigma(f z)`, elementwise, of one of the three kinds.

    Args:
        cavity: m and v.
        slope: f.
        kind: see the module.

    Example:
        >>> found = hybrid(Moments(jnp.zeros(()), jnp.ones(())), jnp.ones(()))
        >>> round(float(found.mean), 4), round(float(found.variance), 4)
        (0.4132, 0.8292)
    """
    m, v = cavity
    if kind == "quadrature":
        points, log_weights = nodes(m)
        scores = log_weights + jax.nn.log_sigmoid(slope[..., None] * (m[..., None] + jnp.sqrt(v)[..., None] * points))
        weights = jax.nn.softmax(scores, axis=-1)
        mean = jnp.sum(weights * points, axis=-1)
        spread = jnp.sum(weights * (points - mean[..., None]) ** 2, axis=-1)
        return Moments(m + jnp.sqrt(v) * mean, v * spread)
    c = Moments(slope * m, slope**2 * v)
    one, two, three = (log_mean_power(c, degree) for degree in (1, 2, 3))
    r2, r3 = jnp.exp(two - one), jnp.exp(three - one)
    mean = m + v * slope * (1 - r2)
    if kind == "closed":
        return Moments(mean, v * (1 + c.variance * (2 * r3 - r2 - r2**2)))
    tiny = jnp.asarray(1e-6, slope.dtype)
    away = jnp.where(jnp.abs(slope) < tiny, jnp.where(slope < 0, -tiny, tiny), slope)  # it divides by the slope
    second = ((c.mean + 2 * c.variance) * r2 - 2 * c.variance * r3) / away**2
    return Moments(mean, second - mean**2)


def bounded(found: Moments, cavity: Moments, slope: Array) -> tuple[Moments, Array]:
    """The hybrid with its variance between the bounds that a true one has, and where it was not, bool."""
    least = 1 / (1 / cavity.variance + slope**2 / 4)
    variance = jnp.clip(found.variance, least, cavity.variance)
    return Moments(found.mean, variance), jnp.abs(found.variance - variance) > ROUNDING * cavity.variance


def activated(x: Moments, kind: str = "quadrature") -> Moments:
    r"""Of :math:`\sigma(x)`.

    >>> found = activated(Moments(jnp.zeros(()), jnp.ones(())))
    >>> round(float(found.mean), 4), round(float(found.variance), 4)
    (0.5, 0.0434)
    """
    if kind == "quadrature":
        points, log_weights = nodes(x.mean)
        values = jax.nn.sigmoid(x.mean[..., None] + jnp.sqrt(x.variance)[..., None] * points)
        mean = jnp.sum(jnp.exp(log_weights) * values, axis=-1)
        return Moments(mean, jnp.sum(jnp.exp(log_weights) * (values - mean[..., None]) ** 2, axis=-1))
    mean = jnp.exp(log_mean_power(x, 1))
    return Moments(mean, jnp.maximum(jnp.exp(log_mean_power(x, 2)) - mean**2, 0.0))


def kl_to_point(q: Moments, point: Array, epsilon: float) -> Array:
    r""":math:`\mathrm{KL}[N(m, v) \,\|\, N(w, \epsilon)]`, summed.

    >>> float(kl_to_point(Moments(jnp.ones(3), jnp.full(3, 0.5)), jnp.ones(3), 0.5))
    0.0
    """
    ratio = q.variance / epsilon
    return 0.5 * jnp.sum(ratio - 1 - jnp.log(ratio) + (q.mean - point) ** 2 / epsilon)


# --- networks ---------------------------------------------------------------------------------------------------------


class SlopeNet(NamedTuple):
    """f: a layer of tanh units on the features of a row, a linear one, and the mean over rows."""

    weight: Array  # (features, hidden)
    bias: Array  # (hidden,)
    out_weight: Array  # (hidden, latent)
    out_bias: Array  # (latent,)


class NormalLayer(NamedTuple):
    """A linear layer whose biases are normal."""

    weight: Array  # (in, out)
    bias: Array  # (out,)
    log_variance: Array  # (out,), of the biases


class Networks(NamedTuple):
    """From the features of a silo to slopes, and from the private latent to a normal over the head's parameters."""

    slope: SlopeNet
    first: NormalLayer  # (latent, hidden)
    second: NormalLayer  # (hidden, head)


def fresh(key: Array, features: int, latent: int, hidden: int, head: Array, epsilon: float) -> Networks:
    """Networks that predict ``head`` itself, with a variance of epsilon, whatever they are given; nearly."""
    keys = jax.random.split(key, 4)
    draw = lambda key, rows, columns: jax.random.normal(key, (rows, columns), head.dtype) / math.sqrt(rows)
    zeros = lambda size: jnp.zeros(size, head.dtype)
    slope = SlopeNet(draw(keys[0], features, hidden), zeros(hidden), draw(keys[1], hidden, latent), zeros(latent))
    first = NormalLayer(draw(keys[2], latent, hidden), zeros(hidden), jnp.full(hidden, math.log(0.1), head.dtype))
    small = 0.1 * math.sqrt(epsilon)
    last = NormalLayer(small * draw(keys[3], hidden, head.shape[0]), head, jnp.full_like(head, math.log(epsilon)))
    return Networks(slope, first, last)


def slopes(net: SlopeNet, rows: Array, real: Array) -> Array:
    """f(X), (latent,): of rows (n, features), the mean over those that are ``real``."""
    hidden = jnp.tanh(rows @ net.weight + net.bias)
    pooled = jnp.sum(jnp.where(real[:, None], hidden, 0.0), axis=0) / jnp.maximum(jnp.sum(real), 1)
    return pooled @ net.out_weight + net.out_bias


def linear(layer: NormalLayer, x: Moments) -> Moments:
    """Through a layer."""
    variance = x.variance @ layer.weight**2 + jnp.exp(layer.log_variance)
    return Moments(x.mean @ layer.weight + layer.bias, variance)


def predicted(networks: Networks, z: Moments, kind: str = "quadrature") -> Moments:
    """The normal over the head's parameters, given that over the private latent."""
    return linear(networks.second, activated(linear(networks.first, z), kind))


# --- sites of the private latent --------------------------------------------------------------------------------------


class LatentSite(NamedTuple):
    r"""Natural parameters of a factor :math:`t(z) \propto \exp(\eta z - \tfrac12 \tau z^2)`, elementwise."""

    eta: Array  # (..., latent)
    tau: Array  # (..., latent), at least 0


def cavities(sites: LatentSite) -> LatentSite:
    """A standard normal times the sites of all others, (silos, latent): proper, for no site takes precision away."""
    others = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0) - leaf, sites)
    return LatentSite(others.eta, 1 + jnp.maximum(others.tau, 0.0))


def moments_of(site: LatentSite) -> Moments:
    return Moments(site.eta / site.tau, 1 / site.tau)


def site_between(cavity: LatentSite, found: Moments) -> LatentSite:
    """The factor that makes of the cavity a normal with these moments."""
    tau = 1 / found.variance
    return LatentSite(found.mean * tau - cavity.eta, jnp.maximum(tau - cavity.tau, 0.0))
