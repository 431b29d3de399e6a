"""Federated Bayesian inference on NumPyro."""

from numpyro_fed import algorithm, engines, gi, guides, prepare, remote, schedules, solvers
from numpyro_fed.algorithm import Posterior
from numpyro_fed.cache import enable_cache
from numpyro_fed.data import datasets, partitioners
from numpyro_fed.data.silos import Silos
from numpyro_fed.data.split import split
from numpyro_fed.data.store import SiloStore
from numpyro_fed.judge.calibration import Calibration
from numpyro_fed.judge.compare import Comparison, compare
from numpyro_fed.judge.compare_models import ModelComparison, compare_models
from numpyro_fed.judge.evaluate import evaluate
from numpyro_fed.judge.messages import partition
from numpyro_fed.judge.nuts import Reference, nuts
from numpyro_fed.judge.sbc import sbc
from numpyro_fed.methods import (
    EP,
    GIPVI,
    PVI,
    SEP,
    SFVI,
    FedAvg,
    FedNP,
    FedPA,
    Fits,
    Independent,
    Method,
    NonFiniteError,
    SFVIAvg,
    SiloLostError,
    VerdictWarning,
)
from numpyro_fed.model.partition_table import Partition
from numpyro_fed.model.trace import PartitionError
from numpyro_fed.normal.gaussian import Normal
from numpyro_fed.results.correction import Correction
from numpyro_fed.results.fit import Fit
from numpyro_fed.results.influence_tables import Conflict, Influence
from numpyro_fed.results.load import load
from numpyro_fed.results.loo import Loo
from numpyro_fed.results.ppc import Ppc

__all__ = [
    "EP",
    "GIPVI",
    "PVI",
    "SEP",
    "SFVI",
    "Calibration",
    "Comparison",
    "Conflict",
    "Correction",
    "FedAvg",
    "FedNP",
    "FedPA",
    "Fit",
    "Fits",
    "Independent",
    "Influence",
    "Loo",
    "Method",
    "ModelComparison",
    "NonFiniteError",
    "Normal",
    "Partition",
    "PartitionError",
    "Posterior",
    "Ppc",
    "Reference",
    "SFVIAvg",
    "SiloLostError",
    "SiloStore",
    "Silos",
    "VerdictWarning",
    "algorithm",
    "compare",
    "compare_models",
    "datasets",
    "enable_cache",
    "engines",
    "evaluate",
    "gi",
    "guides",
    "load",
    "nuts",
    "partition",
    "partitioners",
    "prepare",
    "remote",
    "sbc",
    "schedules",
    "solvers",
    "split",
]
__version__ = "0.2.0"
