"""Where an algorithm runs.

:class:`Vmap` is the default, one compiled program; :class:`Sharded` is the same over several devices; :class:`Loopback`
sends everything through bytes; :class:`Streamed` reads each round's cohort from a store.
"""

from numpyro_fed.engines.base import Engine, sent_to
from numpyro_fed.engines.faults import Fault, Faults
from numpyro_fed.engines.loopback import Loopback
from numpyro_fed.engines.sharded import Sharded
from numpyro_fed.engines.streamed import Streamed
from numpyro_fed.engines.vmap import Vmap
from numpyro_fed.precision import engine_in_x64, stacked

__all__ = [
    "Engine",
    "Fault",
    "Faults",
    "Loopback",
    "Sharded",
    "Streamed",
    "Vmap",
    "engine_in_x64",
    "sent_to",
    "stacked",
]
