"""Silos whose arrays can be read in their own room alone."""

from typing import Any

import jax
import numpy as np

import numpyro_fed as nf
from numpyro_fed.data.silos import inside


class Sealed:
    """An array of which the server may know shape and type."""

    def __init__(self, silo: str, array: np.ndarray) -> None:
        self._silo, self._array = silo, array
        self.shape, self.dtype, self.ndim, self.size = array.shape, array.dtype, array.ndim, array.size

    def _opened(self) -> np.ndarray:
        assert inside() == self._silo, f"an array of {self._silo} was read in {inside() or 'the server'}"
        return self._array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self._opened(), dtype)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._opened()[index]

    def __len__(self) -> int:
        return self.shape[0]


def sealed(silos: nf.Silos) -> nf.Silos:
    closed = silos.only(*silos.names)
    seal = lambda name, leaf: leaf if isinstance(leaf, int) else Sealed(name, leaf)
    closed._data = {
        name: jax.tree.map(lambda leaf, name=name: seal(name, leaf), silos.own(name)) for name in silos.names
    }
    return closed
