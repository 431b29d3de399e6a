"""Variational families over the globals and each silo's locals."""

from numpyro_fed.guides.structured import StructuredNormal

__all__ = ["StructuredNormal"]
