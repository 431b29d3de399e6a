"""Federated Bayesian inference on NumPyro."""

from numpyro_fed import datasets, engines, guides, schedules
from numpyro_fed.methods import SFVI
from numpyro_fed.partition import Partition, partition
from numpyro_fed.silos import Silos, split
from numpyro_fed.tracing import PartitionError

__all__ = ["SFVI", "Partition", "PartitionError", "Silos", "datasets", "engines", "guides", "partition", "schedules", "split"]
__version__ = "0.1.0"
