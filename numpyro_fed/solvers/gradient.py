r"""Reparametrised gradients of the local free energy: PVI as its paper runs it.

Each visit takes ``num_steps`` steps of an optimiser on :math:`E_q[\log f_j] - KL(q \| q / t_j)` over the mean and the
root of q, and over the locals' own normal given the globals (structured variational inference: shift and scale of each
row in its frame, slope from Newton's method). Linear in the number of dimensions for families without correlations.

In up to ``most_newton`` dimensions a first visit begins at the tilted distribution's mode. In more no mode is looked
for: until anybody has been heard (q is the prior), it begins at a draw of the prior, the same in all silos, with sds of
``start_sd`` times the prior's. Hidden units that start equal could not be told apart, and with draws as wide as a
network's prior there is little to learn from a gradient.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from numpyro.distributions.util import vec_to_tril_matrix

from numpyro_fed.checks import check_count, is_number
from numpyro_fed.local.integrate import Factor
from numpyro_fed.normal import affine
from numpyro_fed.normal.families import Family
from numpyro_fed.optim import check_optim
from numpyro_fed.precision import to_user_dtype
from numpyro_fed.solvers import newton
from numpyro_fed.solvers.base import BaseSolver, Projection, Start, Tilted

Array = jax.Array


@dataclass(frozen=True)
class Gradient(BaseSolver):
    """Optax steps on q and the locals' guide.

    Args:
        num_steps: a visit.
        optim: an optax optimiser; parameters are in sds of q. By default Adam, its step falling from .05 to .0005.
        num_particles: draws of z_G a step, antithetic pairs.
        batch_size: rows of the silo that a step looks at, drawn with replacement, for models without local latents;
            their log likelihood counts as often as to be right on average. By default all rows.
        start_sd: above 200 dimensions: sds with which the first visits begin, in sds of the prior.

    Example:
        >>> solver = nf.solvers.Gradient(num_steps=1000, num_particles=2, batch_size=256)
        >>> fit = nf.PVI(model, family="diagonal", damping=0.2, solver=solver).run(
        ...     jax.random.key(0), silos, 2, schedule="synchronous", progress_bar=False, check=False
        ... )
    """

    num_steps: int = 300
    optim: Any = None
    num_particles: int = 4
    batch_size: int | None = None
    start_sd: float = 0.1
    name = "gradient"
    noisy = True
    minimises_free_energy = True
    most_newton = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_particles % 2:
            raise ValueError(f"num_particles must be even (antithetic pairs), got {self.num_particles!r}")
        check_optim(self.optim)
        check_count("batch_size", self.batch_size, optional=True)
        if not is_number(self.start_sd) or not 0 < self.start_sd <= 1:
            raise ValueError(f"start_sd is a share of the prior's sd, in (0, 1], got {self.start_sd!r}: start_sd=0.1")

    def is_told_where(self, d: int) -> bool:
        return d > self.most_newton

    def evaluations(self, d: int, family: Family) -> int:
        """Of the factor in a visit, on all rows; a gradient counts as three."""
        return 3 * self.num_steps * self.num_particles

    def solve(self, key: Array, tilted: Tilted, factor: Factor, frame: Any, solver_state: Any) -> Projection:
        family, d = tilted.family, tilted.q.shift.shape[0]
        full = family.kind == "full"
        optim = self.optim or optax.adam(optax.cosine_decay_schedule(0.05, self.num_steps, alpha=0.01))
        cavity, part = tilted.cavity, factor.part
        if d <= self.most_newton:
            at, frame = newton.begin(tilted, factor, frame)
            at = at if full else at._replace(root=affine.sds(at))
        else:
            at = affine.coordinates(family, tilted.q, dense=False)
        frame = factor.refit(to_user_dtype(at.mean), frame, newton.LOCAL_STEPS)
        a, b = affine.pull_back(at, cavity)
        rows = frame.loc if factor.eps_shape else {}
        begin = Start(jnp.zeros((), bool), jnp.zeros(d)) if tilted.start is None else tilted.start
        narrow = jnp.where(begin.unheard, jnp.log(self.start_sd), 0.0)
        params: dict[str, Any] = {
            "loc": begin.place,
            "log_sd": jnp.broadcast_to(narrow, () if family.kind == "identity" else (d,)),
            "tril": jnp.zeros(d * (d - 1) // 2 if full else 0),
            "rows": {g: (jnp.zeros_like(v), jnp.zeros_like(v)) for g, v in rows.items()},
        }

        def chol(params: dict) -> Array:
            spread = jnp.exp(params["log_sd"])
            return jnp.diag(spread) + vec_to_tril_matrix(params["tril"], -1) if full else jnp.broadcast_to(spread, (d,))

        def energy(params: dict, key: Array) -> Array:
            root_x = chol(params)
            draw_key, node_key = jax.random.split(key)
            half = jax.random.normal(draw_key, (self.num_particles // 2, d))
            eps = jnp.concatenate([half, -half])
            x = params["loc"] + (eps @ root_x.T if full else eps * root_x)
            guided = _guided(frame, params["rows"])

            def one(x: Array, key: Array) -> Array:
                z = affine.to_z(at, x)
                # one minibatch for all draws: its rows are taken once
                return factor.log_f(z, guided, factor.nodes(key)) if part is None else part(node_key, z)

            value = jnp.mean(jax.vmap(one)(x, jax.random.split(node_key, len(eps))))
            loc = params["loc"]
            if full:
                expected = b @ loc - 0.5 * loc @ a @ loc - 0.5 * jnp.sum((a @ root_x) * root_x)
            else:
                expected = b @ loc - 0.5 * jnp.sum(a * (loc**2 + root_x**2))
            entropy = jnp.sum(params["log_sd"]) * (d if family.kind == "identity" else 1)
            return -(value + expected + entropy)

        def step(carry: tuple, key: Array) -> tuple[tuple, Array]:
            params, state = carry
            value, gradient = jax.value_and_grad(energy)(params, key)
            updates, state = optim.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), value

        keys = jax.random.split(key, self.num_steps)
        (params, _), values = jax.lax.scan(step, (params, optim.init(params)), keys)
        finite = jnp.all(jnp.asarray([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]))
        new = affine.compose(at, params["loc"], chol(params))
        found = affine.to_family(family, new)
        # a bound on the log integral of the tilted distribution, from the last steps
        log_mean = 0.5 * d - jnp.mean(values[-max(1, self.num_steps // 10) :])
        value = affine.log_evidence(tilted.family, tilted.q, at, cavity, log_mean)
        local_posterior = _guided(frame, params["rows"]) if rows else None
        return Projection(found, value, jnp.ones(()), finite, frame, local_posterior)


def _guided(frame: Any, rows: dict) -> Any:
    """The frame with each row's shift and log-scale in its own units."""
    if not rows:
        return frame
    loc = {g: frame.loc[g] + jnp.einsum("rij,rj->ri", frame.root[g], rows[g][0]) for g in rows}
    root = {g: frame.root[g] * jnp.exp(rows[g][1])[:, None, :] for g in rows}
    return frame._replace(loc=loc, root=root)
