"""What a model looks like from outside: its sample sites, their shapes, and what depends on what.

Everything here is abstract: the model is run on shapes alone, with NumPyro's effect handlers and JAX's tracing, so it
costs milliseconds and sees no data.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import Distribution, ImproperUniform, Unit, biject_to
from numpyro.infer import init_to_uniform
from numpyro.infer.util import helpful_support_errors

from numpyro_fed.data.inputs import leaves
from numpyro_fed.model.refusals import first_line, models_own, told
from numpyro_fed.threads import separate_handlers, separate_validation

separate_handlers()  # before the first model is traced
separate_validation()

Model = Callable[..., Any]
Shape = tuple[int, ...]
BOUNDED = ("_Simplex", "_CorrCholesky", "_CorrMatrix", "_Circular", "_Sphere")  # and intervals


class PartitionError(ValueError):
    """The model cannot be split over the silos as it stands; the message says what to type."""


class SiteShape(NamedTuple):
    """A site of the model as traced on shapes. Plates are (name, dim, size), dim counted from the right."""

    kind: str  # latent, observed, factor, deterministic, param
    value: Shape
    log_prob: Shape | None
    unconstrained: Shape | None  # of a continuous latent
    plates: tuple[tuple[str, int, int], ...]
    discrete: bool
    distribution: str
    support: tuple[int, ...] | None = None  # all values of a discrete latent, where they can be listed
    improper: bool = False  # a latent whose prior has no total: flat, and without bounds


class Tracing(NamedTuple):
    sites: dict[str, SiteShape]
    plates: dict[str, int]
    state: tuple[str, ...] = ()  # names of mutable sites


def abstract(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays become shapes; ints stay: they are sizes, known when tracing."""

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, int | jax.ShapeDtypeStruct):
            return leaf
        return jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.canonicalize_dtype(leaf.dtype))

    return jax.tree.map(shape, dict(kwargs))


def split_static(kwargs: Mapping[str, Any]) -> tuple[list[Any], Callable[[list[Any]], dict[str, Any]]]:
    """The array leaves, and a function that puts (traced) arrays back beside the ints."""
    flat, structure = jax.tree.flatten(dict(kwargs))
    where = [i for i, leaf in enumerate(flat) if not isinstance(leaf, int)]

    def merge(arrays: list[Any]) -> dict[str, Any]:
        full = list(flat)
        for i, array in zip(where, arrays, strict=True):
            full[i] = array
        return jax.tree.unflatten(structure, full)

    return [flat[i] for i in where], merge


def traced(
    model: Model, kwargs: Mapping[str, Any], substitute: Any = None, key: Any = None, start: Any = init_to_uniform
) -> dict[str, dict]:
    """One run of the model: its trace, latents set by ``substitute`` or by ``start``, a NumPyro init strategy."""
    key = jax.random.PRNGKey(0) if key is None else key
    seeded = handlers.substitute(handlers.seed(model, key), substitute_fn=start)
    if substitute is not None:
        seeded = handlers.substitute(seeded, data=substitute)
    return handlers.trace(seeded).get_trace(**kwargs)


def init_to_zero(site: dict) -> Any:
    """An init strategy: zero in unconstrained space. No numbers are drawn, which would be compiled shape by shape."""
    if site["type"] != "sample" or site["is_observed"] or site["fn"].support.is_discrete:
        return None
    transform = biject_to(site["fn"].support)
    return transform(jnp.asarray(np.zeros(transform.inverse_shape(site["fn"].shape()), jnp.zeros(()).dtype)))


def trace_shapes(model: Model, kwargs: Mapping[str, Any]) -> Tracing:
    """Sites and plates of ``model(**kwargs)``, from shapes alone. Raises whatever the model raises."""
    arrays, merge = split_static(abstract(kwargs))
    sites: dict[str, SiteShape] = {}
    plates: dict[str, int] = {}
    state: list[str] = []

    def run(arrays: list[Any]) -> int:
        for name, site in traced(model, merge(arrays)).items():
            if site["type"] == "plate":
                size, subsample = site["args"]
                if subsample is not None and subsample != size:
                    raise PartitionError(
                        f"plate {name!r} has subsample_size={subsample}: leave it out; rows are sampled inside the "
                        "silos by the method's batch_size="
                    )
                plates[name] = size
            elif site["type"] == "mutable":
                state.append(name)
            elif site["type"] in ("sample", "deterministic", "param"):
                sites[name] = _site_shape(name, site)
                for plate, _, size in sites[name].plates:  # a plate inside a scan has no site of its own
                    plates.setdefault(plate, size)
        return 0

    jax.eval_shape(run, arrays)
    return Tracing(sites, plates, tuple(state))


