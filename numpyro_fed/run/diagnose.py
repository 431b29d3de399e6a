"""A loss that is not finite: which round, which silo, which site."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fed.algorithm import Phase, Posterior, PyTree
from numpyro_fed.data.silos import at_silo
from numpyro_fed.data.stack import Stack
from numpyro_fed.engines.base import Engine, sent_to
from numpyro_fed.engines.stale import current
from numpyro_fed.keys import SERVER, START, fold_in_name, identity
from numpyro_fed.model.split_model import SplitModel

REFUSED = "_refused"  # of a round's row: its gradients were not finite, and the server did not move
PATIENCE = 20  # such rounds, one after another


class NonFiniteError(FloatingPointError):
    """The loss stopped being a number. ``fit`` is the last good state."""

    fit: Any = None


class NonFinite(Exception):
    """Raised in the loop where a value is not finite, with the last states that were."""

    def __init__(self, phase: Phase, key: Any, server: PyTree, states: tuple, at: int, cohort: Any) -> None:
        super().__init__(phase.name)
        self.phase, self.key, self.server, self.states, self.at, self.cohort = phase, key, server, states, at, cohort


def all_finite(tree: PyTree) -> bool:
    """Whether every floating number in it is."""
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return all(bool(np.all(np.isfinite(leaf))) for leaf in floats)


def first_bad(
    after: tuple[PyTree, tuple, dict[str, np.ndarray]], count: int, before: list[dict[str, np.ndarray]], total: int
) -> int | None:
    """The first of a chunk's rounds whose loss is not finite; ``count``: all are, and the server's state is not.

    A round in which nothing moved for that reason is bad where it is one of :data:`PATIENCE` in a row.

    Args:
        before: infos of the chunks before.
        total: of the phase's rounds; where these are few and all are so, that is enough.
    """
    refused = np.asarray(after[2].get(REFUSED, np.zeros(count, bool)))
    least, waiting = min(PATIENCE, total), _waiting(before)
    for i, loss in enumerate(after[2]["loss"]):
        waiting = waiting + 1 if refused[i] else 0
        if waiting >= least:
            return max(i - waiting + 1, 0)
        if not (refused[i] or np.isfinite(loss)):
            return i
    return None if all_finite(after[0]) else count  # a loss can be that of the round's beginning


def _waiting(before: list[dict[str, np.ndarray]]) -> int:
    """Rounds at the end of these chunks in which nothing moved."""
    number = 0
    for info in reversed(before):
        moved = np.flatnonzero(~np.asarray(info.get(REFUSED, np.zeros(len(info["loss"]), bool))))
        number += len(info["loss"]) - (int(moved[-1]) + 1 if moved.size else 0)
        if moved.size or number >= PATIENCE:
            break
    return number


def last_good(engine: Engine, chunk: tuple[Any, ...], bad: int, effort: str) -> tuple[int, tuple[PyTree, tuple, dict]]:
    """How many of a chunk's rounds leave finite states, and these; ``bad`` is the first whose loss is not finite.

    A gradient can be so before the loss is. States that are not finite stay so: halving finds the round.
    """
    low, high = 0, bad + 1  # after `low` rounds all is well, after `high` it is not
    rounds: Any = engine.rounds
    found = rounds(*chunk, 0, effort)
    while high - low > 1:
        middle = bad if high == bad + 1 else (low + high) // 2  # most often the loss tells at once
        after = rounds(*chunk, middle, effort)
        if all_finite(after[:2]):
            low, found = middle, after
        else:
            high = middle
    return low, found


def explained(
    error: NonFinite, split: SplitModel, posterior: Posterior, stack: Stack, engine: Engine
) -> NonFiniteError:
    """Name the silos whose message is not finite, and the sites in them."""
    phase, algorithm = error.phase, error.phase.algorithm
    round_key = jax.random.fold_in(error.key, error.at)
    server_key = jax.random.fold_in(round_key, SERVER)
    sent = algorithm.broadcast(server_key, error.server)
    index = range(len(stack.names)) if error.cohort is None else np.asarray(error.cohort).tolist()
    culprits = []
    for j in index:
        name, received = stack.names[j], sent_to(sent, j)
        with at_silo(name):  # what it tells is the names of its sites
            data = stack.data(name)
            if engine.holds_states:
                b, position = stack.place(name)
                state = jax.tree.map(lambda leaf, position=position: leaf[position], error.states[b])
            else:
                start_key = fold_in_name(jax.random.fold_in(error.key, START), identity(name))
                state = algorithm.init_silo(start_key, received, data)
            message, _ = algorithm.silo_step(fold_in_name(round_key, identity(name)), received, state, data)
            if not all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(message)):
                sites = ", ".join(_bad_sites(split, posterior, error, state, data))
                culprits.append(f"{name!r} ({sites or 'its gradient'})")
    where = f"silo {', '.join(culprits)}" if culprits else "the server's prior term"
    return NonFiniteError(
        f"the loss is not finite at round {error.at}, from {where}. Standardise the data, check the distributions' "
        f"parameters, or {phase.remedy}. The error's .fit is the last good state."
    )


def _bad_sites(split: SplitModel, posterior: Posterior, error: NonFinite, state: PyTree, data: Any) -> Iterable[str]:
    z, z_local, theta = jnp.full(split.dim, 0.01), split.near_zero_local(data.mask), split.theta
    if error.phase.role == "rounds":
        server = current(error.server)
        key = jax.random.key(0)
        drawn = posterior.sample(key, server)
        if bool(jnp.all(jnp.isfinite(drawn))):
            z, theta = drawn, posterior.theta(server) or theta
            z_local = posterior.sample_local(key, z, server, state, data)
    for site, term in split.evaluate(z, z_local, theta, data).terms.items():
        if not bool(np.all(np.isfinite(term))):
            yield f"site {site!r}"
