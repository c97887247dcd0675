"""How replicas that are to be equal become so when some have trained longer than others: they take over everything."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_sdpipe.exchange.buckets import tensors_of
from lightning_sdpipe.exchange.collectives import TakeOver
from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.groups import Replicas
from lightning_sdpipe.p2p import broadcast_bytes
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.sync.synchronizer import Replica


def take_over_furthest(replica: Replica, among: Replicas, reached: int) -> None:
    """All of ``among`` get the parameters of the first of those that have ``reached`` furthest, and if some have not,
    the state of its optimizer and its loss scale too: otherwise equal gradients would be unequal steps from then on.

    Raises:
        WorkerFailedError: a member is gone, or the group's timeout passed.
    """
    pipelines = among.pipelines
    by_pipeline = torch.zeros(len(pipelines), dtype=torch.int64, device=replica.device)
    by_pipeline[pipelines.index(replica.pipeline)] = reached
    dist.all_reduce(by_pipeline, group=among.group)
    furthest = pipelines[int(by_pipeline.argmax())]
    members = tuple(Worker(replica.stage, pipeline) for pipeline in pipelines)
    source = Group(members, tuple(float(p == furthest) for p in pipelines), 0, "pause")
    finish(TakeOver(among).start(tensors_of(replica.parameters), source))
    if replica.progress is None or len({*by_pipeline.tolist()}) == 1:
        return
    own = furthest == replica.pipeline
    state = broadcast_bytes(replica.progress.save() if own else b"", replica.ranks[furthest], among.group)
    if not own:
        replica.progress.load(state)
