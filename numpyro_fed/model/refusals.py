"""What a model says when it cannot be traced, and whether it or JAX said so."""

import dis
import traceback

THEIRS = ("jax", "jaxlib", "numpyro", "numpy", "flax", "numpyro_fed")  # packages in which a model's shapes may not fit


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def told(error: Exception) -> str:
    """An error in one line: its kind and what it says, or, of a bare ``assert``, the line that failed."""
    said = first_line(error)
    if not said and error.__traceback__ is not None:
        said = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return f"{type(error).__name__}: {said}"


def models_own(error: Exception) -> bool:
    """Whether a line of the model raised it (``raise``, ``assert``, a dict without the key), not JAX about shapes.

    JAX takes its own frames out of tracebacks, so that the last one left may be the model's for its errors, too: these
    are of three kinds, and then the model's line calls a function where its own error has a ``raise``.
    """
    frame = error.__traceback__
    if frame is None:
        return False
    while frame.tb_next is not None:
        frame = frame.tb_next
    if frame.tb_frame.f_globals.get("__name__", "").partition(".")[0] in THEIRS:
        return False
    code, last = frame.tb_frame.f_code.co_code, frame.tb_lasti
    return dis.opname[code[last]] == "RAISE_VARARGS" or not isinstance(error, TypeError | ValueError | IndexError)
