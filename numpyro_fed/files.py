"""Files that are there whole or not at all."""

import os
import threading
from pathlib import Path


def replace_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file so that at any moment there is the old one or the new one, whole, also after a loss of power."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(partial, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name is on the disk, too
    finally:
        os.close(folder)
