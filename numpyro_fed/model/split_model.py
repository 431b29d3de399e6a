r"""The model, split: all that a method knows of the user's NumPyro model.

.. math::

    \log p(y, z \mid \theta) = \log p(z_G \mid \theta) + \sum_j \log p(z_{Lj}, y_j \mid z_G, \theta)

``log_prior`` is the first term, ``log_silo`` one term of the sum, both on unconstrained vectors with each Jacobian
counted once. Law: their sum is NumPyro's own log density of the pooled model;
:func:`~numpyro_fed.model.certificate.certify` checks it on the user's model and data whenever a split is made.

Local latents are arranged by rows: ``z_L[group]`` has shape (rows, size of a row). A group is a silo plate (or a pair
of crossed ones); latents that a silo has once form the group ``"silo"`` with a single row.

Discrete local latents are not part of z_L: they are summed out (:mod:`numpyro_fed.model.enumeration`), and all
densities are those of the model without them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import compute_log_probs

from numpyro_fed.data.padding import CallSpec, SiloData, cut
from numpyro_fed.equations import fewer
from numpyro_fed.memo import ByIdentity, remembered
from numpyro_fed.model import discrete as enum
from numpyro_fed.model.discrete import resized
from numpyro_fed.model.enumeration import NOTHING, Component, Enumeration, Run
from numpyro_fed.model.layout import (
    GOLDEN,
    NEAR_ZERO,
    Evaluation,
    Group,
    LocalSite,
    filled,
    mask_name,
    real_rows,
    user_mask,
    with_mask,
)
from numpyro_fed.model.partition_table import Partition
from numpyro_fed.model.probes import probes
from numpyro_fed.model.trace import Model
from numpyro_fed.threads import unvalidated

Array = jax.Array


class SplitModel(NamedTuple):
    """A NumPyro model divided between a server and silos.

    Make one with :func:`~numpyro_fed.model.build.split_model`.
    """

    model: Model
    partition: Partition
    spec: CallSpec
    shared: tuple[Array, ...]
    global_shapes: dict[str, tuple[int, ...]]  # unconstrained
    groups: tuple[Group, ...]
    theta: dict[str, Array]  # the params' start, unconstrained
    constraints: dict[str, Any]
    constants: dict[str, Any]  # params that no density depends on
    enumeration: Enumeration = NOTHING  # how discrete local latents are summed out

    # --- layout of the vectors ---------------------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Length of z_G."""
        return sum(int(np.prod(shape)) for shape in self.global_shapes.values())

    def unravel(self, z: Array) -> dict[str, Array]:
        """z_G as {global site: unconstrained value}."""
        if not self.global_shapes:
            return {}
        sizes = [int(np.prod(shape)) for shape in self.global_shapes.values()]
        parts = jax.lax.split(jnp.asarray(z), sizes)  # unlike slices, whose gradients are padded and added up
        return {
            name: part.reshape(shape) for (name, shape), part in zip(self.global_shapes.items(), parts, strict=True)
        }

    def ravel(self, values: dict[str, Array]) -> Array:
        parts = [jnp.ravel(values[name]) for name in self.global_shapes]
        return jnp.concatenate(parts) if parts else jnp.zeros(0)

    def unpack(self, z_local: dict[str, Array], mask: dict[str, Array]) -> dict[str, Array]:
        """z_L as {local site: unconstrained value}."""
        out = {}
        for group in self.groups:
            rows, start = group.row_shape(mask), 0
            for site in group.sites:
                value = z_local[group.name][:, start : start + site.size].reshape(rows + site.rest)
                out[site.name] = jnp.moveaxis(value, range(len(rows)), site.positions)
                start += site.size
        return out

    def pack(self, values: dict[str, Array], mask: dict[str, Array]) -> dict[str, Array]:
        """The inverse of `unpack`."""
        return {
            group.name: jnp.concatenate(
                [
                    jnp.moveaxis(values[s.name], s.positions, range(len(s.positions))).reshape(group.num_rows(mask), -1)
                    for s in group.sites
                ],
                axis=1,
            )
            for group in self.groups
        }

    def zeros_local(self, mask: dict[str, Array]) -> dict[str, Array]:
        return {group.name: jnp.zeros((group.num_rows(mask), group.size)) for group in self.groups}

    def zeros_locals(self, mask: dict[str, Array], num: int) -> dict[str, Array]:
        """Those of ``num`` silos, stacked; there may be no axis that pads."""
        return jax.vmap(self.zeros_local, axis_size=num)(mask)

    def near_zero_local(self, mask: dict[str, Array]) -> dict[str, Array]:
        """Where a search for locals begins: all different, none exactly zero.

        NumPyro's gradients of Binomial and Bernoulli logits are wrong where a logit is exactly zero, as that of a
        random intercept, or of the difference of two, would be. Padding changes no row's place.
        """
        out, offset = {}, 0
        for group in self.groups:
            shape = (*group.row_shape(mask), group.size)
            steps = [np.arange(1, size + 1) * GOLDEN ** (k + 1) for k, size in enumerate(shape)]
            place = sum(np.ix_(*steps), np.asarray(0.37 * offset)) % 1.0
            values = NEAR_ZERO * (0.5 + place).reshape(-1, group.size)
            out[group.name] = jnp.asarray(values, jnp.zeros(()).dtype)
            offset += 1
        return out

    def row_mask(self, group: Group, mask: dict[str, Array]) -> Array:
        """Which rows of a group are real, (rows,)."""
        valid = jnp.ones((), bool)
        for axis, ratio in group.axes:
            valid = valid[..., None] & resized(mask[axis], int(mask[axis].shape[-1] * ratio))
        return valid.reshape(-1)

    def dummy(self) -> SiloData:
        """Data of no silo, for what the server computes: its own shared arguments, and zeros for the rest."""
        return self.spec.dummy()._replace(shared=self.shared)

    # --- densities ---------------------------------------------------------------------------------------------------

    def constrain_theta(self, theta: dict[str, Array]) -> dict[str, Array]:
        return {name: biject_to(self.constraints[name])(value) for name, value in theta.items()}

    def substituted(
        self, values: dict[str, Array], theta: dict[str, Array], discrete: dict[str, Array] | None = None
    ) -> Callable[..., Any]:
        """The model with these latents (unconstrained), params and discrete latents put in."""
        params = self.constrain_theta(theta) | self.constants
        model = handlers.substitute(self.model, data=params) if params else self.model
        model = handlers.substitute(model, substitute_fn=partial(filled, values, discrete or {}))
        return handlers.seed(model, jax.random.PRNGKey(0))

    def _log_probs(self, values: dict, theta: dict, data: SiloData, discrete: dict | None = None) -> tuple[dict, dict]:
        model = self.substituted(values, theta, discrete)
        with unvalidated():  # padded and dummy rows need not be valid
            log_probs, trace = compute_log_probs(model, (), self.spec.kwargs(data), {}, sum_log_prob=False)
        for name in values:  # the Jacobian of a constrained latent belongs to its site
            log_det = log_probs.pop(f"_{name}_log_det", None)
            if log_det is not None:
                log_probs[name] = log_probs[name] + log_det
        return log_probs, trace

    def _trace(self, values: dict, theta: dict, data: SiloData, discrete: dict | None = None) -> dict[str, dict]:
        with unvalidated():
            return handlers.trace(self.substituted(values, theta, discrete)).get_trace(**self.spec.kwargs(data))

    def trace_at_zero(self, data: SiloData) -> dict[str, dict]:
        """The silo's sites as the model meets them with all latents zero: for what does not depend on them.

        Not for gradients: at exactly zero NumPyro's of Bernoulli and Binomial logits are wrong.
        """
        values = self.unravel(jnp.zeros(self.dim)) | self.unpack(self.zeros_local(data.mask), data.mask)
        return self._trace(values, self.theta, data)

    def log_prior(self, z: Array, theta: dict[str, Array]) -> Array:
        """The server's term: log p(z_G | theta), with what observations depend on no silo."""
        return self.once(SplitModel._log_prior)(z, theta)

    def _log_prior(self, z: Array, theta: dict[str, Array]) -> Array:
        log_probs, _ = self._log_probs(self.unravel(z), theta, self.dummy())
        own = [site.name for site in self.partition.sites if site.at_server and site.name in log_probs]
        return sum((jnp.sum(log_probs[name]) for name in own), jnp.zeros(()))

    def evaluate(self, z: Array, z_local: dict[str, Array], theta: dict[str, Array], data: SiloData) -> Evaluation:
        """The silo's log densities, site by site, unsummed."""
        found = self.densities(z, z_local, theta, data)
        terms = {
            site.name: with_mask(found[site.name], site, data.mask)
            for site in self.partition.sites
            if site.name in found and site.name not in self.enumeration.joined
        }
        for component, tables in self._components(found, data):
            term, _ = enum.eliminate(self.enumeration, component, tables, data.mask)
            terms[component.name] = with_mask(term, self.partition[component.name], data.mask)
        active = {}
        for group in self.groups:
            columns = [self._active(group, site, self._mask_of(site.name, found), data.mask) for site in group.sites]
            active[group.name] = jnp.concatenate(columns, axis=1)
        return Evaluation(terms, active)

    def densities(
        self, z: Array, z_local: dict[str, Array], theta: dict[str, Array], data: SiloData, plain: bool = False
    ) -> dict[str, Array]:
        """The silo's log densities as they are, padded rows too, and the masks that the model puts on latents.

        Those that depend on discrete sites are tables over these sites' values, which are their leading axes. An
        element of a discrete site that the model's mask leaves out weighs 1/K, or 1 if ``plain``.
        """
        return self.once(SplitModel._densities, plain)(z, z_local, theta, data)

    def once(self, function: Callable[..., Any], *options: Any) -> Callable[..., Any]:
        """``function(self, *options, ...)``, for which the model is traced once per shapes, whoever asks."""
        make = lambda: jax.jit(fewer(partial(function, self, *options)), inline=True)
        return remembered(make, function, ByIdentity(self), *options)

    def _densities(
        self, plain: bool, z: Array, z_local: dict[str, Array], theta: dict[str, Array], data: SiloData
    ) -> dict[str, Array]:
        run = self._run(self.unravel(z) | self.unpack(z_local, data.mask), theta, data, plain)
        return enum.tables(self.enumeration, run)

    def _run(self, values: dict[str, Array], theta: dict[str, Array], data: SiloData, plain: bool = False) -> Run:
        latent = [site for site in self.partition.sites if site.role in ("local", "enumerated")]
        own = [site.name for site in self.partition.sites if not site.at_server]

        def run(discrete: dict[str, Array]) -> dict[str, Array]:
            log_probs, trace = self._log_probs(values, theta, data, discrete)
            out = {name: log_probs[name] for name in own if name in log_probs}
            for site in latent:
                mask = user_mask(trace[site.name]["fn"])
                if mask is None:
                    continue
                out[mask_name(site.name)] = mask
                if site.role == "enumerated" and not plain:
                    out[site.name] = jnp.where(mask, out[site.name], -np.log(len(site.shape.support or ())))
            return out

        return run

    def _components(self, found: dict[str, Array], data: SiloData) -> list[tuple[Component, list[enum.Placed]]]:
        plan, probe = self.enumeration, None
        if plan.components:
            points = jax.tree.map(lambda *leaves: jnp.stack(leaves), *probes(self, data.mask))

            def probe(discrete: dict[str, Array]) -> dict[str, Array]:
                def at(z: Array, z_local: dict[str, Array], theta: dict[str, Array]) -> dict[str, Array]:
                    return self._run(self.unravel(z) | self.unpack(z_local, data.mask), theta, data)(discrete)

                return jax.vmap(at)(*points)

        return [(one, enum.placed(plan, one, found, data.mask, probe)) for one in plan.components]

    def _mask_of(self, name: str, found: dict[str, Array]) -> Array | None:
        own, read = found.get(mask_name(name)), self.enumeration.reads.get(mask_name(name), ())
        return own if own is None or not read else jnp.any(own, axis=tuple(range(len(read))))

    def _active(self, group: Group, site: LocalSite, own: Array | None, mask: dict[str, Array]) -> Array:
        rows = self.row_mask(group, mask)
        valid = jnp.broadcast_to(rows[:, None], (rows.shape[0], site.size))
        if own is None:
            return valid
        rank = len(site.positions) + len(site.rest)
        own = jnp.reshape(own, (1,) * (rank - jnp.ndim(own)) + jnp.shape(own))
        own = jnp.moveaxis(own, site.positions, range(len(site.positions)))
        own = jnp.broadcast_to(own, group.row_shape(mask) + site.rest)
        return valid & own.reshape(rows.shape[0], site.size)

    def log_silo(self, z: Array, z_local: dict[str, Array], theta: dict[str, Array], data: SiloData) -> Array:
        """The silo's term: log p(z_L, y | z_G, theta); padded rows are left out."""
        terms = self.evaluate(z, z_local, theta, data).terms
        return sum((jnp.sum(term) for term in terms.values()), jnp.zeros(()))

    def sample_discrete(
        self, z: Array, z_local: dict[str, Array], theta: dict[str, Array], data: SiloData, key: Array
    ) -> dict[str, Array]:
        """One draw of the silo's discrete sites from their posterior given the other latents and the data; padded."""
        if not self.enumeration.variables:
            return {}
        found = self.densities(z, z_local, theta, data)
        out: dict[str, Array] = {}
        for component, tables in self._components(found, data):
            _, steps = enum.eliminate(self.enumeration, component, tables, data.mask)
            positions = enum.draw(self.enumeration, component, steps, enum.gumbel(key))
            out |= enum.values(self.enumeration, component, positions)
        return out

    # --- back to named sites -----------------------------------------------------------------------------------------

    def constrain_global(self, z: Array, theta: dict[str, Array]) -> dict[str, Array]:
        """One draw of the global sites and of the deterministic sites that depend on them alone."""
        trace = self._trace(self.unravel(z), theta, self.dummy())
        shown = [s.name for s in self.partition.sites if s.at_server and s.role in ("global", "deterministic")]
        return {name: trace[name]["value"] for name in shown}

    def constrain_local(
        self, z: Array, z_local: dict[str, Array], theta: dict[str, Array], data: SiloData, key: Array | None = None
    ) -> dict[str, Array]:
        """One draw of the silo's local sites and deterministics, padded.

        Discrete sites are drawn with ``key`` from their posterior given all else. Without a key they are left out, with
        the deterministic sites that depend on them.
        """
        roles = ("local", "deterministic") if key is None else ("local", "deterministic", "enumerated")
        hidden = self.enumeration.drawn if key is None else frozenset()
        discrete = {} if key is None else self.sample_discrete(z, z_local, theta, data, key)
        trace = self._trace(self.unravel(z) | self.unpack(z_local, data.mask), theta, data, discrete)
        shown = [s.name for s in self.partition.sites if s.role in roles and not s.at_server and s.name not in hidden]
        return {name: trace[name]["value"] for name in shown}

    def unpadded(self, values: dict[str, Array], lengths: dict[str, int], padded: dict[str, int]) -> dict[str, Array]:
        """Cut the padded rows off named values; leading axes (draws) are allowed."""
        return {name: cut(value, self.partition[name].value_axes, lengths, padded) for name, value in values.items()}

    def unpadded_local(
        self, z_local: dict[str, Array], lengths: dict[str, int], padded: dict[str, int]
    ) -> dict[str, Array]:
        """z_L without its padded rows; leading axes (draws) are allowed.

        With the silo's own data, unpadded, it gives `constrain_local` what NumPyro would see: deterministic sites that
        mix rows (a mean over them) are then right, too.
        """
        return {g.name: z_local[g.name][..., real_rows(g, lengths, padded), :] for g in self.groups}

    def coordinate_names(self) -> list[str]:
        """Names of z_G's coordinates: ``beta[0]``; of the unconstrained value when the site is constrained."""
        names = []
        for name, shape in self.global_shapes.items():
            names += (
                [name] if shape == () else [f"{name}[{', '.join(map(str, index))}]" for index in np.ndindex(*shape)]
            )
        return names
