"""Federated inference methods, one file each."""

from numpyro_fed.checks import VerdictWarning
from numpyro_fed.methods.base import Method
from numpyro_fed.methods.ep import EP, SEP
from numpyro_fed.methods.fedavg import FedAvg
from numpyro_fed.methods.fednp import FedNP
from numpyro_fed.methods.fedpa import FedPA
from numpyro_fed.methods.gipvi import GIPVI
from numpyro_fed.methods.independent import Fits, Independent
from numpyro_fed.methods.pvi import PVI
from numpyro_fed.methods.sfvi import SFVI
from numpyro_fed.methods.sfvi_avg import SFVIAvg
from numpyro_fed.run.diagnose import NonFiniteError
from numpyro_fed.run.lost import SiloLostError

__all__ = [
    "EP",
    "GIPVI",
    "PVI",
    "SEP",
    "SFVI",
    "FedAvg",
    "FedNP",
    "FedPA",
    "Fits",
    "Independent",
    "Method",
    "NonFiniteError",
    "SFVIAvg",
    "SiloLostError",
    "VerdictWarning",
]
