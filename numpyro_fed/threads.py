"""Runs in threads of their own.

NumPyro keeps the effect handlers that are at work in one list for the whole process. Where two threads trace a model at
the same time each meets the other's handlers, and both fail, or worse. So here each thread has a list of its own; the
main thread's is NumPyro's.
"""

import sys
import threading
from collections.abc import Iterator
from typing import Any

from numpyro import primitives


class HandlersByThread(threading.local):
    """What NumPyro asks of its list of handlers, thread by thread.

    >>> stack = HandlersByThread(["main"])
    >>> seen = []
    >>> thread = threading.Thread(target=lambda: seen.append(len(stack)))
    >>> thread.start(); thread.join()
    >>> seen, len(stack)
    ([0], 1)
    """

    def __init__(self, main: list[Any]) -> None:  # called once in each thread
        self._own = main if threading.current_thread() is threading.main_thread() else []

    def __len__(self) -> int:
        return len(self._own)

    def __getitem__(self, index: Any) -> Any:
        return self._own[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._own)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self._own)

    def append(self, handler: Any) -> None:
        self._own.append(handler)

    def pop(self) -> Any:
        return self._own.pop()

    def index(self, handler: Any) -> int:
        return self._own.index(handler)


def separate_handlers() -> None:
    """Give each thread its own list of NumPyro's handlers; a NumPyro that has done so by itself is left alone."""
    shared = getattr(primitives, "_PYRO_STACK", None)
    if type(shared) is not list:
        return
    by_thread = HandlersByThread(shared)
    for name, module in list(sys.modules.items()):
        if name.startswith("numpyro.") and getattr(module, "_PYRO_STACK", None) is shared:
            module._PYRO_STACK = by_thread  # type: ignore[attr-defined]
