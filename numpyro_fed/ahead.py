"""Programs that are compiled before they are needed, beside what goes on: XLA compiles without Python's lock.

Tracing a model is Python's work and stays where it is; what a thread does is the compiler's part alone. A program that
was compiled so is the very one that a later call of the same function finds.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import jax

from numpyro_fed.host import undisturbed
from numpyro_fed.memo import ByIdentity

KEPT = 128

_begun: "OrderedDict[Hashable, list[Future]]" = OrderedDict()  # []: it was compiled when it was called
_lock = threading.Lock()  # runs may be in threads of their own


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=2, thread_name_prefix="numpyro_fed compiler")


def worthwhile() -> bool:
    """Whether there is a processor to spare."""
    free = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return free > 1


def begin(key: Hashable, lower: Callable[[], Any]) -> None:
    """Compile what ``lower`` gives, a program or several, unless it is there already."""
    if key not in _begun:
        with undisturbed():
            lowered = lower()
        _keep(key, [_threads().submit(one.compile) for one in getattr(lowered, "pieces", (lowered,))])


def wait(key: Hashable) -> None:
    """Until a program that was begun is there; its errors are those of the call that follows."""
    with _lock:
        found = _begun.get(key, [])
    for one in found:
        one.exception()
    _keep(key, [])


def busy() -> bool:
    """Whether a program is being compiled."""
    with _lock:
        return any(not one.done() for found in _begun.values() for one in found)


def beside(later: list[Callable[[], None]]) -> None:
    """Begin with what will be needed later, for as long as something is being compiled.

    What is wrong with one of these is said when it is needed, and not before.
    """
    while later and busy():
        try:
            later.pop(0)()
        except Exception:
            later.clear()


def program(algorithm: Any, how: Hashable, arguments: Any) -> Hashable:
    """What tells programs of an engine apart."""
    leaves, structure = jax.tree.flatten(arguments)
    shapes = tuple((getattr(leaf, "shape", ()), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves)
    return ByIdentity(algorithm), how, structure, shapes


def _keep(key: Hashable, value: list[Future]) -> None:
    with _lock:
        _begun[key] = value
        _begun.move_to_end(key)
        while len(_begun) > KEPT:
            _begun.popitem(last=False)
