"""Make replicas equal after uneven training: all copy the most advanced one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe.exchange.buckets import tensors_of
from lightning_sdpipe.exchange.collectives import TakeOver
from lightning_sdpipe.exchange.moving import finish
from lightning_sdpipe.p2p import broadcast_bytes, waiting_for
from lightning_sdpipe.policies.decisions import Group
from lightning_sdpipe.policies.events import Worker
from lightning_sdpipe.sync.synchronizer import Replica, TrainingState
from lightning_sdpipe.topology.groups import Replicas


def copy_most_advanced(replica: Replica, among: Replicas, reached: int) -> None:
    """Give all of ``among`` the parameters, and their averages over time, of the first replica that has ``reached``
    furthest. Its optimizer's state and its loss scale are copied too where they differ: otherwise equal gradients would
    make unequal steps from then on. (They differ if some replicas had no more data, or drained their pipelines earlier
    and clipped by other norms.)

    Raises:
        WorkerFailedError: a member is gone, or the group's timeout passed.
    """
    tensors = [*tensors_of(replica.parameters), *replica.averages]
    _copy(replica, among, reached, tensors, replica.progress)


def copy_most_advanced_parts(replica: Replica, reached: int) -> None:
    """Do the same as :func:`copy_most_advanced` among all replicas, for each part that has its own replicas; copy
    on other stages follow.

    Raises:
        WorkerFailedError: a member is gone, or the group's timeout passed.
    """
    if replica.shared is None:
        copy_most_advanced(replica, replica.groups.replicas(), reached)
        return
    for part in replica.parts:
        own = [parameter for bucket in part.parameters for parameter in bucket.all_parameters]
        progress = None if replica.progress is None else replica.progress.of(own)
        _copy(replica, part.among, reached, tensors_of(part.parameters), progress)
    replica.shared.make_equal()
    if replica.progress is not None:
        for group, first, copied in replica.shared.copies():
            _follow(replica.progress.of(copied), group, first, replica.device)


def _copy(
    replica: Replica, among: Replicas, reached: int, tensors: Sequence[Tensor], progress: TrainingState | None
) -> None:
    pipelines = among.pipelines
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
    finish(TakeOver(among).start(tensors, source))
    if progress is None or len({*digests}) == 1:
        return
    own = furthest == replica.pipeline
    rank = dist.get_global_rank(among.group, among.ranks[furthest])
    state = broadcast_bytes(progress.save() if own else b"", rank, among.group)
    if not own:
        progress.load(state)


def _follow(progress: TrainingState, group: dist.ProcessGroup, first: int, device: torch.device) -> None:
    """Copy the state of rank ``first`` to the members of ``group``, if they differ."""
    digest = progress.digest()
    digests = torch.tensor([digest, ~digest], device=device)
    with waiting_for(group, "comparing the optimizer's state of shared parameters"):
        dist.all_reduce(digests, dist.ReduceOp.MAX, group=group)
    largest, complement = digests.tolist()
    if largest == ~complement:
        return
    own = dist.get_rank() == first
    state = broadcast_bytes(progress.save() if own else b"", first, group)
    if not own:
        progress.load(state)
