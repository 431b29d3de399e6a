"""Does the model fit? What a fit can be asked about its model."""

from typing import Any

import jax

from numpyro_fed.engines.base import Engine
from numpyro_fed.results.draws import check_keys
from numpyro_fed.results.loo import Loo, loo
from numpyro_fed.results.ppc import Ppc, ppc
from numpyro_fed.results.value import Fitted


class ChecksOfModel(Fitted):
    """The part of a :class:`~numpyro_fed.Fit` that asks whether its model fits the data."""

    def ppc(
        self,
        statistic: Any,
        rng_key: Any = None,
        num_samples: int = 1000,
        *,
        site: str | None = None,
        redraw_locals: bool = False,
    ) -> Ppc:
        """Posterior predictive checks by silo: a statistic of its observations against that of replicates.

        What leaves a silo are, of each statistic, how many replicates have a larger one and an equal one, and by how
        many sds of the replicates the observed one is off.

        Args:
            statistic: a function of an array of a silo's observations that gives a number (``np.max``), one of
                ``"mean"``, ``"sd"``, ``"min"`` and ``"max"``, or several: a list of these, or ``{name: function}``.
                Observations that the model masks are left out.
            rng_key: by default ``jax.random.key(0)``.
            num_samples: replicates.
            site: the observed site, where there are several.
            redraw_locals: draw local latents from their prior given the globals, as those of new units, in place of
                the silo's posterior of its own: these have seen the data, and hide most of what is wrong with them.

        A p-value uses the data twice, so it is rarely small where all is well, and none of it where the statistic is
        one that the model fits anyway (the mean of a model with an intercept).

        Example:
            >>> fit.ppc("mean", num_samples=200).table["p_value"].between(0.02, 0.98).all()
            np.True_
        """
        self._need_all_silos("posterior predictive checks")
        key = jax.random.key(0) if rng_key is None else rng_key
        return ppc(self, check_keys(key, num_samples), statistic, site, redraw_locals)

    def loo(
        self, rng_key: Any = None, num_samples: int = 1000, *, by: str | None = None, engine: Engine | None = None
    ) -> Loo:
        r"""How well the model predicts what it has not seen: Pareto smoothed leave-one-out cross-validation, by silo.

        What is left out at a time, the unit, is a row of a silo's observations; where observations share local latents,
        all that share them (a child with all its visits, a county in long format; the silo as a whole, where its rows
        meet or a latent is the silo's), for without these data their latents would not be known either. Locals are
        integrated out in the silo, so a unit counts with :math:`p(y_i \mid z_G)`. What ``numpyro.factor`` adds counts
        as an observation, with the log density that it is.

        One round. The message is six sums over the silo's units: their number, elpd, its square, the same with the
        unit's own data, a Monte Carlo variance, and how many Pareto k-hats lie below .5, .7, 1 and above. elpd by unit
        stays in the silo. Of a silo with one unit these sums are that unit's.

        Args:
            rng_key: by default ``jax.random.key(0)``.
            num_samples: draws of the globals. A corrected fit takes its weighted points instead; others' elpd is that
                of their posterior approximation, as good as :attr:`verdict` says.
            by: ``"silo"`` leaves a silo out at a time; the name of an argument with a whole number for each row
                (``by="county"``), all rows that have the same. Models that leave out different units by themselves
                can be compared by what all can leave out.
            engine: where it runs; by default ``nf.engines.Vmap()``.

        Example:
            >>> found = fit.loo()
            >>> found.num_units, bool(found.pareto_k["k > 1"] == 0)
            (50, True)
        """
        self._need_all_silos("cross-validation")
        return loo(self, jax.random.key(0) if rng_key is None else rng_key, num_samples, by, engine)

    def _need_all_silos(self, what: str) -> None:
        if self.from_store:
            raise ValueError(
                f"{what} would read all {len(self.state.names)} silos of the store: hold a part of it in memory, "
                "store.only(*names), and fit that"
            )