def _site_shape(name: str, site: dict) -> SiteShape:
    kind, value = site["type"], site["value"]
    plates = tuple((frame.name, frame.dim, frame.size) for frame in site.get("cond_indep_stack", ()))
    if kind != "sample":
        parts = jax.tree.leaves(value)
        single = kind == "deterministic" or (len(parts) == 1 and parts[0] is value)
        # a network's parameters are a pytree: shown as the vector that they would be
        shape = jnp.shape(value) if single else (sum(jnp.size(part) for part in parts),)
        return SiteShape(kind, shape, None, None, plates, False, "")
    fn = site["fn"]
    kind = "latent" if not site["is_observed"] else "factor" if isinstance(unwrapped(fn), Unit) else "observed"
    if kind == "observed":
        _check_observed_shape(name, jnp.shape(value), tuple(fn.shape()))
    log_prob = jnp.shape(log_density(site))
    for plate, dim, size in plates:
        if len(log_prob) < -dim or log_prob[dim] != size:
            raise PartitionError(
                f"sample site {name!r} has log densities of shape {log_prob} in plate {plate!r} of size {size}: give "
                f"the plate the size of its rows, and its distribution (and obs=) {size} rows"
            )
    support = support_of(fn)
    discrete = bool(getattr(support, "is_discrete", False))
    unconstrained = None
    if kind == "latent" and not discrete:
        with helpful_support_errors(site):
            transform = biject_to(support)
        unconstrained = jnp.shape(transform.inv(value))
    listed = enumerable(fn) if kind == "latent" and discrete else None
    improper = kind == "latent" and _improper(fn)
    return SiteShape(kind, jnp.shape(value), log_prob, unconstrained, plates, discrete, label(fn), listed, improper)


def _improper(fn: Distribution) -> bool:
    """A flat density (``ImproperUniform``, ``.mask(False)``) over a space without bounds.

    >>> from numpyro.distributions import ImproperUniform, Normal, Uniform, constraints
    >>> _improper(Normal(0, 1)), _improper(Normal(0, 1).mask(False)), _improper(Uniform(0, 1).mask(False))
    (False, True, False)
    """
    masked = getattr(fn, "_mask", None)
    if not isinstance(unwrapped(fn), ImproperUniform) and masked is not False:
        return False
    support = support_of(fn)
    while hasattr(support, "base_constraint"):
        support = support.base_constraint
    closed = hasattr(support, "lower_bound") and hasattr(support, "upper_bound")
    return not closed and type(support).__name__ not in BOUNDED


def enumerable(fn: Distribution) -> tuple[int, ...] | None:
    """All values of a discrete distribution, the same for every element; None when they cannot be listed.

    That is so for a Poisson, which has infinitely many, and for a Binomial whose number of trials is data.
    """
    if not fn.has_enumerate_support or fn.event_shape:
        return None
    try:
        with jax.ensure_compile_time_eval():
            return tuple(np.asarray(fn.enumerate_support(expand=False)).reshape(-1).tolist())
    except (NotImplementedError, jax.errors.JAXTypeError):
        return None


def _check_observed_shape(name: str, value: Shape, expected: Shape) -> None:
    """Observations of another shape than their distribution's broadcast, and the log density is simply wrong."""
    got = f"sample site {name!r} observes values of shape {value} where its distribution has shape {expected}"
    try:
        together = np.broadcast_shapes(value, expected)
    except ValueError:
        raise PartitionError(f"{got}: give both the same rows") from None
    if together not in (value, expected):
        raise PartitionError(
            f"{got}: they would broadcast to {' x '.join(map(str, together))}. Give the observations the shape "
            f"{expected}."
        )
    times = math.prod(expected) // max(1, math.prod(value))
    if value and times > 1:  # a single number (a soft constraint, obs=0.0) is meant for all
        raise PartitionError(
            f"{got}: each observation would be counted {times} times. Give both the same shape (x @ beta, not "
            "x @ beta[:, None]), or jnp.broadcast_to(...) if you mean it."
        )


def log_density(site: dict) -> Any:
    """The site's log density at its value, element by element, as NumPyro counts it."""
    log_prob = site["fn"].log_prob(site["value"])
    return log_prob if site["scale"] is None else site["scale"] * log_prob


def support_of(fn: Distribution) -> Any:
    """The distribution's support, or None when its author gave none (observed sites can do without)."""
    try:
        return fn.support
    except (AssertionError, NotImplementedError):  # NumPyro's wrappers assert that there is one
        return None


