"""How the workers of a run find its scheduler: rank 0 starts one and tells the others, or it runs already."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch.distributed as dist

from lightning_sdpipe import p2p
from lightning_sdpipe.mesh import Mesh
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.policies.policy import PolicyConfig
from lightning_sdpipe.scheduler.client import Failure, SchedulerClient
from lightning_sdpipe.scheduler.credentials import WorkerKeys, read_worker_keys
from lightning_sdpipe.scheduler.process import EmbeddedScheduler


@dataclass(frozen=True)
class SchedulerAddress:
    """Where the scheduler is, and what opens it."""

    address: str
    keys: WorkerKeys | None


def standing_scheduler(address: str | None, key_file: str | Path | None) -> SchedulerAddress | None:
    """The scheduler that somebody else runs: as given, or as SDPIPE_SCHEDULER and SDPIPE_KEY_FILE name it.

    Raises:
        ConfigurationError: the key file cannot be read, or others can read it.
    """
    address = address or os.environ.get("SDPIPE_SCHEDULER")
    if address is None:
        return None
    key_file = key_file or os.environ.get("SDPIPE_KEY_FILE")
    return SchedulerAddress(address, read_worker_keys(Path(key_file)) if key_file else None)


def start_scheduler(
    policy: PolicyConfig, mesh: Mesh, bind: str, log: Path | None = None
) -> tuple[EmbeddedScheduler | None, SchedulerAddress]:
    """Rank 0 starts the run's own scheduler, which writes a ``log``; every rank must call it and gets its address.

    Its keys, which it has when ``bind`` is not loopback, go through the run's process group: not through the command
    line, the environment or a file.
    """
    scheduler, told = None, b""
    if dist.get_rank() == 0:
        scheduler = EmbeddedScheduler.start(policy, mesh.num_stages, mesh.num_pipelines, bind, log=log)
        keys = msgspec.to_builtins(scheduler.credentials)
        told = json.dumps({"address": scheduler.address, "keys": keys}).encode()
    everybody = dist.group.WORLD
    assert everybody is not None
    answer = json.loads(p2p.broadcast_bytes(told, 0, everybody))
    return scheduler, SchedulerAddress(answer["address"], msgspec.convert(answer["keys"], WorkerKeys | None))


def connect(
    scheduler: SchedulerAddress,
    mesh: Mesh,
    timeout: float,
    on_abort: Callable[[Failure], None],
    embedded: bool = False,
) -> SchedulerClient:
    """This rank's line to the scheduler; an ``embedded`` one lives as long as rank 0, and is not restarted.

    Raises:
        SchedulerError: it does not answer, the keys do not fit, it speaks another version, or serves another mesh.
    """
    worker = Worker(*mesh.locate(dist.get_rank()))
    client = SchedulerClient(
        scheduler.address,
        worker,
        mesh=(mesh.num_stages, mesh.num_pipelines),
        timeout=timeout,
        credentials=scheduler.keys,
        on_abort=on_abort,
        host=Worker(*mesh.locate(0)) if embedded else None,
    )
    try:
        client.greet()
    except BaseException:
        client.close()
        raise
    return client
