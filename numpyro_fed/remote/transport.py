"""How bytes get from the server to the silos and back, and what is told when they do not."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol


class Failure(NamedTuple):
    """Why there is no answer of a silo.

    ================  =============================================================================
    kind              what happened
    ================  =============================================================================
    ``"timeout"``     no answer within the time; the silo may still be at work
    ``"lost"``        the silo went away, and did not come back within the time
    ``"refused"``     the silo's policy does not allow it; ``told`` names the rule
    ``"error"``       the silo failed; ``told`` is the kind of error, its text stays in the silo
    ``"mismatch"``    the two ends do not fit: other study file, other versions, another silo
    ``"malformed"``   what came is no answer to what was asked: damaged, too long, of another request
    ================  =============================================================================
    """

    kind: str
    told: str  # a sentence without the silo's name: "its policy allows no check"


class Transport(Protocol):
    """Takes bytes to silos and brings their replies. It reads neither."""

    names: tuple[str, ...]

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """Send to all at once, wait for all, and at most ``timeout`` seconds.

        A silo that went away is waited for until then, and is sent the same request when it is back. There is an entry
        for every request.
        """
        ...

    def close(self) -> None:
        """Let go of what is open; silos are not told."""
        ...


class Direct:
    """Silos in this process, through the same bytes: for tests, and to try a study before it travels.

    Args:
        silos: what answers for each silo, as :meth:`numpyro_fed.remote.site.Site.handle` does.

    >>> Direct({"york": lambda request: request.upper()}).ask({"york": b"hello"}, timeout=1.0)
    {'york': b'HELLO'}
    """

    def __init__(self, silos: Mapping[str, Callable[[bytes], bytes]]) -> None:
        self.silos = dict(silos)
        self.names = tuple(self.silos)

    def ask(self, requests: Mapping[str, bytes], timeout: float) -> dict[str, bytes | Failure]:
        """One after the other; ``timeout`` is not looked at, since nothing can be lost on the way."""
        return {name: self.silos[name](request) for name, request in requests.items()}

    def close(self) -> None:
        """Nothing is open."""
