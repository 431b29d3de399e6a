r"""A normal over a silo's locals given the globals, in the silo.

.. math:: z_{Lj} = \bar\mu_j + C_j (z_G - \mu_G) + \sigma_j \odot (L_j \epsilon_j)

The coupling :math:`C_j` lets local latents move with the global ones, which is what makes the marginals of :math:`z_G`
right. Parameters are measured in units of a base, as those of the globals are.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fed.data.padding import SiloData
from numpyro_fed.local.conditional import Conditional, flattened
from numpyro_fed.model.layout import Group
from numpyro_fed.model.split_model import SplitModel

Array = jax.Array
SCALE_RANGE = 2.0  # a draw far out must not make scales overflow: log-scales move linearly, up to about this much


class LocalBase(NamedTuple):
    loc: dict[str, Array]  # {group: (rows, k)}
    scale: dict[str, Array]  # {group: (rows, k)}
    unit: Array  # (d,): the globals' scale, in which the coupling is measured
    valid: dict[str, Array]  # {group: bool (rows,)}: rows that are not padding
    centre: Array  # (d,): mu_G, where it is not the guide's own mean


class LocalNormal:
    """Rows with parameters of their own: a mixin with the fields of :class:`~numpyro_fed.guides.StructuredNormal`."""

    local_cov: str
    coupling: bool
    scale_coupling: bool

    def init_local(
        self,
        groups: tuple[Group, ...],
        loc: dict,
        scale: dict,
        coupling: dict,
        unit: Array,
        valid: dict,
        centre: Array | None = None,
    ) -> tuple[dict, LocalBase]:
        """Parameters and base of a start: each group's mean and scale (rows, k) and coupling (rows, k, d), if any."""
        params: dict[str, Any] = {}
        d = unit.shape[0]
        for group in groups:
            rows, k = loc[group.name].shape
            own = {"loc": jnp.zeros((rows, k)), "log_scale": jnp.zeros((rows, k))}
            if self.local_cov == "block" and k > 1:
                own["tril"] = jnp.zeros((rows, k * (k - 1) // 2))
            if self.coupling and d:
                zero = jnp.zeros((rows, k, d))
                found = coupling[group.name] if group.name in coupling else zero
                own["coupling"] = found * unit / scale[group.name][..., None]
            if self.scale_coupling and d:
                own["scale_coupling"] = jnp.zeros((rows, k, d))
            params[group.name] = own
        if self.local_cov == "full" and groups:
            size = sum(leaf.size for leaf in loc.values())
            params["tril"] = jnp.zeros((size, size))
        return params, LocalBase(loc, scale, unit, valid, jnp.zeros(d) if centre is None else centre)

    needs_data = False  # q(z_L | z_G) is a matter of parameters alone
    arbitrary = False  # its conditional is a normal
    can_start = True  # mode finding gives it a start
    shared_params: tuple[str, ...] = ()  # parameters that all silos share

    @property
    def local_params(self) -> bool:
        """Whether rows have parameters of their own."""
        return True

    def start_local(self, key: Array, split: SplitModel, data: SiloData) -> tuple[dict, LocalBase]:
        """Parameters and base where no start was looked for."""
        zeros = split.zeros_local(data.mask)
        valid = {g.name: split.row_mask(g, data.mask) for g in split.groups}
        scale = jax.tree.map(lambda value: jnp.full_like(value, 0.5), zeros)
        return self.init_local(split.groups, zeros, scale, {}, jnp.ones(split.dim), valid)

    def adopt_local(self, split: SplitModel, params: dict, base: LocalBase, mode: Any, given: Any) -> tuple:
        """Parameters and base at the locals that a start found, around ``given.loc`` in units of ``given.unit``."""
        return self.init_local(split.groups, mode.loc, mode.scale, mode.coupling, given.unit, base.valid, given.loc)

    def take_rows(self, base: LocalBase, take: Any) -> LocalBase:
        """The base of some rows."""
        return base._replace(loc=take(base.loc), scale=take(base.scale), valid=take(base.valid))

    def recentred(self, params: dict, base: LocalBase, old: Any, new: Any) -> tuple[dict, LocalBase]:
        """The same conditional around another centre (to first order, where scales are coupled)."""
        centre = lambda context: base.centre if isinstance(context, tuple) else context
        shift = (centre(new) - centre(old)) / base.unit
        out = dict(params)
        for group in base.loc:
            own = dict(params[group])
            if "coupling" in own:
                own["loc"] = own["loc"] + _coupled(own["coupling"], shift)
            if "scale_coupling" in own:
                moved = _coupled(own["scale_coupling"], shift)
                own["log_scale"] = own["log_scale"] + SCALE_RANGE * jnp.tanh(moved / SCALE_RANGE)
            out[group] = own
        return out, base

    def init_context(self, key: Array, split: SplitModel) -> dict[str, Any]:
        """Parameters of the locals' guide that all silos share: none."""
        return {}

    def condition(self, params: dict, base: LocalBase, z: Array, context: Array, data: Any = None) -> Conditional:
        """q(z_L | z_G = z). ``context`` is the guide's centre mu_G; () stands for the base's, which does not move."""
        shift = (z - (base.centre if isinstance(context, tuple) else context)) / base.unit
        loc, log_scale, tril = {}, {}, {}
        for group in base.loc:
            own, unit = params[group], base.scale[group]
            moved = own["loc"] + _coupled(own["coupling"], shift) if "coupling" in own else own["loc"]
            loc[group] = base.loc[group] + unit * moved
            log_scale[group] = own["log_scale"] + jnp.log(unit)
            if "scale_coupling" in own:
                moved = _coupled(own["scale_coupling"], shift)
                log_scale[group] = log_scale[group] + SCALE_RANGE * jnp.tanh(moved / SCALE_RANGE)
            if "tril" in own:
                tril[group] = own["tril"]
        mixing = _lower(params["tril"], base.loc, base.valid) if self.local_cov == "full" and base.loc else None
        return Conditional(loc, log_scale, tril, mixing)

    def summary_local(self, params: dict, base: LocalBase, z: Array, context: Array) -> tuple[dict, dict, dict]:
        """Location at z_G = z, scale and coupling, each {group: ...}: what another run can start from."""
        found = self.condition(params, base, z, context)
        coupling = {}
        for group in found.loc:
            own, unit = params[group], base.scale[group]
            if "coupling" in own:
                coupling[group] = unit[..., None] * own["coupling"] / base.unit
        return found.loc, jax.tree.map(jnp.exp, found.log_scale), coupling


FEW = 64  # elements of a silo: below, a product by a vector is slower than the sums that it is made of


@jax.custom_jvp
def _coupled(coupling: Array, shift: Array) -> Array:
    """(rows, k, d) times (d,); tangents are written so that their transposes are sums and products, not columns."""
    return _product(coupling, shift)


@_coupled.defjvp
def _coupled_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    coupling, shift = primals
    return _coupled(coupling, shift), _product(tangents[0], shift) + _product(coupling, tangents[1])


def _product(coupling: Array, shift: Array) -> Array:
    if coupling.shape[0] * coupling.shape[1] < FEW:
        return jnp.sum(coupling * shift[None, None], axis=-1)
    return coupling @ shift


def _lower(tril: Array, like: dict, valid: dict) -> Array:
    """The strictly lower triangular mixing matrix; padded rows neither mix nor are mixed."""
    real = flattened({group: jnp.broadcast_to(valid[group][:, None], like[group].shape) for group in like})
    return jnp.where(real[:, None] & real[None, :], jnp.tril(tril, -1), 0.0)
