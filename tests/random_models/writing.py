"""A program as readable Python: the model that is run is the text that is shown."""

import textwrap
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import transforms
from numpyro.infer.reparam import LocScaleReparam

import numpyro_fed as nf

from .description import FAMILIES, PRIORS, WITH_LOCATION, WITH_SCALE, Latent, Plate, Program

HEAD = """\
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.distributions import transforms
from numpyro.infer.reparam import LocScaleReparam

import numpyro_fed as nf
"""
NAMES = dict(
    jax=jax,
    jnp=jnp,
    np=np,
    numpyro=numpyro,
    dist=dist,
    handlers=handlers,
    transforms=transforms,
    LocScaleReparam=LocScaleReparam,
    nf=nf,
)


class Written(NamedTuple):
    """A program's model, and its silos' arguments."""

    source: str  # of the model
    own: dict[str, dict[str, Any]]
    shared: dict[str, Any]
    options: dict[str, list[str]]

    @property
    def model(self) -> Any:
        made: dict[str, Any] = dict(NAMES)
        exec(compile(self.source, "<random model>", "exec"), made)
        return made["model"]

    def silos(self, backwards: bool = False) -> nf.Silos:
        """In the precision of the moment."""
        names = list(self.own)[:: -1 if backwards else 1]
        return nf.Silos(
            {name: {key: _ready(value) for key, value in self.own[name].items()} for name in names},
            shared={key: _ready(value) for key, value in self.shared.items()},
        )

    def __str__(self) -> str:
        """To paste and run."""
        silos = "".join(f"    {name!r}: dict({_arguments(args)}),\n" for name, args in self.own.items())
        shared = f", shared=dict({_arguments(self.shared)})" if self.shared else ""
        options = "".join(f", {key}={value!r}" for key, value in self.options.items())
        return (
            f"{HEAD}\n\n{self.source}\n\nsilos = nf.Silos({{\n{silos}}}{shared})\n"
            f"print(nf.partition(model, silos{options}))\n"
        )


