"""Who is where among the buckets of a stack."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from numpyro_fed.keys import identities


class Places(NamedTuple):
    """Who is where. Arrays, so that a compiled program depends on how many silos there are, not on their names.

    A bucket may be filled up with copies of its last silo, of which nobody hears.
    """

    words: np.ndarray  # uint32 (J, 2): identities
    of_bucket: tuple[np.ndarray, ...]  # int32 (silos of the bucket, copies too): their places among all
    within: tuple[np.ndarray, ...]  # int32 (J,): of a silo in this bucket; the bucket's length if it is elsewhere
    bucket: np.ndarray  # int32 (J,): which one a silo is in
    order: np.ndarray | None  # int32 (J,): of all silos, among the buckets one after another; None: they are in order


@lru_cache(maxsize=32)
def places_of(names: tuple[str, ...], buckets: tuple[tuple[str, ...], ...], multiple: int = 1) -> Places:
    """Of all silos' names and those of each bucket, which is filled up to a multiple of so many silos."""
    number = {name: j for j, name in enumerate(names)}
    own = [np.array([number[name] for name in bucket], np.int32) for bucket in buckets]
    of_bucket = tuple(np.pad(places, (0, -len(places) % multiple), "edge") for places in own)
    within, bucket, order, before = [], np.zeros(len(names), np.int32), np.zeros(len(names), np.int32), 0
    for b, (places, filled) in enumerate(zip(own, of_bucket, strict=True)):
        inside = np.full(len(names), len(filled), np.int32)
        inside[places] = np.arange(len(places))
        within.append(inside)
        bucket[places], order[places] = b, before + inside[places]
        before += len(filled)
    in_order = before == len(names) and np.array_equal(order, np.arange(len(names)))
    return Places(identities(names), of_bucket, tuple(within), bucket, None if in_order else order)
