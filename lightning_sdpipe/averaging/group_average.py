"""Averaging among the members of a group over links that already exist.

A group of k workers changes from iteration to iteration, and making a communicator for it costs more than the
averaging (tens of milliseconds on gloo). So its members reduce and gather with point-to-point transfers inside the
process group of their stage: each averages one k-th of the buffer, which the others send it, and sends them the
result. Each sends 2 (k − 1) / k times the buffer, as in a ring, but in two steps instead of 2 (k − 1), which is what
counts where buffers are short or processes wait for a core.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import p2p

PIECE = 2**23
"""Elements that are averaged at once: the members' parts of a piece take memory besides the buffer."""


def group_average(
    buffer: Tensor,
    members: Sequence[int],
    weights: Sequence[float],
    group: dist.ProcessGroup,
    tag: int,
) -> float:
    """Replaces ``buffer`` by the members' weighted mean, in place: the same on all of them, bit for bit. Every member
    must call it with equal arguments.

    Args:
        buffer: contiguous 1-D tensor, of equal length on every member.
        members: global ranks of the group, in an order that all members share; this process is one of them.
        weights: of each member, adding up to 1.
        group: a process group that holds all members.
        tag: equal on all members and different for groups that could overlap in time: the scheduler's sequence number.

    Returns:
        Seconds until the first parts of all other members were there: what was waited for them, nearly.

    Raises:
        WorkerFailedError: a member broke off or the process group's timeout passed.
    """
    if len(members) == 1:
        return 0.0
    came, *_ = [_average(piece, members, weights, group, tag) for piece in torch.split(buffer, PIECE)]
    return came


def _average(
    buffer: Tensor, members: Sequence[int], weights: Sequence[float], group: dist.ProcessGroup, tag: int
) -> float:
    here = dist.get_rank()
    position = members.index(here)
    others = [*members[position + 1 :], *members[:position]]  # so that each begins with another one
    chunks = dict(zip(members, torch.tensor_split(buffer, len(members)), strict=True))
    weight = dict(zip(members, weights, strict=True))
    own = chunks.pop(here)
    parts = {rank: torch.empty_like(own) for rank in others}

    start = time.perf_counter()
    p2p.exchange({rank: chunks[rank] for rank in others}, parts, group, tag)
    came = time.perf_counter() - start
    own.mul_(weight[here])
    for rank in others:
        own.add_(parts[rank], alpha=weight[rank])
    p2p.exchange(dict.fromkeys(others, own), {rank: chunks[rank] for rank in others}, group, tag)
    return came
