"""What comes back from a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd

from numpyro_fed.checks import check_key
from numpyro_fed.data.names import Names
from numpyro_fed.data.padding import SiloData, from_arguments, silo_data
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.stack import Bucket, Stack, gathered
from numpyro_fed.keys import identity
from numpyro_fed.model import forward, new_units
from numpyro_fed.model.provenance import provenance
from numpyro_fed.model.split_model import SplitModel
from numpyro_fed.precision import ONCE
from numpyro_fed.results import arviz, predict, summary
from numpyro_fed.results.state import ById, State

if TYPE_CHECKING:
    from numpyro_fed.results.correction import Correction
    from numpyro_fed.results.influence_tables import Conflict, Influence

Array = Any
IN_MEMORY = "hold a part of it in memory, store.only(*names), and fit that"


@dataclass(frozen=True, repr=False, eq=False)
class Fit:
    """A fitted model: draws, predictions, summaries.

    Draws of one key belong together: :meth:`sample`, :meth:`sample_local`, :meth:`predict` and :meth:`to_arviz` with
    the same key and number of samples all start from the same draws of the globals.
    """

    method: Any
    split: SplitModel
    state: State
    history: dict[str, np.ndarray]  # one row a round, those of the start included
    seconds: float  # wall time of the run, compilation included
    padded: tuple[dict[str, int], ...]  # each bucket's padded axis lengths
    silos: Any = None  # a Silos or a SiloStore; None after nf.load without silos
    shapes: Silos | None = None  # after nf.load: zeros in the shapes of the silos' arguments

    @property
    def num_rounds(self) -> int:
        """Rounds of communication, the start's included."""
        return len(next(iter(self.history.values()))) if self.history else self.state.round

    @property
    def params(self) -> dict[str, np.ndarray]:
        """theta: the model's numpyro.param values, constrained."""
        return jax.tree.map(np.asarray, self.split.constrain_theta(self.method.theta(self.state.server)))

    # --- draws --------------------------------------------------------------------------------------------------------

    def sample(self, rng_key: Any, num_samples: int = 1000) -> dict[str, Array]:
        """Draws of the global sites, and of deterministic sites that depend on them alone, constrained."""
        return self._global_draws(_keys(rng_key, num_samples), self.state.server)

    @cached_property
    def _global_draws(self) -> Any:
        method, split = self.method, self.split

        def one(key: Array, server: Any) -> dict[str, Array]:
            return split.constrain_global(method.sample_global(split, server, key), method.theta(server))

        return jax.jit(jax.vmap(one, in_axes=(0, None)), compiler_options=ONCE)

    def sample_local(
        self,
        rng_key: Any,
        num_samples: int = 1000,
        *,
        silo: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> dict[str, Array]:
        """Joint draws of the global sites and of one silo's local sites (with deterministics), unpadded.

        With the same key, the global draws are those of :meth:`sample`. After :func:`numpyro_fed.load` without silos,
        sites that are computed from the silo's data (``numpyro.deterministic("mean", x @ beta)``) are left out.

        With ``data`` in place of ``silo``, draws for units that nobody has seen, from the encoder of an amortised guide
        (:class:`~numpyro_fed.guides.Amortised`): the model's arguments, with what the encoder reads.
        """
        if (silo is None) == (data is None):
            raise TypeError("sample_local needs a silo, silo='york', or the data of new units, data=dict(...)")
        if data is not None:
            return self._encoded(_keys(rng_key, num_samples), data)
        assert silo is not None
        state, _ = self.state.silo(silo)
        mask, own = self._data(silo)
        if self.reads_data:
            self.need_silos(f"draws of {silo!r}'s latents, which the encoder reads off its data,")
        keys, words = _keys(rng_key, num_samples), identity(silo)
        draws, local = self._local_draws(keys, words, self.state.server, state, mask, own)
        if self.silos is None:
            local = {name: value for name, value in local.items() if name not in self._from_data}
        return {**draws, **self._unpad(local, silo, own)}

    @cached_property
    def _local_draws(self) -> Any:
        split, theta = self.split, self.method.theta

        def one(key: Array, identity: Any, server: Any, state: Any, mask: dict, data: SiloData) -> tuple[dict, dict]:
            z, z_local = self.latents(key, identity, server, state, mask, data)
            own = forward.discrete_key(key, identity)
            local = split.constrain_local(z, z_local, theta(server), data, own)
            return split.constrain_global(z, theta(server)), local

        return jax.jit(jax.vmap(one, in_axes=(0, None, None, None, None, None)), compiler_options=ONCE)

    def latents(
        self, key: Array, identity: Any, server: Any, state: Any, mask: dict, data: SiloData
    ) -> tuple[Array, dict]:
        """One draw of z_G and of a silo's z_L, which is drawn with the run's padding and has the rows of ``data``."""
        z = self.method.sample_global(self.split, server, key)
        own = forward.local_key(key, identity)
        if self.reads_data:
            return z, self.method.sample_local(self.split, server, state, own, z, data.mask, data)
        z_local = self.method.sample_local(self.split, server, state, own, z, mask)
        lengths, padded = ({axis: rows.shape[-1] for axis, rows in m.items()} for m in (data.mask, mask))
        return z, self.split.unpadded_local(z_local, lengths, padded) if lengths != padded else z_local

    @property
    def reads_data(self) -> bool:
        """Whether local latents are read off the data, by an encoder or a guide function."""
        return getattr(getattr(self.method, "family", None), "needs_data", False)

    def _encoded(self, keys: Array, data: Mapping[str, Any]) -> dict[str, Array]:
        kwargs, lengths = predict.new_arguments(self, data, None)
        if not predict.encodes(self, data):
            raise ValueError(
                "the latents of new units are read off their data by an amortised guide (nf.guides.Amortised), which "
                "needs all of its inputs in data. This fit has "
                + (f"inputs {', '.join(predict.inputs(self))}" if predict.inputs(self) else "another guide")
                + "; fit.predict(key, data) draws such latents from their prior instead."
            )
        new = from_arguments(kwargs, self.split.spec, lengths)
        state, _ = self.state.silo(self.state.names[0])  # an encoder has no parameters in the silos
        draws, local = self._local_draws(keys, identity(predict.NEW), self.state.server, state, new.mask, new)
        if not predict.complete(self, data):  # discrete sites are drawn given all of a unit's data
            unseen = {*self.split.partition.enumerated_sites, *self.split.enumeration.drawn}
            local = {name: value for name, value in local.items() if name not in unseen}
        return {**draws, **local}

    def _stack(self) -> Stack:
        """All silos' data, padded and ordered as the states are."""
        buckets = []
        for names, padded in zip(self.state.buckets, self.padded, strict=True):
            each = [silo_data(self.any_silos, n, self.split.spec, self.split.partition.axes, padded) for n in names]
            args, mask = jax.tree.map(lambda *rows: jnp.stack(rows), *[(one.args, one.mask) for one in each])
            buckets.append(Bucket(names, args, mask))
        return Stack(self.state.names, tuple(buckets), self.split.shared)

    def _data(self, silo: str) -> tuple[dict[str, Array], SiloData]:
        """The mask with which the silo was padded in the run, and its data: padded, or not where that could be seen.

        A program for padded data serves all silos of a bucket. Rows do not meet in a log density, but they may in a
        deterministic site (a mean over them).
        """
        if self.from_store:
            return self._read(silo)
        split, padded = self.split, self.padded[self.state.silo(silo)[1]]
        own = {axis.name: axis.lengths[silo] for axis in split.partition.axes}
        mask = {axis: jnp.arange(n) < own[axis] for axis, n in padded.items()}
        computed = any(site.role == "deterministic" and not site.at_server for site in split.partition.sites)
        lengths = own if computed else padded
        return mask, silo_data(self.any_silos, silo, split.spec, split.partition.axes, lengths)

    def _read(self, silo: str) -> tuple[dict[str, Array], SiloData]:
        """The same for a silo of a store: read anew, not padded."""
        self.need_silos(f"draws for the units of {silo!r}")
        axes = self.split.partition.axes
        args, mask = gathered([(silo, self.any_silos.own(silo))], self.split.spec, axes, rounded=False)
        args, mask = jax.tree.map(lambda leaf: jnp.asarray(leaf[0]), (args, mask))
        return mask, SiloData(args, mask, self.split.shared)

    def _unpad(self, values: dict[str, Array], silo: str, data: SiloData) -> dict[str, Array]:
        if self.from_store:
            return values
        lengths = {axis.name: axis.lengths[silo] for axis in self.split.partition.axes}
        out = {}
        for name, value in values.items():
            for axis, dim in forward.value_axes(self.split.partition[name], self._event_dims):
                keep = value.shape[dim] * lengths[axis] // data.mask[axis].shape[-1]
                value = jax.lax.slice_in_dim(value, 0, keep, axis=value.ndim + dim)
            out[name] = value
        return out

    @cached_property
    def _event_dims(self) -> dict[str, int]:
        return forward.event_dims(self.split)

    @cached_property
    def _from_data(self) -> frozenset[str]:
        """Local sites whose constrained values depend on the silo's data, not on latents alone."""
        split = self.split
        _, data = self._data(self.state.names[0])
        zeros = split.zeros_local(data.mask)
        found = provenance(
            lambda args: split.constrain_local(
                jnp.zeros(split.dim), zeros, split.theta, data._replace(args=args), jax.random.key(0)
            ),
            {"args": data.args},
        )
        return frozenset(name for name, sources in found.items() if sources)

    @property
    def from_store(self) -> bool:
        """Whether it was fitted to an :class:`~numpyro_fed.SiloStore`."""
        return isinstance(self.state.names, Names)

    def _need_all(self, what: str, instead: str) -> None:
        """Raises when that would read every silo of a store."""
        if self.from_store:
            raise ValueError(f"{what} would read all {len(self.state.names)} silos of the store: {instead}")

    @property
    def any_silos(self) -> Any:
        """The silos, or (after nf.load without them) zeros of their shapes, which is enough for latents."""
        found = self.silos or self.shapes
        assert found is not None, "a fit has silos or their shapes"
        return found

    def need_silos(self, what: str) -> None:
        """Raises when there are no data."""
        if self.silos is None:
            raise ValueError(f"{what} need the silos' data, and this fit was loaded without: pass silos= to nf.load")

    # --- predictions --------------------------------------------------------------------------------------------------

    def predict(
        self, rng_key: Any, data: Mapping[str, Any] | None = None, *, silo: str | None = None, num_samples: int = 1000
    ) -> dict[str, Array]:
        """Draws of the observed sites (``numpyro.factor`` terms have none) and of the deterministic sites.

        - ``predict(key, silo="york")``: york's own units, with its own posterior of their local latents.
        - ``predict(key, data, silo="york")``: new units in york. Their local latents come from their prior given the
          globals; latents that york has once, and those of groups along which nothing is observed (counties in long
          format), from york's posterior. Groups are york's own when their number is york's.
        - ``predict(key, data)``: a new silo. All local latents come from their prior given the globals.

        With an amortised guide whose inputs are all in ``data``, the latents of new units come from the encoder: then
        the values of observations matter.

        Args:
            rng_key: ``jax.random.key(0)``. The globals' draws are those of :meth:`sample` with the same key.
            data: the model's arguments. Observations may be left out, even where the model requires them: their
                values do not matter. Shared arguments are filled in, and with ``silo`` also its number of groups and
                other arguments that do not have a row for each unit.
            silo: a silo's name.
            num_samples: joint draws of all sites.

        Returns:
            ``{site: draws}``, an array (num_samples, ...) each.
        """
        if self.from_store and data is not None and silo is not None:
            raise ValueError(
                "silos of a store have no latents of their own, so new units are alike in all of them: predict(key, "
                f"data), or predict(key, silo={silo!r}) for its own units"
            )
        return predict.predict(self, _keys(rng_key, num_samples), data, silo)

    @cached_property
    def _predictor(self) -> Any:
        return forward.predictor(self.method, self.split)

    @cached_property
    def _log_likelihoods(self) -> Any:
        return arviz.log_likelihoods(self)

    @cached_property
    def _observations(self) -> Any:
        return arviz.observations(self.split)

    @cached_property
    def _used_arguments(self) -> frozenset[str]:
        return new_units.used_arguments(self.split)

    def elbo(self, rng_key: Any = None, num_samples: int = 100) -> float:
        """The evidence bound of all silos together, averaged over draws: higher is better.

        With importance-weighted rows it is the tighter bound that was maximised.
        """
        self._need_all("the bound", IN_MEMORY)
        self.need_silos("the bound")
        assert self.silos is not None
        keys = _keys(jax.random.key(0) if rng_key is None else rng_key, num_samples)
        stack = self._stack()
        weighting = self.method.weighting(self.split, stack)
        arrays = tuple((bucket.args, bucket.mask) for bucket in stack.buckets)
        states = self.state.server, self.state.silos
        static = self.method, ById(self.split), weighting, self.state.buckets
        values = _bounds(*static, keys, *states, arrays, stack.shared)
        return float(jnp.mean(values))

    # --- one more round -----------------------------------------------------------------------------------------------

    def correct(self, rng_key: Any, num_points: int = 2048, *, engine: Any = None) -> "Fit":
        """One more round that corrects the posterior of the globals, whatever its shape, by importance sampling.

        The server sends points of a Student t around the posterior approximation, every silo returns the logarithm of
        its likelihood at them, and the server weighs the points. Draws of the fit that comes back are draws of these
        points, and :attr:`correction` says how far they can be trusted. The locals given the globals stay as they are.

        The silo's message is ``num_points`` values of its log likelihood. They say more about its data than the
        messages of the method do, so this round is opt-in; it is the last row of the history.

        Where locals cannot be integrated by quadrature (rows of more than two, or rows that meet) the likelihood is
        estimated from 256 draws a row, afresh at each point. The weights are then right on average but noisy, and the
        noise takes its part of the effective sample size.

        Works for fits with a normal over the globals: EP, SEP, PVI, and SFVI or SFVIAvg with a ``StructuredNormal``
        guide (theta stays at its value). On a corrected fit, the points come from around the weighted ones.

        Args:
            rng_key: ``jax.random.key(0)``.
            num_points: S; rounded up to a power of two.
            engine: where it runs; by default ``nf.engines.Vmap()``.

        Example:
            >>> fit = nf.EP(model).run(jax.random.key(0), silos).correct(jax.random.key(1))  # doctest: +SKIP
        """
        from numpyro_fed.run import correct

        self._need_all("a correction", IN_MEMORY)
        return correct.correct(self, rng_key, num_points, engine)

    @cached_property
    def correction(self) -> "Correction | None":
        """Effective sample size, Pareto k-hat, points and weights of a corrected fit; None for any other."""
        from numpyro_fed.results import correction

        found = self.state.server
        return correction.Correction(found) if isinstance(found, correction.Corrected) else None

    @property
    def uncorrected(self) -> "Fit":
        """The fit before its correction, to go on from; the history keeps the round."""
        from numpyro_fed.results import correction

        return correction.uncorrected(self)

    # --- a factor a silo ----------------------------------------------------------------------------------------------

    def without(self, silos: str | Sequence[str], num_rounds: int = 0, *, rng_key: Any = None) -> "Fit":
        """The posterior without one silo or several, by name. For EP and PVI, whose server holds a site for each.

        The silo's site is taken out, q / t_j; nobody is asked and nothing is sent. That is exact where the others'
        factors are normal. Elsewhere their sites were found in the silo's company: ``num_rounds`` further rounds among
        them find those that stand without it. (The sites begin anew if q / t_j is improper.)

        The history of what comes back covers these rounds.

            >>> fit.without("leeds").summary()  # doctest: +SKIP
        """
        from numpyro_fed.results import influence

        return influence.without(self, silos, num_rounds, rng_key)

    def add(self, rng_key: Any, silos: Silos, num_rounds: int = 0) -> "Fit":
        """The posterior with silos that join later, an :class:`~numpyro_fed.Silos` with new names. For EP and PVI.

        Their sites start flat; in one round they alone are asked, all at once, while the others stay silent. Then
        everybody takes part in ``num_rounds`` more. The history covers these rounds.

            >>> fit.add(jax.random.key(1), nf.Silos({"hull": dict(x=x, y=y)}))  # doctest: +SKIP
        """
        from numpyro_fed.results import influence

        return influence.add(self, rng_key, silos, num_rounds)

    def influence(self) -> "Influence":
        """How far each silo moved the posterior of the globals: q against q / t_j. For EP and PVI.

        Reads the server's sites; nobody is asked. ``.table``, ``.plot()``.
        """
        from numpyro_fed.results import influence

        return influence.influence(self)

    def conflict(self) -> "Conflict":
        """Whether each silo agrees with the others: its site t_j against q / t_j. For EP and PVI.

        A silo's z for a parameter is (m - m_c) / sqrt(C_c - C), with mean m and variance C of the posterior, and m_c,
        C_c of the posterior without the silo. The overall statistic sums over all directions of which the silo knows
        something, and has a chi-square distribution where silo and others agree (node-splitting as in Presanis et al.
        2013, for normal factors). Reads the server's sites; nobody is asked. ``.table``, ``.by_parameter``,
        ``.plot()``.
        """
        from numpyro_fed.results import influence

        return influence.conflict(self)

    # --- what it says -------------------------------------------------------------------------------------------------

    def summary(
        self, rng_key: Any = None, num_samples: int = 4000, hdi_prob: float = 0.9, *, silo: str | None = None
    ) -> pd.DataFrame:
        """Mean, sd, median and a highest-density interval of every global scalar, with theta below.

        With ``silo``, that silo's local sites as well.
        """
        key = jax.random.key(0) if rng_key is None else rng_key
        draws = self.sample(key, num_samples) if silo is None else self.sample_local(key, num_samples, silo=silo)
        return summary.table(draws, self.params, self.split.partition, hdi_prob)

    def to_arviz(
        self,
        rng_key: Any = None,
        num_samples: int = 1000,
        *,
        local: bool = True,
        log_likelihood: bool = False,
        posterior_predictive: bool = False,
    ) -> Any:
        """The posterior for ArviZ: an InferenceData, or under ArviZ 1.x a DataTree; one chain of independent draws.

        A local site along the plate "children" has the dimension ``children``, over the children of all silos in
        order, labelled ``york[0]``; the coordinate ``children_silo`` says whose they are (under ArviZ 1.x, whose
        summaries take no such coordinates, a variable of the group constant_data). Latents that a silo has once have
        the dimension ``silo``. Crossed silo plates form one dimension.

        Args:
            rng_key: by default ``jax.random.key(0)``.
            num_samples: joint draws of all sites of all silos.
            local: with the silos' local sites and deterministics.
            log_likelihood: with the log density of every observation given its silo's locals (unscaled; those that
                are masked, and ``numpyro.factor`` terms, left out), for ``arviz.loo``. Where every unit has a latent of
                its own, leaving one out changes that latent a lot: ``arviz.loo`` will then say so.
            posterior_predictive: with replicates of the observed sites.

        Of a fit to a store it has the globals alone.
        """
        key = jax.random.key(0) if rng_key is None else check_key(rng_key)
        _keys(key, num_samples)
        if self.from_store:
            if log_likelihood or posterior_predictive:
                self._need_all("log likelihoods and replicates", "predict(key, silo=name) reads one")
            return arviz.to_arviz(replace(self, silos=None), key, int(num_samples), False, False, False)
        return arviz.to_arviz(self, key, int(num_samples), local, log_likelihood, posterior_predictive)

    def save(self, path: str | Path) -> Path:
        """Write the fit to an ``.npz`` file (the suffix is added where it is missing) and return its path.

        The file has the state, the history, the shared arguments, and of the silos' own arguments the shapes alone: no
        data. The silos' local variational parameters are in it. Read it with ``nf.load(path, method)``.
        """
        from numpyro_fed.results import storage

        return storage.save(self, path)

    def __repr__(self) -> str:
        return summary.text(self)

    def _repr_html_(self) -> str:
        return summary.html(self)


def _keys(rng_key: Any, num_samples: Any) -> Array:
    if isinstance(num_samples, bool) or not isinstance(num_samples, int | np.integer) or num_samples < 1:
        raise ValueError(f"num_samples must be an int of at least 1, got {num_samples!r}")
    return jax.random.split(check_key(rng_key), int(num_samples))


@partial(jax.jit, static_argnums=(0, 1, 2, 3), compiler_options=ONCE)
def _bounds(
    method: Any,
    split: ById,
    weighting: Any,
    names: tuple,
    keys: Array,
    server: Any,
    states: tuple,
    arrays: tuple,
    shared: tuple,
) -> Array:
    buckets = tuple(Bucket(own, *found) for own, found in zip(names, arrays, strict=True))
    stack = Stack(sum(names, ()), buckets, shared)
    return jax.lax.map(lambda key: method.elbo(split.value, weighting, stack, server, states, key), keys)
