"""Variational families over the globals and each silo's locals."""

from numpyro_fed.guides.amortized import Amortized
from numpyro_fed.guides.base import Guide
from numpyro_fed.guides.structured import StructuredNormal

__all__ = ["Amortized", "Guide", "StructuredNormal"]
