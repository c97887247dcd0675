"""The loss of a mini-batch on all stages of a pipeline, although it is computed on the last one.

Hooks get it on every rank (``on_train_batch_end``, ``on_before_backward``), and what they decide by it must not differ
between stages. The last stage knows it before its last backward, and sends it before what that computes. So nobody
waits for it who has waited for the gradients. It travels as a float64 with the number of its type, which nobody but the
last stage knows in advance.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_sdpipe import p2p
from lightning_sdpipe.pipeline.link import StageLink

_TAG = 2**31 - 3
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class SharedLoss:
    """One worker's end.

    Args:
        link: of its last stage.
        num_workers: M. The last one holds the last stage.
    """

    def __init__(self, link: StageLink, num_workers: int) -> None:
        self._group, self._device = link.group, link.device
        self._ranks = link.ranks[:num_workers]
        self._is_last = link.stage == len(link.ranks) - 1
        # NCCL knows no tags, so that messages would be mixed up; but it does not keep the host waiting
        self._afterwards = p2p.backend_for(link.device, link.group) != "gloo"
        self._sent: list[p2p.Transfer] = []
        self._parts: list[Tensor] = []
        self._type: torch.dtype | None = None

    def add(self, part: Tensor) -> None:
        """A micro-batch's part of it, on the last stage."""
        self._parts.append(part.detach())

    def exchange(self) -> None:
        """Sends it, when all parts are there, or waits for it; before the last backward."""
        message = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self._is_last:
            total = torch.stack(self._parts).sum()
            message[0], message[1] = total, _TYPES.index(total.dtype)
        self._parts = [message]
        if self._afterwards:
            return
        last = self._ranks[-1]
        if self._is_last:
            others = [rank for rank in self._ranks if rank != last]
            self._sent += [p2p.send([message], rank, self._group, _TAG, f"rank {rank}") for rank in others]
        else:
            p2p.receive([message], last, self._group, _TAG, f"the last stage (rank {last})").wait()

    def take(self) -> Tensor:
        """The loss; after the last backward."""
        (message,), self._parts = self._parts, []
        if self._afterwards:
            dist.broadcast(message, self._ranks[-1], group=self._group)
        if self._type is None or not self._afterwards:  # looking would keep the host waiting
            self._type = _TYPES[int(message[1])]
        return message[0].to(self._type)

    def settle(self) -> None:
        """Waits until the other stages have it."""
        for transfer in self._sent:
            transfer.wait()
        self._sent.clear()
