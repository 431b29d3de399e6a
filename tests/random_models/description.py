"""What a random program is: a frozen value, and what is true of it.

A program has rows (one outcome each), further plates, latents in them, and one or two observed sites. From it
:mod:`~random_models.writing` makes both the model and the silos. Its truth is read off here, never off a trace.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Prior(NamedTuple):
    """A distribution as text. ``{loc}`` and ``{scale}`` are filled in; ``read`` makes one real number of a value."""

    text: str
    read: str
    support: str  # real, positive, bounded, vector, simplex, ordered, matrix, discrete
    values: int = 0  # of a discrete one


PRIORS = {
    "normal": Prior("dist.Normal({loc}, {scale})", "{v}", "real"),
    "student": Prior("dist.StudentT(4.0, {loc}, {scale})", "{v}", "real"),
    "laplace": Prior("dist.Laplace({loc}, {scale})", "{v}", "real"),
    "mixture": Prior(
        "dist.MixtureSameFamily(dist.Categorical(jnp.array([0.3, 0.7])), "
        "dist.Normal(jnp.array([-1.0, 1.0]), jnp.array([0.5, 1.0])))",
        "{v}",
        "real",
    ),
    "half normal": Prior("dist.HalfNormal({scale})", "jnp.log({v})", "positive"),
    "gamma": Prior("dist.Gamma(2.0, 2.0)", "jnp.log({v})", "positive"),
    "inverse gamma": Prior("dist.InverseGamma(3.0, 2.0)", "jnp.log({v})", "positive"),
    "log normal": Prior("dist.LogNormal({loc}, {scale})", "jnp.log({v})", "positive"),
    "transformed": Prior(
        "dist.TransformedDistribution(dist.Normal({loc}, {scale}), transforms.ExpTransform())", "{v}", "positive"
    ),
    "beta": Prior("dist.Beta(2.0, 3.0)", "{v}", "bounded"),
    "uniform": Prior("dist.Uniform(-1.0, 2.0)", "{v}", "bounded"),
    "bounds of a latent": Prior("dist.Uniform({loc}, {loc} + 2.0)", "{v}", "bounded"),
    "truncated": Prior("dist.TruncatedNormal({loc}, {scale}, low=-1.0, high=2.0)", "{v}", "bounded"),
    "vector": Prior("dist.Normal({loc}, {scale}).expand([2]).to_event(1)", "{v}.sum(-1)", "vector"),
    "correlated": Prior(
        "dist.MultivariateNormal(jnp.zeros(2), jnp.array([[1.0, 0.4], [0.4, 2.0]]))", "{v}[..., 0]", "vector"
    ),
    "walk": Prior("dist.GaussianRandomWalk({scale}, 3)", "{v}[..., 2]", "vector"),
    "zero sum": Prior("dist.ZeroSumNormal(1.0, (3,))", "{v}[..., 1]", "vector"),
    "simplex": Prior("dist.Dirichlet(jnp.array([1.0, 2.0, 3.0]))", "({v} * jnp.arange(1.0, 4.0)).sum(-1)", "simplex"),
    "ordered": Prior(
        "dist.TransformedDistribution(dist.Normal(0.0, 1.0).expand([3]).to_event(1), transforms.OrderedTransform())",
        "{v}[..., 1]",
        "ordered",
    ),
    "cholesky": Prior("dist.LKJCholesky(2, 2.0)", "{v}[..., 1, 0]", "matrix"),
    "categorical": Prior(
        "dist.Categorical(jnp.array([0.2, 0.3, 0.5]))", "jnp.array([-1.0, 0.3, 1.2])[{v}]", "discrete", 3
    ),
    "bernoulli": Prior("dist.Bernoulli(0.3)", "0.8 * {v}", "discrete", 2),
}
WITH_LOCATION = ("normal", "student", "laplace", "log normal", "transformed", "bounds of a latent", "truncated")
WITH_SCALE = ("normal", "student", "laplace", "half normal", "log normal", "transformed", "truncated", "walk")


class Family(NamedTuple):
    """A likelihood as text, with ``{eta}`` and ``{sigma}``; ``data`` says what is observed."""

    text: str
    data: str  # real, positive, unit, count, binary, class, pair


FAMILIES = {
    "normal": Family("dist.Normal({eta}, {sigma})", "real"),
    "student": Family("dist.StudentT(5.0, {eta}, {sigma})", "real"),
    "mixture": Family(
        "dist.MixtureSameFamily(dist.Categorical(jnp.array([0.4, 0.6])), "
        "dist.Normal(jnp.stack([{eta}, {eta} + 1.0], -1), {sigma}))",
        "real",
    ),
    "pairs": Family("dist.MultivariateNormal(jnp.stack([{eta}, -{eta}], -1), {sigma} * jnp.eye(2))", "pair"),
    "bernoulli": Family("dist.Bernoulli(logits={eta})", "binary"),
    "poisson": Family("dist.Poisson(jnp.exp(jnp.clip({eta}, -3.0, 3.0)))", "count"),
    "negative binomial": Family("dist.NegativeBinomial2(jnp.exp(jnp.clip({eta}, -3.0, 3.0)), 2.0)", "count"),
    "binomial": Family("dist.Binomial(4, logits={eta})", "count"),
    "gamma": Family("dist.Gamma(2.0, jnp.exp(jnp.clip({eta}, -3.0, 3.0)))", "positive"),
    "log normal": Family("dist.LogNormal({eta}, {sigma})", "positive"),
    "beta": Family("dist.BetaProportion(jax.nn.sigmoid({eta}), 3.0)", "unit"),
    "classes": Family("dist.Categorical(logits={eta}[..., None] * jnp.array([0.0, 1.0, -1.0]))", "class"),
    "ordinal": Family("dist.OrderedLogistic({eta}, jnp.array([-1.0, 1.0]))", "class"),
}


@dataclass(frozen=True)
class Plate:
    """A plate beside the rows."""

    name: str
    sizes: tuple[int, ...]  # one for each silo; where all silos share it, the same number
    by: str  # whence the model has its size: count, covariate (the silo's own); literal, shared, columns
    within: str = ""  # an own plate in which its elements lie: ``m[r_of_a]``
    outcome: bool = False  # something is observed for each of its elements
    answer: str = "local"  # what is typed where the library asks

    @property
    def own(self) -> bool:
        """Whether its size is an argument of the silos."""
        return self.by in ("count", "covariate")

    @property
    def asked(self) -> bool:
        """Shapes cannot tell: as many in every silo, and nothing observed along it."""
        return self.own and len(set(self.sizes)) == 1 and not self.outcome

    @property
    def local(self) -> bool:
        return self.own and not (self.asked and self.answer == "shared")


@dataclass(frozen=True)
class Latent:
    """A latent site: a prior, and the plates it stands in ("rows" among them)."""

    name: str
    prior: str
    plates: tuple[str, ...] = ()
    parent: str = ""  # its location
    spread: str = ""  # its scale, a positive global
    form: str = "centred"  # or "by hand", "LocScaleReparam"
    around: str = ""  # a handler around it: "scale", "mask"
    silo_level: bool = False  # one for each silo: it stands in no plate, and is named in local=
    read: bool = True

    @property
    def site(self) -> str:
        """The sample site, which is another one where the latent is reparametrised."""
        return self.name + {"centred": "", "by hand": "_raw", "LocScaleReparam": "_decentered"}[self.form]

    @property
    def discrete(self) -> bool:
        return PRIORS[self.prior].support == "discrete"


@dataclass(frozen=True)
class Program:
    """A model and its silos."""

    rows: tuple[int, ...]  # of each silo
    plates: tuple[Plate, ...]
    latents: tuple[Latent, ...]
    family: str = "normal"
    form: str = "plate"  # of the outcome: plate, bare, factor, mask, obs_mask, scale, weights, table, event
    sigma: str = ""  # a positive global
    param: bool = False
    covariate: bool = False  # of the rows, shared coefficients apart
    server_term: str = ""  # "factor" or "observed", of the first real global
    deterministic: bool = False
    spare: bool = False  # an argument that the model ignores, with lengths of its own
    flaw: str = ""  # what makes it impossible to split
    seed: int = 0  # of the data

    def plate(self, name: str) -> Plate:
        return next(plate for plate in self.plates if plate.name == name)

    def is_local(self, latent: Latent) -> bool:
        own = any(name == "rows" or self.plate(name).local for name in latent.plates)
        return own or latent.silo_level

    @property
    def ragged(self) -> bool:
        return len(set(self.rows)) > 1

    @property
    def asks(self) -> bool:
        return any(plate.asked for plate in self.plates)

    @property
    def options(self) -> dict[str, list[str]]:
        """local= and shared=, with the answers to what the library has to ask."""
        silo_level = [latent.site for latent in self.latents if latent.silo_level]
        asked = [plate for plate in self.plates if plate.asked]
        local = silo_level + [plate.name for plate in asked if plate.answer == "local"]
        shared = [plate.name for plate in asked if plate.answer == "shared"]
        return {key: names for key, names in (("local", local), ("shared", shared)) if names}


class Truth(NamedTuple):
    """Where each site lives."""

    global_sites: frozenset[str]
    local_sites: frozenset[str]
    enumerated_sites: frozenset[str]
    observed_sites: frozenset[str]
    params: frozenset[str]
    server_terms: frozenset[str]  # observed sites that are counted once, at the server


def truth(program: Program) -> Truth:
    """Of a program without a flaw."""
    of = lambda keep: frozenset(latent.site for latent in program.latents if keep(latent))
    outcome = {"y_observed"} if program.form == "obs_mask" else {"y"}
    missing = frozenset({"y_unobserved"} if program.form == "obs_mask" else ())
    binary = FAMILIES[program.family].data == "binary"
    outcomes = {f"v_{plate.name}" for plate in program.plates if plate.outcome}
    server = frozenset({"soft"} if program.server_term else ())
    return Truth(
        of(lambda latent: not program.is_local(latent)),
        of(lambda latent: program.is_local(latent) and not latent.discrete) | (frozenset() if binary else missing),
        of(lambda latent: program.is_local(latent) and latent.discrete) | (missing if binary else frozenset()),
        frozenset(outcome | outcomes) | server,
        frozenset({"shift"} if program.param else ()),
        server,
    )


# What a flawed program is refused for, as the message says it.
FLAWS = {
    "prior of data": "depends on the silo's own argument",
    "global of local": "Global sites must not depend on local ones",
    "discrete global": "is discrete .* and global",
    "event of rows": "in one event",
    "broadcast": "broadcast to n x n|they would broadcast|would be counted",
    "mean of rows": "mixes rows|rows .* are combined",
}

# What cannot be summed out, as the message says it: a joint event of rows, or latents whose rows differ.
DISCRETE_LIMITS = "|".join(
    (
        "depends on more than one element of a discrete latent",
        "cannot be summed out row by row",
        "lie in crossed plates and meet",
    )
)
