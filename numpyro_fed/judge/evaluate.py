"""How good are predicted classes? Accuracy, log likelihood and calibration.

:func:`evaluate` measures a fit whose model observes a Bernoulli or a Categorical, at a point and averaged over the
posterior. The measures themselves are in :mod:`numpyro_fed.judge.metrics`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pandas as pd
from numpyro.distributions import Distribution
from numpyro.primitives import Messenger

from numpyro_fed.algorithm import Posterior, PyTree
from numpyro_fed.checks import check_count, check_key
from numpyro_fed.data.silos import at_silo
from numpyro_fed.judge.metrics import accuracy, checked, ece
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model.forward import Call, Request, predicted
from numpyro_fed.model.layout import user_mask
from numpyro_fed.model.new_units import used_arguments
from numpyro_fed.model.partition_table import Partition, Site
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import SiteShape, unwrapped
from numpyro_fed.pieces import jit
from numpyro_fed.precision import ONCE, to_user_dtype
from numpyro_fed.results import predict
from numpyro_fed.results.fit import Fit

Array = jax.Array
CLASSES = "\0classes"  # a deterministic site that no model has
FAMILIES = ("Bernoulli", "Categorical")
CENTRE_DRAWS = 1000  # of z_G, for its mean: known to 3 % of an sd


def evaluate(
    fit: Fit,
    data: Mapping[str, Any] | None = None,
    rng_key: Any = None,
    *,
    num_samples: int = 10,
    site: str | None = None,
    silo: str | None = None,
) -> pd.DataFrame:
    r"""Accuracy, log likelihood and calibration of the predicted classes, on held-out data or on a silo's own.

    With :math:`p_{ic}(z)` the probability that the model gives to class c of observation i,

    - ``"point"`` has :math:`p_{ic}(\hat z)`, where :math:`\hat z` is the posterior's mean of the unconstrained globals
      (of a method that finds a point: that point);
    - ``"marginalised"`` has :math:`\frac1S \sum_s p_{ic}(z_s)`, over draws :math:`z_s` of the posterior.

    Papers read "the log likelihood of the test part" in two ways. With labels :math:`y_i`, ``log_likelihood`` is the
    logarithm of averaged probabilities, :math:`\frac1n \sum_i \log \frac1S \sum_s p_{iy_i}(z_s)`, the score of the
    prediction itself; ``mean_log_likelihood`` is the average of logarithms, :math:`\frac1n \sum_i \frac1S \sum_s \log
    p_{iy_i}(z_s)`, that of a single draw on average. By Jensen's inequality the second is never larger; they are equal
    at a point.

    Local latents are those of :meth:`~numpyro_fed.Fit.predict`: with ``data``, new units' from their prior given the
    globals, unless an encoder reads them off the data; of a silo's own units, their posterior's. Both rows average over
    ``num_samples`` draws of them: the point is one of the globals alone. (Latents of a silo's own units, and those that
    an encoder reads off labels, have seen the labels that they predict.)

    An observation is one label: a vector of labels (``to_event``) counts each of them. Masked ones do not count. Other
    observed sites are held at their values.

    Args:
        fit: what ``run`` returned.
        data: the model's arguments, observations included. Shared arguments are filled in. May be left out with
            ``silo``: its own data.
        rng_key: by default ``jax.random.key(0)``. The draws are those of ``fit.sample(rng_key, num_samples)``.
        num_samples: S, the number of draws.
        site: the observed site, where several have classes.
        silo: whose units they are; a new silo's when not given.

    Returns:
        A DataFrame with rows ``point`` and ``marginalised`` and columns ``accuracy``, ``log_likelihood`` and
        ``mean_log_likelihood`` (of an observation), ``ece`` (15 bins) and ``num_observations``.

    Example:
        >>> table = nf.evaluate(fit, dict(x=x, y=y))
        >>> list(table.index), list(table.columns)[:3]
        (['point', 'marginalised'], ['accuracy', 'log_likelihood', 'mean_log_likelihood'])

    Reference:
        Guo, Greengard, Wang, Gelman, Kim and Xing (2023), Federated learning as variational inference: a scalable
        expectation propagation approach, table 5, which marginalises over ten draws. Bronckers, Global inducing point
        posterior approximations for federated Bayesian neural networks, table 5.1, has means over 50 draws of the log
        likelihood.
    """
    if not isinstance(fit, Fit):
        raise TypeError(f"evaluate takes a fit (what run() returned), got a {type(fit).__name__}")
    if data is None and silo is None:
        raise TypeError(
            "evaluate needs data, a silo, or both: evaluate(fit, dict(x=x, y=y)) for held-out data, "
            "evaluate(fit, silo='york') for york's own"
        )
    num_samples = check_count("num_samples", num_samples)
    key = jax.random.key(0) if rng_key is None else check_key(rng_key)
    program, used = _told(fit, _chosen(fit.split.partition, site))
    keys, server = jax.random.split(key, num_samples), fit.state.server
    with at_silo(silo):
        asked = predict.asked(fit, data, silo, plain=True, used=used)
    local = fit.split.partition.local_sites or fit.split.partition.enumerated_sites
    once = keys if local else keys[:1]  # without local latents, all draws at a point are equal
    centre = _centre(fit, keys[0])
    at = {
        "point": (once, jnp.broadcast_to(centre, (len(once), *centre.shape))),
        "marginalised": (keys, fit.programs.z(keys, server)),
    }
    rows = {name: _measures(program(asked.call, *points, server, asked.request)) for name, points in at.items()}
    return pd.DataFrame.from_dict(rows, orient="index")


def _measures(found: Array) -> dict[str, float | int]:
    """Of log probabilities, the label's averaged over draws, label and whether it counts, on the last axis."""
    rows = np.asarray(found, np.float64).reshape(-1, found.shape[-1])
    rows = rows[rows[:, -1] > 0]
    if not len(rows):
        raise ValueError("no observation counts: there are none in data, or the model masks all of them")
    if np.isnan(rows).any():
        raise ValueError("the model's class probabilities are NaN: is the fit's history finite? See fit.history")
    probs, labels = checked(np.exp(rows[:, :-3]), rows[:, -2])
    return {
        "accuracy": accuracy(probs, labels),
        "log_likelihood": float(np.mean(np.take_along_axis(rows, labels[:, None], axis=1))),  # exp could underflow
        "mean_log_likelihood": float(np.mean(rows[:, -3])),
        "ece": ece(probs, labels),
        "num_observations": len(rows),
    }


