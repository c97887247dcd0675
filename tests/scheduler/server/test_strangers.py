"""A process of another account of the same machine, which knows the ports of a run and has no key of it."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_sdpipe.membership.elastic_config import ElasticConfig
from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.local_sgd import NoSync
from lightning_sdpipe.scheduler.client.client import SchedulerClient, Start
from lightning_sdpipe.scheduler.client.wire import ask_status
from lightning_sdpipe.scheduler.credentials import (
    WorkerKeys,
    make_keys,
    read_scheduler_keys,
    read_worker_keys,
    write_keys,
)
from lightning_sdpipe.scheduler.server.lifelines import NONCE_BYTES
from tests.scheduler.live_scheduler import serving

NOBODY = 65534
SOON = 1.5  # seconds that a stranger waits for an answer

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="a process of another user id is started by root only")


def as_another_user(work: Callable[[], dict[str, str]]) -> dict[str, str]:
    """What ``work`` returns in a copy of this process that belongs to nobody."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        said = {"failed": "before it said anything"}
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = work()
        except BaseException as error:
            said = {"failed": repr(error)}
        finally:
            os.write(writing, json.dumps(said).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return dict(said)


def outcome(attempt: Callable[[], object]) -> str:
    try:
        return f"got {attempt()}"
    except Exception as error:
        return type(error).__name__


@needs_root
def test_another_account_of_the_machine_gains_nothing_and_the_run_goes_on() -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        scheduler_file, worker_file = write_keys(Path(name))
        keys, own = read_scheduler_keys(scheduler_file), read_worker_keys(worker_file)
        with serving(NoSync(), 1, 2, keys=keys, elastic=ElasticConfig(settle=0.0)) as server:
            member = SchedulerClient(server.address, Worker(0, 0), 100, credentials=own, timeout=600)
            assert isinstance(member.enrol({"model": "a"}), Start)
            lifelines = server.service.lines.port

            def enrol(pipeline: int, incarnation: int, credentials: WorkerKeys | None) -> object:
                client = SchedulerClient(
                    server.address, Worker(0, pipeline), incarnation, credentials=credentials, timeout=SOON
                )
                try:
                    return client.enrol({"model": "a"})
                finally:
                    client.close()

            def stranger() -> dict[str, str]:
                garbage = make_keys()[1]
                found = {
                    "the key": outcome(worker_file.read_bytes),
                    "the scheduler's key": outcome(scheduler_file.read_bytes),
                    "the environment": outcome(Path(f"/proc/{os.getppid()}/environ").read_bytes),
                }
                for name, credentials in (("no key", None), ("a key of its own", garbage)):
                    found[f"status, {name}"] = outcome(
                        lambda c=credentials: ask_status(server.address, credentials=c, timeout=SOON)  # type: ignore[misc]
                    )
                    found[f"enrols, {name}"] = outcome(lambda c=credentials: enrol(1, 200, c))  # type: ignore[misc]
                    found[f"is another, {name}"] = outcome(lambda c=credentials: enrol(0, 100, c))  # type: ignore[misc]
                with socket.create_connection(("127.0.0.1", lifelines), timeout=SOON) as line:
                    line.sendall(os.urandom(NONCE_BYTES))
                return found

            found = as_another_user(stranger)
            assert len(found) == 9, found
            assert {what: how for what, how in found.items() if how not in ("PermissionError", "SchedulerError")} == {}
            members = ask_status(server.address, credentials=own, timeout=600).members
            assert members is not None
            assert members.lives == {0: 100}
            member.put("room/key", b"value", 20)
            assert member.fetch(["room/key"], 20) == (b"value",)
            member.depart(finished=True)
            member.close()
