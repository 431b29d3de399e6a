"""How a run is opened in silos that are elsewhere: what each is told, and what it makes of it.

A silo tells the shapes, types and ints of its arguments, and no value. It is then told those of all silos, and makes of
them what the server makes of them: the same split of the same model, from shapes alone
(:mod:`numpyro_fed.model.partition`). On its own data it looks whether the split's log density is NumPyro's own. When
everyone's survey is in (:mod:`numpyro_fed.run.survey`) it is told what all silos said together, and how long the run
will be, and compiles the method as the server does.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_fed.algorithm import FederatedAlgorithm, Plan, Program
from numpyro_fed.checks import unsaid
from numpyro_fed.data.padding import SiloData
from numpyro_fed.data.silos import Silos, at_silo
from numpyro_fed.data.stack import Stack, stack_of
from numpyro_fed.host import key_of
from numpyro_fed.methods.base import Method
from numpyro_fed.model.build import certified, uncertified, unpadded
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.survey import Survey
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.results import codec
from numpyro_fed.results.save import shape_leaf

Description = dict[str, Any]  # JSON: a silo's own arguments, shapes and types in the place of arrays


def description(own: Mapping[str, Any]) -> Description:
    """What a silo tells of its arguments.

    >>> description({"y": np.zeros(3, "f"), "groups": 2})
    {'dict': {'y': {'shape': [3], 'dtype': 'float32'}, 'groups': 2}}
    """
    return codec.encode(dict(own), shape_leaf)


def zeros(described: Description) -> dict[str, Any]:
    """Arguments of these shapes and no content, which take no memory."""
    return codec.decode(described, lambda leaf: np.broadcast_to(np.zeros((), leaf["dtype"]), leaf["shape"]))


def silos_like(described: Mapping[str, Description], shared: Mapping[str, Any], told: Mapping[str, Any]) -> Silos:
    """Silos of these shapes. ``told``: which of their ints are counts, which indices count from zero."""
    with unsaid(UserWarning):  # said in the silo
        silos = Silos({name: zeros(one) for name, one in described.items()}, shared=shared)
    silos.own_counts, silos.renumbered = frozenset(told["own_counts"]), frozenset(told["renumbered"])
    return silos


class Opened(NamedTuple):
    """A run, as a silo knows it before the survey."""

    method: Method
    split: SplitModel
    stack: Stack  # of this silo alone
    padded: bool  # its certificate holds with padded rows, too, where silos are of equal size


def opened(method: Method, name: str, own: Mapping[str, Any], everyone: Silos) -> Opened:
    """In the silo: the model as the server divides it, and whether that holds here."""
    split = uncertified(method.model, everyone, getattr(method, "local", None), getattr(method, "shared", None))
    alone = everyone.only(name).changed(lambda _: dict(own))
    found, failed = certified(split, alone)
    if failed is not None:
        raise failed
    return Opened(method, split, stack_of(alone, alone, split.spec, split.partition.axes), found is split)


def settled(run: Opened, padded: bool) -> Opened:
    """The same where the server has said whether rows are padded."""
    split = run.split if padded else unpadded(run.split)
    return run._replace(split=split, stack=stack_of(run.stack.silos, run.stack.silos, split.spec, split.partition.axes))


class Agreed(NamedTuple):
    """A run as a silo knows it when rounds begin."""

    method: Method
    split: SplitModel
    survey: Survey
    plan: Plan
    program: Program


def agreed(run: Opened, survey: Survey, plan: Plan) -> Agreed:
    program = run.method.compile(run.split, survey, plan)
    return Agreed(run.method, run.split, survey, plan, program)


def data_of(stack: Stack, name: str) -> SiloData:
    """The silo's own data, padded to its own length."""
    with at_silo(name):
        return stack.data(name)


def to_json(value: Any) -> Any:
    """A Survey, a Plan: numbers, words and tuples of them."""
    return codec.encode(value, _no_array)


def from_json(kind: type, node: Any) -> Any:
    found = codec.decode(node, _no_array)
    if type(found) is not kind:
        raise ValueError(f"a {kind.__name__} was expected")
    return found


def _no_array(leaf: Any) -> Any:
    raise PartitionError("what is agreed on has no arrays")


def reads_broadcast(algorithm: FederatedAlgorithm, received: Any, data: SiloData) -> bool:
    """Whether a silo's first state depends on what the server sends."""
    key = key_of(0)
    program = jax.make_jaxpr(partial(algorithm.init_silo, key))(received, data).jaxpr
    known = set(program.invars[: len(jax.tree.leaves(received))])
    for step in program.eqns:
        if any(not hasattr(var, "val") and var in known for var in step.invars):
            known.update(step.outvars)
    return any(not hasattr(var, "val") and var in known for var in program.outvars)
