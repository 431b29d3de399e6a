"""Variational families over the globals and each silo's locals."""

from numpyro_fed.guides.amortised import Amortised
from numpyro_fed.guides.function import as_guide
from numpyro_fed.guides.structured import StructuredNormal

__all__ = ["Amortised", "StructuredNormal", "as_guide"]
