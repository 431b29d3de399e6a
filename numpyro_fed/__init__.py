"""Federated Bayesian inference on NumPyro."""

from numpyro_fed import datasets, engines, guides, partitioners, schedules, solvers
from numpyro_fed.compare import Comparison, compare
from numpyro_fed.correct import Correction
from numpyro_fed.evaluate import evaluate
from numpyro_fed.fit import Fit
from numpyro_fed.influence import Conflict, Influence
from numpyro_fed.methods import (
    EP,
    PVI,
    SEP,
    SFVI,
    FedAvg,
    FedPA,
    Fits,
    Independent,
    NonFiniteError,
    SFVIAvg,
    VerdictWarning,
)
from numpyro_fed.partition import Partition, partition
from numpyro_fed.reference import Reference, nuts
from numpyro_fed.silos import Silos, split
from numpyro_fed.storage import load
from numpyro_fed.store import SiloStore
from numpyro_fed.tracing import PartitionError

__all__ = [
    "EP",
    "PVI",
    "SEP",
    "SFVI",
    "Comparison",
    "Conflict",
    "Correction",
    "FedAvg",
    "FedPA",
    "Fit",
    "Fits",
    "Independent",
    "Influence",
    "NonFiniteError",
    "Partition",
    "PartitionError",
    "Reference",
    "SFVIAvg",
    "SiloStore",
    "Silos",
    "VerdictWarning",
    "compare",
    "datasets",
    "engines",
    "evaluate",
    "guides",
    "load",
    "nuts",
    "partition",
    "partitioners",
    "schedules",
    "solvers",
    "split",
]
__version__ = "0.1.0"
