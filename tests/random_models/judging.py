"""The law of a random program: its partition is right, or the library asks; its split is NumPyro's own density."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers

import numpyro_fed as nf
from numpyro_fed.data.stack import stack_of
from numpyro_fed.model.build import split_model
from numpyro_fed.model.certificate import certify
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import unoptimised

from .description import DISCRETE_LIMITS, FLAWS, Program, Truth, truth
from .oracle import Values, joint, server, shapes
from .writing import Written, write

DISCRETE = "discrete latents"  # a limit of the library, which it tells
DIGITS = 1e-10  # of a density, in float64


class Outcome(NamedTuple):
    """What became of a program."""

    kind: str  # right, asked, refused, wrong
    why: str = ""
    written: Written | None = None


class Densities(NamedTuple):
    """Of all silos, in the order of their names."""

    prior: Any  # the server's term, ours
    silo: tuple[Any, ...]  # log_silo, ours, padded as the silo lies in its bucket
    joint: tuple[Any, ...]  # NumPyro's, of each silo with the server's terms
    server: Any  # NumPyro's own server's terms, as the first silo sees them


def judge(program: Program, certificate: bool = False) -> Outcome:
    """Split the program and compare; ``certificate``: as a run does, with the library's own checks."""
    written = write(program)
    model, silos = written.model, written.silos()
    told = {"local": [one.site for one in program.latents if one.silo_level]}
    asked = False
    if program.asks and not program.flaw:
        try:
            if _roles(nf.partition(model, silos, **told), truth(program)):  # right or asks
                return Outcome("wrong", "did not ask", written)
        except nf.PartitionError as error:
            asked = "Type local=[" in str(error) and "shared=[" in str(error)
            if not asked:
                return Outcome("refused", f"unexpected: {error}", written)
    try:
        split = split_model(model, silos, **written.options, check=certificate or program.flaw == "mean of rows")
    except nf.PartitionError as error:
        return Outcome("refused", _reason(program, error), written)
    if program.flaw:
        return Outcome("wrong", f"flaw not found: {program.flaw}", written)
    differs = _roles(split.partition, truth(program))
    if not differs and program.seed % 3 == 0:
        differs = _same_backwards(written, model, split)
    if differs:
        return Outcome("wrong", differs, written)
    differs = _densities(program, written, model, silos, split)
    failed = certify(split, silos) if differs else None  # a run asks for the certificate before it begins
    if failed:
        return Outcome("refused", _reason(program, failed), written)
    return Outcome("wrong", differs, written) if differs else Outcome("asked" if asked else "right", "", written)


def _reason(program: Program, error: Exception) -> str:
    """Why a program was refused: its flaw, a limit, or something that was not expected."""
    found = truth(program)
    if program.flaw and re.search(FLAWS[program.flaw], str(error)):
        return program.flaw
    if found.enumerated_sites and re.search(DISCRETE_LIMITS, str(error)):
        return DISCRETE
    return f"unexpected: {error}"


def _roles(part: nf.Partition, expected: Truth) -> str:
    once = {s.name for s in part.sites if s.at_server and s.role in ("observed", "factor")}
    found = Truth(
        *(
            frozenset(names)
            for names in (
                part.global_sites,
                part.local_sites,
                part.enumerated_sites,
                part.observed_sites,
                part.params,
                once,
            )
        )
    )
    wrong = [
        f"{field}: {sorted(ours)}, expected {sorted(theirs)}"
        for field, ours, theirs in zip(Truth._fields, found, expected, strict=True)
        if ours != theirs
    ]
    return "; ".join(wrong)


def _same_backwards(written: Written, model: Any, split: SplitModel) -> str:
    """The order of silos changes nothing."""
    part = nf.partition(model, written.silos(backwards=True), **written.options)
    at = lambda one: sorted((site.name, site.role, site.at_server, site.axes) for site in one.sites)
    return "" if at(part) == at(split.partition) else "another partition with the silos in another order"


def _densities(program: Program, written: Written, model: Any, silos: nf.Silos, split: SplitModel) -> str:
    expected = truth(program)
    draws = np.random.default_rng(program.seed)
    noise = lambda shape: np.asarray(0.5 * draws.normal(size=shape))
    known = {name: shapes(model, silos[name]) for name in silos.names}
    one = silos.names[0]
    common = {name: noise(known[one][0][name]) for name in sorted(expected.global_sites)}
    local = {
        silo: {name: noise(shape) for name, shape in sorted(known[silo][0].items()) if name not in common}
        for silo in silos.names
    }
    params = {name: noise(()) for name in sorted(expected.params)}
    stack = stack_of(silos, silos, split.spec, split.partition.axes)
    padded = {name: stack.data(name) for name in silos.names}
    plain = {
        name: {axis.name: np.ones(axis.lengths[name], bool) for axis in split.partition.axes} for name in silos.names
    }
    real = {
        name: {group.name: np.asarray(split.row_mask(group, padded[name].mask)) for group in split.groups}
        for name in silos.names
    }

    def evaluate(common: Values, local: dict[str, Values], params: Values) -> Densities:
        z = split.ravel(common)
        rows = {name: split.pack(local[name], plain[name]) for name in silos.names}
        wide = {name: _widened(rows[name], real[name]) for name in silos.names}
        ignored = {name: _ignored(program, written.own[name]) for name in silos.names}
        return Densities(
            split.log_prior(z, params),
            tuple(split.log_silo(z, wide[name], params, padded[name]) for name in silos.names),
            tuple(
                joint(model, silos[name], common | local[name], params, known[name][1], ignored[name])
                for name in silos.names
            ),
            server(_without_discrete(model, known[one][1]), silos[one], common | local[one], params, expected),
        )

    found = jax.jit(evaluate, compiler_options=unoptimised())(common, local, params)
    return _compare(found, silos.names)


def _without_discrete(model: Any, discrete: dict) -> Any:
    values = {name: jnp.zeros(shape, jnp.int32) for name, (shape, _) in discrete.items()}
    return handlers.substitute(model, data=values) if values else model


def _ignored(program: Program, own: dict[str, Any]) -> float:
    """Elements of a binary outcome that are there: their place among the missing ones counts for nothing."""
    if "y_unobserved" not in truth(program).enumerated_sites:
        return 0.0
    return float(np.sum(own["present"]) * np.log(2.0))


def _widened(rows: dict[str, Any], real: dict[str, np.ndarray]) -> dict[str, Any]:
    """z_L with numbers of no meaning in the padded rows."""
    draws = np.random.default_rng(1)
    noise = {group: jnp.asarray(draws.normal(size=(len(where), rows[group].shape[1]))) for group, where in real.items()}
    return {group: noise[group].at[np.flatnonzero(where)].set(rows[group]) for group, where in real.items()}


def _compare(found: Densities, names: tuple[str, ...]) -> str:
    near = lambda ours, theirs: np.isfinite(theirs) and abs(ours - theirs) <= DIGITS * (1 + abs(theirs))
    if not near(found.prior, found.server):
        return f"log_prior is {found.prior}, NumPyro's server terms are {found.server}"
    for name, own, whole in zip(names, found.silo, found.joint, strict=True):
        if not near(found.prior + own, whole):
            return f"silo {name}: log_prior + log_silo, padded, is {found.prior + own}, NumPyro's {whole}"
    return ""
