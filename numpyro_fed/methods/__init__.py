"""One file a method; each assembles the parts."""

from numpyro_fed.methods.sfvi import SFVI

__all__ = ["SFVI"]
