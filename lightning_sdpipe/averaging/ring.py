"""Averaging among the members of a group over links that already exist.

A group of k workers changes from iteration to iteration, and making a communicator for it costs more than the
averaging (tens of milliseconds on gloo). So its members run a ring all-reduce, reduce-scatter and then all-gather
(Patarasuk and Yuan 2009), with point-to-point transfers inside the process group of their stage. Each member sends
2 (k − 1) / k times the buffer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import p2p


def ring_average(
    buffer: Tensor,
    members: Sequence[int],
    weights: Sequence[float],
    group: dist.ProcessGroup,
    tag: int,
) -> float:
    """Replaces ``buffer`` by the members' weighted mean, in place. Every member must call it with equal arguments.

    Args:
        buffer: contiguous 1-D tensor, of equal length on every member.
        members: global ranks of the group, in an order that all members share; this process is one of them.
        weights: of each member, adding up to 1.
        group: a process group that holds all members.
        tag: equal on all members and different for groups that could overlap in time: the scheduler's sequence number.

    Returns:
        Seconds until the first part from the previous member was there: what was waited for it, nearly.

    Raises:
        WorkerFailedError: a neighbour in the ring broke off or the process group's timeout passed.
    """
    size = len(members)
    if size == 1:
        return 0.0
    position = members.index(dist.get_rank())
    following, previous = members[(position + 1) % size], members[(position - 1) % size]
    chunks = torch.tensor_split(buffer, size)
    incoming = torch.empty_like(chunks[0])  # the first chunk is the longest
    buffer.mul_(weights[position])

    def exchange(outgoing: Tensor, into: Tensor) -> None:
        sending = p2p.send(
            [outgoing], following, group, tag, f"rank {following}, the next in the group {list(members)}"
        )
        p2p.receive([into], previous, group, tag, f"rank {previous}, the previous in the group {list(members)}").wait()
        sending.wait()

    start = came = time.perf_counter()
    for step in range(size - 1):
        target = chunks[(position - step - 1) % size]
        part = incoming[: target.numel()]
        exchange(chunks[(position - step) % size], part)
        if step == 0:
            came = time.perf_counter()
        target.add_(part)
    for step in range(size - 1):
        exchange(chunks[(position + 1 - step) % size], chunks[(position - step) % size])
    return came - start
