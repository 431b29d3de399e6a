"""What depends on what: the inputs behind every site's density, value and support, from shapes alone."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from numpyro.distributions import Unit

from numpyro_fed.data.inputs import leaves
from numpyro_fed.model.trace import Model, SiteShape, abstract, log_density, split_static, support_of, traced, unwrapped


class Dependence(NamedTuple):
    """What densities, values and supports depend on: ``arg:path``, ``shared:path``, ``site:name``, ``param:name``."""

    log_prob: dict[str, frozenset[str]]
    value: dict[str, frozenset[str]]
    support: dict[str, frozenset[str]]
    start: dict[str, frozenset[str]]  # of params


def dependence(model: Model, kwargs: Mapping[str, Any], own: set[str], sites: dict[str, SiteShape]) -> Dependence:
    """Provenance of every site's log density, latents held fixed. ``own`` are the paths of the silo's own arguments."""
    run, inputs = by_input(model, kwargs, own, sites)
    log_prob, value, support = provenance(run, inputs)
    params = {name for name, site in sites.items() if site.kind == "param"}
    start = {}
    if params:
        given = {name: found for name, found in inputs.items() if name.startswith(("arg:", "shared:"))}
        _, merge = split_static(abstract(kwargs))
        start = provenance(lambda **args: _starts(model, merge([args[name] for name in given]), params), given)
    union = lambda tree: frozenset().union(*jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, frozenset)))
    return Dependence(
        *({name: union(found) for name, found in part.items()} for part in (log_prob, value, support, start))
    )


def by_input(
    model: Model, kwargs: Mapping[str, Any], own: set[str], sites: dict[str, SiteShape]
) -> tuple[Callable[..., tuple[dict, dict, dict]], dict[str, Any]]:
    """The model as a function of its named inputs (arguments, latents, params), and these, as shapes.

    It returns log densities, values of observed and deterministic sites, and whether observations are in their support.
    """
    kwargs = abstract(kwargs)
    arrays, merge = split_static(kwargs)
    paths = [path for path, leaf in leaves(kwargs) if not isinstance(leaf, int)]
    latents = {name: site.value for name, site in sites.items() if site.kind == "latent"}
    starts = jax.eval_shape(
        lambda arrays: {
            name: site["value"]
            for name, site in traced(model, merge(arrays)).items()
            if site["type"] == "param" or name in latents
        },
        arrays,
    )

    def run(**inputs: Any) -> tuple[dict, dict, dict]:
        full = merge([inputs[f"arg:{path}" if path in own else f"shared:{path}"] for path in paths])
        fixed = {name: inputs[f"{'site' if name in latents else 'param'}:{name}"] for name in starts}
        trace = traced(model, full, substitute=fixed)
        log_prob = {n: log_density(s) for n, s in trace.items() if s["type"] == "sample"}
        value = {
            n: s["value"]
            for n, s in trace.items()
            if s["type"] == "deterministic" or (s["type"] == "sample" and s["is_observed"])
        }
        support = {
            n: support_of(s["fn"])(s["value"])
            for n, s in trace.items()
            if s["type"] == "sample" and s["is_observed"] and support_of(s["fn"]) is not None
            if not isinstance(unwrapped(s["fn"]), Unit)
        }
        return log_prob, value, support

    inputs = {f"arg:{path}" if path in own else f"shared:{path}": a for path, a in zip(paths, arrays, strict=True)}
    inputs |= {f"{'site' if name in latents else 'param'}:{name}": start for name, start in starts.items()}
    return run, inputs


def _starts(model: Model, kwargs: dict[str, Any], params: set[str]) -> dict[str, Any]:
    return {name: site["value"] for name, site in traced(model, kwargs).items() if name in params}


def provenance(function: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """For every output of ``function(**inputs)``, the names of the inputs it depends on; found from shapes alone.

    As `numpyro.ops.provenance.eval_provenance`, and exact inside a scan, too: a state that is carried through time does
    not depend on the observations that are scanned beside it.

    >>> import numpy as np
    >>> found = provenance(lambda a, b, c: {"sum": a + b, "size": c.shape[0]}, {"a": 1.0, "b": 2.0, "c": np.ones(3)})
    >>> sorted(found["sum"]), sorted(found["size"])
    (['a', 'b'], [])
    """
    jaxpr, shapes = jax.make_jaxpr(lambda inputs: function(**inputs), return_shape=True)(inputs)
    names = [path[0].key for path, _ in jax.tree_util.tree_flatten_with_path(inputs)[0]]
    return jax.tree.unflatten(jax.tree.structure(shapes), _flow(jaxpr.jaxpr, [frozenset({name}) for name in names]))


def _flow(jaxpr: Any, inputs: list[frozenset[str]]) -> list[frozenset[str]]:
    """Sources of a jaxpr's outputs, given those of its inputs."""
    known = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda var: frozenset() if isinstance(var, Literal) else known.get(var, frozenset())
    for equation in jaxpr.eqns:
        found = [read(var) for var in equation.invars]
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        inner = getattr(inner, "jaxpr", inner)
        scan = equation.primitive.name == "scan"
        if scan and "num_consts" in equation.params:  # from jax 0.12 on these are kept elsewhere: take all inputs
            out = _flow_scan(inner, found, equation.params["num_consts"], equation.params["num_carry"])
        elif (
            not scan
            and inner is not None
            and (len(inner.invars), len(inner.outvars)) == (len(found), len(equation.outvars))
        ):
            out = _flow(inner, found)
        else:
            out = [frozenset().union(*found)] * len(equation.outvars)
        known |= dict(zip(equation.outvars, out, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _flow_scan(body: Any, inputs: list[frozenset[str]], num_consts: int, num_carry: int) -> list[frozenset[str]]:
    consts, rest = inputs[:num_consts], inputs[num_consts:]
    carry, scanned = rest[:num_carry], rest[num_carry:]
    while True:  # until what is carried gathers no new source
        out = _flow(body, consts + carry + scanned)
        grown = [a | b for a, b in zip(carry, out[:num_carry], strict=True)]
        if grown == carry:
            return out
        carry = grown