def unwrapped(fn: Distribution) -> Distribution:
    """The distribution inside NumPyro's mask, expand and to_event wrappers."""
    while hasattr(fn, "base_dist") and type(fn).__name__ in (
        "MaskedDistribution",
        "ExpandedDistribution",
        "Independent",
    ):
        fn = fn.base_dist
    return fn


def label(fn: Distribution) -> str:
    name = type(unwrapped(fn)).__name__
    for suffix in ("Probs", "Logits"):
        name = name.removesuffix(suffix)
    return name


def describe_call(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{path}={leaf}" if isinstance(leaf, int) else f"{path} {tuple(leaf.shape)}" for path, leaf in leaves(kwargs)
    )


def trace_silo(model: Model, silo: str, kwargs: Mapping[str, Any]) -> Tracing:
    """As `trace_shapes`, with errors that name the silo and what it was called with."""
    check_signature(model, kwargs)
    called = f"silo {silo!r}: the model cannot be traced with {describe_call(kwargs)}"
    try:
        return trace_shapes(model, kwargs)
    except PartitionError as error:
        raise PartitionError(f"silo {silo!r}: {error}") from None
    except jax.errors.NonConcreteBooleanIndexError as error:
        raise PartitionError(
            f"{called}: it selects rows by a boolean array, so that their number depends on the data. Keep all rows "
            "and use jnp.where, handlers.mask or obs_mask=, or select them before the silos are made. JAX said: "
            f"{first_line(error)}"
        ) from error
    except jax.errors.TracerArrayConversionError as error:
        raise PartitionError(
            f"{called}: it hands an argument to NumPy. Use jax.numpy inside the model. JAX said: {first_line(error)}"
        ) from error
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerIntegerConversionError) as error:
        raise PartitionError(
            f"{called}: it reads the values of an array to decide a shape or a branch. Pass such a number as an int "
            f"argument (num_counties=...) and use it in numpyro.plate. JAX said: {first_line(error)}"
        ) from error
    except Exception as error:
        if isinstance(error, AssertionError) and "unique names" in str(error):
            raise PartitionError(f"{called}: {first_line(error)}. Give every sample site its own name.") from None
        if isinstance(error, AssertionError) and not str(error) and not models_own(error):  # NumPyro's, of plates
            clash = "two plates use the same dim. Give each its own (dim=-1, dim=-2)."
            raise PartitionError(f"{called}: {clash}") from error
        raise PartitionError(f"{called}: {told(error)}") from error


def check_signature(model: Model, kwargs: Mapping[str, Any]) -> None:
    if not callable(model):
        raise TypeError(f"model must be a NumPyro model (a function), got a {type(model).__name__}")
    signature = inspect.signature(model)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        raise PartitionError(
            f"the model takes ({', '.join(signature.parameters)}), the silos give ({', '.join(kwargs)}): {error}"
        ) from None


def changing_state(model: Model, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """The mutable sites that a run of the model changes: a network's batch statistics, a dropout layer's counter.

    State that a run only reads (that of a flax module after ``module.eval()``) is a constant of the model.
    """
    arrays, merge = split_static(abstract(kwargs))

    def states(arrays: list[Any], given: dict[str, Any]) -> dict[str, Any]:
        trace = traced(model, merge(arrays), substitute=given or None)
        return {name: site["value"] for name, site in trace.items() if site["type"] == "mutable"}

    before = jax.eval_shape(lambda arrays: states(arrays, {}), arrays)
    jaxpr = jax.make_jaxpr(states)(arrays, before).jaxpr
    same = {}  # NumPyro stops gradients of what a module returns as its state
    for equation in jaxpr.eqns:
        if equation.primitive.name == "stop_gradient":
            same[equation.outvars[0]] = equation.invars[0]
    owners = [path[0].key for path, _ in jax.tree_util.tree_flatten_with_path(before)[0]]
    given, returned = jaxpr.invars[len(jaxpr.invars) - len(owners) :], jaxpr.outvars
    if len(given) != len(returned):
        return tuple(before)
    changed = [
        owner
        for owner, old, new in zip(owners, given, returned, strict=True)
        if new is not old and same.get(new) is not old
    ]
    return tuple(dict.fromkeys(changed))


def growth(before: Shape | None, after: Shape | None) -> tuple[int, ...]:
    """Axes, counted from the right, that doubled."""
    if before is None or after is None or len(before) != len(after):
        return ()
    return tuple(i - len(before) for i, (a, b) in enumerate(zip(before, after, strict=True)) if b == 2 * a and a > 0)
