"""Preparation without pooling: scales, codes and knots that are the same in all silos, from counted sums.

``x.mean()`` in a model is another number in each silo, and a level that one silo lacks shifts its codes: either way the
silos have different models. These functions find one scale, one list of levels, one set of knots for all of them.
Each silo computes in its own room and sends a few sums or counts; no row leaves, nor does a count of fewer than
``threshold`` rows. Each function returns the silos, prepared, and what to apply to new data:

>>> silos, scaling = nf.prepare.standardize(silos, "x")
>>> scaling
standardised with 50 rows of 2 silos; 108 bytes up, 132 down
       mean        sd  rows
x -0.112933  0.838907    50
>>> fit = nf.EP(model).run(key, silos, progress_bar=False)
>>> draws = fit.predict(key, scaling.apply(dict(x=x)))

This is done before any model is seen, on columns as they are (strings, int64, float64 in a float32 program): so a
silo's part is NumPy on the host, not a compiled program of an engine. All that crosses goes through the wire codec
(:mod:`numpyro_fed.engines.wire`) and is counted.
"""

from numpyro_fed.prepare.coding import Levels, levels
from numpyro_fed.prepare.knots import Quantiles, quantiles
from numpyro_fed.prepare.scaling import Scaling, standardize

__all__ = ["Levels", "Quantiles", "Scaling", "levels", "quantiles", "standardize"]
