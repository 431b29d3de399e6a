"""Simulation-based calibration: would a method be right on data such as these, if the model were?

Draw globals from the prior, and from the model the data that the user's own silos would have had, with their sizes and
covariates. Run the method on them, as it is, and look where the truth lies among its draws. Over many such data sets
that is a uniform rank if posteriors are right (Talts et al. 2018), whatever the model.

All simulations have the same shapes, so the programs of a run are compiled for the first of them and serve all.
"""

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from tqdm.auto import tqdm

from numpyro_fed.checks import check_count, check_key
from numpyro_fed.data.silos import Silos
from numpyro_fed.host import folded
from numpyro_fed.judge.calibration import Calibration
from numpyro_fed.judge.fixed import fixed_theta
from numpyro_fed.judge.ranked import Posteriors
from numpyro_fed.judge.sbc_file import Done, SimulationFile, about
from numpyro_fed.keys import digest
from numpyro_fed.model.build import split_model
from numpyro_fed.model.simulate import Simulated, Simulator
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.model.trace import Model

Array = jax.Array
GIVEN, RUN = digest("\0sbc given"), digest("\0sbc run")
GIVE_UP = 5  # simulations, all of which failed, after which there is an error to mend first
EVERY = 5.0  # seconds between two writes of the file
AGAIN = "{}, simulated"  # the name of a silo's second data set, beside its own


def sbc(
    method: Any,
    silos: Silos,
    num_simulations: int = 200,
    *,
    num_draws: int = 255,
    rng_key: Any = None,
    silo: str | None = None,
    given: Any = None,
    theta: Mapping[str, Any] | None = None,
    model: Model | None = None,
    likelihoods: bool = True,
    checkpoint: str | Path | None = None,
    progress_bar: bool = True,
    **run_options: Any,
) -> Calibration:
    """Simulation-based calibration of any method, on the user's own design.

    Args:
        method: a method, ``nf.EP(model)``; or a function ``(rng_key, silos) -> fit`` (or ``{site: draws}``), for what
            takes more than one run: ``lambda key, silos: nf.EP(model).run(key, silos).correct(key)``, with ``model=``.
        silos: the design. What is observed is simulated, so its values do not matter, only its shape: zeros will do.
        num_simulations: data sets. With 200, biases are known to .14 sd and spreads to .12.
        num_draws: of each posterior, independent, among which the truth has its rank.
        rng_key: a JAX key; ``jax.random.key(0)`` when not given.
        silo: the name of one whose latents are ranked, too.
        given: a fit or a :class:`~numpyro_fed.Reference` of these silos. Truths are then drawn from its posterior in
            place of the prior, each silo has a second data set drawn beside its own, and the method is run on both: the
            draws are then those of the posterior given all, if ``given`` and the method are right. For priors that are
            too wide to simulate from, and for calibration where it matters (Säilynoja et al. 2025).
        theta: ``{name: constrained value}`` of the model's ``numpyro.param`` sites, from which data are simulated; by
            default their initial values (of ``given``, its own). A method that learns them learns them anew.
        model: of a ``method`` that is a function.
        likelihoods: also rank the truth's likelihood of each silo's data, which finds silos that are left out. It costs
            a look at the data for every draw.
        checkpoint: a path. Simulations that are done are kept in that file, and found there when called again with the
            same arguments (``num_simulations`` may be larger).
        progress_bar: show simulations and rate.
        run_options: of :meth:`~numpyro_fed.Method.run`: ``num_rounds=``, ``schedule=``, ``engine=``; ``check=True``
            lets every fit judge itself, too (it is False here by default).

    Returns:
        A :class:`Calibration`: prints as a table; ``.table``, ``.ranks``, ``.ok``, ``.plot()``. Simulations that fail
        (data that overflow, a run that does) are counted, never replaced. Stopped by KeyboardInterrupt, those so far.

    Example:
        >>> found = nf.sbc(nf.EP(model), silos, 12, progress_bar=False)
        >>> found.num_done, list(found.ranks)
        (12, ['beta[0]', 'beta[1]', 'log p(all silos)', 'log p(leeds)', 'log p(york)'])

    References:
        S. Talts, M. Betancourt, D. Simpson, A. Vehtari and A. Gelman, Validating Bayesian inference algorithms with
        simulation-based calibration, arXiv:1804.06788 (2018). M. Modrák et al., Simulation-based calibration checking
        for Bayesian computation: the choice of test quantities shapes sensitivity, Bayesian Analysis 20 (2025).
    """
    key = jax.random.key(0) if rng_key is None else check_key(rng_key)
    num, num_draws = check_count("num_simulations", num_simulations), check_count("num_draws", num_draws, least=9)
    design = _design(method, silos, model, silo, given, theta)
    posteriors = Posteriors(method, design.split, design.theta, design.named(silo), num_draws, likelihoods, run_options)
    draw = partial(_drawn, design, key)
    first = draw(0)
    kept: dict[int, Done] = {}
    file = None
    if checkpoint is not None:
        settings = (num_draws, silo, likelihoods, given is not None)
        file = SimulationFile(checkpoint, about(method, run_options, settings, silos, first, key))
        kept = file.read()
    done = {s: one for s, one in kept.items() if s < num}
    written = time.monotonic()
    with tqdm(total=num, initial=len(done), desc="sbc", disable=not progress_bar, unit="simulation") as bar:
        try:
            for s in range(num):
                if s in done:
                    continue
                done[s] = posteriors.looked_at(draw(s) if s else first, folded(folded(key, RUN), s))
                bar.update(1)
                _give_up(done)
                if file is not None and time.monotonic() - written > EVERY:
                    file.write(kept | done)
                    written = time.monotonic()
        except KeyboardInterrupt:
            if all(one.failure for one in done.values()):
                raise
            bar.write(f"stopped after {len(done)} of {num} simulations; this is the calibration so far")
        finally:
            if file is not None:
                file.write(kept | done)
    return _calibration(_label(method), posteriors.kinds(first), dict(sorted(done.items())), num_draws, num)