def _ready(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        return value.astype(jnp.zeros(()).dtype)
    return value


def _arguments(args: dict[str, Any]) -> str:
    show = lambda value: f"np.array({value.tolist()!r})" if isinstance(value, np.ndarray) else repr(value)
    return ", ".join(f"{name}={show(value)}" for name, value in args.items())


# --- data -----------------------------------------------------------------------------------------------------------


def _observations(draws: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    if kind == "pair":
        shape = (*shape, 2)
    match kind:
        case "real" | "pair":
            return draws.normal(size=shape).round(2)
        case "positive":
            return (0.2 + draws.gamma(2.0, size=shape)).round(2)
        case "unit":
            return draws.uniform(0.1, 0.9, size=shape).round(2)
        case "binary":
            return draws.integers(0, 2, shape)
        case "class":
            return draws.integers(0, 3, shape)
        case _:
            return draws.integers(0, 5, shape)


def _data(program: Program, j: int) -> dict[str, Any]:
    """The own arguments of silo j; the model takes those that it uses, and a spare one."""
    draws = np.random.default_rng([program.seed, j])
    n = program.rows[j]
    table = program.form == "table"
    shape = (n, program.plates[0].sizes[0]) if table else (n,)
    out: dict[str, Any] = {"y": _observations(draws, FAMILIES[program.family].data, shape)}
    if program.flaw == "broadcast":
        out["y"] = out["y"][:, None]
    out["x"] = draws.normal(size=n).round(2)
    out["present"] = draws.uniform(size=n) < 0.7
    out["weight"] = draws.uniform(0.5, 2.0, size=n).round(2)
    out["spare"] = draws.normal(size=(n * 2 + j) % 5 + 1).round(2)
    for plate in program.plates:
        size = plate.sizes[j]
        out[f"at_{plate.name}"] = draws.integers(0, size, n)
        out[f"num_{plate.name}"] = size
        out[f"u_{plate.name}"] = draws.normal(size=size).round(2)
        out[f"x_{plate.name}"] = draws.normal(size=(n, size)).round(2)
        out[f"v_{plate.name}"] = draws.normal(size=size).round(2)
        if plate.within:
            out[f"{plate.within}_of_{plate.name}"] = draws.integers(0, program.plate(plate.within).sizes[j], size)
    return out


# --- the model ------------------------------------------------------------------------------------------------------


def write(program: Program) -> Written:
    body = _body(program)
    taken = [_data(program, j) for j in range(len(program.rows))]
    counts = [f"num_{plate.name}" for plate in program.plates if plate.by == "shared"]
    used = [name for name in taken[0] if _uses(body, name) or (name == "spare" and program.spare)]
    own = {f"s{j}": {name: args[name] for name in used if name not in counts} for j, args in enumerate(taken)}
    shared = {name: taken[0][name] for name in counts if name in used}
    source = f"def model({', '.join(used)}):\n" + textwrap.indent("\n".join(body), "    ")
    return Written(source, own, shared, program.options)


def _uses(body: list[str], name: str) -> bool:
    word = lambda line: "".join(c if c.isalnum() or c == "_" else " " for c in line).split()
    return any(name in word(line) for line in body)


def _size(plate: Plate) -> str:
    return {
        "count": f"num_{plate.name}",
        "shared": f"num_{plate.name}",
        "covariate": f"u_{plate.name}.shape[0]",
        "literal": str(plate.sizes[0]),
        "columns": f"x_{plate.name}.shape[1]",
    }[plate.by]


def _body(program: Program) -> list[str]:
    pairs = [latent.plates for latent in program.latents if len(latent.plates) == 2]
    left = {first for first, _ in pairs} | ({"rows"} if program.form == "table" else set())
    lines = ['rows = numpyro.plate("rows", y.shape[0], dim=-1)'] if _needs_rows(program) else []
    if "rows" in left:
        lines.append('rows_ = numpyro.plate("rows_", y.shape[0], dim=-2)')
    for plate in program.plates:
        lines.append(f'{plate.name} = numpyro.plate("{plate.name}", {_size(plate)}, dim=-1)')
        if plate.name in left:
            lines.append(f'{plate.name}_ = numpyro.plate("{plate.name}_", {_size(plate)}, dim=-2)')
    if program.param:
        lines.append('shift = numpyro.param("shift", 0.1)')
    for latent in program.latents:
        lines += _latent(program, latent)
    lines += _flawed(program)
    lines += _server_term(program)
    for plate in program.plates:
        if plate.outcome:
            reads = [_read(latent, latent.name) for latent in program.latents if latent.plates == (plate.name,)]
            mean = " + ".join(["0.1", *reads])
            lines.append(f"with {plate.name}:")
            lines.append(f'    numpyro.sample("v_{plate.name}", dist.Normal({mean}, 1.0), obs=v_{plate.name})')
    return lines + _outcome(program)


def _needs_rows(program: Program) -> bool:
    in_rows = any(latent.plates in (("rows",),) or latent.plates[1:] == ("rows",) for latent in program.latents)
    return in_rows or program.form in ("plate", "mask", "obs_mask", "scale", "weights")


def _context(latent: Latent) -> str:
    around = {
        "scale": ["handlers.scale(scale=0.5)"],
        "mask": ["handlers.mask(mask=present)"],
        "": [],
    }[latent.around]
    if latent.form == "LocScaleReparam":
        df = ', shape_params=["df"]' if latent.prior == "student" else ""
        around.append(f'handlers.reparam(config={{"{latent.name}": LocScaleReparam(0.0{df})}})')
    plates = list(latent.plates) if len(latent.plates) < 2 else [f"{latent.plates[0]}_", latent.plates[1]]
    inside = around + plates
    return f"with {', '.join(inside)}:" if inside else ""


def _location(program: Program, latent: Latent) -> str:
    found = []
    if latent.parent:
        parent = next(other for other in program.latents if other.name == latent.parent)
        index = f"[{parent.plates[0]}_of_{latent.plates[0]}]" if _nested(program, latent, parent) else ""
        found.append(_read(parent, parent.name + index))
    for name in latent.plates:
        if name != "rows" and len(latent.plates) == 1 and program.plate(name).by == "covariate":
            found.append(f"u_{name}")
    return " + ".join(found) or "0.0"


def _nested(program: Program, latent: Latent, parent: Latent) -> bool:
    return bool(parent.plates) and parent.plates != latent.plates


def _read(latent: Latent, value: str) -> str:
    return PRIORS[latent.prior].read.replace("{v}", value)


def _prior(program: Program, latent: Latent) -> tuple[str, str, str]:
    location = _location(program, latent) if latent.prior in WITH_LOCATION else "0.0"
    spread = latent.spread if latent.spread and latent.prior in WITH_SCALE else "1.0"
    filled = lambda loc, scale: PRIORS[latent.prior].text.replace("{loc}", loc).replace("{scale}", scale)
    if latent.form == "by hand":
        return filled("0.0", "1.0"), location, spread
    return filled(location, spread), location, spread


def _latent(program: Program, latent: Latent) -> list[str]:
    prior, location, spread = _prior(program, latent)
    context = _context(latent)
    if latent.form == "by hand":
        lines = [f'{latent.site} = numpyro.sample("{latent.site}", {prior})']
        after = [f'{latent.name} = numpyro.deterministic("{latent.name}", {location} + {spread} * {latent.site})']
    else:
        lines, after = [f'{latent.name} = numpyro.sample("{latent.name}", {prior})'], []
    if context:
        lines = [context, *(f"    {line}" for line in lines)]
    return lines + after


def _flawed(program: Program) -> list[str]:
    match program.flaw:
        case "prior of data":
            return ['bad = numpyro.sample("bad", dist.Normal(y.mean(), 1.0))']
        case "global of local":
            local = next(latent for latent in program.latents if program.is_local(latent) and not latent.discrete)
            return [f'bad = numpyro.sample("bad", dist.Normal({_read(local, local.name)}.sum(), 1.0))']
        case "discrete global":
            return ['bad = numpyro.sample("bad", dist.Categorical(jnp.array([0.2, 0.8])))']
        case _:
            return []


def _server_term(program: Program) -> list[str]:
    if not program.server_term:
        return []
    first = next(latent for latent in program.latents if not program.is_local(latent))
    value = f"jnp.sum({_read(first, first.name)})"
    if program.server_term == "factor":
        return [f'numpyro.factor("soft", -0.5 * {value} ** 2)']
    return [f'numpyro.sample("soft", dist.Normal({value}, 2.0), obs=0.3)']


def _in_rows(program: Program, latent: Latent) -> str:
    """One real number for each row, (n,), or one for all."""
    at = {plate.name: f"at_{plate.name}" for plate in program.plates}
    if len(latent.plates) == 2:
        first, second = latent.plates
        index = ["jnp.arange(y.shape[0])" if name == "rows" else at[name] for name in latent.plates]
        if second != "rows" and program.plate(second).by == "columns":
            read = _read(latent, latent.name if first == "rows" else f"{latent.name}[{at[first]}]")
            return f"(x_{second} * {read}).sum(-1)"
        return _read(latent, f"{latent.name}[{', '.join(index)}]")
    if not latent.plates or latent.plates == ("rows",):
        return _read(latent, latent.name)
    (name,) = latent.plates
    if program.plate(name).by == "columns":
        return f"x_{name} @ {_read(latent, latent.name)}"
    return _read(latent, f"{latent.name}[{at[name]}]")


def _outcome(program: Program) -> list[str]:
    table = program.form == "table"
    items = program.plates[0].name if table else ""
    reads = [
        _in_rows(program, latent)
        for latent in program.latents
        if latent.read and latent.name != program.sigma and latent.plates != (items,)
    ]
    parts = ["0.2 + jnp.zeros(y.shape[0])", *reads]
    parts += ["0.5 * x"] * program.covariate + ["shift"] * program.param + ["bad"] * (program.flaw == "prior of data")
    lines = [f"eta = {' + '.join(parts)}"]
    if program.deterministic:
        lines.append('numpyro.deterministic("eta", eta)')
    if table:
        along = [_read(latent, latent.name) for latent in program.latents if latent.plates == (items,) and latent.read]
        lines.append(f"eta = {' + '.join(['eta[:, None]', *along, 'jnp.zeros(y.shape[1])'])}")
    fill = lambda eta: FAMILIES[program.family].text.replace("{eta}", eta).replace("{sigma}", program.sigma or "1.0")
    family, observed = fill("eta"), "y"
    if program.flaw == "mean of rows":
        observed = "y - y.mean()"
    if program.flaw == "event of rows" or program.form == "event":
        return [*lines, f'numpyro.sample("y", {family}.to_event(1), obs={observed})']
    sample = f'numpyro.sample("y", {family}, obs={observed})'
    match program.form:
        case "plate":
            return [*lines, "with rows:", f"    {sample}"]
        case "table":
            return [*lines, f"with rows_, {items}:", f"    {sample}"]
        case "bare":
            return [*lines, sample]
        case "factor":
            return [*lines, f'numpyro.factor("y", {family}.log_prob({observed}))']
        case "mask":
            return [*lines, "with rows, handlers.mask(mask=present):", f"    {sample}"]
        case "scale":
            return [*lines, "with rows, handlers.scale(scale=2.0):", f"    {sample}"]
        case "weights":
            return [*lines, "with rows, handlers.scale(scale=weight):", f"    {sample}"]
        case _:
            return [*lines, "with rows:", f'    numpyro.sample("y", {family}, obs=y, obs_mask=present)']
