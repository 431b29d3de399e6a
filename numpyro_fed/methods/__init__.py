"""Federated inference methods, one file each."""

from numpyro_fed.methods.base import NonFiniteError
from numpyro_fed.methods.independent import Fits, Independent
from numpyro_fed.methods.sfvi import SFVI
from numpyro_fed.methods.sfvi_avg import SFVIAvg

__all__ = ["SFVI", "Fits", "Independent", "NonFiniteError", "SFVIAvg"]
