"""``python die_with_parent.py PARENT COMMAND …``: becomes COMMAND, and is killed when the process PARENT ends, for any
reason.

It runs by its path, in an interpreter that imports nothing else, so that it costs some milliseconds. The request to
Linux also holds for the program that takes this process's place.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Become ``command``; never return."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # the parent ended before the request
        os.kill(os.getpid(), signal.SIGKILL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