# --- the design -------------------------------------------------------------------------------------------------------


class _Design(NamedTuple):
    """What is simulated."""

    split: SplitModel
    simulator: Simulator
    silos: Silos
    theta: dict[str, Array]
    given: Any

    def named(self, silo: str | None) -> str | None:
        """A silo's name in the data that are fitted."""
        return silo if silo is None or self.given is None else AGAIN.format(silo)


def _design(
    method: Any, silos: Silos, model: Model | None, silo: str | None, given: Any, theta: Mapping[str, Any] | None
) -> _Design:
    if getattr(silos, "lazy", True):
        raise TypeError(
            f"silos must be an nf.Silos, got a {type(silos).__name__}: wrap it as nf.Silos({{name: arguments}}); of a "
            "store take a part, store.only(*names)"
        )
    known = getattr(method, "model", None)
    if known is None and model is None:
        what = "a function" if callable(method) else f"a {type(method).__name__}"
        raise TypeError(f"method is {what}, which does not say what to simulate from: pass model=, or nf.EP(model)")
    if not (hasattr(method, "run") or callable(method)):
        raise TypeError(f"method must be a method, nf.EP(model), or a function (rng_key, silos) -> fit, got {method!r}")
    if silo is not None and silo not in silos.names:
        raise KeyError(f"no silo is named {silo!r}; the silos are {', '.join(map(repr, silos.names))}")
    chosen: Any = known if model is None else model
    split = split_model(
        chosen,
        silos,
        getattr(method, "local", None),
        getattr(method, "shared", None),
        check=False,
    )
    fixed = fixed_theta(split, theta)
    if given is not None:
        if not (hasattr(given, "split") and given.split.global_shapes == split.global_shapes):
            raise TypeError(
                "given must be a fit or a Reference of the same model and silos: given=nf.EP(model).run(...)"
            )
        if theta is None:
            fixed = given.posterior.theta(given.state.server) if hasattr(given, "posterior") else given.theta
    return _Design(split, Simulator(split, silos, silo), silos, fixed or split.theta, given)


def _drawn(design: _Design, key: Array, s: int) -> Simulated:
    """The s-th data set: the same whoever asks, and whenever."""
    key, given = folded(key, s), design.given
    if given is None:
        return design.simulator.draw(key, design.theta)
    if hasattr(given, "posterior"):
        z = given.programs.z(jax.random.split(folded(key, GIVEN), 1), given.state.server)[0]
    else:
        points = given.unconstrained["z"].reshape(-1, design.split.dim)
        z = points[int(jax.random.randint(folded(key, GIVEN), (), 0, len(points)))]
    found = design.simulator.draw(key, design.theta, jnp.asarray(z))
    own, again = design.silos, found.silos
    renamed = again._with({AGAIN.format(name): again.own(name) for name in again.names}, again.shared)
    return found._replace(silos=own.joined(renamed))


# --- what was found ---------------------------------------------------------------------------------------------------


def _give_up(done: dict[int, Done]) -> None:
    """An error where nothing but failures came: there is something to mend first."""
    failures = [one.failure for one in done.values()]
    if len(failures) == GIVE_UP and all(failures):
        raise ValueError(
            f"the first {GIVE_UP} simulations all failed, the last of them so: {failures[-1]}. If simulated data are "
            "to blame, narrow the priors, or simulate from a posterior: nf.sbc(method, silos, given=fit)"
        )


def _label(method: Any) -> str:
    return type(method).__name__ if hasattr(method, "run") else getattr(method, "__name__", "method").strip("<>")


def _calibration(
    method: str, kinds: dict[str, str], done: dict[int, Done], num_draws: int, num_simulations: int
) -> Calibration:
    fine = {s: one for s, one in done.items() if not one.failure}
    column = lambda name: np.array([getattr(one, name) for one in fine.values()]).reshape(len(fine), len(kinds))
    parts = {name: pd.DataFrame(column(name), list(fine), list(kinds)) for name in Done._fields[:5]}
    fixed = (parts["sds"] == 0) & (parts["means"] == parts["truths"])  # the diagonal of a correlation matrix
    kept = [name for name in kinds if not len(fine) or not fixed[name].all()]
    return Calibration(
        method,
        **{name: part.rename_axis("simulation")[kept] for name, part in parts.items()},
        kinds={name: kinds[name] for name in kept},
        num_draws=num_draws,
        failures={s: one.failure for s, one in done.items() if one.failure},
        verdicts=pd.Series({s: one.verdict for s, one in fine.items()}, name="verdict", dtype=str),
        seconds=sum(one.seconds for one in done.values()),
        num_simulations=num_simulations,
    )
