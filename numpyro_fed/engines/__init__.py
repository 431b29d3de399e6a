"""Where an algorithm runs.

:class:`Vmap` is the default, one compiled program; :class:`Loopback` sends everything through bytes; :class:`Streamed`
reads each round's cohort from a store.
"""

from numpyro_fed.engines.base import Engine
from numpyro_fed.engines.loopback import Loopback
from numpyro_fed.engines.streamed import Streamed
from numpyro_fed.engines.vmap import Vmap

__all__ = ["Engine", "Loopback", "Streamed", "Vmap"]
