"""What the server knows of the silos when a method compiles."""

from typing import NamedTuple

import numpy as np


class Survey(NamedTuple):
    """All silos' answers, combined (:mod:`numpyro_fed.run.survey`). Hashable: compiled programs are kept by it."""

    num_silos: int
    observations: tuple[tuple[str, tuple[int, ...]], ...] = ()  # of each observed site, by silo; of a store, of a few
    known: bool = True  # all silos are in ``observations``; else N is estimated from those that are heard
    rows: str = "whole"  # "aligned", "indexed" or (where rows meet in a term) "whole", over all silos
    joined: bool = True  # rows of several groups meet somewhere
    room: int = 0  # for a minibatch of groups, in long format; -1: an observation belongs to no group
    mixed: str = ""  # an observed site of which a row looks at other rows, so that minibatches are wrong
    certified: int = 0  # silos on whose data the split was compared with NumPyro's own density
    around: tuple[str, ...] = ()  # sites whose rows look at nearly all other rows of their silo

    @property
    def sizes(self) -> tuple[int, ...]:
        """n_j, at least 1, in the order of the silos; of a store, those of a few."""
        return tuple(max(1, sum(counts)) for counts in zip(*(counts for _, counts in self.observations), strict=True))

    def only(self, *at: int) -> "Survey":
        """Of some of the silos, by their places."""
        some = tuple((site, tuple(counts[j] for j in at)) for site, counts in self.observations)
        return self._replace(num_silos=len(at), observations=some)

    @property
    def total(self) -> float:
        """N, or the best guess at it."""
        return float(np.mean(self.sizes) * self.num_silos)

    @property
    def shares(self) -> np.ndarray:
        """n_j / N, float64; equal where not all are known."""
        if not self.known:
            return np.full(self.num_silos, 1 / self.num_silos)
        return np.array(self.sizes, np.float64) / sum(self.sizes)
