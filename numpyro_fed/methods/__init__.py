"""Federated inference methods, one file each."""

from numpyro_fed.methods.independent import Independent
from numpyro_fed.methods.sfvi import SFVI
from numpyro_fed.methods.sfvi_avg import SFVIAvg

__all__ = ["SFVI", "Independent", "SFVIAvg"]
