"""A method made ready for silos of certain shapes."""

from typing import Any, NamedTuple

from numpyro_fed.algorithm import FederatedAlgorithm
from numpyro_fed.model.split_model import SplitModel


class Prepared(NamedTuple):
    """A method made ready for silos of certain shapes; holds no data but the shared arguments."""

    split: SplitModel
    algorithm: FederatedAlgorithm
    mode: FederatedAlgorithm | None  # finds a start
    notes: dict[str, Any]
