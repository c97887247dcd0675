"""A server in a thread of the test, and clients that are closed again."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields
from typing import Any

from lightning_sdpipe.errors import SchedulerError, WorkerFailedError
from lightning_sdpipe.membership.members import FIXED
from lightning_sdpipe.policies import Group, Worker
from lightning_sdpipe.policies.all_reduce import AllReduceModels
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.scheduler.credentials import own_keys, read_scheduler_keys, read_worker_keys
from lightning_sdpipe.scheduler.server.server import Endpoint, Files, Server
from tests.patience import limit


@contextmanager
def serving(spec: PolicyConfig, num_stages: int, num_pipelines: int, **options: Any) -> Iterator[Server]:
    """A server in a thread of this process; ``options`` are fields of its endpoint, limits and files, or its own."""
    parts = [
        kind(**{field.name: options.pop(field.name) for field in fields(kind) if field.name in options})
        for kind in (Endpoint, Files)
    ]
    stop, tell = os.pipe()
    with Server(spec, num_stages, num_pipelines, parts[0], files=parts[1], **options) as server:
        thread = threading.Thread(target=server.run, args=([stop],))
        thread.start()
        try:
            yield server
        finally:
            os.write(tell, b"\0")
            thread.join()
            os.close(tell)
            os.close(stop)


class OrdinaryClient(SchedulerClient):
    """A worker of a run of fixed pipelines, which enrols when it greets the scheduler."""

    def __init__(self, address: str, worker: Worker, job: int, *, timeout: float | None = None, **options: Any) -> None:
        timeout = timeout or limit().total_seconds()
        super().__init__(address, worker, job, timeout=timeout, **options)

    def greet(self) -> None:
        if self.policy is None:
            super().greet()
            self.enrol(FIXED)

    def close(self, finished: bool = True) -> None:
        if self.policy is not None and self.stop is None:
            with suppress(SchedulerError, WorkerFailedError):
                self.depart(finished=finished, timeout=1.0)
        super().close()


@contextmanager
def clients(
    address: str,
    *workers: Worker,
    on_invitation: Callable[[Group, int | None], None] | None = None,
    joins: bool = False,
    **options: Any,
) -> Iterator[list[OrdinaryClient]]:
    """Of one job, which have joined if they are to; ``options`` are those of :class:`SchedulerClient`."""
    incarnation = 1 + secrets.randbits(60)
    with ExitStack() as stack:
        made = []
        for worker in workers:
            client = OrdinaryClient(address, worker, incarnation, **options)
            stack.callback(client.close)
            client.on_invitation = on_invitation
            made.append(client)
        for client in made if joins else ():
            client.join()
        yield made


@contextmanager
def two_of_this_account(**options: Any) -> Iterator[tuple[Server, list[OrdinaryClient]]]:
    """Two pipelines of one stage, and their scheduler, with the keys of this account; see :func:`serving`."""
    scheduler_file, worker_file = own_keys()
    keys, credentials = read_scheduler_keys(scheduler_file), read_worker_keys(worker_file)
    with (
        serving(AllReduceModels(), 1, 2, keys=keys, **options) as server,
        clients(server.address, Worker(0, 0), Worker(0, 1), credentials=credentials) as both,
    ):
        yield server, both
