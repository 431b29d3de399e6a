"""What a verdict looks at beside the density of the globals around q: locals, other modes, theta.

A look is what the check found (kept with the fit), and says by itself whether it is a reason to doubt a posterior.
"""

from typing import Any, NamedTuple

import numpy as np

SOME = 0.05  # of a plate's rows that may have locals far from their conditional
MASS = 0.05  # of another mode, in units of q's own
FAR = 4.0  # sds from q, nearer to which it is no other mode
OFF = 0.3  # Fisher sds that theta may be off
SHOWN = 4  # scalars of a mode that are told


class LocalLook(NamedTuple):
    """Of one local plate: importance weights of its rows' locals, given the globals."""

    pareto_k: float  # of the worst row
    low_share: float  # of the rows, those whose weights have an effective share below .1
    by_row: bool  # rows were weighed one by one; else each silo's locals together


class ModesLook(NamedTuple):
    """Maxima of the density with locals integrated out, where searches ended; n of them."""

    log_mass: Any  # (n,): Laplace's
    distance: Any  # (n,): from q, in sds of q or of the mode itself, whichever are larger
    own_log_mass: float  # of q's own
    num_searches: int
    num_ended: int  # those that came to an end, or to where q is
    apart: float = 0.0  # how far two of the maxima are from one another, at most, in their own sds
    where: str = ""  # the heaviest of those that are far from q: its constrained globals

    @property
    def share(self) -> np.ndarray:
        """Masses in units of q's own."""
        return np.exp(np.minimum(np.asarray(self.log_mass) - self.own_log_mass, 7.0))

    @property
    def other(self) -> int | None:
        """The heaviest mode that is another one, and not negligible."""
        share = np.where(np.asarray(self.distance) > FAR, self.share, 0.0)
        return int(np.argmax(share)) if np.any(share >= MASS) else None


class ThetaLook(NamedTuple):
    """Where the evidence would be largest, as a Newton step of theta in Fisher sds; (p,)."""

    step: Any
    error: Any  # Monte Carlo, in the same units
    names: tuple[str, ...]


class Looks(NamedTuple):
    """All of them; a text says why there is none."""

    local: Any = ()  # {plate: LocalLook}, or a text
    modes: Any = ""  # ModesLook, or a text
    theta: Any = ""  # ThetaLook, or a text; "" where the model has none

    def by_plate(self) -> dict[str, LocalLook]:
        return self.local if isinstance(self.local, dict) else {}

    def reasons(self) -> tuple[str, ...]:
        """Why the posterior is to be doubted, and what to type."""
        found = [_local(plate, look) for plate, look in self.by_plate().items()]
        if not isinstance(self.modes, str):
            found.append(_modes(self.modes))
        if not isinstance(self.theta, str):
            found.append(_theta(self.theta))
        return tuple(reason for reason in found if reason)

    def notes(self) -> tuple[str, ...]:
        """What was not looked at, and how it came out where it was."""
        told = [look for look in (self.local, self.modes, self.theta) if isinstance(look, str) and look]
        for plate, look in self.by_plate().items():
            each = "rows" if look.by_row else "silos"
            told.append(
                f"locals of {plate!r}: worst Pareto k {look.pareto_k:.2g}; {look.low_share:.1%} of {each} have draws "
                "with an effective share below .1"
            )
        if not isinstance(self.modes, str):
            told.append(f"{self.modes.num_ended} of {self.modes.num_searches} searches for other modes came to an end")
            if self.modes.other is None and self.modes.apart > FAR:
                told.append(
                    f"there are modes {self.modes.apart:.0f} of their own sds apart within the posterior's reach: it "
                    "has their mean and sds, and fit.correct(key) has their shape"
                )
        return tuple(told)


def _local(plate: str, look: LocalLook) -> str:
    """Together the locals of a silo are many, and weights of many are uneven though each is nearly right."""
    if not look.by_row or look.low_share <= SOME:
        return ""
    return (
        f"locals of plate {plate!r}: in {look.low_share:.0%} of its rows q(z_L | z_G) is far from the conditional "
        f"(weights with an effective share below .1; worst Pareto k {look.pareto_k:.1f}), so do not use "
        "fit.sample_local, or predict with silo=: fit with nf.EP, or with nf.SFVI and a guide whose local_cov is "
        "'block' or 'full', and run more rounds"
    )


def _modes(look: ModesLook) -> str:
    if look.other is None:
        return ""
    return (
        f"there is another mode, {look.distance[look.other]:.0f} sds away, at {look.where}, with about "
        f"{look.share[look.other]:.2g} times the mass of the one that was found. Where parameters can change places or "
        "signs, let the model order them (numpyro.distributions.transforms.OrderedTransform, or a HalfNormal in the "
        "place of a Normal); else start there, init_loc_fn=numpyro.infer.init_to_value(values=...), and compare"
    )


def told(values: dict[str, float]) -> str:
    """Some scalars, by name.

    >>> told({"a": 1.0, "b": -0.25})
    'a = 1, b = -0.25'
    """
    some = list(values.items())[:SHOWN]
    return ", ".join(f"{name} = {value:.3g}" for name, value in some) + ", ..." * (len(values) > SHOWN)


def _theta(look: ThetaLook) -> str:
    step, error = np.abs(look.step), np.asarray(look.error)
    worst = int(np.argmax(step - 2 * error))
    if step[worst] - 2 * error[worst] <= OFF:
        return ""
    return (
        f"the evidence is largest {look.step[worst]:+.2g} standard errors away in {look.names[worst]} (numpyro.param): "
        "run more rounds, or raise importance_samples="
    )
