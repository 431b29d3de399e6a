"""What comes back from a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd

from numpyro_fed.checks import check_key, format_names
from numpyro_fed.data.silos import Silos
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.results import arviz, conflict, elbo, influence, ledger, predict, save, summary
from numpyro_fed.results.correction import HasCorrection
from numpyro_fed.results.draws import check_keys, global_draws, silo_draws
from numpyro_fed.results.influence_tables import Conflict, Influence
from numpyro_fed.results.model_checks import ChecksOfModel
from numpyro_fed.results.plots import Plotted

Array = jax.Array
IN_MEMORY = "hold a part of it in memory, store.only(*names), and fit that"


@dataclass(frozen=True, repr=False, eq=False)
class Fit(ChecksOfModel, Plotted):
    """A fitted model: draws, predictions, summaries.

    Draws of one key belong together: :meth:`sample`, :meth:`sample_local`, :meth:`predict` and :meth:`to_arviz` with
    the same key and number of samples all start from the same draws of the globals.

    Attributes:
        posterior: all that a fit knows of the method it comes from (:class:`numpyro_fed.algorithm.Posterior`).
        state: for ``run(..., init_state=fit.state)``, which goes on.
        history: ``{name: array}``, one row a round, those of the start included; the survey's bytes are in the first.
        records: what the survey and each phase cost: ``phase``, ``rounds``, ``bytes_up``, ``bytes_down``.
        seconds: wall time of the run, compilation included.
        reasons: what the rounds themselves showed against the posterior; part of :attr:`verdict`.
    """

    def normal(self) -> Normal:
        """The normal over the unconstrained globals, in the order of ``fit.split.coordinate_names()``.

        ``.mean``, ``.sds``, ``.covariance``, NumPy arrays: JAX would warn of float64 in a float32 program. Of a
        corrected fit, the normal with its points' moments.

            >>> list(fit.split.coordinate_names()), fit.normal().sds.shape
            (['beta[0]', 'beta[1]'], (2,))
        """
        found = self.posterior.normal(self.state.server)
        if found is None:
            raise ValueError(
                f"{summary.described(self)} has no normal posterior of the globals: use fit.sample, or fit with nf.EP, "
                "nf.SEP or nf.PVI, with nf.SFVI(model, guide=nf.guides.StructuredNormal()), or with nf.FedPA(model, "
                "posterior=True), run to the end"
            )
        return jax.tree.map(np.asarray, found)  # float64 wherever it was found in it, in a float32 program, too

    def ledger(self, silo: str | None = None) -> pd.DataFrame:
        """All that was sent: phase, round, silo, direction (up: from the silo), field, shape and bytes of each leaf.

        ``round`` is the row of :attr:`history` that counts it: what precedes the rounds is in the first, what follows
        them in the last. Bytes are those of the wire format, with a leaf's part of the header; a message's own few
        are its field ``envelope``.

            >>> sent = fit.ledger("york")
            >>> sent[sent["direction"] == "up"].groupby("phase", observed=True)["bytes"].sum()["rounds"] > 0
            np.True_
            >>> int(fit.ledger()["bytes"].sum()) == int((fit.history["bytes_up"] + fit.history["bytes_down"]).sum())
            True

        Args:
            silo: what this one sent and received; by default all of them.
        """
        names = (*self.state.names, *self.left) if self.left else self.state.names
        if silo is not None and silo not in names:
            raise ValueError(f"no silo is named {silo!r}; the silos are {format_names(names)}")
        return ledger.ledger(self.sent, names, silo)

    # --- draws --------------------------------------------------------------------------------------------------------

    def sample(self, rng_key: Any, num_samples: int = 1000) -> dict[str, Array]:
        """Draws of the global sites, and of deterministic sites that depend on them alone, constrained."""
        return global_draws(self, check_keys(rng_key, num_samples))

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
        (:class:`~numpyro_fed.guides.Amortized`): the model's arguments, with what the encoder reads.
        """
        if (silo is None) == (data is None):
            raise TypeError("sample_local needs a silo, silo='york', or the data of new units, data=dict(...)")
        keys = check_keys(rng_key, num_samples)
        return predict.encoded(self, keys, data) if data is not None else silo_draws(self, keys, str(silo))

    def _need_all(self, what: str, instead: str) -> None:
        """Raises when that would read every silo of a store."""
        if self.from_store:
            raise ValueError(f"{what} would read all {len(self.state.names)} silos of the store: {instead}")

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
        return predict.predict(self, check_keys(rng_key, num_samples), data, silo)

    def elbo(self, rng_key: Any = None, num_samples: int = 100) -> float:
        """The evidence bound of all silos together, averaged over draws: higher is better.

        With importance-weighted rows it is the tighter bound that was maximised. Of a corrected fit, whose points have
        no density, it is that of the fit before.
        """
        if self.correction is not None:
            return self.uncorrected.elbo(rng_key, num_samples)
        self._need_all("the bound", IN_MEMORY)
        self.need_silos("the bound")
        return elbo.elbo(self, check_keys(jax.random.key(0) if rng_key is None else rng_key, num_samples))

    # --- one more round -----------------------------------------------------------------------------------------------

    def correct(self, rng_key: Any, num_points: int = 2048, *, engine: Any = None) -> "Fit":
        """One more round that corrects the posterior of the globals, whatever its shape, by importance sampling.

        The server sends points of a Student t around the posterior approximation, every silo returns the logarithm of
        its likelihood at them, and the server weighs the points. Draws of the fit that comes back are draws of these
        points, and :attr:`correction` says how far they can be trusted. The locals given the globals stay as they are.

        The silo's message is ``num_points`` values of its log likelihood, less those that the check at the end of the
        run has asked for. They say more about its data than the messages of the method do, so this round is opt-in; it
        is the last row of the history.

        Where locals cannot be integrated by quadrature (rows of more than two, or rows that meet) the likelihood is
        estimated from 256 draws a row, afresh at each point. The weights are then right on average but noisy, and the
        noise takes its part of the effective sample size.

        Works for fits with a normal over the globals: EP, SEP, PVI, and SFVI or SFVIAvg with a ``StructuredNormal``
        guide (theta stays at its value). On a corrected fit, the points come from around the weighted ones.

        Args:
            rng_key: ``jax.random.key(0)``.
            num_points: S; rounded up to a power of two.
            engine: where it runs; by default where the fit was made.

        Example:
            >>> corrected = fit.correct(jax.random.key(1), num_points=256)
            >>> bool(corrected.correction.ess > 100)
            True
        """
        self._need_all("a correction", IN_MEMORY)
        options = {} if engine is None else {"engine": engine}
        return self.need_again().correct(self, rng_key, num_points, **options)

    @property
    def uncorrected(self) -> "Fit":
        """The fit before its correction, to go on from; the history keeps the round."""
        if not isinstance(self.posterior, HasCorrection):
            return self
        posterior, server = self.posterior.uncorrected(self.state.server)
        return replace(self, posterior=posterior, state=self.state._replace(server=server))

    # --- a factor a silo ----------------------------------------------------------------------------------------------

    def without(self, silos: str | Sequence[str], num_rounds: int = 0, *, rng_key: Any = None) -> "Fit":
        """The posterior without one silo or several, by name. For EP and PVI, whose server holds a site for each.

        The silo's site is taken out, q / t_j; nobody is asked and nothing is sent. That is exact where the others'
        factors are normal. Elsewhere their sites were found in the silo's company: ``num_rounds`` further rounds among
        them find those that stand without it. (The sites begin anew if q / t_j is improper.)

        The history of what comes back covers these rounds.

            >>> fit.without("leeds").state.names
            ('york',)
        """
        return influence.without(self, silos, num_rounds, rng_key)

    def add(self, rng_key: Any, silos: Silos, num_rounds: int = 0) -> "Fit":
        """The posterior with silos that join later, an :class:`~numpyro_fed.Silos` with new names. For EP and PVI.

        Their sites start flat; in one round they alone are asked, all at once, while the others stay silent. Then
        everybody takes part in ``num_rounds`` more. The history covers these rounds.

            >>> fit.add(jax.random.key(1), nf.Silos({"hull": dict(x=x, y=y)})).state.names
            ('leeds', 'york', 'hull')
        """
        return influence.add(self, rng_key, silos, num_rounds)

    def influence(self) -> Influence:
        """How far each silo moved the posterior of the globals: q against q / t_j. For EP and PVI.

        Reads the server's sites; nobody is asked. ``.table``, ``.plot()``.
        """
        return influence.influence(self)

    def conflict(self, normal_factors: bool = False) -> Conflict:
        r"""Whether each silo agrees with the others: its site t_j against q / t_j. For EP and PVI.

        A silo's z for a parameter is (m - m_c) / sqrt(C_c - C), with mean m and variance C of the posterior, and m_c,
        C_c of the posterior without the silo; it is about standard normal where silo and others agree (node-splitting
        as in Presanis et al. 2013). What a silo adds to the precision is itself partly chance, most of all for a scale:
        one whose residuals happen to be small says little of it, and a z by its own width is then too large. So a
        cautious z has the larger width of two, this one and that of a site with the silo's share of all observations'
        precision.

        ``p_value`` is that of the silo's largest cautious z, two-sided, times the number of parameters (Bonferroni);
        ``family_wise`` is that times the number of silos, too, and so what to look at first: where all agree, some
        silo's is below .05 in about 5 of 100 data sets.

        Reads the server's sites; nobody is asked. A family without correlations has sds that are too small where
        parameters are correlated, and z that are too large. ``.table``, ``.by_parameter``, ``.plot()``.

        Args:
            normal_factors: say True where every silo's likelihood is normal in the unconstrained globals, with known
                scales. ``p_value`` is then a chi-square's, of the distance over all directions of which the silo knows
                something: it sees shifts of several parameters that none shows alone, and in silos whose design says
                less of a parameter than others' does. Elsewhere it raises false alarms: where a scale is global, a silo
                with large residuals has a wide site, and the sum over all directions is not chi-square.
        """
        return conflict.conflict(self, normal_factors)

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
        check_keys(key, num_samples)
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
        return save.save(self, path)

    def __repr__(self) -> str:
        return summary.text(self)

    def _repr_html_(self) -> str:
        return summary.html(self, self.summary())
