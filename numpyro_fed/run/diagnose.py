"""What a run raises and warns of."""

from typing import Any


class NonFiniteError(FloatingPointError):
    """The loss stopped being a number. ``fit`` is the last good state."""

    fit: Any = None


class VerdictWarning(UserWarning):
    """The fit itself doubts its posterior; the message says why and what to type."""
