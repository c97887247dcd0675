"""``python stay_with_child.py``: kills process groups when its standard input ends, as when the supervisor is killed.

The kernel then kills the supervisor's children, but not theirs. A line ``+N`` says that process group N is to be
killed, ``-N`` that it no longer is. The program runs by its path, in an interpreter that imports nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
