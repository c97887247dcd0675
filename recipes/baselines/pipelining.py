"""Training steps of a language model with the 1F1B schedule of ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from recipes.gpu.models import loss_of


def language_step(
    part: nn.Module, device: torch.device, num_micro_batches: int, optimizer: torch.optim.Optimizer
) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return a step that trains this rank's stage of a language model. The step takes a mini-batch, ``input_ids`` and
    ``labels``, and returns the loss on the last rank, 0 on others.

    Args:
        part: the stage, which takes and returns one tensor.
        device: device of the stage.
        num_micro_batches: m.
        optimizer: optimizer of the stage's parameters.
    """
    index, num_stages = dist.get_rank(), dist.get_world_size()  # torch wants stage j on rank j; ours are in reverse
    schedule = Schedule1F1B(PipelineStage(part, index, num_stages, device), num_micro_batches, loss_fn=loss_of)

    def step(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (batch["input_ids"],) if index == 0 else ()
        target = batch["labels"] if index == num_stages - 1 else None
        schedule.step(*given, target=target, losses=losses, return_outputs=False)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return step
