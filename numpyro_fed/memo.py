"""Values that are made once: engines take algorithms as static arguments, so the same one must be the same object."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

KEPT = 128

_kept: "OrderedDict[Hashable, Any]" = OrderedDict()
_lock = threading.Lock()


class ByIdentity(NamedTuple):
    """A key that is equal when it is the same object."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByIdentity) and self.value is other.value


def remembered(make: Callable[[], Any], *key: Hashable) -> Any:
    """``make()``, or what it gave when it was last asked for with this key; the least used are forgotten.

    >>> remembered(lambda: object(), "a", 1) is remembered(lambda: object(), "a", 1)
    True
    """
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]
    made = make()  # which may ask for others
    with _lock:
        made = _kept.setdefault(key, made)  # another thread's, where it was faster
        while len(_kept) > KEPT:
            _kept.popitem(last=False)
    return made


def forget() -> None:
    """Everything is made anew, as in a fresh process."""
    with _lock:
        _kept.clear()
