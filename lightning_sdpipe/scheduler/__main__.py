"""``python -m lightning_sdpipe.scheduler``: the child process of :mod:`lightning_sdpipe.scheduler.server.process`.

Reads its configuration as one line of JSON from standard input and ends when that does.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from lightning_sdpipe.errors import ConfigurationError, SchedulerError
from lightning_sdpipe.policies import registry
from lightning_sdpipe.scheduler.credentials import SchedulerKeys
from lightning_sdpipe.scheduler.server.server import Endpoint, Files, Limits, Server
from lightning_sdpipe.scheduler.server.stop_signals import stop_signals


def main() -> int:
    """Serve until standard input ends."""
    # Ctrl-C in a terminal reaches every process; the parent still needs the scheduler while it shuts down.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="scheduler: %(message)s", stream=sys.stderr)
    try:
        configuration = json.loads(_first_line())
        sys.path += [folder for folder in configuration["path"] if folder not in sys.path]
        server = Server(
            registry.from_plain(configuration["policy"]),
            configuration["num_stages"],
            configuration["num_pipelines"],
            Endpoint(configuration["bind"], msgspec.convert(configuration["keys"], SchedulerKeys | None)),
            limits=Limits(configuration["worker_timeout"]),
            files=Files(None if configuration["log"] is None else Path(configuration["log"])),
        )
        with stop_signals(signal.SIGTERM) as stop, server:
            _say({"address": server.address})
            server.run([sys.stdin.fileno(), stop])
    except (ConfigurationError, SchedulerError) as error:
        _say({"error": str(error)})
        return 2
    return 0


def _first_line() -> bytes:
    # Byte by byte, since a buffered reader could swallow what tells that the parent is gone.
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:
            raise ConfigurationError(
                "the scheduler process got no configuration; it is started by the training, not by hand: "
                "use `sdpipe scheduler`"
            )
        line += byte
    return line


def _say(answer: dict[str, str]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
