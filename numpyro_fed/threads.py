"""Runs in threads of their own.

NumPyro keeps the effect handlers that are at work in one list for the whole process. Where two threads trace a model at
the same time each meets the other's handlers, and both fail, or worse. So here each thread has a list of its own; the
main thread's is NumPyro's.

Whether distributions validate is one flag for the whole process as well. Padded rows need not lie in a support, so
models are traced without; a thread that turned the flag back would have another's padding validated, which moves
numbers to -inf, and of two that turn it off and back one may leave it off for good. So here a thread turns it off for
itself (:func:`unvalidated`); ``numpyro.enable_validation`` stays what it is, for everybody else.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from numpyro import primitives
from numpyro.distributions import Distribution
from numpyro.distributions.distribution import validation_enabled


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


class ValidationByThread:
    """What NumPyro asks of its flag: that of the process, but not in threads that have turned it off.

    It stands in the place of ``Distribution._validate_args``; a distribution's own ``validate_args=`` goes before it.
    """

    def __init__(self, default: bool) -> None:
        self.default = default
        self._threads = threading.local()

    def __get__(self, instance: Any, owner: Any = None) -> bool:
        return self.default and not self._depth

    @property
    def _depth(self) -> int:
        return getattr(self._threads, "depth", 0)

    @contextmanager
    def off(self) -> Iterator[None]:
        self._threads.depth = self._depth + 1
        try:
            yield
        finally:
            self._threads.depth -= 1

    def set_default(self, value: bool) -> None:
        """``Distribution.set_default_validate_args``."""
        if value not in (True, False):
            raise ValueError(f"validation is on or off, True or False, got {value!r}")
        self.default = bool(value)
        if Distribution.__dict__.get("_validate_args") is not self:  # somebody has set it by hand
            Distribution._validate_args = self.default


def separate_validation() -> None:
    """Let threads turn validation off for themselves; a NumPyro that keeps its flag in another way is left alone."""
    if type(Distribution.__dict__.get("_validate_args")) is bool and hasattr(Distribution, "set_default_validate_args"):
        flag = ValidationByThread(Distribution._validate_args)
        Distribution._validate_args = flag
        Distribution.set_default_validate_args = staticmethod(flag.set_default)


def unvalidated() -> Any:
    """A context without validation of distributions, in this thread alone, whatever is said of it in between.

    >>> import numpyro.distributions as dist
    >>> with unvalidated():
    ...     dist.Normal(0.0, -1.0).scale
    -1.0
    >>> dist.Normal(0.0, -1.0)
    Traceback (most recent call last):
    ValueError: Normal distribution got invalid scale parameter.
    """
    flag = Distribution.__dict__.get("_validate_args")
    return flag.off() if isinstance(flag, ValidationByThread) else validation_enabled(False)
