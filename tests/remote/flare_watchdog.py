"""Ends the processes of a deployment when whoever started them is gone, or their time is over.

Started with a mark and a number of seconds, and a pipe to its standard input that nobody writes to.
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

MARK = "NUMPYRO_FED_TEST_DEPLOYMENT"  # an environment variable, which processes inherit


def marked(mark: str, word: str = "") -> list[int]:
    """Processes that inherited a mark and whose command has a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                if word.encode() in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
        except OSError:  # it has just ended, or is another user's
            continue
    return sorted(found)


def end(mark: str) -> None:
    """Kill processes with a mark, until there is none: they may start others meanwhile."""
    for _ in range(50):
        left = marked(mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.1)


if __name__ == "__main__":
    select.select([sys.stdin], [], [], float(sys.argv[2]))
    end(sys.argv[1])
