"""Bytes between the hosts of two groups that meet: as PHD-PSGD moves models, and with models moved whole.

Real processes run the real exchanges, and what each hands to its connections with the other host is counted. Headers of
the transport are left out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.exchange.sharded_mean import ShardedMean
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.topology.groups import Replicas
from recipes.suites.processes import run_processes
from recipes.suites.ratios import Row

TIMEOUT_SECONDS = 60.0


class _CountingLinks:
    """A process group that counts what is sent to members of another host."""

    def __init__(self, group: dist.ProcessGroup, rank: int, per_host: int) -> None:
        self._group, self._host, self._per_host = group, rank // per_host, per_host
        self.sent = 0

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        if to // self._per_host != self._host:
            self.sent += sum(tensor.nbytes for tensor in tensors)
        return self._group.send(tensors, to, tag)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return self._group.recv(tensors, source, tag)

    def name(self) -> str:
        return "gloo"


def measure(size: int, elements: int) -> Row:
    """Count the bytes of a meeting of two groups with ``size`` members each, whose models have so many ``elements`` of
    float32."""
    sharded, whole = (
        sum(run_processes(2 * size, _meet, size, elements, how, timeout=TIMEOUT_SECONDS)) for how in (True, False)
    )
    return {"what": "bytes of a meeting", "shape": f"2x{size}", "elements": elements, "phd": sharded, "naive": whole}


def _meet(rank: int, size: int, elements: int, sharded: bool) -> int:
    assert dist.group.WORLD is not None
    links: Any = _CountingLinks(dist.group.WORLD, rank, size)
    replicas = Replicas(links, range(2 * size), 0, rank)
    groups = [list(range(size)), list(range(size, 2 * size))]
    model = torch.full((elements,), float(rank // size))
    members = tuple(Worker(0, pipeline) for pipeline in range(2 * size))
    meeting = Group(members, (1 / len(members),) * len(members), 0, "measured")
    finish(ShardedMean(replicas, groups, sharded).start([model], meeting))
    if not bool((model == 0.5).all()):
        raise RuntimeError("a meeting of models 0 and 1 did not end with 0.5")
    return int(links.sent)
