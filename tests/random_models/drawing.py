"""Programs, drawn by Hypothesis: small ones first, so that a failing case shrinks to a few lines."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from .description import FAMILIES, PRIORS, WITH_LOCATION, WITH_SCALE, Latent, Plate, Program

Draw = Any
CONTINUOUS = [name for name, prior in PRIORS.items() if prior.support != "discrete"]
DISCRETE = [name for name, prior in PRIORS.items() if prior.support == "discrete"]
REAL = ["normal", "student", "laplace"]
POSITIVE = [name for name, prior in PRIORS.items() if prior.support == "positive"]
FORMS = ["plate", "bare", "factor", "mask", "obs_mask", "scale", "weights", "table", "event"]
MOST_VALUES = 256  # joint values of a silo's discrete latents, which the oracle goes through


@st.composite
def programs(draw: Draw, flawed: bool = True) -> Program:
    """A random program; one in ten or so has a flaw, where ``flawed``."""
    rows = draw(st.sampled_from([(2, 3), (3,), (2, 2), (3, 1), (1, 1), (4, 2, 3), (2, 3, 2)]))
    plates = draw(_plates(len(rows)))
    latents = draw(_latents(plates))
    family = draw(st.sampled_from(list(FAMILIES)))
    form = draw(_form(rows, plates, family))
    globals_ = [latent for latent in latents if not latent.plates and not latent.silo_level]
    positive = [latent.name for latent in globals_ if latent.prior in POSITIVE and latent.form == "centred"]
    program = Program(
        rows,
        plates,
        latents,
        family,
        form,
        sigma=draw(st.sampled_from(["", *positive])),
        param=draw(st.booleans()),
        covariate=draw(st.booleans()),
        server_term=draw(st.sampled_from(["", "factor", "observed"])) if globals_ else "",
        deterministic=draw(st.booleans()),
        spare=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )
    assume(_enumerated(program) <= MOST_VALUES)
    flaw = draw(_flaw(program)) if flawed else ""
    return program if not flaw else _with_flaw(program, flaw)


def _enumerated(program: Program) -> int:
    """Joint values of the discrete latents of the silo that has most."""
    most = 1
    for j, n in enumerate(program.rows):
        found = 2**n if program.form == "obs_mask" and FAMILIES[program.family].data == "binary" else 1
        for latent in program.latents:
            if latent.discrete:
                sizes = [n if name == "rows" else program.plate(name).sizes[j] for name in latent.plates]
                found *= PRIORS[latent.prior].values ** math.prod(sizes)
        most = max(most, found)
    return most


@st.composite
def _plates(draw: Draw, num: int) -> tuple[Plate, ...]:
    found: list[Plate] = []
    if draw(st.booleans()):
        by = draw(st.sampled_from(["literal", "shared", "columns"]))
        found.append(Plate("items", (draw(st.sampled_from([3, 2])),) * num, by))
    for name in ("group", "region")[: draw(st.sampled_from([1, 0, 2]))]:
        size = st.integers(1, 3)
        equal = draw(st.sampled_from([False, False, True]))
        sizes = (draw(size),) * num if equal else tuple(draw(size) for _ in range(num))
        by = draw(st.sampled_from(["count", "covariate"]))
        outcome = draw(st.sampled_from([False, False, True]))
        found.append(Plate(name, sizes, by, outcome=outcome))
    if [plate.name for plate in found[-2:]] == ["group", "region"] and draw(st.booleans()):
        group, region = found[-2:]
        found[-2:] = [region, Plate(group.name, group.sizes, group.by, "region", group.outcome)]
    # one kind for all silos is an answer, too, but not where the silo's own data are in the prior
    answer = lambda plate: draw(st.sampled_from(["local", "shared"]))
    return tuple(
        Plate(p.name, p.sizes, p.by, p.within, p.outcome, answer(p))
        if p.asked and p.by == "count" and not p.within
        else p
        for p in found
    )


@st.composite
def _latents(draw: Draw, plates: Sequence[Plate]) -> tuple[Latent, ...]:
    found: list[Latent] = []

    def add(name: str, prior: str, where: tuple[str, ...] = (), parents: Sequence[str] = (), **options: Any) -> None:
        positive = [one.name for one in found if not one.plates and not one.silo_level and one.prior in POSITIVE]
        located = prior in WITH_LOCATION and bool(parents)
        forms = ["centred", "by hand", "LocScaleReparam"] if prior in REAL else ["centred"]
        shape = PRIORS[prior].support
        found.append(
            Latent(
                name,
                prior,
                where,
                draw(st.sampled_from(["", *parents])) if located else "",
                draw(st.sampled_from(["", *positive])) if prior in WITH_SCALE and shape != "vector" else "",
                draw(st.sampled_from(forms)),
                read=draw(st.sampled_from([True, True, True, False])),
                **options,
            )
        )

    add("mu", draw(st.sampled_from(REAL)))
    if draw(st.booleans()):
        add("tau", draw(st.sampled_from(POSITIVE)))
    if draw(st.booleans()):
        add("extra", draw(st.sampled_from(CONTINUOUS)), parents=("mu",))
    shared_answer = {plate.name for plate in plates if plate.own and not plate.local}
    for plate in plates:
        priors = CONTINUOUS if not plate.local else CONTINUOUS + DISCRETE
        prior = draw(st.sampled_from(priors))
        parents = ["mu"]
        if plate.within:
            parents += [one.name for one in found if one.plates == (plate.within,) and not one.discrete]
            prior = draw(st.sampled_from(REAL))
        around = draw(st.sampled_from(["", "", "scale"])) if prior in REAL else ""
        add(f"z_{plate.name}", prior, (plate.name,), parents, around=around)
    if draw(st.booleans()):
        prior = draw(st.sampled_from(CONTINUOUS + DISCRETE))
        around = draw(st.sampled_from(["", "", "scale", "mask"])) if prior in REAL else ""
        add("b", prior, ("rows",), ("mu",), around=around)
    names = ["rows", *(plate.name for plate in plates)]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]] + [(b, "rows") for b in names[1:]]
    pairs = [pair for pair in pairs if not (set(pair) & shared_answer and "rows" in pair)]
    if pairs and draw(st.booleans()):
        add("both", draw(st.sampled_from(CONTINUOUS)), draw(st.sampled_from(pairs)), ("mu",))
    if draw(st.sampled_from([False, False, True])):
        add("own", draw(st.sampled_from(CONTINUOUS + DISCRETE)), (), ("mu",), silo_level=True)
    return tuple(found)


@st.composite
def _form(draw: Draw, rows: tuple[int, ...], plates: Sequence[Plate], family: str) -> str:
    fits = {
        "obs_mask": FAMILIES[family].data in ("real", "positive", "unit", "binary"),
        "table": bool(plates) and not plates[0].own,
        "event": len(set(rows)) == 1,
    }
    return draw(st.sampled_from([form for form in FORMS if fits.get(form, True)]))


@st.composite
def _flaw(draw: Draw, program: Program) -> str:
    if draw(st.integers(0, 9)) < 9:
        return ""
    plain = program.form == "plate" and FAMILIES[program.family].data == "real" and program.ragged
    local = any(program.is_local(latent) and not latent.discrete for latent in program.latents)
    fits = {
        "prior of data": True,
        "global of local": local,
        "discrete global": True,
        "event of rows": plain,
        "broadcast": plain and min(program.rows) > 1,
        "mean of rows": plain,
    }
    return draw(st.sampled_from([flaw for flaw, possible in fits.items() if possible]))


def _with_flaw(program: Program, flaw: str) -> Program:
    """What would be asked is told, so that only the flaw is in the way."""
    return Program(**{**vars(program), "flaw": flaw})


def drawn(number: int, first_seed: int = 0, flawed: bool = True) -> list[Program]:
    """Different programs, the same ones every time. Hypothesis varies what it has drawn, and short series vary more."""
    found: dict[Program, None] = {}
    series = settings(
        max_examples=10, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    for start in itertools.count(first_seed):
        seed(start)(series(given(programs(flawed))(lambda program: found.setdefault(program))))()
        if len(found) >= number:
            return list(found)[:number]
    return []
