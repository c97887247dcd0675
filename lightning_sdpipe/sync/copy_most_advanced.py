"""How replicas that are to be equal become so when some have trained longer than others: they take over everything."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_sdpipe.exchange.buckets import tensors_of
from lightning_sdpipe.exchange.collectives import TakeOver
from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.p2p import broadcast_bytes, waiting_for
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.sync.synchronizer import Replica
from lightning_sdpipe.topology.groups import Replicas


def copy_most_advanced(replica: Replica, among: Replicas, reached: int) -> None:
    """All of ``among`` get the parameters of the first of those that have ``reached`` furthest, and their averages over
    time; the state of its optimizer and its loss scale too where some differ: otherwise equal gradients would be
    unequal steps from then on. (They do if some had no more data, or have drained their pipelines earlier, and clipped
    by other norms.)

    Raises:
        WorkerFailedError: a member is gone, or the group's timeout passed.
    """
    pipelines, progress = among.pipelines, replica.progress
    known = torch.zeros(2, len(pipelines), dtype=torch.int64)
    known[0, pipelines.index(replica.pipeline)] = reached
    known[1, pipelines.index(replica.pipeline)] = 0 if progress is None else progress.digest()
    known = known.to(replica.device)
    with waiting_for(among.group, "comparing how far replicas have got"):
        dist.all_reduce(known, group=among.group)
    by_pipeline, digests = known.tolist()
    furthest = pipelines[by_pipeline.index(max(by_pipeline))]
    members = tuple(Worker(replica.stage, pipeline) for pipeline in pipelines)
    source = Group(members, tuple(float(p == furthest) for p in pipelines), 0, "pause")
    finish(TakeOver(among).start([*tensors_of(replica.parameters), *replica.averages], source))
    if progress is None or len({*digests}) == 1:
        return
    own = furthest == replica.pipeline
    state = broadcast_bytes(progress.save() if own else b"", replica.ranks[furthest], among.group)
    if not own:
        progress.load(state)
