"""The scheduler as a child process, so that it takes no time from the training of the rank that starts it.

Its configuration, keys included, goes to the child's standard input as one line of JSON, never on the command
line; the address it listens at comes back as one line. The child ends when its standard input does, so it never
outlives the process that started it, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from lightning_sdpipe.errors import SchedulerError
from lightning_sdpipe.policies import registry
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler.credentials import WorkerKeys, make_keys

START_TIMEOUT = 30.0
STOP_TIMEOUT = 5.0


class EmbeddedScheduler:
    """A running scheduler; made by :meth:`start`, ended by :meth:`close`."""

    def __init__(self, process: subprocess.Popen[bytes], address: str, credentials: WorkerKeys) -> None:
        self.address = address
        self.credentials = credentials
        """What clients need besides the address."""
        self._process = process

    @classmethod
    def start(
        cls,
        policy: PolicyConfig,
        num_stages: int,
        num_pipelines: int,
        bind: str = "tcp://127.0.0.1:*",
        *,
        worker_timeout: float = 30.0,
        log: Path | None = None,
        timeout: float = START_TIMEOUT,
    ) -> EmbeddedScheduler:
        """Start the child, with fresh keys, and wait until it listens.

        It imports a policy of the user's own from where this process would.
        """
        registry.build(policy, num_stages, num_pipelines)  # refuse here what the child would refuse
        keys, credentials = make_keys()
        configuration = {
            "policy": registry.to_plain(policy),
            "num_stages": num_stages,
            "num_pipelines": num_pipelines,
            "bind": bind,
            "keys": msgspec.to_builtins(keys),
            "worker_timeout": worker_timeout,
            "log": None if log is None else str(log.resolve()),
            "path": [os.path.abspath(folder) for folder in sys.path],  # "" is the working directory
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_sdpipe.scheduler"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # poll() must see what is left unread
            env=os.environ | {"PYTHONPATH": _python_path()},
        )
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(configuration).encode() + b"\n")
            process.stdin.flush()
            answer = _read_line(process, timeout)
        except BaseException as error:
            _end(process)
            if isinstance(error, OSError):
                raise SchedulerError(f"the scheduler process ended before it listened at {bind}") from error
            raise
        if "address" not in answer:
            _end(process)
            raise SchedulerError(answer.get("error", f"the scheduler process said {answer!r}"))
        return cls(process, answer["address"], credentials)

    @property
    def pid(self) -> int:
        """The child's process number."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """False once the child ended."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the child and wait for it; safe to call twice."""
        _end(self._process)

    def __enter__(self) -> EmbeddedScheduler:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _python_path() -> str:
    """Where the child finds this package, whatever the working directory is by now."""
    here = str(Path(__file__).resolve().parents[3])
    return os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])


def _read_line(process: subprocess.Popen[bytes], timeout: float) -> dict[str, Any]:
    assert process.stdout is not None
    until = time.monotonic() + timeout
    line = b""
    poll = select.poll()  # unlike select(), it takes any descriptor
    poll.register(process.stdout, select.POLLIN | select.POLLHUP)
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            raise SchedulerError(
                f"the scheduler process (pid {process.pid}) did not start within {timeout:g} s; "
                "the machine may be overloaded: try again or raise the timeout"
            )
        byte = process.stdout.read(1)
        if not byte:
            raise SchedulerError(
                f"the scheduler process (pid {process.pid}) ended before it listened; its message is above"
            )
        line += byte
    answer = json.loads(line)
    if not isinstance(answer, dict):
        raise SchedulerError(f"the scheduler process said {answer!r} instead of its address")
    return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None and not process.stdin.closed:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
