"""A server in a thread of the test, and clients that are closed again."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

from lightning_sdpipe.policies import Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler.client.client import SchedulerClient
from lightning_sdpipe.scheduler.server.server import Endpoint, Files, Limits, Server


@contextmanager
def serving(spec: PolicyConfig, num_stages: int, num_pipelines: int, **options: Any) -> Iterator[Server]:
    """A server in a thread of this process; ``options`` are fields of its endpoint, limits and files, or its own."""
    parts = [
        kind(**{field.name: options.pop(field.name) for field in fields(kind) if field.name in options})
        for kind in (Endpoint, Limits, Files)
    ]
    stop, tell = os.pipe()
    with Server(spec, num_stages, num_pipelines, parts[0], limits=parts[1], files=parts[2], **options) as server:
        thread = threading.Thread(target=server.run, args=([stop],))
        thread.start()
        try:
            yield server
        finally:
            os.close(tell)
            thread.join(10)
            os.close(stop)
            assert not thread.is_alive()


@contextmanager
def clients(address: str, *workers: Worker, timeout: float = 20.0, **options: Any) -> Iterator[list[SchedulerClient]]:
    told = {name: options.pop(name) for name in ("on_abort", "on_invitation") if name in options}
    with ExitStack() as stack:
        made = []
        for worker in workers:
            client = SchedulerClient(address, worker, timeout=timeout, **options)
            stack.callback(client.close)
            for name, callback in told.items():
                setattr(client, name, callback)
            made.append(client)
        yield made
