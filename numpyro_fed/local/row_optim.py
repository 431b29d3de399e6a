"""An optimiser whose state belongs to rows: a row moves only when it is drawn."""

from typing import Any, NamedTuple

import jax
import optax

from numpyro_fed.local.minibatch import Minibatch, gather, scatter


class RowState(NamedTuple):
    rows: dict[str, Any]  # {group: the optimiser's state of each row, its count included}
    rest: Any


class RowOptim(NamedTuple):
    """The silo's optimiser. Groups whose rows are drawn have a state for each row, so that a row moves alone."""

    optim: optax.GradientTransformation
    rows: tuple[str, ...]  # groups

    def init(self, params: Any) -> Any:
        if not self.rows:
            return self.optim.init(params)
        rest = {name: value for name, value in params.items() if name not in self.rows}
        return RowState({name: jax.vmap(self.optim.init)(params[name]) for name in self.rows}, self.optim.init(rest))

    def step(self, downhill: Any, state: Any, whole: Any, params: Any, taken: Minibatch | None) -> tuple[Any, Any]:
        """New parameters and state; ``params`` and ``downhill`` are those of the batch ``taken`` from ``whole``."""
        add = lambda params, updates: jax.tree.map(lambda p, u: p + u, params, updates)
        if not self.rows or taken is None:
            updates, state = self.optim.update(downhill, state, params)
            return add(params, updates), state
        update = lambda names: {name: value for name, value in downhill.items() if (name in self.rows) == names}
        own, rest = ({name: params[name] for name in update(of_rows)} for of_rows in (True, False))
        updates, rest_state = self.optim.update(update(False), state.rest, rest)
        new, states = add(rest, updates), {}
        rows = gather(state.rows, taken, self.rows)
        for name in self.rows:
            updates, states[name] = jax.vmap(self.optim.update)(downhill[name], rows[name], own[name])
            new[name] = add(own[name], updates)
        return (
            scatter(whole, new, taken, self.rows),
            RowState(scatter(state.rows, states, taken, self.rows), rest_state),
        )