# --- class probabilities of a fit -------------------------------------------------------------------------------------


def _chosen(part: Partition, site: str | None) -> str:
    observed = {one.name: one.shape.distribution for one in part.sites if one.role == "observed"}
    classes = [name for name, distribution in observed.items() if distribution in FAMILIES]
    listed = ", ".join(f"{name!r} ({distribution})" for name, distribution in observed.items()) or "none"
    if site is not None and site not in classes:
        raise ValueError(f"no Bernoulli or Categorical is observed at {site!r}; the observed sites are {listed}")
    if not classes:
        raise ValueError(f"evaluate needs an observed Bernoulli or Categorical; the observed sites are {listed}")
    if site is None and len(classes) > 1:
        raise ValueError(f"several sites have classes, {', '.join(map(repr, classes))}: choose, site={classes[0]!r}")
    return classes[0] if site is None else site


class Told(NamedTuple):
    """What tells the classes of a site."""

    program: Callable[..., Array]  # compiled, see `_averaged`
    used: frozenset[str]  # arguments whose values matter: labels too


def _told(fit: Fit, site: str) -> Told:
    def make() -> Told:
        split = _telling_split(fit.split, site)
        return Told(_averaged(fit.posterior, split), used_arguments(split))

    return remembered(make, "classes", ByIdentity(fit.posterior), ByIdentity(fit.split), site)


