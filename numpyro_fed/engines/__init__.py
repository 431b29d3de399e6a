"""Where an algorithm runs: :class:`Vmap` (default, one compiled program) or :class:`Loopback` (through bytes)."""

from numpyro_fed.engines.loopback import Loopback
from numpyro_fed.engines.vmap import Vmap

__all__ = ["Loopback", "Vmap"]
