"""``python -m lightning_sdpipe.scheduler``: the child process of :mod:`lightning_sdpipe.scheduler.server.process`."""

from __future__ import annotations

import sys

from lightning_sdpipe.scheduler.server.process import serve_parent

if __name__ == "__main__":
    sys.exit(serve_parent())