def _averaged(posterior: Posterior, split: SplitModel) -> Callable[..., Array]:
    """``(call, keys, draws of z_G, server, request) -> rows``, probabilities averaged over draws, taken in turn."""

    def run(call: Call, keys: Array, z: Array, server: PyTree, request: Request) -> Array:
        one = lambda point: predicted(posterior, split, call, point[0], point[1], server, request)[CLASSES]
        rows = jax.lax.map(one, (keys, z))
        logs = jax.nn.logsumexp(rows[..., :-2], axis=0) - np.log(rows.shape[0])
        label = rows[..., -2:-1].astype(int)
        own = jnp.mean(jnp.take_along_axis(rows[..., :-2], label, axis=-1, mode="clip"), axis=0)
        return jnp.concatenate([logs, own, rows[0, ..., -2:]], axis=-1)

    return jit(run, static_argnums=0, compiler_options=ONCE)


def _centre(fit: Fit, key: Array) -> Array:
    """The mean of z_G: a normal's own, else that of draws."""
    posterior, server = fit.posterior, fit.state.server
    normal = None if fit.correction is not None else posterior.normal(server)  # points have too few, or none at all
    if normal is not None:
        return to_user_dtype(normal.mean)

    def run(key: Array, server: PyTree) -> Array:
        keys = jax.random.split(jax.random.fold_in(key, 1), CENTRE_DRAWS)
        first = posterior.sample(keys[0], server)  # from which all are counted, so that a point stays as it is
        add = lambda i, total: total + (posterior.sample(keys[i], server) - first)  # in turn: all could be large
        return first + jax.lax.fori_loop(1, CENTRE_DRAWS, add, jnp.zeros_like(first)) / CENTRE_DRAWS

    return jit(run, compiler_options=ONCE)(key, server)


def _telling_split(split: SplitModel, site: str) -> SplitModel:
    """The same split of a model with one more deterministic site: the classes of ``site``, and their probabilities."""
    shape = SiteShape("deterministic", (), None, None, (), False, "")
    classes = Site(CLASSES, "deterministic", False, (), (), shape)
    part = replace(split.partition, sites=(*split.partition.sites, classes))
    return split._replace(model=_telling(split.model, site), partition=part)


def _telling(model: Callable[..., Any], site: str) -> Callable[..., Any]:
    @wraps(model)
    def told(*args: Any, **kwargs: Any) -> Any:
        seen = _Seen()
        with seen:
            out = model(*args, **kwargs)
        if site not in seen.observed:
            raise ValueError(f"the probabilities of {site!r} cannot be read: it is observed inside a scan")
        numpyro.deterministic(CLASSES, _classes(*seen.observed[site]))
        return out

    return told


class _Seen(Messenger):
    """Notes what is observed, before anything is drawn in its place; and the model goes on with what was observed."""

    def __init__(self) -> None:
        super().__init__()
        self.observed: dict[str, tuple[Distribution, Array]] = {}

    def process_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["is_observed"] and msg["value"] is not None:
            self.observed[msg["name"]] = msg["fn"], msg["value"]

    def postprocess_message(self, msg: Any) -> None:
        if msg["type"] == "sample" and msg["name"] in self.observed:
            msg["value"] = self.observed[msg["name"]][1]


def _classes(fn: Distribution, value: Array) -> Array:
    """Log probabilities of the classes, label and whether it counts, (..., K + 2)."""
    base: Any = unwrapped(fn)
    shape = np.broadcast_shapes(jnp.shape(value), fn.shape())
    if jnp.ndim(base.logits) > len(base.batch_shape):
        logs = jax.nn.log_softmax(base.logits, axis=-1)
    else:
        logs = jax.nn.log_sigmoid(jnp.stack([-base.logits, base.logits], axis=-1))
    logs = jnp.broadcast_to(logs, (*shape, logs.shape[-1]))
    mask = user_mask(fn)
    counts = jnp.ones((), bool) if mask is None else mask
    each = [jnp.broadcast_to(part, shape).astype(logs.dtype)[..., None] for part in (value, counts)]
    return jnp.concatenate([logs, *each], axis=-1)
